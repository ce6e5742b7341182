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

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxmnt.models.contract import Params
from jaxmnt.models.layers import zeros_after
from jaxmnt.parallel import collectives
from jaxmnt.parallel.sharding import is_axes
from jaxmnt.training.embed_head import EmbedAndHead
from jaxmnt.training.loss import LossSums, no_loss
from jaxmnt.training.noise import SmallBatches, small_batches, squares
from jaxmnt.training.pipeline_schedule import PipelineSchedule, Table, schedule_table
from jaxmnt.training.remat import Residuals
from jaxmnt.training.spec import Batch, StepSpec
from jaxmnt.training.stage import Layers, Pass, PrefetchedLayers, Rows, microbatch_rows
from jaxmnt.training.state import abstract_state
from jaxmnt.training.trained import select
from jaxmnt.training.weights import BY_ZERO, Weights

FORWARD, BACKWARD, LOSS, ENTER, LEAVE = "stage_forward", "stage_backward", "loss", "enter", "leave"
"""Scopes in the compiled program of what a condition may skip. The ends are called so in the table, too."""


RowKeys = Callable[[Array], Array | None]
"""The random keys of a microbatch's rows."""

TickPlan = dict[str, Array]
"""The table's line of a tick."""

Tick = Callable[[Any, TickPlan], tuple[Any, None]]


class Results(NamedTuple):
    """Of all microbatches of this batch shard, on this device."""

    sums: LossSums
    layers: dict[str, Any]
    """What the layers of each group returned as sums, stacked as the group is placed: this device's part of them."""
    gradients: Params
    squares: Array | None
    """Of this device's gradients of small batches, if they are asked for."""


def loss_and_gradients(spec: StepSpec, params: Params, buffers: Params, batch: Batch, row_keys: RowKeys) -> Results:
    """The summed loss of this batch shard's rows, and this device's gradients of it, in float32.

    `row_keys` gives the random keys of a microbatch's rows. Gradients are summed over the axes that weights are
    gathered over, and not yet over those that they are replicated over.
    """
    step = open_step(spec, params, buffers, batch, spec.schedule, row_keys)
    end = step.run(functools.partial(_tick, step), _start(step), _last_tick(step))
    found = end.squares
    if step.small is not None and not step.small.of_first_microbatch:
        found = squares(spec, step.small, end.gradients)
    return Results(end.sums, end.layer_sums, step.weights.finished(end.gradients), found)


def loss(spec: StepSpec, params: Params, buffers: Params, batch: Batch, schedule: PipelineSchedule) -> LossSums:
    """The summed loss of this batch shard's rows, by a schedule without backward."""
    step = open_step(spec, params, buffers, batch, schedule)
    return step.run(functools.partial(_evaluation_tick, step), (step.nothing(), no_loss()))[1]


class StepTrace(NamedTuple):
    """What can be known of a step without computing anything, on a device."""

    residuals: dict[str, Residuals]
    """The places for what forwards leave for their backwards: by group, for all slots."""
    gathered_in_float8: dict[str, list[list[bool]]]
    """By group and place in the pattern, which of the parameters."""
    products: tuple[int, int]
    """How many products of the layers' projections are in float8, and how many there are; 0 without float8."""


def trace_step(spec: StepSpec) -> StepTrace:
    """Returns what tracing a step tells, without running it."""
    found: list[StepTrace] = []

    def local(params: Params, buffers: Params, batch: Batch) -> Array:
        step = open_step(spec, params, buffers, batch, spec.schedule)
        gathered = {name: layers.weights.packed for name, layers in step.layers.items()}
        products: list[bool] = []
        for layers in step.layers.values() if spec.float8 else ():
            products += layers.products(step.nothing(), step.layer_rows(jnp.int32(0)))
        found.append(StepTrace(_start(step).residuals, gathered, (sum(products), len(products))))
        return jnp.zeros(())

    state = abstract_state(spec)
    function = spec.on_mesh(local, [spec.row_axes], ())
    jax.eval_shape(function, state["params"], state.get("buffers", {}), spec.abstract_rows())
    return found[0]


