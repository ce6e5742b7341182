"""Commits, validates and removes the step directories under checkpoints/. Works on files only, not on arrays.

Orbax publishes a step by renaming its directory, and its reader trusts the name alone. Here a step is valid ("whole")
if it contains Orbax's marker and our sealed manifest, and every file has its full size; small files (all that describe
the arrays) must match their SHA-256 as well. `restore.py` checks the arrays by their digests.

While a step is being written or removed, a note N.unfinished is beside it. This distinguishes interrupted steps, which
are removed at the next opportunity, from damaged ones, which are set aside.

A step that is a symbolic link is read like any other, but its target belongs to someone else: it is never removed.
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
ORBAX_TEMPORARY = ".orbax-checkpoint-tmp"
NOTE = ".unfinished"
"""Suffix of the note beside a step that is being written or removed."""
_STEP = re.compile(r"(?:0|[1-9][0-9]{0,17})", re.ASCII)
SMALL_BYTES = 1 << 20
"""Files up to this size are verified by SHA-256; only array data is larger."""


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
        """The run's config when it was written. Raises `ConfigError` if this version cannot read it."""
        return parse_config(self.manifest.config, f"the config in {self.path}")


def step_of(name: str) -> int | None:
    """Returns the step of a directory name; None if the name is not a number in ASCII digits."""
    return int(name) if _STEP.fullmatch(name) else None


def commit(path: StoragePath, manifest: Manifest) -> None:
    """Commits a step directory that Orbax has finished: lists its files and publishes the manifest.

    Raises `UserError` if the directory was replaced by a link since the save began.
    """
    _refuse_link(path)
    files = _files(path)
    _refuse_link(path)  # listing a large checkpoint takes a while
    manifests.write(path, manifest, files)
    with contextlib.suppress(OSError):  # the step is committed; a note beside a committed step is removed later
        _note(path).unlink(missing_ok=True)


def add_loss(path: StoragePath, loss: float, eval_tokens: Any) -> None:
    """Publishes a checkpoint's manifest again with a held-out loss that was measured after its commit.

    Leaves the manifest unchanged if it already has a loss, or if its config's limit on evaluation tokens differs from
    `eval_tokens`. Does not write through a link. Raises `DamagedError`, `OtherFormatError` and `OSError`.
    """
    if storage.is_link(path):
        return
    manifest, files = manifests.read(path)
    if manifest.loss is None and manifest.eval_tokens == eval_tokens:
        manifests.write(path, replace(manifest, loss=loss), files)


def open_checkpoint(path: StoragePath, run: str | None = None) -> Committed:
    """Returns the checkpoint in a step directory if it is committed, complete and belongs to `run` (None: any run).

    Raises `DamagedError` with the reason why it is not, and `OtherFormatError`.
    """
    try:
        return _open_committed(path, run)
    except UserError:
        raise
    except OSError as error:
        if error.errno not in storage.NO_FILE:
            raise
        raise DamagedError(f"its file {printable(str(error.filename))} cannot be read: {error.strerror}") from error


def _open_committed(path: StoragePath, run: str | None) -> Committed:
    if not storage.sizes_of(path, [ORBAX_MARKER]):
        raise DamagedError(f"it has no commit marker {ORBAX_MARKER}")
    manifest, files = manifests.read(path)
    if step_of(path.name) not in (None, manifest.step):
        raise DamagedError(f"it is a checkpoint of step {manifest.step} under another's name")
    if run is not None and manifest.run != run:
        raise DamagedError(f"it belongs to run {printable(manifest.run)}, and this is run {printable(run)}")
    # Sizes first: they are cheap to compare, and most damage shows there.
    present = storage.sizes_of(path, files)
    for name, (size, _) in sorted(files.items()):
        if name not in present:
            raise DamagedError(f"its file {printable(name)} is missing")
        if present[name] != size:
            raise DamagedError(f"its file {printable(name)} has {present[name]} bytes instead of {size}")
    actual = _sha256(path, [name for name, (_, sha256) in files.items() if sha256 is not None])
    for name, sha256 in actual.items():
        if sha256 != files[name][1]:
            raise DamagedError(f"its file {printable(name)} is not as it was written")
    return Committed(path, manifest)


def why_not_valid(path: StoragePath, run: str | None = None) -> str | None:
    """Returns what is wrong with a step directory, judging by its files; None if nothing. Raises `OtherFormatError`."""
    try:
        open_checkpoint(path, run)
    except DamagedError as damage:
        return str(damage)
    return None


def step_directories(root: StoragePath) -> list[tuple[int, StoragePath]]:
    """Returns (step, directory) of every directory that is named like a step, oldest first."""
    return [(step, path) for step, path in _step_paths(root) if _is_directory(path)]


def unreachable_steps(root: StoragePath) -> list[tuple[int, StoragePath]]:
    """Returns (step, link) of each step that is a link whose target is no directory at the moment, oldest first."""
    return [(step, path) for step, path in _step_paths(root) if storage.is_link(path) and not _is_directory(path)]


def _step_paths(root: StoragePath) -> list[tuple[int, StoragePath]]:
    named = [(step_of(path.name), path) for path in root.iterdir()] if root.is_dir() else []
    return sorted((step, path) for step, path in named if step is not None)


