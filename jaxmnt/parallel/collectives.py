"""Communication between devices, for use inside the step's shard_map. An axis of one device costs nothing.

Each collective between a layer's input and its output defines its own transpose, so that gradients are correct by
construction. Along an axis an array is *split* (each device has a piece), *replicated* (each device has the same
array), or *partial* (the array is the sum over the devices). The gradient of a split array is split, that of a
replicated one is partial, and that of a partial one is replicated; docs/models.md has the rules. JAX cannot derive the
transposes: under `check_vma=False` it does not know which array is which.

Shapes: B batch, L length, S this device's piece of the length, D model.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint

from jaxmnt.config.mesh import AXES, STAGE_AXIS, TOKEN_AXES
from jaxmnt.parallel.sharding import Axes, Placement, is_axes

PROJECTED = "projected"
"""Checkpoint name of matrix products computed piece by piece along the length and concatenated."""

WHOLE_SEQUENCE = "whole_sequence"
"""Checkpoint name of activations gathered over the length."""

SCATTERED = "scattered"
"""Checkpoint name of sums scattered over the length."""


def unshard(params: Any, axes: Any, placement: Placement, dtype: jnp.dtype) -> Any:
    """Gathers weights for use, in the compute dtype, from this device's pieces of the stored parameters.

    The cast comes before the gather, so that the gather moves `dtype`. Norm scales become float32.
    """

    def unshard_weight(weight: Array, names: Axes) -> Array:
        if "norm" in names:
            return weight.astype(jnp.float32)
        return unshard_without_cast(weight.astype(dtype), names, placement)

    return jax.tree.map(unshard_weight, params, axes, is_leaf=is_axes)


def unshard_without_cast(piece: Array, names: Axes, placement: Placement) -> Array:
    """Gathers a weight from this device's piece of it, in the piece's dtype."""
    gathered = placement.gathered_axes(names)
    if gathered is None:
        return piece
    dimension, over = gathered
    return jax.lax.all_gather(row_major(piece), over, axis=dimension, tiled=True)


def row_major(array: Array) -> Array:
    """Constrains a part of a stack to row-major order before it is gathered, written to the stack, or used. XLA for
    GPUs prefers the dimension that is gathered or scattered first: it would give that order to the whole stack and copy
    it."""
    return with_layout_constraint(array, Layout(tuple(range(array.ndim))))


def max_abs_per_unit(weights: list[Array], axes: list[Axes], placement: Placement) -> list[Array]:
    """Returns the largest absolute value of each unit, [units], over all pieces of each stack of weights [units, …], in
    one reduction for each set of mesh axes along which they are gathered."""
    largest = [jnp.max(jnp.abs(stack), axis=range(1, stack.ndim)).astype(jnp.float32) for stack in weights]
    over = [gathered[1] if (gathered := placement.gathered_axes(names)) else () for names in axes]
    for along, indices in _indices_by_axes(over):
        pmax = functools.partial(jax.lax.pmax, axis_name=along)
        reduced = _reduce_concatenated(pmax, [largest[index] for index in indices])
        for index, largest_of_all in zip(indices, reduced, strict=True):
            largest[index] = largest_of_all
    return largest


def reshard(gradients: Any, axes: Any, placement: Placement, reduce_dtype: jnp.dtype) -> Any:
    """Reduces gradients of whole weights to this device's pieces of them in float32, summed over the axes along which
    the weights are gathered. Devices exchange them in `reduce_dtype`."""

    def reshard_gradient(gradient: Array, names: Axes) -> Array:
        gathered = placement.gathered_axes(names)
        if gathered is not None:
            dimension, over = gathered
            gradient = gradient.astype(reduce_dtype)
            gradient = jax.lax.psum_scatter(gradient, over, scatter_dimension=dimension, tiled=True)
        return gradient.astype(jnp.float32)

    return jax.tree.map(reshard_gradient, gradients, axes, is_leaf=is_axes)


def reduce_gradients(
    gradients: Any,
    axes: Any,
    placement: Placement,
    reduce_dtype: jnp.dtype,
    is_selected: Callable[[Axes], bool],
) -> Any:
    """Sums local gradients over every mesh axis along which their parameters are replicated. Only gradients whose
    logical axes `is_selected` accepts are summed; the others are returned as they are. Call it once per step for each
    gradient, after the last microbatch."""
    leaves, structure = jax.tree.flatten(gradients)
    named = jax.tree.leaves(axes, is_leaf=is_axes)
    over = [placement.replicated_axes(names) if is_selected(names) else () for names in named]
    for along, indices in _indices_by_axes(over):
        summed = _psum([leaves[index].astype(reduce_dtype) for index in indices], along, placement)
        for index, gradient in zip(indices, summed, strict=True):
            leaves[index] = gradient.astype(jnp.float32)
    return jax.tree.unflatten(structure, leaves)


def _indices_by_axes(over: list[tuple[str, ...]]) -> list[tuple[tuple[str, ...], list[int]]]:
    """Groups the indices of a list by their mesh axes, without those that have none."""
    sets = sorted(set(over) - {()})
    return [(along, [index for index, axes in enumerate(over) if axes == along]) for along in sets]


def sum_over_tokens(tree: Any, placement: Placement) -> Any:
    """Sums each leaf over the devices that have different tokens."""
    return _psum(tree, TOKEN_AXES, placement)


def sum_within_stage(tree: Any, placement: Placement) -> Any:
    """Sums each leaf over all devices of a stage."""
    return _psum(tree, tuple(axis for axis in AXES if axis != STAGE_AXIS), placement)


_BUCKET_BYTES = 25 * 2**20
"""The size of a bucket: only this much is copied at a time, not all gradients at once."""


def _psum(tree: Any, over: tuple[str, ...], placement: Placement) -> Any:
    """Like `jax.lax.psum`. Between processes on CPUs, each sum takes 4 ms in addition to the time for its bytes, so
    arrays are summed in buckets there; XLA for GPUs combines them by itself."""
    if not placement.between_cpu_processes:
        return jax.lax.psum(tree, over)
    leaves, structure = jax.tree.flatten(tree)
    buckets: dict[tuple[Any, int], list[int]] = {}
    filled: dict[Any, int] = {}
    for index, leaf in enumerate(leaves):
        filled[leaf.dtype] = filled.get(leaf.dtype, 0) + leaf.nbytes
        buckets.setdefault((leaf.dtype, filled[leaf.dtype] // _BUCKET_BYTES), []).append(index)
    psum = functools.partial(jax.lax.psum, axis_name=over)
    for indices in buckets.values():
        summed = _reduce_concatenated(psum, [leaves[index] for index in indices])
        for index, leaf in zip(indices, summed, strict=True):
            leaves[index] = leaf
    return jax.tree.unflatten(structure, leaves)


def _reduce_concatenated(reduce: Callable[[Array], Array], arrays: list[Array]) -> list[Array]:
    """Reduces arrays of one dtype as one concatenated array."""
    whole = reduce(jnp.concatenate([array.ravel() for array in arrays]))
    parts = jnp.split(whole, np.cumsum([array.size for array in arrays])[:-1])
    return [part.reshape(array.shape) for part, array in zip(parts, arrays, strict=True)]


def index_along(axis: str, placement: Placement) -> Array:
    """Returns the index of this device's piece of a logical axis."""
    over = placement.mesh_axes(axis)
    return jax.lax.axis_index(over) if over else jnp.int32(0)


