"""What is on disk under checkpoints/, and which of it is whole. Knows files only, no arrays.

Orbax publishes a step by renaming its directory, and its reader trusts the name alone. A step counts here when Orbax's
marker and our sealed manifest are in it, and every file is there in its full size, small ones (all that describes the
arrays) with their SHA-256. That the arrays are what they were, their digests say: `inspection.py`, `restore.py`.

While a step is being written or removed a note lies beside it, N.unfinished. So what was cut off is told from what was
lost: the former is removed at the next occasion, the latter set aside.
"""

import contextlib
import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxmnt import storage
from jaxmnt.checkpoint import manifest as manifests
from jaxmnt.checkpoint.manifest import DamagedError, Manifest
from jaxmnt.errors import UserError
from jaxmnt.storage import Place

ORBAX_MARKER = "commit_success.txt"
NOTE = ".unfinished"
SMALL_BYTES = 1 << 20
"""Files up to this size are compared byte for byte, by digest; only array data is larger."""


@dataclass(frozen=True)
class Committed:
    """A committed checkpoint."""

    path: Place
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step


def commit(path: Place, manifest: Manifest) -> None:
    """Commits a step directory that Orbax has finished: lists its files and publishes the manifest."""
    manifests.write(path, manifest, _files(path))
    with contextlib.suppress(OSError):  # the step stands, and a note beside one that is whole is dropped later
        _note(path).unlink(missing_ok=True)


def open_checkpoint(path: Place, run: str | None = None) -> Committed:
    """A step directory, if it is committed, its files are all there, and it is one of `run` (None: of any).

    Raises `DamagedError` with the reason why not, and `OtherFormatError`.
    """
    present = storage.files(path)
    if ORBAX_MARKER not in present:
        raise DamagedError(f"it has no commit marker {ORBAX_MARKER}")
    manifest, files = manifests.read(path)
    if path.name.isdigit() and int(path.name) != manifest.step:
        raise DamagedError(f"it is a checkpoint of step {manifest.step} under another's name")
    if run is not None and manifest.run != run:
        raise DamagedError(f"it belongs to run {manifest.run}, and this is run {run}")
    for name, (size, _) in sorted(files.items()):
        if name not in present:
            raise DamagedError(f"its file {name} is missing")
        if present[name] != size:
            raise DamagedError(f"its file {name} has {present[name]} bytes instead of {size}")
    try:
        found = _sha256(path, [name for name, (_, sha256) in files.items() if sha256 is not None])
    except FileNotFoundError as error:  # it is being removed
        raise DamagedError(f"its file {error.filename} is missing") from error
    for name, sha256 in found.items():
        if sha256 != files[name][1]:
            raise DamagedError(f"its file {name} is not as it was written")
    return Committed(path, manifest)


def why_not_whole(path: Place, run: str | None = None) -> str | None:
    """What is wrong with a step directory as far as its files tell, or None. Raises `OtherFormatError`."""
    try:
        open_checkpoint(path, run)
    except DamagedError as damage:
        return str(damage)
    return None


def step_directories(root: Place) -> list[tuple[int, Place]]:
    """(step, directory) of everything that looks like a step, oldest first."""
    if not root.is_dir():
        return []
    return sorted((int(path.name), path) for path in root.iterdir() if path.name.isdigit() and path.is_dir())


def whole(root: Place, run: str | None = None) -> list[Committed]:
    """The whole checkpoints, oldest first. Raises `OtherFormatError`."""
    found = []
    for _, path in step_directories(root):
        try:
            found.append(open_checkpoint(path, run))
        except DamagedError:
            continue
    return found


def newest_whole(root: Place, run: str | None = None) -> Committed | None:
    """The newest whole checkpoint, passing over whatever is not. Raises `OtherFormatError`."""
    for _, path in reversed(step_directories(root)):
        try:
            return open_checkpoint(path, run)
        except DamagedError:
            continue
    return None


def set_aside(path: Place) -> Place:
    """Renames a step so that its number is free. Nothing is ever deleted for being damaged."""
    aside = _free_name(path.with_name(f"{path.name}.damaged"))
    storage.move(path, aside)
    return aside


def clear_up(root: Place, run: str | None) -> tuple[list[str], list[str]]:
    """Removes what was cut off and sets aside what is damaged. Returns a line for people about each, in two lists.

    Only to be called by the one job that the run directory belongs to. Raises `OtherFormatError`.
    """
    cut_off, damaged = remove_cut_off(root), []
    for step, path in step_directories(root):
        reason = why_not_whole(path, run)
        if reason is not None:
            damaged.append(f"checkpoint {step} is not used: {reason}; kept as {set_aside(path)}")
    return cut_off, damaged


def begin(path: Place) -> None:
    """Makes room for a step about to be saved, and notes that it is unfinished.

    Raises `UserError` if it is there already and whole, which only another job can have done.
    """
    if path.exists():
        if why_not_whole(path) is None:
            raise UserError(f"{path} is a whole checkpoint already, of another job; stop one of the jobs")
        set_aside(path)
    storage.create(_note(path), "being written\n")


def prune(checkpoints: list[Committed], keep: set[int]) -> None:
    """Removes the checkpoints whose step is not in `keep`."""
    for checkpoint in checkpoints:
        if checkpoint.step not in keep:
            note = _note(checkpoint.path)
            storage.create(note, "being removed\n")
            (checkpoint.path / manifests.FILE).unlink(missing_ok=True)  # from now on it is no checkpoint
            storage.remove(checkpoint.path)
            note.unlink(missing_ok=True)


def unfinished(path: Place) -> str | None:
    """What is being done with a step, or was when its job ended, in words; None for one that is committed."""
    if (path / manifests.FILE).exists():
        return None
    try:
        return _note(path).read_text(encoding="utf-8").strip() or "being begun"
    except FileNotFoundError:
        return None


def remove_cut_off(root: Place, *, keep_notes: bool = False) -> list[str]:
    """Removes the steps whose writing or removal came to no end. Returns a line for people about each.

    With `keep_notes` what appears of them later will be removed, too: a save that failed may go on writing for a while.
    """
    lines: list[str] = []
    if not root.is_dir():
        return lines
    for note in [path for path in root.iterdir() if path.name.endswith(NOTE)]:
        path = note.with_name(note.name.removesuffix(NOTE))
        present = storage.files(path)  # which raises what keeps it from looking: nothing is removed on a guess
        if manifests.FILE not in present:
            storage.remove(path)
            if present:
                lines.append(f"removed {path}, which was cut off while it was {unfinished(path)}")
        if manifests.FILE in present or not keep_notes:
            note.unlink(missing_ok=True)
    if isinstance(root, Path):
        for path in sorted(root.glob("*.orbax-checkpoint-tmp*")):
            shutil.rmtree(path)
            lines.append(f"removed {path}, which was cut off while it was being written")
    return lines


def _note(path: Place) -> Place:
    return path.with_name(f"{path.name}{NOTE}")


def _files(path: Place) -> dict[str, list[Any]]:
    sizes = storage.files(path)
    small = _sha256(path, [name for name, size in sizes.items() if size <= SMALL_BYTES])
    return {name: [size, small.get(name)] for name, size in sizes.items()}


def _sha256(path: Place, names: list[str]) -> dict[str, str]:
    contents = storage.read_all(path, sorted(names))
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def _free_name(path: Place) -> Place:
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}.{number}")
    return candidate
