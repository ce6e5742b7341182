"""What is on disk under checkpoints/, and which of it is whole. Knows files only, no arrays.

Orbax publishes a step by renaming its directory, and its reader trusts the name alone. A step counts here when Orbax's
marker and our sealed manifest are in it, and every file is there in its full size, small ones (all that describes the
arrays) with their SHA-256. Whether the arrays are intact is checked by their digests (`restore.py`).

While a step is being written or removed a note lies beside it, N.unfinished. So what was cut off is told from what was
lost: the former is removed at the next occasion, the latter set aside.

A step that is a link counts like any other, but what it leads to is somebody's own: it is never removed.
"""

import contextlib
import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from jaxmnt import storage
from jaxmnt.checkpoint import manifest as manifests
from jaxmnt.checkpoint.manifest import DamagedError, Manifest
from jaxmnt.config.load import parse_config
from jaxmnt.config.schema import Config
from jaxmnt.errors import UserError, printable
from jaxmnt.storage import StoragePath

ORBAX_MARKER = "commit_success.txt"
ORBAX_UNDER_WAY = ".orbax-checkpoint-tmp"
NOTE = ".unfinished"
_STEP = re.compile(r"(?:0|[1-9][0-9]{0,17})", re.ASCII)
SMALL_BYTES = 1 << 20
"""Files up to this size are compared byte for byte, by digest; only array data is larger."""


@dataclass(frozen=True)
class Committed:
    """A committed checkpoint."""

    path: StoragePath
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def config(self) -> Config:
        """The config of its run when it was written. Raises `ConfigError` for one that this version cannot read."""
        return parse_config(self.manifest.config, f"the config in {self.path}")


def step_of(name: str) -> int | None:
    """The step that a name of a directory means; None if it is not written as steps are, in ASCII digits."""
    return int(name) if _STEP.fullmatch(name) else None


def commit(path: StoragePath, manifest: Manifest) -> None:
    """Commits a step directory that Orbax has finished: lists its files and publishes the manifest.

    Raises `UserError` if a link has taken the directory's place since the save began.
    """
    _refuse_link(path)
    files = _files(path)
    _refuse_link(path)  # listing a large checkpoint takes a while
    manifests.write(path, manifest, files)
    with contextlib.suppress(OSError):  # the step stands, and a note beside one that is whole is dropped later
        _note(path).unlink(missing_ok=True)


def add_loss(path: StoragePath, loss: float, eval_tokens: Any) -> None:
    """Publishes the manifest of a checkpoint again with a held-out loss that was measured after its commit.

    A manifest keeps what it says if it has a loss already, or if its config limits evaluations to another number of
    tokens than `eval_tokens`. Nothing is written through a link. Raises `DamagedError`, `OtherFormatError` and
    `OSError`.
    """
    if storage.is_link(path):
        return
    manifest, files = manifests.read(path)
    if manifest.loss is None and manifest.eval_tokens == eval_tokens:
        manifests.write(path, replace(manifest, loss=loss), files)


def open_checkpoint(path: StoragePath, run: str | None = None) -> Committed:
    """A step directory, if it is committed, its files are all there, and it is one of `run` (None: of any).

    Raises `DamagedError` with the reason why not, and `OtherFormatError`.
    """
    try:
        return _opened(path, run)
    except UserError:
        raise
    except OSError as error:
        if error.errno not in storage.NO_FILE:
            raise
        raise DamagedError(f"its file {printable(str(error.filename))} cannot be read: {error.strerror}") from error


def _opened(path: StoragePath, run: str | None) -> Committed:
    if not storage.sizes(path, [ORBAX_MARKER]):
        raise DamagedError(f"it has no commit marker {ORBAX_MARKER}")
    manifest, files = manifests.read(path)
    if step_of(path.name) not in (None, manifest.step):
        raise DamagedError(f"it is a checkpoint of step {manifest.step} under another's name")
    if run is not None and manifest.run != run:
        raise DamagedError(f"it belongs to run {printable(manifest.run)}, and this is run {printable(run)}")
    present = storage.sizes(path, files)
    for name, (size, _) in sorted(files.items()):
        if name not in present:
            raise DamagedError(f"its file {printable(name)} is missing")
        if present[name] != size:
            raise DamagedError(f"its file {printable(name)} has {present[name]} bytes instead of {size}")
    found = _sha256(path, [name for name, (_, sha256) in files.items() if sha256 is not None])
    for name, sha256 in found.items():
        if sha256 != files[name][1]:
            raise DamagedError(f"its file {printable(name)} is not as it was written")
    return Committed(path, manifest)


def why_not_valid(path: StoragePath, run: str | None = None) -> str | None:
    """What is wrong with a step directory as far as its files tell, or None. Raises `OtherFormatError`."""
    try:
        open_checkpoint(path, run)
    except DamagedError as damage:
        return str(damage)
    return None


def step_directories(root: StoragePath) -> list[tuple[int, StoragePath]]:
    """(step, directory) of everything that looks like a step, oldest first."""
    return [(step, path) for step, path in _named_as_steps(root) if _is_directory(path)]


def out_of_reach(root: StoragePath) -> list[tuple[int, StoragePath]]:
    """(step, link) of steps that are links, and that lead to no directory at the moment; oldest first."""
    return [(step, path) for step, path in _named_as_steps(root) if storage.is_link(path) and not _is_directory(path)]


def _named_as_steps(root: StoragePath) -> list[tuple[int, StoragePath]]:
    named = [(step_of(path.name), path) for path in root.iterdir()] if root.is_dir() else []
    return sorted((step, path) for step, path in named if step is not None)


def _is_directory(path: StoragePath) -> bool:
    try:
        return path.is_dir()
    except OSError:
        if storage.is_link(path):  # an archive that is away
            return False
        raise


