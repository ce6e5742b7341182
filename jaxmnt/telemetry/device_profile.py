"""What a device did during a profile: computation, communication, what of it overlaps, and nothing."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData

_COLLECTIVE = re.compile(
    r"all-reduce|all-gather|reduce-scatter|all-to-all|collective-(permute|broadcast)|\b(send|recv)\b|nccl", re.I
)
_CONTAINER = re.compile(r"(while|conditional|call)([.\d]|$)")
"""Operations whose time is that of others inside."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class DeviceProfile:
    """Seconds of one device, from its first operation to its last."""

    seconds: float
    computation: float
    communication: float
    overlap: float
    """Of communication, while the device computes as well."""
    idle: float
    operations: dict[str, float]
    """The ten that took longest in all, by name without their number."""


def read_profile(path: Path) -> DeviceProfile | None:
    """Of the first device in an XSpace file (`*.xplane.pb`); None if it has no operation of any.

    A GPU has a plane of its own; operations on CPUs are in the host's, with their device.
    """
    data = ProfileData.from_file(str(path))
    by_device: dict[str, list[tuple[str, Interval]]] = {}
    for plane in data.planes:
        for device, name, interval in _operations(plane):
            by_device.setdefault(device, []).append((name, interval))
    if not by_device:
        return None
    operations = by_device[min(by_device)]
    communication = _union(interval for name, interval in operations if _COLLECTIVE.search(name))
    computation = _union(interval for name, interval in operations if not _COLLECTIVE.search(name))
    busy = _union([*communication, *computation])
    whole = busy[-1][1] - busy[0][0]
    communicating, computing, working = map(_length, (communication, computation, busy))
    longest: dict[str, float] = {}
    for name, (began, ended) in operations:
        kind = re.sub(r"[.\d]+$", "", name)
        longest[kind] = longest.get(kind, 0.0) + ended - began
    return DeviceProfile(
        seconds=whole,
        computation=computing,
        communication=communicating,
        # What is left of sums that are equal may be a rounding below 0.
        overlap=max(0.0, communicating + computing - working),
        idle=max(0.0, whole - working),
        operations=dict(sorted(longest.items(), key=lambda item: -item[1])[:10]),
    )


def _operations(plane: Any) -> Iterator[tuple[str, str, Interval]]:
    """Device, name and seconds of each operation of a plane."""
    of_a_device = plane.name if plane.name.startswith("/device:GPU") else None
    for line in plane.lines:
        for event in line.events:
            told = dict(event.stats)
            operation = told.get("hlo_op")
            if operation is None or _CONTAINER.match(str(operation)):
                continue
            device = of_a_device or f"{plane.name}:{told.get('device_ordinal', 0)}"
            # A kernel of NCCL says more than the name of its operation, which may be a fusion's.
            name = event.name if "nccl" in event.name.lower() else str(operation)
            began = event.start_ns / 1e9
            yield device, name, (began, began + event.duration_ns / 1e9)


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time without overlaps, in order."""
    found: list[Interval] = []
    for began, ended in sorted(intervals):
        if found and began <= found[-1][1]:
            found[-1] = found[-1][0], max(ended, found[-1][1])
        else:
            found.append((began, ended))
    return found


def _length(intervals: Iterable[Interval]) -> float:
    return sum(ended - began for began, ended in intervals)
