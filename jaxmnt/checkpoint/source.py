"""Naming a checkpoint: RUN, RUN@STEP, or its own directory. RUN is a run directory or where its checkpoints are."""

import json
from pathlib import Path

import yaml

from jaxmnt.checkpoint.commit import Committed, newest_whole, open_checkpoint, step_directories
from jaxmnt.checkpoint.manifest import FILE, DamagedError
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
            elsewhere = config["checkpoint"]["dir"]
        except (FileNotFoundError, NotADirectoryError, yaml.YAMLError, ValueError, KeyError, TypeError):
            elsewhere = None  # no run's config, or damaged: what is there, counts
        if elsewhere:
            return place(str(elsewhere))
    return directory


def run_id(directory: Place) -> str | None:
    """The id of the run whose checkpoints are here; None where there is no run.json to tell."""
    path = directory / RUN_FILE
    return str(json.loads(path.read_text(encoding="utf-8"))["run"]) if path.exists() else None
