"""Products with weights: the projections into and out of attention and MLP, with what is communicated for them.

Between layers each device of the `model` axis has a piece of the length. It is gathered on the way in and summed and
scattered on the way out, at once, or piece by piece (`model.overlap: ring`): then a piece travels while another is
multiplied. Every number is the same product of a row and a column either way; of what is summed over devices only the
order differs.

Shapes: B batch, L length, S a device's piece of the length, D model.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxmnt.models import float8
from jaxmnt.parallel.collectives import (
    PROJECTED,
    SCATTERED,
    WHOLE_SEQUENCE,
    gather_piece_by_piece,
    gather_sequence,
    piece_of_length,
    scatter_piece_by_piece,
    scatter_sequence,
    with_backward,
)
from jaxmnt.parallel.sharding import Placement

HeadIndices = Array | None
"""Which heads of a weight are taken; None: all."""

ProductMode = float8.Float8 | None
"""A product is made in float8; None: in the compute dtype."""


def project(x: Array, weight: Array, own: HeadIndices = None) -> Array:
    """[B, L, *out] from x [B, L, *in] and a weight [*in, *out], as one product of two matrices: in float8 where the run
    wants that (`float8.float8_products`) and the shapes are fit for it. `own`: of the weight's next to last dimension
    these alone.

    So its transpose contracts one dimension: over two, XLA's CPU backend would first copy an operand transposed. And
    backward keeps the weight as it was given, of which a stage knows that it need not keep it.
    """
    return _projection(_chosen_for(x, weight, own), x, weight, own)


def project_gathered(
    x_BSD: Array, weights: Sequence[Array], placement: Placement, own: Sequence[HeadIndices] | None = None
) -> tuple[Array, ...]:
    """[B, L, *out] for each weight [D, *out], from the pieces of the length: the way into attention and MLP. With
    `model.overlap: ring` pieces travel while they are multiplied."""
    chosen = tuple(own or [None] * len(weights))
    if placement.overlap == "ring":
        how = tuple(_chosen_for(x_BSD, weight, one) for weight, one in zip(weights, chosen, strict=True))
        return _project_ring(how, placement, x_BSD, tuple(weights), chosen)
    x_BLD = gather_sequence(x_BSD, placement)
    return tuple(project(x_BLD, weight, one) for weight, one in zip(weights, chosen, strict=True))


def project_scattered(x: Array, weight: Array, placement: Placement, split: str) -> Array:
    """[B, S, D] from x [B, L, *in] and a weight [*in, D], where devices have pieces of `in` by the logical axis
    `split`: the way out."""
    if placement.overlap != "ring" or not placement.mesh_axes(split):
        return scatter_sequence(project(x, weight), placement, split)
    how = _chosen_for(x, weight, None, placement.num_shards("sequence"))
    return _scatter_ring(how, placement, x, weight)


def _chosen_for(x: Array, weight: Array, own: HeadIndices, pieces: int = 1) -> ProductMode:
    """How x, cut into so many pieces of the length, is multiplied."""
    tokens, inputs = math.prod(x.shape[:2]) // pieces, math.prod(x.shape[2:])
    outputs = weight.size // inputs if own is None else weight.size // inputs // weight.shape[-2] * len(own)
    how = float8.chosen_for(tokens, inputs, outputs)
    float8.note_product(weight, in_float8=how is not None)
    return how


def _projection_backward(how: ProductMode, saved: tuple[Array, Array, HeadIndices], gradient: Array) -> tuple[Any, ...]:
    x, weight, own = saved
    taken = _select_heads(weight, own)
    x_gradient, weight_gradient = _x_gradient(how, gradient, taken, x), _weight_gradient(how, x, gradient, taken)
    return x_gradient, _scatter_to_heads(weight_gradient, weight, own), None


@with_backward(_projection_backward, static=1)
def _projection(
    how: ProductMode, x: Array, weight: Array, own: HeadIndices
) -> tuple[Array, tuple[Array, Array, HeadIndices]]:
    return _project(how, x, _select_heads(weight, own)), (x, weight, own)


def _select_heads(weight: Array, own: HeadIndices) -> Array:
    return weight if own is None else jnp.take(weight, own, axis=-2)


def _scatter_to_heads(gradient: Array, weight: Array, own: HeadIndices) -> Array:
    """The gradient of a weight of which some was taken, perhaps several times."""
    return gradient if own is None else jnp.zeros_like(weight).at[..., own, :].add(gradient)


def _project(how: ProductMode, x: Array, weight: Array) -> Array:
    matrix, shape = _matrix(x, weight), (*x.shape[:2], *weight.shape[x.ndim - 2 :])
    flat = x.reshape(-1, matrix.shape[0])
    return (flat @ matrix if how is None else float8.product(how, flat, matrix)).reshape(shape)


def _x_gradient(how: ProductMode, gradient: Array, weight: Array, like: Array) -> Array:
    """Of x, which is like this but for its length."""
    matrix = _matrix(like, weight)
    flat = gradient.reshape(-1, matrix.shape[1])
    x_gradient = flat @ matrix.T if how is None else float8.x_gradient(how, flat, matrix)
    return x_gradient.reshape(*gradient.shape[:2], *like.shape[2:])


def _weight_gradient(how: ProductMode, x: Array, gradient: Array, like: Array) -> Array:
    """Of a weight like this."""
    matrix = _matrix(x, like)
    flat, x_matrix = gradient.reshape(-1, matrix.shape[1]), x.reshape(-1, matrix.shape[0])
    found = x_matrix.T @ flat if how is None else float8.weight_gradient(how, x_matrix, flat, matrix.dtype)
    return found.reshape(like.shape)


def _matrix(x: Array, weight: Array) -> Array:
    return weight.reshape(math.prod(x.shape[2:]), -1)


# -- the same by pieces of the length

_Ring = tuple[Array, tuple[Array, ...], tuple[HeadIndices, ...]]


def _project_ring_backward(
    how: tuple[ProductMode, ...], placement: Placement, saved: _Ring, gradients: tuple[Array, ...]
) -> tuple[Any, ...]:
    x_BLD, weights, own = saved
    taken = tuple(map(_select_heads, weights, own))

    def part(number: Array) -> Array:
        pieces = [piece_of_length(gradient, number, placement) for gradient in gradients]
        gradient_of = lambda how, piece, weight: _x_gradient(how, piece, weight, x_BLD)
        found = [_hide_from_remat(gradient_of, *one) for one in zip(how, pieces, taken, strict=True)]
        return functools.reduce(jnp.add, found)

    x_gradient_BSD = scatter_piece_by_piece(part, placement)
    found = [
        _scatter_to_heads(_weight_gradient(one, x_BLD, gradient, like), weight, chosen)
        for one, gradient, like, weight, chosen in zip(how, gradients, taken, weights, own, strict=True)
    ]
    return x_gradient_BSD, tuple(found), (None,) * len(own)


@with_backward(_project_ring_backward, static=2)
def _project_ring(
    how: tuple[ProductMode, ...],
    placement: Placement,
    x_BSD: Array,
    weights: tuple[Array, ...],
    own: tuple[HeadIndices, ...],
) -> tuple[tuple[Array, ...], _Ring]:
    def work(piece_BSD: Array) -> tuple[Array, ...]:
        each = zip(how, weights, own, strict=True)
        return tuple(
            _hide_from_remat(_project, one, piece_BSD, _select_heads(weight, chosen)) for one, weight, chosen in each
        )

    products, x_BLD = gather_piece_by_piece(x_BSD, placement, work)
    products = tuple(checkpoint_name(one, PROJECTED) for one in products)
    return products, (checkpoint_name(x_BLD, WHOLE_SEQUENCE), weights, own)


def _scatter_ring_backward(
    how: ProductMode, placement: Placement, saved: tuple[Array, Array], gradient_BSD: Array
) -> tuple[Array, Array]:
    x, weight = saved
    gradient_of = lambda how, piece_BSD, weight: _x_gradient(how, piece_BSD, weight, x)
    work = lambda piece_BSD: _hide_from_remat(gradient_of, how, piece_BSD, weight)
    x_gradient, gradient_BLD = gather_piece_by_piece(gradient_BSD, placement, work)
    return x_gradient, _weight_gradient(how, x, gradient_BLD, weight)


@with_backward(_scatter_ring_backward, static=2)
def _scatter_ring(how: ProductMode, placement: Placement, x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    part = lambda number: _hide_from_remat(_project, how, piece_of_length(x, number, placement), weight)
    return checkpoint_name(scatter_piece_by_piece(part, placement), SCATTERED), (x, weight)


def _hide_from_remat(product: Callable[..., Array], how: ProductMode, *arrays: Array) -> Array:
    """A product that the remat policy `dots` does not keep, since it has a dimension of batches, of one: what is kept
    is the whole. Behind a barrier, or XLA would make one product of those of all pieces, and wait for the last."""
    behind = jax.lax.optimization_barrier(tuple(one[None] for one in arrays))
    return jax.vmap(functools.partial(product, how))(*behind)[0]