def _is_directory(path: StoragePath) -> bool:
    try:
        return path.is_dir()
    except OSError:
        if storage.is_link(path):  # such as a link into an archive that is not mounted
            return False
        raise


def valid_checkpoints(root: StoragePath, run: str | None = None) -> list[Committed]:
    """Returns the valid checkpoints, oldest first. Raises `OtherFormatError`."""
    return list(_open_valid(step_directories(root), run))


def newest_valid(root: StoragePath, run: str | None = None) -> Committed | None:
    """Returns the newest valid checkpoint, skipping those that are not. Raises `OtherFormatError`."""
    return next(_open_valid(reversed(step_directories(root)), run), None)


def _open_valid(steps: Iterable[tuple[int, StoragePath]], run: str | None) -> Iterator[Committed]:
    for _, path in steps:
        with contextlib.suppress(DamagedError):
            yield open_checkpoint(path, run)


def quarantine(path: StoragePath) -> StoragePath:
    """Renames a step so that its number is free, and returns the new path. Damaged steps are never deleted."""
    aside = storage.first_free(path, (".damaged" if number == 1 else f".damaged.{number}" for number in count(1)))
    storage.move(path, aside)
    return aside


def clean_up(root: StoragePath, run: str | None) -> tuple[list[str], list[str]]:
    """Removes unfinished steps and sets damaged ones aside. Returns messages for the user: general ones, and damage.

    Only the job that owns the run directory may call this. Raises `OtherFormatError`.
    """
    removed, not_removed = remove_unfinished(root)
    messages = removed + not_removed
    damaged = []
    for step, path in step_directories(root):
        reason = why_not_valid(path, run)
        if reason is None and storage.is_link(path):
            messages.append(f"checkpoint {step} is a link: it is read and never removed")
        elif reason is not None and unfinished(path) is None:  # an unfinished one could not be removed
            damaged.append(f"checkpoint {step} is not used: {reason}; kept as {quarantine(path)}")
    return messages, damaged


def begin(path: StoragePath) -> None:
    """Makes room for a step about to be saved, and writes the note that it is unfinished.

    Raises `UserError` if the step already exists and is valid, which only another job can have done.
    """
    if storage.is_there(path):
        if why_not_valid(path) is None:
            raise UserError(f"{path} is a whole checkpoint already, of another job; stop one of the jobs")
        quarantine(path)
    storage.create(_note(path), "being written\n")


def prune(checkpoints: list[Committed], keep: set[int]) -> None:
    """Removes the checkpoints whose step is not in `keep`, except links.

    Raises `OSError` if a checkpoint cannot be removed, after removing the others.
    """
    trouble = None
    for path in [checkpoint.path for checkpoint in checkpoints if checkpoint.step not in keep]:
        if storage.is_link(path):
            continue
        try:
            storage.create(_note(path), "being removed\n")
            (path / manifests.MANIFEST_FILE).unlink(missing_ok=True)  # the step is no longer committed
            storage.remove(path)
            if not _note(path).is_dir():  # a folder of that name is the user's
                _note(path).unlink(missing_ok=True)
        except OSError as error:
            trouble = trouble or error
    if trouble is not None:
        raise trouble


def unfinished(path: StoragePath) -> str | None:
    """Returns what its job is doing with an unfinished step, such as "being written"; None if it is committed."""
    if (path / manifests.MANIFEST_FILE).exists() or not _note(path).is_file():
        return None
    try:
        return printable(storage.read(_note(path)).decode(errors="replace").strip()) or "being begun"
    except FileNotFoundError:
        return None


def remove_unfinished(root: StoragePath, *, keep_notes: bool = False) -> tuple[list[str], list[str]]:
    """Removes the steps whose writing or removal was interrupted.

    Returns a message for the user about each: the removed ones, and those that cannot be removed, which the next call
    tries again. With `keep_notes`, files that appear later are removed by a later call, too: a failed save may go on
    writing for a while.
    """
    removed = []
    not_removed = []
    present: list[StoragePath] = sorted(root.iterdir()) if root.is_dir() else []
    for path in present:
        step, dot, rest = path.name.partition(".")
        if step_of(step) is None or storage.is_link(path):
            continue  # the user's own files
        try:
            if dot + rest == NOTE and path.is_file():
                removed += _remove_noted(path.with_name(step), keep_note=keep_notes)
            elif isinstance(path, Path) and (dot + rest).startswith(ORBAX_TEMPORARY) and path.is_dir():
                storage.remove(path)
                removed.append(f"removed {path}, which was cut off while it was being written")
        except OSError as error:
            not_removed.append(
                f"cannot remove {path}, left by an interrupted save or removal: {error.strerror or error}"
            )
    return removed, not_removed


def _remove_noted(path: StoragePath, *, keep_note: bool) -> list[str]:
    """Removes the files of a step that has a note, unless it is committed. Returns a message if it removed any."""
    if storage.is_link(path):
        committed, present = True, {}  # a link was made later: the note is not about it
    else:
        present = storage.file_sizes(path)  # raises if it cannot look, so that nothing is removed on a guess
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
    sizes = storage.file_sizes(path)
    small = _sha256(path, [name for name, size in sizes.items() if size <= SMALL_BYTES])
    return {name: [size, small.get(name)] for name, size in sizes.items()}


def _sha256(path: StoragePath, names: list[str]) -> dict[str, str]:
    contents = storage.read_all(path, sorted(names))
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
