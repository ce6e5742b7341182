"""Communication between devices, for use inside the step's shard_map. An axis of one device costs nothing.

Each collective between a layer's input and its output defines its own transpose, so that gradients are correct by
construction. Along an axis an array is *split* (each device has a piece), *replicated* (each device has the same
array), or *partial* (the array is the sum over the devices). The gradient of a split array is split, that of a
replicated one is partial, and that of a partial one is replicated; docs/models.md has the rules. JAX cannot derive the
transposes: under `check_vma=False` it does not know which array is which.

Shapes: B batch, L length, S this device's piece of the length, N pieces of a row, P pieces of all rows, D model.
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
from jaxmnt.parallel.sharding import FLOAT32_AXES, Axes, Placement, is_axes

PROJECTED = "projected"
"""Checkpoint name of matrix products computed piece by piece along the length and concatenated."""

WHOLE_SEQUENCE = "whole_sequence"
"""Checkpoint name of activations gathered over the length."""

SCATTERED = "scattered"
"""Checkpoint name of sums scattered over the length."""


def unshard(params: Any, axes: Any, placement: Placement, dtype: jnp.dtype) -> Any:
    """Gathers weights for use, in the compute dtype, from this device's pieces of the stored parameters.

    Weights are cast before the gather, so that devices exchange them in `dtype`. Norm scales and routers become
    float32.
    """

    def unshard_weight(weight: Array, names: Axes) -> Array:
        return unshard_without_cast(weight.astype(dtype_in_use(names, dtype)), names, placement)

    return jax.tree.map(unshard_weight, params, axes, is_leaf=is_axes)


def dtype_in_use(names: Axes, dtype: jnp.dtype) -> jnp.dtype:
    """Returns the dtype in which a weight with these logical axes is used: float32 for norm scales and routers, else
    `dtype`, the compute dtype."""
    return jnp.dtype("float32") if FLOAT32_AXES & {*names} else dtype


def unshard_without_cast(piece: Array, names: Axes, placement: Placement) -> Array:
    """Gathers a weight from this device's piece of it, in the piece's dtype."""
    gathered = placement.gathered_axes(names)
    if gathered is None:
        return piece
    dimension, mesh_axes = gathered
    return gather_weight(piece, mesh_axes, dimension)


def gather_weight(piece: Array, mesh_axes: tuple[str, ...], dimension: int) -> Array:
    """Gathers a weight along a dimension from this device's piece of it."""
    return jax.lax.all_gather(row_major(piece), mesh_axes, axis=dimension, tiled=True)


def row_major(array: Array) -> Array:
    """Constrains an array that is a part of a stack to row-major order, before it is gathered, written to the stack, or
    used. Otherwise XLA for GPUs would put the gathered or scattered dimension first. It would give that order to the
    whole stack, too, and copy the stack."""
    return with_layout_constraint(array, Layout(tuple(range(array.ndim))))


def max_abs_per_unit(weights: list[Array], axes: list[Axes], placement: Placement) -> list[Array]:
    """Returns, for each stack of weights [units, …], the largest absolute value in each unit, float32 [units]. The
    maximum is taken over the pieces on all devices, with one reduction for each set of mesh axes along which weights
    are gathered."""
    max_abs = [jnp.max(jnp.abs(stack), axis=range(1, stack.ndim)).astype(jnp.float32) for stack in weights]
    mesh_axes_of_stacks = [gathered[1] if (gathered := placement.gathered_axes(names)) else () for names in axes]
    for mesh_axes, indices in _indices_by_axes(mesh_axes_of_stacks):
        pmax = functools.partial(jax.lax.pmax, axis_name=mesh_axes)
        reduced = _reduce_concatenated(pmax, [max_abs[index] for index in indices])
        for index, global_max in zip(indices, reduced, strict=True):
            max_abs[index] = global_max
    return max_abs


