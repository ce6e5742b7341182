"""Finds the checkpoint that a user names: RUN, RUN@STEP, RUN@best, or the checkpoint's own directory.

RUN is a run directory or the directory of its checkpoints; best is the checkpoint with the lowest held-out loss.
"""

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
from jaxmnt.checkpoint.manifest import MANIFEST_FILE, DamagedError, Parent, first_problem
from jaxmnt.checkpoint.retention import best_first, comparable_losses
from jaxmnt.config.schema import Config
from jaxmnt.data.run_tokenizer import RunTokenizer, tokenizer_of_run
from jaxmnt.errors import ConfigError, counted, printable, remark
from jaxmnt.storage import StoragePath, is_link, is_there, read, storage_path

CHECKPOINTS = "checkpoints"
RUN_FILE = "run.json"
HUGGING_FACE_FILE = "config.json"
"""A file that a Hugging Face model folder has, and a run directory does not."""
BEST = "best"
YAML_ERRORS = (yaml.YAMLError, ValueError, RecursionError)
"""Errors that reading YAML may raise if the file contains something else."""


def find(text: str, argument: str) -> Committed:
    """Returns the valid checkpoint that `text` names: the newest one if `text` is a run without a step.

    Raises `ConfigError`, which names `argument`, if there is none or it is not valid.
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
    """Returns the directory of the checkpoint that `text` names; None if it names a run without a step."""
    run, at, named_step = text.rpartition("@")
    # RUN@STEP
    step = step_of(named_step)
    if at and step is not None:
        root = checkpoint_root_of(run) / CHECKPOINTS
        path = root / str(step)
        if not path.is_dir():
            steps = ", ".join(str(number) for number, _ in step_directories(root)) or "none"
            raise ConfigError(f"{argument}: {root} has no checkpoint of step {step}; there are: {steps}")
        return path
    # A checkpoint's own directory. It comes before RUN@best, because a directory's name may contain an @.
    named = storage_path(text)
    if (named / MANIFEST_FILE).exists():
        return named
    if at and named_step == BEST and not is_there(named):
        return _best(checkpoint_root_of(run) / CHECKPOINTS, argument)
    # RUN
    run_root = checkpoint_root_of(text)
    if (run_root / CHECKPOINTS).is_dir():
        return None
    if (run_root / RUN_FILE).exists():
        raise ConfigError(f"{argument}: {run_root} has no checkpoint yet; train until there is one")
    hint = "; after @ comes a step, or best" if at else ""
    folder = text.removeprefix("hf:")
    if folder != text or is_there(run_root / HUGGING_FACE_FILE):
        raise ConfigError(
            f"{argument}: {text} must be a run: make one with python -m jaxmnt.convert from-hf {folder} RUN"
        )
    raise ConfigError(f"{argument}: {named} is neither a run directory nor a checkpoint; check the path{hint}")


def _best(root: StoragePath, argument: str) -> StoragePath:
    """Returns the directory of the valid checkpoint with the lowest held-out loss.

    Raises `ConfigError` if no checkpoint has a held-out loss.
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
    """Returns the directory that has a run's checkpoints: its run directory, or `checkpoint.dir` of its config."""
    directory = storage_path(run)
    if isinstance(directory, Path):
        try:
            config = yaml.safe_load(read(directory / "config.yaml").decode())
            elsewhere = config["checkpoint"]["dir"]
            start_folder = _start_folder(directory, config["run"]["dir"])
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, *YAML_ERRORS, KeyError, TypeError):
            elsewhere = None  # not a run's config, or a damaged one: look in the directory itself
        except OSError as error:
            raise ConfigError(
                f"{error.filename} cannot be read: {error.strerror}; check that it is mounted and readable"
            ) from error
        if elsewhere and isinstance(elsewhere, str):
            # A relative path counts from the folder that the run was started in.
            relative = start_folder / elsewhere if start_folder and "://" not in elsewhere else None
            return _root_of_same_run(directory, relative if relative and relative.is_dir() else storage_path(elsewhere))
    return directory


def _root_of_same_run(directory: Path, elsewhere: StoragePath) -> StoragePath:
    """Returns the directory with this run's checkpoints: `elsewhere`, or a folder that --fresh has set aside there.

    Raises `ConfigError` if neither belongs to the run of `directory`.
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
    """The content of run.json."""

    model_config = ConfigDict(strict=True)

    run: Annotated[str, Field(min_length=1, max_length=200)]
    """The run's id."""
    lineage: list[Parent]
    """The runs and steps that it was forked from, newest first."""
    time: float = 0.0
    """Unix seconds of the first start."""
    begun_by: dict[str, str] = {}
    """Identifiers of the job that began the run with --fresh."""

    @property
    def parents(self) -> list[dict[str, Any]]:
        return [parent.model_dump(exclude_none=True) for parent in self.lineage]


def read_run(directory: StoragePath) -> RunFile | None:
    """Reads run.json; returns None if there is none, as in a new directory. Raises `ConfigError` if it is damaged."""
    path = directory / RUN_FILE
    try:
        return RunFile.model_validate(json.loads(read(path).decode()))
    except FileNotFoundError:
        if not is_link(path):
            return None
        why = "it is a broken link"
    except ValidationError as error:
        why = first_problem(error)
    except (ValueError, RecursionError) as error:
        why = str(error)
    raise ConfigError(f"{path} is damaged ({why}); remove it: the run is then identified by its newest checkpoint")


def tokenizer_of(text: str, checkpoint: Committed) -> RunTokenizer:
    """Returns the tokenizer kept by the run of the checkpoint that `text` names; for older runs, that of its data.

    Raises `ConfigError` if neither exists.
    """
    config = checkpoint.config
    return tokenizer_of_run(roots_of(text, checkpoint), config.data, start_folders(text, checkpoint, config))


def start_folders(text: str, checkpoint: Committed, config: Config) -> list[Path]:
    """Returns the folders in which the run of the checkpoint that `text` names may have been started.

    Relative paths of its config are relative to that folder. Empty if it cannot be determined.
    """
    assert config.run.dir is not None
    roots = [root for root in roots_of(text, checkpoint) if isinstance(root, Path)]
    folders = [_start_folder(root, config.run.dir) for root in roots]
    return [folder for folder in folders if folder is not None]


def roots_of(text: str, checkpoint: Committed) -> list[StoragePath]:
    """Returns the possible directories of the checkpoint's run: the one that `text` names, and the checkpoint's own."""
    run, at, step = text.rpartition("@")
    return [storage_path(run if at and step_of(step) is not None else text), checkpoint.path.absolute().parent.parent]


def _start_folder(directory: Path, configured: str) -> Path | None:
    """Returns the folder that a run was started in, to which the paths of its config are relative.

    It is the folder in which `configured`, the run's `run.dir`, is `directory`. None if that cannot be determined.
    """
    run_dir = Path(os.path.normpath(configured))
    if run_dir.is_absolute() or run_dir.parts[:1] == ("..",):
        return None
    for path in (directory.absolute(), directory.resolve()):
        if path.parts[-len(run_dir.parts) :] == run_dir.parts:
            return path.parents[len(run_dir.parts) - 1]
    return None


def run_id(directory: StoragePath) -> str | None:
    """Returns the id of the run whose checkpoints are in `directory`; None if it has no run.json."""
    run_file = read_run(directory)
    return None if run_file is None else run_file.run
