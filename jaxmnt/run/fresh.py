"""--fresh: the run that is in a directory is set aside there, whole, so that another can begin."""

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

_OWN = (
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
"""What a run keeps in its directory, in the order in which it is set aside: with run.json there, it is the run's.

What serves the next run as well stays: the lock and the key, what a launcher writes, compiled programs. So does
whatever a person has put there.
"""


def marks(environment: Mapping[str, str]) -> dict[str, str]:
    """What tells this job from others, also when it is started again; empty if nothing does."""
    found = {}
    if key := environment.get(RUN_KEY):
        found["key"] = hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()[:16]
    if job := environment.get("SLURM_JOB_ID"):
        found["slurm_job"] = job
    return found


def done_before(known: RunFile | None, environment: Mapping[str, str]) -> bool:
    """Whether it is this job that has begun the run, at an earlier start: it would begin anew again and again."""
    begun_by, ours = {} if known is None else known.begun_by, marks(environment)
    same = lambda name: name in ours and ours[name] == begun_by.get(name)
    # An interactive job may want it several times; what Slurm has requeued was asked once.
    return same("key") or (same("slurm_job") and environment.get("SLURM_RESTART_COUNT", "0") != "0")


def set_aside(places: list[StoragePath]) -> list[str]:
    """Moves what the run has in these places into a new folder in each. Returns a line for people about each."""
    lines = []
    for where in places:
        present = [name for name in _OWN if storage.is_there(where / name)]
        if not present:
            continue
        aside = _free(where)
        aside.mkdir()
        for name in present:
            path, target = where / name, aside / name
            if name == CHECKPOINTS and isinstance(path, Path) and isinstance(target, Path) and path.is_dir():
                _move_checkpoints(path, target)
            else:
                _keep_leading_there(path)
                storage.move(path, target)
        lines.append(f"the run that was in {where} is set aside in {aside}")
    return lines


def _move_checkpoints(path: Path, target: Path) -> None:
    """Where the folder is a link, the next run shall find it, too: its contents are set aside behind it."""
    if storage.is_link(path):
        real = path.resolve()
        inner = Path(str(_free(real)))
        inner.mkdir()
        for child in [child for child in real.iterdir() if step_of(child.name.partition(".")[0]) is not None]:
            _keep_leading_there(child)
            child.rename(inner / child.name)
        target.symlink_to(inner)
        return
    for child in path.iterdir():
        _keep_leading_there(child)
    path.rename(target)


def _keep_leading_there(path: StoragePath) -> None:
    """Makes a link that is relative absolute, since it is about to be moved. What it leads to is left alone."""
    if isinstance(path, Path) and path.is_symlink() and not path.readlink().is_absolute():
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(path.parent.resolve() / path.readlink())
        temporary.replace(path)


def _free(where: StoragePath) -> StoragePath:
    return storage.first_free(where / "aside", (f"-{number}" for number in count(1)))
