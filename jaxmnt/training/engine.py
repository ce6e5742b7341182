"""Executes a schedule: all microbatches of a step through all stages, inside the step's shard_map.

One program runs on all stages. It is a loop over the schedule's ticks, in each of which a stage does what the table
says for it, hands its output to the next stage and its input's gradient to the one before. A phase of a tick in which a
stage is idle is skipped by a condition, which all devices of a stage decide alike, so that they may talk to each other
inside. Without a pipeline this is gradient accumulation: one stage, one tick a microbatch, nothing idle, nothing to
remember.

Splitting backward in two, as zero-bubble schedules do (Qi et al. 2023, arXiv:2401.10241), would be a third phase in the
table: `Layers.backward` would give the input's gradient and keep (activations, output gradient) in a second buffer of
slots, from which the third phase computes the weights' gradients in ticks that are idle now.

Shapes: A microbatches, B rows of one, L length, S a device's piece of the length, D model.
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxmnt.models.contract import LayerGroup, Params
from jaxmnt.models.layers import zeros_after
from jaxmnt.parallel import collectives
from jaxmnt.parallel.sharding import is_axes, unstacked
from jaxmnt.training.embed_head import EmbedAndHead
from jaxmnt.training.loss import LossSums, no_loss
from jaxmnt.training.noise import SmallBatches, small_batches, squares
from jaxmnt.training.pipeline_schedule import PhaseTable, PipelineSchedule
from jaxmnt.training.remat import Residuals
from jaxmnt.training.spec import Batch, StepSpec
from jaxmnt.training.stage import Layers, Rows, microbatch_rows
from jaxmnt.training.trained import select

FORWARD, BACKWARD, LOSS, ENTER, LEAVE = "stage_forward", "stage_backward", "loss", "enter", "leave"
"""Scopes in the compiled program of what a condition may skip."""


RowKeys = Callable[[jax.Array], jax.Array | None]
"""The random keys of a microbatch's rows."""

TickPlan = dict[str, jax.Array]
"""The table's line of a tick."""

Tick = Callable[[Any, TickPlan], tuple[Any, None]]


@dataclass(frozen=True)
class Table:
    """A schedule as arrays that a loop over ticks can read; -1 is nothing."""

    forward: np.ndarray
    """[tick, stage, (microbatch, chunk, slot)]"""
    backward: np.ndarray
    """[tick, stage, (microbatch, chunk, slot)]"""
    enter: np.ndarray
    """[tick]: the microbatch whose embedding goes into the first stage."""
    loss: np.ndarray
    """[tick]: the microbatch whose output comes out of the last stage."""
    leave: np.ndarray
    """[tick]: the microbatch whose input's gradient comes out of the first stage."""
    pending: np.ndarray
    """[tick, (write, read)]: where the loss's gradient waits for the last stage's backward."""
    slots: int
    pending_slots: int

    def rows(self) -> dict[str, np.ndarray]:
        names = ("forward", "backward", "enter", "loss", "leave", "pending")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def of(cls, schedule: PipelineSchedule) -> "Table":
        last = schedule.chunks - 1
        if not schedule.backward:
            none = np.full(schedule.ticks, -1)
            forward = _phase_array(schedule.forward, [[0] * schedule.stages] * schedule.ticks)
            enter, loss = _passing(forward, 0, 0), _passing(forward, -1, last)
            return cls(forward, forward, enter, loss, none, none, 0, 0)
        writes, reads, slots = schedule.slots()
        forward, backward = _phase_array(schedule.forward, writes), _phase_array(schedule.backward, reads)
        loss, used = _passing(forward, -1, last), _passing(backward, -1, last)
        at_once = bool((loss == used).all())
        # A microbatch's own number serves as its slot: schedules that wait at all wait for all.
        pending = np.maximum(np.stack([loss, used], axis=1), 0)
        return cls(
            forward, backward, _passing(forward, 0, 0), loss, _passing(backward, 0, 0), pending,
            slots, 0 if at_once else schedule.microbatches,
        )  # fmt: skip