def stage_index() -> Array:
    """Returns the index of this device's pipeline stage."""
    return jax.lax.axis_index(STAGE_AXIS)


def gather_sequence(x_BSD: Array, placement: Placement, axis: str = "sequence") -> Array:
    """Gathers [B, L, D] from the pieces of the length, which a logical axis splits: split to replicated. Used at the
    input of attention and MLP."""
    over = placement.mesh_axes(axis)
    if not over:
        return x_BSD
    gather = _with_transpose(functools.partial(_gather, over), functools.partial(_sum_and_scatter, over))
    return checkpoint_name(gather(x_BSD), WHOLE_SEQUENCE)


def scatter_sequence(x_BLD: Array, placement: Placement, split: str, axis: str = "sequence") -> Array:
    """Reduces or slices to [B, S, D] at the output of attention and MLP. Partial to split if `split`, the logical axis
    that was summed over, is split; else replicated to split. If the length stays whole (`whole_length`), partial to
    replicated."""
    over = placement.mesh_axes(axis)
    if not over:
        # The sum over pipeline stages, which may also split the vocabulary, is a separate call of `sum_over_stages`.
        return _sum(x_BLD, tuple(name for name in placement.mesh_axes(split) if name != STAGE_AXIS))
    if not placement.mesh_axes(split):
        return local_shard(x_BLD, placement, axis)
    scatter = _with_transpose(functools.partial(_sum_and_scatter, over), functools.partial(_gather, over))
    return checkpoint_name(scatter(x_BLD), SCATTERED)


