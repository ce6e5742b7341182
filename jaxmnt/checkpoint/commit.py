"""What is on disk under checkpoints/, and which of it is whole. Knows files only, no arrays.

Orbax publishes a step by renaming its directory, and its reader trusts the name alone. A step counts here when Orbax's
marker and our sealed manifest are in it, and every file is there in its full size, small ones (all that describes the
arrays) with their SHA-256. That the arrays are what they were, their digests say: `verify.py`, `restore.py`.
"""

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxmnt.checkpoint import manifest as manifests
from jaxmnt.checkpoint.manifest import DamagedError, Manifest

ORBAX_MARKER = "commit_success.txt"
SMALL_BYTES = 1 << 20
"""Files up to this size are compared byte for byte, by digest; only array data is larger."""


@dataclass(frozen=True)
class Committed:
    """A committed checkpoint."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step


def commit(path: Path, manifest: Manifest) -> None:
    """Commits a step directory that Orbax has finished: lists its files and publishes the manifest."""
    manifests.write(path, manifest, _files(path))


def open_checkpoint(path: Path, run: str | None = None) -> Committed:
    """A step directory, if it is committed, its files are all there, and it is one of `run` (None: of any).

    Raises `DamagedError` with the reason why not, and `OtherFormatError`.
    """
    if not (path / ORBAX_MARKER).is_file():
        raise DamagedError(f"it has no commit marker {ORBAX_MARKER}")
    manifest, files = manifests.read(path)
    if path.name.isdigit() and int(path.name) != manifest.step:
        raise DamagedError(f"it is a checkpoint of step {manifest.step} under another's name")
    if run is not None and manifest.run != run:
        raise DamagedError(f"it belongs to run {manifest.run}, and this is run {run}")
    for name, (size, sha256) in sorted(files.items()):
        file = path / name
        if not file.is_file():
            raise DamagedError(f"its file {name} is missing")
        if file.stat().st_size != size:
            raise DamagedError(f"its file {name} has {file.stat().st_size} bytes instead of {size}")
        if sha256 is not None and _sha256(file) != sha256:
            raise DamagedError(f"its file {name} is not as it was written")
    return Committed(path, manifest)


def why_not_whole(path: Path, run: str | None = None) -> str | None:
    """What is wrong with a step directory as far as its files tell, or None. Raises `OtherFormatError`."""
    try:
        open_checkpoint(path, run)
    except DamagedError as damage:
        return str(damage)
    return None


def step_directories(root: Path) -> list[tuple[int, Path]]:
    """(step, directory) of everything that looks like a step, oldest first."""
    if not root.is_dir():
        return []
    return sorted((int(path.name), path) for path in root.iterdir() if path.is_dir() and path.name.isdigit())


def whole(root: Path, run: str | None = None) -> list[Committed]:
    """The whole checkpoints, oldest first. Raises `OtherFormatError`."""
    found = []
    for _, path in step_directories(root):
        try:
            found.append(open_checkpoint(path, run))
        except DamagedError:
            continue
    return found


def newest_whole(root: Path, run: str | None = None) -> Committed | None:
    """The newest whole checkpoint, passing over whatever is not. Raises `OtherFormatError`."""
    for _, path in reversed(step_directories(root)):
        try:
            return open_checkpoint(path, run)
        except DamagedError:
            continue
    return None


def was_committed(path: Path) -> bool:
    """Whether a step that is not whole was a checkpoint once, and not a save that was cut off."""
    return (path / manifests.FILE).exists()


def set_aside(path: Path) -> Path:
    """Renames a step so that its number is free. Nothing is ever deleted for being damaged."""
    label = "damaged" if was_committed(path) else "uncommitted"
    aside = _free_name(path.with_name(f"{path.name}.{label}"))
    path.rename(aside)
    return aside


def clear_up(root: Path, run: str | None) -> list[str]:
    """Sets aside what is not whole and removes unfinished saves. Returns a line for people about each.

    Only to be called by the one job that the run directory belongs to. Raises `OtherFormatError`.
    """
    lines = []
    for step, path in step_directories(root):
        reason = why_not_whole(path, run)
        if reason is not None:
            lines.append(f"checkpoint {step} is not used: {reason}; kept as {set_aside(path)}")
    if root.is_dir():
        for path in sorted(root.glob("*.orbax-checkpoint-tmp*")):
            shutil.rmtree(path)
            lines.append(f"removed {path.name}, a save that was cut off")
        for path in sorted(root.glob(".*.removed")):  # a removal that was cut off
            shutil.rmtree(path)
    return lines


def prune(root: Path, run: str, keep: set[int]) -> None:
    """Removes the whole checkpoints of this run whose step is not in `keep`."""
    for checkpoint in whole(root, run):
        if checkpoint.step not in keep:
            going = checkpoint.path.with_name(f".{checkpoint.path.name}.removed")
            checkpoint.path.rename(going)  # at once no longer a step, whatever happens to the removal
            shutil.rmtree(going)


def _files(path: Path) -> dict[str, list[Any]]:
    files = {}
    for file in sorted(path.rglob("*")):
        if file.is_file():
            size = file.stat().st_size
            files[str(file.relative_to(path))] = [size, _sha256(file) if size <= SMALL_BYTES else None]
    return files


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _free_name(path: Path) -> Path:
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}.{number}")
    return candidate
