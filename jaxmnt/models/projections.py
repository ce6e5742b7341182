"""The projections into and out of attention and MLP, with the communication that they need.

Between layers, each device of the `model` axis holds a piece of the length. The pieces are gathered on the way in, and
summed and scattered on the way out. This happens all at once or, with `model.overlap: ring`, piece by piece, so that
one piece travels while another is multiplied. Both ways compute the same products of rows and columns. Only the order
of the sums over devices differs.

Products of all pieces at once are computed in the order in which pieces are gathered: first the pieces of all rows that
the first device sent. Only the results of the products into attention and MLP, and the arguments of those out of them,
are put in the order of rows. XLA fuses most of this with what an MLP or attention does to these arrays anyway.

A weight may have an adapter (`models.adapters`), whose low-rank product is added to the weight's. It needs no further
communication, except that the ring scatters the first of its two products.

Shapes: B batch, L length, S a device's piece of the length, P pieces of all rows, D model, R rank of an adapter.
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
from jaxmnt.models.adapters import AdaptedWeight
from jaxmnt.parallel.collectives import (
    PROJECTED,
    SCATTERED,
    WHOLE_SEQUENCE,
    cut_into_pieces,
    gather_piece_by_piece,
    gather_pieces,
    join_pieces,
    piece_of_length,
    scatter_piece_by_piece,
    scatter_pieces,
    scatter_sequence,
    with_backward,
)
from jaxmnt.parallel.sharding import Placement

Weight = Array | AdaptedWeight

HeadIndices = Array | None
"""Indices of the heads of a weight that a product uses; None if it uses all."""

ProductMode = float8.Float8 | None
"""Settings of a product in float8; None if the product is in the compute dtype."""


def project(x: Array, weight: Weight, heads: HeadIndices = None, pieces_of: Placement | None = None) -> Array:
    """Returns [B, L, *out], the product of x [B, L, *in] and a weight [*in, *out], in float8 if the run enables it
    (`float8.float8_products`) and the shapes allow it. `heads` selects indices of the weight's second-to-last
    dimension. With `pieces_of`, the result is in the order of pieces, [P, S, *out].

    Two matrices are multiplied, so that the transpose of the product contracts only one dimension. If it contracted
    two, XLA's CPU backend would first make a transposed copy of an operand. The weight is saved unchanged for the
    backward pass, so that the stage can recognise it and avoid storing it.
    """
    if isinstance(weight, AdaptedWeight):
        low_BLR = project(x, weight.a, pieces_of=pieces_of)
        return _add_adapter(project(x, weight.weight, heads, pieces_of), low_BLR, weight, heads)
    return _projection(_choose_mode(x, weight, heads), pieces_of, x, weight, heads)


def _add_adapter(product: Array, low_BLR: Array, weight: AdaptedWeight, heads: HeadIndices = None) -> Array:
    """Adds the output of an adapter to the product of its weight. `low_BLR` is the product of x and the adapter's a.

    The adapter's second product has a batch dimension (of size 1), so that the remat policy `dots` saves `low_BLR` and
    not another array as large as the product.
    """
    scaled_BLR = weight.scale * low_BLR  # a smaller array than the output
    batched = jax.vmap(lambda low_BLR, b: project(low_BLR, b, heads))(scaled_BLR[None], weight.b[None])
    return product + batched[0]


def project_gathered(
    x_BSD: Array, weights: Sequence[Weight], placement: Placement, heads: Sequence[HeadIndices] | None = None
) -> tuple[Array, ...]:
    """Gathers the pieces of the length and returns the product [B, L, *out] with each weight [D, *out]. This is the way
    into attention and MLP. With `model.overlap: ring`, communication overlaps with the products."""
    heads_by_weight = tuple(heads or [None] * len(weights))
    pairs = list(zip(weights, heads_by_weight, strict=True))
    if placement.overlap != "ring":
        x_PSD = gather_pieces(x_BSD, placement)
        return tuple(join_pieces(project(x_PSD, weight, weight_heads), placement) for weight, weight_heads in pairs)

    def ring(pairs: Sequence[tuple[Array, HeadIndices]]) -> tuple[Array, ...]:
        modes = tuple(_choose_mode(x_BSD, weight, weight_heads) for weight, weight_heads in pairs)
        return _project_ring(modes, placement, x_BSD, *map(tuple, zip(*pairs, strict=True)))

    # The pieces that arrive are also multiplied by the first matrix of each adapter.
    adapted = {index: weight for index, weight in enumerate(weights) if isinstance(weight, AdaptedWeight)}
    arrays = [weight.weight if isinstance(weight, AdaptedWeight) else weight for weight in weights]
    first_matrices = [(weight.a, None) for weight in adapted.values()]
    products = list(ring([*zip(arrays, heads_by_weight, strict=True), *first_matrices]))
    for low_BLR, (index, weight) in zip(products[len(weights) :], adapted.items(), strict=True):
        products[index] = _add_adapter(products[index], low_BLR, weight, heads_by_weight[index])
    return tuple(products[: len(weights)])


def project_scattered(x: Array, weight: Weight, placement: Placement, summed_axis: str) -> Array:
    """Returns [B, S, D], the product of x [B, L, *in] and a weight [*in, D], summed over devices and scattered along
    the length. This is the way out of attention and MLP. `summed_axis` is the logical axis along which `in` is
    divided among devices."""
    if not placement.mesh_axes("sequence") or not placement.mesh_axes(summed_axis):
        return scatter_sequence(project(x, weight), placement, summed_axis)
    if placement.overlap != "ring":
        return scatter_pieces(project(x, weight, pieces_of=placement), placement)
    if isinstance(weight, AdaptedWeight):
        product_BSD = project_scattered(x, weight.weight, placement, summed_axis)
        low_BSR = scatter_sequence(project(x, weight.a), placement, summed_axis)
        return _add_adapter(product_BSD, low_BSR, weight)
    mode = _choose_mode(x, weight, None, placement.num_shards("sequence"))
    return _scatter_ring(mode, placement, x, weight)


def _choose_mode(x: Array, weight: Array, heads: HeadIndices, pieces: int = 1) -> ProductMode:
    """Returns the mode of the product of x and a weight, and records the product. x is multiplied in `pieces`
    pieces of the length."""
    tokens, inputs = math.prod(x.shape[:2]) // pieces, math.prod(x.shape[2:])
    outputs = weight.size // inputs
    if heads is not None:
        outputs = outputs // weight.shape[-2] * len(heads)
    mode = float8.product_mode(tokens, inputs, outputs)
    float8.record_product(weight, in_float8=mode is not None)
    return mode


def _projection_backward(
    mode: ProductMode, pieces_of: Placement | None, saved: tuple[Array, Array, HeadIndices], gradient: Array
) -> tuple[Any, ...]:
    x, weight, heads = saved
    selected = _select_heads(weight, heads)
    x_gradient = _x_gradient(mode, gradient, selected, x)
    ordered = x
    if pieces_of is not None:
        x_gradient = join_pieces(x_gradient, pieces_of)
        ordered = cut_into_pieces(x, pieces_of)
    weight_gradient = _weight_gradient(mode, ordered, gradient, selected)
    return x_gradient, _scatter_to_heads(weight_gradient, weight, heads), None


@with_backward(_projection_backward, static=2)
def _projection(
    mode: ProductMode, pieces_of: Placement | None, x: Array, weight: Array, heads: HeadIndices
) -> tuple[Array, tuple[Array, Array, HeadIndices]]:
    # x is saved in the order of rows, in which attention may save it, too.
    ordered = x if pieces_of is None else cut_into_pieces(x, pieces_of)
    return _project(mode, ordered, _select_heads(weight, heads)), (x, weight, heads)


def _select_heads(weight: Array, heads: HeadIndices) -> Array:
    return weight if heads is None else jnp.take(weight, heads, axis=-2)


def _scatter_to_heads(gradient: Array, weight: Array, heads: HeadIndices) -> Array:
    """Returns the gradient of the whole weight from that of its selected heads, which may repeat."""
    return gradient if heads is None else jnp.zeros_like(weight).at[..., heads, :].add(gradient)


def _project(mode: ProductMode, x: Array, weight: Array) -> Array:
    matrix = _matrix(x, weight)
    shape = (*x.shape[:2], *weight.shape[x.ndim - 2 :])
    flat = x.reshape(-1, matrix.shape[0])
    return (flat @ matrix if mode is None else float8.product(mode, flat, matrix)).reshape(shape)


def _x_gradient(mode: ProductMode, gradient: Array, weight: Array, like: Array) -> Array:
    """Returns the gradient of x. Its shape is that of `like`, except for the length."""
    matrix = _matrix(like, weight)
    flat = gradient.reshape(-1, matrix.shape[1])
    x_gradient = flat @ matrix.T if mode is None else float8.x_gradient(mode, flat, matrix)
    return x_gradient.reshape(*gradient.shape[:2], *like.shape[2:])


def _weight_gradient(mode: ProductMode, x: Array, gradient: Array, like: Array) -> Array:
    """Returns the gradient of a weight with the shape of `like`."""
    matrix = _matrix(x, like)
    flat = gradient.reshape(-1, matrix.shape[1])
    x_matrix = x.reshape(-1, matrix.shape[0])
    weight_gradient = x_matrix.T @ flat if mode is None else float8.weight_gradient(mode, x_matrix, flat, matrix.dtype)
    return weight_gradient.reshape(like.shape)


def _matrix(x: Array, weight: Array) -> Array:
    """Returns the weight as [inputs, outputs]."""
    return weight.reshape(math.prod(x.shape[2:]), -1)


# -- the same products, piece by piece along the length

_RingSaved = tuple[Array, tuple[Array, ...], tuple[HeadIndices, ...]]
"""The arrays saved for the backward pass: the gathered x, the weights, and the selected heads of each weight."""


def _project_ring_backward(
    modes: tuple[ProductMode, ...], placement: Placement, saved: _RingSaved, gradients: tuple[Array, ...]
) -> tuple[Any, ...]:
    x_BLD, weights, heads = saved
    selected = tuple(map(_select_heads, weights, heads))

    gradient_of_piece = lambda mode, piece, weight: _x_gradient(mode, piece, weight, x_BLD)

    def sum_gradients(index: Array) -> Array:
        """Returns the gradient of piece `index` of x, summed over the products."""
        pieces = [piece_of_length(gradient, index, placement) for gradient in gradients]
        x_gradients = [
            _hide_from_remat(gradient_of_piece, mode, piece, weight)
            for mode, piece, weight in zip(modes, pieces, selected, strict=True)
        ]
        return functools.reduce(jnp.add, x_gradients)

    x_gradient_BSD = scatter_piece_by_piece(sum_gradients, placement)
    weight_gradients = [
        _scatter_to_heads(_weight_gradient(mode, x_BLD, gradient, like), weight, weight_heads)
        for mode, gradient, like, weight, weight_heads in zip(modes, gradients, selected, weights, heads, strict=True)
    ]
    return x_gradient_BSD, tuple(weight_gradients), (None,) * len(heads)


@with_backward(_project_ring_backward, static=2)
def _project_ring(
    modes: tuple[ProductMode, ...],
    placement: Placement,
    x_BSD: Array,
    weights: tuple[Array, ...],
    heads: tuple[HeadIndices, ...],
) -> tuple[tuple[Array, ...], _RingSaved]:
    def multiply_piece(piece_BSD: Array) -> tuple[Array, ...]:
        return tuple(
            _hide_from_remat(_project, mode, piece_BSD, _select_heads(weight, weight_heads))
            for mode, weight, weight_heads in zip(modes, weights, heads, strict=True)
        )

    products, x_BLD = gather_piece_by_piece(x_BSD, placement, multiply_piece)
    products = tuple(checkpoint_name(product, PROJECTED) for product in products)
    return products, (checkpoint_name(x_BLD, WHOLE_SEQUENCE), weights, heads)


def _scatter_ring_backward(
    mode: ProductMode, placement: Placement, saved: tuple[Array, Array], gradient_BSD: Array
) -> tuple[Array, Array]:
    x, weight = saved
    gradient_of_piece = lambda mode, piece_BSD, weight: _x_gradient(mode, piece_BSD, weight, x)
    multiply_piece = lambda piece_BSD: _hide_from_remat(gradient_of_piece, mode, piece_BSD, weight)
    x_gradient, gradient_BLD = gather_piece_by_piece(gradient_BSD, placement, multiply_piece)
    return x_gradient, _weight_gradient(mode, x, gradient_BLD, weight)


@with_backward(_scatter_ring_backward, static=2)
def _scatter_ring(
    mode: ProductMode, placement: Placement, x: Array, weight: Array
) -> tuple[Array, tuple[Array, Array]]:
    compute_addend = lambda index: _hide_from_remat(_project, mode, piece_of_length(x, index, placement), weight)
    return checkpoint_name(scatter_piece_by_piece(compute_addend, placement), SCATTERED), (x, weight)


def _hide_from_remat(product: Callable[..., Array], mode: ProductMode, *arrays: Array) -> Array:
    """Computes a product that the remat policy `dots` does not save, because it has a batch dimension (of size 1). The
    joined product is saved instead. The barrier keeps XLA from merging the products of all pieces into one, which would
    have to wait for the last piece."""
    batched = jax.lax.optimization_barrier(tuple(array[None] for array in arrays))
    return jax.vmap(functools.partial(product, mode))(*batched)[0]
