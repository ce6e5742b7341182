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
from jaxmnt.checkpoint import storage
from jaxmnt.checkpoint.manifest import DamagedError, Manifest
from jaxmnt.checkpoint.storage import Place

ORBAX_MARKER = "commit_success.txt"
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
    for name, sha256 in _sha256(path, [name for name, (_, sha256) in files.items() if sha256 is not None]).items():
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


def was_committed(path: Place) -> bool:
    """Whether a step that is not whole was a checkpoint once, and not a save that was cut off."""
    return (path / manifests.FILE).exists()


def set_aside(path: Place) -> Place:
    """Renames a step so that its number is free. Nothing is ever deleted for being damaged.

    Of saves that were cut off before their commit one is kept, the last: it was never called a checkpoint.
    """
    committed = was_committed(path)
    if not committed:
        for earlier in [other for other in path.parent.iterdir() if ".uncommitted" in other.name]:
            storage.remove(earlier)
    aside = _free_name(path.with_name(f"{path.name}.{'damaged' if committed else 'uncommitted'}"))
    storage.move(path, aside)
    return aside


def clear_up(root: Place, run: str | None) -> list[str]:
    """Sets aside what is not whole and removes unfinished saves. Returns a line for people about each.

    Only to be called by the one job that the run directory belongs to. Raises `OtherFormatError`.
    """
    lines = []
    for step, path in step_directories(root):
        if _was_cut_off(path):
            storage.remove(path)
            lines.append(f"removed {path}, a save that was cut off")
            continue
        reason = why_not_whole(path, run)
        if reason is not None:
            lines.append(f"checkpoint {step} is not used: {reason}; kept as {set_aside(path)}")
    if isinstance(root, Path) and root.is_dir():
        for path in sorted(root.glob("*.orbax-checkpoint-tmp*")):
            shutil.rmtree(path)
            lines.append(f"removed {path.name}, a save that was cut off")
        for path in sorted(root.glob(".*.removed")):  # a removal that was cut off
            shutil.rmtree(path)
    return lines


def prune(checkpoints: list[Committed], keep: set[int]) -> None:
    """Removes the checkpoints whose step is not in `keep`."""
    for checkpoint in checkpoints:
        if checkpoint.step not in keep:
            storage.remove(checkpoint.path, first=(manifests.FILE, ORBAX_MARKER))


def free(path: Place) -> None:
    """Makes room for a save of a step that was tried before: set aside, or removed if its writing was cut off."""
    if _was_cut_off(path):
        storage.remove(path)
    elif path.exists():
        set_aside(path)


def _was_cut_off(path: Place) -> bool:
    """Whether a save or a removal ended in the middle. In a folder such have other names; an address is written and
    removed in place, with the markers last and first."""
    if isinstance(path, Path):
        return False
    present = storage.files(path)
    return bool(present) and not {ORBAX_MARKER, manifests.FILE} & present.keys()


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
