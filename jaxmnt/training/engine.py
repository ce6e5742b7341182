"""Executes a schedule: all microbatches of a step through all stages, inside the step's shard_map.

One program runs on all stages. It loops over the schedule's ticks, and in each tick a stage does what the table
says for it, sends its output to the next stage and its input's gradient to the previous stage. A stage that is idle in
a phase of a tick skips the phase with `lax.cond`. All devices of a stage take the same branch, so they may communicate
inside it. Without a pipeline this is gradient accumulation: one stage, one tick per microbatch, no idle phases, and no
stored activations of other microbatches.

Splitting backward in two, as zero-bubble schedules do (Qi et al. 2023, arXiv:2401.10241), would be a third phase in the
table: `Layers.backward` would return the input's gradient and store (activations, output gradient) in a second buffer
of slots. The third phase would compute the weights' gradients from it in ticks that are idle now.

Shapes: A microbatches, B rows of a microbatch, L length, S a device's piece of the length, D model.
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
"""Scopes in the compiled program of the phases that a condition may skip. The table's rows for the ends of the pipeline
have the same names (`LOSS`, `ENTER`, `LEAVE`)."""


RowKeys = Callable[[Array], Array | None]
"""Returns the random keys of a microbatch's rows, or None without dropout."""

TickPlan = dict[str, Array]
"""The table's row for one tick."""

Tick = Callable[[Any, TickPlan], tuple[Any, None]]


class Results(NamedTuple):
    """Sums and gradients of all microbatches of this batch shard, on this device."""

    sums: LossSums
    layers: dict[str, Any]
    """The layers' `sums` by group, stacked as the group is placed: this device's part of them."""
    gradients: Params
    squares: Array | None
    """The sum of squares of this device's small-batch gradients, if requested."""


def loss_and_gradients(spec: StepSpec, params: Params, buffers: Params, batch: Batch, row_keys: RowKeys) -> Results:
    """Computes the summed loss of this batch shard's rows and this device's gradients of it, in float32.

    `row_keys` returns the random keys of a microbatch's rows. Gradients are summed over the axes along which weights
    are gathered, but not yet over the axes along which weights are replicated.
    """
    step = prepare_step(spec, params, buffers, batch, spec.schedule, row_keys)
    final = step.run(functools.partial(_tick, step), _start(step), _last_tick(step))
    gradient_squares = final.squares
    if step.small is not None and not step.small.of_first_microbatch:
        gradient_squares = squares(spec, step.small, final.gradients)
    return Results(final.sums, final.layer_sums, step.weights.finish(final.gradients), gradient_squares)


def loss(spec: StepSpec, params: Params, buffers: Params, batch: Batch, schedule: PipelineSchedule) -> LossSums:
    """Computes the summed loss of this batch shard's rows, by a schedule without backward."""
    step = prepare_step(spec, params, buffers, batch, schedule)
    return step.run(functools.partial(_evaluation_tick, step), (step.zero_activations(), no_loss()))[1]


class StepTrace(NamedTuple):
    """Facts about one device's part of a step, from tracing the step without running it."""

    residuals: dict[str, Residuals]
    """The buffers for residuals by group of layers, for all slots."""
    gathered_in_float8: dict[str, list[list[bool]]]
    """For each parameter, whether it is gathered in float8, by group and index in the group's pattern."""
    products: tuple[int, int]
    """Counts of the layers' matrix products: those in float8, and all; 0, 0 without float8."""


def trace_step(spec: StepSpec) -> StepTrace:
    """Traces a step without running it."""
    traces: list[StepTrace] = []

    def trace_on_device(params: Params, buffers: Params, batch: Batch) -> Array:
        step = prepare_step(spec, params, buffers, batch, spec.schedule)
        gathered = {name: layers.weights.packed for name, layers in step.layers.items()}
        products: list[bool] = []
        for layers in step.layers.values() if spec.float8 else ():
            products += layers.products(step.zero_activations(), step.layer_rows(jnp.int32(0)))
        traces.append(StepTrace(_start(step).residuals, gathered, (sum(products), len(products))))
        return jnp.zeros(())

    state = abstract_state(spec)
    function = spec.on_mesh(trace_on_device, [spec.row_axes], ())
    jax.eval_shape(function, state["params"], state.get("buffers", {}), spec.abstract_rows())
    return traces[0]


