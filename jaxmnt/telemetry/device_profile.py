"""Reads from a profile how long a device computed, communicated, did both at the same time, and was idle."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData

_COLLECTIVE_NAME = re.compile(
    r"all-reduce|all-gather|reduce-scatter|all-to-all|collective-(permute|broadcast)|\b(send|recv)\b|nccl", re.I
)
_CONTAINER_NAME = re.compile(r"(while|conditional|call)([.\d]|$)")
"""Operations that only contain other operations, whose time would be counted twice."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class DeviceProfile:
    """Seconds that one device spent on each kind of work, from its first operation to its last."""

    seconds: float
    computation: float
    communication: float
    overlap: float
    """Time during which the device both communicates and computes."""
    idle: float
    operations: dict[str, float]
    """Total seconds of the ten operations that took longest, by name without instance number."""


def read_profile(path: Path) -> DeviceProfile | None:
    """Returns the profile of the first device in an XSpace file (`*.xplane.pb`); None if it has no operations.

    Each GPU has its own plane. Operations on CPUs are in the host's plane, labelled with their device.
    """
    profile = ProfileData.from_file(str(path))
    by_device: dict[str, list[tuple[str, Interval]]] = {}
    for plane in profile.planes:
        for device, name, interval in _operations(plane):
            by_device.setdefault(device, []).append((name, interval))
    if not by_device:
        return None
    operations = by_device[min(by_device)]
    communication = _union(interval for name, interval in operations if _COLLECTIVE_NAME.search(name))
    computation = _union(interval for name, interval in operations if not _COLLECTIVE_NAME.search(name))
    busy = _union([*communication, *computation])

    total = busy[-1][1] - busy[0][0]
    communicating, computing, working = map(_length, (communication, computation, busy))
    seconds_by_kind: dict[str, float] = {}
    for name, (began, ended) in operations:
        kind = re.sub(r"[.\d]+$", "", name)
        seconds_by_kind[kind] = seconds_by_kind.get(kind, 0.0) + ended - began
    return DeviceProfile(
        seconds=total,
        computation=computing,
        communication=communicating,
        # Rounding can make the difference of equal sums slightly negative.
        overlap=max(0.0, communicating + computing - working),
        idle=max(0.0, total - working),
        operations=dict(sorted(seconds_by_kind.items(), key=lambda item: -item[1])[:10]),
    )


def _operations(plane: Any) -> Iterator[tuple[str, str, Interval]]:
    """Yields the device, name and interval in seconds of each operation of a plane."""
    gpu = plane.name if plane.name.startswith("/device:GPU") else None
    for line in plane.lines:
        for event in line.events:
            stats = dict(event.stats)
            operation = stats.get("hlo_op")
            if operation is None or _CONTAINER_NAME.match(str(operation)):
                continue
            device = gpu or f"{plane.name}:{stats.get('device_ordinal', 0)}"
            # The name of an NCCL kernel is more specific than its operation's, which may be a fusion.
            name = event.name if "nccl" in event.name.lower() else str(operation)
            began = event.start_ns / 1e9
            yield device, name, (began, began + event.duration_ns / 1e9)


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the union of intervals, as disjoint intervals in order."""
    merged: list[Interval] = []
    for began, ended in sorted(intervals):
        if merged and began <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(ended, merged[-1][1])
        else:
            merged.append((began, ended))
    return merged


def _length(intervals: Iterable[Interval]) -> float:
    """Returns the total length of some intervals."""
    return sum(ended - began for began, ended in intervals)
