"""Runs the ticks of a training step: forward, loss and backward of microbatches, and the exchange between stages.

In each tick a stage does the work that the schedule's table assigns to it, sends its output to the next stage, and
sends its input's gradient to the previous stage. In *steady* ticks, which are most of them, every stage has a forward
of one microbatch and a backward of another, and the two run side by side. In the other ticks of a pipeline, a stage
that is idle in a phase skips the phase with `lax.cond`. All devices of a stage take the same branch, so they may
communicate inside it.

Shapes: B rows of a microbatch, S a device's piece of the length, D model.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxmnt.models.contract import Params
from jaxmnt.models.layers import zeros_after
from jaxmnt.parallel.sharding import is_axes
from jaxmnt.training.device_step import BACKWARD, EMBED_BACKWARD, FORWARD, LOSS, STEADY, Step, Tick, TickPlan
from jaxmnt.training.loss import LossSums, no_loss
from jaxmnt.training.noise import squared_norm
from jaxmnt.training.remat import Residuals
from jaxmnt.training.side_by_side import BothPasses, forward_beside_backward
from jaxmnt.training.trained import select_trained


class Carry(NamedTuple):
    """The carry of the loop over training ticks."""

    arriving_BSD: Array  # activations from the previous stage
    arriving_gradient_BSD: Array  # the gradient of an output, from the next stage
    residuals: dict[str, Residuals]  # by group, the arrays that forward stored for backward in each slot
    pending_loss_gradients: Array  # [slots, B, S, D], the gradients that the last stage's backward has yet to use
    gradients: Params
    sums: LossSums
    layer_sums: dict[str, Any]
    squared_norm: Array | None  # of the first microbatch's gradients, if requested


def run_ticks(step: Step) -> Carry:
    """Runs all ticks of a training step, and returns the final carry."""
    if not step.schedule.steady_ticks:
        return step.run(functools.partial(_tick, step), start_carry(step), _last_tick(step))
    return _run_single_stage(step) if step.is_single_stage else _run_around_steady_ticks(step)


def _run_single_stage(step: Step) -> Carry:
    """Runs the ticks of a step without a pipeline in which forward and backward run side by side. All ticks are steady
    but the first, which has no backward, and the last, which has no forward."""
    steady = step.schedule.steady_ticks
    first, last = range(steady.start), range(steady.stop, step.schedule.ticks)
    first_step, steady_step, last_step = map(step.in_ticks, (first, steady, last))
    carry = first_step.run(functools.partial(_forward_tick, first_step), start_carry(step))
    carry = steady_step.run(functools.partial(_steady_tick, steady_step), carry)
    return last_step.run(functools.partial(_backward_tick, last_step), carry)


def _run_around_steady_ticks(step: Step) -> Carry:
    """Runs the ticks of a pipeline, of which the steady ones have a program of their own.

    One loop runs the ticks before and after the steady ones. An inner loop runs the steady ticks after the last tick
    before them, and no iteration in other ticks. So the program contains the layers twice instead of three times. The
    compiler does not know how long the inner loop is.
    """
    steady = step.schedule.steady_ticks
    others = [tick for tick in range(step.schedule.ticks) if tick not in steady]
    steady_step, other_step = step.in_ticks(steady), step.in_ticks(others)
    to_device = lambda arrays: jax.tree.map(jnp.asarray, arrays)
    steady_plans = to_device(steady_step.table.arrays)

    def run_steady_tick(index: Array, carry: Carry) -> Carry:
        plan = jax.tree.map(lambda array: array[index], steady_plans)
        return _steady_tick(steady_step, carry, plan)[0]

    def run_tick(carry: Carry, plan_and_count: tuple[TickPlan, Array]) -> tuple[Carry, None]:
        plan, steady_count = plan_and_count
        carry, _ = _tick(other_step, carry, plan)
        # The planner reads the mean number of iterations from this name.
        with jax.named_scope(f"about_{len(steady) / len(others):.9f}_rounds"):
            return jax.lax.fori_loop(0, steady_count, run_steady_tick, carry), None

    steady_counts = np.where(np.array(others) == steady.start - 1, len(steady), 0).astype(np.int32)
    assert steady_counts.any(), "in its first tick, a pipeline has no backward"
    plans = to_device((other_step.table.arrays, steady_counts))
    return jax.lax.scan(run_tick, start_carry(step), plans)[0]


def start_carry(step: Step) -> Carry:
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
    return Carry(
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
    if not _reduces_early(step):
        return None
    if step.schedule.ticks == 1:
        return functools.partial(_tick, step, last=True)

    def last_tick(carry: Carry, plan: TickPlan) -> tuple[Carry, None]:
        return _tick(step, *_after_other_ticks(step, carry, plan), last=True)

    return last_tick


def _reduces_early(step: Step) -> bool:
    """Returns True if gradients are summed over replicas in the last microbatch's backward pass."""
    return any(map(step.spec.is_reduced_early, jax.tree.leaves(step.spec.trained_axes, is_leaf=is_axes)))


