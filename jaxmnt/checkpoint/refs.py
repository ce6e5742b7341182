"""Naming a checkpoint: RUN, RUN@STEP, RUN@best, or its own directory. RUN is a run directory or where its checkpoints
are; best is the lowest held-out loss."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jaxmnt.checkpoint.commit import (
    Committed,
    newest_valid,
    open_checkpoint,
    step_directories,
    step_of,
    valid_checkpoints,
)
from jaxmnt.checkpoint.manifest import MANIFEST_FILE, DamagedError, Parent, wrong_with
from jaxmnt.checkpoint.retention import best_first, comparable_losses
from jaxmnt.config.schema import Config
from jaxmnt.data.run_tokenizer import RunTokenizer, tokenizer_of_run
from jaxmnt.errors import ConfigError, counted, printable, remark
from jaxmnt.storage import StoragePath, is_link, is_there, read, storage_path

CHECKPOINTS = "checkpoints"
RUN_FILE = "run.json"
HUGGING_FACE_FILE = "config.json"
"""What the folder of a model of Hugging Face has, and no run directory."""
BEST = "best"
YAML_ERRORS = (yaml.YAMLError, ValueError, RecursionError)
"""What reading YAML from a file that holds something else may raise."""


def find(text: str, argument: str) -> Committed:
    """The whole checkpoint that `text` names; of a run without a step, the newest.

    Raises `ConfigError`, naming `argument`, if there is none or it is not whole.
    """
    path = locate(text, argument)
    if path is None:
        root = checkpoint_root_of(text) / CHECKPOINTS
        newest = newest_valid(root)
        if newest is None:
            raise ConfigError(f"{argument}: {root} has no whole checkpoint; name another run")
        return newest
    try:
        return open_checkpoint(path)
    except DamagedError as damage:
        raise ConfigError(f"{argument}: checkpoint {path} is not whole: {damage}; name another") from damage


def locate(text: str, argument: str) -> StoragePath | None:
    """The directory of the one checkpoint that `text` names; None if it names a run without a step."""
    run, at, named_step = text.rpartition("@")
    step = step_of(named_step)
    if at and step is not None:
        root = checkpoint_root_of(run) / CHECKPOINTS
        path = root / str(step)
        if not path.is_dir():
            known = ", ".join(str(number) for number, _ in step_directories(root)) or "none"
            raise ConfigError(f"{argument}: {root} has no checkpoint of step {step}; there are: {known}")
        return path
    named = storage_path(text)
    if (named / MANIFEST_FILE).exists():
        return named
    if at and named_step == BEST and not is_there(named):
        return _best(checkpoint_root_of(run) / CHECKPOINTS, argument)
    where = checkpoint_root_of(text)
    if not (where / CHECKPOINTS).is_dir():
        if (where / RUN_FILE).exists():
            raise ConfigError(f"{argument}: {where} has no checkpoint yet; train until there is one")
        after = "; after @ comes a step, or best" if at else ""
        folder = text.removeprefix("hf:")
        if folder != text or is_there(where / HUGGING_FACE_FILE):
            raise ConfigError(
                f"{argument}: {text} must be a run: make one with python -m jaxmnt.convert from-hf {folder} RUN"
            )
        raise ConfigError(f"{argument}: {named} is neither a run directory nor a checkpoint; check the path{after}")
    return None


def _best(root: StoragePath, argument: str) -> StoragePath:
    """The directory of the whole checkpoint with the lowest held-out loss.

    Raises `ConfigError` if none has one.
    """
    if not root.is_dir():
        raise ConfigError(f"{argument}: {root.parent} is not a run directory with checkpoints; check the path")
    checkpoints = valid_checkpoints(root)
    ranked = best_first(comparable_losses(checkpoints))
    if not ranked:
        raise ConfigError(f"{argument}: no checkpoint in {root} has a held-out loss; name a step instead of {BEST}")
    best = next(checkpoint for checkpoint in checkpoints if checkpoint.step == ranked[0])
    remark(
        f"note: {BEST} is step {best.step}, with the held-out loss {best.manifest.loss:.4f}; {len(ranked)} of "
        f"{counted(len(checkpoints), 'checkpoint', 'checkpoints')} have a loss that can be compared"
    )
    return best.path


def checkpoint_root_of(run: str) -> StoragePath:
    """Where a run's checkpoints are: in its run directory, or where the config in that says."""
    directory = storage_path(run)
    if isinstance(directory, Path):
        try:
            config = yaml.safe_load(read(directory / "config.yaml").decode())
            elsewhere, start = config["checkpoint"]["dir"], _started_in(directory, config["run"]["dir"])
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, *YAML_ERRORS, KeyError, TypeError):
            elsewhere = None  # no run's config, or damaged: what is there, counts
        except OSError as error:
            raise ConfigError(
                f"{error.filename} cannot be read: {error.strerror}; check that it is mounted and readable"
            ) from error
        if elsewhere and isinstance(elsewhere, str):
            there = start / elsewhere if start and "://" not in elsewhere else None
            return _of_the_same_run(directory, there if there and there.is_dir() else storage_path(elsewhere))
    return directory


