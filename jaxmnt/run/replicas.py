"""Compares replicas that must hold the same state, to find devices that compute wrong results without an error."""

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
    """Compares digests of the state on devices that must hold the same, every `every` steps (0: never).

    The digests are dispatched after a step and read one step later, like metrics, so nothing waits for them. Before a
    save they are read first, so that a state that differs is never saved.
    """

    def __init__(self, every: int, hosts: Mapping[int, str], events: Events):
        self._every, self._hosts, self._events = every, hosts, events
        self._pending: tuple[int, list[str], dict[str, Any], Array] | None = None
        self._equal: int | None = None
        """The last step after which all replicas were equal."""

    def prepare(self, step: int, state: Any) -> float | None:
        """Compares the state that a run begins with, which also compiles the comparison.

        Returns the fraction of its bytes that more than one device holds; None if comparisons are off.
        """
        if not self._every:
            return None
        self._start(step, state)
        self.check()
        leaves = jax.tree.leaves(state)
        return sum(leaf.nbytes for leaf in leaves if _copies(leaf) > 1) / sum(leaf.nbytes for leaf in leaves)

    def begin(self, step: int, state: Any, *, saved: bool) -> None:
        """Starts to compare `state`, the state after `step`, if a comparison is due or the state will be saved."""
        if self._every and (saved or step % self._every == 0):
            self._start(step, state)

    def check(self) -> None:
        """Raises `UserError`, in all processes, if the last comparison found a difference; the error says where."""
        if self._pending is None:
            return
        (step, names, shardings, stacked), self._pending = self._pending, None
        sums = np.asarray(stacked)
        outvoted = {name: outvoted_devices(sums[number], *shardings[name]) for number, name in enumerate(names)}
        differing = {name: devices for name, devices in outvoted.items() if devices}
        if not differing:
            self._equal = step
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
            equal_until=self._equal,
        )
        who = ", ".join(
            f"device {device.id} of process {device.process_index} on {self._hosts[device.process_index]}"
            for device in devices[:8]
        )
        before = ""
        if self._equal is not None:
            before = f". They were equal after step {self._equal}, and nothing has been saved since"
        raise UserError(
            f"after step {step} {len(differing)} array{'s' if len(differing) > 1 else ''}, such as {min(differing)}, "
            f"differ between devices that must hold the same: {who}; exclude the faulty hardware and start the run "
            f"again{before}"
        )

    def _start(self, step: int, state: Any) -> None:
        arrays = arrays_by_name(state)
        pieces = start_digests(arrays).pieces
        names = sorted(pieces)
        shardings = {name: (arrays[name].sharding, arrays[name].shape) for name in names}
        self._pending = step, names, shardings, _replicated(tuple(pieces[name] for name in names))


def _copies(leaf: Array) -> int:
    """Returns the number of devices that hold each piece."""
    pieces = {str(index) for index in leaf.sharding.devices_indices_map(leaf.shape).values()}
    return leaf.sharding.num_devices // len(pieces)


def _replicated(pieces: tuple[Array, ...]) -> Array:
    """Stacks the digests to uint32 [arrays, devices, 2], replicated on all devices."""
    sharding = pieces[0].sharding
    assert isinstance(sharding, NamedSharding)
    stacked: Array = _stacking(NamedSharding(sharding.mesh, P()))(pieces)
    return stacked


@functools.lru_cache(maxsize=8)
def _stacking(replicated: NamedSharding) -> Any:
    """Returns the compiled stacking, one for each mesh."""
    return jax.jit(lambda pieces: jnp.stack(pieces), out_shardings=replicated)


def outvoted_devices(sums: np.ndarray, sharding: NamedSharding, shape: tuple[int, ...]) -> list[jax.Device]:
    """Returns the devices whose digest differs from that of most devices with the same piece; all of these at a tie.

    `sums` is uint32 [devices, 2], in the order of the mesh.
    """
    index_map = sharding.devices_indices_map(shape)
    groups: dict[str, list[tuple[jax.Device, tuple[int, ...]]]] = {}
    for device, digest in zip(sharding.mesh.devices.flat, sums.tolist(), strict=True):
        groups.setdefault(str(index_map[device]), []).append((device, tuple(digest)))
    outvoted = []
    for members in groups.values():
        votes = Counter(digest for _, digest in members).most_common()
        if len(votes) > 1:
            has_majority = votes[0][1] > votes[1][1]
            outvoted += [device for device, digest in members if not has_majority or digest != votes[0][0]]
    return outvoted
