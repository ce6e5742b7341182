"""Matrix products of rows that lie in tiles, where each tile has a weight of its own: that of its expert.

A tile holds rows of one expert, and the rest of its last tile is zero. So there are at most ⌈rows / tile⌉ tiles and one
more for each expert, and a tile that no expert uses is zero. `lax.ragged_dot` is not used, because XLA expands it to a
product with every expert's weight.

On CPUs, a loop multiplies the tiles that are in use. On GPUs the number of iterations must not depend on the data,
because XLA would copy the condition of each iteration to the host and wait for it. There all tiles are multiplied, a
constant number at a time.

Shapes: N tiles, R rows of a tile, E experts, D and F the sides of a weight, C tiles of a chunk.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

ProductKind = Literal["loop", "chunks"]
"""The way to compute products: in a loop over the tiles in use, or in chunks of all tiles."""

TILE_ROWS: dict[ProductKind, int] = {"loop": 64, "chunks": 256}
"""Rows of a tile. Small tiles have fewer zeros, and large ones multiply at a higher rate."""
_CHUNK_TILES = 32
"""Tiles of a chunk. A chunk copies the weights of its tiles."""


class Tiles(NamedTuple):
    """The tiles of each expert. Those of expert e are the `count_E[e]` tiles from `first_E[e]` on."""

    first_E: Array
    count_E: Array
    expert_N: Array
    """The expert of each tile. A tile that is not in use has the last expert."""


def tiles_of(rows_E: Array, tile_rows: int, max_rows: int) -> Tiles:
    """Returns the tiles for `rows_E` rows of each expert, which are at most `max_rows` together."""
    experts = len(rows_E)
    count_E = -(-rows_E // tile_rows)
    end_E = jnp.cumsum(count_E)
    num_tiles = -(-max_rows // tile_rows) + experts
    expert_N = jnp.searchsorted(end_E, jnp.arange(num_tiles), side="right")
    return Tiles(end_E - count_E, count_E, jnp.minimum(expert_N, experts - 1).astype(jnp.int32))


def multiply(kind: ProductKind, x_NRD: Array, weight_EDF: Array, tiles: Tiles, *, transposed: bool = False) -> Array:
    """Returns [N, R, F], the product of each tile with its expert's weight. If `transposed`, x is [N, R, F], and is
    multiplied by the transposed weights."""
    inner = 1 if transposed else 0
    outputs = weight_EDF.shape[1 if transposed else 2]
    multiply_tile = lambda x_RD, weight_DF: jax.lax.dot_general(x_RD, weight_DF, (((1,), (inner,)), ((), ())))
    if kind == "chunks":
        product = lambda x_CRD, expert_C: jax.vmap(multiply_tile)(x_CRD, weight_EDF[expert_C])
        return _map_chunks(product, x_NRD, tiles.expert_N)

    def add_expert(y_NRF: Array, expert: tuple[Array, Array, Array]) -> tuple[Array, None]:
        weight_DF, first, count = expert

        def add_tile(index: Array, y_NRF: Array) -> Array:
            return y_NRF.at[first + index].set(multiply_tile(x_NRD[first + index], weight_DF))

        return jax.lax.fori_loop(0, count, add_tile, y_NRF), None

    zeros_NRF = jnp.zeros((*x_NRD.shape[:2], outputs), x_NRD.dtype)
    return jax.lax.scan(add_expert, zeros_NRF, (weight_EDF, tiles.first_E, tiles.count_E))[0]


def weight_gradient(kind: ProductKind, x_NRD: Array, gradient_NRF: Array, tiles: Tiles) -> Array:
    """Returns float32 [E, D, F], the sum over each expert's tiles of x transposed times the gradient. It is zero for an
    expert without tiles."""
    shape = (x_NRD.shape[2], gradient_NRF.shape[2])
    multiply_tile = lambda x_RD, gradient_RF: jax.lax.dot_general(
        x_RD, gradient_RF, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
    if kind == "chunks":
        # Tiles are added to their experts one after another, so that the order of the sums is always the same.
        def add_tile(total_EDF: Array, tile: tuple[Array, Array, Array]) -> tuple[Array, None]:
            x_RD, gradient_RF, expert = tile
            return total_EDF.at[expert].add(multiply_tile(x_RD, gradient_RF)), None

        zeros_EDF = jnp.zeros((len(tiles.count_E), *shape), jnp.float32)
        return jax.lax.scan(add_tile, zeros_EDF, (x_NRD, gradient_NRF, tiles.expert_N))[0]

    def expert_gradient(_: None, expert: tuple[Array, Array]) -> tuple[None, Array]:
        first, count = expert

        def add_tile(index: Array, total_DF: Array) -> Array:
            return total_DF + multiply_tile(x_NRD[first + index], gradient_NRF[first + index])

        return None, jax.lax.fori_loop(0, count, add_tile, jnp.zeros(shape, jnp.float32))

    return jax.lax.scan(expert_gradient, None, (tiles.first_E, tiles.count_E))[1]


def _map_chunks(function: Callable[[Array, Array], Array], x_NRD: Array, expert_N: Array) -> Array:
    """Applies a function to chunks of the tiles, one after another, and joins the results."""
    tiles = len(expert_N)
    padding = -tiles % _CHUNK_TILES
    x_MRD = jnp.pad(x_NRD, ((0, padding), (0, 0), (0, 0)))
    expert_M = jnp.pad(expert_N, (0, padding))
    chunked = lambda array: array.reshape(-1, _CHUNK_TILES, *array.shape[1:])
    y = jax.lax.map(lambda chunk: function(*chunk), (chunked(x_MRD), chunked(expert_M)))
    return y.reshape(-1, *y.shape[2:])[:tiles]
