"""Reads how much memory and how many cores the container of this process may use."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def host_memory_bytes(root: Path = _ROOT) -> int:
    """Returns how many bytes of memory this process may use: all of the machine, or the limit of its cgroup."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical, *(limit for limit, _ in _memory_limits(root))])


def available_bytes(available: int, root: Path = _ROOT) -> int:
    """Returns how many bytes of the machine's `available` memory this process may use within its cgroup's limits."""
    return min([available, *(max(0, limit - used) for limit, used in _memory_limits(root))])


def cores(root: Path = _ROOT) -> int:
    """Returns the number of cores that this process may use: the smaller of its affinity and its cgroup's quota, at
    least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *(math.ceil(quota) for quota in _quotas(root))]))


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yields each memory limit with the bytes in use, without the page cache that the kernel can reclaim."""
    for folder in _cgroup_folders(root, "memory"):
        limit = number_in_file(folder / "memory.max") or number_in_file(folder / "memory.limit_in_bytes")
        used = number_in_file(folder / "memory.current") or number_in_file(folder / "memory.usage_in_bytes") or 0
        statistics = _fields(folder / "memory.stat")
        cache = statistics.get("total_inactive_file", statistics.get("inactive_file", 0))
        if limit is not None:
            yield limit, max(0, used - cache)


def _quotas(root: Path) -> Iterator[float]:
    """Yields each limit of processor time, in cores."""
    for folder in _cgroup_folders(root, "cpu"):
        quota, _, period = text_in_file(folder / "cpu.max").partition(" ")
        if not quota:
            quota, period = text_in_file(folder / "cpu.cfs_quota_us"), text_in_file(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(quota) and int(period):  # not "max", nor -1
            yield int(quota) / int(period)


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Yields the folders of this process's cgroup and of its ancestors, some of which may not exist in a container."""
    mount = root / "sys/fs/cgroup"
    for line in text_in_file(root / "proc/self/cgroup").splitlines():
        number, controllers, path = ([*line.split(":", 2), "", ""])[:3]
        if number == "0" and not controllers:
            base = mount  # version 2
        elif controller in controllers.split(","):
            base = mount / controller
        else:
            continue
        relative_path = Path(path.lstrip("/"))
        # In a container, the path may be the one on its host, so that only the mount itself exists.
        yield from (base / part for part in [relative_path, *relative_path.parents] if ".." not in part.parts)


def _fields(path: Path) -> dict[str, int]:
    """Returns the numbers in a kernel file whose lines have a name and a number."""
    pairs = [line.split() for line in text_in_file(path).splitlines()]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def number_in_file(path: Path) -> int | None:
    """Returns the number in a kernel file. Returns None if there is none, or if the file says "max" (no limit)."""
    text = text_in_file(path)
    return int(text) if text.isdecimal() else None


def text_in_file(path: Path) -> str:
    """Returns the content of a kernel file, or an empty text if it does not exist or cannot be read now."""
    try:
        return path.read_text().strip()
    except (OSError, ValueError):  # not Linux, without this controller, or an interface that is down
        return ""