def gather_piece_by_piece(
    x_BSD: Array, placement: Placement, work: Callable[[Array], Any], axis: str = "sequence"
) -> tuple[Any, Array]:
    """Returns `work` of each piece of the length, concatenated along the length, and the gathered [B, L, D] itself.

    While a device works on a piece, it sends that piece to the previous device, so no device waits for the whole length
    (Wang et al. 2023, 10.1145/3567955.3567959). Not differentiable: `models.projections` has the transposes.
    """
    [over] = placement.mesh_axes(axis)
    size, device_index = placement.sizes[over], jax.lax.axis_index(over)
    to_previous = [(device, (device - 1) % size) for device in range(size)]
    parts, piece = [], x_BSD
    for step in range(size):
        result, current = work(piece), piece
        if step < size - 1:
            arriving = jax.lax.ppermute(piece, over, to_previous)
            # The next transfer starts only after this piece's work; XLA would otherwise run all transfers first.
            result, piece = jax.lax.optimization_barrier((result, arriving))
        parts.append((result, current))
    length = x_BSD.shape[1]

    def concatenate(*pieces: Array) -> Array:
        whole = jnp.zeros((pieces[0].shape[0], size * length, *pieces[0].shape[2:]), pieces[0].dtype)
        for step, piece in enumerate(pieces):
            whole = jax.lax.dynamic_update_slice_in_dim(whole, piece, (device_index + step) % size * length, axis=1)
        return whole

    return jax.tree.map(concatenate, *parts)


def scatter_piece_by_piece(part: Callable[[Array], Array], placement: Placement, axis: str = "sequence") -> Array:
    """Returns this device's piece of the length, [B, S, D], summed over devices. `part(index)` returns this device's
    addend of a piece.

    Each sum travels from device to device until it reaches the device that owns the piece. Meanwhile each device
    computes its next addend. Sums are added in float32 and sent in the dtype of the parts. Not differentiable.
    """
    [over] = placement.mesh_axes(axis)
    size, device_index = placement.sizes[over], jax.lax.axis_index(over)
    to_next = [(device, (device + 1) % size) for device in range(size)]
    total = part((device_index + size - 1) % size)
    for step in range(1, size):
        arriving = jax.lax.ppermute(total, over, to_next)
        # Without the barrier, XLA fuses the sum into the product, which then waits for the transfer.
        local = jax.lax.optimization_barrier(part((device_index + size - 1 - step) % size))
        total = (arriving.astype(jnp.float32) + local.astype(jnp.float32)).astype(local.dtype)
    return total


def _gather(over: tuple[str, ...], x_BSD: Array) -> Array:
    """Gathers the length."""
    return jax.lax.all_gather(x_BSD, over, axis=1, tiled=True)


def _sum_and_scatter(over: tuple[str, ...], x_BLD: Array) -> Array:
    """Sums over devices and scatters over the length."""
    return jax.lax.psum_scatter(x_BLD, over, scatter_dimension=1, tiled=True)


def local_shard(x_BLD: Array, placement: Placement, axis: str = "sequence") -> Array:
    """Returns this device's piece of the length of an array that all devices have: replicated to split."""
    return piece_of_length(x_BLD, index_along(axis, placement), placement, axis)


