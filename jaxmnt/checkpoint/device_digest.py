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
    """Digests that the devices are computing. The digested arrays may be donated in the meantime."""

    pieces: dict[str, Array]
    """The digests of the pieces that the devices hold, uint32 [devices, 2] by array name, to compare replicas."""
    first_holders: dict[str, list[jax.Device]]
    """The devices of this process that hold the first copy of a piece, by array name."""

    def wait(self) -> dict[str, Lanes]:
        """Waits for the digests and returns this process's share of each, by array name.

        The shares add up to the digest.
        """
        shares = {}
        for name, sums in self.pieces.items():
            lanes_of = {shard.device: np.asarray(shard.data)[0] for shard in sums.addressable_shards}
            total = ZERO
            for device in self.first_holders[name]:
                first, second = lanes_of[device]
                total = add(total, (int(first), int(second)))
            shares[name] = total
        return shares


def start_digests(arrays: Mapping[str, Array]) -> Digests:
    """Starts to compute the digests of `arrays`, which are on a mesh, without waiting for them."""
    first_holders = {
        name: [shard.device for shard in array.addressable_shards if shard.replica_id == 0]
        for name, array in arrays.items()
    }
    shardings = tuple((name, array.sharding) for name, array in sorted(arrays.items()))
    return Digests(_digest_program(shardings)(dict(arrays)), first_holders)


@functools.lru_cache(maxsize=64)
def _digest_program(shardings: tuple[tuple[str, NamedSharding], ...]) -> Any:
    """Returns one compiled function that digests all arrays, so that the compile cache has a single entry."""

    def digest(arrays: dict[str, Array]) -> dict[str, Array]:
        return {name: _piece_digester(sharding)(arrays[name]) for name, sharding in shardings}

    return jax.jit(digest)


@functools.lru_cache(maxsize=512)
def _piece_digester(sharding: NamedSharding) -> Any:
    """Returns a function that digests each piece of an array with this sharding, as uint32 [devices, 2].

    It is traced once per sharding, shape and dtype.
    """
    mesh, spec = sharding.mesh, sharding.spec
    assert isinstance(mesh, Mesh)

    def digest(array: Array) -> Array:
        digest_pieces = jax.shard_map(
            lambda piece: _digest_piece(piece, array.shape, spec),
            mesh=mesh,
            in_specs=spec,
            out_specs=P(mesh.axis_names),
            check_vma=False,
        )
        return digest_pieces(jax.device_put(array, sharding.with_memory_kind("device")))

    return jax.jit(digest)


def _digest_piece(piece: Array, shape: tuple[int, ...], spec: P) -> Array:
    """Returns uint32 [1, 2]: the digest of this device's piece of an array of `shape` (formula in `digest.py`)."""
    # Row-major index of each element in the whole array, modulo 2^32.
    index = jnp.zeros(piece.shape, jnp.uint32)
    mesh_axes = [*spec, *[None] * (len(shape) - len(spec))]
    for dimension, (axes, stride) in enumerate(zip(mesh_axes, row_major_strides(shape), strict=True)):
        local_index = jax.lax.broadcasted_iota(jnp.uint32, piece.shape, dimension)
        if axes:  # the dimension is split, and this device has one of its blocks
            local_index = local_index + jax.lax.axis_index(axes).astype(jnp.uint32) * jnp.uint32(piece.shape[dimension])
        index = index + local_index * jnp.uint32(stride)
    # First lane: the bits of the element and its index, mixed by a bijection.
    words = jax.lax.bitcast_convert_type(piece, UNSIGNED[piece.dtype.itemsize]).astype(jnp.uint32)
    h = words + index * KEY
    for shift, factor in MIX:
        h = h ^ (h >> shift)
        h = h * factor if factor else h
    # Second lane: the first lane, mixed once more with the bits of the element.
    second = (h ^ words) * SECOND_FACTOR
    second = second ^ (second >> SECOND_SHIFT)
    # A single reduction with two results is three times as fast on CPU as two reductions.
    zero = jnp.uint32(0)
    add_lanes = lambda a, b: (a[0] + b[0], a[1] + b[1])
    return jnp.stack(jax.lax.reduce((h, second), (zero, zero), add_lanes, tuple(range(piece.ndim))))[None]
