"""A run's directory: whose it is, where it stands, and whether this config may go on with it."""

import errno
import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from jaxmnt.checkpoint.commit import Committed, clear_up, newest_whole, set_aside
from jaxmnt.checkpoint.manifest import DamagedError, from_plain, to_plain
from jaxmnt.checkpoint.source import FOLDER, RUN_FILE, find
from jaxmnt.cluster.environment import Identity
from jaxmnt.cluster.runtime import share
from jaxmnt.config.describe import Change, changes
from jaxmnt.config.load import dump_config, parse_config
from jaxmnt.config.schema import NOT_OF_THE_RUN, Config
from jaxmnt.data.batches import skipped_ranges
from jaxmnt.data.order import Skipped
from jaxmnt.data.sources import Sources
from jaxmnt.errors import ConfigError, PreflightError, UserError, error_of
from jaxmnt.runtime.lock import RunLock
from jaxmnt.storage import Place, place, publish

_SECONDS = 1800.0
"""How long processes wait for what process 0 finds: it may look at many files, and at another job's signs of life."""


@dataclass(frozen=True)
class Start:
    """Where a run stands before it goes on."""

    directory: Path
    run: str
    """The run's id."""
    lineage: list[dict[str, Any]]
    """The runs and steps that this one was forked from, newest first."""
    checkpoint: Committed | None
    """What to restore; None begins anew."""
    kind: str = "own"
    """Whose checkpoint it is: own, fork (another run's, all of it) or init (another run's, its parameters)."""
    changes: list[Change] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """Lines for people: what was taken over or set aside."""
    damaged: list[str] = field(default_factory=list)
    """Of these, what tells of checkpoints that are not used."""

    @property
    def step(self) -> int:
        return 0 if self.checkpoint is None or self.kind == "init" else self.checkpoint.step

    @property
    def tokens(self) -> int:
        return 0 if self.checkpoint is None or self.kind == "init" else self.checkpoint.manifest.tokens


def home(config: Config) -> Place:
    """Where the run's checkpoints are."""
    assert config.run.dir is not None
    return place(config.checkpoint.dir) if config.checkpoint.dir else Path(config.run.dir)


def places(config: Config) -> list[Place]:
    """The run's directory, and where its checkpoints are if that is elsewhere. Each has the run's id, and a lock."""
    assert config.run.dir is not None
    directory, elsewhere = Path(config.run.dir), home(config)
    return [directory] if _same(directory, elsewhere) else [directory, elsewhere]


def _same(one: Place, other: Place) -> bool:
    """Whether two places are one, however they are written."""
    if isinstance(one, Path) and isinstance(other, Path):
        return one.resolve() == other.resolve()
    return one == other


def open_run(
    config: Config,
    data: Sources,
    identity: Identity,
    locks: Sequence[RunLock],
    tell: Callable[[str], None] = lambda line: None,
) -> Start:
    """Takes the run's locks, finds the checkpoint to go on from, and compares the config with that one's.

    Process 0 looks and decides; the others are told. Raises `ConfigError` when another job is in the directory, when
    something has changed that the checkpoint cannot be continued with, or when there is nothing left to do before
    `train.stop_after`.
    """
    assert config.run.dir is not None
    directory = Path(config.run.dir)

    def decide() -> Start:
        for where in places(config):
            where.mkdir(parents=True, exist_ok=True)
        remarks = [remark for lock in locks if (remark := lock.acquire(tell))]
        return _decide(config, data, directory, remarks)

    return _decided("start", decide, config, identity)


def fall_back(start: Start, damage: DamagedError, config: Config, data: Sources, identity: Identity) -> Start:
    """Where the run goes on from when its checkpoint turned out to be damaged: the one before.

    Raises `ConfigError` if there is none that is whole, or if the checkpoint is another run's.
    """
    checkpoint = start.checkpoint
    assert checkpoint is not None

    def decide() -> Start:
        if start.kind != "own":
            raise ConfigError(f"run.{start.kind}_from: checkpoint {checkpoint.path} is damaged: {damage}; name another")
        aside = set_aside(checkpoint.path)
        remark = f"checkpoint {checkpoint.step} is damaged: {damage}; kept as {aside}"
        return _decide(config, data, start.directory, [remark])

    return _decided("fall back", decide, config, identity)


def write_config(directory: Path, config: Config) -> None:
    """Writes config.yaml, whole or not at all. By process 0."""
    publish(directory / "config.yaml", dump_config(config))


def read_config(directory: Path) -> Config:
    """The resolved config of a run directory."""
    path = directory / "config.yaml"
    try:
        return parse_config(yaml.safe_load(path.read_text(encoding="utf-8")), str(path))
    except FileNotFoundError:
        raise ConfigError(f"{directory} is no run directory: it has no config.yaml") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is damaged ({error}); restore it or start a new run.dir") from error


def plain_config(config: Config) -> dict[str, Any]:
    """The resolved config as plain values, as checkpoints hold it."""
    return config.model_dump(mode="json", exclude=NOT_OF_THE_RUN)


