"""Which checkpoints are kept, when the next is due, and the room that it needs."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxmnt.checkpoint.commit import Committed, newest_valid, step_directories, step_of
from jaxmnt.config.schema import Checkpoint
from jaxmnt.storage import StoragePath, files, is_link
from jaxmnt.telemetry.reliability import best_interval
from jaxmnt.units import size

_SHORTEST_SECONDS = 60.0


def steps_to_keep(losses: Mapping[int, float | None], settings: Checkpoint) -> set[int]:
    """Of the steps that have a checkpoint, each with its held-out loss, those that stay.

    The newest, every Nth and the best.
    """
    steps = sorted(losses)
    stay = set(steps[-settings.keep :])
    if settings.keep_every_steps:
        stay |= {step for step in steps if step % settings.keep_every_steps == 0}
    return stay | set(best_first(losses)[: settings.keep_best])


def comparable_losses(checkpoints: Sequence[Committed]) -> dict[int, float | None]:
    """The held-out losses by step, oldest first. None for those that were not evaluated, or not on as many tokens as
    the newest that was: a mean over another part of what is held out is another number."""
    manifests = [checkpoint.manifest for checkpoint in checkpoints]
    newest = next((manifest for manifest in reversed(manifests) if manifest.loss is not None), None)
    comparable = lambda manifest: newest is not None and manifest.eval_tokens == newest.eval_tokens
    return {manifest.step: manifest.loss if comparable(manifest) else None for manifest in manifests}


def best_first(losses: Mapping[int, float | None]) -> list[int]:
    """The steps that have a held-out loss, the lowest first; at a tie the newer one is the better."""
    known = [(loss, -step) for step, loss in losses.items() if loss is not None and math.isfinite(loss)]
    return [-step for _, step in sorted(known)]


@dataclass
class SaveTimer:
    """Says when the next save is due by time. Told of monotonic seconds, so that no clock set back delays a save."""

    minutes: float | Literal["auto"] | None
    mean_seconds: float
    """Between failures; for auto."""
    last: float
    """When the last save began, or the run did."""
    seconds: float | None = None
    """The interval in force; None with auto until the cost of a save is known."""

    def __post_init__(self) -> None:
        if isinstance(self.minutes, float | int):
            self.seconds = self.minutes * 60

    def due(self, now: float) -> bool:
        if self.minutes is None:
            return False
        return self.seconds is None or now - self.last >= self.seconds

    def cost(self, blocked_seconds: float, whole_seconds: float) -> None:
        """A save blocked training for so long, and took so long in all: there is no use in saving more often."""
        if self.minutes == "auto":
            self.seconds = max(
                _SHORTEST_SECONDS, whole_seconds, best_interval(max(blocked_seconds, 1e-3), self.mean_seconds)
            )


_PARTS = 3
"""A state has these parts, each in a database of its own."""

_OVERHEAD = 1.02
"""Orbax's own files, and file systems that round up."""

_NAMED = 5
"""So many of what could be removed are named."""


@dataclass(frozen=True)
class SpaceNeeded:
    """What one checkpoint takes."""

    bytes: int
    files: int


def need(state_bytes: int, processes: int) -> SpaceNeeded:
    """The predicted need of a state of `state_bytes`, written by so many processes."""
    per_process = 8 + state_bytes // max(1, processes) // (2 << 30)  # data, metadata; data files of up to 2 GiB
    return SpaceNeeded(int(state_bytes * _OVERHEAD) + (1 << 20), _PARTS * (8 + processes * per_process))


def shortage(root: StoragePath, wanted: SpaceNeeded, checkpoints: int = 1) -> str | None:
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
    newest = newest_valid(root)
    older = [path for step, path in step_directories(root) if newest is not None and step < newest.step]
    taking = [(path.name, sum(files(path).values())) for path in [*aside, *older] if not is_link(path)]
    named = [f"{name} ({size(taken)})" for name, taken in taking if taken]
    return [*named[:_NAMED], f"{len(named) - _NAMED} more"] if len(named) > _NAMED else named
