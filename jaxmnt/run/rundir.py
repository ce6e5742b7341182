"""Reads a run's directory, and the directory of its checkpoints: which run they belong to, and what they contain."""

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from jaxmnt.checkpoint.commit import Committed, newest_valid, step_directories, unfinished_activity, unreachable_steps
from jaxmnt.checkpoint.refs import CHECKPOINTS, YAML_ERRORS, RunFile, find, read_run
from jaxmnt.config.describe import Change, maths_settings
from jaxmnt.config.load import dump_config, parse_config
from jaxmnt.config.schema import CLUSTER_SECTIONS, Config
from jaxmnt.data.order import BranchPoint
from jaxmnt.errors import ConfigError, UnreadableError, UserError, printable, remark
from jaxmnt.run.branch import branch_point, branch_points
from jaxmnt.storage import StoragePath, is_link, publish, read, storage_path
from jaxmnt.strict_json import json_text
from jaxmnt.telemetry.events import event_file, last_commit, records


def checkpoint_root(config: Config) -> StoragePath:
    """Returns the directory that contains the folder of the run's checkpoints."""
    return storage_path(config.checkpoint.dir) if config.checkpoint.dir else config.run_dir


def run_directories(config: Config) -> list[StoragePath]:
    """Returns the run's directory, and that of its checkpoints if it is another one. Each has a run.json and a lock."""
    directory, elsewhere = config.run_dir, checkpoint_root(config)
    return [directory] if is_same_directory(directory, elsewhere) else [directory, elsewhere]


def is_same_directory(first: StoragePath, second: StoragePath) -> bool:
    """Returns True if two paths are the same directory, also through links and relative paths."""
    if isinstance(first, Path) and isinstance(second, Path):
        return first.resolve() == second.resolve()
    return first == second


def has_trained(config: Config) -> bool:
    """Returns True if the run has a checkpoint, or an event of a step, as far as these can be read."""
    for directory in (config.run_dir, checkpoint_root(config)):
        with suppress(OSError):
            if step_directories(directory / CHECKPOINTS):
                return True
    with suppress(OSError):
        return any(event["kind"] == "started" for event in records(event_file(config.run_dir, 0)))
    return False


@contextmanager
def unreadable_is_retryable(config: Config) -> Iterator[None]:
    """Makes unreadable files end a run that has trained with exit code 1, which is retried, instead of 2."""
    try:
        yield
    except ConfigError as error:
        unreadable = isinstance(error, UnreadableError) or isinstance(error.__cause__, OSError)
        if not unreadable or not has_trained(config) or not _names_data_of_the_run(config):
            raise
        text = f"{error} (this run has read it before; once it is available again, start the run again)"
        raise UserError(text).blaming(hosts=error.hosts, processes=error.processes) from error


def _names_data_of_the_run(config: Config) -> bool:
    """Returns whether the config names the data that the run's start before has read; another path may be a typo."""
    earlier = earlier_config(config.run_dir)
    return earlier is None or (
        earlier.data.named_sources == config.data.named_sources and earlier.data.eval_sets == config.data.eval_sets
    )


class DamagedConfigError(ConfigError):
    """Raised if the config.yaml of a run is damaged."""


def write_config(directory: Path, config: Config) -> None:
    """Writes config.yaml atomically. Only process 0 calls this."""
    publish(directory / "config.yaml", dump_config(config))


def read_config(directory: Path) -> Config:
    """Reads the resolved config of a run directory. Raises `ConfigError`."""
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
        why = printable(" ".join(str(error).split())[:200])
        raise DamagedConfigError(f"{path} is damaged ({why})") from error


def earlier_config(directory: Path) -> Config | None:
    """Returns the config of the previous start; None if there was none.

    Also None, with a remark, if its file is damaged: each start writes it again, and checkpoints have their own.
    """
    try:
        return read_config(directory) if (directory / "config.yaml").exists() else None
    except DamagedConfigError as error:
        _remark_once(f"note: {error}: the run continues without it, and writes it again")
        return None


@functools.cache
def _remark_once(text: str) -> None:
    remark(text)


def plain_config(config: Config) -> dict[str, Any]:
    """Returns the resolved config as plain values, as checkpoints contain it."""
    return config.model_dump(mode="json", exclude=CLUSTER_SECTIONS)


def run_file_of(config: Config) -> RunFile | None:
    """Reads run.json; returns None for a new run. Raises `ConfigError` if two directories are of different runs."""
    run_files = [(path, run_file) for path in run_directories(config) if (run_file := read_run(path)) is not None]
    if len({run_file.run for _, run_file in run_files}) > 1:
        runs = printable(", ".join(f"{path} is of run {run_file.run}" for path, run_file in run_files))
        raise ConfigError(f"checkpoint.dir: {runs}; give each run a run.dir and a checkpoint.dir of its own")
    return run_files[0][1] if run_files else None


def branches_of(config: Config) -> list[BranchPoint]:
    """Returns where the run of a config has branched off, or will when it starts; empty if it is not a branch."""
    run_file = run_file_of(config) if config.run.dir else None
    if run_file is not None:
        checkpoint = newest_valid(checkpoint_root(config) / CHECKPOINTS, run_file.run)
        return branch_points(run_file.parents if checkpoint is None else checkpoint.manifest.lineage)
    if config.run.fork_from is None:
        return []
    origin = find(config.run.fork_from, "run.fork_from")
    return [branch_point(origin, config), *branch_points(origin.manifest.lineage)]


