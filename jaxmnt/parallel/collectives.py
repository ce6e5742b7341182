"""Communication between devices, for use inside the step's shard_map. An axis of one device costs nothing.

What is used between a layer's input and its output carries its own transpose, so that a gradient is right by
construction. Along an axis an array is *split* (each device has a piece), *replicated* (each has the same), or
*partial* (the sum over the devices is meant). The gradient of a split array is split, that of a replicated one is
partial, that of a partial one is replicated; docs/models.md has the rules. JAX is not asked: under `check_vma=False` it
does not know which array is which.

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
"""Checkpoint name of products with pieces of the length, put together."""

WHOLE_SEQUENCE = "whole_sequence"
"""Checkpoint name of activations gathered over the length."""

SCATTERED = "scattered"
"""Checkpoint name of sums that were scattered over the length."""


def unshard(params: Any, axes: Any, placement: Placement, dtype: jnp.dtype) -> Any:
    """Weights as they are used, in the compute dtype, from this device's pieces of the stored parameters.

    Cast before the gather, so that the gather moves `dtype`. Norm scales become float32.
    """

    def one(weight: Array, names: Axes) -> Array:
        if "norm" in names:
            return weight.astype(jnp.float32)
        return unshard_as_it_is(weight.astype(dtype), names, placement)

    return jax.tree.map(one, params, axes, is_leaf=is_axes)


def unshard_as_it_is(piece: Array, names: Axes, placement: Placement) -> Array:
    """A weight from this device's piece of it, in the dtype that it has."""
    gathered = placement.gathered_axes(names)
    if gathered is None:
        return piece
    dimension, over = gathered
    return jax.lax.all_gather(row_major(piece), over, axis=dimension, tiled=True)


def row_major(array: Array) -> Array:
    """A part of a stack, before it is gathered, put into it, or used. XLA for GPUs would have what is gathered or
    scattered with that dimension first: then it gives that order to the whole stack, and copies it."""
    return with_layout_constraint(array, Layout(tuple(range(array.ndim))))


def largest_of_weights(weights: list[Array], axes: list[Axes], placement: Placement) -> list[Array]:
    """Of each stack of weights [units, …] the largest absolute numbers [units], over all pieces: in one reduction for
    each set of mesh axes that they are gathered over."""
    own = [jnp.max(jnp.abs(one), axis=range(1, one.ndim)).astype(jnp.float32) for one in weights]
    over = [found[1] if (found := placement.gathered_axes(names)) else () for names in axes]
    for along, places in _by_axes(over):
        most = _as_one(functools.partial(jax.lax.pmax, axis_name=along), [own[place] for place in places])
        for place, part in zip(places, most, strict=True):
            own[place] = part
    return own


def reshard(gradients: Any, axes: Any, placement: Placement, reduce_dtype: jnp.dtype) -> Any:
    """From gradients of whole weights to this device's pieces of them in float32, summed over the axes that the weights
    are gathered over. What crosses devices is in `reduce_dtype`."""

    def one(gradient: Array, names: Axes) -> Array:
        gathered = placement.gathered_axes(names)
        if gathered is not None:
            dimension, over = gathered
            gradient = gradient.astype(reduce_dtype)
            gradient = jax.lax.psum_scatter(gradient, over, scatter_dimension=dimension, tiled=True)
        return gradient.astype(jnp.float32)

    return jax.tree.map(one, gradients, axes, is_leaf=is_axes)


def reduce_gradients(
    gradients: Any,
    axes: Any,
    placement: Placement,
    reduce_dtype: jnp.dtype,
    which: Callable[[Axes], bool],
) -> Any:
    """Sums local gradients over every mesh axis that their parameters are replicated over: those whose logical axes
    `which` chooses, the others stay as they are. Each gradient once a step, when all microbatches are in it."""
    leaves, structure = jax.tree.flatten(gradients)
    named = jax.tree.leaves(axes, is_leaf=is_axes)
    over = [placement.replicated_axes(names) if which(names) else () for names in named]
    for along, places in _by_axes(over):
        summed = _psum([leaves[place].astype(reduce_dtype) for place in places], along, placement)
        for place, gradient in zip(places, summed, strict=True):
            leaves[place] = gradient.astype(jnp.float32)
    return jax.tree.unflatten(structure, leaves)


def _by_axes(over: list[tuple[str, ...]]) -> list[tuple[tuple[str, ...], list[int]]]:
    """Which places of a list have which mesh axes; not those that have none."""
    return [(along, [place for place, own in enumerate(over) if own == along]) for along in sorted(set(over) - {()})]


def sum_over_tokens(tree: Any, placement: Placement) -> Any:
    """Sums each leaf over the devices that have different tokens."""
    return _psum(tree, TOKEN_AXES, placement)


def sum_over_stage(tree: Any, placement: Placement) -> Any:
    """Sums each leaf over all devices of a stage."""
    return _psum(tree, tuple(axis for axis in AXES if axis != STAGE_AXIS), placement)