def _phase_array(phase: PhaseTable, slots: list[list[int]]) -> np.ndarray:
    return np.array(
        [
            [(-1, 0, 0) if work is None else (*work, slot) for work, slot in zip(row, slot_row, strict=True)]
            for row, slot_row in zip(phase, slots, strict=True)
        ],
        np.int32,
    )


def _passing(phase: np.ndarray, stage: int, chunk: int) -> np.ndarray:
    """[tick]: the microbatch that a stage works on in this chunk."""
    return np.where(phase[:, stage, 1] == chunk, phase[:, stage, 0], -1)


class Results(NamedTuple):
    """Of all microbatches of this batch shard, on this device."""

    sums: LossSums
    layers: dict[str, Any]
    """What the layers of each group returned as sums, stacked as the group is placed: this device's part of them."""
    gradients: Params
    squares: jax.Array | None
    """Of this device's gradients of small batches, if they are asked for."""


def loss_and_gradients(spec: StepSpec, params: Params, buffers: Params, batch: Batch, row_keys: RowKeys) -> Results:
    """The summed loss of this batch shard's rows, and this device's gradients of it, in float32.

    `row_keys` gives the random keys of a microbatch's rows. Gradients are summed over the axes that weights are
    gathered over, and not yet over those that they are replicated over.
    """
    training = _Training(spec, params, buffers, batch, row_keys, spec.schedule)
    end = training.run(training.tick, training.start(), training.last_tick)
    gradients, small, found = end.gradients, training.small, end.squares
    if small is not None and not small.of_first_microbatch:
        found = squares(spec, small, gradients)
    if spec.zero == 1:
        gradients = collectives.reshard(gradients, spec.trained_axes, spec.placement, spec.reduce_dtype)
    return Results(end.sums, end.layer_sums, gradients, found)


Found = TypeVar("Found")


class Glance(NamedTuple):
    """What can be known of a step without computing anything, on a device."""

    residuals: dict[str, Residuals]
    """The places for what forwards leave for their backwards: by group, for all slots."""
    gathered_in_float8: dict[str, dict[int, list[bool]]]
    """By group and place in the pattern, which of the parameters."""


def glance(spec: StepSpec, params: Params, buffers: Params) -> Glance:
    """`params` and `buffers` are abstract, as they are placed."""

    def look(training: _Training) -> Glance:
        gathered = {name: layers.gathered_in_float8 for name, layers in training.layers.items()}
        return Glance(training.start().residuals, gathered)

    return _looked_at(spec, params, buffers, look)


def float8_products(spec: StepSpec, params: Params, buffers: Params) -> tuple[int, int]:
    """Returns how many products of the layers' projections are in float8, and how many there are. `params` and
    `buffers` are abstract, as they are placed."""

    def look(training: _Training) -> list[tuple[int, int]]:
        x_BSD, rows = training.nothing(), training.layer_rows(jnp.int32(0))
        return [layers.products(x_BSD, rows) for layers in training.layers.values()]

    counts = _looked_at(spec, params, buffers, look)
    return sum(in_float8 for in_float8, _ in counts), sum(products for _, products in counts)


def _looked_at(spec: StepSpec, params: Params, buffers: Params, look: Callable[["_Training"], Found]) -> Found:
    """Returns what `look` finds in a step that is traced on a device and not computed."""
    found: list[Found] = []

    def local(params: Params, buffers: Params, batch: Batch) -> jax.Array:
        found.append(look(_Training(spec, params, buffers, batch, lambda _: None, spec.schedule)))
        return jnp.zeros(())

    split = lambda tree: jax.tree.map(spec.placement.spec, tree, is_leaf=is_axes)
    definition = spec.definition
    function = jax.shard_map(
        local, mesh=spec.placement.mesh, out_specs=jax.sharding.PartitionSpec(), check_vma=False,
        in_specs=(split(definition.axes), split(definition.buffer_axes), split(spec.row_axes)),
    )  # fmt: skip
    jax.eval_shape(function, params, buffers, spec.abstract_rows())
    return found[0]


