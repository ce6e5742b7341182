"""Detects devices that are slower than the others. No phase of a host shows these, as all wait on their own devices.

There are two signals: the time of a matrix product that each device computes by itself (`telemetry.probe_every`), and
the GPU clocks that NVML reports. Both arrive rarely, so a few of them must suffice.

Shapes: D devices of all processes together.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

IN_A_ROW = 3
"""Consecutive probes or readings in which a device must be slow."""
_SHARE = 0.1
"""Fraction by which its product must take longer than the median."""
_SPREADS = 6.0
"""Median absolute deviations by which it must take longer as well."""
_CLOCK = 0.85
"""Fraction of the median clock below which a GPU is slow."""
_BUSY = 50
"""Utilisation in percent from which a GPU's clock is meaningful."""
_FEW = 4
"""Number of devices below which the spread is meaningless."""

Device = tuple[int, int]
"""A process, and the index of the device among its own."""


class SlowDevice(NamedTuple):
    device: Device
    why: str
    slower: float
    """Fraction by which it is slower than the median."""
    began: bool
    """True if it became slow, False if it recovered."""


class SlowDeviceDetector:
    """Follows the probes, or the clocks, of all devices; reports when one becomes slow and when it recovers."""

    def __init__(self) -> None:
        self._in_a_row: dict[Device, int] = {}
        self._current: dict[Device, SlowDevice] = {}

    @property
    def current(self) -> list[SlowDevice]:
        """The devices that are slow now. From any thread."""
        current = dict(self._current)  # a copy, as another thread may change it
        return [current[device] for device in sorted(current)]

    def see_probe(self, seconds: Mapping[Device, float]) -> list[SlowDevice]:
        """Adds the seconds that each device took for the same product. Returns the changes."""
        devices = sorted(seconds)
        if len(devices) < 2:
            return []
        seconds_D = np.array([seconds[device] for device in devices])
        # Among few devices a slow one shifts the median itself, so they are compared with the fastest.
        few = len(devices) < _FEW
        typical = float(seconds_D.min() if few else np.median(seconds_D))
        spread = 0.0 if few else float(np.median(np.abs(seconds_D - typical)))
        limit = max((1 + _SHARE) * typical, typical + _SPREADS * spread)
        slow = {
            device: (f"a product takes it {took / typical:.2f} times as long as the others", took / typical - 1)
            for device, took in zip(devices, seconds_D.tolist(), strict=True)
            if took > limit
        }
        return self._judge(devices, slow)

    def see_clocks(
        self, clocks: Mapping[Device, float], busy: Mapping[Device, float], throttled: Mapping[Device, Sequence[str]]
    ) -> list[SlowDevice]:
        """Adds a reading of clocks in MHz, utilisation in percent, and throttle reasons. Returns the changes. Idle GPUs
        are ignored."""
        devices = sorted(device for device in clocks if busy.get(device, 0) >= _BUSY)
        if not devices:
            return []
        busy_clocks = [clocks[device] for device in devices]
        typical = float(np.median(busy_clocks)) if len(busy_clocks) >= _FEW else max(busy_clocks)
        slow = {}
        for device in devices:
            reasons = ", ".join(throttled.get(device, ()))
            if reasons or clocks[device] < _CLOCK * typical:
                why = f"its clock is {clocks[device]:.0f} MHz, the others' {typical:.0f}"
                why += f": {reasons}" if reasons else ""
                slow[device] = why, max(0.0, 1 - clocks[device] / typical)
        return self._judge(devices, slow)

    def _judge(self, devices: Sequence[Device], slow: Mapping[Device, tuple[str, float]]) -> list[SlowDevice]:
        """Returns the devices that have become slow or recovered, given those that are `slow` in the newest reading."""
        changes = []
        for device in devices:
            self._in_a_row[device] = self._in_a_row.get(device, 0) + 1 if device in slow else 0
            if self._in_a_row[device] >= IN_A_ROW and device not in self._current:
                self._current[device] = SlowDevice(device, *slow[device], began=True)
                changes.append(self._current[device])
            elif device not in slow and device in self._current:
                changes.append(self._current.pop(device)._replace(began=False))
        return changes
