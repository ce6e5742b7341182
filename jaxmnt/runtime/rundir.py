"""A run's directory: its config, and whether this config may go on with it."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from jaxmnt.checkpoint.commit import Committed, newest_committed, set_aside_uncommitted
from jaxmnt.cluster.environment import Identity
from jaxmnt.cluster.runtime import share
from jaxmnt.config.describe import Change, changes
from jaxmnt.config.load import dump_config, parse_config
from jaxmnt.config.schema import Config
from jaxmnt.data.sources import Sources
from jaxmnt.errors import ConfigError


@dataclass(frozen=True)
class Start:
    """Where a run stands before it goes on."""

    directory: Path
    checkpoint: Committed | None
    changes: list[Change]
    remarks: list[str]
    """Lines for people: what was set aside."""

    @property
    def step(self) -> int:
        return 0 if self.checkpoint is None else self.checkpoint.step


def open_run(config: Config, data: Sources, identity: Identity) -> Start:
    """Finds the newest committed checkpoint and compares the config with the one that the run had last.

    Process 0 looks and decides; the others are told. Raises `ConfigError` when something has changed that the
    checkpoint cannot be continued with, or when there is nothing left to do before `train.stop_after`.
    """
    assert config.run.dir is not None
    directory = Path(config.run.dir)
    decision = None
    if identity.process_id == 0:
        decision = json.dumps(_decide(config, data, directory))
    decision = json.loads(share("start", decision, identity))
    if decision["error"]:
        raise ConfigError(decision["error"])
    found = decision["checkpoint"]
    checkpoint = Committed(found["step"], Path(found["path"]), found["notes"]) if found else None
    if checkpoint is not None and not checkpoint.path.is_dir():
        raise ConfigError(
            f"run.dir: process 0 sees {checkpoint.path}, {identity.label} does not; "
            "put the run directory on a file system that all hosts share"
        )
    return Start(directory, checkpoint, [Change(*change) for change in decision["changes"]], decision["remarks"])


def write_config(directory: Path, config: Config) -> None:
    """Writes config.yaml, whole or not at all. By process 0."""
    temporary = directory / f".config.yaml.{os.getpid()}"
    temporary.write_text(dump_config(config), encoding="utf-8")
    temporary.replace(directory / "config.yaml")


def read_config(directory: Path) -> Config:
    """The resolved config of a run directory."""
    path = directory / "config.yaml"
    try:
        return parse_config(yaml.safe_load(path.read_text(encoding="utf-8")), str(path))
    except FileNotFoundError:
        raise ConfigError(f"{directory} is no run directory: it has no config.yaml") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is damaged ({error}); restore it or start a new run.dir") from error


def _decide(config: Config, data: Sources, directory: Path) -> dict[str, Any]:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return {"error": f"run.dir: {directory} cannot be made: {error.strerror}"}
    root = directory / "checkpoints"
    remarks = set_aside_uncommitted(root)
    checkpoint = newest_committed(root)
    different: list[Change] = []
    if (directory / "config.yaml").exists():
        try:
            different = changes(read_config(directory), config)
        except ConfigError as error:
            return {"error": str(error)}
    return {
        "error": _refusal(config, data, checkpoint, different),
        "checkpoint": None if checkpoint is None else asdict(checkpoint) | {"path": str(checkpoint.path)},
        "changes": different,
        "remarks": remarks,
    }


def _different_data(before: dict[str, str], now: dict[str, str]) -> str:
    """Which sources differ in what they hold, in words; empty if none does. A folder may have moved."""
    found = [f"{name} was added" for name in now if name not in before]
    found += [f"{name} was removed" for name in before if name not in now]
    found += [f"{name} holds something else than before" for name in now if before.get(name, now[name]) != now[name]]
    return ", ".join(found)


def _refusal(config: Config, data: Sources, checkpoint: Committed | None, different: list[Change]) -> str | None:
    """Why this config must not go on with this run directory, if so."""
    if checkpoint is None:
        return None
    if not (Path(config.run.dir or "") / "config.yaml").exists():
        return (
            f"run.dir: {config.run.dir} has checkpoints but no config.yaml to compare with; "
            "put it back or choose another run.dir"
        )
    breaking = [change for change in different if change.resume == "breaks"]
    if breaking:
        listed = ", ".join(f"{change.key} ({change.before} → {change.now})" for change in breaking)
        return (
            f"run.dir: {config.run.dir} has a checkpoint of step {checkpoint.step} that cannot be continued with a "
            f"changed {listed}; undo the change or choose another run.dir"
        )
    if different_data := _different_data(checkpoint.notes.get("data", {}), data.digests):
        return (
            f"data: {config.run.dir} has a checkpoint of step {checkpoint.step} that cannot be continued with other "
            f"data: {different_data}; give the same data or choose another run.dir"
        )
    stop = config.train.stop_after
    if stop is not None and stop <= checkpoint.step < config.train.steps:
        return (
            f"train.stop_after: {stop} is not past step {checkpoint.step}, where {config.run.dir} stands; "
            "raise it or leave it out"
        )
    if checkpoint.step > config.train.steps:
        return (
            f"train.steps: {config.train.steps} is less than step {checkpoint.step}, where {config.run.dir} stands; "
            "raise it or choose another run.dir"
        )
    return None
