"""The training step and the evaluation step, as pure functions of (state, batch).

state = {"params": …, "optimizer": …, "counters": {"step": int32}, "bad_steps": {"total": int32, "in_a_row": int32}}. It
also has "buffers": … if the model has state that no gradient touches, and "average": … with `optimizer.average`.
batch = {field: [global rows, length] for each of `StepSpec.fields`, "control": [devices, 3]}
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxmnt.errors import ConfigError
from jaxmnt.models.contract import Params
from jaxmnt.parallel import collectives
from jaxmnt.parallel.layout import map_with_axes
from jaxmnt.parallel.stages import sum_over_shares
from jaxmnt.training import engine, noise
from jaxmnt.training.average import update_average
from jaxmnt.training.loss import LossSums
from jaxmnt.training.pipeline_schedule import build_schedule
from jaxmnt.training.spec import Batch, State, StepSpec
from jaxmnt.training.trained import replace_trained, select_trained

Metrics = dict[str, Any]


def train_step(spec: StepSpec, state: State, batch: Batch) -> tuple[State, Metrics]:
    """Applies one optimizer update from one global batch. Callers jit it and donate the state.

    The loss is the mean over all real targets of the global batch, whatever the mesh and the number of microbatches,
    because everything is summed first and divided once at the end. If the loss or the gradient is not finite, or if the
    batch has no real target, the batch is counted, but parameters and optimizer state do not change. Nor does the
    learning-rate schedule advance, because it counts updates. Without a target the means are NaN, because they have no
    value.
    """
    step, bad_steps, params = state["counters"]["step"], state["bad_steps"], state["params"]
    buffers = state.get("buffers", {})
    batch_mean = mean_gradients(spec, params, buffers, batch, step)
    gradients = batch_mean.gradients
    loss, norm = batch_mean.sums.cross_entropy * batch_mean.scale, optax.tree.norm(gradients)
    # Loss, norm and tokens are sums over all devices, so all devices make the same decision.
    has_targets = batch_mean.tokens > 0
    is_finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    is_bad, updates_state = has_targets & ~is_finite, has_targets & is_finite
    # Clip here rather than in the optimizer, because the norm is also a metric.
    max_norm = spec.config.optimizer.clip_norm
    if max_norm is not None:
        factor = jnp.minimum(1, max_norm / jnp.maximum(norm, 1e-12))
        gradients = jax.tree.map(lambda g: g * factor, gradients)
    trained_params = select_trained(params, spec.trained_axes)
    updates, optimizer = spec.optimizer.update(gradients, state["optimizer"], trained_params)
    # The update is always computed, but a bad step or a step without targets discards it.
    new_if_updated = lambda new, old: jnp.where(updates_state, new, old)
    updated_params = jax.tree.map(new_if_updated, optax.apply_updates(trained_params, updates), trained_params)
    new_state = {
        "params": replace_trained(params, updated_params, spec.trained_axes),
        "optimizer": jax.tree.map(new_if_updated, optimizer, state["optimizer"]),
        "counters": {"step": step + 1},
        "bad_steps": {
            "total": bad_steps["total"] + is_bad,
            # A step without targets says nothing about the steps before and after it.
            "in_a_row": jnp.where(updates_state, 0, bad_steps["in_a_row"] + is_bad),
        },
    }
    if buffers:
        new_state["buffers"] = jax.tree.map(new_if_updated, _update_buffers(spec, buffers, batch_mean.layers), buffers)
    if spec.config.optimizer.average is not None:
        average = update_average(spec, state["average"], updated_params, step + 1)
        new_state["average"] = jax.tree.map(new_if_updated, average, state["average"])
    # The flags are summed over all devices, so that every process sees those of all others.
    stop, save, profile = jnp.sum(batch["control"], axis=0)
    # Means over targets are NaN without targets; the other metrics have a value in every step.
    metrics = {
        **jax.tree.map(lambda value: _mean_or_nan(has_targets, value), _target_metrics(spec, batch_mean, norm)),
        "learning_rate": jnp.asarray(spec.learning_rate(updates_applied(state)), jnp.float32),
        "tokens": batch_mean.tokens,
        "bad_steps": new_state["bad_steps"]["total"],
        "bad_in_a_row": new_state["bad_steps"]["in_a_row"],
        "stop": stop,
        "save": save,
        "profile": profile,
    }
    return new_state, metrics


def _target_metrics(spec: StepSpec, mean: "MeanGradients", norm: Array) -> Metrics:
    """Returns the metrics that are means over targets. `norm` is that of the gradients."""
    metrics = {
        "loss": mean.sums.cross_entropy * mean.scale,
        "grad_norm": norm,
        "model": _layer_metrics(spec, mean),
    }
    if spec.reported:
        metrics["reported"] = mean.sums.ratios
    if mean.squared_norms is not None:
        metrics["gradient_squares"] = mean.squared_norms
    return metrics


def updates_applied(state: State) -> Array:
    """Returns the number of updates so far, which the optimizer counts for its schedule. It can be less than the number
    of batches, because a bad step or a step without targets uses a batch but applies no update."""
    return state["optimizer"]["learning_rate"].count


def _mean_or_nan(has_targets: Array, value: Array) -> Array:
    """Replaces a floating-point `value`, which is a mean over targets, with NaN if there are no targets. An integer is
    a count and is returned unchanged."""
    is_mean = jnp.issubdtype(jnp.result_type(value), jnp.floating)
    return jnp.where(has_targets, value, jnp.nan) if is_mean else jnp.asarray(value)


def _update_buffers(spec: StepSpec, buffers: Params, layers: dict[str, Any]) -> Params:
    """Returns the buffers after the family's update rule, which works on buffers in the checkpoint layout."""
    layout, axes = spec.layout, spec.definition.buffer_axes
    old_buffers = map_with_axes(layout.to_checkpoint_layout, buffers, axes)
    new_buffers = spec.definition.family.update_buffers(old_buffers, layers)
    shapes = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)
    if shapes(new_buffers) != shapes(old_buffers):
        raise ConfigError(
            "model.family: update_buffers must return buffers with the names, shapes and dtypes of those passed to it, "
            f"{shapes(old_buffers)}; it returns {shapes(new_buffers)}"
        )
    return map_with_axes(layout.to_device_layout, new_buffers, axes)


