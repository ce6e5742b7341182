"""A run's directory, and where its checkpoints are: whose they are, and what is there."""

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from jaxmnt.checkpoint.commit import Committed, newest_valid, out_of_reach, step_directories, unfinished
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
    """Where the run's checkpoints are."""
    return storage_path(config.checkpoint.dir) if config.checkpoint.dir else config.run_dir


def run_directories(config: Config) -> list[StoragePath]:
    """The run's directory, and where its checkpoints are if that is elsewhere. Each has the run's id, and a lock."""
    directory, elsewhere = config.run_dir, checkpoint_root(config)
    return [directory] if is_same_place(directory, elsewhere) else [directory, elsewhere]


def is_same_place(one: StoragePath, other: StoragePath) -> bool:
    """Whether two places are one, however they are written."""
    if isinstance(one, Path) and isinstance(other, Path):
        return one.resolve() == other.resolve()
    return one == other


def has_trained(config: Config) -> bool:
    """Whether the run has a checkpoint, or an event that tells of a step, as far as these can be read."""
    for where in (config.run_dir, checkpoint_root(config)):
        with suppress(OSError):
            if step_directories(where / CHECKPOINTS):
                return True
    with suppress(OSError):
        return any(event["kind"] == "started" for event in records(event_file(config.run_dir, 0)))
    return False


@contextmanager
def unreadable_is_retryable(config: Config) -> Iterator[None]:
    """Inside, what cannot be read ends a run that has trained with exit code 1, which is tried again, instead of 2."""
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
        why = printable(" ".join(str(error).split())[:200])
        raise DamagedConfigError(f"{path} is damaged ({why})") from error


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


def plain_config(config: Config) -> dict[str, Any]:
    """The resolved config as plain values, as checkpoints hold it."""
    return config.model_dump(mode="json", exclude=CLUSTER_SECTIONS)


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


def check_checkpoints_reachable(config: Config) -> None:
    """Raises `UserError` if the run's checkpoints lie where nothing is now, as where a mount is away."""
    directory = config.run_dir
    root, elsewhere = checkpoint_root(config) / CHECKPOINTS, run_directories(config)[1:]
    if is_link(root) and not root.is_dir():
        kind = UserError if has_trained(config) else ConfigError
        raise kind(
            f"run.dir: {root} is a link to a folder that does not exist; mount or create that folder, then try again"
        )
    known = read_run(directory) if elsewhere else None
    if known is None or any(read_run(where) for where in elsewhere) or not has_trained(config):
        return
    before = _place_before(directory)
    if before is not None and is_same_place(before, elsewhere[0]):
        raise UserError(
            f"checkpoint.dir: {elsewhere[0]} has no files of run {printable(known.run)}, which has used it before; "
            "check that it is mounted and try again; to begin at step 0, pass --fresh"
        )


def _place_before(directory: Path) -> StoragePath | None:
    """Where the run's checkpoints were at the start before; None if that is not known."""
    earlier = earlier_config(directory)
    return None if earlier is None else checkpoint_root(earlier) if earlier.checkpoint.dir else directory


ACCEPTED = "accepted.json"
"""In a run's directory: the values of keys of the maths that somebody has accepted, beside the id of the run."""


@dataclass(frozen=True)
class RunDirectory:
    """What is in a run's directory and where its checkpoints are, read once by the job that has the locks."""

    directory: Path
    root: StoragePath
    """The folder of the checkpoints."""
    known: RunFile | None = None
    """What run.json says; None if this is a new run."""
    checkpoint: Committed | None = None
    """The newest whole checkpoint of the run; without a run.json, of any run."""
    of_others: Committed | None = None
    """If that is None: the newest whole checkpoint of any other run."""
    earlier: Committed | None = None
    """The run's newest whole checkpoint where its checkpoints were at the start before, if that was elsewhere."""
    out_of_reach: list[tuple[int, StoragePath]] = field(default_factory=list)
    """Steps that are links to where nothing is now, oldest first."""
    damaged: bool = False
    """Without a checkpoint: whether one was set aside as damaged, or will be when the folder is cleared up."""
    committed: int = 0
    """Without a checkpoint: the step of the one that the run wrote last by its events; 0 if it wrote none."""
    accepted: dict[str, Any] = field(default_factory=dict)
    """With a checkpoint: what was accepted at earlier starts, by key."""

    @property
    def run(self) -> str | None:
        return None if self.known is None else self.known.run

    @property
    def step(self) -> int:
        return 0 if self.checkpoint is None else self.checkpoint.step


def read_directory(config: Config) -> RunDirectory:
    """Raises `ConfigError` for files that are damaged, and `OtherFormatError` for a newer checkpoint's format."""
    directory, root = config.run_dir, checkpoint_root(config) / CHECKPOINTS
    known = known_run(config)
    checkpoint = newest_valid(root, None if known is None else known.run)
    of_others = earlier = None
    if known is not None:
        of_others = newest_valid(root) if checkpoint is None else None
        earlier = _checkpoint_elsewhere(config, directory, known.run)
    return RunDirectory(
        directory,
        root,
        known,
        checkpoint,
        of_others,
        earlier,
        out_of_reach(root),
        damaged=checkpoint is None and _has_damaged(root),
        committed=last_commit(directory) if checkpoint is None and known is not None else 0,
        accepted={} if checkpoint is None else _read_accepted(run_directories(config)),
    )


def _checkpoint_elsewhere(config: Config, directory: Path, run: str) -> Committed | None:
    before = _place_before(directory)
    if before is None or is_same_place(before, checkpoint_root(config)):
        return None
    return newest_valid(before / CHECKPOINTS, run)


def _has_damaged(root: StoragePath) -> bool:
    """Whether a step is set aside, or is damaged and not just cut off, of which a note tells that is not for links."""
    names = [path.name for path in root.iterdir()] if root.is_dir() else []
    steps = [path for _, path in step_directories(root)]
    return any(".damaged" in name for name in names) or any(is_link(path) or not unfinished(path) for path in steps)


def _read_accepted(places: list[StoragePath]) -> dict[str, Any]:
    """What a damaged file says was not accepted, which is said."""
    accepted: dict[str, Any] = {}
    for where in places:
        with suppress(FileNotFoundError):
            try:
                content = json.loads(read(where / ACCEPTED).decode())
            except (ValueError, RecursionError):
                content = None
            if isinstance(content, dict):
                accepted |= content
            else:
                remark(f"note: {where / ACCEPTED} is damaged: what was accepted at earlier starts is not known from it")
    return accepted


def note_accepted(config: Config, before: dict[str, Any], accepted: list[Change]) -> None:
    """Writes down that this config goes on with what was `accepted`, also when this start comes to nothing.

    What was accepted `before` stays noted as long as the config says the same: an earlier checkpoint may be needed.
    """
    values = maths_settings(config)
    now = {key: value for key, value in before.items() if key in values and values[key] == value}
    now |= {change.key: change.now for change in accepted}
    for where in run_directories(config) if now != before else []:
        publish(where / ACCEPTED, json_text(now, indent=1) + "\n")