def _of_the_same_run(directory: Path, elsewhere: StoragePath) -> StoragePath:
    """Where this run's checkpoints are: `elsewhere`, or in what --fresh has set aside there.

    Raises `ConfigError` if neither is of the run that the directory is of.
    """
    ours, theirs = run_id(directory), run_id(elsewhere)
    if ours is None or theirs is None or ours == theirs:
        return elsewhere
    number = 1
    while is_there(aside := elsewhere / f"aside-{number}"):
        if run_id(aside) == ours:
            return aside
        number += 1
    raise ConfigError(
        f"{directory} is of run {printable(ours)}, and its checkpoint.dir {elsewhere} is of run {printable(theirs)} "
        "now; name the directory where its checkpoints are"
    )


class RunFile(BaseModel):
    """What run.json says of a run."""

    model_config = ConfigDict(strict=True)

    run: Annotated[str, Field(min_length=1, max_length=200)]
    """The run's id."""
    lineage: list[Parent]
    """The runs and steps that it was forked from, newest first."""
    time: float = 0.0
    """Unix seconds of the first start."""
    begun_by: dict[str, str] = {}
    """What tells the job that began it with --fresh from others."""

    @property
    def parents(self) -> list[dict[str, Any]]:
        return [parent.model_dump(exclude_none=True) for parent in self.lineage]


def read_run(directory: StoragePath) -> RunFile | None:
    """What run.json says; None if there is none, as in a new directory. Raises `ConfigError` if it is damaged."""
    path = directory / RUN_FILE
    try:
        return RunFile.model_validate(json.loads(read(path).decode()))
    except FileNotFoundError:
        if not is_link(path):
            return None
        why = "it is a link to what is not there"
    except ValidationError as error:
        why = wrong_with(error)
    except (ValueError, RecursionError) as error:
        why = str(error)
    raise ConfigError(f"{path} is damaged ({why}); remove it: the run is then identified by its newest checkpoint")


def tokenizer_of(text: str, checkpoint: Committed) -> RunTokenizer:
    """The tokenizer that the run of a checkpoint keeps, which `text` names; of an older run, that of its data.

    Raises `ConfigError` if neither is there.
    """
    config = checkpoint.config
    return tokenizer_of_run(roots_of(text, checkpoint), config.data, folders_started_in(text, checkpoint, config))


def folders_started_in(text: str, checkpoint: Committed, config: Config) -> list[Path]:
    """The folders that a checkpoint's run, which `text` names, may have been started in: from there paths of its config
    count. Empty if nothing tells.
    """
    assert config.run.dir is not None
    roots = [root for root in roots_of(text, checkpoint) if isinstance(root, Path)]
    found = [_started_in(root, config.run.dir) for root in roots]
    return [folder for folder in found if folder is not None]


def roots_of(text: str, checkpoint: Committed) -> list[StoragePath]:
    """Where the checkpoint's run may be: where `text` says, and where the checkpoint is."""
    run, at, step = text.rpartition("@")
    return [storage_path(run if at and step_of(step) is not None else text), checkpoint.path.absolute().parent.parent]


def _started_in(directory: Path, configured: str) -> Path | None:
    """The folder that a run was started in, from which the paths of its config count: the one in which its directory
    is what `run.dir` says. None if that does not tell.
    """
    run_dir = Path(os.path.normpath(configured))
    if run_dir.is_absolute() or run_dir.parts[:1] == ("..",):
        return None
    for found in (directory.absolute(), directory.resolve()):
        if found.parts[-len(run_dir.parts) :] == run_dir.parts:
            return found.parents[len(run_dir.parts) - 1]
    return None


def run_id(directory: StoragePath) -> str | None:
    """The id of the run whose checkpoints are here; None where there is no run.json to tell."""
    known = read_run(directory)
    return None if known is None else known.run