def reshard(gradients: Any, axes: Any, placement: Placement, reduce_dtype: jnp.dtype) -> Any:
    """Sums gradients of whole weights over the axes along which the weights are gathered, and returns this device's
    pieces of the sums in float32. Devices exchange the gradients in `reduce_dtype`."""

    def reshard_gradient(gradient: Array, names: Axes) -> Array:
        gathered = placement.gathered_axes(names)
        if gathered is not None:
            dimension, mesh_axes = gathered
            gradient = scatter_gradient(gradient, mesh_axes, dimension, reduce_dtype)
        return gradient.astype(jnp.float32)

    return jax.tree.map(reshard_gradient, gradients, axes, is_leaf=is_axes)


def scatter_gradient(gradient: Array, mesh_axes: tuple[str, ...], dimension: int, reduce_dtype: jnp.dtype) -> Array:
    """Sums the gradient of a gathered weight in `reduce_dtype`, and returns this device's piece of the sum, in
    float32."""
    piece = _sum_and_scatter(mesh_axes, gradient.astype(reduce_dtype), dimension=dimension)
    return piece.astype(jnp.float32)


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
    logical_axes = jax.tree.leaves(axes, is_leaf=is_axes)
    mesh_axes_of_leaves = [placement.replicated_axes(names) if is_selected(names) else () for names in logical_axes]
    for mesh_axes, indices in _indices_by_axes(mesh_axes_of_leaves):
        sums = _psum([leaves[index].astype(reduce_dtype) for index in indices], mesh_axes, placement)
        for index, gradient in zip(indices, sums, strict=True):
            leaves[index] = gradient.astype(jnp.float32)
    return jax.tree.unflatten(structure, leaves)


def _indices_by_axes(mesh_axes: list[tuple[str, ...]]) -> list[tuple[tuple[str, ...], list[int]]]:
    """Groups the indices of a list of mesh axes by the axes at each index, and leaves out indices without axes."""
    groups = sorted(set(mesh_axes) - {()})
    return [(group, [index for index, axes in enumerate(mesh_axes) if axes == group]) for group in groups]


def sum_over_tokens(tree: Any, placement: Placement) -> Any:
    """Sums each leaf of a tree over the devices that have different tokens."""
    return _psum(tree, TOKEN_AXES, placement)


def sum_within_stage(tree: Any, placement: Placement) -> Any:
    """Sums each leaf of a tree over all devices of a pipeline stage."""
    return _psum(tree, tuple(axis for axis in AXES if axis != STAGE_AXIS), placement)


_BUCKET_BYTES = 25 * 2**20
"""The size of a bucket of arrays that are summed together. Arrays are copied bucket by bucket, so that no copy of all
gradients is needed."""