def loss(spec: StepSpec, params: Params, buffers: Params, batch: Batch, schedule: PipelineSchedule) -> LossSums:
    """The summed loss of this batch shard's rows, by a schedule without backward."""
    evaluation = _Evaluation(spec, params, buffers, batch, lambda _: None, schedule)
    return evaluation.run(evaluation.tick, (evaluation.nothing(), no_loss()))[1]


class _Run:
    """What both loops share: this device's stage, its rows and its weights."""

    def __init__(
        self,
        spec: StepSpec,
        params: Params,
        buffers: Params,
        batch: Batch,
        row_keys: RowKeys,
        schedule: PipelineSchedule,
    ):
        self.spec, self.schedule, self.table = spec, schedule, Table.of(schedule)
        self.alone = schedule.stages == 1
        self.stage = 0 if self.alone else collectives.stage_index()
        self._row_keys = row_keys
        fold = lambda field: field.reshape(-1, spec.microbatch_rows, *field.shape[1:])
        self._fields = {name: fold(field) for name, field in batch.items()}
        once = spec.zero < 3
        self.stored = params
        self.params = _gathered_once(spec, params) if once else params
        self.layers = {group.name: self._layers(group, buffers, whole=once) for group in spec.definition.groups}
        self.embed_head = EmbedAndHead(spec, self.params, whole=once)
        if spec.float8 and spec.config.train.float8_gather and not once:
            for layers in self.layers.values():
                layers.gather_in_float8(self.nothing(), self.layer_rows(jnp.int32(0)))

    def _layers(self, group: LayerGroup, buffers: Params, *, whole: bool) -> Layers:
        slots = self.spec.slots[group.name]
        order = np.array([[-1 if unit is None else unit for unit in row] for row in slots])
        own, depth = jnp.asarray(order)[self.stage], order.shape[1] // self.schedule.chunks
        return Layers(
            self.spec, group, self.params[group.name], buffers.get(group.name, {}), own, depth,
            full=bool((order >= 0).all()), whole=whole, ahead=self.spec.prefetch,
        )  # fmt: skip

    def run(self, tick: Tick, start: Any, last_tick: Tick | None = None) -> Any:
        """What `tick` makes of `start` over all ticks, the last of which may be another."""
        rows, ticks = self.table.rows(), self.schedule.ticks
        if ticks > 1:
            looped = ticks if last_tick is None else ticks - 1
            start = jax.lax.scan(tick, start, jax.tree.map(lambda array: jnp.asarray(array[:looped]), rows))[0]
            if last_tick is None:
                return start
        return (last_tick or tick)(start, jax.tree.map(lambda array: jnp.asarray(array[-1]), rows))[0]

    def rows(self, microbatch: jax.Array) -> Batch:
        pick = lambda field: jax.lax.dynamic_index_in_dim(field, jnp.maximum(microbatch, 0), keepdims=False)
        return jax.tree.map(pick, self._fields)

    def layer_rows(self, microbatch: jax.Array) -> Rows:
        microbatch = jnp.maximum(microbatch, 0)
        return microbatch_rows(self.spec, self.rows(microbatch), self._row_keys(microbatch))

    def nothing(self) -> jax.Array:
        """Zeros [B, S, D] like what stages hand to each other."""
        spec = self.spec
        length = spec.placement.local_length(spec.config.data.sequence_length)
        return jnp.zeros((spec.microbatch_rows, length, spec.config.model.hidden_size), spec.dtype)

    def entering(self, row: TickPlan, chunk: jax.Array, arriving_BSD: jax.Array) -> jax.Array:
        """A stage's input: of the first stage's first chunk the embedding, else what arrived."""
        embed = lambda: self.embed_head.embed(self.rows(row["enter"]))
        x_BSD = _when(self.table.enter, row["enter"], ENTER, None, embed, lambda: arriving_BSD)
        return x_BSD if self.alone else jnp.where((self.stage == 0) & (chunk == 0), x_BSD, arriving_BSD)

    def handed_on(self, x_BSD: jax.Array, *, forward: bool) -> jax.Array:
        """What arrives when every stage hands on its x."""
        if self.alone:
            return x_BSD
        circular = self.schedule.chunks > 1
        return collectives.shift_stage(x_BSD, self.spec.placement, forward=forward, circular=circular)


