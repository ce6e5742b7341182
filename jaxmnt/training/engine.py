"""Executes a schedule: all microbatches of a step through all stages, inside the step's shard_map.

One program runs on all stages. Without a pipeline this is gradient accumulation with one stage. A tick is then a
microbatch, forward and backward, or the forward of one and the backward of the previous one.

Splitting backward in two, as zero-bubble schedules do (Qi et al. 2023, arXiv:2401.10241), would be a third phase in the
table: `Layers.backward` would return the input's gradient and store (activations, output gradient) in a second buffer
of slots. The third phase would compute the weights' gradients from it in ticks that are idle now.

Shapes: S a device's piece of the length, D model.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxmnt.models.contract import Params
from jaxmnt.training.device_step import FORWARD, LOSS, RowKeys, Step, TickPlan, prepare_step
from jaxmnt.training.loss import LossSums, no_loss
from jaxmnt.training.noise import squared_norm
from jaxmnt.training.pipeline_schedule import PipelineSchedule
from jaxmnt.training.remat import Residuals
from jaxmnt.training.spec import Batch, StepSpec
from jaxmnt.training.state import abstract_state
from jaxmnt.training.ticks import run_ticks, start_carry


class Results(NamedTuple):
    """Sums and gradients over all microbatches of this batch shard, on this device."""

    sums: LossSums
    layers: dict[str, Any]
    """This device's part of the layers' `sums`, by group, stacked in the device layout."""
    gradients: Params
    squared_norm: Array | None
    """The squared norm of this device's small-batch gradients, if requested."""


def loss_and_gradients(spec: StepSpec, params: Params, buffers: Params, batch: Batch, row_keys: RowKeys) -> Results:
    """Computes the summed loss of this batch shard's rows (or of this stage's tokens of them), and this device's
    gradients of the shard's loss, in float32.

    `row_keys` returns the random keys of a microbatch's rows. Gradients are summed over the axes along which weights
    are gathered, but not yet over the axes along which weights are replicated.
    """
    step = prepare_step(spec, params, buffers, batch, spec.schedule, row_keys)
    final_carry = run_ticks(step)
    weights, gradients = step.weights, final_carry.gradients
    local_squared_norm = final_carry.squared_norm
    if step.small_batches is not None and not step.small_batches.from_first_microbatch:
        # Before `finish`, which may add up the gradients of different small batches.
        local_squared_norm = squared_norm(spec, step.small_batches, weights.reduce_over_stages(gradients))
    finished_gradients = weights.reduce_over_stages(weights.finish(gradients))
    return Results(final_carry.sums, final_carry.layer_sums, finished_gradients, local_squared_norm)


def loss(spec: StepSpec, params: Params, buffers: Params, batch: Batch, schedule: PipelineSchedule) -> LossSums:
    """Computes the summed loss of this batch shard's rows (or of this stage's tokens of them), with a schedule that has
    no backward."""
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
        traces.append(StepTrace(start_carry(step).residuals, gathered_in_float8, (sum(products), len(products))))
        return jnp.zeros(())

    state = abstract_state(spec)
    function = spec.on_mesh(trace_on_device, [spec.row_axes], ())
    jax.eval_shape(function, state["params"], state.get("buffers", {}), spec.abstract_rows())
    return traces[0]


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
