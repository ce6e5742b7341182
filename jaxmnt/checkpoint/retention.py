"""Decides which checkpoints to keep and when the next one is due, and estimates the space that it needs."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxmnt.checkpoint.commit import Committed, newest_valid, step_directories, step_of
from jaxmnt.config.schema import Checkpoint
from jaxmnt.storage import StoragePath, file_sizes, is_link
from jaxmnt.telemetry.reliability import best_interval
from jaxmnt.units import size

_SHORTEST_SECONDS = 60.0


def steps_to_keep(losses: Mapping[int, float | None], settings: Checkpoint) -> set[int]:
    """Returns the steps whose checkpoints to keep: the newest, every Nth and the best.

    `losses` has the held-out loss of each step that has a checkpoint.
    """
    steps = sorted(losses)
    keep = set(steps[-settings.keep :])
    if settings.keep_every_steps:
        keep |= {step for step in steps if step % settings.keep_every_steps == 0}
    return keep | set(best_first(losses)[: settings.keep_best])


def comparable_losses(checkpoints: Sequence[Committed]) -> dict[int, float | None]:
    """Returns the held-out losses by step, oldest first.

    None for checkpoints that were not evaluated, or on another number of tokens than the newest one that was: means
    over different parts of the held-out data are not comparable.
    """
    manifests = [checkpoint.manifest for checkpoint in checkpoints]
    newest = next((manifest for manifest in reversed(manifests) if manifest.loss is not None), None)
    comparable = lambda manifest: newest is not None and manifest.eval_tokens == newest.eval_tokens
    return {manifest.step: manifest.loss if comparable(manifest) else None for manifest in manifests}


def best_first(losses: Mapping[int, float | None]) -> list[int]:
    """Returns the steps that have a finite held-out loss, the lowest first; among equal losses, the newer first."""
    ranking = [(loss, -step) for step, loss in losses.items() if loss is not None and math.isfinite(loss)]
    return [-negated_step for _, negated_step in sorted(ranking)]


@dataclass
class SaveTimer:
    """Decides when the next save is due by time. Uses monotonic time, so that a clock set back delays no save."""

    minutes: float | Literal["auto"] | None
    mean_seconds: float
    """Mean seconds between failures; used with "auto"."""
    last: float
    """Monotonic time at which the last save began, or the run."""
    seconds: float | None = None
    """The current interval; None with "auto" until the cost of a save is known."""

    def __post_init__(self) -> None:
        if isinstance(self.minutes, float | int):
            self.seconds = self.minutes * 60

    def due(self, now: float) -> bool:
        if self.minutes is None:
            return False
        return self.seconds is None or now - self.last >= self.seconds

    def record_cost(self, blocked_seconds: float, whole_seconds: float) -> None:
        """Records the cost of a save: how long it blocked training, and its duration, the shortest useful interval."""
        if self.minutes == "auto":
            self.seconds = max(
                _SHORTEST_SECONDS, whole_seconds, best_interval(max(blocked_seconds, 1e-3), self.mean_seconds)
            )


_PARTS = 3
"""Number of parts of a state; each has its own database."""

_OVERHEAD = 1.02
"""Allowance for Orbax's own files and for file systems that round sizes up."""

_MOST_LISTED = 5
"""Number of removable files that a message lists."""


@dataclass(frozen=True)
class SpaceNeeded:
    """The bytes and files that one checkpoint needs."""

    bytes: int
    files: int


def space_needed(state_bytes: int, processes: int) -> SpaceNeeded:
    """Predicts the space that a checkpoint of `state_bytes` needs, if this number of processes writes it."""
    per_process = 8 + state_bytes // max(1, processes) // (2 << 30)  # data, metadata; data files of up to 2 GiB
    return SpaceNeeded(int(state_bytes * _OVERHEAD) + (1 << 20), _PARTS * (8 + processes * per_process))


def shortage(root: StoragePath, needed: SpaceNeeded, checkpoints: int = 1) -> str | None:
    """Describes the space that is missing for this number of further checkpoints under `root`; None if they fit.

    Object storage is taken to be unlimited.
    """
    if not isinstance(root, Path):
        return None
    existing = root
    while not existing.exists():
        existing = existing.parent
    status = os.statvfs(existing)
    free, inodes = status.f_bavail * status.f_frsize, status.f_favail
    needed_bytes, needed_files = needed.bytes * checkpoints, needed.files * checkpoints
    if free < needed_bytes:
        short = f"{size(free)} are free in {root}, {size(needed_bytes)} are needed, {size(needed_bytes - free)} more"
    # File systems without a fixed number of inodes report 0.
    elif status.f_files and inodes < needed_files:
        short = f"{inodes} inodes are free in {root}, {needed_files} are needed"
    else:
        return None
    removable = _removable(root)
    return f"{short}; could be removed: {', '.join(removable)}" if removable else short


def _removable(root: Path) -> list[str]:
    """Lists files that could be removed, with their sizes: damaged checkpoints, then those before the newest one."""
    present = sorted(root.iterdir()) if root.is_dir() else []
    aside = [path for path in present if ".damaged" in path.name and step_of(path.name.partition(".")[0]) is not None]
    newest = newest_valid(root)
    older = [path for step, path in step_directories(root) if newest is not None and step < newest.step]
    sizes = [(path.name, sum(file_sizes(path).values())) for path in [*aside, *older] if not is_link(path)]
    listed = [f"{name} ({size(bytes_used)})" for name, bytes_used in sizes if bytes_used]
    if len(listed) > _MOST_LISTED:
        return [*listed[:_MOST_LISTED], f"{len(listed) - _MOST_LISTED} more"]
    return listed
