"""Executes a schedule: all microbatches of a step through all stages, inside the step's shard_map.

One program runs on all stages. It loops over the schedule's ticks, and in each tick a stage does the work that the
table assigns to it, sends its output to the next stage, and sends its input's gradient to the previous stage. A stage
that is idle in a phase of a tick skips the phase with `lax.cond`. All devices of a stage take the same branch, so they
may communicate inside it. Without a pipeline this is gradient accumulation: one stage, one tick per microbatch, no idle
phases, and no stored activations of other microbatches.

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
from jaxmnt.training.noise import SmallBatches, small_batches, squared_norm
from jaxmnt.training.pipeline_schedule import PipelineSchedule, Table, schedule_table
from jaxmnt.training.remat import Residuals
from jaxmnt.training.spec import Batch, StepSpec
from jaxmnt.training.stage import Layers, Pass, PrefetchedLayers, Rows, microbatch_rows
from jaxmnt.training.state import abstract_state
from jaxmnt.training.trained import select_trained
from jaxmnt.training.weights import WEIGHTS_BY_ZERO, Weights

FORWARD, BACKWARD, LOSS, EMBED, EMBED_BACKWARD = "stage_forward", "stage_backward", "loss", "enter", "leave"
"""The scopes in the compiled program for phases that a condition may skip. `LOSS`, `EMBED` and `EMBED_BACKWARD` are
also the names of the table's arrays for the ends of the pipeline."""


RowKeys = Callable[[Array], Array | None]
"""A function that returns the random keys of a microbatch's rows, or None without dropout."""

TickPlan = dict[str, Array]
"""The entry for one tick in each of the table's arrays."""

Tick = Callable[[Any, TickPlan], tuple[Any, None]]
"""A function that runs one tick. It takes the carry and the plan of the tick, and returns (new carry, None)."""


class Results(NamedTuple):
    """Sums and gradients over all microbatches of this batch shard, on this device."""

    sums: LossSums
    layers: dict[str, Any]
    """This device's part of the layers' `sums`, by group, stacked in the device layout."""
    gradients: Params
    squared_norm: Array | None
    """The squared norm of this device's small-batch gradients, if requested."""


def loss_and_gradients(spec: StepSpec, params: Params, buffers: Params, batch: Batch, row_keys: RowKeys) -> Results:
    """Computes the summed loss of this batch shard's rows, and this device's gradients of that loss, in float32.

    `row_keys` returns the random keys of a microbatch's rows. Gradients are summed over the axes along which weights
    are gathered, but not yet over the axes along which weights are replicated.
    """
    step = prepare_step(spec, params, buffers, batch, spec.schedule, row_keys)
    final_carry = step.run(functools.partial(_tick, step), _start(step), _last_tick(step))
    local_squared_norm = final_carry.squared_norm
    if step.small_batches is not None and not step.small_batches.from_first_microbatch:
        local_squared_norm = squared_norm(spec, step.small_batches, final_carry.gradients)
    return Results(
        final_carry.sums, final_carry.layer_sums, step.weights.finish(final_carry.gradients), local_squared_norm
    )


def loss(spec: StepSpec, params: Params, buffers: Params, batch: Batch, schedule: PipelineSchedule) -> LossSums:
    """Computes the summed loss of this batch shard's rows, with a schedule that has no backward."""
    step = prepare_step(spec, params, buffers, batch, schedule)
    return step.run(functools.partial(_evaluation_tick, step), (step.zero_activations(), no_loss(spec.reported)))[1]


class StepTrace(NamedTuple):
    """Facts about one device's part of a step, from tracing the step without running it."""

    residuals: dict[str, Residuals]
    """The buffers for residuals in all slots, by group of layers."""
    gathered_in_float8: dict[str, list[list[bool]]]
    """Flags that say for each parameter whether it is gathered in float8, by group of layers and index in its
    pattern."""
    products: tuple[int, int]
    """The number of the layers' matrix products in float8, and the number of all of them; both are 0 without float8."""


