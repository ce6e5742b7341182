"""Restores a state from files onto the devices of any mesh, and verifies it by the digests taken when it was saved."""

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
from jaxmnt.checkpoint.names import named, unflatten_like
from jaxmnt.distributed.container import cores
from jaxmnt.distributed.coordination import agree
from jaxmnt.distributed.identity import Identity
from jaxmnt.errors import ConfigError, UserError, listed
from jaxmnt.strict_json import json_text

State = dict[str, Any]

_Pieces = dict[tuple[tuple[int, int], ...], list[SingleDeviceSharding]]
"""The devices that hold each piece of an array, by the (start, end) of each of its dimensions."""

_BYTES_IN_FLIGHT = (16 << 20) * cores()
"""Limit on bytes requested and not yet on a device. More than the cores can process only costs memory and time."""
_SECONDS = 3600.0
"""Timeout for other processes, some of which may read much more slowly."""


@dataclass(frozen=True)
class Restored:
    """A restored state, and the bytes and seconds that it took."""

    state: State
    bytes: int
    """Bytes read by this process."""
    read_seconds: float
    verify_seconds: float


def restore(
    checkpoint: Committed, abstract: State, identity: Identity, *, verify: bool = True, spread: bool = False
) -> Restored:
    """Restores the arrays of `abstract` from `checkpoint`, on its shardings, whatever mesh wrote the checkpoint.

    `abstract` may leave out parts of the state. With `spread`, replicas read a share each and get the rest from each
    other. All processes return, or all raise: `ConfigError` if the checkpoint is of another model, `DamagedError` if it
    is not what was saved, `UserError` if its files cannot be reached.
    """
    leaves = named(abstract)
    check_fit(checkpoint, leaves)
    # Read. A failure is raised in all processes, so that none waits for another one.
    started = time.perf_counter()
    where = f"restore {checkpoint.step} of {checkpoint.manifest.run} at {checkpoint.path.name}"
    arrays = {}
    trouble = None
    shardings = {name: _spread(leaf.shape, leaf.sharding) if spread else leaf.sharding for name, leaf in leaves.items()}
    try:
        arrays = _read(Reader(checkpoint, shardings), shardings, checkpoint.manifest)
    except UserError as error:
        trouble = error
    read_seconds = time.perf_counter() - started  # without the time spent waiting for slower processes
    raise_together(f"{where}: read", trouble, identity)
    # Verify by digests, which each device computes of its own piece.
    started = time.perf_counter()
    if verify and (wrong := mismatched_arrays(where, checkpoint.manifest, arrays, identity)):
        raise DamagedError(f"array {listed(wrong, 1)} is not what was saved: its digest differs")
    verify_seconds = time.perf_counter() - started
    bytes_read = sum(shard.data.nbytes for array in arrays.values() for shard in array.addressable_shards)
    # Give replicas the shares that the others have read. One array at a time: to save memory, and because CPU devices
    # may run collectives of several programs in different orders.
    for name, leaf in leaves.items():
        if shardings[name] != leaf.sharding:
            arrays[name] = jax.jit(lambda array: array, out_shardings=leaf.sharding)(arrays[name])
            jax.block_until_ready(arrays[name])
    return Restored(unflatten_like(abstract, arrays), bytes_read, read_seconds, verify_seconds)


def check_fit(checkpoint: Committed, leaves: dict[str, Any]) -> None:
    """Raises `ConfigError` if the checkpoint lacks one of these arrays: it is of another model or optimizer."""
    stored = checkpoint.manifest.arrays
    for name, leaf in leaves.items():
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


def _read(reader: Reader, shardings: dict[str, NamedSharding], manifest: Manifest) -> dict[str, Array]:
    """Reads each piece that this process's devices hold once, with at most `_BYTES_IN_FLIGHT` bytes in flight."""
    shards: dict[str, list[Array]] = {name: [] for name in shardings}
    pending: deque[tuple[str, np.ndarray, Any, list[SingleDeviceSharding]]] = deque()
    in_flight = 0

    def finish_oldest() -> int:
        name, memory, reading, targets = pending.popleft()
        reader.finish(name, reading)
        copies = [jax.device_put(memory, target) for target in targets]
        jax.block_until_ready(copies)
        shards[name] += copies
        return memory.nbytes

    for name, sharding in shardings.items():
        for index, targets in _pieces(manifest.arrays[name].shape, sharding).items():
            memory, reading = reader.start(name, [slice(*bounds) for bounds in index])
            pending.append((name, memory, reading, targets))
            in_flight += memory.nbytes
            while in_flight > _BYTES_IN_FLIGHT:
                in_flight -= finish_oldest()
    while pending:
        finish_oldest()
    return {
        name: jax.make_array_from_single_device_arrays(manifest.arrays[name].shape, sharding, shards[name])
        for name, sharding in shardings.items()
    }


def _pieces(shape: Shape, sharding: NamedSharding) -> _Pieces:
    """Returns the distinct pieces that this process's devices hold, each with the devices that it goes to."""
    pieces: _Pieces = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        bounds = tuple(part.indices(extent)[:2] for part, extent in zip(index, shape, strict=True))
        target = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
        pieces.setdefault(bounds, []).append(target)
    return pieces


def _spread(shape: Shape, sharding: NamedSharding) -> NamedSharding:
    """Returns the sharding with each axis that replicates the array moved to the first dimension that it divides."""
    mesh = sharding.mesh
    split = [(names,) if isinstance(names, str) else tuple(names or ()) for names in sharding.spec]
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


def mismatched_arrays(where: str, manifest: Manifest, arrays: dict[str, Array], identity: Identity) -> list[str]:
    """Returns, in all processes, the names of the arrays whose digest differs from the manifest's.

    `where` names the exchange between processes: it must be equal in all of them, and used once.
    """

    def mismatches(shares: list[str]) -> str:
        contents = digest.decode(sorted(arrays), shares)
        differs = lambda name: manifest.bound_digest(name, contents[name]) != manifest.bound_digest(name)
        return json_text([name for name in sorted(arrays) if differs(name)])

    share = digest.encode(start_digests(arrays).wait())
    return [str(name) for name in json.loads(agree(f"{where}: digests", share, mismatches, identity, _SECONDS))]


def raise_together(name: str, trouble: UserError | None, identity: Identity) -> None:
    """Raises in all processes the error of the first process that has one, as an error that does not end the run."""
    kind = "" if trouble is None else "damaged" if isinstance(trouble, DamagedError) else "other"
    first = lambda messages: next((text for text in messages if text), "")
    if verdict := agree(name, f"{kind} {trouble}" if trouble else "", first, identity, _SECONDS):
        kind, _, text = verdict.partition(" ")
        raise (DamagedError if kind == "damaged" else UserError)(text)
