"""Implements --fresh: sets aside the run in a directory, within that directory, so that another run can begin there."""

import hashlib
from collections.abc import Mapping
from itertools import count
from pathlib import Path

from jaxmnt import storage
from jaxmnt.checkpoint.commit import step_of
from jaxmnt.checkpoint.refs import CHECKPOINTS, RUN_FILE, RunFile
from jaxmnt.data.grain_source import INDEX_FOLDER
from jaxmnt.distributed.authentication import RUN_KEY
from jaxmnt.run.rundir import ACCEPTED_FILE
from jaxmnt.storage import StoragePath
from jaxmnt.telemetry.events import METRICS, PHASE_LINES, RESOURCES

_RUN_FILES = (
    *(name + suffix for name in (METRICS, PHASE_LINES, RESOURCES) for suffix in ("", ".damaged")),
    "report.html",
    "profiles",
    "tensorboard",
    "wandb",
    "events",
    "hangs",
    "tokenizer",
    "huggingface",
    INDEX_FOLDER,
    "config.yaml",
    ACCEPTED_FILE,
    CHECKPOINTS,
    RUN_FILE,
)
"""Files and folders of a run in its directory, in the order in which they are set aside. run.json comes last, because
until it is moved the directory belongs to the old run.

Files that the next run uses as well stay: the lock and the key, the files of a launcher, and compiled programs. Files
of the user stay, too.
"""


def job_identifiers(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns identifiers of this job, which stay the same when the job is started again; empty if it has none."""
    identifiers = {}
    if key := environment.get(RUN_KEY):
        identifiers["key"] = hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()[:16]
    if job := environment.get("SLURM_JOB_ID"):
        identifiers["slurm_job"] = job
    return identifiers


def was_begun_by_this_job(run_file: RunFile | None, environment: Mapping[str, str]) -> bool:
    """True if an earlier start of this job began the run. Then a restart continues the run, in spite of --fresh."""
    begun_by = {} if run_file is None else run_file.begun_by
    identifiers = job_identifiers(environment)
    is_same = lambda name: name in identifiers and identifiers[name] == begun_by.get(name)
    # In an interactive Slurm job the user may pass --fresh several times on purpose. A requeued job only repeats its
    # command.
    is_requeued = environment.get("SLURM_RESTART_COUNT", "0") != "0"
    return is_same("key") or (is_same("slurm_job") and is_requeued)


def set_aside(directories: list[StoragePath]) -> list[str]:
    """Moves the run's files in each of these directories into a new folder in it.

    Returns a message for each directory.
    """
    messages = []
    for directory in directories:
        present = [name for name in _RUN_FILES if storage.is_there(directory / name)]
        if not present:
            continue
        new_folder = _free_folder(directory)
        new_folder.mkdir()
        for name in present:
            path, target = directory / name, new_folder / name
            if name == CHECKPOINTS and isinstance(path, Path) and isinstance(target, Path) and path.is_dir():
                _move_checkpoints(path, target)
            else:
                _make_link_absolute(path)
                storage.move(path, target)
        messages.append(f"the run that was in {directory} is set aside in {new_folder}")
    return messages


def _move_checkpoints(path: Path, target: Path) -> None:
    """Moves the folder of checkpoints.

    If the folder is a link, the link stays for the next run, and the checkpoints move into a new folder in its
    target.
    """
    if storage.is_link(path):
        folder = path.resolve()
        new_folder = Path(str(_free_folder(folder)))
        new_folder.mkdir()
        checkpoints = [child for child in folder.iterdir() if step_of(child.name.partition(".")[0]) is not None]
        for child in checkpoints:
            _make_link_absolute(child)
            child.rename(new_folder / child.name)
        target.symlink_to(new_folder)
        return
    for child in path.iterdir():
        _make_link_absolute(child)
    path.rename(target)


def _make_link_absolute(path: StoragePath) -> None:
    """Makes a relative link absolute, so that it can be moved. Does not touch its target."""
    if isinstance(path, Path) and path.is_symlink() and not path.readlink().is_absolute():
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(path.parent.resolve() / path.readlink())
        temporary.replace(path)


def _free_folder(directory: StoragePath) -> StoragePath:
    """Returns the first of aside-1, aside-2, … that does not exist in `directory`."""
    return storage.first_free(directory / "aside", (f"-{number}" for number in count(1)))
