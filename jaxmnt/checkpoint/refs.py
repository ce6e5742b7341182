"""Finds the checkpoint that a user names: RUN, RUN@STEP, RUN@best, or the checkpoint's own directory.

RUN is a run directory or the directory of its checkpoints; best is the checkpoint with the lowest held-out loss.
"""

import json
import os
from itertools import count
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
from jaxmnt.config.load import HUGGING_FACE_PREFIX
from jaxmnt.config.schema import Config
from jaxmnt.data.run_tokenizer import RunTokenizer, tokenizer_of_run
from jaxmnt.errors import ConfigError, counted, printable, remark_once
from jaxmnt.storage import StoragePath, is_link, is_there, read, storage_path

CHECKPOINTS = "checkpoints"
RUN_FILE = "run.json"
HUGGING_FACE_SUBFOLDER = "huggingface"
"""Folder of a run with the files that came with a model from Hugging Face."""
_HUGGING_FACE_FILE = "config.json"
"""A file that exists in the folder of a Hugging Face model, but not in a run directory."""
BEST = "best"
YAML_ERRORS = (yaml.YAMLError, ValueError, RecursionError)
"""Errors that the reading of YAML may raise if the file contains something else."""


def find(text: str, argument: str) -> Committed:
    """Returns the valid checkpoint that `text` names: the newest one if `text` is a run without a step.

    Raises `ConfigError` if there is no such checkpoint or it is not valid. The error names `argument`, the option or
    config key that `text` was given for.
    """
    path = locate(text, argument)
    if path is None:
        root = checkpoint_root_of(text) / CHECKPOINTS
        newest = newest_valid(root)
        if newest is None:
            raise ConfigError(f"{argument}: {root} has no valid checkpoint; name another run")
        return newest
    try:
        return open_checkpoint(path)
    except DamagedError as damage:
        raise ConfigError(f"{argument}: checkpoint {path} is not valid: {damage}; name another") from damage


def locate(text: str, argument: str) -> StoragePath | None:
    """Returns the directory of the checkpoint that `text` names; None if `text` is a run without a step."""
    run, separator, step_text = text.rpartition("@")
    # RUN@STEP
    step = step_of(step_text)
    if separator and step is not None:
        root = checkpoint_root_of(run) / CHECKPOINTS
        path = root / str(step)
        if not path.is_dir():
            steps = ", ".join(str(number) for number, _ in step_directories(root)) or "none"
            raise ConfigError(f"{argument}: {root} has no checkpoint of step {step}; there are: {steps}")
        return path
    # A checkpoint's own directory. Check for it before RUN@best, because a directory's name may contain an @.
    path = storage_path(text)
    if (path / MANIFEST_FILE).exists():
        return path
    if separator and step_text == BEST and not is_there(path):
        return _best_checkpoint(checkpoint_root_of(run) / CHECKPOINTS, argument)
    # RUN
    run_root = checkpoint_root_of(text)
    if (run_root / CHECKPOINTS).is_dir():
        return None
    if (run_root / RUN_FILE).exists():
        raise ConfigError(f"{argument}: {run_root} has no checkpoint yet; train until there is one")
    hint = "; after @ give a step, or best" if separator else ""
    folder = text.removeprefix(HUGGING_FACE_PREFIX)
    if folder != text or is_there(run_root / _HUGGING_FACE_FILE):
        raise ConfigError(
            f"{argument}: {text} must be a run: make one with python -m jaxmnt.convert from-hf {folder} RUN"
        )
    raise ConfigError(f"{argument}: {path} is neither a run directory nor a checkpoint; check the path{hint}")


def named_directory(text: str) -> StoragePath:
    """Returns the directory that `text` names, without a step: a run's, or a checkpoint's own. It need not exist."""
    run, separator, step_text = text.rpartition("@")
    path = storage_path(text)
    has_step = bool(separator) and (step_of(step_text) is not None or (step_text == BEST and not is_there(path)))
    return storage_path(run) if has_step else path


def _best_checkpoint(root: StoragePath, argument: str) -> StoragePath:
    """Returns the directory of the valid checkpoint with the lowest held-out loss.

    Raises `ConfigError` if no checkpoint has a held-out loss.
    """
    if not root.is_dir():
        raise ConfigError(f"{argument}: {root.parent} is not a run directory with checkpoints; check the path")
    checkpoints = valid_checkpoints(root)
    ranked_steps = best_first(comparable_losses(checkpoints))
    if not ranked_steps:
        raise ConfigError(f"{argument}: no checkpoint in {root} has a held-out loss; name a step instead of {BEST}")
    best = next(checkpoint for checkpoint in checkpoints if checkpoint.step == ranked_steps[0])
    remark_once(
        f"note: {BEST} is step {best.step}, with the held-out loss {best.manifest.loss:.4f}; {len(ranked_steps)} of "
        f"{counted(len(checkpoints), 'checkpoint', 'checkpoints')} have a loss that can be compared"
    )
    return best.path


