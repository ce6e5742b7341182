"""Communication along the mesh axes that split a batch, for use inside the step's shard_map."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxmnt.placement.rules import BATCH_AXES, Axes, Placement, is_axes

GATHERED = "gathered_weights"
"""Checkpoint name of gathered weights: no remat policy may keep them, or fsdp would save no memory."""


def unshard(params: Any, axes: Any, placement: Placement, dtype: jnp.dtype) -> Any:
    """Whole weights in the compute dtype from this device's shards of float32 parameters.

    Cast before the gather, so that the gather moves `dtype`. The gradient comes back reduced over fsdp in
    float32 and scattered to the shards. Parameters with no sharded dimension (norms) stay float32.
    """

    def one(weight: jax.Array, names: Axes) -> jax.Array:
        if "norm" in names:
            return weight
        dimension = next((i for i, spec in enumerate(placement.manual_spec(names)) if spec == "fsdp"), None)
        if dimension is None or not placement.gathers:
            whole = weight.astype(dtype)
        else:
            whole = _gather(weight, dimension, dtype)
        return checkpoint_name(whole, GATHERED)

    return jax.tree.map(one, params, axes, is_leaf=is_axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(weight: jax.Array, dimension: int, dtype: jnp.dtype) -> jax.Array:
    return jax.lax.all_gather(weight.astype(dtype), "fsdp", axis=dimension, tiled=True)


def _gather_forward(weight: jax.Array, dimension: int, dtype: jnp.dtype) -> tuple[jax.Array, None]:
    return jax.lax.all_gather(weight.astype(dtype), "fsdp", axis=dimension, tiled=True), None


def _gather_backward(dimension: int, dtype: jnp.dtype, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    del dtype
    # float32: exact over many devices, and a bfloat16 reduction here aborts XLA's CPU backend.
    return (jax.lax.psum_scatter(cotangent.astype(jnp.float32), "fsdp", scatter_dimension=dimension, tiled=True),)


_gather.defvjp(_gather_forward, _gather_backward)


def reduce_gradients(gradients: Any, axes: Any, placement: Placement) -> Any:
    """Sums local gradients over the batch axes that their parameters are not sharded over.

    Called once a step, after all accumulation passes.
    """

    def one(gradient: jax.Array, names: Axes) -> jax.Array:
        sharded = placement.manual_spec(names)
        missing = tuple(axis for axis in BATCH_AXES if placement.sizes[axis] > 1 and axis not in sharded)
        return jax.lax.psum(gradient, missing) if missing else gradient

    return jax.tree.map(one, gradients, axes, is_leaf=is_axes)


def sum_over_batch(tree: Any) -> Any:
    """Sums each leaf over all batch shards."""
    return jax.lax.psum(tree, BATCH_AXES)


def batch_shard_index() -> jax.Array:
    """This device's batch shard, counted in global row order."""
    return jax.lax.axis_index(BATCH_AXES)