@dataclass(frozen=True)
class Step:
    """What this device has of a step: its stage, its weights, its rows."""

    spec: StepSpec
    schedule: PipelineSchedule
    table: Table
    stage: Any
    """The number of its stage."""
    weights: Weights
    layers: dict[str, Layers]
    """By group."""
    ends: EmbedAndHead
    fields: Batch
    """[A, B, L] each."""
    row_keys: RowKeys
    small: SmallBatches | None
    """Whose gradients are squared, if they are asked for."""

    @property
    def alone(self) -> bool:
        """Whether there is one stage."""
        return self.schedule.stages == 1

    def run(self, tick: Tick, start: Any, last_tick: Tick | None = None) -> Any:
        """What `tick` makes of `start` over all ticks, the last of which may be another."""
        rows, ticks = self.table.rows, self.schedule.ticks
        if ticks > 1:
            looped = ticks if last_tick is None else ticks - 1
            start = jax.lax.scan(tick, start, jax.tree.map(lambda array: jnp.asarray(array[:looped]), rows))[0]
            if last_tick is None:
                return start
        return (last_tick or tick)(start, jax.tree.map(lambda array: jnp.asarray(array[-1]), rows))[0]

    def rows(self, microbatch: Array) -> Batch:
        pick = lambda field: jax.lax.dynamic_index_in_dim(field, jnp.maximum(microbatch, 0), keepdims=False)
        return jax.tree.map(pick, self.fields)

    def layer_rows(self, microbatch: Array) -> Rows:
        microbatch = jnp.maximum(microbatch, 0)
        return microbatch_rows(self.spec, self.rows(microbatch), self.row_keys(microbatch))

    def nothing(self) -> Array:
        """Zeros [B, S, D] like what stages hand to each other."""
        spec = self.spec
        length = spec.placement.local_length(spec.config.data.sequence_length)
        return jnp.zeros((spec.microbatch_rows, length, spec.config.model.hidden_size), spec.dtype)

    def passing(self, row: TickPlan, phase: str, scope: str) -> Pass:
        """Returns which microbatch goes through which chunk of this stage in a phase of a tick."""
        microbatch, chunk, slot = row[phase][self.stage]
        when = functools.partial(_when, self.table.rows[phase][..., 0], microbatch, scope)
        return Pass(chunk, slot, self.layer_rows(microbatch), when)

    def when_at(self, row: TickPlan, end: str, go: Callable[[], Any], idle: Callable[[], Any]) -> Any:
        """`go()` in a tick in which a microbatch is at this end of the pipeline (`ENTER`, `LOSS`, `LEAVE`), else
        `idle()`."""
        return _when(self.table.rows[end], row[end], end, None, go, idle)

    def entering(self, row: TickPlan, chunk: Array, arriving_BSD: Array) -> Array:
        """A stage's input: of the first stage's first chunk the embedding, else what arrived."""
        embed = lambda: self.ends.embed(self.rows(row[ENTER]))
        x_BSD = self.when_at(row, ENTER, embed, lambda: arriving_BSD)
        return x_BSD if self.alone else jnp.where((self.stage == 0) & (chunk == 0), x_BSD, arriving_BSD)

    def handed_on(self, x_BSD: Array, *, forward: bool) -> Array:
        """What arrives when every stage hands on its x."""
        if self.alone:
            return x_BSD
        circular = self.schedule.chunks > 1
        return collectives.shift_stage(x_BSD, self.spec.placement, forward=forward, circular=circular)


def open_step(
    spec: StepSpec,
    params: Params,
    buffers: Params,
    batch: Batch,
    schedule: PipelineSchedule,
    row_keys: RowKeys = lambda _: None,
) -> Step:
    """Returns what this device has of a step, with the weights gathered that are so once a step."""
    weights = BY_ZERO[spec.zero](spec, params)
    stage = 0 if schedule.stages == 1 else collectives.stage_index()
    fold = lambda field: field.reshape(-1, spec.microbatch_rows, *field.shape[1:])
    fields = jax.tree.map(fold, batch)
    layers, kind = {}, PrefetchedLayers if spec.prefetch else Layers
    for group in spec.definition.groups:
        order = np.array([[-1 if unit is None else unit for unit in row] for row in spec.slots[group.name]])
        own, depth = jnp.asarray(order)[stage], order.shape[1] // schedule.chunks
        layers[group.name] = kind(spec, group, weights, buffers, own, depth, full=bool((order >= 0).all()))
    step = Step(
        spec, schedule, schedule_table(schedule), stage, weights, layers, EmbedAndHead(spec, weights), fields, row_keys,
        small_batches(spec),
    )  # fmt: skip
    if spec.float8 and spec.config.train.float8_gather and spec.zero == 3:
        for each in layers.values():
            each.gather_in_float8(step.nothing(), step.layer_rows(jnp.int32(0)))
    return step