def checkpoint_root_of(run: str) -> StoragePath:
    """Returns the directory that contains a run's folder of checkpoints.

    This is the run directory, or `checkpoint.dir` of the run's config if that is set.
    """
    directory = storage_path(run)
    if isinstance(directory, Path):
        try:
            config = yaml.safe_load(read(directory / "config.yaml").decode())
            configured = config["checkpoint"]["dir"]
            start_folder = _start_folder(directory, config["run"]["dir"])
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, *YAML_ERRORS, KeyError, TypeError):
            configured = None  # not a run's config, or a damaged one, so look in the directory itself
        except OSError as error:
            raise ConfigError(
                f"{error.filename} cannot be read: {error.strerror}; check that it is mounted and readable"
            ) from error
        if configured and isinstance(configured, str):
            # The path may be relative to the folder in which the run was started.
            from_start = start_folder / configured if start_folder and "://" not in configured else None
            root = from_start if from_start and from_start.is_dir() else storage_path(configured)
            return _root_of_same_run(directory, root)
    return directory


def _root_of_same_run(directory: Path, configured_root: StoragePath) -> StoragePath:
    """Returns the directory that contains the checkpoints of the run in `directory`.

    This is `configured_root`, or a folder in it that --fresh has set aside. Raises `ConfigError` if all of these belong
    to other runs.
    """
    run, configured_run = run_id(directory), run_id(configured_root)
    if run is None or configured_run is None or run == configured_run:
        return configured_root
    for number in count(1):
        folder = configured_root / f"aside-{number}"
        if not is_there(folder):
            break
        if run_id(folder) == run:
            return folder
    raise ConfigError(
        f"{directory} belongs to run {printable(run)}, but its checkpoint.dir {configured_root} now belongs to run "
        f"{printable(configured_run)}; name the directory where its checkpoints are"
    )


class RunFile(BaseModel):
    """The content of run.json."""

    model_config = ConfigDict(strict=True)

    run: Annotated[str, Field(min_length=1, max_length=200)]
    """The run's id."""
    lineage: list[Parent]
    """The runs and steps that this run was forked from, newest first."""
    time: float = 0.0
    """Time of the first start, in Unix seconds."""
    begun_by: dict[str, str] = {}
    """Identifiers of the job that began the run with --fresh."""

    @property
    def parents(self) -> list[dict[str, Any]]:
        return [parent.model_dump(exclude_none=True) for parent in self.lineage]


def read_run(directory: StoragePath) -> RunFile | None:
    """Reads run.json in a directory; returns None if it does not exist. Raises `ConfigError` if it is damaged."""
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
    raise ConfigError(f"{path} is damaged ({why}); remove it, and the run will be identified by its newest checkpoint")


def tokenizer_of(text: str, checkpoint: Committed) -> RunTokenizer:
    """Returns the tokenizer that the run of `checkpoint`, which `text` names, keeps in its directory.

    Older runs keep none there, so this returns the tokenizer of their data. Raises `ConfigError` if neither exists.
    """
    config = checkpoint.config
    return tokenizer_of_run(roots_of(text, checkpoint), config.data, start_folders(text, checkpoint, config))


def start_folders(text: str, checkpoint: Committed, config: Config) -> list[Path]:
    """Returns the folders in which the run of `checkpoint`, which `text` names, may have been started.

    Relative paths in the run's config are relative to that folder. The list is empty if it cannot be determined.
    """
    assert config.run.dir is not None
    roots = [root for root in roots_of(text, checkpoint) if isinstance(root, Path)]
    folders = [_start_folder(root, config.run.dir) for root in roots]
    return [folder for folder in folders if folder is not None]


def roots_of(text: str, checkpoint: Committed) -> list[StoragePath]:
    """Returns the possible directories of the run of `checkpoint`: the one that `text` names, and the one that contains
    the checkpoint."""
    return [named_directory(text), checkpoint.path.absolute().parent.parent]


def _start_folder(directory: Path, configured: str) -> Path | None:
    """Returns the folder in which a run was started, to which the paths in its config are relative.

    From this folder, `configured`, the `run.dir` in the config, leads to `directory`. Returns None if the folder cannot
    be determined.
    """
    run_dir = Path(os.path.normpath(configured))
    if run_dir.is_absolute() or run_dir.parts[:1] == ("..",):
        return None
    for path in (directory.absolute(), directory.resolve()):
        if path.parts[-len(run_dir.parts) :] == run_dir.parts:
            return path.parents[len(run_dir.parts) - 1]
    return None


def run_id(directory: StoragePath) -> str | None:
    """Returns the id of the run whose checkpoints are in `directory`; None if there is no run.json."""
    run_file = read_run(directory)
    return None if run_file is None else run_file.run
