"""Naming a checkpoint: RUN, RUN@STEP, or its own directory. RUN is a run directory or where its checkpoints are."""

import json
import os
from pathlib import Path

import yaml

from jaxmnt.checkpoint.commit import Committed, newest_whole, open_checkpoint, step_directories
from jaxmnt.checkpoint.manifest import FILE, DamagedError
from jaxmnt.config.load import parse_config
from jaxmnt.data.run_tokenizer import RunTokenizer, of_run
from jaxmnt.errors import ConfigError
from jaxmnt.storage import Place, place

FOLDER = "checkpoints"
RUN_FILE = "run.json"


def find(text: str, argument: str) -> Committed:
    """The whole checkpoint that `text` names; of a run without a step, the newest.

    Raises `ConfigError`, naming `argument`, if there is none or it is not whole.
    """
    path = locate(text, argument)
    if path is None:
        root = home(text) / FOLDER
        newest = newest_whole(root)
        if newest is None:
            raise ConfigError(f"{argument}: {root} has no whole checkpoint; name another run")
        return newest
    try:
        return open_checkpoint(path)
    except DamagedError as damage:
        raise ConfigError(f"{argument}: checkpoint {path} is not whole: {damage}; name another") from damage


def locate(text: str, argument: str) -> Place | None:
    """The directory of the one checkpoint that `text` names; None if it names a run without a step."""
    run, at, step = text.rpartition("@")
    if at and step.isdigit():
        root = home(run) / FOLDER
        path = root / step
        if not path.is_dir():
            known = ", ".join(str(number) for number, _ in step_directories(root)) or "none"
            raise ConfigError(f"{argument}: {root} has no checkpoint of step {step}; there are: {known}")
        return path
    named = place(text)
    if (named / FILE).exists():
        return named
    where = home(text)
    if not (where / FOLDER).is_dir():
        if (where / RUN_FILE).exists():
            raise ConfigError(f"{argument}: {where} has no checkpoint yet; train until there is one")
        raise ConfigError(f"{argument}: {named} is neither a run directory nor a checkpoint; check the path")
    return None


def home(run: str) -> Place:
    """Where a run's checkpoints are: in its run directory, or where the config in that says."""
    directory = place(run)
    if isinstance(directory, Path):
        try:
            config = yaml.safe_load((directory / "config.yaml").read_text(encoding="utf-8"))
            elsewhere, start = config["checkpoint"]["dir"], started_in(directory, config["run"]["dir"])
        except (FileNotFoundError, NotADirectoryError, yaml.YAMLError, ValueError, KeyError, TypeError):
            elsewhere = None  # no run's config, or damaged: what is there, counts
        if elsewhere:
            there = start / str(elsewhere) if start and "://" not in str(elsewhere) else None
            return there if there and there.is_dir() else place(str(elsewhere))
    return directory


def tokenizer_of(text: str, checkpoint: Committed) -> RunTokenizer:
    """The tokenizer that the run of a checkpoint keeps, which `text` names; of an older run, that of its data.

    Raises `ConfigError` if neither is there.
    """
    run, at, step = text.rpartition("@")
    homes = [place(run if at and step.isdigit() else text), checkpoint.path.absolute().parent.parent]
    config = parse_config(checkpoint.manifest.config, f"the config in {checkpoint.path}")
    assert config.run.dir is not None
    folders = [started_in(home, config.run.dir) for home in homes if isinstance(home, Path)]
    return of_run(homes, config.data, [folder for folder in folders if folder is not None])


def started_in(directory: Path, configured: str) -> Path | None:
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


def run_id(directory: Place) -> str | None:
    """The id of the run whose checkpoints are here; None where there is no run.json to tell."""
    path = directory / RUN_FILE
    return str(json.loads(path.read_text(encoding="utf-8"))["run"]) if path.exists() else None
