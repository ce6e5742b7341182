"""Matrix products of rows that lie in tiles, where each tile has a weight of its own: that of its expert.

A tile holds rows of one expert, and the rest of its last tile is zero. So there are at most ⌈rows / tile⌉ tiles and one
more for each expert, and a tile that no expert uses is zero. `lax.ragged_dot` is not used, because XLA expands it to a
product with every expert's weight.

On CPUs, a loop multiplies the tiles that are in use. On GPUs the number of iterations must not depend on the data,
because XLA would copy the condition of each iteration to the host and wait for it. There all tiles are multiplied: by
Mosaic kernels on Hopper (see `models.mosaic`), and elsewhere by XLA, a constant number at a time.

Shapes: N tiles, R rows of a tile, E experts, D and F the sides of a weight, C tiles of a chunk, W tiles of a window.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxmnt.errors import ConfigError
from jaxmnt.models import mosaic

ProductKind = Literal["loop", "chunks", "mosaic"]
"""The way to compute products: in a loop over the tiles in use, in chunks of all tiles, or by Mosaic kernels."""

TILE_ROWS: dict[ProductKind, int] = {"loop": 64, "chunks": 256, "mosaic": mosaic.BLOCK_ROWS}
"""Rows of a tile. Small tiles have fewer zeros, and large ones multiply at a higher rate."""
_CHUNK_TILES = 32
"""Tiles of a chunk. A chunk copies the weights of its tiles."""
_WINDOW_TILES = 4
"""Tiles of a window. Chunks add to an expert's gradient once for each window."""


class ProductMethod(NamedTuple):
    """The way in which a device computes the products."""

    kind: ProductKind
    tile_rows: int
    cores: int = 0
    """The number of a GPU's multiprocessors."""


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


def multiply(
    method: ProductMethod, x_NRD: Array, weight_EDF: Array, tiles: Tiles, *, transposed: bool = False
) -> Array:
    """Returns [N, R, F], the product of each tile with its expert's weight. If `transposed`, x is [N, R, F], and is
    multiplied by the transposed weights. Tiles that are not in use are undefined."""
    if method.kind == "mosaic":
        rows_E = tiles.count_E * method.tile_rows
        y_MF = mosaic.multiply(_without_tiles(x_NRD), weight_EDF, rows_E, transposed=transposed)
        return y_MF.reshape(*x_NRD.shape[:2], -1)
    dimensions = (((1,), (1 if transposed else 0,)), ((), ()))
    multiply_tile = lambda x_RD, weight_DF: jax.lax.dot_general(x_RD, weight_DF, dimensions)
    if method.kind == "chunks":
        product = lambda x_CRD, expert_C: jax.vmap(multiply_tile)(x_CRD, weight_EDF[expert_C])
        return _map_chunks(product, x_NRD, tiles.expert_N)

    def add_expert(y_NRF: Array, expert: tuple[Array, Array, Array]) -> tuple[Array, None]:
        weight_DF, first, count = expert

        def add_tile(index: Array, y_NRF: Array) -> Array:
            return y_NRF.at[first + index].set(multiply_tile(x_NRD[first + index], weight_DF))

        return _over_tiles(tiles, count, add_tile, y_NRF), None

    outputs = weight_EDF.shape[1 if transposed else 2]
    zeros_NRF = jnp.zeros((*x_NRD.shape[:2], outputs), x_NRD.dtype)
    return jax.lax.scan(add_expert, zeros_NRF, (weight_EDF, tiles.first_E, tiles.count_E))[0]


def weight_gradient(method: ProductMethod, x_NRD: Array, gradient_NRF: Array, tiles: Tiles) -> Array:
    """Returns float32 [E, D, F], the sum over each expert's tiles of x transposed times the gradient. It is zero for an
    expert without tiles."""
    if method.kind == "mosaic":
        rows_E = tiles.count_E * method.tile_rows
        x_MD, gradient_MF = _without_tiles(x_NRD), _without_tiles(gradient_NRF)
        return mosaic.weight_gradient(x_MD, gradient_MF, rows_E, method.cores).astype(jnp.float32)
    if method.kind == "chunks":
        return _weight_gradient_in_windows(x_NRD, gradient_NRF, tiles)

    def expert_gradient(_: None, expert: tuple[Array, Array]) -> tuple[None, Array]:
        first, count = expert

        def add_tile(index: Array, total_DF: Array) -> Array:
            return total_DF + _multiply_rows(x_NRD[first + index], gradient_NRF[first + index])

        zeros_DF = jnp.zeros((x_NRD.shape[2], gradient_NRF.shape[2]), jnp.float32)
        return None, _over_tiles(tiles, count, add_tile, zeros_DF)

    return jax.lax.scan(expert_gradient, None, (tiles.first_E, tiles.count_E))[1]


