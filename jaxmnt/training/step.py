"""The training step and the evaluation step, as pure functions of (state, batch).

state = {"params": …, "optimizer": …, "counters": {"step": int32}, "bad_steps": {"total": int32, "in_a_row": int32}}
batch = {"tokens", "targets", "weights", "segments", "positions": [global rows, length], "control": [devices, 2]}
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmnt.models.decoder import Params
from jaxmnt.parallel import collectives
from jaxmnt.parallel.sharding import is_axes
from jaxmnt.training import engine
from jaxmnt.training.loss import LossSums
from jaxmnt.training.pipeline_schedule import build_schedule
from jaxmnt.training.spec import BATCH_LOGICAL_AXES, Batch, State, StepSpec

Metrics = dict[str, jax.Array]


def train_step(spec: StepSpec, state: State, batch: Batch) -> tuple[State, Metrics]:
    """One optimizer update from one global batch. To be jitted with the state donated.

    The loss is the mean over all real targets of the global batch, whatever the mesh and the number of microbatches:
    sums travel to the end and are divided once. If the loss or the gradient is not finite, the batch counts as taken
    but nothing else changes: neither parameters nor the optimizer, whose schedule therefore goes by updates.
    """
    step, bad = state["counters"]["step"], state["bad_steps"]
    sums, tokens, scale, gradients = mean_gradients(spec, state["params"], batch, step)
    loss, norm = sums.cross_entropy * scale, optax.tree.norm(gradients)
    # Both are sums over all devices: what one of them decides, all do.
    good = jnp.isfinite(loss) & jnp.isfinite(norm)
    clip = spec.config.optimizer.clip_norm
    if clip is not None:
        factor = jnp.minimum(1, clip / jnp.maximum(norm, 1e-12))
        gradients = jax.tree.map(lambda g: g * factor, gradients)
    updates, optimizer = spec.optimizer.update(gradients, state["optimizer"], state["params"])
    keep_good = lambda new, old: jnp.where(good, new, old)
    new_state = {
        "params": jax.tree.map(keep_good, optax.apply_updates(state["params"], updates), state["params"]),
        "optimizer": jax.tree.map(keep_good, optimizer, state["optimizer"]),
        "counters": {"step": step + 1},
        "bad_steps": {
            "total": bad["total"] + jnp.where(good, 0, 1),
            "in_a_row": jnp.where(good, 0, bad["in_a_row"] + 1),
        },
    }
    metrics = {
        "loss": loss,
        "grad_norm": norm,
        "learning_rate": jnp.asarray(spec.learning_rate(step - bad["total"]), jnp.float32),
        "tokens": tokens,
        "bad_steps": new_state["bad_steps"]["total"],
        "bad_in_a_row": new_state["bad_steps"]["in_a_row"],
        # Over all devices, so that no process misses another's wish.
        "stop": jnp.sum(batch["control"][:, 0]),
        "save": jnp.sum(batch["control"][:, 1]),
    }
    return new_state, metrics


def mean_gradients(
    spec: StepSpec, params: Params, batch: Batch, step: jax.Array
) -> tuple[LossSums, jax.Array, jax.Array, Params]:
    """Sums of the loss, the number of real targets, one over the sum of their weights, and float32 gradients of the
    mean loss, sharded like the parameters."""
    rows = {name: batch[name] for name in BATCH_LOGICAL_AXES}
    sums, tokens, weight, gradients = _sharded(spec, _local_gradients, with_gradients=True)(params, rows, step)
    scale = 1 / jnp.maximum(weight, 1e-9)
    return sums, tokens, scale, jax.tree.map(lambda g: g * scale, gradients)


def eval_step(spec: StepSpec, params: Params, batch: Batch) -> Metrics:
    """Sums of cross-entropy and of real targets over one global evaluation batch, and whether anybody wants to stop."""
    rows = {name: batch[name] for name in BATCH_LOGICAL_AXES}
    sums, tokens = _sharded(spec, _local_evaluation, with_gradients=False)(params, rows)
    return {"loss_sum": sums.cross_entropy, "tokens": tokens, "stop": jnp.sum(batch["control"][:, 0])}


def _sharded(spec: StepSpec, function: Callable[..., Any], *, with_gradients: bool) -> Callable[..., Any]:
    """`function(spec, …)` run on each device's pieces."""
    placement = spec.placement
    params = jax.tree.map(placement.spec, spec.definition.axes, is_leaf=is_axes)
    rows = {name: placement.spec(names) for name, names in BATCH_LOGICAL_AXES.items()}
    whole = jax.sharding.PartitionSpec()
    if with_gradients:
        in_specs: tuple[Any, ...] = (params, rows, whole)
        out_specs: tuple[Any, ...] = (whole, whole, whole, params)
    else:
        in_specs, out_specs = (params, rows), (whole, whole)
    # No vma check: gradients are taken inside, of local values, and every reduction is written out.
    return jax.shard_map(
        lambda *arguments: function(spec, *arguments),
        mesh=placement.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
    )


def _local_gradients(
    spec: StepSpec, params: Params, batch: Batch, step: jax.Array
) -> tuple[LossSums, jax.Array, jax.Array, Params]:
    """On one device: gradients of the summed loss over all microbatches, then one reduction over the replicas."""
    sums, gradients = engine.loss_and_gradients(spec, params, batch, lambda index: _row_keys(spec, step, index))
    weights = batch["weights"]
    counts = (sums, jnp.sum(weights > 0, dtype=jnp.int32), jnp.sum(weights))
    sums, tokens, weight = collectives.sum_over_batch(counts)
    axes, placement = spec.definition.axes, spec.placement
    return sums, tokens, weight, collectives.reduce_gradients(gradients, axes, placement, spec.reduce_dtype)


def _local_evaluation(spec: StepSpec, params: Params, batch: Batch) -> tuple[LossSums, jax.Array]:
    training = spec.schedule
    schedule = build_schedule("forward", training.stages, training.microbatches, training.chunks)
    sums = engine.loss(spec, params, batch, schedule)
    tokens = jnp.sum(batch["weights"] > 0, dtype=jnp.int32)
    return collectives.sum_over_batch((sums, tokens))


def _row_keys(spec: StepSpec, step: jax.Array, microbatch: jax.Array) -> jax.Array | None:
    """A random key for each row of a microbatch from (seed, step, global row), or None without dropout."""
    if spec.config.model.dropout == 0:
        return None
    rows, count = spec.microbatch_rows, spec.num_microbatches
    first = (collectives.batch_shard_index() * count + microbatch) * rows
    key = jax.random.fold_in(jax.random.key(spec.config.seed), step)
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(first + jnp.arange(rows))