class _Evaluation(_Run):
    def tick(self, carry: tuple[jax.Array, LossSums], row: TickPlan) -> tuple[tuple[jax.Array, LossSums], None]:
        arriving_BSD, sums = carry
        microbatch, chunk, _ = row["forward"][self.stage]
        x_BSD = self.entering(row, chunk, arriving_BSD)
        y_BSD, rows = x_BSD, self.layer_rows(microbatch)
        when = functools.partial(_when, self.table.forward[..., 0], microbatch, FORWARD)
        for layers in self.layers.values():
            y_BSD = layers.evaluate(y_BSD, chunk, rows, when)
        leaving = lambda: _sum(sums, self.embed_head.loss(y_BSD, self.rows(row["loss"])))
        sums = _when(self.table.loss, row["loss"], LOSS, None, leaving, lambda: sums)
        return (self.handed_on(y_BSD, forward=True), sums), None


class _Carry(NamedTuple):
    """What goes from tick to tick."""

    arriving: jax.Array  # [B, S, D] from the stage before
    returning: jax.Array  # [B, S, D] from the next stage: a gradient
    residuals: dict[str, Residuals]  # what forwards of each group left for their backwards, by slot
    pending: jax.Array  # [slots, B, S, D]: gradients of the loss that wait for the last stage's backward
    gradients: Params
    sums: LossSums
    layer_sums: dict[str, Any]
    squares: jax.Array | None  # of the first microbatch's gradients, if they are asked for


