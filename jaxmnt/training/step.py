"""The training step and the evaluation step, as pure functions of (state, batch).

state = {"params": …, "optimizer": …, "counters": {"step": int32}, "bad_steps": {"total": int32, "in_a_row": int32}},
and "buffers": … if the model has state that no gradient touches.
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
from jaxmnt.training import engine, noise
from jaxmnt.training.loss import LossSums
from jaxmnt.training.pipeline_schedule import build_schedule
from jaxmnt.training.spec import Batch, State, StepSpec
from jaxmnt.training.trained import replaced, select

Metrics = dict[str, Any]


def train_step(spec: StepSpec, state: State, batch: Batch) -> tuple[State, Metrics]:
    """One optimizer update from one global batch. To be jitted with the state donated.

    The loss is the mean over all real targets of the global batch, whatever the mesh and the number of microbatches:
    sums travel to the end and are divided once. If the loss or the gradient is not finite, or if the batch has no real
    target, the batch counts as taken but nothing else changes: neither parameters nor the optimizer, whose schedule
    therefore goes by updates. Without a target the means are NaN: there is no value.
    """
    step, bad, params = state["counters"]["step"], state["bad_steps"], state["params"]
    buffers = state.get("buffers", {})
    found = mean_gradients(spec, params, buffers, batch, step)
    loss, norm, gradients = found.sums.cross_entropy * found.scale, optax.tree.norm(found.gradients), found.gradients
    # All three are sums over all devices: what one of them decides, all do.
    has_targets = found.tokens > 0
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    is_bad, updates_state = has_targets & ~finite, has_targets & finite
    clip = spec.config.optimizer.clip_norm
    if clip is not None:
        factor = jnp.minimum(1, clip / jnp.maximum(norm, 1e-12))
        gradients = jax.tree.map(lambda g: g * factor, gradients)
    trained = select(params, spec.trained_axes)
    updates, optimizer = spec.optimizer.update(gradients, state["optimizer"], trained)
    take_over = lambda new, old: jnp.where(updates_state, new, old)
    updated = jax.tree.map(take_over, optax.apply_updates(trained, updates), trained)
    new_state = {
        "params": replaced(params, updated, spec.trained_axes),
        "optimizer": jax.tree.map(take_over, optimizer, state["optimizer"]),
        "counters": {"step": step + 1},
        "bad_steps": {
            "total": bad["total"] + is_bad,
            # A step without targets says nothing about the steps before and after it.
            "in_a_row": jnp.where(updates_state, 0, bad["in_a_row"] + is_bad),
        },
    }
    if buffers:
        new_state["buffers"] = jax.tree.map(take_over, _updated_buffers(spec, buffers, found.layers), buffers)
    # Over all devices, so that no process misses another's wish.
    stop, save, profile = jnp.sum(batch["control"], axis=0)
    measured = {"loss": loss, "grad_norm": norm, "model": _layer_metrics(spec, found)}
    measured |= {} if found.squares is None else {"gradient_squares": found.squares}
    metrics = {
        **jax.tree.map(lambda value: _value_if(has_targets, value), measured),
        "learning_rate": jnp.asarray(spec.learning_rate(updates_applied(state)), jnp.float32),
        "tokens": found.tokens,
        "bad_steps": new_state["bad_steps"]["total"],
        "bad_in_a_row": new_state["bad_steps"]["in_a_row"],
        "stop": stop,
        "save": save,
        "profile": profile,
    }
    return new_state, metrics


def updates_applied(state: State) -> Array:
    """Returns the number of updates so far: the optimizer counts them for its schedule. Batches are counted apart:
    a bad step and a step without targets take a batch and apply no update."""
    return state["optimizer"]["learning_rate"].count


def _value_if(has_targets: Array, value: Array) -> Array:
    """Returns a mean over targets, NaN if there are none. An integer is a count, and stays."""
    is_mean = jnp.issubdtype(jnp.result_type(value), jnp.floating)
    return jnp.where(has_targets, value, jnp.nan) if is_mean else jnp.asarray(value)


def _updated_buffers(spec: StepSpec, buffers: Params, layers: dict[str, Any]) -> Params:
    """By the family's rule, which is for buffers as they are stored."""
    layout, axes = spec.layout, spec.definition.buffer_axes
    stored = map_with_axes(layout.to_checkpoint_layout, buffers, axes)
    new = spec.definition.family.update_buffers(stored, layers)
    shapes = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)
    if shapes(new) != shapes(stored):
        raise ConfigError(
            "model.family: update_buffers must return the buffers that it was given, with their names, shapes and "
            f"dtypes, {shapes(stored)}; it returns {shapes(new)}"
        )
    return map_with_axes(layout.to_device_layout, new, axes)


def _layer_metrics(spec: StepSpec, found: "Mean") -> dict[str, Array]:
    metrics = spec.definition.family.metrics(found.layers, found.tokens)
    wrong = sorted(name for name, value in metrics.items() if jnp.shape(value) != ())
    if wrong:
        raise ConfigError(f"model.family: metrics must return numbers by name; {wrong[0]} is none")
    return metrics