def _evaluation_tick(step: Step, carry: tuple[Array, LossSums], row: TickPlan) -> tuple[tuple[Array, LossSums], None]:
    arriving_BSD, sums = carry
    of = step.passing(row, "forward", FORWARD)
    y_BSD = step.entering(row, of.chunk, arriving_BSD)
    for layers in step.layers.values():
        y_BSD = layers.evaluate(y_BSD, of)
    leaving = lambda: sums.plus(step.ends.loss(y_BSD, step.rows(row[LOSS])))
    sums = step.when_at(row, LOSS, leaving, lambda: sums)
    return (step.handed_on(y_BSD, forward=True), sums), None


class _Carry(NamedTuple):
    """What goes from tick to tick of training."""

    arriving: Array  # [B, S, D] from the stage before
    returning: Array  # [B, S, D] from the next stage: a gradient
    residuals: dict[str, Residuals]  # what forwards of each group left for their backwards, by slot
    pending: Array  # [slots, B, S, D]: gradients of the loss that wait for the last stage's backward
    gradients: Params
    sums: LossSums
    layer_sums: dict[str, Any]
    squares: Array | None  # of the first microbatch's gradients, if they are asked for


def _start(step: Step) -> _Carry:
    nothing, small = step.nothing(), step.small
    rows = step.layer_rows(jnp.int32(0))
    empty = {name: layers.empty(step.table.slots, nothing, rows) for name, layers in step.layers.items()}
    pending = jnp.zeros((step.table.pending_slots, *nothing.shape), nothing.dtype)
    residuals = {name: places for name, (places, _) in empty.items()}
    layer_sums = {name: sums for name, (_, sums) in empty.items()}
    of_first = small is not None and small.of_first_microbatch
    none_yet = jnp.zeros((), jnp.float32) if of_first else None
    gradients = step.weights.no_gradients()
    return _Carry(nothing, nothing, residuals, pending, gradients, no_loss(), layer_sums, none_yet)


def _last_tick(step: Step) -> Tick | None:
    """The last tick, if it is another: then gradients are summed over replicas while backward goes on."""
    if not any(map(step.spec.is_reduced_early, jax.tree.leaves(step.spec.trained_axes, is_leaf=is_axes))):
        return None
    if step.schedule.ticks == 1:
        return functools.partial(_tick, step, last=True)

    def after_others(carry: _Carry, row: TickPlan) -> tuple[_Carry, None]:
        # Else their residuals would be there at the same time, and what they have gathered would be kept for it. The
        # layers and the ends take what is behind the barrier, too: they share these weights.
        carry, row, step.weights.params = jax.lax.optimization_barrier((carry, row, step.weights.params))
        return _tick(step, carry, row, last=True)

    return after_others


def _tick(step: Step, carry: _Carry, row: TickPlan, *, last: bool = False) -> tuple[_Carry, None]:
    y_BSD, carry = _forward(step, carry, row)
    y_gradient_BSD, carry = _loss(step, carry, row, y_BSD)
    y_gradient_BSD, carry = _wait(step, carry, row, y_gradient_BSD)
    x_gradient_BSD, carry = _backward(step, carry, row, y_gradient_BSD, last)
    carry = _squared(step, _leave(step, carry, row, x_gradient_BSD), row)
    arriving_BSD = step.handed_on(y_BSD, forward=True)
    returning_BSD = step.handed_on(x_gradient_BSD, forward=False)
    return carry._replace(arriving=arriving_BSD, returning=returning_BSD), None


def _forward(step: Step, carry: _Carry, row: TickPlan) -> tuple[Array, _Carry]:
    of = step.passing(row, "forward", FORWARD)
    y_BSD, residuals, sums = step.entering(row, of.chunk, carry.arriving), dict(carry.residuals), dict(carry.layer_sums)
    for name, layers in step.layers.items():
        y_BSD, residuals[name], sums[name] = layers.forward(y_BSD, of, residuals[name], sums[name])
    return y_BSD, carry._replace(residuals=residuals, layer_sums=sums)


