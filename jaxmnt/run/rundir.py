"""Reads a run's directory and the directory of its checkpoints: which run these belong to, and what they contain."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from jaxmnt.checkpoint.commit import Committed, newest_valid, step_directories, unfinished_activity, unreachable_steps
from jaxmnt.checkpoint.refs import CHECKPOINTS, YAML_ERRORS, RunFile, find, read_run
from jaxmnt.config.data import Data
from jaxmnt.config.describe import Change, maths_settings
from jaxmnt.config.load import dump_config, parse_config
from jaxmnt.config.schema import CLUSTER_SECTIONS, Config
from jaxmnt.data.order import BranchPoint
from jaxmnt.errors import ConfigError, UnreadableError, UserError, printable, remark, remark_once
from jaxmnt.run.branch import branch_point, branch_points
from jaxmnt.storage import StoragePath, is_link, publish, read, storage_path
from jaxmnt.strict_json import json_text
from jaxmnt.telemetry.events import event_file, last_commit, records


def checkpoint_root(config: Config) -> StoragePath:
    """Returns the directory that contains the folder of the run's checkpoints."""
    return storage_path(config.checkpoint.dir) if config.checkpoint.dir else config.run_dir


def run_directories(config: Config) -> list[StoragePath]:
    """Returns the run's directory, and the directory of its checkpoints if that is another one.

    Each of them has a run.json and a lock.
    """
    directory, root = config.run_dir, checkpoint_root(config)
    return [directory] if is_same_directory(directory, root) else [directory, root]


def is_same_directory(first: StoragePath, second: StoragePath) -> bool:
    """Returns True if two paths lead to the same directory, even if they are relative or contain links."""
    if isinstance(first, Path) and isinstance(second, Path):
        return first.resolve() == second.resolve()
    return first == second


def has_trained(config: Config) -> bool:
    """Returns True if the run has a checkpoint, or an event that says that it has taken steps, if these can be read."""
    for directory in (config.run_dir, checkpoint_root(config)):
        with suppress(OSError):
            if step_directories(directory / CHECKPOINTS):
                return True
    with suppress(OSError):
        return any(event["kind"] == "started" for event in records(event_file(config.run_dir, 0)))
    return False


@contextmanager
def unreadable_is_retryable(config: Config) -> Iterator[None]:
    """Context manager that lets unreadable files end a run that has trained with exit code 1, which is retried, not 2.

    The code stays 2 if the config names other data than the previous start.
    """
    try:
        yield
    except ConfigError as error:
        is_unreadable = isinstance(error, UnreadableError) or isinstance(error.__cause__, OSError)
        if not is_unreadable or not has_trained(config) or not _names_data_of_the_run(config):
            raise
        text = f"{error} (this run has read it before; start the run again once it is available again)"
        raise UserError(text).blaming(hosts=error.hosts, processes=error.processes) from error


def _names_data_of_the_run(config: Config) -> bool:
    """Returns True if the config names the data that the previous start of the run has read, or if that is not known.

    Another path may be a typo.
    """
    try:
        previous_config = earlier_config(config.run_dir)
    except (ConfigError, OSError):
        return True
    return previous_config is None or _locations(previous_config.data) == _locations(config.data)


def _locations(data: Data) -> tuple[Any, ...]:
    sources = {name: (source.path, source.grain) for name, source in data.named_sources.items()}
    return sources, data.eval_sets


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
            raise ValueError("it contains no settings")
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

    If the file is damaged, prints a remark and returns None, because each start writes the file again, and checkpoints
    have their own config.
    """
    try:
        return read_config(directory) if (directory / "config.yaml").exists() else None
    except DamagedConfigError as error:
        remark_once(f"note: {error}; the run continues without it, and writes it again")
        return None


def plain_config(config: Config) -> dict[str, Any]:
    """Returns the resolved config as plain values, in the form in which checkpoints contain it."""
    return config.model_dump(mode="json", exclude=CLUSTER_SECTIONS)


def run_file_of(config: Config) -> RunFile | None:
    """Reads run.json; returns None for a new run. Raises `ConfigError` if its directories belong to different runs."""
    contents = [(path, read_run(path)) for path in run_directories(config)]
    run_files = [(path, run_file) for path, run_file in contents if run_file is not None]
    if len({run_file.run for _, run_file in run_files}) > 1:
        runs = printable(", ".join(f"{path} belongs to run {run_file.run}" for path, run_file in run_files))
        raise ConfigError(f"checkpoint.dir: {runs}; give each run its own run.dir and checkpoint.dir")
    return run_files[0][1] if run_files else None


def branches_of(config: Config) -> list[BranchPoint]:
    """Returns the points at which the run of a config has branched off, or will when it starts; empty if it is no
    branch."""
    run_file = run_file_of(config) if config.run.dir else None
    if run_file is not None:
        checkpoint = newest_valid(checkpoint_root(config) / CHECKPOINTS, run_file.run)
        return branch_points(run_file.parents if checkpoint is None else checkpoint.manifest.lineage)
    if config.run.fork_from is None:
        return []
    origin = find(config.run.fork_from, "run.fork_from")
    return [branch_point(origin, config), *branch_points(origin.manifest.lineage)]


def check_checkpoints_reachable(config: Config) -> None:
    """Raises `UserError` if the run's checkpoints cannot be reached now, for example because a folder is not mounted.

    Raises `ConfigError` instead if the folder of checkpoints is a broken link and the run has not trained yet.
    """
    directory = config.run_dir
    root = checkpoint_root(config) / CHECKPOINTS
    other_directories = run_directories(config)[1:]
    if is_link(root) and not root.is_dir():
        kind = UserError if has_trained(config) else ConfigError
        raise kind(
            f"run.dir: {root} is a link to a folder that does not exist; mount or create that folder, then try again"
        )
    run_file = read_run(directory) if other_directories else None
    if run_file is None or any(read_run(path) for path in other_directories) or not has_trained(config):
        return
    # An empty checkpoint.dir is an error only if the checkpoints were there at the previous start.
    previous = _previous_root(directory)
    if previous is not None and is_same_directory(previous, other_directories[0]):
        raise UserError(
            f"checkpoint.dir: {other_directories[0]} has no files of run {printable(run_file.run)}, which has used it "
            "before; check that it is mounted and try again, or pass --fresh to begin at step 0"
        )


def _previous_root(directory: Path) -> StoragePath | None:
    """Returns the directory of the run's checkpoints at the previous start; None if it is not known."""
    previous_config = earlier_config(directory)
    if previous_config is None:
        return None
    return checkpoint_root(previous_config) if previous_config.checkpoint.dir else directory