@dataclass(frozen=True)
class Step:
    """This device's part of a step: its stage, its weights and its rows."""

    spec: StepSpec
    schedule: PipelineSchedule
    table: Table
    stage: Any
    """The index of this device's stage."""
    weights: Weights
    layers: dict[str, Layers]
    """The layers of this device's stage, by group."""
    ends: EmbedAndHead
    fields: Batch
    """The batch's fields, each [A, B, L]."""
    row_keys: RowKeys
    small: SmallBatches | None
    """The small batches whose gradients are squared, if requested."""

    @property
    def is_single_stage(self) -> bool:
        """True if there is no pipeline."""
        return self.schedule.stages == 1

    def run(self, tick: Tick, start: Any, last_tick: Tick | None = None) -> Any:
        """Runs `tick` from `start` over all ticks and returns the final carry. `last_tick`, if given, replaces `tick`
        in the last one."""
        rows, ticks = self.table.rows, self.schedule.ticks
        if ticks > 1:
            looped = ticks if last_tick is None else ticks - 1
            looped_rows = jax.tree.map(lambda array: jnp.asarray(array[:looped]), rows)
            start = jax.lax.scan(tick, start, looped_rows)[0]
            if last_tick is None:
                return start
        last_row = jax.tree.map(lambda array: jnp.asarray(array[-1]), rows)
        return (last_tick or tick)(start, last_row)[0]

    def rows(self, microbatch: Array) -> Batch:
        # -1 stands for no microbatch: its rows are not used.
        """Returns a microbatch's fields, [B, L] each."""
        pick = lambda field: jax.lax.dynamic_index_in_dim(field, jnp.maximum(microbatch, 0), keepdims=False)
        return jax.tree.map(pick, self.fields)

    def layer_rows(self, microbatch: Array) -> Rows:
        """Returns the fields of a microbatch that all layers use."""
        microbatch = jnp.maximum(microbatch, 0)
        return microbatch_rows(self.spec, self.rows(microbatch), self.row_keys(microbatch))

    def zero_activations(self) -> Array:
        """Returns zeros [B, S, D], shaped like the activations that stages send to each other."""
        spec = self.spec
        length = spec.placement.local_length(spec.config.data.sequence_length)
        return jnp.zeros((spec.microbatch_rows, length, spec.config.model.hidden_size), spec.dtype)

    def pass_at(self, row: TickPlan, phase: str, scope: str) -> Pass:
        """Returns which microbatch goes through which chunk of this stage in a phase of a tick."""
        microbatch, chunk, slot = row[phase][self.stage]
        when = functools.partial(_when, self.table.rows[phase][..., 0], microbatch, scope)
        return Pass(chunk, slot, self.layer_rows(microbatch), when)

    def cond_at(self, row: TickPlan, end: str, active: Callable[[], Any], idle: Callable[[], Any]) -> Any:
        """Returns `active()` in a tick in which a microbatch is at this end of the pipeline (`ENTER`, `LOSS`, `LEAVE`),
        else `idle()`."""
        return _when(self.table.rows[end], row[end], end, None, active, idle)

    def chunk_input(self, row: TickPlan, chunk: Array, arriving_BSD: Array) -> Array:
        """Returns a chunk's input: the embedding for the first stage's first chunk, else what arrived."""
        embed = lambda: self.ends.embed(self.rows(row[ENTER]))
        x_BSD = self.cond_at(row, ENTER, embed, lambda: arriving_BSD)
        return x_BSD if self.is_single_stage else jnp.where((self.stage == 0) & (chunk == 0), x_BSD, arriving_BSD)

    def shift_between_stages(self, x_BSD: Array, *, forward: bool) -> Array:
        """Sends x to the neighbouring stage and returns what arrives from the other neighbour."""
        if self.is_single_stage:
            return x_BSD
        circular = self.schedule.chunks > 1
        return collectives.shift_stage(x_BSD, self.spec.placement, forward=forward, circular=circular)


