"""Restoring: from files onto the devices of any mesh, compared with what was digested when it was saved."""

import json
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxmnt.checkpoint import digest
from jaxmnt.checkpoint.arrays import Reader, Shape
from jaxmnt.checkpoint.commit import Committed
from jaxmnt.checkpoint.device_digest import start_digests
from jaxmnt.checkpoint.manifest import DamagedError, Manifest
from jaxmnt.checkpoint.names import like, named
from jaxmnt.distributed.container import cores
from jaxmnt.distributed.coordination import agree
from jaxmnt.distributed.identity import Identity
from jaxmnt.errors import ConfigError, UserError, listed
from jaxmnt.strict_json import json_text

State = dict[str, Any]

_Pieces = dict[tuple[tuple[int, int], ...], list[SingleDeviceSharding]]
"""Pieces of an array, by where each dimension of them begins and ends, with the devices that hold each."""

_BYTES_IN_FLIGHT = (16 << 20) * cores()
"""Asked for and not on a device yet. More than the cores can work on only costs memory, and time to get it."""
_SECONDS = 3600.0
"""How long processes wait for each other, some of which may read much more slowly."""


@dataclass(frozen=True)
class Restored:
    """A state, and what it took to get it."""

    state: State
    bytes: int
    """Read by this process."""
    read_seconds: float
    verify_seconds: float


def restore(
    checkpoint: Committed, abstract: State, identity: Identity, *, verify: bool = True, spread: bool = False
) -> Restored:
    """The arrays of `abstract` from `checkpoint`, on its shardings, whatever wrote it.

    `abstract` may leave out parts of the state. With `spread`, replicas read a share each and get the rest from each
    other. All processes return, or all raise: `ConfigError` if the checkpoint is of another model, `DamagedError` if it
    is not what was saved, `UserError` if its files cannot be reached.
    """
    wanted = named(abstract)
    check_fit(checkpoint, wanted)
    started = time.perf_counter()
    where = f"restore {checkpoint.step} of {checkpoint.manifest.run} at {checkpoint.path.name}"
    arrays = {}
    trouble = None
    placed = {name: _spread(leaf.shape, leaf.sharding) if spread else leaf.sharding for name, leaf in wanted.items()}
    try:
        arrays = _read(Reader(checkpoint, placed), placed, checkpoint.manifest)
    except UserError as error:
        trouble = error
    read_seconds = time.perf_counter() - started  # not the waiting for slower processes
    raise_together(f"{where}: read", trouble, identity)
    started = time.perf_counter()
    if verify and (wrong := differing(where, checkpoint.manifest, arrays, identity)):
        raise DamagedError(f"array {listed(wrong, 1)} is not what was saved: its digest is another one")
    verify_seconds = time.perf_counter() - started
    taken = sum(shard.data.nbytes for array in arrays.values() for shard in array.addressable_shards)
    for name, leaf in wanted.items():
        if placed[name] != leaf.sharding:
            arrays[name] = jax.jit(lambda array: array, out_shardings=leaf.sharding)(arrays[name])
            jax.block_until_ready(arrays[name])  # one at a time: for the memory, and because of CPU devices
    return Restored(like(abstract, arrays), taken, read_seconds, verify_seconds)


def check_fit(checkpoint: Committed, wanted: dict[str, Any]) -> None:
    """Raises `ConfigError` if the checkpoint does not hold these arrays: it is of another model or optimizer."""
    stored = checkpoint.manifest.arrays
    for name, leaf in wanted.items():
        if name not in stored:
            raise ConfigError(
                f"checkpoint {checkpoint.path} does not fit this config: it lacks {name}; use the model settings "
                "and dtypes that it was trained with, or name another checkpoint"
            )
        shape, dtype = stored[name].shape, stored[name].dtype
        if shape != tuple(leaf.shape) or dtype != str(leaf.dtype):
            raise ConfigError(
                f"checkpoint {checkpoint.path} does not fit this config: its {name} is {dtype}{list(shape)}, this "
                f"config's is {leaf.dtype}{list(leaf.shape)}; use the model settings and dtypes that it was "
                "trained with, or name another checkpoint"
            )