def _decided(name: str, decide: Callable[[], Start], config: Config, identity: Identity) -> Start:
    """What process 0 decides, in all processes. Its error, too."""
    told = None
    if identity.process_id == 0:
        try:
            told = json.dumps({"start": _to_plain(decide())})
        except (UserError, OSError) as error:
            trouble = _in_words(error, config) if isinstance(error, OSError) else error
            told = json.dumps({"error": str(trouble), "code": trouble.exit_code})
    answer = json.loads(share(name, told, identity, _SECONDS))
    if "error" in answer:
        raise error_of(answer["code"], answer["error"])
    plain = answer["start"]
    checkpoint = None if plain["checkpoint"] is None else place(plain["checkpoint"])
    if isinstance(checkpoint, Path) and not checkpoint.is_dir():
        its_own = any(isinstance(where, Path) and checkpoint.is_relative_to(where) for where in places(config))
        if not its_own:
            raise ConfigError(
                f"run.{plain['kind']}_from: process 0 sees {checkpoint}, {identity.label} does not; "
                "put it on a file system that all hosts share"
            )
        raise PreflightError(
            f"run.dir: process 0 sees {checkpoint}, {identity.label} does not; "
            "put the run directory on a file system that all hosts share"
        ).blaming(processes=[identity.process_id])
    return _from_plain(plain)


_MAY_PASS = (
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN, errno.EHOSTDOWN, errno.EHOSTUNREACH
)  # fmt: skip
"""What a server of files is the reason for that does not answer, or has thrown a client out."""


def _in_words(error: OSError, config: Config) -> UserError:
    """Whose fault it is. A server that does not answer may do so on the next attempt, all else has to be mended."""
    where = str(error.filename or "")
    kind = UserError if error.errno in _MAY_PASS else ConfigError
    for key, directory in zip(("run.dir", "checkpoint.dir"), places(config), strict=False):
        if where.startswith(str(directory)):
            return kind(
                f"{key}: {directory} cannot be used: {error.strerror or error} ({where}); "
                f"mend that, or choose another {key}"
            )
    return kind(f"{where or 'a file'} cannot be used: {error.strerror or error}; mend that and try again")


def _decide(config: Config, data: Sources, directory: Path, remarks: list[str]) -> Start:
    root = home(config) / FOLDER
    known = _known(config)
    cut_off, damaged = clear_up(root, None if known is None else known["run"])
    remarks = remarks + cut_off + damaged
    checkpoint = newest_whole(root, None if known is None else known["run"])
    if known is not None:
        _refuse_to_forget(config, directory, known["run"], 0 if checkpoint is None else checkpoint.step)
    if checkpoint is not None:
        start = _resume(config, data, directory, known, checkpoint)
    elif root.is_dir() and any(".damaged" in path.name for path in root.iterdir()):
        told = "; ".join(remarks) or "set aside before"
        raise ConfigError(
            f"run.dir: no whole checkpoint is left in {root}, only damaged ones ({told}); "
            "to train again from step 0 choose other directories, or move them away"
        )
    else:
        start = _begin(config, data, directory, known)
    for where in places(config):
        if not (where / RUN_FILE).exists():
            about = {"run": start.run, "lineage": start.lineage, "time": time.time()}
            publish(where / RUN_FILE, json.dumps(about, indent=1) + "\n")
    return replace(start, remarks=remarks + start.remarks, damaged=damaged)


def _known(config: Config) -> dict[str, Any] | None:
    """What run.json says; None if this is a new run. Raises `ConfigError` if two places are of different runs."""
    found = [(where, known) for where in places(config) if (known := _read_run(where)) is not None]
    if len({known["run"] for _, known in found}) > 1:
        told = ", ".join(f"{where} is of run {known['run']}" for where, known in found)
        raise ConfigError(f"checkpoint.dir: {told}; give each run a run.dir and a checkpoint.dir of its own")
    return found[0][1] if found else None


def _begin(config: Config, data: Sources, directory: Path, known: dict[str, Any] | None) -> Start:
    """A run that has no checkpoint of its own yet."""
    run = secrets.token_hex(6) if known is None else known["run"]
    source = config.run.fork_from or config.run.init_from
    if source is None:
        return Start(directory, run, [], None)
    key = "run.fork_from" if config.run.fork_from else "run.init_from"
    checkpoint = find(source, key)
    if config.run.init_from:
        return Start(directory, run, [], checkpoint, "init")
    manifest = checkpoint.manifest
    if manifest.step >= config.train.steps:
        raise ConfigError(
            f"train.steps: {config.train.steps} leaves nothing to do after step {manifest.step} of {key}; raise it"
        )
    parent = {"run": manifest.run, "step": manifest.step, "path": str(checkpoint.path.absolute())}
    earlier = _config_of(checkpoint)
    same_rows = manifest.data == data.digests and _numbering(earlier) == _numbering(config)
    if same_rows and (refusal := _skip_refusal(config, checkpoint)):
        raise ConfigError(refusal)
    different = changes(earlier, config)
    return Start(directory, run, [parent, *manifest.lineage], checkpoint, "fork", different)