def _loss(step: Step, carry: _Carry, row: TickPlan, y_BSD: Array) -> tuple[Array, _Carry]:
    """The gradient of what comes out of the last stage, in the tick in which it does."""

    def leaving() -> tuple[LossSums, Array, Params]:
        sums, y_gradient_BSD, new = step.ends.loss_and_gradients(y_BSD, step.rows(row[LOSS]))
        return carry.sums.plus(sums), y_gradient_BSD, _added(step, carry.gradients, new)

    unchanged = {name: carry.gradients[name] for name in step.spec.definition.last}
    stay = lambda: (carry.sums, jnp.zeros_like(y_BSD), unchanged)
    sums, y_gradient_BSD, new = step.when_at(row, LOSS, leaving, stay)
    return y_gradient_BSD, carry._replace(sums=sums, gradients=carry.gradients | new)


def _wait(step: Step, carry: _Carry, row: TickPlan, y_gradient_BSD: Array) -> tuple[Array, _Carry]:
    """The loss's gradient for the last stage's backward, which comes later if the schedule says so."""
    if not step.table.pending_slots:
        return y_gradient_BSD, carry
    write, read = row["pending"]
    new = jnp.where(row[LOSS] >= 0, y_gradient_BSD, carry.pending[write])
    pending = carry.pending.at[write].set(new)
    return pending[read], carry._replace(pending=pending)


def _backward(step: Step, carry: _Carry, row: TickPlan, y_gradient_BSD: Array, last: bool) -> tuple[Array, _Carry]:
    of, gradients = step.passing(row, "backward", BACKWARD), dict(carry.gradients)
    if step.alone:
        y_gradient_BSD, gradients = _after_head(step, y_gradient_BSD, gradients)
    else:
        is_last = (step.stage == step.schedule.stages - 1) & (of.chunk == step.schedule.chunks - 1)
        y_gradient_BSD = jnp.where(is_last, y_gradient_BSD, carry.returning)
    if step.schedule.ticks == 1:  # not carried from another: they need no room before, nor beside the head's
        late = lambda like: zeros_after(y_gradient_BSD, like)
        gradients |= jax.tree.map(late, {name: gradients[name] for name in step.layers})
    x_gradient_BSD = y_gradient_BSD
    for name, layers in reversed(step.layers.items()):
        x_gradient_BSD, gradients[name] = layers.backward(
            x_gradient_BSD, of, carry.residuals[name], gradients[name], last=last
        )
    return x_gradient_BSD, carry._replace(gradients=gradients)


def _after_head(step: Step, y_gradient_BSD: Array, gradients: Params) -> tuple[Array, Params]:
    """The same, when those of the head are added up: XLA would have them wait, whole, and scatter them after the
    backward of all layers, where nothing else is left to do beside it."""
    own = {name: gradients[name] for name in step.spec.definition.last}
    y_gradient_BSD, own = jax.lax.optimization_barrier((y_gradient_BSD, own))
    return y_gradient_BSD, gradients | own


def _leave(step: Step, carry: _Carry, row: TickPlan, x_gradient_BSD: Array) -> _Carry:
    """The embedding's gradient, when that of its output comes out of the first stage."""

    def leaving() -> Params:
        new = step.ends.embed_gradient(x_gradient_BSD, step.rows(row[LEAVE]))
        return _added(step, carry.gradients, new)

    unchanged = lambda: {name: carry.gradients[name] for name in step.spec.definition.first}
    new = step.when_at(row, LEAVE, leaving, unchanged)
    return carry._replace(gradients=carry.gradients | new)


def _squared(step: Step, carry: _Carry, row: TickPlan) -> _Carry:
    """After the first microbatch, the squares of its gradients."""
    small, before = step.small, carry.squares
    if small is None or before is None:
        return carry
    now = lambda: squares(step.spec, small, carry.gradients)
    return carry._replace(squares=jax.lax.cond(row["backward"][step.stage][0] == 0, now, lambda: before))


def _added(step: Step, gradients: Params, new: Params) -> Params:
    """The gradients of ends with those of a microbatch."""
    axes = {name: step.spec.trained_axes[name] for name in new}
    reduced = step.weights.reduced(select(new, axes), axes)
    return {name: jax.tree.map(jnp.add, gradients[name], reduced[name]) for name in new}


def _when(
    planned: np.ndarray,
    microbatch: Array,
    scope: str,
    also: Array | None,
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