def prepare_step(
    spec: StepSpec,
    params: Params,
    buffers: Params,
    batch: Batch,
    schedule: PipelineSchedule,
    row_keys: RowKeys = lambda _: None,
) -> Step:
    """Returns this device's part of a step. Weights that are gathered once per step are gathered here."""
    weights = BY_ZERO[spec.zero](spec, params)
    stage = 0 if schedule.stages == 1 else collectives.stage_index()
    fold = lambda field: field.reshape(-1, spec.microbatch_rows, *field.shape[1:])
    fields = jax.tree.map(fold, batch)
    layers = {}
    layers_class = PrefetchedLayers if spec.prefetch else Layers
    for group in spec.definition.groups:
        order = np.array([[-1 if unit is None else unit for unit in row] for row in spec.slots[group.name]])
        stage_order = jnp.asarray(order)[stage]
        depth = order.shape[1] // schedule.chunks
        full = bool((order >= 0).all())
        layers[group.name] = layers_class(spec, group, weights, buffers, stage_order, depth, full=full)
    step = Step(
        spec, schedule, schedule_table(schedule), stage, weights, layers, EmbedAndHead(spec, weights), fields, row_keys,
        small_batches(spec),
    )  # fmt: skip
    if spec.float8 and spec.config.train.float8_gather and spec.zero == 3:
        for group_layers in layers.values():
            group_layers.gather_in_float8(step.zero_activations(), step.layer_rows(jnp.int32(0)))
    return step


def _evaluation_tick(step: Step, carry: tuple[Array, LossSums], row: TickPlan) -> tuple[tuple[Array, LossSums], None]:
    """Runs one tick of evaluation."""
    arriving_BSD, sums = carry
    chunk_pass = step.pass_at(row, "forward", FORWARD)
    y_BSD = step.chunk_input(row, chunk_pass.chunk, arriving_BSD)
    for layers in step.layers.values():
        y_BSD = layers.evaluate(y_BSD, chunk_pass)
    with_microbatch = lambda: sums.plus(step.ends.loss(y_BSD, step.rows(row[LOSS])))
    sums = step.cond_at(row, LOSS, with_microbatch, lambda: sums)
    return (step.shift_between_stages(y_BSD, forward=True), sums), None


class _Carry(NamedTuple):
    """The carry of the loop over training ticks."""

    arriving: Array  # [B, S, D] from the previous stage
    returning: Array  # [B, S, D] from the next stage: a gradient
    residuals: dict[str, Residuals]  # by group: what forward passes stored for their backward passes, by slot
    pending: Array  # [slots, B, S, D]: the loss's gradients until the last stage's backward uses them
    gradients: Params
    sums: LossSums
    layer_sums: dict[str, Any]
    squares: Array | None  # of the first microbatch's gradients, if requested


def _start(step: Step) -> _Carry:
    """Returns the carry before the first tick."""
    zero_activations, small = step.zero_activations(), step.small
    rows = step.layer_rows(jnp.int32(0))
    allocated = {
        name: layers.allocate(step.table.slots, zero_activations, rows) for name, layers in step.layers.items()
    }
    pending = jnp.zeros((step.table.pending_slots, *zero_activations.shape), zero_activations.dtype)
    residuals = {name: buffers for name, (buffers, _) in allocated.items()}
    layer_sums = {name: sums for name, (_, sums) in allocated.items()}
    squares_first = small is not None and small.of_first_microbatch
    return _Carry(
        arriving=zero_activations,
        returning=zero_activations,
        residuals=residuals,
        pending=pending,
        gradients=step.weights.zero_gradients(),
        sums=no_loss(),
        layer_sums=layer_sums,
        squares=jnp.zeros((), jnp.float32) if squares_first else None,
    )


