"""Whether there is room for the next checkpoint."""

import os
from dataclasses import dataclass
from pathlib import Path

from jaxmnt.checkpoint.commit import newest_whole, step_directories, step_of
from jaxmnt.storage import Place, files, is_link
from jaxmnt.telemetry.progress import size

_OVERHEAD = 1.02
"""Orbax's own files, and file systems that round up."""

_NAMED = 5
"""So many of what could be removed are named."""


@dataclass(frozen=True)
class Need:
    """What one checkpoint takes."""

    bytes: int
    files: int


def need(state_bytes: int, parts: int, processes: int) -> Need:
    """The predicted need of a state of `state_bytes` in so many parts, written by so many processes."""
    per_process = 8 + state_bytes // max(1, processes) // (2 << 30)  # data, metadata; data files of up to 2 GiB
    return Need(int(state_bytes * _OVERHEAD) + (1 << 20), parts * (8 + processes * per_process))


def shortage(root: Place, wanted: Need, checkpoints: int = 1) -> str | None:
    """What is missing for so many more checkpoints under `root`, in words; None if they fit.

    Nothing is ever missing at an address.
    """
    if not isinstance(root, Path):
        return None
    existing = root
    while not existing.exists():
        existing = existing.parent
    status = os.statvfs(existing)
    free, inodes = status.f_bavail * status.f_frsize, status.f_favail
    wanted_bytes, wanted_files = wanted.bytes * checkpoints, wanted.files * checkpoints
    if free < wanted_bytes:
        short = f"{size(free)} are free in {root}, {size(wanted_bytes)} are needed, {size(wanted_bytes - free)} more"
    # Some file systems have no fixed number of inodes and say 0.
    elif status.f_files and inodes < wanted_files:
        short = f"{inodes} inodes are free in {root}, {wanted_files} are needed"
    else:
        return None
    removable = _removable(root)
    return f"{short}; could be removed: {', '.join(removable)}" if removable else short


def _removable(root: Path) -> list[str]:
    """What takes room there and need not, with its size: what was set aside, then checkpoints before the newest."""
    present = sorted(root.iterdir()) if root.is_dir() else []
    aside = [path for path in present if ".damaged" in path.name and step_of(path.name.partition(".")[0]) is not None]
    newest = newest_whole(root)
    older = [path for step, path in step_directories(root) if newest is not None and step < newest.step]
    taking = [(path.name, sum(files(path).values())) for path in [*aside, *older] if not is_link(path)]
    named = [f"{name} ({size(taken)})" for name, taken in taking if taken]
    return [*named[:_NAMED], f"{len(named) - _NAMED} more"] if len(named) > _NAMED else named
