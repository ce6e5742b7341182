"""Executes a schedule: all microbatches of a step through all stages, inside the step's shard_map.

One program runs on all stages. It is a loop over the schedule's ticks, in each of which a stage does what the table
says for it, hands its output to the next stage and its input's gradient to the one before. A half of a tick in which a
stage is idle is skipped by a condition, which all devices of a stage decide alike, so that they may talk to each other
inside. Without a pipeline this is gradient accumulation: one stage, a tick a pass, nothing idle, nothing to remember.

Splitting backward in two, as zero-bubble schedules do (Qi et al. 2023, arXiv:2401.10241), would be a third half in the
table: `Layers.backward` would give the input's gradient and keep (activations, output gradient) in a second ring of
slots, from which the third half computes the weights' gradients in ticks that are idle now.

Shapes: A microbatches, B rows of one, L length, S a device's piece of the length, D model.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmnt.model.decoder import Params
from jaxmnt.placement import collectives
from jaxmnt.program.ends import Ends
from jaxmnt.program.loss import LossSums, no_loss
from jaxmnt.program.schedule import Half, Schedule
from jaxmnt.program.setting import Batch, Setting
from jaxmnt.program.stage import Layers, context_of

FORWARD, BACKWARD, LOSS, ENTER, LEAVE = "stage_forward", "stage_backward", "loss", "enter", "leave"
"""Scopes in the compiled program of what a condition may skip."""


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

    @classmethod
    def of(cls, schedule: Schedule) -> "Table":
        last = schedule.chunks - 1
        if not schedule.backward:
            none = np.full(schedule.ticks, -1)
            forward = _half(schedule.forward, [[0] * schedule.stages] * schedule.ticks)
            enter, loss = _passing(forward, 0, 0), _passing(forward, -1, last)
            return cls(forward, forward, enter, loss, none, none, 0, 0)
        writes, reads, slots = schedule.slots()
        forward, backward = _half(schedule.forward, writes), _half(schedule.backward, reads)
        loss, used = _passing(forward, -1, last), _passing(backward, -1, last)
        at_once = bool((loss == used).all())
        # A microbatch's own number serves as its slot: schedules that wait at all wait for all.
        pending = np.maximum(np.stack([loss, used], axis=1), 0)
        return cls(
            forward, backward, _passing(forward, 0, 0), loss, _passing(backward, 0, 0), pending,
            slots, 0 if at_once else schedule.microbatches,
        )  # fmt: skip


def _half(half: Half, slots: list[list[int]]) -> np.ndarray:
    return np.array(
        [
            [(-1, 0, 0) if work is None else (*work, slot) for work, slot in zip(row, slot_row, strict=True)]
            for row, slot_row in zip(half, slots, strict=True)
        ],
        np.int32,
    )


def _passing(half: np.ndarray, stage: int, chunk: int) -> np.ndarray:
    """[tick]: the microbatch that a stage works on in this chunk."""
    return np.where(half[:, stage, 1] == chunk, half[:, stage, 0], -1)


def loss_and_gradients(
    setting: Setting, params: Params, batch: Batch, row_keys: Callable[[jax.Array], jax.Array | None]
) -> tuple[LossSums, Params]:
    """The summed loss of this batch shard's rows, and this device's gradients of it, in float32.

    `row_keys` gives the random keys of a microbatch's rows. Gradients are summed over the axes that weights are
    gathered over, and not yet over those that they are replicated over.
    """
    run = _Run(setting, params, batch, row_keys)
    schedule, table = setting.schedule, Table.of(setting.schedule)
    axes, placement, reduce_dtype = setting.definition.axes, setting.placement, setting.reduce_dtype
    keep_whole = setting.config.mesh.zero == 1

    def reduced(gradients: Params, axes: Params) -> Params:
        if keep_whole:
            return jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
        return collectives.reshard(gradients, axes, placement, reduce_dtype)

    def added(gradients: Params, new: Params) -> Params:
        return {name: jax.tree.map(jnp.add, gradients[name], reduced(new[name], axes[name])) for name in new}

    stage, alone = run.stage, schedule.stages == 1

    def tick(carry: Any, row: Any) -> tuple[Any, None]:
        arriving_BSD, returning_BSD, ring, pending, gradients, sums = carry
        microbatch, chunk, slot = row["forward"][stage]
        x_BSD = run.entering(table, row, chunk, arriving_BSD)
        when = functools.partial(_when, table.forward[..., 0], microbatch, FORWARD)
        y_BSD, ring = run.layers.forward(x_BSD, run.first(chunk), run.context(microbatch), ring, slot, when)

        def leaving() -> tuple[LossSums, jax.Array, Params]:
            new_sums, y_gradient_BSD, new = run.ends.loss_and_gradients(y_BSD, run.rows(row["loss"]))
            return LossSums(*map(jnp.add, sums, new_sums)), y_gradient_BSD, added(gradients, new)

        stay = lambda: (sums, jnp.zeros_like(y_BSD), {name: gradients[name] for name in run.ends.last})
        sums, y_gradient_BSD, new = _when(table.loss, row["loss"], LOSS, leaving, stay)
        gradients = gradients | new
        if table.pending_slots:
            write, read = row["pending"]
            before = jax.lax.dynamic_index_in_dim(pending, write, keepdims=False)
            after = jnp.where(row["loss"] >= 0, y_gradient_BSD, before)
            pending = jax.lax.dynamic_update_index_in_dim(pending, after, write, 0)
            y_gradient_BSD = jax.lax.dynamic_index_in_dim(pending, read, keepdims=False)

        microbatch, chunk, slot = row["backward"][stage]
        if not alone:
            is_last = (stage == schedule.stages - 1) & (chunk == schedule.chunks - 1)
            y_gradient_BSD = jnp.where(is_last, y_gradient_BSD, returning_BSD)
        when = functools.partial(_when, table.backward[..., 0], microbatch, BACKWARD)
        x_gradient_BSD, layers = run.layers.backward(
            y_gradient_BSD, run.first(chunk), run.context(microbatch), ring, slot, gradients["layers"],
            lambda new: reduced(new, setting.definition.layer_axes), when,
        )  # fmt: skip
        gradients = gradients | {"layers": layers}

        def out() -> Params:
            return added(gradients, run.ends.embed_gradient(x_gradient_BSD, run.rows(row["leave"])))

        unchanged = lambda: {"embedding": gradients["embedding"]}
        gradients = gradients | _when(table.leave, row["leave"], LEAVE, out, unchanged)
        if not alone:
            circular = schedule.chunks > 1
            arriving_BSD = collectives.to_neighbour(y_BSD, placement, forward=True, circular=circular)
            returning_BSD = collectives.to_neighbour(x_gradient_BSD, placement, forward=False, circular=circular)
        return (arriving_BSD, returning_BSD, ring, pending, gradients, sums), None

    stored = run.whole if keep_whole else params
    gradients = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), stored)
    nothing = run.nothing()
    ring = run.layers.empty_ring(table.slots, nothing, run.context(jnp.int32(0)))
    pending = jnp.zeros((table.pending_slots, *nothing.shape), nothing.dtype)
    between = None if alone else nothing
    rows = {
        "forward": table.forward, "backward": table.backward, "enter": table.enter,
        "loss": table.loss, "leave": table.leave, "pending": table.pending,
    }  # fmt: skip
    carry = (between, between, ring, pending, gradients, no_loss())
    carry = _loop(tick, carry, rows, schedule.ticks)
    *_, gradients, sums = carry
    if keep_whole:
        gradients = collectives.reshard(gradients, axes, placement, reduce_dtype)
    return sums, gradients


def loss(setting: Setting, params: Params, batch: Batch, schedule: Schedule) -> LossSums:
    """The summed loss of this batch shard's rows, by a schedule without backward."""
    run = _Run(setting, params, batch, lambda _: None)
    table, stage, alone = Table.of(schedule), run.stage, schedule.stages == 1

    def tick(carry: Any, row: Any) -> tuple[Any, None]:
        arriving_BSD, sums = carry
        microbatch, chunk, _ = row["forward"][stage]
        x_BSD = run.entering(table, row, chunk, arriving_BSD)
        go = lambda: run.layers.evaluate(x_BSD, run.first(chunk), run.context(microbatch))
        y_BSD = _when(table.forward[..., 0], microbatch, FORWARD, go, lambda: jnp.zeros_like(x_BSD))
        leaving = lambda: LossSums(*map(jnp.add, sums, run.ends.loss(y_BSD, run.rows(row["loss"]))))
        sums = _when(table.loss, row["loss"], LOSS, leaving, lambda: sums)
        if not alone:
            arriving_BSD = collectives.to_neighbour(
                y_BSD, setting.placement, forward=True, circular=schedule.chunks > 1
            )
        return (arriving_BSD, sums), None

    start = (None if alone else run.nothing(), no_loss())
    rows = {"forward": table.forward, "enter": table.enter, "loss": table.loss}
    return _loop(tick, start, rows, schedule.ticks)[1]