def _after_other_ticks(step: Step, carry: Carry, plan: TickPlan) -> tuple[Carry, TickPlan]:
    """Returns the arguments of the last tick, which runs after all others.

    Without the barrier, XLA overlaps the last microbatch with the previous ones, which keeps both sets of residuals and
    the weights gathered for the previous microbatches alive. The layers and the ends read `step.weights`, so they also
    use the weights that the barrier returns.
    """
    carry, plan, step.weights.params = jax.lax.optimization_barrier((carry, plan, step.weights.params))
    return carry, plan


def _tick(step: Step, carry: Carry, plan: TickPlan, *, last: bool = False) -> tuple[Carry, None]:
    """Runs one tick of training: forward, loss, backward, and the exchange with the neighbouring stages."""
    y_BSD, y_gradient_BSD, carry = _forward_and_loss(step, carry, plan)
    x_gradient_BSD, carry = _backward(step, carry, plan, y_gradient_BSD, last)
    return _finish_tick(step, carry, plan, y_BSD, x_gradient_BSD), None


def _forward_tick(step: Step, carry: Carry, plan: TickPlan) -> tuple[Carry, None]:
    """Runs the first microbatch's forward pass and loss, without a pipeline."""
    return _forward_and_loss(step, carry, plan)[-1], None


def _backward_tick(step: Step, carry: Carry, plan: TickPlan) -> tuple[Carry, None]:
    """Runs the last microbatch's backward pass, without a pipeline."""
    carry, plan = _after_other_ticks(step, carry, plan)
    _, read_slot = plan["pending"]
    y_gradient_BSD = carry.pending_loss_gradients[read_slot]
    x_gradient_BSD, carry = _backward(step, carry, plan, y_gradient_BSD, last=_reduces_early(step))
    return _embedding_backward(step, carry, plan, x_gradient_BSD), None


@jax.named_scope(STEADY)
def _steady_tick(step: Step, carry: Carry, plan: TickPlan) -> tuple[Carry, None]:
    """Runs one tick in which every stage has a forward and a backward, of two microbatches, side by side."""
    forward, backward = step.pass_at(plan, "forward", FORWARD), step.pass_at(plan, "backward", BACKWARD)
    _, read_slot = plan["pending"]
    y_gradient_BSD = _gradient_of_output(step, carry, backward.chunk, carry.pending_loss_gradients[read_slot])
    both = forward_beside_backward(
        step.layers,
        forward,
        backward,
        BothPasses(
            step.chunk_input(plan, forward.chunk, carry.arriving_BSD),
            y_gradient_BSD,
            carry.residuals,
            carry.layer_sums,
            {name: carry.gradients[name] for name in step.layers},
        ),
    )
    carry = carry._replace(residuals=both.residuals, layer_sums=both.sums, gradients=carry.gradients | both.gradients)
    loss_gradient_BSD, carry = _loss(step, carry, plan, both.x_BSD)
    _, carry = _delay_loss_gradient(step, carry, plan, loss_gradient_BSD)
    return _finish_tick(step, carry, plan, both.x_BSD, both.x_gradient_BSD), None


def _finish_tick(step: Step, carry: Carry, plan: TickPlan, y_BSD: Array, x_gradient_BSD: Array) -> Carry:
    """Adds the embedding's gradient, and exchanges with the neighbouring stages."""
    carry = _embedding_backward(step, carry, plan, x_gradient_BSD)
    carry = _squared_norm_of_first_gradients(step, carry, plan)
    arriving_BSD = step.shift_between_stages(y_BSD, forward=True)
    arriving_gradient_BSD = step.shift_between_stages(x_gradient_BSD, forward=False)
    return carry._replace(arriving_BSD=arriving_BSD, arriving_gradient_BSD=arriving_gradient_BSD)


def _gradient_of_output(step: Step, carry: Carry, chunk: Array, loss_gradient_BSD: Array) -> Array:
    """Returns the gradient of a chunk's output. This is the loss's gradient for the last piece of the model, and what
    has arrived from the next stage for all others."""
    if step.is_single_stage:
        return loss_gradient_BSD
    is_last = (step.stage == step.schedule.stages - 1) & (chunk == step.schedule.chunks - 1)
    return jnp.where(is_last, loss_gradient_BSD, carry.arriving_gradient_BSD)


