"""Communication between devices, for use inside the step's shard_map. An axis of one device costs nothing.

Shapes: B batch, L length, S this device's piece of the length, D model.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxmnt.parallel.sharding import BATCH_AXES, Axes, Placement, is_axes

WHOLE_SEQUENCE = "whole_sequence"
"""Checkpoint name of activations gathered over the length."""

SCATTERED = "scattered"
"""Checkpoint name of sums that were scattered over the length."""


def unshard(params: Any, axes: Any, placement: Placement, dtype: jnp.dtype) -> Any:
    """Weights as they are used, in the compute dtype, from this device's pieces of the stored parameters.

    Cast before the gather, so that the gather moves `dtype`. Norm scales become float32.
    """

    def one(weight: jax.Array, names: Axes) -> jax.Array:
        if "norm" in names:
            return weight.astype(jnp.float32)
        gathered = placement.gathered_axes(names)
        if gathered is None:
            return weight.astype(dtype)
        dimension, over = gathered
        return jax.lax.all_gather(weight.astype(dtype), over, axis=dimension, tiled=True)

    return jax.tree.map(one, params, axes, is_leaf=is_axes)


def reshard(gradients: Any, axes: Any, placement: Placement, reduce_dtype: jnp.dtype) -> Any:
    """From gradients of whole weights to this device's pieces of them in float32, summed over the axes that the weights
    are gathered over. What crosses devices is in `reduce_dtype`."""

    def one(gradient: jax.Array, names: Axes) -> jax.Array:
        gathered = placement.gathered_axes(names)
        if gathered is not None:
            dimension, over = gathered
            gradient = gradient.astype(reduce_dtype)
            gradient = jax.lax.psum_scatter(gradient, over, scatter_dimension=dimension, tiled=True)
        return gradient.astype(jnp.float32)

    return jax.tree.map(one, gradients, axes, is_leaf=is_axes)


def reduce_gradients(gradients: Any, axes: Any, placement: Placement, reduce_dtype: jnp.dtype) -> Any:
    """Sums local gradients over every mesh axis that their parameters are replicated over.

    Called once a step, after all microbatches.
    """

    def one(gradient: jax.Array, names: Axes) -> jax.Array:
        over = placement.replicated_axes(names)
        if not over:
            return gradient
        return jax.lax.psum(gradient.astype(reduce_dtype), over).astype(jnp.float32)

    return jax.tree.map(one, gradients, axes, is_leaf=is_axes)


def sum_over_batch(tree: Any) -> Any:
    """Sums each leaf over all batch shards."""
    return jax.lax.psum(tree, BATCH_AXES)


def batch_shard_index() -> jax.Array:
    """This device's batch shard, counted in global row order."""
    return jax.lax.axis_index(BATCH_AXES)


def index_along(axis: str, placement: Placement) -> jax.Array:
    """Which piece of a logical axis this device has."""
    over = placement.mesh_axes(axis)
    return jax.lax.axis_index(over) if over else jnp.int32(0)


def gather_sequence(x_BSD: jax.Array, placement: Placement) -> jax.Array:
    """[B, L, D] from the pieces of the length: the way into attention and MLP. Its transpose sums and scatters."""
    over = placement.mesh_axes("sequence")
    if not over:
        return x_BSD
    return checkpoint_name(jax.lax.all_gather(x_BSD, over, axis=1, tiled=True), WHOLE_SEQUENCE)


def scatter_sequence(x_BLD: jax.Array, placement: Placement, split: str) -> jax.Array:
    """[B, S, D]: the way out. Where `split`, the logical axis that was summed over, is split, adds up the parts."""
    over = placement.mesh_axes("sequence")
    if not over:
        return x_BLD
    if not placement.mesh_axes(split):
        return local_shard(x_BLD, placement)
    return checkpoint_name(jax.lax.psum_scatter(x_BLD, over, scatter_dimension=1, tiled=True), SCATTERED)


def local_shard(x_BLD: jax.Array, placement: Placement) -> jax.Array:
    """This device's piece of the length of something that all devices have whole."""
    size = x_BLD.shape[1] // placement.num_shards("sequence")
    return jax.lax.dynamic_slice_in_dim(x_BLD, index_along("sequence", placement) * size, size, axis=1)


def sum_over(axis: str, x: jax.Array, placement: Placement) -> jax.Array:
    """The sum over the pieces of a logical axis."""
    over = placement.mesh_axes(axis)
    return jax.lax.psum(x, over) if over else x


def max_over(axis: str, x: jax.Array, placement: Placement) -> jax.Array:
    """The maximum over the pieces of a logical axis."""
    over = placement.mesh_axes(axis)
    return jax.lax.pmax(x, over) if over else x


def sum_over_stages(x: jax.Array, placement: Placement) -> jax.Array:
    """The sum over the pipeline's stages."""
    return jax.lax.psum(x, "pipeline") if placement.stages > 1 else x


def broadcast_from_stage(x: jax.Array, stage: int, placement: Placement) -> jax.Array:
    """What `stage` has, on every stage: a sum to which the others add zeros."""
    if placement.stages == 1:
        return x
    mine = jax.lax.axis_index("pipeline") == stage
    return jax.lax.psum(jnp.where(mine, x, jnp.zeros_like(x)), "pipeline")


def shift_stage(x: jax.Array, placement: Placement, *, forward: bool, circular: bool) -> jax.Array:
    """Hands x to the next stage, or to the one before. Unless `circular`, one end gets zeros."""
    stages = placement.stages
    pairs = [(stage, (stage + 1) % stages) for stage in range(stages if circular else stages - 1)]
    return jax.lax.ppermute(x, "pipeline", pairs if forward else [(b, a) for a, b in pairs])