def _layer_metrics(spec: StepSpec, mean: "MeanGradients") -> dict[str, Array]:
    """Returns the family's metrics. Raises `ConfigError` if one is not a scalar."""
    metrics = spec.definition.family.metrics(mean.layers, mean.tokens)
    not_scalar = sorted(name for name, metric in metrics.items() if jnp.shape(metric) != ())
    if not_scalar:
        raise ConfigError(f"model.family: metrics must return a scalar for each name; {not_scalar[0]} is not a scalar")
    return metrics


class MeanGradients(NamedTuple):
    """Loss and gradients of a global batch."""

    sums: LossSums
    """Sums over all real targets. `loss` includes the auxiliary losses of the layers."""
    tokens: Array
    """The number of real targets."""
    scale: Array
    """One over the sum of the real targets' weights, or 0 if there are no real targets."""
    layers: dict[str, Any]
    """The layers' `sums`, stacked in the checkpoint layout."""
    gradients: Params
    """Float32 gradients of the mean loss, sharded like the parameters."""
    squared_norms: dict[str, Array] | None
    """The squared norms of the mean loss's gradients, if requested. `small` is the mean over the small batches, and
    `large` is that of the whole batch."""


def mean_gradients(spec: StepSpec, params: Params, buffers: Params, batch: Batch, step: Array) -> MeanGradients:
    """Computes the loss and the gradients of one global batch."""
    # The layers' sums are stacked like parameters.
    layer_axes = {group.name: (group.name,) for group in spec.definition.groups}
    out_axes = ((), (), (), layer_axes, spec.trained_axes, ("devices",))
    compute = spec.on_mesh(functools.partial(_local_gradients, spec), [spec.row_axes, ()], out_axes)
    sums, tokens, weight, layers, gradients, local_squared_norms = compute(params, buffers, _rows(spec, batch), step)

    def to_checkpoint_layout(path: Any, leaf: Array) -> Array:
        return spec.layout.to_checkpoint_layout(leaf, (path[0].key, *[None] * (leaf.ndim - 1)))

    layer_sums = jax.tree.map_with_path(to_checkpoint_layout, layers)
    # The layers' own terms of the loss, such as a router's, belong to the minimised loss.
    terms = [jnp.sum(leaf) for path, leaf in jax.tree.leaves_with_path(layer_sums) if path[-1].key == "loss"]
    # Turn sums into means with the only division, after all devices and microbatches have been summed.
    scale = jnp.where(weight > 0, 1 / jnp.maximum(weight, 1e-9), 0)
    gradients = jax.tree.map(lambda g: g * scale, gradients)
    squared_norms = None
    if local_squared_norms is not None:
        squared_norms = _mean_squared_norms(spec, local_squared_norms, gradients, scale)
    return MeanGradients(sums._replace(loss=sum(terms, sums.loss)), tokens, scale, layer_sums, gradients, squared_norms)


