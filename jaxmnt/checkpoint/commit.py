"""Commits, validates and removes the step directories under checkpoints/. Looks only at files.

Orbax publishes a step by renaming its directory, and its reader trusts the name alone. Here a step is valid if it
contains Orbax's marker and our sealed manifest, and every file has its full size. Small files, including all that
describe the arrays, must match their SHA-256 as well. `restore.py` checks the arrays by their digests.

While step N is being written or removed, a note N.unfinished exists next to its directory. The note distinguishes
interrupted steps, which are removed at the next opportunity, from damaged ones, which are set aside.

A step that is a symbolic link is read like any other, but is never removed, because its target belongs to someone else.
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
"""Suffix of the note next to a step that is being written or removed."""
_STEP_NAME = re.compile(r"(?:0|[1-9][0-9]{0,17})", re.ASCII)
SMALL_BYTES = 1 << 20
"""Files of at most this size are verified by SHA-256. Only files of array data are larger."""


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
        """The run's config when the checkpoint was written. Raises `ConfigError` if this version cannot read it."""
        return parse_config(_with_settings_of_its_time(self.manifest.config), f"the config in {self.path}")


def _with_settings_of_its_time(tree: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of a run that an earlier version may have written, with what that version computed where a
    newer setting has another default. Then the change counts as a change of that setting."""
    optimizer = tree.get("optimizer", {})
    uses_muon = any(rule.get("kind") == "muon" for rule in optimizer.get("rules", []))
    if uses_muon and "muon" not in optimizer:
        return tree | {"optimizer": optimizer | {"muon": {"scale": "none"}}}
    return tree


def step_of(name: str) -> int | None:
    """Returns the step of a directory name; None if the name is not a number in ASCII digits."""
    return int(name) if _STEP_NAME.fullmatch(name) else None


def commit(path: StoragePath, manifest: Manifest) -> None:
    """Commits a step directory that Orbax has finished, by publishing the manifest with a list of its files.

    Raises `UserError` if the directory was replaced by a link since the save began.
    """
    _refuse_link(path)
    files = _describe_files(path)
    _refuse_link(path)  # listing a large checkpoint takes a while
    manifests.write(path, manifest, files)
    with contextlib.suppress(OSError):  # the step is committed, and a later clean-up removes its note
        _note_path(path).unlink(missing_ok=True)


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
    """Returns the checkpoint in a step directory if it is valid and belongs to `run` (None: any run).

    Raises `DamagedError` with the reason if it is not valid or belongs to another run, and `OtherFormatError`.
    """
    try:
        return _open_committed(path, run)
    except UserError:
        raise
    except OSError as error:
        if error.errno not in storage.UNUSABLE_FILE_ERRNOS:
            raise
        raise DamagedError(f"its file {printable(str(error.filename))} cannot be read: {error.strerror}") from error


def _open_committed(path: StoragePath, run: str | None) -> Committed:
    if not storage.sizes_of(path, [ORBAX_MARKER]):
        raise DamagedError(f"it has no commit marker {ORBAX_MARKER}")
    manifest, files = manifests.read(path)
    if step_of(path.name) not in (None, manifest.step):
        raise DamagedError(f"it is a checkpoint of step {manifest.step} under the name of another step")
    if run is not None and manifest.run != run:
        raise DamagedError(f"it belongs to run {printable(manifest.run)}, but this is run {printable(run)}")
    # Compare sizes first, because that is cheap and finds most damage.
    present = storage.sizes_of(path, files)
    for name, (size, _) in sorted(files.items()):
        if name not in present:
            raise DamagedError(f"its file {printable(name)} is missing")
        if present[name] != size:
            raise DamagedError(f"its file {printable(name)} has {present[name]} bytes instead of {size}")
    actual = _sha256(path, [name for name, (_, sha256) in files.items() if sha256 is not None])
    for name, sha256 in actual.items():
        if sha256 != files[name][1]:
            raise DamagedError(f"its file {printable(name)} has changed since it was written")
    return Committed(path, manifest)


def why_not_valid(path: StoragePath, run: str | None = None) -> str | None:
    """Returns what is wrong with the files of a step directory; None if they are valid. Raises `OtherFormatError`."""
    try:
        open_checkpoint(path, run)
    except DamagedError as damage:
        return str(damage)
    return None


def step_directories(root: StoragePath) -> list[tuple[int, StoragePath]]:
    """Returns (step, directory) of every directory whose name is the number of a step, oldest first."""
    return [(step, path) for step, path in _step_paths(root) if _is_directory(path)]


def unreachable_steps(root: StoragePath) -> list[tuple[int, StoragePath]]:
    """Returns (step, link) of each step that is a link whose target is not a directory at the moment, oldest first."""
    return [(step, path) for step, path in _step_paths(root) if storage.is_link(path) and not _is_directory(path)]


def _step_paths(root: StoragePath) -> list[tuple[int, StoragePath]]:
    steps = [(step_of(path.name), path) for path in root.iterdir()] if root.is_dir() else []
    return sorted((step, path) for step, path in steps if step is not None)


def _is_directory(path: StoragePath) -> bool:
    try:
        return path.is_dir()
    except OSError:
        if storage.is_link(path):  # such as a link into an archive that is not mounted
            return False
        raise


def valid_checkpoints(root: StoragePath, run: str | None = None) -> list[Committed]:
    """Returns the valid checkpoints of `run` (None: of any run), oldest first. Raises `OtherFormatError`."""
    return list(_open_valid(step_directories(root), run))


def newest_valid(root: StoragePath, run: str | None = None) -> Committed | None:
    """Returns the newest valid checkpoint of `run` (None: of any run), if any. Raises `OtherFormatError`."""
    return next(_open_valid(reversed(step_directories(root)), run), None)


def _open_valid(steps: Iterable[tuple[int, StoragePath]], run: str | None) -> Iterator[Committed]:
    for _, path in steps:
        with contextlib.suppress(DamagedError):
            yield open_checkpoint(path, run)


def quarantine(path: StoragePath) -> StoragePath:
    """Renames a step so that its number is free, and returns the new path. Damaged steps are never deleted."""
    suffixes = (".damaged" if number == 1 else f".damaged.{number}" for number in count(1))
    new_path = storage.first_free(path, suffixes)
    storage.move(path, new_path)
    return new_path


def clean_up(root: StoragePath, run: str | None) -> tuple[list[str], list[str]]:
    """Removes unfinished steps and sets damaged ones aside.

    Returns messages for the user in two lists: what was done with the unfinished steps and links, and what is damaged.
    Only the job that owns the run directory may call this. Raises `OtherFormatError`.
    """
    removed, removal_failures = remove_unfinished(root)
    messages = removed + removal_failures
    damaged = []
    for step, path in step_directories(root):
        reason = why_not_valid(path, run)
        if reason is None and storage.is_link(path):
            messages.append(f"checkpoint {step} is a link: it is read and never removed")
        elif reason is not None and unfinished_activity(path) is None:  # an unfinished one could not be removed
            damaged.append(f"checkpoint {step} is not used: {reason}; kept as {quarantine(path)}")
    return messages, damaged


def begin_step(path: StoragePath) -> None:
    """Makes room for a step about to be saved, and writes the note that it is unfinished.

    Raises `UserError` if the step already exists and is valid, because only another job can have written it.
    """
    if storage.is_there(path):
        if why_not_valid(path) is None:
            raise UserError(
                f"{path} is already a valid checkpoint, which another job has written; stop one of the jobs"
            )
        quarantine(path)
    storage.create(_note_path(path), "being written\n")


def prune(checkpoints: list[Committed], keep: set[int]) -> None:
    """Removes the checkpoints whose step is not in `keep`, except links.

    If a checkpoint cannot be removed, removes the others and then raises `OSError`.
    """
    first_error = None
    for path in [checkpoint.path for checkpoint in checkpoints if checkpoint.step not in keep]:
        if storage.is_link(path):
            continue
        try:
            storage.create(_note_path(path), "being removed\n")
            (path / manifests.MANIFEST_FILE).unlink(missing_ok=True)  # the step is no longer committed
            storage.remove(path)
            if not _note_path(path).is_dir():  # a folder with the name of the note belongs to the user
                _note_path(path).unlink(missing_ok=True)
        except OSError as error:
            first_error = first_error or error
    if first_error is not None:
        raise first_error


def unfinished_activity(path: StoragePath) -> str | None:
    """Returns what was being done to an unfinished step, such as "being written"; None if it is not unfinished."""
    if (path / manifests.MANIFEST_FILE).exists() or not _note_path(path).is_file():
        return None
    try:
        return printable(storage.read(_note_path(path)).decode(errors="replace").strip()) or "being begun"
    except FileNotFoundError:
        return None


def remove_unfinished(root: StoragePath, *, keep_notes: bool = False) -> tuple[list[str], list[str]]:
    """Removes the steps whose writing or removal was interrupted.

    Returns messages for the user in two lists: about the steps that were removed, and about those that cannot be
    removed, which the next call tries again. With `keep_notes`, the notes stay, so that a later call also removes files
    that appear later. A failed save may continue to write for a while.
    """
    removed = []
    removal_failures = []
    present: list[StoragePath] = sorted(root.iterdir()) if root.is_dir() else []
    for path in present:
        step, dot, extension = path.name.partition(".")
        suffix = dot + extension
        if step_of(step) is None or storage.is_link(path):
            continue  # the user's own files
        try:
            if suffix == NOTE and path.is_file():
                removed += _remove_noted(path.with_name(step), keep_note=keep_notes)
            elif isinstance(path, Path) and suffix.startswith(ORBAX_TEMPORARY) and path.is_dir():
                storage.remove(path)
                removed.append(f"removed {path}, which was cut off while it was being written")
        except OSError as error:
            removal_failures.append(
                f"cannot remove {path}, left by an interrupted save or removal: {error.strerror or error}"
            )
    return removed, removal_failures


def _remove_noted(path: StoragePath, *, keep_note: bool) -> list[str]:
    """Removes the files of a step that has a note, unless it is committed. Returns a message if it removed any."""
    if storage.is_link(path):
        committed, present = True, {}  # the link was made later, so the note is not about its target
    else:
        # Raises if the files cannot be listed, so that nothing is removed by mistake.
        present = storage.file_sizes(path)
        committed = manifests.MANIFEST_FILE in present
    activity = unfinished_activity(path)
    if not committed and (not isinstance(path, Path) or path.is_dir()):
        storage.remove(path)
    if committed or not keep_note:
        _note_path(path).unlink(missing_ok=True)
    return [f"removed {path}, which was cut off while it was {activity}"] if present and not committed else []


def _refuse_link(path: StoragePath) -> None:
    if storage.is_link(path):
        raise UserError(
            f"{path} was replaced by a link while it was being saved, and nothing is written through a link; make a "
            "link only after the save has ended"
        )


def _note_path(path: StoragePath) -> StoragePath:
    return path.with_name(f"{path.name}{NOTE}")


def _describe_files(path: StoragePath) -> dict[str, list[Any]]:
    """Returns the manifest entry of each file of a step: its size in bytes, and its SHA-256 if it is small."""
    sizes = storage.file_sizes(path)
    small = _sha256(path, [name for name, size in sizes.items() if size <= SMALL_BYTES])
    return {name: [size, small.get(name)] for name, size in sizes.items()}


def _sha256(path: StoragePath, names: list[str]) -> dict[str, str]:
    contents = storage.read_all(path, sorted(names))
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