def _read(reader: Reader, placed: dict[str, NamedSharding], manifest: Manifest) -> dict[str, Array]:
    """Each piece that this process's devices hold, read once; so many at a time as memory allows."""
    shards: dict[str, list[Array]] = {name: [] for name in placed}
    under_way: deque[tuple[str, np.ndarray, Any, list[SingleDeviceSharding]]] = deque()
    in_flight = 0

    def finish_oldest() -> int:
        name, memory, reading, targets = under_way.popleft()
        reader.finish(name, reading)
        copies = [jax.device_put(memory, target) for target in targets]
        jax.block_until_ready(copies)
        shards[name] += copies
        return memory.nbytes

    for name, sharding in placed.items():
        for index, targets in _pieces(manifest.arrays[name].shape, sharding).items():
            memory, reading = reader.start(name, [slice(*bounds) for bounds in index])
            under_way.append((name, memory, reading, targets))
            in_flight += memory.nbytes
            while in_flight > _BYTES_IN_FLIGHT:
                in_flight -= finish_oldest()
    while under_way:
        finish_oldest()
    return {
        name: jax.make_array_from_single_device_arrays(manifest.arrays[name].shape, sharding, shards[name])
        for name, sharding in placed.items()
    }


def _pieces(shape: Shape, sharding: NamedSharding) -> _Pieces:
    """The different pieces that this process's devices hold, each with where it goes."""
    pieces: _Pieces = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        bounds = tuple(part.indices(extent)[:2] for part, extent in zip(index, shape, strict=True))
        target = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
        pieces.setdefault(bounds, []).append(target)
    return pieces


def _spread(shape: Shape, sharding: NamedSharding) -> NamedSharding:
    """The sharding with the axes over which the array is replicated put to the first dimension that they divide."""
    mesh = sharding.mesh
    split = [() if names is None else (names,) if isinstance(names, str) else tuple(names) for names in sharding.spec]
    split += [()] * (len(shape) - len(split))
    used = {name for names in split for name in names}
    for axis in mesh.axis_names:
        if axis in used or mesh.shape[axis] == 1:
            continue
        for dimension, extent in enumerate(shape):
            ways = int(np.prod([mesh.shape[name] for name in split[dimension]], initial=mesh.shape[axis]))
            if extent % ways == 0:
                split[dimension] = (*split[dimension], axis)
                break
    return NamedSharding(mesh, P(*(names or None for names in split)), memory_kind=sharding.memory_kind)


def differing(where: str, manifest: Manifest, arrays: dict[str, Array], identity: Identity) -> list[str]:
    """The names of those of `arrays` that are not what the manifest says, in all processes.

    `where` is the same in all processes, and new.
    """

    def wrong_by(shares: list[str]) -> str:
        found = digest.decode(sorted(arrays), shares)
        different = lambda name: manifest.bound_digest(name, found[name]) != manifest.bound_digest(name)
        return json_text([name for name in sorted(arrays) if different(name)])

    share = digest.encode(start_digests(arrays).wait())
    return [str(name) for name in json.loads(agree(f"{where}: digests", share, wrong_by, identity, _SECONDS))]


def raise_together(name: str, trouble: UserError | None, identity: Identity) -> None:
    """Raises the trouble of the first process that has any, in all of them; without ending the run."""
    kind = "" if trouble is None else "damaged" if isinstance(trouble, DamagedError) else "other"
    first = lambda told: next((text for text in told if text), "")
    if verdict := agree(name, f"{kind} {trouble}" if trouble else "", first, identity, _SECONDS):
        kind, _, text = verdict.partition(" ")
        raise (DamagedError if kind == "damaged" else UserError)(text)
