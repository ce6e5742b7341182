"""Detects devices that are slower than the others. The phases of hosts do not show them, because every host waits for
its own devices.

There are two signals: the time of a matrix product that each device computes by itself (`telemetry.probe_every`), and
the GPU clocks that NVML reports. Both arrive rarely, so a few of them must suffice.

Shapes: D devices of all processes together.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

CONSECUTIVE_READINGS = 3
"""Number of consecutive probes or readings of clocks in which a device must be slow."""
_MIN_EXCESS = 0.1
"""Minimum fraction by which a slow device's product takes longer than the median."""
_MIN_DEVIATIONS = 6.0
"""Minimum number of median absolute deviations by which it takes longer as well."""
_MIN_CLOCK_FRACTION = 0.85
"""Fraction of the median clock below which a GPU is slow."""
_MIN_UTILISATION_PERCENT = 50
"""Minimum utilisation, in percent, at which a GPU's clock is meaningful."""
_MIN_DEVICES_FOR_SPREAD = 4
"""Minimum number of devices for which the spread is meaningful."""

Device = tuple[int, int]
"""A process, and the index of the device among its own."""


class SlowDevice(NamedTuple):
    """A device that became slow, or recovered."""

    device: Device
    why: str
    slower: float
    """Fraction by which it is slower than the median."""
    began: bool
    """True if it became slow, False if it recovered."""


class SlowDeviceDetector:
    """Follows the probes, or the clocks, of all devices. Reports when a device becomes slow, and when it recovers."""

    def __init__(self) -> None:
        self._slow_readings: dict[Device, int] = {}
        self._current: dict[Device, SlowDevice] = {}

    @property
    def current(self) -> list[SlowDevice]:
        """The devices that are slow now. It may be read from any thread."""
        current = dict(self._current)  # a copy, because another thread may change the original
        return [current[device] for device in sorted(current)]

    def see_probe(self, seconds: Mapping[Device, float]) -> list[SlowDevice]:
        """Adds the seconds that each device took for the same matrix product. Returns devices that became slow or
        recovered."""
        devices = sorted(seconds)
        if len(devices) < 2:
            return []
        seconds_D = np.array([seconds[device] for device in devices])
        # Among a few devices, a slow one shifts the median itself, so they are compared with the fastest.
        has_few_devices = len(devices) < _MIN_DEVICES_FOR_SPREAD
        reference = float(seconds_D.min() if has_few_devices else np.median(seconds_D))
        spread = 0.0 if has_few_devices else float(np.median(np.abs(seconds_D - reference)))
        limit = max((1 + _MIN_EXCESS) * reference, reference + _MIN_DEVIATIONS * spread)
        slow = {
            device: (f"a product takes it {took / reference:.2f} times as long as the others", took / reference - 1)
            for device, took in zip(devices, seconds_D.tolist(), strict=True)
            if took > limit
        }
        return self._judge(devices, slow)

    def see_clocks(
        self, clocks: Mapping[Device, float], busy: Mapping[Device, float], throttled: Mapping[Device, Sequence[str]]
    ) -> list[SlowDevice]:
        """Adds a reading of clocks in MHz, utilisation in percent, and reasons for throttling. Idle GPUs are ignored.
        Returns the devices that became slow or recovered."""
        devices = sorted(device for device in clocks if busy.get(device, 0) >= _MIN_UTILISATION_PERCENT)
        if not devices:
            return []
        busy_clocks = [clocks[device] for device in devices]
        reference = float(np.median(busy_clocks)) if len(busy_clocks) >= _MIN_DEVICES_FOR_SPREAD else max(busy_clocks)
        slow = {}
        for device in devices:
            reasons = ", ".join(throttled.get(device, ()))
            if reasons or clocks[device] < _MIN_CLOCK_FRACTION * reference:
                why = f"its clock is {clocks[device]:.0f} MHz, the others' {reference:.0f}"
                why += f": {reasons}" if reasons else ""
                slow[device] = why, max(0.0, 1 - clocks[device] / reference)
        return self._judge(devices, slow)

    def _judge(self, devices: Sequence[Device], slow: Mapping[Device, tuple[str, float]]) -> list[SlowDevice]:
        """Returns the devices that became slow or recovered. `slow` has those that are slow in the newest reading."""
        changes = []
        for device in devices:
            self._slow_readings[device] = self._slow_readings.get(device, 0) + 1 if device in slow else 0
            if self._slow_readings[device] >= CONSECUTIVE_READINGS and device not in self._current:
                self._current[device] = SlowDevice(device, *slow[device], began=True)
                changes.append(self._current[device])
            elif device not in slow and device in self._current:
                changes.append(self._current.pop(device)._replace(began=False))
        return changes
