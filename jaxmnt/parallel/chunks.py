"""The chunks of a row that the devices along the mesh axis `context` hold.

A row is cut into 2c chunks for c devices. Device r holds chunk r and, after it, chunk 2c - 1 - r. Chunks near the start
of a row see few keys and chunks near its end see many, so that all devices compute equally many scores of causal
attention (Llama Team 2024, arXiv:2407.21783, section 3.3.2). The columns of a batch are put in this order when it is
copied to the devices. There, each device has a shorter row whose tokens are still in rising order, so only attention
and what depends on a token's place in the row know of the chunks.

Shapes: B batch, L length of whole rows, S a device's piece of the length.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxmnt.parallel.collectives import gather_chunks, index_along
from jaxmnt.parallel.sharding import Placement


def device_order(length: int, devices: int) -> np.ndarray:
    """Returns the columns of a row of `length` tokens in the order in which the devices hold them, int [L]."""
    chunks_LC = np.arange(length).reshape(2 * devices, -1)
    pairs = [chunks_LC[[rank, 2 * devices - 1 - rank]] for rank in range(devices)]
    return np.concatenate(pairs).reshape(-1)


def row_order(length: int, devices: int) -> np.ndarray:
    """Returns the inverse of `device_order`: the index, among the columns as the devices hold them, of each column."""
    return np.argsort(device_order(length, devices))


def halo_length(window: int | None, chunk_length: int, row_length: int) -> int | None:
    """Returns the number of tokens before a chunk that are computed together with it in a layer with a window: the
    window, or as many whole chunks as it reaches if it is wider than a chunk. None if the window is the row."""
    if window is None or window >= row_length:
        return None
    return window if window <= chunk_length else -(-window // chunk_length) * chunk_length


def whole_rows(x_BL: Array, placement: Placement) -> Array | None:
    """Returns an array of whole rows in their order, from this device's part of the rows; None if the mesh does not
    divide rows."""
    devices = placement.num_shards("length")
    if devices == 1:
        return None
    gathered_BL = gather_chunks(x_BL, placement, 1)
    return gathered_BL[:, row_order(gathered_BL.shape[1], devices)]


def places_in_row(piece_length: int, placement: Placement) -> Array:
    """Returns the places, in their whole row, of the tokens in this device's piece of the length between layers, int32
    [S]. The place of a row's first token is 0."""
    index_S = index_along("sequence", placement) * piece_length + jnp.arange(piece_length, dtype=jnp.int32)
    devices = placement.num_shards("length")
    if devices == 1:
        return index_S
    chunk = piece_length * placement.num_shards("sequence") // 2
    rank = index_along("length", placement)
    chunks_before = jnp.where(index_S < chunk, rank, 2 * devices - 2 - rank)
    return chunks_before * chunk + index_S
