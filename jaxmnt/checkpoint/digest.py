"""What is digested of an array: a sum over its elements, so that it can be taken in any pieces and on any sharding.

    digest(x) = Σ over i of (mix(bits of x_i + i · c), mix' of the same)   modulo 2^32, two lanes

i is the element's row-major index in the whole array, c is odd, and `mix` a bijection of 32 bits: whatever one element
changes to, the first lane changes with certainty; anything else goes unseen once in 2^64. It finds damage; it is
no defence against somebody who wants to deceive. This module is NumPy alone; `device_digest.py` does the same in JAX.
"""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

Lanes = tuple[int, int]

MODULUS = 1 << 32
ZERO: Lanes = (0, 0)

KEY = np.uint32(0x9E3779B1)
MIX = ((16, np.uint32(0x2C1B3C6D)), (15, np.uint32(0x297A2D39)), (15, np.uint32(0)))
"""Shifts with exclusive or, each with a multiplication after it (0: none). Each of them can be undone."""
SECOND_FACTOR, SECOND_SHIFT = np.uint32(0x85EBCA6B), 16

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
"""The type of an element's bits, by its bytes."""

_BLOCK = 1 << 15
"""Elements taken at a time: their temporaries stay in a core's cache."""


def block_digest(block: np.ndarray, start: Sequence[int], shape: Sequence[int]) -> Lanes:
    """The share of `block`, which begins at index `start` of a whole array of `shape`."""
    if block.size == 0:
        return ZERO
    strides = row_major_strides(shape)
    words = np.ascontiguousarray(block).view(UNSIGNED[block.dtype.itemsize])
    words = words.reshape(-1, block.shape[-1] if block.ndim else 1)
    rows: np.ndarray = np.zeros(block.shape[:-1], np.uint32)
    for dimension in range(block.ndim - 1):
        along = (np.arange(block.shape[dimension], dtype=np.uint64) + start[dimension]) * strides[dimension]
        rows += along.astype(np.uint32).reshape([-1 if d == dimension else 1 for d in range(block.ndim - 1)])
    rows = rows.reshape(-1, 1)
    columns = (np.arange(words.shape[1], dtype=np.uint64) + (start[-1] if block.ndim else 0)).astype(np.uint32)
    total = ZERO
    wide = min(_BLOCK, words.shape[1])
    tall = max(1, _BLOCK // wide)
    for top in range(0, words.shape[0], tall):
        for left in range(0, words.shape[1], wide):
            piece = words[top : top + tall, left : left + wide].astype(np.uint32)
            total = add(total, _lanes(piece, rows[top : top + tall] + columns[left : left + wide]))
    return total


def _lanes(words: np.ndarray, index: np.ndarray) -> Lanes:
    """Both sums over elements with these bits and indices. Takes the arrays over."""
    h, shifted = index, np.empty_like(words)
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
    """16 hexadecimal digits."""
    return f"{lanes[0]:08x}{lanes[1]:08x}"


def from_text(text: str) -> Lanes:
    return int(text[:8], 16), int(text[8:16], 16)


def encode(shares: Mapping[str, Lanes]) -> str:
    """A process's shares of digests in order of their names, as text for the others."""
    return "".join(to_text(shares[name]) for name in sorted(shares))


def decode(names: Sequence[str], texts: Sequence[str]) -> dict[str, str]:
    """The whole digest of each name, from the texts of all processes. The names are sorted."""
    found = {}
    for i, name in enumerate(names):
        total = ZERO
        for text in texts:
            total = add(total, from_text(text[16 * i : 16 * i + 16]))
        found[name] = to_text(total)
    return found


def bound(content: str, run: str, step: int, name: str, shape: Sequence[int], dtype: str) -> str:
    """A digest of an array's content together with whose it is: another run's, step's or array's is another one."""
    text = "\0".join((run, str(step), name, ",".join(map(str, shape)), dtype, content))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Elements from one index to the next of each dimension, modulo 2^32."""
    strides, product = [], 1
    for size in reversed(shape):
        strides.append(product % MODULUS)
        product *= size
    return tuple(reversed(strides))
