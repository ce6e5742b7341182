"""Restores a state from files onto the devices of any mesh, and verifies it by the digests in the manifest."""

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
from jaxmnt.checkpoint.names import arrays_by_name, unflatten_like
from jaxmnt.distributed.container import cores
from jaxmnt.distributed.coordination import agree
from jaxmnt.distributed.identity import Identity
from jaxmnt.errors import ConfigError, UserError, error_of, listed
from jaxmnt.strict_json import json_text

State = dict[str, Any]

_PieceHolders = dict[tuple[tuple[int, int], ...], list[SingleDeviceSharding]]
"""The devices that hold each piece of an array. A piece is identified by its (start, end) in each dimension."""

_MAX_BYTES_IN_FLIGHT = (16 << 20) * cores()
"""Maximum number of bytes that are requested but not yet on a device. A larger number than the cores can process only
costs memory and time."""
_PEER_TIMEOUT_SECONDS = 3600.0
"""Timeout for an exchange with the other processes, some of which may read much more slowly."""


@dataclass(frozen=True)
class Restored:
    """A restored state, the number of bytes read, and the seconds that the restore took."""

    state: State
    bytes: int
    """Bytes read by this process."""
    read_seconds: float
    verify_seconds: float


def restore(
    checkpoint: Committed,
    abstract: State,
    identity: Identity,
    *,
    verify: bool = True,
    spread: bool = False,
    part: str = "",
) -> Restored:
    """Restores the arrays of `abstract` from `checkpoint`, with the shardings of `abstract`.

    The checkpoint may have been written on any mesh, and `abstract` may leave out parts of the state. With `spread`,
    each replica reads a share and gets the rest from the others. If a checkpoint is restored in several calls, `part`
    names each of them. Either all processes return, or all raise `ConfigError` if the checkpoint belongs to another
    model, `DamagedError` if it is not what was saved, and `UserError` if its files cannot be reached.
    """
    leaves = arrays_by_name(abstract)
    check_fit(checkpoint, leaves)
    # Read. A failure is raised in all processes, so that none waits for another one.
    started = time.perf_counter()
    exchange = f"restore {part}{checkpoint.step} of {checkpoint.manifest.run} at {checkpoint.path.name}"
    arrays = {}
    trouble = None
    shardings = {name: leaf.sharding for name, leaf in leaves.items()}
    if spread:
        shardings = {name: _spread_over_replicas(leaf.shape, leaf.sharding) for name, leaf in leaves.items()}
    try:
        arrays = _read(Reader(checkpoint, shardings), shardings, checkpoint.manifest)
    except UserError as error:
        trouble = error
    read_seconds = time.perf_counter() - started  # without the time spent waiting for slower processes
    raise_together(f"{exchange}: read", trouble, identity)
    # Verify the arrays by their digests. Each device digests its own piece.
    started = time.perf_counter()
    mismatched = mismatched_arrays(exchange, checkpoint.manifest, arrays, identity) if verify else []
    if mismatched:
        raise DamagedError(f"array {listed(mismatched, 1)} is not what was saved: its digest differs")
    verify_seconds = time.perf_counter() - started
    bytes_read = sum(shard.data.nbytes for array in arrays.values() for shard in array.addressable_shards)
    # Give each replica the shares that the others have read. Exchange one array at a time to save memory, and because
    # CPU devices may run the collectives of several programs in different orders.
    for name, leaf in leaves.items():
        if shardings[name] != leaf.sharding:
            arrays[name] = jax.jit(lambda array: array, out_shardings=leaf.sharding)(arrays[name])
            jax.block_until_ready(arrays[name])
    return Restored(unflatten_like(abstract, arrays), bytes_read, read_seconds, verify_seconds)


def check_fit(checkpoint: Committed, leaves: dict[str, Any]) -> None:
    """Raises `ConfigError` if the checkpoint lacks one of the arrays `leaves`, or has it with another shape or dtype.

    Then it belongs to another model or optimizer.
    """
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
                f"checkpoint {checkpoint.path} does not fit this config: its {name} is {dtype}{list(shape)}, but "
                f"this config's is {leaf.dtype}{list(leaf.shape)}; use the model settings and dtypes that it was "
                "trained with, or name another checkpoint"
            )


def _read(reader: Reader, shardings: dict[str, NamedSharding], manifest: Manifest) -> dict[str, Array]:
    """Reads each piece that this process's devices hold once, and returns the arrays with these shardings."""
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
        for index, targets in _pieces_with_holders(manifest.arrays[name].shape, sharding).items():
            memory, reading = reader.start(name, [slice(*bounds) for bounds in index])
            pending.append((name, memory, reading, targets))
            in_flight += memory.nbytes
            while in_flight > _MAX_BYTES_IN_FLIGHT:
                in_flight -= finish_oldest()
    while pending:
        finish_oldest()
    return {
        name: jax.make_array_from_single_device_arrays(manifest.arrays[name].shape, sharding, shards[name])
        for name, sharding in shardings.items()
    }


def _pieces_with_holders(shape: Shape, sharding: NamedSharding) -> _PieceHolders:
    """Returns the distinct pieces of an array that this process's devices hold, each with the devices that hold it."""
    pieces: _PieceHolders = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        bounds = tuple(part.indices(extent)[:2] for part, extent in zip(index, shape, strict=True))
        target = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
        pieces.setdefault(bounds, []).append(target)
    return pieces


def _spread_over_replicas(shape: Shape, sharding: NamedSharding) -> NamedSharding:
    """Returns a sharding that also splits the array over the mesh axes over which `sharding` replicates it.

    Each of these axes splits the first dimension whose extent it divides evenly, if there is one.
    """
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


def mismatched_arrays(exchange: str, manifest: Manifest, arrays: dict[str, Array], identity: Identity) -> list[str]:
    """Returns, in all processes, the names of the arrays whose digest differs from the one in the manifest.

    `exchange` names the exchange between the processes. The name must be the same in all of them, and be used once.
    """

    contents = content_digests(exchange, arrays, identity)
    differs = lambda name: manifest.bound_digest(name, contents[name]) != manifest.bound_digest(name)
    return [name for name in sorted(arrays) if differs(name)]


def content_digests(exchange: str, arrays: dict[str, Array], identity: Identity) -> dict[str, str]:
    """Returns, in all processes, the digest of each array's content. `exchange` is as in `mismatched_arrays`."""
    share = digest.encode(start_digests(arrays).wait())
    add_up = lambda shares: json_text(digest.decode(sorted(arrays), shares))
    contents: dict[str, str] = json.loads(agree(f"{exchange}: digests", share, add_up, identity, _PEER_TIMEOUT_SECONDS))
    return contents


def raise_together(name: str, trouble: UserError | None, identity: Identity) -> None:
    """Raises, in all processes, the error of the first process that has one.

    A `DamagedError` stays one, and any other error keeps its text and exit code. The caller may catch it and go on,
    because no process is lost. `name` names the exchange between the processes, as in `mismatched_arrays`.
    """
    own_message = ""
    if trouble is not None:
        own_message = f"{'damaged' if isinstance(trouble, DamagedError) else int(trouble.exit_code)} {trouble}"
    first_message = lambda messages: next((text for text in messages if text), "")
    message = agree(name, own_message, first_message, identity, _PEER_TIMEOUT_SECONDS)
    if message:
        kind, _, text = message.partition(" ")
        raise DamagedError(text) if kind == "damaged" else error_of(int(kind), text)
