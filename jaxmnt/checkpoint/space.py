"""Whether there is room for the next checkpoint."""

import os
from dataclasses import dataclass
from pathlib import Path

from jaxmnt.storage import Place

_OVERHEAD = 1.02
"""Orbax's own files, and file systems that round up."""


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
    if free < wanted.bytes * checkpoints:
        return f"{free / 2**30:.2f} GiB are free in {root}, {wanted.bytes * checkpoints / 2**30:.2f} GiB are needed"
    # Some file systems have no fixed number of inodes and say 0.
    if status.f_files and inodes < wanted.files * checkpoints:
        return f"{inodes} inodes are free in {root}, {wanted.files * checkpoints} are needed"
    return None