def _psum(tree: Any, mesh_axes: tuple[str, ...], placement: Placement) -> Any:
    """Sums each leaf of a tree over mesh axes, as `jax.lax.psum` does. Between processes on CPUs, each sum takes 4 ms
    in addition to the time for its bytes, so arrays are summed in buckets there. XLA for GPUs combines sums itself."""
    if not placement.spans_cpu_processes:
        return jax.lax.psum(tree, mesh_axes)
    leaves, structure = jax.tree.flatten(tree)
    buckets: dict[tuple[Any, int], list[int]] = {}
    total_bytes: dict[Any, int] = {}
    for index, leaf in enumerate(leaves):
        total_bytes[leaf.dtype] = total_bytes.get(leaf.dtype, 0) + leaf.nbytes
        bucket = (leaf.dtype, total_bytes[leaf.dtype] // _BUCKET_BYTES)
        buckets.setdefault(bucket, []).append(index)
    psum = functools.partial(jax.lax.psum, axis_name=mesh_axes)
    for indices in buckets.values():
        sums = _reduce_concatenated(psum, [leaves[index] for index in indices])
        for index, leaf in zip(indices, sums, strict=True):
            leaves[index] = leaf
    return jax.tree.unflatten(structure, leaves)


def _reduce_concatenated(reduce: Callable[[Array], Array], arrays: list[Array]) -> list[Array]:
    """Reduces arrays of one dtype as one concatenated array, and returns each array's result in its shape."""
    reduced = reduce(jnp.concatenate([array.ravel() for array in arrays]))
    parts = jnp.split(reduced, np.cumsum([array.size for array in arrays])[:-1])
    return [part.reshape(array.shape) for part, array in zip(parts, arrays, strict=True)]


def index_along(axis: str, placement: Placement) -> Array:
    """Returns the index of this device's piece of a logical axis."""
    mesh_axes = placement.axes_in_use(axis)
    return jax.lax.axis_index(mesh_axes) if mesh_axes else jnp.int32(0)


def gather_sequence(x_BSD: Array, placement: Placement, axis: str = "sequence") -> Array:
    """Gathers an array [B, L, D] whose length is split along the logical `axis`, so that the split array becomes
    replicated."""
    return _gather_activations(x_BSD, placement.mesh_axes(axis), dimension=1)


def gather_pieces(x_BSD: Array, placement: Placement) -> Array:
    """Gathers an array [B, L, D] whose length is split, so that the split array becomes replicated. Returns the pieces
    one after another, [P, S, D]. Those of the first device come first. Used at the input of attention and MLP.

    XLA for GPUs gathers along the first dimension. If the result had another order, it would copy the whole result. A
    single row has the same order either way. It is one piece, [1, L, D], and so are all rows if nothing splits them.
    """
    return _gather_activations(x_BSD, placement.mesh_axes("sequence"), dimension=0 if len(x_BSD) > 1 else 1)


def scatter_pieces(x_PSD: Array, placement: Placement) -> Array:
    """Sums pieces of the length, [P, S, D] in the order of `gather_pieces`, and returns this device's, [B, S, D]. A
    partial array becomes split. Used at the output of attention and MLP."""
    return _scatter_activations(x_PSD, placement.mesh_axes("sequence"), dimension=0 if len(x_PSD) > 1 else 1)


def join_pieces(x_PS: Array, placement: Placement) -> Array:
    """Returns rows [B, L, …] from their pieces, [P, S, …] in the order of `gather_pieces`."""
    pieces = _pieces_per_row(x_PS, placement)
    x_NBS = x_PS.reshape(pieces, -1, *x_PS.shape[1:])
    x_BNS = jnp.swapaxes(x_NBS, 0, 1)
    return x_BNS.reshape(x_BNS.shape[0], -1, *x_PS.shape[2:])


def cut_into_pieces(x_BL: Array, placement: Placement) -> Array:
    """Returns the pieces of rows [B, L, …], [P, S, …] in the order of `gather_pieces`."""
    pieces = _pieces_per_row(x_BL, placement)
    x_NBS = jnp.swapaxes(x_BL.reshape(len(x_BL), pieces, -1, *x_BL.shape[2:]), 0, 1)
    return x_NBS.reshape(-1, *x_NBS.shape[2:])


def _pieces_per_row(x: Array, placement: Placement) -> int:
    """Returns the number of pieces of each row of x, [B, L, …] or [P, S, …], in the order of `gather_pieces`."""
    return placement.num_shards("sequence") if len(x) > 1 else 1


def scatter_sequence(x_BLD: Array, placement: Placement, summed_axis: str, axis: str = "sequence") -> Array:
    """Sums or slices an array [B, L, D] to this device's piece [B, S, D].

    `summed_axis` is the logical axis that the preceding product or lookup summed over. If the mesh splits that axis,
    the array is partial and is summed and scattered; otherwise it is replicated and is sliced. If the length is not
    split at all (as after `with_whole_rows`), a partial array is summed and becomes replicated.
    """
    mesh_axes = placement.mesh_axes(axis)
    if not mesh_axes:
        # Stages that divide the vocabulary are summed by `stages.collect_on_stage`.
        return sum_over_axes(x_BLD, tuple(name for name in placement.mesh_axes(summed_axis) if name != STAGE_AXIS))
    if not placement.axes_in_use(summed_axis):
        return local_shard(x_BLD, placement, axis)
    return _scatter_activations(x_BLD, mesh_axes, dimension=1)


def gather_piece_by_piece(
    x_BSD: Array, placement: Placement, compute: Callable[[Array], Any], axis: str = "sequence"
) -> tuple[Any, Array]:
    """Applies `compute` to each piece of the length. Returns its results, concatenated along the length, and the
    gathered array [B, L, D].

    While a device works on a piece, it sends that piece to the previous device, so no device waits for the whole length
    (Wang et al. 2023, 10.1145/3567955.3567959). Not differentiable: `models.projections` has the transposes.
    """
    [mesh_axis] = placement.mesh_axes(axis)
    size, device_index = placement.sizes[mesh_axis], jax.lax.axis_index(mesh_axis)
    to_previous = [(device, (device - 1) % size) for device in range(size)]
    results_and_pieces, piece = [], x_BSD
    for step in range(size):
        result, current_piece = compute(piece), piece
        if step < size - 1:
            arriving_piece = jax.lax.ppermute(piece, mesh_axis, to_previous)
            # Start the next transfer only after this piece's computation; XLA would otherwise run all transfers first.
            result, piece = jax.lax.optimization_barrier((result, arriving_piece))
        results_and_pieces.append((result, current_piece))
    length = x_BSD.shape[1]

    def concatenate(*pieces: Array) -> Array:
        joined = jnp.zeros((pieces[0].shape[0], size * length, *pieces[0].shape[2:]), pieces[0].dtype)
        for step, piece in enumerate(pieces):
            joined = jax.lax.dynamic_update_slice_in_dim(joined, piece, (device_index + step) % size * length, axis=1)
        return joined

    return jax.tree.map(concatenate, *results_and_pieces)


def scatter_piece_by_piece(
    compute_addend: Callable[[Array], Array], placement: Placement, axis: str = "sequence"
) -> Array:
    """Returns this device's piece of the length, [B, S, D], summed over devices. `compute_addend(index)` returns what
    this device adds to the piece at `index`.

    Each sum travels from device to device until it reaches the device that owns the piece. Meanwhile each device
    computes its next addend. Sums are added in float32 and sent in the dtype of the addends. Not differentiable.
    """
    [mesh_axis] = placement.mesh_axes(axis)
    size, device_index = placement.sizes[mesh_axis], jax.lax.axis_index(mesh_axis)
    to_next = [(device, (device + 1) % size) for device in range(size)]
    total = compute_addend((device_index + size - 1) % size)
    for step in range(1, size):
        arriving_sum = jax.lax.ppermute(total, mesh_axis, to_next)
        # Without the barrier, XLA fuses the sum into the product, which then waits for the transfer.
        addend = jax.lax.optimization_barrier(compute_addend((device_index + size - 1 - step) % size))
        total = (arriving_sum.astype(jnp.float32) + addend.astype(jnp.float32)).astype(addend.dtype)
    return total


def gather_chunks(x: Array, placement: Placement, dimension: int, sum_dtype: jnp.dtype | None = None) -> Array:
    """Gathers an array along a dimension over the devices that share rows (`parallel.chunks`), so that the split array
    becomes replicated. Its gradient is summed in `sum_dtype`, by default the array's dtype."""
    mesh_axes = placement.mesh_axes("length")

    def transpose(gradient: Array) -> Array:
        addend = gradient.astype(sum_dtype or x.dtype)
        return sum_and_scatter_chunks(addend, placement, dimension).astype(x.dtype)

    return with_transpose(functools.partial(_gather, mesh_axes, dimension=dimension), transpose)(x)


def sum_and_scatter_chunks(x: Array, placement: Placement, dimension: int) -> Array:
    """Sums an array over the devices that share rows, and scatters the sum along a dimension. It has no gradient."""
    return _sum_and_scatter(placement.mesh_axes("length"), x, dimension=dimension)


def _gather_activations(x: Array, mesh_axes: tuple[str, ...], dimension: int) -> Array:
    """Gathers activations along a dimension that is split along mesh axes. Remat policies know the result by name."""
    if not mesh_axes:
        return x
    gather, _ = gather_and_scatter(mesh_axes, dimension)
    return checkpoint_name(gather(x), WHOLE_SEQUENCE)


def _scatter_activations(x: Array, mesh_axes: tuple[str, ...], dimension: int) -> Array:
    """Sums activations over mesh axes and scatters them along a dimension. Remat policies know the result by name."""
    _, scatter = gather_and_scatter(mesh_axes, dimension)
    return checkpoint_name(scatter(x), SCATTERED)


def gather_and_scatter(
    mesh_axes: tuple[str, ...], dimension: int
) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
    """Returns a function that gathers an array along a dimension, and one that sums and scatters it. Each is the
    other's transpose."""
    gather = functools.partial(_gather, mesh_axes, dimension=dimension)
    scatter = functools.partial(_sum_and_scatter, mesh_axes, dimension=dimension)
    return with_transpose(gather, scatter), with_transpose(scatter, gather)


def _gather(mesh_axes: tuple[str, ...], x: Array, *, dimension: int) -> Array:
    """Gathers an array along a dimension."""
    return jax.lax.all_gather(x, mesh_axes, axis=dimension, tiled=True)


def _sum_and_scatter(mesh_axes: tuple[str, ...], x: Array, *, dimension: int) -> Array:
    """Sums an array over devices, and scatters the sum along a dimension."""
    return jax.lax.psum_scatter(x, mesh_axes, scatter_dimension=dimension, tiled=True)


def exchange(x: Array, mesh_axes: tuple[str, ...]) -> Array:
    """Sends entry i along the first dimension of x to device i along the mesh axes. Returns the entries that this
    device receives, in the order of their senders. The first of the axes counts slowest."""
    return jax.lax.all_to_all(x, mesh_axes, split_axis=0, concat_axis=0)


def local_shard(x_BLD: Array, placement: Placement, axis: str = "sequence") -> Array:
    """Returns this device's piece, along the length, of an array that all devices have. A replicated array becomes
    split."""
    return piece_of_length(x_BLD, index_along(axis, placement), placement, axis)


def piece_of_length(x_BLD: Array, index: Array, placement: Placement, axis: str = "sequence") -> Array:
    """Splits an array [B, L, …] along its length among the devices of `axis`, and returns the piece [B, S, …] at
    `index`."""
    piece_length = x_BLD.shape[1] // placement.num_shards(axis)
    return jax.lax.dynamic_slice_in_dim(x_BLD, index * piece_length, piece_length, axis=1)


def sum_over(axis: str, x: Array, placement: Placement) -> Array:
    """Returns the sum over the pieces of a logical axis. A partial array becomes replicated, and the transpose does the
    same to the gradient."""
    return sum_over_axes(x, placement.axes_in_use(axis))


def share_of(axis: str, x: Array, placement: Placement) -> Array:
    """Returns this device's share of a value that all devices along a logical axis have computed identically. The sum
    of the shares is the value, so a sum such as a term of the loss is not counted once per device. A replicated array
    becomes partial, and the transpose does the same to the gradient."""
    return x / placement.num_shards_in_use(axis)


def gather_over(axis: str, x: Array, placement: Placement) -> Array:
    """Returns x of all devices that share a logical axis, stacked in front. It has no gradient."""
    mesh_axes = placement.axes_in_use(axis)
    x = jax.lax.stop_gradient(x)
    return jax.lax.all_gather(x, mesh_axes) if mesh_axes else x[None]


def max_over(axis: str, x: Array, placement: Placement) -> Array:
    """Returns the maximum over the pieces of a logical axis. It has no gradient."""
    mesh_axes = placement.axes_in_use(axis)
    x = jax.lax.stop_gradient(x)
    return jax.lax.pmax(x, mesh_axes) if mesh_axes else x


def sum_over_axes(x: Array, mesh_axes: tuple[str, ...]) -> Array:
    """Returns the sum over mesh axes, as `sum_over` does."""
    if not mesh_axes:
        return x
    psum = lambda x: jax.lax.psum(x, mesh_axes)
    return with_transpose(psum, psum)(x)


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def with_backward(
    backward: Callable[..., Any], static: int = 0
) -> Callable[[Callable[Arguments, tuple[Result, Any]]], Callable[Arguments, Result]]:
    """Returns a decorator for a function that returns (result, residuals). The decorated function returns only the
    result, and `backward` computes its gradient from the residuals. Its first `static` arguments are not arrays;
    `backward` receives them, too, before the residuals.

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


def with_transpose(function: Callable[[Any], Any], transpose: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a linear function of one array whose gradient is computed by `transpose`."""
    return with_backward(lambda _, gradient: (transpose(gradient),))(lambda x: (function(x), None))