def _refuse_to_forget(config: Config, directory: Path, run: str, step: int) -> None:
    """Raises `ConfigError` if the run has come further than `step` where its checkpoints were the last time."""
    if not (directory / "config.yaml").exists():
        return
    earlier, now = read_config(directory), home(config)
    before = home(earlier) if earlier.checkpoint.dir else directory
    if _same(before, now):
        return
    newest = newest_whole(before / FOLDER, run)
    if newest is not None and newest.step > step:
        raise ConfigError(
            f"checkpoint.dir: {before} has the checkpoint of step {newest.step} of {directory}, and the newest in "
            f"{now} is of step {step}; undo the change, move the checkpoints, or choose another run.dir"
        )


def _resume(
    config: Config, data: Sources, directory: Path, known: dict[str, Any] | None, checkpoint: Committed
) -> Start:
    """A run that goes on from a checkpoint of its own."""
    manifest = checkpoint.manifest
    different = changes(_config_of(checkpoint), config)
    if refusal := _refusal(config, data, checkpoint, different):
        raise ConfigError(refusal)
    lineage = manifest.lineage if known is None else known["lineage"]
    return Start(directory, manifest.run, lineage, checkpoint, "own", different)


def _config_of(checkpoint: Committed) -> Config:
    return parse_config(checkpoint.manifest.config, f"the config in {checkpoint.path}")


def _different_data(before: dict[str, str], now: dict[str, str]) -> str:
    """Which sources differ in what they hold, in words; empty if none does. A folder may have moved."""
    found = [f"{name} was added" for name in now if name not in before]
    found += [f"{name} was removed" for name in before if name not in now]
    found += [f"{name} holds something else than before" for name in now if before.get(name, now[name]) != now[name]]
    return ", ".join(found)


def _refusal(config: Config, data: Sources, checkpoint: Committed, different: list[Change]) -> str | None:
    """Why this config must not go on with this run directory, if so."""
    breaking = [change for change in different if change.resume == "breaks"]
    if breaking:
        listed = ", ".join(f"{change.key} ({change.before} → {change.now})" for change in breaking)
        return (
            f"run.dir: {config.run.dir} has a checkpoint of step {checkpoint.step} that cannot be continued with a "
            f"changed {listed}; undo the change, choose another run.dir, or branch off there with run.fork_from"
        )
    if different_data := _different_data(checkpoint.manifest.data, data.digests):
        return (
            f"data: {config.run.dir} has a checkpoint of step {checkpoint.step} that cannot be continued with other "
            f"data: {different_data}; give the same data, choose another run.dir, or branch off with run.fork_from"
        )
    if refusal := _skip_refusal(config, checkpoint):
        return refusal
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


def _skip_refusal(config: Config, checkpoint: Committed) -> str | None:
    """Rows that were trained on cannot be passed over any more, nor those passed over be taken in."""
    earlier, step = _config_of(checkpoint), checkpoint.manifest.step
    before, now = (Skipped(skipped_ranges(one.data)) for one in (earlier, config))
    reached = int(before.nth(np.array([step * config.data.global_batch_size - 1]))[0]) + 1
    if before.below(reached) == now.below(reached):
        return None
    return (
        f"data.skip: at step {step} of {checkpoint.path} all rows before {reached} are trained on or passed over, and "
        "that cannot be changed any more; name later rows, or branch off at an earlier checkpoint with run.fork_from"
    )


def _numbering(config: Config) -> Any:
    """What the numbers of rows depend on, besides the data."""
    data = config.data
    return config.seed, data.sequence_length, data.rows, data.shuffle, data.global_batch_size


def _read_run(directory: Place) -> dict[str, Any] | None:
    """What run.json says; None if there is none, as in a new directory."""
    path = directory / RUN_FILE
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        return {"run": str(known["run"]), "lineage": list(known["lineage"])}
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is damaged ({error}); remove it, and the run is known by its newest checkpoint"
        ) from error


def _to_plain(start: Start) -> dict[str, Any]:
    checkpoint = start.checkpoint
    return {
        "directory": str(start.directory),
        "run": start.run,
        "lineage": start.lineage,
        "checkpoint": None if checkpoint is None else str(checkpoint.path),
        "manifest": None if checkpoint is None else to_plain(checkpoint.manifest),
        "kind": start.kind,
        "changes": start.changes,
        "remarks": start.remarks,
        "damaged": start.damaged,
    }


def _from_plain(plain: dict[str, Any]) -> Start:
    checkpoint = None
    if plain["checkpoint"] is not None:
        checkpoint = Committed(place(plain["checkpoint"]), from_plain(plain["manifest"]))
    return Start(
        Path(plain["directory"]),
        plain["run"],
        plain["lineage"],
        checkpoint,
        plain["kind"],
        [Change(*change) for change in plain["changes"]],
        plain["remarks"],
        plain["damaged"],
    )
