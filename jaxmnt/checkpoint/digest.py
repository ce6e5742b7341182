"""Digest of an array: a sum over its elements, so that it can be computed in any pieces and on any sharding.

    digest(x) = Σ over i of (m_i, mix'(m_i ^ x_i)), with m_i = mix(x_i + i · c)   modulo 2^32, in two lanes

Here x_i is the bits of the element with row-major index i in the whole array, c is odd, and `mix` is a bijection of 32
bits. So a change of a single element always changes the first lane. Any other change is missed with a probability of
2^-64. The digest detects damage, not deliberate forgery. This module uses NumPy only; `device_digest.py` computes the
same in JAX.
"""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

Lanes = tuple[int, int]

MODULUS = 1 << 32
ZERO: Lanes = (0, 0)

KEY = np.uint32(0x9E3779B1)
MIX = ((16, np.uint32(0x2C1B3C6D)), (15, np.uint32(0x297A2D39)), (15, np.uint32(0)))
"""The (shift, factor) of each step of `mix`: x ^= x >> shift, then x *= factor. The factor is odd; 0 means that there
is no multiplication. So each step is invertible."""
SECOND_FACTOR, SECOND_SHIFT = np.uint32(0x85EBCA6B), 16

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
"""Unsigned type with the bits of an element, by its size in bytes."""

_BLOCK_ELEMENTS = 1 << 15
"""Number of elements that are processed at once, so that their temporaries stay in a core's cache."""


def block_digest(block: np.ndarray, start: Sequence[int], shape: Sequence[int]) -> Lanes:
    """Returns the digest of `block`, which begins at index `start` of a whole array of `shape`."""
    if block.size == 0:
        return ZERO
    strides = row_major_strides(shape)
    # View the bits of the elements as a matrix whose rows run along the last dimension.
    words = np.ascontiguousarray(block).view(UNSIGNED[block.dtype.itemsize])
    words = words.reshape(-1, block.shape[-1] if block.ndim else 1)
    # The index of an element in the whole array is the sum of the index of its row and its column.
    row_indices: np.ndarray = np.zeros(block.shape[:-1], np.uint32)
    for dimension in range(block.ndim - 1):
        indices = (np.arange(block.shape[dimension], dtype=np.uint64) + start[dimension]) * strides[dimension]
        broadcast_shape = [-1 if d == dimension else 1 for d in range(block.ndim - 1)]
        row_indices += indices.astype(np.uint32).reshape(broadcast_shape)
    row_indices = row_indices.reshape(-1, 1)
    column_indices = (np.arange(words.shape[1], dtype=np.uint64) + (start[-1] if block.ndim else 0)).astype(np.uint32)
    total = ZERO
    width = min(_BLOCK_ELEMENTS, words.shape[1])
    height = max(1, _BLOCK_ELEMENTS // width)
    for row in range(0, words.shape[0], height):
        for column in range(0, words.shape[1], width):
            piece = words[row : row + height, column : column + width].astype(np.uint32)
            index = row_indices[row : row + height] + column_indices[column : column + width]
            total = add(total, _lanes(piece, index))
    return total


def _lanes(words: np.ndarray, index: np.ndarray) -> Lanes:
    """Returns both lanes of the digest of elements, from their bits (`words`) and indices. Overwrites `index`."""
    h = index
    shifted = np.empty_like(words)
    h *= KEY
    h += words
    for shift, factor in MIX:
        h ^= np.right_shift(h, shift, out=shifted)
        if factor:
            h *= factor
    first = int(h.sum(dtype=np.uint64))
    h ^= words
    h *= SECOND_FACTOR
    h ^= np.right_shift(h, SECOND_SHIFT, out=shifted)
    return first % MODULUS, int(h.sum(dtype=np.uint64)) % MODULUS


def add(a: Lanes, b: Lanes) -> Lanes:
    return (a[0] + b[0]) % MODULUS, (a[1] + b[1]) % MODULUS


def to_text(lanes: Lanes) -> str:
    """Returns the digest as 16 hexadecimal digits."""
    return f"{lanes[0]:08x}{lanes[1]:08x}"


def from_text(text: str) -> Lanes:
    return int(text[:8], 16), int(text[8:16], 16)


def encode(shares: Mapping[str, Lanes]) -> str:
    """Encodes a process's shares of the digests as text for the other processes, in order of the array names."""
    return "".join(to_text(shares[name]) for name in sorted(shares))


def decode(names: Sequence[str], texts: Sequence[str]) -> dict[str, str]:
    """Adds up the encoded shares of all processes. Returns the complete digest of each array by name.

    `names` must be sorted, and `texts` has what `encode` returned in each process.
    """
    digests = {}
    for i, name in enumerate(names):
        total = ZERO
        for text in texts:
            total = add(total, from_text(text[16 * i : 16 * i + 16]))
        digests[name] = to_text(total)
    return digests


def bound(content: str, run: str, step: int, name: str, shape: Sequence[int], dtype: str) -> str:
    """Returns a digest that binds an array's content to its run, step, name, shape and dtype."""
    text = "\0".join((run, str(step), name, ",".join(map(str, shape)), dtype, content))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the number of elements between neighbouring indices of each dimension, modulo 2^32."""
    strides = []
    product = 1
    for size in reversed(shape):
        strides.append(product % MODULUS)
        product *= size
    return tuple(reversed(strides))