def trace_step(spec: StepSpec) -> StepTrace:
    """Traces a step without running it, and returns facts about one device's part of it."""
    traces: list[StepTrace] = []

    def trace_on_device(params: Params, buffers: Params, batch: Batch) -> Array:
        step = prepare_step(spec, params, buffers, batch, spec.schedule)
        gathered_in_float8 = {name: layers.weights.gathered_in_float8 for name, layers in step.layers.items()}
        products: list[bool] = []
        for layers in step.layers.values() if spec.float8 else ():
            products += layers.products(step.zero_activations(), step.layer_rows(jnp.int32(0)))
        traces.append(StepTrace(_start(step).residuals, gathered_in_float8, (sum(products), len(products))))
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
    """The ends of the model: the embedding, and the final norm, head and loss."""
    fields: Batch
    """The batch's fields, each [A, B, L]."""
    row_keys: RowKeys
    targets_per_token: Array | None
    """See `LayerContext.targets_per_token`; None if the family does not use it."""
    small_batches: SmallBatches | None
    """The small batches whose gradients are squared, if requested."""

    @property
    def is_single_stage(self) -> bool:
        """True if there is no pipeline."""
        return self.schedule.stages == 1

    def run(self, tick: Tick, start: Any, last_tick: Tick | None = None) -> Any:
        """Runs `tick` from `start` over all ticks and returns the final carry. `last_tick`, if given, replaces `tick`
        in the last tick."""
        arrays, ticks = self.table.arrays, self.schedule.ticks
        if ticks > 1:
            looped_ticks = ticks if last_tick is None else ticks - 1
            looped_plans = jax.tree.map(lambda array: jnp.asarray(array[:looped_ticks]), arrays)
            start = jax.lax.scan(tick, start, looped_plans)[0]
            if last_tick is None:
                return start
        last_plan = jax.tree.map(lambda array: jnp.asarray(array[-1]), arrays)
        return (last_tick or tick)(start, last_plan)[0]

    def rows(self, microbatch: Array) -> Batch:
        """Returns a microbatch's fields, [B, L] each. For -1, which stands for no microbatch, it returns rows that are
        not used."""
        pick = lambda field: jax.lax.dynamic_index_in_dim(field, jnp.maximum(microbatch, 0), keepdims=False)
        return jax.tree.map(pick, self.fields)

    def layer_rows(self, microbatch: Array) -> Rows:
        """Returns the fields of a microbatch that all layers use."""
        microbatch = jnp.maximum(microbatch, 0)
        return microbatch_rows(self.spec, self.rows(microbatch), self.row_keys(microbatch), self.targets_per_token)

    def zero_activations(self) -> Array:
        """Returns zeros [B, S, D], shaped like the activations that stages send to each other."""
        spec = self.spec
        length = spec.placement.local_length(spec.config.data.sequence_length)
        return jnp.zeros((spec.microbatch_rows, length, spec.config.model.hidden_size), spec.dtype)

    def pass_at(self, plan: TickPlan, phase: str, scope: str) -> Pass:
        """Returns the pass of a microbatch through a chunk of this stage in a phase of a tick."""
        microbatch, chunk, slot = plan[phase][self.stage]
        run_if_active = functools.partial(_run_if_active, self.table.arrays[phase][..., 0], microbatch, scope)
        return Pass(chunk, slot, self.layer_rows(microbatch), run_if_active)

    def run_if_at_pipeline_end(
        self, plan: TickPlan, end: str, compute: Callable[[], Any], skip: Callable[[], Any]
    ) -> Any:
        """Returns `compute()` in a tick in which a microbatch is at this end of the pipeline (`EMBED`, `LOSS` or
        `EMBED_BACKWARD`), else `skip()`."""
        return _run_if_active(self.table.arrays[end], plan[end], end, None, compute, skip)

    def chunk_input(self, plan: TickPlan, chunk: Array, arriving_BSD: Array) -> Array:
        """Returns a chunk's input. This is the embedding for the first stage's first chunk, and `arriving_BSD`, the
        output of the previous piece of the model, for all other chunks."""
        embed = lambda: self.ends.embed(self.rows(plan[EMBED]))
        x_BSD = self.run_if_at_pipeline_end(plan, EMBED, embed, lambda: arriving_BSD)
        return x_BSD if self.is_single_stage else jnp.where((self.stage == 0) & (chunk == 0), x_BSD, arriving_BSD)

    def shift_between_stages(self, x_BSD: Array, *, forward: bool) -> Array:
        """Sends x to the next stage if `forward`, else to the previous one, and returns the activations or gradients
        that arrive from the other neighbour."""
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
    weights = WEIGHTS_BY_ZERO[spec.zero](spec, params)
    stage = 0 if schedule.stages == 1 else collectives.stage_index()
    split_into_microbatches = lambda field: field.reshape(-1, spec.microbatch_rows, *field.shape[1:])
    fields = jax.tree.map(split_into_microbatches, batch)
    layers = {}
    layers_class = PrefetchedLayers if spec.prefetch else Layers
    for group in spec.definition.groups:
        order = np.array([[-1 if unit is None else unit for unit in units] for units in spec.slots[group.name]])
        stage_order = jnp.asarray(order)[stage]
        depth = order.shape[1] // schedule.chunks
        all_filled = bool((order >= 0).all())
        layers[group.name] = layers_class(spec, group, weights, buffers, stage_order, depth, all_filled=all_filled)
    step = Step(
        spec, schedule, schedule_table(schedule), stage, weights, layers, EmbedAndHead(spec, weights), fields, row_keys,
        _targets_per_token(spec, batch), small_batches(spec),
    )  # fmt: skip
    if spec.float8 and spec.config.train.float8_gather and spec.zero == 3:
        for group_layers in layers.values():
            group_layers.enable_float8_gather(step.zero_activations(), step.layer_rows(jnp.int32(0)))
    return step


