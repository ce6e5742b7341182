"""Which device is slower than the others. That shows in no phase of its host: all wait for it on their devices.

Two things tell: the time of a product that each device computes by itself (`telemetry.probe_every`), and what NVML says
of its clocks. Both come every now and then, so few of them are looked at.

Shapes: D devices of all processes together.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

IN_A_ROW = 3
"""Probes or readings in which a device must be slow."""
_SHARE = 0.1
"""By which its product must take longer than the median."""
_SPREADS = 6.0
"""Median absolute deviations by which it must take longer as well."""
_CLOCK = 0.85
"""Of the median clock, below which a GPU is slow."""
_BUSY = 50
"""Percent of utilisation from which a GPU's clock says something."""
_FEW = 4
"""With fewer devices the spread says nothing."""

Device = tuple[int, int]
"""A process, and the place of the device among its own."""


class SlowDevice(NamedTuple):
    device: Device
    why: str
    slower: float
    """Share by which it is slower than the median."""
    began: bool
    """Whether this is new; else it is over."""


class SlowDeviceDetector:
    """Sees probes, or clocks, of all devices; says when one begins to be slow, and when that is over."""

    def __init__(self) -> None:
        self._in_a_row: dict[Device, int] = {}
        self._known: dict[Device, SlowDevice] = {}

    @property
    def known(self) -> list[SlowDevice]:
        """Those that are slow now. From any thread."""
        known = dict(self._known)
        return [known[device] for device in sorted(known)]

    def see_probe(self, seconds: Mapping[Device, float]) -> list[SlowDevice]:
        """What is new after each of these devices took so many seconds for the same product."""
        devices = sorted(seconds)
        if len(devices) < 2:
            return []
        seconds_D = np.array([seconds[device] for device in devices])
        few = len(devices) < _FEW  # of few, a slow one is half of what it is compared with
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
        """What is new after a reading of MHz, utilisation in percent, and reasons for low clocks. A GPU without work
        says nothing."""
        devices = sorted(device for device in clocks if busy.get(device, 0) >= _BUSY)
        if not devices:
            return []
        of_all = [clocks[device] for device in devices]
        typical = float(np.median(of_all)) if len(of_all) >= _FEW else max(of_all)
        slow = {}
        for device in devices:
            reasons = ", ".join(throttled.get(device, ()))
            if reasons or clocks[device] < _CLOCK * typical:
                told = f"its clock is {clocks[device]:.0f} MHz, the others' {typical:.0f}" + (
                    f": {reasons}" if reasons else ""
                )
                slow[device] = told, max(0.0, 1 - clocks[device] / typical)
        return self._judge(devices, slow)

    def _judge(self, devices: Sequence[Device], slow: Mapping[Device, tuple[str, float]]) -> list[SlowDevice]:
        found = []
        for device in devices:
            self._in_a_row[device] = self._in_a_row.get(device, 0) + 1 if device in slow else 0
            if self._in_a_row[device] >= IN_A_ROW and device not in self._known:
                self._known[device] = SlowDevice(device, *slow[device], began=True)
                found.append(self._known[device])
            elif device not in slow and device in self._known:
                found.append(self._known.pop(device)._replace(began=False))
        return found
