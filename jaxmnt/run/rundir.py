"""A run's directory, and where its checkpoints are: whose they are, and what must not be lost or mixed up there."""

import functools
from pathlib import Path
from typing import Any

import yaml

from jaxmnt.checkpoint.commit import newest_valid, out_of_reach
from jaxmnt.checkpoint.refs import CHECKPOINTS, RUN_FILE, YAML_ERRORS, RunFile, find, read_run
from jaxmnt.config.load import dump_config, parse_config
from jaxmnt.config.schema import NOT_OF_THE_RUN, Config
from jaxmnt.data.order import BranchPoint
from jaxmnt.errors import ConfigError, UserError, printable, remark
from jaxmnt.run.branch import branch_point, branch_points
from jaxmnt.run.changes import has_trained
from jaxmnt.storage import StoragePath, is_link, publish, read, storage_path
from jaxmnt.telemetry.events import last_commit


def checkpoint_root(config: Config) -> StoragePath:
    """Where the run's checkpoints are."""
    assert config.run.dir is not None
    return storage_path(config.checkpoint.dir) if config.checkpoint.dir else Path(config.run.dir)


def run_directories(config: Config) -> list[StoragePath]:
    """The run's directory, and where its checkpoints are if that is elsewhere. Each has the run's id, and a lock."""
    assert config.run.dir is not None
    directory, elsewhere = Path(config.run.dir), checkpoint_root(config)
    return [directory] if is_same_place(directory, elsewhere) else [directory, elsewhere]


def is_same_place(one: StoragePath, other: StoragePath) -> bool:
    """Whether two places are one, however they are written."""
    if isinstance(one, Path) and isinstance(other, Path):
        return one.resolve() == other.resolve()
    return one == other


class DamagedConfigError(ConfigError):
    """A config.yaml of a run that is not as it was written."""


def write_config(directory: Path, config: Config) -> None:
    """Writes config.yaml, whole or not at all. By process 0."""
    publish(directory / "config.yaml", dump_config(config))


def read_config(directory: Path) -> Config:
    """The resolved config of a run directory."""
    path = directory / "config.yaml"
    try:
        tree = yaml.safe_load(read(path).decode())
        if not isinstance(tree, dict):
            raise ValueError("it holds no settings")
        return parse_config(tree, str(path))
    except FileNotFoundError:
        raise ConfigError(f"{directory} is not a run directory: it has no config.yaml") from None
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror or error}; check that it is mounted and readable"
        ) from error
    except (ConfigError, *YAML_ERRORS) as error:
        raise DamagedConfigError(f"{path} is damaged ({_line(error)})") from error


def earlier_config(directory: Path) -> Config | None:
    """The config of the start before; None if there was none, or its file is damaged, which is said: each start writes
    it anew, and checkpoints have their own."""
    try:
        return read_config(directory) if (directory / "config.yaml").exists() else None
    except DamagedConfigError as error:
        _say_once(f"note: {error}: the run goes on as without it, and writes it anew")
        return None


@functools.cache
def _say_once(text: str) -> None:
    remark(text)


def _line(error: Exception) -> str:
    return printable(" ".join(str(error).split())[:200])


def plain_config(config: Config) -> dict[str, Any]:
    """The resolved config as plain values, as checkpoints hold it."""
    return config.model_dump(mode="json", exclude=NOT_OF_THE_RUN)


def known_run(config: Config) -> RunFile | None:
    """What run.json says; None if this is a new run. Raises `ConfigError` if two places are of different runs."""
    found = [(where, known) for where in run_directories(config) if (known := read_run(where)) is not None]
    if len({known.run for _, known in found}) > 1:
        told = printable(", ".join(f"{where} is of run {known.run}" for where, known in found))
        raise ConfigError(f"checkpoint.dir: {told}; give each run a run.dir and a checkpoint.dir of its own")
    return found[0][1] if found else None