def _targets_per_token(spec: StepSpec, batch: Batch) -> Array | None:
    """Returns `LayerContext.targets_per_token` of a step, or None if the family does not use it."""
    if not spec.definition.family.uses_targets_per_token:
        return None
    local_sums = (jnp.sum(batch["weights"]), jnp.sum(batch["segments"] > 0, dtype=jnp.float32))
    weight, tokens = collectives.sum_over_tokens(local_sums, spec.placement)
    return weight / jnp.maximum(tokens, 1)


def _evaluation_tick(step: Step, carry: tuple[Array, LossSums], plan: TickPlan) -> tuple[tuple[Array, LossSums], None]:
    """Runs one tick of evaluation."""
    arriving_BSD, sums = carry
    chunk_pass = step.pass_at(plan, "forward", FORWARD)
    y_BSD = step.chunk_input(plan, chunk_pass.chunk, arriving_BSD)
    for layers in step.layers.values():
        y_BSD = layers.evaluate(y_BSD, chunk_pass)
    add_loss = lambda: sums.plus(step.ends.loss(y_BSD, step.rows(plan[LOSS])))
    sums = step.run_if_at_pipeline_end(plan, LOSS, add_loss, lambda: sums)
    return (step.shift_between_stages(y_BSD, forward=True), sums), None


class _Carry(NamedTuple):
    """The carry of the loop over training ticks."""

    arriving_BSD: Array  # activations from the previous stage
    arriving_gradient_BSD: Array  # the gradient of an output, from the next stage
    residuals: dict[str, Residuals]  # by group, the arrays that forward stored for backward in each slot
    pending_loss_gradients: Array  # [slots, B, S, D], the gradients that the last stage's backward has yet to use
    gradients: Params
    sums: LossSums
    layer_sums: dict[str, Any]
    squared_norm: Array | None  # of the first microbatch's gradients, if requested


def _start(step: Step) -> _Carry:
    """Returns the carry before the first tick."""
    zero_activations, batches = step.zero_activations(), step.small_batches
    rows = step.layer_rows(jnp.int32(0))
    allocated_arrays = {
        name: layers.allocate(step.table.slots, zero_activations, rows) for name, layers in step.layers.items()
    }
    pending = jnp.zeros((step.table.pending_slots, *zero_activations.shape), zero_activations.dtype)
    residuals = {name: buffers for name, (buffers, _) in allocated_arrays.items()}
    layer_sums = {name: sums for name, (_, sums) in allocated_arrays.items()}
    needs_squared_norm = batches is not None and batches.from_first_microbatch
    return _Carry(
        arriving_BSD=zero_activations,
        arriving_gradient_BSD=zero_activations,
        residuals=residuals,
        pending_loss_gradients=pending,
        gradients=step.weights.zero_gradients(),
        sums=no_loss(step.spec.reported),
        layer_sums=layer_sums,
        squared_norm=jnp.zeros((), jnp.float32) if needs_squared_norm else None,
    )