class _Training(_Run):
    @functools.cached_property
    def small(self) -> SmallBatches | None:
        return small_batches(self.spec)

    def start(self) -> _Carry:
        nothing = self.nothing()
        rows = self.layer_rows(jnp.int32(0))
        empty = {name: layers.empty(self.table.slots, nothing, rows) for name, layers in self.layers.items()}
        pending = jnp.zeros((self.table.pending_slots, *nothing.shape), nothing.dtype)
        # With ZeRO 1 gradients are added up whole, else in the pieces of the stored parameters.
        shapes = self.params if self.spec.zero == 1 else self.stored
        shapes = select(shapes, self.spec.trained_axes)
        gradients = jax.tree.map(lambda one: jnp.zeros(one.shape, jnp.float32), shapes)
        residuals = {name: one[0] for name, one in empty.items()}
        layer_sums = {name: one[1] for name, one in empty.items()}
        of_first = self.small is not None and self.small.of_first_microbatch
        none_yet = jnp.zeros((), jnp.float32) if of_first else None
        return _Carry(nothing, nothing, residuals, pending, gradients, no_loss(), layer_sums, none_yet)

    @property
    def last_tick(self) -> Tick | None:
        """If it is another: one in which gradients are summed over replicas while backward goes on."""
        if not any(map(self.spec.is_reduced_early, jax.tree.leaves(self.spec.trained_axes, is_leaf=is_axes))):
            return None
        if self.schedule.ticks == 1:
            return functools.partial(self.tick, last=True)

        def after_others(carry: _Carry, row: TickPlan) -> tuple[_Carry, None]:
            # Else their residuals would be there at the same time, and what they have gathered would be kept for it.
            carry, row, params = jax.lax.optimization_barrier((carry, row, self.params))
            return self._with_weights(params).tick(carry, row, last=True)

        return after_others

    def _with_weights(self, params: Params) -> "_Training":
        """The same with a copy of its weights."""
        other = copy.copy(self)
        other.params = params
        other.layers = {name: layers.with_params(params[name]) for name, layers in self.layers.items()}
        other.embed_head = EmbedAndHead(self.spec, params, whole=False)
        return other

    def tick(self, carry: _Carry, row: TickPlan, *, last: bool = False) -> tuple[_Carry, None]:
        y_BSD, carry = self._forward(carry, row)
        y_gradient_BSD, carry = self._loss(carry, row, y_BSD)
        y_gradient_BSD, carry = self._wait(carry, row, y_gradient_BSD)
        x_gradient_BSD, carry = self._backward(carry, row, y_gradient_BSD, last)
        carry = self._squared(self._leave(carry, row, x_gradient_BSD), row)
        arriving_BSD = self.handed_on(y_BSD, forward=True)
        returning_BSD = self.handed_on(x_gradient_BSD, forward=False)
        return carry._replace(arriving=arriving_BSD, returning=returning_BSD), None

    def _forward(self, carry: _Carry, row: TickPlan) -> tuple[jax.Array, _Carry]:
        microbatch, chunk, slot = row["forward"][self.stage]
        y_BSD, rows = self.entering(row, chunk, carry.arriving), self.layer_rows(microbatch)
        when = functools.partial(_when, self.table.forward[..., 0], microbatch, FORWARD)
        residuals, sums = dict(carry.residuals), dict(carry.layer_sums)
        for name, layers in self.layers.items():
            y_BSD, residuals[name], sums[name] = layers.forward(
                y_BSD, chunk, rows, residuals[name], slot, sums[name], when
            )
        return y_BSD, carry._replace(residuals=residuals, layer_sums=sums)

    def _loss(self, carry: _Carry, row: TickPlan, y_BSD: jax.Array) -> tuple[jax.Array, _Carry]:
        """The gradient of what comes out of the last stage, in the tick in which it does."""

        def leaving() -> tuple[LossSums, jax.Array, Params]:
            sums, y_gradient_BSD, new = self.embed_head.loss_and_gradients(y_BSD, self.rows(row["loss"]))
            return _sum(carry.sums, sums), y_gradient_BSD, self._added(carry.gradients, new)

        unchanged = {name: carry.gradients[name] for name in self.spec.definition.last}
        stay = lambda: (carry.sums, jnp.zeros_like(y_BSD), unchanged)
        sums, y_gradient_BSD, new = _when(self.table.loss, row["loss"], LOSS, None, leaving, stay)
        return y_gradient_BSD, carry._replace(sums=sums, gradients=carry.gradients | new)

    def _wait(self, carry: _Carry, row: TickPlan, y_gradient_BSD: jax.Array) -> tuple[jax.Array, _Carry]:
        """The loss's gradient for the last stage's backward, which comes later if the schedule says so."""
        if not self.table.pending_slots:
            return y_gradient_BSD, carry
        write, read = row["pending"]
        new = jnp.where(row["loss"] >= 0, y_gradient_BSD, carry.pending[write])
        pending = carry.pending.at[write].set(new)
        return pending[read], carry._replace(pending=pending)

    def _backward(
        self, carry: _Carry, row: TickPlan, y_gradient_BSD: jax.Array, last: bool
    ) -> tuple[jax.Array, _Carry]:
        microbatch, chunk, slot = row["backward"][self.stage]
        rows, gradients = self.layer_rows(microbatch), dict(carry.gradients)
        if self.alone:
            y_gradient_BSD, gradients = self._after_head(y_gradient_BSD, gradients)
        else:
            is_last = (self.stage == self.schedule.stages - 1) & (chunk == self.schedule.chunks - 1)
            y_gradient_BSD = jnp.where(is_last, y_gradient_BSD, carry.returning)
        if self.schedule.ticks == 1:  # not carried from another: they need no room before, nor beside the head's
            late = lambda like: zeros_after(y_gradient_BSD, like)
            gradients |= jax.tree.map(late, {name: gradients[name] for name in self.layers})
        when = functools.partial(_when, self.table.backward[..., 0], microbatch, BACKWARD)
        x_gradient_BSD = y_gradient_BSD
        for name, layers in reversed(self.layers.items()):
            x_gradient_BSD, gradients[name] = layers.backward(
                x_gradient_BSD, chunk, rows, carry.residuals[name], slot, gradients[name], self._reduced, when,
                last=last,
            )  # fmt: skip
        return x_gradient_BSD, carry._replace(gradients=gradients)

    def _after_head(self, y_gradient_BSD: jax.Array, gradients: Params) -> tuple[jax.Array, Params]:
        """The same, when those of the head are added up: XLA would have them wait, whole, and scatter them after the
        backward of all layers, where nothing else is left to do beside it."""
        own = {name: gradients[name] for name in self.spec.definition.last}
        y_gradient_BSD, own = jax.lax.optimization_barrier((y_gradient_BSD, own))
        return y_gradient_BSD, gradients | own

    def _leave(self, carry: _Carry, row: TickPlan, x_gradient_BSD: jax.Array) -> _Carry:
        """The embedding's gradient, when that of its output comes out of the first stage."""

        def leaving() -> Params:
            new = self.embed_head.embed_gradient(x_gradient_BSD, self.rows(row["leave"]))
            return self._added(carry.gradients, new)

        unchanged = lambda: {name: carry.gradients[name] for name in self.spec.definition.first}
        new = _when(self.table.leave, row["leave"], LEAVE, None, leaving, unchanged)
        return carry._replace(gradients=carry.gradients | new)

    def _squared(self, carry: _Carry, row: TickPlan) -> _Carry:
        """After the first microbatch, the squares of its gradients."""
        if carry.squares is None:
            return carry
        small, before = self.small, carry.squares
        assert small is not None
        now = lambda: squares(self.spec, small, carry.gradients)
        return carry._replace(squares=jax.lax.cond(row["backward"][self.stage][0] == 0, now, lambda: before))

    def _reduced(self, gradients: Params, axes: Params) -> Params:
        """Gradients of whole weights as they are added up."""
        if self.spec.zero == 1:
            return jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
        return collectives.reshard(gradients, axes, self.spec.placement, self.spec.reduce_dtype)

    def _added(self, gradients: Params, new: Params) -> Params:
        axes = {name: self.spec.trained_axes[name] for name in new}
        reduced = self._reduced(select(new, axes), axes)
        return {name: jax.tree.map(jnp.add, gradients[name], reduced[name]) for name in new}