def _last_tick(step: Step) -> Tick | None:
    """Returns the last tick's function if it differs from the others: gradients are then summed over replicas while
    backward runs."""
    if not any(map(step.spec.is_reduced_early, jax.tree.leaves(step.spec.trained_axes, is_leaf=is_axes))):
        return None
    if step.schedule.ticks == 1:
        return functools.partial(_tick, step, last=True)

    def after_others(carry: _Carry, row: TickPlan) -> tuple[_Carry, None]:
        # Without the barrier, XLA overlaps the last microbatch with the previous ones, which keeps both sets of
        # residuals and the weights gathered for the previous microbatches alive. The layers and the ends read
        # `step.weights`, so they use the weights behind the barrier, too.
        carry, row, step.weights.params = jax.lax.optimization_barrier((carry, row, step.weights.params))
        return _tick(step, carry, row, last=True)

    return after_others


def _tick(step: Step, carry: _Carry, row: TickPlan, *, last: bool = False) -> tuple[_Carry, None]:
    """Runs one tick of training: forward, loss, backward, and the exchange with the neighbouring stages."""
    y_BSD, carry = _forward(step, carry, row)
    y_gradient_BSD, carry = _loss(step, carry, row, y_BSD)
    y_gradient_BSD, carry = _delay_loss_gradient(step, carry, row, y_gradient_BSD)
    x_gradient_BSD, carry = _backward(step, carry, row, y_gradient_BSD, last)
    carry = _embedding_backward(step, carry, row, x_gradient_BSD)
    carry = _square_first_gradients(step, carry, row)
    arriving_BSD = step.shift_between_stages(y_BSD, forward=True)
    returning_BSD = step.shift_between_stages(x_gradient_BSD, forward=False)
    return carry._replace(arriving=arriving_BSD, returning=returning_BSD), None


def _forward(step: Step, carry: _Carry, row: TickPlan) -> tuple[Array, _Carry]:
    """Runs this tick's forward pass through a chunk and stores its residuals."""
    chunk_pass = step.pass_at(row, "forward", FORWARD)
    y_BSD = step.chunk_input(row, chunk_pass.chunk, carry.arriving)
    residuals, sums = dict(carry.residuals), dict(carry.layer_sums)
    for name, layers in step.layers.items():
        y_BSD, residuals[name], sums[name] = layers.forward(y_BSD, chunk_pass, residuals[name], sums[name])
    return y_BSD, carry._replace(residuals=residuals, layer_sums=sums)


def _loss(step: Step, carry: _Carry, row: TickPlan, y_BSD: Array) -> tuple[Array, _Carry]:
    """Returns the gradient of the last stage's output, in the tick in which that stage finishes a microbatch."""

    def loss_of_microbatch() -> tuple[LossSums, Array, Params]:
        sums, y_gradient_BSD, new = step.ends.loss_and_gradients(y_BSD, step.rows(row[LOSS]))
        return carry.sums.plus(sums), y_gradient_BSD, _add_end_gradients(step, carry.gradients, new)

    unchanged = {name: carry.gradients[name] for name in step.spec.definition.last}
    idle = lambda: (carry.sums, jnp.zeros_like(y_BSD), unchanged)
    sums, y_gradient_BSD, new = step.cond_at(row, LOSS, loss_of_microbatch, idle)
    return y_gradient_BSD, carry._replace(sums=sums, gradients=carry.gradients | new)


def _delay_loss_gradient(step: Step, carry: _Carry, row: TickPlan, y_gradient_BSD: Array) -> tuple[Array, _Carry]:
    """Stores the loss's gradient until the last stage's backward, and returns the gradient that this tick uses."""
    if not step.table.pending_slots:
        return y_gradient_BSD, carry
    write, read = row["pending"]
    new = jnp.where(row[LOSS] >= 0, y_gradient_BSD, carry.pending[write])
    pending = carry.pending.at[write].set(new)
    return pending[read], carry._replace(pending=pending)