ACCEPTED_FILE = "accepted.json"
"""File in a run's directory with the values, by config key, that the user has accepted with --accept-changes."""


@dataclass(frozen=True)
class RunDirectory:
    """The contents of a run's directories, which the job that has the locks reads once."""

    directory: Path
    root: StoragePath
    """The folder of the checkpoints."""
    run_file: RunFile | None = None
    """The content of run.json; None if this is a new run."""
    checkpoint: Committed | None = None
    """The newest valid checkpoint of the run, or of any run if there is no run.json."""
    foreign_checkpoint: Committed | None = None
    """The newest valid checkpoint of another run, if `checkpoint` is None."""
    checkpoint_elsewhere: Committed | None = None
    """The run's newest valid checkpoint in the checkpoint directory of the previous start, if that was another
    directory."""
    unreachable: list[tuple[int, StoragePath]] = field(default_factory=list)
    """The (step, path) of each step that is a broken link, oldest first."""
    has_damaged: bool = False
    """True if `checkpoint` is None, and a step was set aside as damaged or will be when the folder is cleaned up."""
    last_committed_step: int = 0
    """If `checkpoint` is None, the last step that the run has committed according to its events; 0 if there is none."""
    accepted_values: dict[str, Any] = field(default_factory=dict)
    """If there is a checkpoint, the values that were accepted at earlier starts, by config key."""

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
        has_damaged=checkpoint is None and _has_damaged(root),
        last_committed_step=last_commit(directory) if checkpoint is None and run_file is not None else 0,
        accepted_values={} if checkpoint is None else _read_accepted(run_directories(config)),
    )


def _checkpoint_elsewhere(config: Config, directory: Path, run: str) -> Committed | None:
    previous = _previous_root(directory)
    if previous is None or is_same_directory(previous, checkpoint_root(config)):
        return None
    return newest_valid(previous / CHECKPOINTS, run)


def _has_damaged(root: StoragePath) -> bool:
    """Returns True if a step was set aside as damaged, or is damaged. Call this only if no step is valid.

    A step that is not valid is damaged if it is a link or has no `.unfinished` note.
    """
    names = [path.name for path in root.iterdir()] if root.is_dir() else []
    steps = [path for _, path in step_directories(root)]
    was_set_aside = any(".damaged" in name for name in names)
    return was_set_aside or any(is_link(path) or not unfinished_activity(path) for path in steps)


def _read_accepted(directories: list[StoragePath]) -> dict[str, Any]:
    """Reads the accepted values. Ignores damaged files, with a remark."""
    accepted: dict[str, Any] = {}
    for directory in directories:
        with suppress(FileNotFoundError):
            try:
                content = json.loads(read(directory / ACCEPTED_FILE).decode())
            except (ValueError, RecursionError):
                content = None
            if isinstance(content, dict):
                accepted |= content
            else:
                remark(
                    f"note: {directory / ACCEPTED_FILE} is damaged: changes that it lists need --accept-changes again"
                )
    return accepted


def record_accepted(config: Config, earlier: dict[str, Any], accepted: list[Change]) -> None:
    """Records the `accepted` changes in the run's directories, so that the user need not accept them at later starts.

    Values accepted at earlier starts (`earlier`) stay recorded while the config has them, because the run may fall back
    to an earlier checkpoint.
    """
    values = maths_settings(config)
    all_accepted = {key: value for key, value in earlier.items() if key in values and values[key] == value}
    all_accepted |= {change.key: change.now for change in accepted}
    if all_accepted != earlier:
        for directory in run_directories(config):
            publish(directory / ACCEPTED_FILE, json_text(all_accepted, indent=1) + "\n")