def valid_checkpoints(root: StoragePath, run: str | None = None) -> list[Committed]:
    """The whole checkpoints, oldest first. Raises `OtherFormatError`."""
    return list(_whole(step_directories(root), run))


def newest_valid(root: StoragePath, run: str | None = None) -> Committed | None:
    """The newest whole checkpoint, passing over whatever is not. Raises `OtherFormatError`."""
    return next(_whole(reversed(step_directories(root)), run), None)


def _whole(steps: Iterable[tuple[int, StoragePath]], run: str | None) -> Iterator[Committed]:
    for _, path in steps:
        with contextlib.suppress(DamagedError):
            yield open_checkpoint(path, run)


def quarantine(path: StoragePath) -> StoragePath:
    """Renames a step so that its number is free. Nothing is ever deleted for being damaged."""
    aside = storage.first_free(path, (".damaged" if number == 1 else f".damaged.{number}" for number in count(1)))
    storage.move(path, aside)
    return aside


def clear_up(root: StoragePath, run: str | None) -> tuple[list[str], list[str]]:
    """Removes what was cut off and sets aside what is damaged. Returns lines for people, those about damage apart.

    Only to be called by the one job that the run directory belongs to. Raises `OtherFormatError`.
    """
    told, left = remove_cut_off(root)
    told, damaged = told + left, []
    for step, path in step_directories(root):
        reason = why_not_valid(path, run)
        if reason is None and storage.is_link(path):
            told.append(f"checkpoint {step} is a link: it is read and never removed")
        elif reason is not None and unfinished(path) is None:  # else it could not be removed
            damaged.append(f"checkpoint {step} is not used: {reason}; kept as {quarantine(path)}")
    return told, damaged


def begin(path: StoragePath) -> None:
    """Makes room for a step about to be saved, and notes that it is unfinished.

    Raises `UserError` if it is there already and whole, which only another job can have done.
    """
    if storage.is_there(path):
        if why_not_valid(path) is None:
            raise UserError(f"{path} is a whole checkpoint already, of another job; stop one of the jobs")
        quarantine(path)
    storage.create(_note(path), "being written\n")


def prune(checkpoints: list[Committed], keep: set[int]) -> None:
    """Removes the checkpoints whose step is not in `keep`, but for links.

    Raises `OSError` if one cannot be removed, once the others are.
    """
    trouble = None
    for path in [found.path for found in checkpoints if found.step not in keep]:
        if storage.is_link(path):
            continue
        try:
            storage.create(_note(path), "being removed\n")
            (path / manifests.MANIFEST_FILE).unlink(missing_ok=True)  # from now on it is no checkpoint
            storage.remove(path)
            if not _note(path).is_dir():  # a person's folder
                _note(path).unlink(missing_ok=True)
        except OSError as error:
            trouble = trouble or error
    if trouble is not None:
        raise trouble


def unfinished(path: StoragePath) -> str | None:
    """What is being done with a step, or was when its job ended, in words; None for one that is committed."""
    if (path / manifests.MANIFEST_FILE).exists() or not _note(path).is_file():
        return None
    try:
        return printable(storage.read(_note(path)).decode(errors="replace").strip()) or "being begun"
    except FileNotFoundError:
        return None


def remove_cut_off(root: StoragePath, *, keep_notes: bool = False) -> tuple[list[str], list[str]]:
    """Removes the steps whose writing or removal came to no end. Returns a line for people about each: those that are
    gone, and those that could not be removed, which is tried again at the next occasion.

    With `keep_notes` what appears of them later will be removed, too: a save that failed may go on writing for a while.
    """
    removed = []
    left = []
    present: list[StoragePath] = sorted(root.iterdir()) if root.is_dir() else []
    for path in present:
        step, dot, rest = path.name.partition(".")
        if step_of(step) is None or storage.is_link(path):
            continue  # a person's
        try:
            if dot + rest == NOTE and path.is_file():
                removed += _remove_noted(path.with_name(step), keep_note=keep_notes)
            elif isinstance(path, Path) and (dot + rest).startswith(ORBAX_UNDER_WAY) and path.is_dir():
                storage.remove(path)
                removed.append(f"removed {path}, which was cut off while it was being written")
        except OSError as error:
            left.append(f"{path} tells of a step that was cut off and cannot be removed: {error.strerror or error}")
    return removed, left


def _remove_noted(path: StoragePath, *, keep_note: bool) -> list[str]:
    """What is there of a step beside which a note lies."""
    if storage.is_link(path):
        committed, present = True, {}  # whatever it is, it is not what the note tells of
    else:
        present = storage.files(path)  # which raises what keeps it from looking: nothing is removed on a guess
        committed = manifests.MANIFEST_FILE in present
    doing = unfinished(path)
    if not committed and (not isinstance(path, Path) or path.is_dir()):
        storage.remove(path)
    if committed or not keep_note:
        _note(path).unlink(missing_ok=True)
    return [f"removed {path}, which was cut off while it was {doing}"] if present and not committed else []


def _refuse_link(path: StoragePath) -> None:
    if storage.is_link(path):
        raise UserError(
            f"{path} became a link while it was being saved, and nothing is written through a link; link a checkpoint "
            "only after its save has ended"
        )


def _note(path: StoragePath) -> StoragePath:
    return path.with_name(f"{path.name}{NOTE}")


def _files(path: StoragePath) -> dict[str, list[Any]]:
    sizes = storage.files(path)
    small = _sha256(path, [name for name, size in sizes.items() if size <= SMALL_BYTES])
    return {name: [size, small.get(name)] for name, size in sizes.items()}


def _sha256(path: StoragePath, names: list[str]) -> dict[str, str]:
    contents = storage.read_all(path, sorted(names))
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
