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

_MIN_INTERVAL_SECONDS = 60.0


def steps_to_keep(losses: Mapping[int, float | None], settings: Checkpoint) -> set[int]:
    """Returns the steps whose checkpoints to keep: the newest ones, every Nth one and the best ones.

    `losses` has the held-out loss of each step that has a checkpoint; None if it has none that can be compared.
    """
    steps = sorted(losses)
    keep = set(steps[-settings.keep :])
    if settings.keep_every_steps:
        keep |= {step for step in steps if step % settings.keep_every_steps == 0}
    return keep | set(best_first(losses)[: settings.keep_best])


def comparable_losses(checkpoints: Sequence[Committed]) -> dict[int, float | None]:
    """Returns the held-out losses that can be compared with each other, by step, oldest first.

    The loss is None for a checkpoint that was not evaluated, or was evaluated on another number of tokens than the
    newest evaluated one, because means over different parts of the held-out data are not comparable.
    """
    manifests = [checkpoint.manifest for checkpoint in checkpoints]
    newest = next((manifest for manifest in reversed(manifests) if manifest.loss is not None), None)
    is_comparable = lambda manifest: newest is not None and manifest.eval_tokens == newest.eval_tokens
    return {manifest.step: manifest.loss if is_comparable(manifest) else None for manifest in manifests}


def best_first(losses: Mapping[int, float | None]) -> list[int]:
    """Returns the steps that have a finite held-out loss, ordered by increasing loss.

    Of steps with equal losses, the newer comes first.
    """
    ranking = [(loss, -step) for step, loss in losses.items() if loss is not None and math.isfinite(loss)]
    return [-negated_step for _, negated_step in sorted(ranking)]


@dataclass
class SaveTimer:
    """Decides when the next save is due by time.

    Uses monotonic time, so a clock that is set back does not delay a save.
    """

    minutes: float | Literal["auto"] | None
    """The interval from the config; "auto" derives it from the cost of a save, and None disables saves by time."""
    mean_seconds: float
    """Mean seconds between failures; used with "auto"."""
    last_save_time: float
    """Monotonic time at which the last save began; before the first save, at which the run began."""
    seconds: float | None = None
    """The current interval; None with "auto" until the cost of a save is known."""

    def __post_init__(self) -> None:
        if isinstance(self.minutes, float | int):
            self.seconds = self.minutes * 60

    def is_due(self, now: float) -> bool:
        if self.minutes is None:
            return False
        return self.seconds is None or now - self.last_save_time >= self.seconds

    def record_cost(self, blocked_seconds: float, total_seconds: float) -> None:
        """Records how long a save blocked training, and how long it took in total.

        `total_seconds` is the shortest useful interval between saves.
        """
        if self.minutes == "auto":
            self.seconds = max(
                _MIN_INTERVAL_SECONDS, total_seconds, best_interval(max(blocked_seconds, 1e-3), self.mean_seconds)
            )


_STATE_PARTS = 3
"""Number of parts of a state. Each is stored as its own OCDBT database, with its own files."""

_SIZE_FACTOR = 1.02
"""Factor that allows for Orbax's own files and for file systems that round sizes up."""

_MAX_LISTED = 5
"""Maximum number of removable files that a message lists."""


@dataclass(frozen=True)
class SpaceNeeded:
    """The number of bytes and of files that one checkpoint needs."""

    bytes: int
    files: int


def space_needed(state_bytes: int, processes: int) -> SpaceNeeded:
    """Predicts the space that a checkpoint of `state_bytes` needs if this number of processes writes it."""
    further_data_files = state_bytes // max(1, processes) // (2 << 30)  # each has up to 2 GiB
    files_per_process = 8 + further_data_files  # the 8 are metadata and the first data file
    return SpaceNeeded(int(state_bytes * _SIZE_FACTOR) + (1 << 20), _STATE_PARTS * (8 + processes * files_per_process))


def shortage(root: StoragePath, needed: SpaceNeeded, checkpoints: int = 1) -> str | None:
    """Describes the space that is missing for this number of further checkpoints under `root`; None if they fit.

    Object storage is assumed to be unlimited.
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
        missing = size(needed_bytes - free)
        message = f"{size(free)} is free in {root}, but {size(needed_bytes)} is needed ({missing} short)"
    # File systems without a fixed number of inodes report 0.
    elif status.f_files and inodes < needed_files:
        message = f"{inodes} inodes are free in {root}, but {needed_files} are needed"
    else:
        return None
    removable = _list_removable(root)
    return f"{message}; these could be removed: {', '.join(removable)}" if removable else message


def _list_removable(root: Path) -> list[str]:
    """Lists what could be removed, with sizes: damaged checkpoints, then those before the newest valid one."""
    present = sorted(root.iterdir()) if root.is_dir() else []
    is_damaged_step = lambda name: ".damaged" in name and step_of(name.partition(".")[0]) is not None
    damaged = [path for path in present if is_damaged_step(path.name)]
    newest = newest_valid(root)
    older = [path for step, path in step_directories(root) if newest is not None and step < newest.step]
    sizes = [(path.name, sum(file_sizes(path).values())) for path in [*damaged, *older] if not is_link(path)]
    descriptions = [f"{name} ({size(bytes_used)})" for name, bytes_used in sizes if bytes_used]
    if len(descriptions) > _MAX_LISTED:
        return [*descriptions[:_MAX_LISTED], f"{len(descriptions) - _MAX_LISTED} more"]
    return descriptions
