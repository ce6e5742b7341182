"""Replicas that should hold the same state, compared: a device that computes wrongly does not say so."""

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
from jaxmnt.checkpoint.names import named
from jaxmnt.errors import UserError
from jaxmnt.telemetry.events import Events


class Replicas:
    """Compares, every so many steps, digests of what devices hold that should hold the same.

    The digests are dispatched behind a step and read one step later, as metrics are: nothing waits for them. Before a
    save they are read first, so that what differs is never saved.
    """

    def __init__(self, every: int, hosts: Mapping[int, str], events: Events):
        self._every, self._hosts, self._events = every, hosts, events
        self._pending: tuple[int, list[str], dict[str, Any], Array] | None = None
        self._equal: int | None = None
        """The last step after which all were found equal."""

    def prepare(self, step: int, state: Any) -> float | None:
        """Compares the state that a run begins with, which also compiles what that takes.

        Returns the share of its bytes that more than one device holds; None if nothing is to be compared.
        """
        if not self._every:
            return None
        self._start(step, state)
        self.check()
        leaves = jax.tree.leaves(state)
        return sum(leaf.nbytes for leaf in leaves if _copies(leaf) > 1) / sum(leaf.nbytes for leaf in leaves)

    def begin(self, step: int, state: Any, *, saved: bool) -> None:
        """Starts a comparison of `state`, which is that after `step`, if one is due, or if the state is to be saved."""
        if self._every and (saved or step % self._every == 0):
            self._start(step, state)

    def check(self) -> None:
        """Raises `UserError`, in all processes, if the last comparison found a difference, and says where."""
        if self._pending is None:
            return
        (step, names, shardings, stacked), self._pending = self._pending, None
        sums = np.asarray(stacked)
        apart = {name: odd for number, name in enumerate(names) if (odd := odd_ones(sums[number], *shardings[name]))}
        if not apart:
            self._equal = step
            return
        devices = sorted({device for odd in apart.values() for device in odd}, key=lambda device: device.id)
        processes = sorted({device.process_index for device in devices})
        self._events.write(
            "replicas_differ",
            step=step,
            arrays=sorted(apart),
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
            f"after step {step} {len(apart)} array{'s' if len(apart) > 1 else ''}, such as {min(apart)}, differ "
            f"between devices that must hold the same: {who}; exclude the faulty hardware and start the run "
            f"again{before}"
        )

    def _start(self, step: int, state: Any) -> None:
        arrays = named(state)
        pieces = start_digests(arrays).pieces
        names = sorted(pieces)
        shardings = {name: (arrays[name].sharding, arrays[name].shape) for name in names}
        self._pending = step, names, shardings, _everywhere(tuple(pieces[name] for name in names))


def _copies(leaf: Array) -> int:
    """How many devices hold each piece."""
    pieces = {str(index) for index in leaf.sharding.devices_indices_map(leaf.shape).values()}
    return leaf.sharding.num_devices // len(pieces)


def _everywhere(pieces: tuple[Array, ...]) -> Array:
    """uint32 [arrays, devices, 2], all of it on each device."""
    sharding = pieces[0].sharding
    assert isinstance(sharding, NamedSharding)
    stacked: Array = _stacking(NamedSharding(sharding.mesh, P()))(pieces)
    return stacked


@functools.lru_cache(maxsize=8)
def _stacking(everywhere: NamedSharding) -> Any:
    """One program for each mesh."""
    return jax.jit(lambda pieces: jnp.stack(pieces), out_shardings=everywhere)


def odd_ones(sums: np.ndarray, sharding: NamedSharding, shape: tuple[int, ...]) -> list[jax.Device]:
    """The devices whose digest is not that of most of those that hold the same piece; all of these if there is no most.

    `sums` is uint32 [devices, 2], in the order of the mesh.
    """
    index_map = sharding.devices_indices_map(shape)
    groups: dict[str, list[tuple[jax.Device, tuple[int, ...]]]] = {}
    for device, values in zip(sharding.mesh.devices.flat, sums.tolist(), strict=True):
        groups.setdefault(str(index_map[device]), []).append((device, tuple(values)))
    odd = []
    for members in groups.values():
        counted = Counter(values for _, values in members).most_common()
        if len(counted) > 1:
            clear = counted[0][1] > counted[1][1]
            odd += [device for device, values in members if not clear or values != counted[0][0]]
    return odd