def check_checkpoints_reachable(config: Config) -> None:
    """Raises `UserError` if the directory of the run's checkpoints is empty now, such as if it is not mounted."""
    directory = config.run_dir
    root = checkpoint_root(config) / CHECKPOINTS
    elsewhere = run_directories(config)[1:]
    if is_link(root) and not root.is_dir():
        kind = UserError if has_trained(config) else ConfigError
        raise kind(
            f"run.dir: {root} is a link to a folder that does not exist; mount or create that folder, then try again"
        )
    run_file = read_run(directory) if elsewhere else None
    if run_file is None or any(read_run(path) for path in elsewhere) or not has_trained(config):
        return
    # An empty checkpoint.dir is an error only if it is where the checkpoints were at the previous start.
    previous = _previous_root(directory)
    if previous is not None and is_same_directory(previous, elsewhere[0]):
        raise UserError(
            f"checkpoint.dir: {elsewhere[0]} has no files of run {printable(run_file.run)}, which has used it before; "
            "check that it is mounted and try again; to begin at step 0, pass --fresh"
        )


def _previous_root(directory: Path) -> StoragePath | None:
    """Returns the directory of the run's checkpoints at the previous start; None if it is not known."""
    earlier = earlier_config(directory)
    if earlier is None:
        return None
    return checkpoint_root(earlier) if earlier.checkpoint.dir else directory


ACCEPTED = "accepted.json"
"""File in a run's directory with the values, by config key, that were accepted with --accept-changes."""


@dataclass(frozen=True)
class RunDirectory:
    """The contents of a run's directories, read once by the job that has the locks."""

    directory: Path
    root: StoragePath
    """The folder of the checkpoints."""
    run_file: RunFile | None = None
    """The content of run.json; None if this is a new run."""
    checkpoint: Committed | None = None
    """The newest valid checkpoint of the run; without a run.json, of any run."""
    foreign_checkpoint: Committed | None = None
    """The newest valid checkpoint of another run, if `checkpoint` is None."""
    checkpoint_elsewhere: Committed | None = None
    """The run's newest valid checkpoint in the previous start's checkpoint directory, if that was another one."""
    unreachable: list[tuple[int, StoragePath]] = field(default_factory=list)
    """(step, path) of steps that are broken links, oldest first."""
    damaged: bool = False
    """True if `checkpoint` is None and a step was set aside as damaged, or will be when the folder is cleaned up."""
    committed: int = 0
    """If `checkpoint` is None, the last step that the run committed according to its events; 0 if there is none."""
    accepted: dict[str, Any] = field(default_factory=dict)
    """If there is a checkpoint, the values that were accepted at earlier starts, by key."""

    @property
    def run(self) -> str | None:
        return None if self.run_file is None else self.run_file.run

    @property
    def step(self) -> int:
        return 0 if self.checkpoint is None else self.checkpoint.step


def read_directory(config: Config) -> RunDirectory:
    """Reads the run's directories.

    Raises `ConfigError` for files that are damaged, and `OtherFormatError` for a checkpoint of another format version.
    """
    directory, root = config.run_dir, checkpoint_root(config) / CHECKPOINTS
    run_file = run_file_of(config)
    checkpoint = newest_valid(root, None if run_file is None else run_file.run)
    foreign_checkpoint = checkpoint_elsewhere = None
    if run_file is not None:
        foreign_checkpoint = newest_valid(root) if checkpoint is None else None
        checkpoint_elsewhere = _checkpoint_elsewhere(config, directory, run_file.run)
    return RunDirectory(
        directory,
        root,
        run_file,
        checkpoint,
        foreign_checkpoint,
        checkpoint_elsewhere,
        unreachable_steps(root),
        damaged=checkpoint is None and _has_damaged(root),
        committed=last_commit(directory) if checkpoint is None and run_file is not None else 0,
        accepted={} if checkpoint is None else _read_accepted(run_directories(config)),
    )


def _checkpoint_elsewhere(config: Config, directory: Path, run: str) -> Committed | None:
    previous = _previous_root(directory)
    if previous is None or is_same_directory(previous, checkpoint_root(config)):
        return None
    return newest_valid(previous / CHECKPOINTS, run)


def _has_damaged(root: StoragePath) -> bool:
    """Returns True if a step is set aside, or damaged: it is not valid, and a link or without an `.unfinished` note.

    Only called if no step is valid.
    """
    names = [path.name for path in root.iterdir()] if root.is_dir() else []
    steps = [path for _, path in step_directories(root)]
    return any(".damaged" in name for name in names) or any(
        is_link(path) or not unfinished_activity(path) for path in steps
    )


def _read_accepted(directories: list[StoragePath]) -> dict[str, Any]:
    """Reads the accepted values. Ignores damaged files, with a remark."""
    accepted: dict[str, Any] = {}
    for directory in directories:
        with suppress(FileNotFoundError):
            try:
                content = json.loads(read(directory / ACCEPTED).decode())
            except (ValueError, RecursionError):
                content = None
            if isinstance(content, dict):
                accepted |= content
            else:
                remark(f"note: {directory / ACCEPTED} is damaged: changes that it lists need --accept-changes again")
    return accepted


def record_accepted(config: Config, before: dict[str, Any], accepted: list[Change]) -> None:
    """Records the `accepted` changes in the run's directories, so that later starts need not accept them again.

    Values accepted `before` stay recorded while the config has them: the run may fall back to an earlier checkpoint.
    """
    values = maths_settings(config)
    now = {key: value for key, value in before.items() if key in values and values[key] == value}
    now |= {change.key: change.now for change in accepted}
    for directory in run_directories(config) if now != before else []:
        publish(directory / ACCEPTED, json_text(now, indent=1) + "\n")