class Mean(NamedTuple):
    """Of a global batch."""

    sums: LossSums
    """Over all real targets, with the layers' terms in `loss`."""
    tokens: Array
    """Real targets."""
    scale: Array
    """One over the sum of their weights; 0 if there are none."""
    layers: dict[str, Any]
    """What the layers returned as sums, stacked as they are stored."""
    gradients: Params
    """Float32 gradients of the mean loss, sharded like the parameters."""
    squares: dict[str, Array] | None
    """Of the gradients of the mean loss of small batches, on average, and of the whole one, if they are asked for."""


def mean_gradients(spec: StepSpec, params: Params, buffers: Params, batch: Batch, step: Array) -> Mean:
    """Loss and gradients of one global batch."""
    layer_axes = {group.name: (group.name,) for group in spec.definition.groups}  # stacked like parameters
    out = ((), (), (), layer_axes, spec.trained_axes, ("devices",))
    sharded = spec.on_mesh(functools.partial(_local_gradients, spec), [spec.row_axes, ()], out)
    sums, tokens, weight, layers, gradients, squared = sharded(params, buffers, _rows(spec, batch), step)
    stack_axes = lambda path, leaf: (path[0].key, *[None] * (leaf.ndim - 1))
    store = lambda path, leaf: spec.layout.to_checkpoint_layout(leaf, stack_axes(path, leaf))
    stored = jax.tree.map_with_path(store, layers)
    terms = [jnp.sum(leaf) for path, leaf in jax.tree.leaves_with_path(stored) if path[-1].key == "loss"]
    scale = jnp.where(weight > 0, 1 / jnp.maximum(weight, 1e-9), 0)
    gradients = jax.tree.map(lambda g: g * scale, gradients)
    squares = None if squared is None else _mean_squares(spec, squared, gradients, scale)
    return Mean(sums._replace(loss=sum(terms, sums.loss)), tokens, scale, stored, gradients, squares)


def _mean_squares(spec: StepSpec, squared: Array, gradients: Params, scale: Array) -> dict[str, Array]:
    """`squared` has the squares of each device's sums over small batches, [devices]; their targets are taken to weigh
    what those of the whole batch do."""
    small = noise.small_batches(spec)
    assert small is not None
    mean = jnp.sum(squared) / small.samples * (scale / small.share) ** 2
    return {"small": mean, "large": noise.squares(spec, small, gradients)}


def eval_step(spec: StepSpec, params: Params, buffers: Params, batch: Batch) -> Metrics:
    """Sums of cross-entropy and of real targets over one global evaluation batch, and whether anybody wants to stop."""
    sharded = spec.on_mesh(functools.partial(_local_evaluation, spec), [spec.row_axes], ((), ()))
    sums, tokens = sharded(params, buffers, _rows(spec, batch))
    return {"loss_sum": sums.cross_entropy, "tokens": tokens, "stop": jnp.sum(batch["control"][:, 0])}


def _rows(spec: StepSpec, batch: Batch) -> Batch:
    """Returns a batch without its control flags."""
    return {field.name: batch[field.name] for field in spec.fields}


def _local_gradients(
    spec: StepSpec, params: Params, buffers: Params, batch: Batch, step: Array
) -> tuple[LossSums, Array, Array, dict[str, Any], Params, Array | None]:
    """On one device: gradients of the summed loss over all microbatches, then one reduction over the replicas, where
    backward has not done it."""
    found = engine.loss_and_gradients(spec, params, buffers, batch, functools.partial(_row_keys, spec, step))
    weights = batch["weights"]
    counts = (found.sums, _targets_of(weights), jnp.sum(weights))
    sums, tokens, weight = collectives.sum_over_tokens(counts, spec.placement)
    layers = collectives.sum_over_stage(found.layers, spec.placement)
    late = lambda names: not spec.is_reduced_early(names)
    gradients = collectives.reduce_gradients(
        found.gradients, spec.trained_axes, spec.placement, spec.reduce_dtype, late
    )
    squared = None if found.squares is None else found.squares[None]
    return sums, tokens, weight, layers, gradients, squared


def _local_evaluation(spec: StepSpec, params: Params, buffers: Params, batch: Batch) -> tuple[LossSums, Array]:
    training = spec.schedule
    schedule = build_schedule("forward", training.stages, training.microbatches, training.chunks)
    sums = engine.loss(spec, params, buffers, batch, schedule)
    tokens = _targets_of(batch["weights"])
    return collectives.sum_over_tokens((sums, tokens), spec.placement)


def _targets_of(weights: Array) -> Array:
    """Returns the number of targets. A weight of NaN counts as one: its step is bad, and not without targets."""
    return jnp.sum(weights != 0, dtype=jnp.int32)


def _row_keys(spec: StepSpec, step: Array, microbatch: Array) -> Array | None:
    """A random key for each row of a microbatch from (seed, step, global row), or None without dropout."""
    if spec.config.model.dropout == 0:
        return None
    rows, count = spec.microbatch_rows, spec.num_microbatches
    first = (collectives.index_along("batch", spec.placement) * count + microbatch) * rows
    key = jax.random.fold_in(jax.random.key(spec.config.seed), step)
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(first + jnp.arange(rows))
