"""--fresh: sets aside the whole run in a directory, inside that directory, so that another run can begin."""

import hashlib
from collections.abc import Mapping
from itertools import count
from pathlib import Path

from jaxmnt import storage
from jaxmnt.checkpoint.commit import step_of
from jaxmnt.checkpoint.refs import CHECKPOINTS, RUN_FILE, RunFile
from jaxmnt.data.grain_source import INDEX_FOLDER
from jaxmnt.distributed.authentication import RUN_KEY
from jaxmnt.run.rundir import ACCEPTED
from jaxmnt.storage import StoragePath
from jaxmnt.telemetry.events import METRICS, PHASE_LINES, RESOURCES

_RUN_FILES = (
    *(name + end for name in (METRICS, PHASE_LINES, RESOURCES) for end in ("", ".damaged")),
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
    ACCEPTED,
    CHECKPOINTS,
    RUN_FILE,
)
"""Files and folders of a run in its directory, in the order in which they are set aside. run.json comes last: until
then the directory still belongs to the old run.

What the next run uses as well stays: the lock and the key, the files of a launcher, compiled programs. So do files
that the user has put there.
"""


def job_identifiers(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns identifiers of this job, which stay the same when it is started again; empty if there are none."""
    identifiers = {}
    if key := environment.get(RUN_KEY):
        identifiers["key"] = hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()[:16]
    if job := environment.get("SLURM_JOB_ID"):
        identifiers["slurm_job"] = job
    return identifiers


def begun_by_this_job(run_file: RunFile | None, environment: Mapping[str, str]) -> bool:
    """True if an earlier start of this job has begun the run: each restart of the job would begin anew otherwise."""
    begun_by = {} if run_file is None else run_file.begun_by
    ours = job_identifiers(environment)
    same = lambda name: name in ours and ours[name] == begun_by.get(name)
    # An interactive Slurm job may pass --fresh several times on purpose; a requeued job repeats its only command.
    return same("key") or (same("slurm_job") and environment.get("SLURM_RESTART_COUNT", "0") != "0")


def set_aside(directories: list[StoragePath]) -> list[str]:
    """Moves the run's files in each of these directories into a new folder there. Returns a message about each."""
    messages = []
    for directory in directories:
        present = [name for name in _RUN_FILES if storage.is_there(directory / name)]
        if not present:
            continue
        aside = _free_folder(directory)
        aside.mkdir()
        for name in present:
            path, target = directory / name, aside / name
            if name == CHECKPOINTS and isinstance(path, Path) and isinstance(target, Path) and path.is_dir():
                _move_checkpoints(path, target)
            else:
                _make_link_absolute(path)
                storage.move(path, target)
        messages.append(f"the run that was in {directory} is set aside in {aside}")
    return messages


def _move_checkpoints(path: Path, target: Path) -> None:
    """Moves the folder of checkpoints. A folder that is a link stays for the next run; its contents move inside it."""
    if storage.is_link(path):
        folder = path.resolve()
        aside = Path(str(_free_folder(folder)))
        aside.mkdir()
        for child in [child for child in folder.iterdir() if step_of(child.name.partition(".")[0]) is not None]:
            _make_link_absolute(child)
            child.rename(aside / child.name)
        target.symlink_to(aside)
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