def _gathered_once(spec: StepSpec, params: Params) -> Params:
    """All weights, ready for use. Those of layers are gathered one after another: a whole stack would come out with the
    dimension first along which it is gathered, and XLA would copy all of it into order."""
    ready = functools.partial(collectives.unshard, placement=spec.placement, dtype=spec.dtype)

    def of(name: str) -> Params:
        own, axes = params[name], spec.definition.axes[name]
        gathered = map(spec.placement.gathered_axes, jax.tree.leaves(axes, is_leaf=is_axes))
        if name not in spec.slots or not any(gathered):
            return ready(own, axes)
        layer = lambda _, one: (None, jax.tree.map(collectives.row_major, ready(one, unstacked(axes))))
        return jax.lax.scan(layer, None, own, unroll=_GATHERED_IN_A_ROUND)[1]

    return {name: of(name) for name in params}


_GATHERED_IN_A_ROUND = 4
"""Layers, of which one is put into the stack while the next one is gathered. Of 2, 4 and 8 no other was better over
five programs."""


def _sum(total: LossSums, new: LossSums) -> LossSums:
    return LossSums(*map(jnp.add, total, new))


def _when(
    planned: np.ndarray,
    microbatch: jax.Array,
    scope: str,
    also: jax.Array | None,
    go: Callable[[], Any],
    idle: Callable[[], Any],
) -> Any:
    """`go()` where there is a microbatch and `also` is true, else `idle()`; without a condition if they always are."""

    def scoped() -> Any:
        with jax.named_scope(scope):
            return go()

    conditions = [] if (planned >= 0).all() else [microbatch >= 0]
    conditions += [] if also is None else [also]
    if not conditions:
        return scoped()
    return jax.lax.cond(functools.reduce(jnp.logical_and, conditions), scoped, idle)