def _backward(step: Step, carry: _Carry, row: TickPlan, y_gradient_BSD: Array, last: bool) -> tuple[Array, _Carry]:
    """Runs this tick's backward pass through a chunk and adds the weights' gradients."""
    chunk_pass = step.pass_at(row, "backward", BACKWARD)
    gradients = dict(carry.gradients)
    if step.is_single_stage:
        y_gradient_BSD, gradients = _reduce_head_first(step, y_gradient_BSD, gradients)
    else:
        is_last = (step.stage == step.schedule.stages - 1) & (chunk_pass.chunk == step.schedule.chunks - 1)
        y_gradient_BSD = jnp.where(is_last, y_gradient_BSD, carry.returning)
    if step.schedule.ticks == 1:
        # With a single tick, allocate the layer gradients only after the head's backward pass: no earlier tick has
        # added to them, and before or beside the head's gradients they would only take memory.
        allocate_late = lambda like: zeros_after(y_gradient_BSD, like)
        gradients |= jax.tree.map(allocate_late, {name: gradients[name] for name in step.layers})
    x_gradient_BSD = y_gradient_BSD
    for name, layers in reversed(step.layers.items()):
        x_gradient_BSD, gradients[name] = layers.backward(
            x_gradient_BSD, chunk_pass, carry.residuals[name], gradients[name], last=last
        )
    return x_gradient_BSD, carry._replace(gradients=gradients)


def _reduce_head_first(step: Step, y_gradient_BSD: Array, gradients: Params) -> tuple[Array, Params]:
    """Orders the head's reduce-scatter before the layers' backward pass. XLA would otherwise schedule it last, which
    keeps the unreduced gradient alive and leaves no computation to overlap with."""
    head_gradients = {name: gradients[name] for name in step.spec.definition.last}
    y_gradient_BSD, head_gradients = jax.lax.optimization_barrier((y_gradient_BSD, head_gradients))
    return y_gradient_BSD, gradients | head_gradients


def _embedding_backward(step: Step, carry: _Carry, row: TickPlan, x_gradient_BSD: Array) -> _Carry:
    """Adds the embedding's gradient, in the tick in which the first stage finishes a microbatch's backward pass."""

    def with_microbatch() -> Params:
        new = step.ends.embed_gradient(x_gradient_BSD, step.rows(row[LEAVE]))
        return _add_end_gradients(step, carry.gradients, new)

    unchanged = lambda: {name: carry.gradients[name] for name in step.spec.definition.first}
    new = step.cond_at(row, LEAVE, with_microbatch, unchanged)
    return carry._replace(gradients=carry.gradients | new)


def _square_first_gradients(step: Step, carry: _Carry, row: TickPlan) -> _Carry:
    """Computes the squares of the first microbatch's gradients, right after that microbatch."""
    small, before = step.small, carry.squares
    if small is None or before is None:
        return carry
    is_first = row["backward"][step.stage][0] == 0
    after_first = lambda: squares(step.spec, small, carry.gradients)
    return carry._replace(squares=jax.lax.cond(is_first, after_first, lambda: before))


def _add_end_gradients(step: Step, gradients: Params, new: Params) -> Params:
    """Returns the accumulated gradients of these ends of the model plus those of a microbatch."""
    axes = {name: step.spec.trained_axes[name] for name in new}
    reduced = step.weights.reduce(select(new, axes), axes)
    return {name: jax.tree.map(jnp.add, gradients[name], reduced[name]) for name in new}


def _when(
    planned: np.ndarray,
    microbatch: Array,
    scope: str,
    extra_condition: Array | None,
    active: Callable[[], Any],
    idle: Callable[[], Any],
) -> Any:
    """Returns `active()` where there is a microbatch and `extra_condition` is true, else `idle()`. Compiles no
    condition if both always hold."""

    def scoped() -> Any:
        with jax.named_scope(scope):
            return active()

    # The table is static: where every tick has a microbatch, no condition is compiled.
    conditions = [] if (planned >= 0).all() else [microbatch >= 0]
    conditions += [] if extra_condition is None else [extra_condition]
    if not conditions:
        return scoped()
    return jax.lax.cond(functools.reduce(jnp.logical_and, conditions), scoped, idle)