def _last_tick(step: Step) -> Tick | None:
    """Returns the function that runs the last tick, or None if that tick runs like the others. It differs if gradients
    are summed over replicas while its backward runs."""
    if not any(map(step.spec.is_reduced_early, jax.tree.leaves(step.spec.trained_axes, is_leaf=is_axes))):
        return None
    if step.schedule.ticks == 1:
        return functools.partial(_tick, step, last=True)

    def last_tick(carry: _Carry, plan: TickPlan) -> tuple[_Carry, None]:
        # Without the barrier, XLA overlaps the last microbatch with the previous ones, which keeps both sets of
        # residuals and the weights gathered for the previous microbatches alive. The layers and the ends read
        # `step.weights`, so they also use the weights that the barrier returns.
        carry, plan, step.weights.params = jax.lax.optimization_barrier((carry, plan, step.weights.params))
        return _tick(step, carry, plan, last=True)

    return last_tick


def _tick(step: Step, carry: _Carry, plan: TickPlan, *, last: bool = False) -> tuple[_Carry, None]:
    """Runs one tick of training: forward, loss, backward, and the exchange with the neighbouring stages."""
    y_BSD, carry = _forward(step, carry, plan)
    y_gradient_BSD, carry = _loss(step, carry, plan, y_BSD)
    y_gradient_BSD, carry = _delay_loss_gradient(step, carry, plan, y_gradient_BSD)
    x_gradient_BSD, carry = _backward(step, carry, plan, y_gradient_BSD, last)
    carry = _embedding_backward(step, carry, plan, x_gradient_BSD)
    carry = _squared_norm_of_first_gradients(step, carry, plan)
    arriving_BSD = step.shift_between_stages(y_BSD, forward=True)
    arriving_gradient_BSD = step.shift_between_stages(x_gradient_BSD, forward=False)
    return carry._replace(arriving_BSD=arriving_BSD, arriving_gradient_BSD=arriving_gradient_BSD), None


def _forward(step: Step, carry: _Carry, plan: TickPlan) -> tuple[Array, _Carry]:
    """Runs this tick's forward pass through a chunk and stores its residuals."""
    chunk_pass = step.pass_at(plan, "forward", FORWARD)
    y_BSD = step.chunk_input(plan, chunk_pass.chunk, carry.arriving_BSD)
    residuals, sums = dict(carry.residuals), dict(carry.layer_sums)
    for name, layers in step.layers.items():
        y_BSD, residuals[name], sums[name] = layers.forward(y_BSD, chunk_pass, residuals[name], sums[name])
    return y_BSD, carry._replace(residuals=residuals, layer_sums=sums)


def _loss(step: Step, carry: _Carry, plan: TickPlan, y_BSD: Array) -> tuple[Array, _Carry]:
    """Returns the gradient of the loss with respect to the last stage's output, and the carry with this microbatch's
    loss added, in a tick in which the last stage finishes a microbatch. In other ticks the gradient is zero."""

    def loss_of_microbatch() -> tuple[LossSums, Array, Params]:
        sums, y_gradient_BSD, new_gradients = step.ends.loss_and_gradients(y_BSD, step.rows(plan[LOSS]))
        return carry.sums.plus(sums), y_gradient_BSD, _add_end_gradients(step, carry.gradients, new_gradients)

    old_gradients = {name: carry.gradients[name] for name in step.spec.definition.modules_after}
    skip = lambda: (carry.sums, jnp.zeros_like(y_BSD), old_gradients)
    sums, y_gradient_BSD, end_gradients = step.run_if_at_pipeline_end(plan, LOSS, loss_of_microbatch, skip)
    return y_gradient_BSD, carry._replace(sums=sums, gradients=carry.gradients | end_gradients)