class _Run:
    """What both loops share: this device's stage, its rows and its weights."""

    def __init__(self, setting: Setting, params: Params, batch: Batch, row_keys: Callable[[jax.Array], Any]):
        placement, definition = setting.placement, setting.definition
        self._setting, self._row_keys = setting, row_keys
        fold = lambda field: field.reshape(-1, setting.rows_a_pass, *field.shape[1:])
        self._fields = {name: fold(field) for name, field in batch.items()}
        self.stage = jax.lax.axis_index("pipeline") if placement.stages > 1 else 0
        gather_once = setting.config.mesh.zero < 3
        self.whole = params
        if gather_once:
            self.whole = collectives.unshard(params, definition.axes, placement, setting.dtype)
        order = np.array([[0 if layer is None else layer for layer in row] for row in setting.layer_slots])
        self._depth = order.shape[1] // setting.schedule.chunks
        self.layers = Layers(
            setting, self.whole["layers"], jnp.asarray(order)[self.stage], self._depth, whole=gather_once
        )
        self.ends = Ends(setting, self.whole, whole=gather_once)

    def rows(self, microbatch: jax.Array) -> Batch:
        pick = lambda field: jax.lax.dynamic_index_in_dim(field, jnp.maximum(microbatch, 0), keepdims=False)
        return jax.tree.map(pick, self._fields)

    def context(self, microbatch: jax.Array) -> Any:
        microbatch = jnp.maximum(microbatch, 0)
        return context_of(self._setting, self.rows(microbatch), self._row_keys(microbatch))

    def first(self, chunk: jax.Array) -> jax.Array:
        """The first slot of a chunk."""
        return chunk * self._depth

    def nothing(self) -> jax.Array:
        """Zeros [B, S, D] like what stages hand to each other."""
        setting = self._setting
        length = setting.config.data.sequence_length // setting.placement.ways("sequence")
        return jnp.zeros((setting.rows_a_pass, length, setting.config.model.hidden_size), setting.dtype)

    def entering(self, table: Table, row: Any, chunk: jax.Array, arriving_BSD: jax.Array | None) -> jax.Array:
        """A stage's input: of the first stage's first chunk the embedding, else what arrived."""
        embed = lambda: self.ends.embed(self.rows(row["enter"]))
        if arriving_BSD is None:
            return embed()
        x_BSD = _when(table.enter, row["enter"], ENTER, embed, lambda: arriving_BSD)
        return jnp.where((self.stage == 0) & (chunk == 0), x_BSD, arriving_BSD)


def _when(
    planned: np.ndarray, microbatch: jax.Array, scope: str, go: Callable[[], Any], idle: Callable[[], Any]
) -> Any:
    """`go()` where there is a microbatch, else `idle()`; without a condition if there always is one."""
    if (planned >= 0).all():
        with jax.named_scope(scope):
            return go()

    def scoped() -> Any:
        with jax.named_scope(scope):
            return go()

    return jax.lax.cond(microbatch >= 0, scoped, idle)


def _loop(tick: Callable[[Any, Any], tuple[Any, None]], start: Any, rows: dict[str, np.ndarray], ticks: int) -> Any:
    if ticks == 1:
        return tick(start, {name: jnp.asarray(array[0]) for name, array in rows.items()})[0]
    return jax.lax.scan(tick, start, {name: jnp.asarray(array) for name, array in rows.items()})[0]