def _mean_squared_norms(
    spec: StepSpec, local_squared_norms: Array, gradients: Params, scale: Array
) -> dict[str, Array]:
    """Returns the squared norms of the mean loss's gradients, for the small batches and for the whole batch.
    `local_squared_norms`, [devices], has the squared norm of each device's gradients of the summed loss of a small
    batch. The targets of a small batch are assumed to have the same mean weight as those of the whole batch."""
    small_batches = noise.small_batches(spec)
    assert small_batches is not None
    small = jnp.sum(local_squared_norms) / small_batches.samples * (scale / small_batches.share) ** 2
    return {"small": small, "large": noise.squared_norm(spec, small_batches, gradients)}


def eval_step(spec: StepSpec, params: Params, buffers: Params, batch: Batch) -> Metrics:
    """Computes the sum of the cross-entropy, the number of real targets and the sums of the loss's own metrics in one
    global evaluation batch, and the number of devices whose process asks to stop."""
    evaluate = spec.on_mesh(functools.partial(_local_evaluation, spec), [spec.row_axes], ((), ()))
    sums, tokens = evaluate(params, buffers, _rows(spec, batch))
    stop = jnp.sum(batch["control"][:, 0])
    return {"loss_sum": sums.cross_entropy, "tokens": tokens, "reported": dict(sums.reported), "stop": stop}


def _rows(spec: StepSpec, batch: Batch) -> Batch:
    """Returns a batch without its control flags."""
    return {field.name: batch[field.name] for field in spec.fields}


def _local_gradients(
    spec: StepSpec, params: Params, buffers: Params, batch: Batch, step: Array
) -> tuple[LossSums, Array, Array, dict[str, Any], Params, Array | None]:
    """Computes the gradients of the summed loss over all microbatches, on one device. Then sums over the replicas those
    gradients that backward has not summed."""
    local_results = engine.loss_and_gradients(spec, params, buffers, batch, functools.partial(_row_keys, spec, step))
    weights = batch["weights"]
    local_sums = (local_results.sums, _count_targets(weights), jnp.sum(weights))
    stage_sums, tokens, weight = collectives.sum_over_tokens(local_sums, spec.placement)
    sums = sum_over_shares(stage_sums, spec.placement)
    layers = collectives.sum_within_stage(local_results.layers, spec.placement)
    is_unreduced = lambda names: not spec.is_reduced_early(names)
    gradients = collectives.reduce_gradients(
        local_results.gradients, spec.trained_axes, spec.placement, spec.reduce_dtype, is_unreduced
    )
    local_squared_norms = None if local_results.squared_norm is None else local_results.squared_norm[None]
    return sums, tokens, weight, layers, gradients, local_squared_norms


def _local_evaluation(spec: StepSpec, params: Params, buffers: Params, batch: Batch) -> tuple[LossSums, Array]:
    """Computes the loss sums and the number of real targets of an evaluation batch, on one device."""
    train_schedule = spec.schedule
    schedule = build_schedule("forward", train_schedule.stages, train_schedule.microbatches, train_schedule.chunks)
    sums = engine.loss(spec, params, buffers, batch, schedule)
    tokens = _count_targets(batch["weights"])
    stage_sums, tokens = collectives.sum_over_tokens((sums, tokens), spec.placement)
    return sum_over_shares(stage_sums, spec.placement), tokens


def _count_targets(weights: Array) -> Array:
    """Returns the number of targets, which are the tokens with a nonzero weight. A weight of NaN also counts, so that a
    step with such a weight is a bad step, not one without targets."""
    return jnp.sum(weights != 0, dtype=jnp.int32)


def _row_keys(spec: StepSpec, step: Array, microbatch: Array) -> Array | None:
    """Returns a random key for each row of a microbatch, or None without dropout. A key is derived from (seed, step,
    global row)."""
    if spec.config.model.dropout == 0:
        return None
    rows, microbatches = spec.microbatch_rows, spec.num_microbatches
    first_row = (collectives.index_along("batch", spec.placement) * microbatches + microbatch) * rows
    key = jax.random.fold_in(jax.random.key(spec.config.seed), step)
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(first_row + jnp.arange(rows))