def _delay_loss_gradient(step: Step, carry: _Carry, plan: TickPlan, y_gradient_BSD: Array) -> tuple[Array, _Carry]:
    """Stores the loss's gradient until the last stage's backward needs it, and returns the one that this tick uses."""
    if not step.table.pending_slots:
        return y_gradient_BSD, carry
    write_slot, read_slot = plan["pending"]
    stored_gradient = jnp.where(plan[LOSS] >= 0, y_gradient_BSD, carry.pending_loss_gradients[write_slot])
    pending = carry.pending_loss_gradients.at[write_slot].set(stored_gradient)
    return pending[read_slot], carry._replace(pending_loss_gradients=pending)


def _backward(step: Step, carry: _Carry, plan: TickPlan, y_gradient_BSD: Array, last: bool) -> tuple[Array, _Carry]:
    """Runs this tick's backward pass through a chunk and adds the weights' gradients."""
    chunk_pass = step.pass_at(plan, "backward", BACKWARD)
    gradients = dict(carry.gradients)
    if step.is_single_stage:
        y_gradient_BSD, gradients = _reduce_head_first(step, y_gradient_BSD, gradients)
    else:
        is_last = (step.stage == step.schedule.stages - 1) & (chunk_pass.chunk == step.schedule.chunks - 1)
        y_gradient_BSD = jnp.where(is_last, y_gradient_BSD, carry.arriving_gradient_BSD)
    if step.schedule.ticks == 1:
        # With a single tick, allocate the layer gradients only after the head's backward pass. No earlier tick has
        # added to them, and allocating them sooner would only take memory while the head's gradients are also alive.
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
    head_gradients = {name: gradients[name] for name in step.spec.definition.modules_after}
    y_gradient_BSD, head_gradients = jax.lax.optimization_barrier((y_gradient_BSD, head_gradients))
    return y_gradient_BSD, gradients | head_gradients


def _embedding_backward(step: Step, carry: _Carry, plan: TickPlan, x_gradient_BSD: Array) -> _Carry:
    """Adds the embedding's gradient, in a tick in which the first stage finishes a microbatch's backward pass."""

    def add_gradients() -> Params:
        new_gradients = step.ends.embed_gradient(x_gradient_BSD, step.rows(plan[EMBED_BACKWARD]))
        return _add_end_gradients(step, carry.gradients, new_gradients)

    skip = lambda: {name: carry.gradients[name] for name in step.spec.definition.modules_before}
    end_gradients = step.run_if_at_pipeline_end(plan, EMBED_BACKWARD, add_gradients, skip)
    return carry._replace(gradients=carry.gradients | end_gradients)


def _squared_norm_of_first_gradients(step: Step, carry: _Carry, plan: TickPlan) -> _Carry:
    """Adds the squared norm of the first microbatch's gradients to the carry, in the tick of that microbatch's backward
    pass."""
    batches, previous_norm = step.small_batches, carry.squared_norm
    if batches is None or previous_norm is None:
        return carry
    is_first = plan["backward"][step.stage][0] == 0
    compute = lambda: squared_norm(step.spec, batches, carry.gradients)
    return carry._replace(squared_norm=jax.lax.cond(is_first, compute, lambda: previous_norm))


def _add_end_gradients(step: Step, gradients: Params, new_gradients: Params) -> Params:
    """Adds a microbatch's `new_gradients`, of modules at an end of the model, to the accumulated ones, and returns the
    sums."""
    axes = {name: step.spec.trained_axes[name] for name in new_gradients}
    reduced = step.weights.reduce(select_trained(new_gradients, axes), axes)
    return {name: jax.tree.map(jnp.add, gradients[name], reduced[name]) for name in new_gradients}


def _run_if_active(
    microbatch_of_ticks: np.ndarray,
    microbatch: Array,
    scope: str,
    extra_condition: Array | None,
    compute: Callable[[], Any],
    skip: Callable[[], Any],
) -> Any:
    """Returns `compute()` in `scope` if this tick has a microbatch and `extra_condition` is true or None, else
    `skip()`. No condition is compiled if every tick in `microbatch_of_ticks` has a microbatch and `extra_condition` is
    None."""

    def compute_in_scope() -> Any:
        with jax.named_scope(scope):
            return compute()

    conditions = [] if (microbatch_of_ticks >= 0).all() else [microbatch >= 0]
    conditions += [] if extra_condition is None else [extra_condition]
    if not conditions:
        return compute_in_scope()
    return jax.lax.cond(functools.reduce(jnp.logical_and, conditions), compute_in_scope, skip)