_BUCKET_BYTES = 25 * 2**20
"""So much is copied at a time, and not all gradients at once."""


def _psum(tree: Any, over: tuple[str, ...], placement: Placement) -> Any:
    """`jax.lax.psum`. Between processes on CPUs the sum of an array takes 4 ms more than its bytes do, so there arrays
    travel together, in buckets; for GPUs XLA does the like by itself."""
    if not placement.between_cpu_processes:
        return jax.lax.psum(tree, over)
    leaves, structure = jax.tree.flatten(tree)
    buckets: dict[tuple[Any, int], list[int]] = {}
    filled: dict[Any, int] = {}
    for place, leaf in enumerate(leaves):
        filled[leaf.dtype] = filled.get(leaf.dtype, 0) + leaf.nbytes
        buckets.setdefault((leaf.dtype, filled[leaf.dtype] // _BUCKET_BYTES), []).append(place)
    for places in buckets.values():
        summed = _as_one(functools.partial(jax.lax.psum, axis_name=over), [leaves[place] for place in places])
        for place, leaf in zip(places, summed, strict=True):
            leaves[place] = leaf
    return jax.tree.unflatten(structure, leaves)


def _as_one(reduce: Callable[[Array], Array], arrays: list[Array]) -> list[Array]:
    """Reduces arrays of one dtype as if they were one array."""
    whole = reduce(jnp.concatenate([array.ravel() for array in arrays]))
    parts = jnp.split(whole, np.cumsum([array.size for array in arrays])[:-1])
    return [part.reshape(array.shape) for part, array in zip(parts, arrays, strict=True)]


def index_along(axis: str, placement: Placement) -> Array:
    """Which piece of a logical axis this device has."""
    over = placement.mesh_axes(axis)
    return jax.lax.axis_index(over) if over else jnp.int32(0)


def stage_index() -> Array:
    """This device's stage of the pipeline."""
    return jax.lax.axis_index(STAGE_AXIS)


def gather_sequence(x_BSD: Array, placement: Placement, axis: str = "sequence") -> Array:
    """[B, L, D] from the pieces of the length, by the logical axis that splits it: split to replicated, the way into
    attention and MLP."""
    over = placement.mesh_axes(axis)
    if not over:
        return x_BSD
    gather = _with_transpose(functools.partial(_gather, over), functools.partial(_sum_and_scatter, over))
    return checkpoint_name(gather(x_BSD), WHOLE_SEQUENCE)


def scatter_sequence(x_BLD: Array, placement: Placement, split: str, axis: str = "sequence") -> Array:
    """[B, S, D]: the way out. Partial to split where `split`, the logical axis that was summed over, is split; else
    replicated to split. Where the length stays whole (`whole_length`), partial to replicated."""
    over = placement.mesh_axes(axis)
    if not over:
        # What the stages of a pipeline share of the vocabulary, they sum themselves (`sum_over_stages`).
        return _sum(x_BLD, tuple(name for name in placement.mesh_axes(split) if name != STAGE_AXIS))
    if not placement.mesh_axes(split):
        return local_shard(x_BLD, placement, axis)
    scatter = _with_transpose(functools.partial(_sum_and_scatter, over), functools.partial(_gather, over))
    return checkpoint_name(scatter(x_BLD), SCATTERED)


def gather_piece_by_piece(
    x_BSD: Array, placement: Placement, work: Callable[[Array], Any], axis: str = "sequence"
) -> tuple[Any, Array]:
    """`work` of each piece of the length, put together along the length, and [B, L, D] itself.

    Each device hands the piece that it has on to the device before it, while it works on it. So nothing waits for the
    whole (Wang et al. 2023, 10.1145/3567955.3567959). Not differentiable: `models.projections` has the transposes.
    """
    [over] = placement.mesh_axes(axis)
    size, own = placement.sizes[over], jax.lax.axis_index(over)
    found, piece = [], x_BSD
    for step in range(size):
        result, done = work(piece), piece
        if step < size - 1:
            arriving = jax.lax.ppermute(piece, over, [(device, (device - 1) % size) for device in range(size)])
            # The piece after next sets out when this one is done with, or XLA would let all travel first.
            result, piece = jax.lax.optimization_barrier((result, arriving))
        found.append((result, done))
    length = x_BSD.shape[1]

    def in_order(*parts: Array) -> Array:
        whole = jnp.zeros((parts[0].shape[0], size * length, *parts[0].shape[2:]), parts[0].dtype)
        for step, part in enumerate(parts):
            whole = jax.lax.dynamic_update_slice_in_dim(whole, part, (own + step) % size * length, axis=1)
        return whole

    return jax.tree.map(in_order, *found)


def scatter_piece_by_piece(part: Callable[[Array], Array], placement: Placement, axis: str = "sequence") -> Array:
    """[B, S, D]: this device's piece of the length, summed over devices. `part(number)` is what one has of a piece.

    A sum goes from device to device until it is with whom it is for. While it is under way, each computes what it
    will add. Added up in float32, sent in the dtype of the parts. It is not differentiable.
    """
    [over] = placement.mesh_axes(axis)
    size, own = placement.sizes[over], jax.lax.axis_index(over)
    total = part((own + size - 1) % size)
    for step in range(1, size):
        arriving = jax.lax.ppermute(total, over, [(device, (device + 1) % size) for device in range(size)])
        # Behind a barrier, or XLA would make the sum a part of the product, which then waits for it.
        mine = jax.lax.optimization_barrier(part((own + size - 1 - step) % size))
        total = (arriving.astype(jnp.float32) + mine.astype(jnp.float32)).astype(mine.dtype)
    return total


def _gather(over: tuple[str, ...], x_BSD: Array) -> Array:
    return jax.lax.all_gather(x_BSD, over, axis=1, tiled=True)


def _sum_and_scatter(over: tuple[str, ...], x_BLD: Array) -> Array:
    return jax.lax.psum_scatter(x_BLD, over, scatter_dimension=1, tiled=True)


def local_shard(x_BLD: Array, placement: Placement, axis: str = "sequence") -> Array:
    """This device's piece of the length of something that all devices have whole: replicated to split."""
    return piece_of_length(x_BLD, index_along(axis, placement), placement, axis)


def piece_of_length(x_BLD: Array, number: Array, placement: Placement, axis: str = "sequence") -> Array:
    """[B, S, …]: this piece of the length, of what is at hand whole."""
    size = x_BLD.shape[1] // placement.num_shards(axis)
    return jax.lax.dynamic_slice_in_dim(x_BLD, number * size, size, axis=1)


def sum_over(axis: str, x: Array, placement: Placement) -> Array:
    """The sum over the pieces of a logical axis: partial to replicated, and so is its transpose."""
    return _sum(x, placement.mesh_axes(axis))


def share_of(axis: str, x: Array, placement: Placement) -> Array:
    """Of something that all devices of a logical axis have computed alike, this device's part of the sum over them:
    replicated to partial, and so is its transpose. It keeps a sum, such as a term of the loss, from being counted once
    a device."""
    return x / placement.num_shards(axis)


def max_over(axis: str, x: Array, placement: Placement) -> Array:
    """The maximum over the pieces of a logical axis. It has no gradient."""
    over = placement.mesh_axes(axis)
    x = jax.lax.stop_gradient(x)
    return jax.lax.pmax(x, over) if over else x


def sum_over_stages(x: Array, placement: Placement) -> Array:
    """The sum over the pipeline's stages: partial to replicated, and so is its transpose."""
    return _sum(x, (STAGE_AXIS,) if placement.stages > 1 else ())


def _sum(x: Array, over: tuple[str, ...]) -> Array:
    if not over:
        return x
    add = lambda x: jax.lax.psum(x, over)
    return _with_transpose(add, add)(x)


def only_stage(x: Array, stage: int, placement: Placement) -> Array:
    """What `stage` has, as a sum over the stages: zeros on the others."""
    if placement.stages == 1:
        return x
    mine = stage_index() == stage
    return jnp.where(mine, x, jnp.zeros_like(x))


def broadcast_from_stage(x: Array, stage: int, placement: Placement) -> Array:
    """What `stage` has, on every stage: a sum to which the others add zeros."""
    return sum_over_stages(only_stage(x, stage, placement), placement)


def shift_stage(x: Array, placement: Placement, *, forward: bool, circular: bool) -> Array:
    """Hands x to the next stage, or to the one before. Unless `circular`, one end gets zeros. Its transpose hands
    back."""
    stages = placement.stages
    pairs = [(stage, (stage + 1) % stages) for stage in range(stages if circular else stages - 1)]
    ahead, back = (pairs, [(b, a) for a, b in pairs])[:: 1 if forward else -1]
    hand = lambda pairs: lambda x: jax.lax.ppermute(x, STAGE_AXIS, pairs)
    return _with_transpose(hand(ahead), hand(back))(x)


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def with_backward(
    backward: Callable[..., Any], static: int = 0
) -> Callable[[Callable[Arguments, tuple[Result, Any]]], Callable[Arguments, Result]]:
    """Gives a function that returns its result and what `backward` needs of it a gradient by `backward`, and has it
    return the result alone. Its first `static` arguments are no arrays, and go to `backward` as well, before the rest.

    The inside of the function, its checkpoint names among it, is seen by remat policies.
    """

    def decorate(forward: Callable[Arguments, tuple[Result, Any]]) -> Callable[Arguments, Result]:
        @functools.wraps(forward)
        def result(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
            return forward(*arguments, **named)[0]

        function = jax.custom_vjp(result, nondiff_argnums=tuple(range(static)))
        function.defvjp(forward, backward)
        return function

    return decorate


def _with_transpose(function: Callable[[Any], Any], transpose: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A linear function of one array that takes its gradient through `transpose`."""
    return with_backward(lambda _, gradient: (transpose(gradient),))(lambda x: (function(x), None))
