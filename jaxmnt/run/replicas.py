"""Compares replicas of the state, to find devices that compute wrong results without an error."""

import functools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmnt.checkpoint.device_digest import start_digests
from jaxmnt.checkpoint.names import arrays_by_name
from jaxmnt.errors import UserError
from jaxmnt.telemetry.events import Events


class Replicas:
    """Compares digests of the state on devices that must hold the same data, at a fixed interval.

    The digests are dispatched after a step and read one step later, like metrics, so nothing waits for them. A save
    reads the digests of its state first, so that a state that differs between replicas is never saved.
    """

    def __init__(self, interval_steps: int, hosts: Mapping[int, str], events: Events):
        """Compares every `interval_steps` steps (0: never). `hosts` has the host name of each process."""
        self._interval_steps, self._hosts, self._events = interval_steps, hosts, events
        self._pending: tuple[int, list[str], dict[str, Any], Array] | None = None
        """The comparison in progress: its step, the names of the arrays, their (sharding, shape), and the digests."""
        self._last_equal_step: int | None = None
        """The last step after which all replicas were equal."""

    def prepare(self, step: int, state: Any) -> float | None:
        """Compares the replicas of the state that a run begins with, which also compiles the comparison.

        Returns the fraction of the state's bytes that more than one device holds; None if comparisons are off.
        """
        if not self._interval_steps:
            return None
        self._start(step, state)
        self.check()
        leaves = jax.tree.leaves(state)
        replicated_bytes = sum(leaf.nbytes for leaf in leaves if _copy_count(leaf) > 1)
        return replicated_bytes / sum(leaf.nbytes for leaf in leaves)

    def begin(self, step: int, state: Any, *, will_be_saved: bool) -> None:
        """Starts to compare the replicas of the state after `step` if a comparison is due or the state will be
        saved."""
        if self._interval_steps and (will_be_saved or step % self._interval_steps == 0):
            self._start(step, state)

    def check(self) -> None:
        """Raises `UserError`, in all processes, if the last comparison found a difference.

        The error names the devices.
        """
        if self._pending is None:
            return
        (step, names, shardings, stacked), self._pending = self._pending, None
        digests = np.asarray(stacked)
        outvoted = {name: outvoted_devices(digests[number], *shardings[name]) for number, name in enumerate(names)}
        differing = {name: devices for name, devices in outvoted.items() if devices}
        if not differing:
            self._last_equal_step = step
            return
        devices = sorted({device for group in differing.values() for device in group}, key=lambda device: device.id)
        processes = sorted({device.process_index for device in devices})
        self._events.write(
            "replicas_differ",
            step=step,
            arrays=sorted(differing),
            devices=[device.id for device in devices],
            processes=processes,
            hosts=[self._hosts[process] for process in processes],
            equal_until=self._last_equal_step,
        )
        device_list = ", ".join(
            f"device {device.id} of process {device.process_index} on {self._hosts[device.process_index]}"
            for device in devices[:8]
        )
        history = ""
        if self._last_equal_step is not None:
            history = f". They were equal after step {self._last_equal_step}, and nothing has been saved since"
        raise UserError(
            f"after step {step} {len(differing)} array{'s' if len(differing) > 1 else ''}, such as {min(differing)}, "
            f"differ between devices that must hold the same data: {device_list}; exclude the faulty hardware and "
            f"start the run again{history}"
        )

    def _start(self, step: int, state: Any) -> None:
        arrays = arrays_by_name(state)
        pieces = start_digests(arrays).pieces
        names = sorted(pieces)
        shardings = {name: (arrays[name].sharding, arrays[name].shape) for name in names}
        self._pending = step, names, shardings, _stack_on_all_devices(tuple(pieces[name] for name in names))


def _copy_count(leaf: Array) -> int:
    """Returns the number of devices that hold a copy of each piece of the array."""
    pieces = {str(index) for index in leaf.sharding.devices_indices_map(leaf.shape).values()}
    return leaf.sharding.num_devices // len(pieces)


def _stack_on_all_devices(pieces: tuple[Array, ...]) -> Array:
    """Stacks the digests of the arrays to uint32 [arrays, devices, 2], replicated on all devices."""
    sharding = pieces[0].sharding
    assert isinstance(sharding, NamedSharding)
    stacked: Array = _stacking_program(NamedSharding(sharding.mesh, P()))(pieces)
    return stacked


@functools.lru_cache(maxsize=8)
def _stacking_program(sharding: NamedSharding) -> Any:
    """Returns a compiled program that stacks arrays into one with this sharding. There is one program for each mesh."""
    return jax.jit(lambda pieces: jnp.stack(pieces), out_shardings=sharding)


def outvoted_devices(digests: np.ndarray, sharding: NamedSharding, shape: tuple[int, ...]) -> list[jax.Device]:
    """Returns the devices whose digest of a piece differs from the digest of most devices that hold the same piece.

    If no digest has the most votes, returns all devices with that piece. `digests` is uint32 [devices, 2], in the order
    of the mesh.
    """
    index_map = sharding.devices_indices_map(shape)
    groups: dict[str, list[tuple[jax.Device, tuple[int, ...]]]] = {}
    for device, digest in zip(sharding.mesh.devices.flat, digests.tolist(), strict=True):
        groups.setdefault(str(index_map[device]), []).append((device, tuple(digest)))
    outvoted = []
    for members in groups.values():
        votes = Counter(digest for _, digest in members).most_common()
        if len(votes) > 1:
            has_majority = votes[0][1] > votes[1][1]
            outvoted += [device for device, digest in members if not has_majority or digest != votes[0][0]]
    return outvoted