def _weight_gradient_in_windows(x_NRD: Array, gradient_NRF: Array, tiles: Tiles) -> Array:
    """Returns the weight gradient. Its products are those of windows of an expert's tiles."""
    windows = tiles_of(tiles.count_E, _WINDOW_TILES, len(x_NRD))
    pad = lambda array: jnp.pad(array, ((0, _WINDOW_TILES), (0, 0), (0, 0)))
    x_MRD, gradient_MRF = pad(x_NRD), pad(gradient_NRF)

    # Windows are added to their experts one after another, so that the order of the sums is always the same.
    def add_window(total_EDF: Array, window: tuple[Array, Array]) -> tuple[Array, None]:
        index, expert = window
        first = (index - windows.first_E[expert]) * _WINDOW_TILES
        take = lambda array: jax.lax.dynamic_slice_in_dim(array, tiles.first_E[expert] + first, _WINDOW_TILES)
        is_own_W = first + jnp.arange(_WINDOW_TILES) < tiles.count_E[expert]
        x_WRD = jnp.where(is_own_W[:, None, None], take(x_MRD), 0)
        addend_DF = _multiply_rows(_without_tiles(x_WRD), _without_tiles(take(gradient_MRF)))
        return total_EDF.at[expert].add(addend_DF), None

    zeros_EDF = jnp.zeros((len(tiles.count_E), x_NRD.shape[2], gradient_NRF.shape[2]), jnp.float32)
    numbers = jnp.arange(len(windows.expert_N))
    return jax.lax.scan(add_window, zeros_EDF, (numbers, windows.expert_N))[0]


def _over_tiles(tiles: Tiles, count: Array, add_tile: Callable[[Array, Array], Array], start: Array) -> Array:
    """Returns `add_tile(index, …)` applied to `start` for each of the `count` tiles of an expert."""
    experts = len(tiles.count_E)
    mean = len(tiles.expert_N) / experts - 0.5  # for even loads, whose last tiles are half full on average
    with jax.named_scope(f"about_{mean:.1f}_rounds"):  # the planner reads the number of iterations from this name
        return jax.lax.fori_loop(0, count, add_tile, start)


def _multiply_rows(x_RD: Array, gradient_RF: Array) -> Array:
    """Returns float32 [D, F], the product of x transposed and the gradient."""
    return jax.lax.dot_general(x_RD, gradient_RF, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)


_CHECK_ROWS = (300, 0, 1, 129)
"""Rows of each expert in `check`: several tiles, none, and one row more than none and than a tile."""
_CHECK_TOLERANCE = 0.01
"""The largest difference of two bfloat16 products that `check` accepts, relative to the largest number."""


def check(method: ProductMethod) -> None:
    """Computes small bfloat16 products on the default device, and compares them with the same products by XLA.

    One side of the weights takes the kernels' wide blocks, and the other their narrow blocks. Raises `ConfigError` if
    the products differ, or if the weight gradient of an expert without rows is not zero.
    """
    tile_rows = method.tile_rows
    experts, inputs, outputs = len(_CHECK_ROWS), 256, 192
    tiles = tiles_of(jnp.array(_CHECK_ROWS), tile_rows, sum(_CHECK_ROWS))
    number_NR = (jnp.arange(len(tiles.expert_N)) - tiles.first_E[tiles.expert_N])[:, None] * tile_rows
    is_used_NR1 = (number_NR + jnp.arange(tile_rows) < jnp.array(_CHECK_ROWS)[tiles.expert_N][:, None])[..., None]
    random = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
    rows = is_used_NR1.shape[:2]
    x_NRD = jnp.where(is_used_NR1, random(0, *rows, inputs), 0)
    gradient_NRF = jnp.where(is_used_NR1, random(1, *rows, outputs), 0)
    weight_EDF = random(2, experts, inputs, outputs)

    def compute(by: ProductMethod) -> dict[str, Array]:
        forward = multiply(by, x_NRD, weight_EDF, tiles)
        backward = multiply(by, gradient_NRF, weight_EDF, tiles, transposed=True)
        return {
            "the output": jnp.where(is_used_NR1, forward, 0).astype(jnp.float32),
            "the gradient of x": jnp.where(is_used_NR1, backward, 0).astype(jnp.float32),
            "the gradient of the weights": weight_gradient(by, x_NRD, gradient_NRF, tiles),
        }

    actual, expected = compute(method), compute(ProductMethod("chunks", tile_rows=tile_rows))
    for name, array in expected.items():
        error = float(jnp.max(jnp.abs(actual[name] - array)) / jnp.max(jnp.abs(array)))
        is_zero = name != "the gradient of the weights" or not jnp.any(actual[name][_CHECK_ROWS.index(0)])
        if not error <= _CHECK_TOLERANCE or not is_zero:
            raise ConfigError(
                f"model.experts_kernel: on this GPU, {name} by {method.kind} differs from XLA's by {error:.2g} of "
                "its largest number; set model.experts_kernel=xla"
            )


def _without_tiles(x_NRD: Array) -> Array:
    """Returns the rows of all tiles, [N · R, D]."""
    return x_NRD.reshape(-1, x_NRD.shape[-1])


def _map_chunks(function: Callable[[Array, Array], Array], x_NRD: Array, expert_N: Array) -> Array:
    """Applies a function to chunks of the tiles, one after another, and joins the results."""
    tiles = len(expert_N)
    padding = -tiles % _CHUNK_TILES
    x_MRD = jnp.pad(x_NRD, ((0, padding), (0, 0), (0, 0)))
    expert_M = jnp.pad(expert_N, (0, padding))
    chunked = lambda array: array.reshape(-1, _CHUNK_TILES, *array.shape[1:])
    y = jax.lax.map(lambda chunk: function(*chunk), (chunked(x_MRD), chunked(expert_M)))
    return y.reshape(-1, *y.shape[2:])[:tiles]
