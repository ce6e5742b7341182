"""Computes digests of arrays on the devices: each device digests its own piece, without communication."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmnt.checkpoint.digest import (
    KEY,
    MIX,
    SECOND_FACTOR,
    SECOND_SHIFT,
    UNSIGNED,
    ZERO,
    Lanes,
    add,
    row_major_strides,
)


@dataclass(frozen=True)
class Digests:
    """Digests in progress. The arrays may be donated meanwhile."""

    pieces: dict[str, Array]
    """For each name a uint32 [devices, 2] of what each device holds, so that replicas can be compared as well."""
    firsts: dict[str, list[jax.Device]]
    """The devices of this process that hold the first copy of a piece, by array name."""

    def wait(self) -> dict[str, Lanes]:
        """Waits for the digests and returns this process's share of each."""
        shares = {}
        for name, sums in self.pieces.items():
            lanes_of = {shard.device: np.asarray(shard.data)[0] for shard in sums.addressable_shards}
            total = ZERO
            for device in self.firsts[name]:
                first, second = lanes_of[device]
                total = add(total, (int(first), int(second)))
            shares[name] = total
        return shares


def start_digests(arrays: Mapping[str, Array]) -> Digests:
    """Dispatches the digests of `arrays`, which are on a mesh, and returns at once."""
    firsts = {
        name: [shard.device for shard in array.addressable_shards if shard.replica_id == 0]
        for name, array in arrays.items()
    }
    shardings = tuple((name, array.sharding) for name, array in sorted(arrays.items()))
    return Digests(_program(shardings)(dict(arrays)), firsts)


@functools.lru_cache(maxsize=64)
def _program(shardings: tuple[tuple[str, NamedSharding], ...]) -> Any:
    """Returns one compiled function for all arrays, so that the compile cache has a single entry."""

    def digest(arrays: dict[str, Array]) -> dict[str, Array]:
        return {name: _pieces(sharding)(arrays[name]) for name, sharding in shardings}

    return jax.jit(digest)


@functools.lru_cache(maxsize=512)
def _pieces(sharding: NamedSharding) -> Any:
    """Returns a function from an array to uint32 [devices, 2], traced once per sharding, shape and dtype."""
    mesh, spec = sharding.mesh, sharding.spec
    assert isinstance(mesh, Mesh)

    def digest(array: Array) -> Array:
        inside = jax.shard_map(
            lambda piece: _digest_piece(piece, array.shape, spec),
            mesh=mesh,
            in_specs=spec,
            out_specs=P(mesh.axis_names),
            check_vma=False,
        )
        return inside(jax.device_put(array, sharding.with_memory_kind("device")))

    return jax.jit(digest)


def _digest_piece(piece: Array, shape: tuple[int, ...], spec: P) -> Array:
    """Returns uint32 [1, 2]: the digest of this device's piece of an array of `shape` (formula in `digest.py`)."""
    # Row-major index of each element in the whole array, modulo 2^32.
    index = jnp.zeros(piece.shape, jnp.uint32)
    names = [*spec, *[None] * (len(shape) - len(spec))]
    for dimension, (axes, stride) in enumerate(zip(names, row_major_strides(shape), strict=True)):
        here = jax.lax.broadcasted_iota(jnp.uint32, piece.shape, dimension)
        if axes:  # the dimension is split, and this device has one of its blocks
            here = here + jax.lax.axis_index(axes).astype(jnp.uint32) * jnp.uint32(piece.shape[dimension])
        index = index + here * jnp.uint32(stride)
    # First lane: the bits and the index, mixed by a bijection.
    words = jax.lax.bitcast_convert_type(piece, UNSIGNED[piece.dtype.itemsize]).astype(jnp.uint32)
    h = words + index * KEY
    for shift, factor in MIX:
        h = h ^ (h >> shift)
        h = h * factor if factor else h
    # Second lane: mixed once more, independently of the first.
    second = (h ^ words) * SECOND_FACTOR
    second = second ^ (second >> SECOND_SHIFT)
    # A single reduction with two results is three times as fast on CPU as two reductions.
    zero = jnp.uint32(0)
    pair = lambda a, b: (a[0] + b[0], a[1] + b[1])
    return jnp.stack(jax.lax.reduce((h, second), (zero, zero), pair, tuple(range(piece.ndim))))[None]