def piece_of_length(x_BLD: Array, index: Array, placement: Placement, axis: str = "sequence") -> Array:
    """Returns the piece of the length with this index, [B, S, …], of a whole array."""
    size = x_BLD.shape[1] // placement.num_shards(axis)
    return jax.lax.dynamic_slice_in_dim(x_BLD, index * size, size, axis=1)


def sum_over(axis: str, x: Array, placement: Placement) -> Array:
    """Returns the sum over the pieces of a logical axis: partial to replicated, and so is its transpose."""
    return _sum(x, placement.mesh_axes(axis))


def share_of(axis: str, x: Array, placement: Placement) -> Array:
    """Returns this device's share of a value that all devices of a logical axis have computed alike, so that the sum of
    the shares is the value: replicated to partial, and so is its transpose. It prevents a sum, such as a term of the
    loss, from being counted once per device."""
    return x / placement.num_shards(axis)


def max_over(axis: str, x: Array, placement: Placement) -> Array:
    """Returns the maximum over the pieces of a logical axis. It has no gradient."""
    over = placement.mesh_axes(axis)
    x = jax.lax.stop_gradient(x)
    return jax.lax.pmax(x, over) if over else x


def sum_over_stages(x: Array, placement: Placement) -> Array:
    """Returns the sum over the pipeline's stages: partial to replicated, and so is its transpose."""
    return _sum(x, (STAGE_AXIS,) if placement.stages > 1 else ())


def _sum(x: Array, over: tuple[str, ...]) -> Array:
    if not over:
        return x
    add = lambda x: jax.lax.psum(x, over)
    return _with_transpose(add, add)(x)


def mask_other_stages(x: Array, stage: int, placement: Placement) -> Array:
    """Returns x on `stage` and zeros on the other stages."""
    if placement.stages == 1:
        return x
    is_this_stage = stage_index() == stage
    return jnp.where(is_this_stage, x, jnp.zeros_like(x))


def broadcast_from_stage(x: Array, stage: int, placement: Placement) -> Array:
    """Returns `stage`'s x on every stage, as a sum to which the other stages add zeros."""
    return sum_over_stages(mask_other_stages(x, stage, placement), placement)


def shift_stage(x: Array, placement: Placement, *, forward: bool, circular: bool) -> Array:
    """Sends x to the next stage, or to the previous one. Unless `circular`, the stage at one end receives zeros. Its
    transpose sends in the other direction."""
    stages = placement.stages
    pairs = [(stage, (stage + 1) % stages) for stage in range(stages if circular else stages - 1)]
    reverse_pairs = [(target, source) for source, target in pairs]
    ahead, back = (pairs, reverse_pairs) if forward else (reverse_pairs, pairs)
    hand = lambda pairs: lambda x: jax.lax.ppermute(x, STAGE_AXIS, pairs)
    return _with_transpose(hand(ahead), hand(back))(x)


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def with_backward(
    backward: Callable[..., Any], static: int = 0
) -> Callable[[Callable[Arguments, tuple[Result, Any]]], Callable[Arguments, Result]]:
    """Gives a function that returns (result, residuals) the gradient `backward`, and makes it return the result alone.
    Its first `static` arguments are not arrays; `backward` receives them, too, before the residuals.

    Remat policies see inside the function, including its checkpoint names.
    """

    def decorate(forward: Callable[Arguments, tuple[Result, Any]]) -> Callable[Arguments, Result]:
        @functools.wraps(forward)
        def result(*arguments: Arguments.args, **keywords: Arguments.kwargs) -> Result:
            return forward(*arguments, **keywords)[0]

        function = jax.custom_vjp(result, nondiff_argnums=tuple(range(static)))
        function.defvjp(forward, backward)
        return function

    return decorate


def _with_transpose(function: Callable[[Any], Any], transpose: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a linear function of one array whose gradient is computed by `transpose`."""
    return with_backward(lambda _, gradient: (transpose(gradient),))(lambda x: (function(x), None))