def _forward_and_loss(step: Step, carry: Carry, plan: TickPlan) -> tuple[Array, Array, Carry]:
    """Runs this tick's forward pass and loss. Returns the output, the loss's gradient for this tick's backward, and the
    carry."""
    y_BSD, carry = _forward(step, carry, plan)
    y_gradient_BSD, carry = _loss(step, carry, plan, y_BSD)
    y_gradient_BSD, carry = _delay_loss_gradient(step, carry, plan, y_gradient_BSD)
    return y_BSD, y_gradient_BSD, carry


def _forward(step: Step, carry: Carry, plan: TickPlan) -> tuple[Array, Carry]:
    """Runs this tick's forward pass through a chunk and stores its residuals."""
    chunk_pass = step.pass_at(plan, "forward", FORWARD)
    y_BSD = step.chunk_input(plan, chunk_pass.chunk, carry.arriving_BSD)
    residuals, sums = dict(carry.residuals), dict(carry.layer_sums)
    for name, layers in step.layers.items():
        y_BSD, residuals[name], sums[name] = layers.forward(y_BSD, chunk_pass, residuals[name], sums[name])
    return y_BSD, carry._replace(residuals=residuals, layer_sums=sums)


def _loss(step: Step, carry: Carry, plan: TickPlan, y_BSD: Array) -> tuple[Array, Carry]:
    """Returns the gradient of the loss with respect to the last stage's output, and the carry with this microbatch's
    loss added, in a tick in which the last stage finishes a microbatch. In other ticks the gradient is zero."""

    def loss_of_microbatch() -> tuple[LossSums, Array, Params]:
        sums, y_gradient_BSD, new_gradients = step.ends.loss_and_gradients(y_BSD, step.rows(plan[LOSS]))
        return carry.sums.plus(sums), y_gradient_BSD, _add_end_gradients(step, carry.gradients, new_gradients)

    old_gradients = {name: carry.gradients[name] for name in step.spec.definition.modules_after}
    skip = lambda: (carry.sums, jnp.zeros_like(y_BSD), old_gradients)
    sums, y_gradient_BSD, end_gradients = step.run_if_at_pipeline_end(plan, LOSS, loss_of_microbatch, skip)
    return y_gradient_BSD, carry._replace(sums=sums, gradients=carry.gradients | end_gradients)


def _delay_loss_gradient(step: Step, carry: Carry, plan: TickPlan, y_gradient_BSD: Array) -> tuple[Array, Carry]:
    """Stores the loss's gradient until the last stage's backward needs it, and returns the one that this tick uses."""
    if not step.table.pending_slots:
        return y_gradient_BSD, carry
    write_slot, read_slot = plan["pending"]
    stored_gradient = jnp.where(plan[LOSS] >= 0, y_gradient_BSD, carry.pending_loss_gradients[write_slot])
    pending = carry.pending_loss_gradients.at[write_slot].set(stored_gradient)
    return pending[read_slot], carry._replace(pending_loss_gradients=pending)


def _backward(step: Step, carry: Carry, plan: TickPlan, y_gradient_BSD: Array, last: bool) -> tuple[Array, Carry]:
    """Runs this tick's backward pass through a chunk and adds the weights' gradients."""
    chunk_pass = step.pass_at(plan, "backward", BACKWARD)
    gradients = dict(carry.gradients)
    y_gradient_BSD = _gradient_of_output(step, carry, chunk_pass.chunk, y_gradient_BSD)
    if step.is_single_stage:
        y_gradient_BSD, gradients = _reduce_head_first(step, y_gradient_BSD, gradients)
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


def _embedding_backward(step: Step, carry: Carry, plan: TickPlan, x_gradient_BSD: Array) -> Carry:
    """Adds the embedding's gradient, in a tick in which the first stage finishes a microbatch's backward pass."""

    def add_gradients() -> Params:
        new_gradients = step.ends.embed_gradient(x_gradient_BSD, step.rows(plan[EMBED_BACKWARD]))
        return _add_end_gradients(step, carry.gradients, new_gradients)

    skip = lambda: {name: carry.gradients[name] for name in step.spec.definition.modules_before}
    end_gradients = step.run_if_at_pipeline_end(plan, EMBED_BACKWARD, add_gradients, skip)
    return carry._replace(gradients=carry.gradients | end_gradients)


def _squared_norm_of_first_gradients(step: Step, carry: Carry, plan: TickPlan) -> Carry:
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