def branches_of(config: Config) -> list[BranchPoint]:
    """Where the run of a config has branched off, or will when it starts; empty if it is no branch."""
    known = known_run(config) if config.run.dir else None
    if known is not None:
        checkpoint = newest_valid(checkpoint_root(config) / CHECKPOINTS, known.run)
        return branch_points(known.parents if checkpoint is None else checkpoint.manifest.lineage)
    if config.run.fork_from is None:
        return []
    origin = find(config.run.fork_from, "run.fork_from")
    return [branch_point(origin, config), *branch_points(origin.manifest.lineage)]


def check_checkpoints_reachable(config: Config, directory: Path) -> None:
    """Raises `UserError` if the run's checkpoints lie where nothing is now, as where a mount is away."""
    root, elsewhere = checkpoint_root(config) / CHECKPOINTS, run_directories(config)[1:]
    if is_link(root) and not root.is_dir():
        kind = UserError if has_trained(config) else ConfigError
        raise kind(
            f"run.dir: {root} is a link to a folder that does not exist; mount or create that folder, then try again"
        )
    known = read_run(directory) if elsewhere else None
    if known is None or any(read_run(where) for where in elsewhere) or not has_trained(config):
        return
    earlier = earlier_config(directory)
    if (
        earlier is not None
        and earlier.checkpoint.dir
        and is_same_place(storage_path(earlier.checkpoint.dir), elsewhere[0])
    ):
        raise UserError(
            f"checkpoint.dir: {elsewhere[0]} has no files of run {printable(known.run)}, which has used it before; "
            "check that it is mounted and try again; to begin at step 0, pass --fresh"
        )


def check_run_id(root: StoragePath, known: RunFile) -> None:
    """Raises `ConfigError` if there are whole checkpoints, and all of another run than run.json says: one is wrong."""
    other = newest_valid(root)
    if other is not None:
        theirs = printable(other.manifest.run)
        raise ConfigError(
            f"run.dir: {RUN_FILE} says that this is run {printable(known.run)}, but no whole checkpoint in {root} "
            f"belongs to it: the newest, of step {other.step}, belongs to run {theirs}; nothing was moved; if the "
            f"checkpoints are right, write {theirs} into {RUN_FILE}; otherwise move them elsewhere, or choose "
            "another run.dir"
        )


def check_no_newer_link(root: StoragePath, step: int) -> None:
    """Raises `UserError` if a later checkpoint than that of `step` is a link to where nothing is now."""
    away = [path for later, path in out_of_reach(root) if later > step]
    if away:
        raise UserError(
            f"run.dir: checkpoint {away[-1]} is a broken link; mount or restore its target, or remove the link to "
            f"continue from step {step}"
        )


def check_nothing_committed(root: StoragePath, directory: Path) -> None:
    """Raises `UserError` if checkpoints were there once: whoever begins at step 0 then, loses what has been trained."""
    step = last_commit(directory)
    if step:
        raise UserError(
            f"run.dir: {root} has no checkpoint, although this run committed one of step {step} there; check that "
            "it is mounted and try again; to begin at step 0, pass --fresh, which sets the whole run aside"
        )


def check_earlier_checkpoint_dir(config: Config, directory: Path, run: str, step: int) -> None:
    """Raises `ConfigError` if the run has come further than `step` where its checkpoints were the last time."""
    earlier, now = earlier_config(directory), checkpoint_root(config)
    if earlier is None:
        return
    before = checkpoint_root(earlier) if earlier.checkpoint.dir else directory
    if is_same_place(before, now):
        return
    newest = newest_valid(before / CHECKPOINTS, run)
    if newest is not None and newest.step > step:
        raise ConfigError(
            f"checkpoint.dir: {before} has the checkpoint of step {newest.step} of {directory}, and the newest in "
            f"{now} is of step {step}; undo the change, move the checkpoints, or choose another run.dir"
        )
