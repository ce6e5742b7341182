"""A run's directory: whose it is, where it stands, and whether this config may go on with it."""

import errno
import json
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from jaxmnt.checkpoint.commit import Committed, clear_up, newest_valid, out_of_reach, quarantine
from jaxmnt.checkpoint.manifest import DamagedError, from_plain, to_plain
from jaxmnt.checkpoint.refs import FOLDER, NO_YAML, RUN_FILE, RunFile, find, read_run
from jaxmnt.config.describe import Change, changes
from jaxmnt.config.load import dump_config, parse_config
from jaxmnt.config.schema import NOT_OF_THE_RUN, Config
from jaxmnt.data.sources import Sources
from jaxmnt.distributed.coordination import broadcast
from jaxmnt.distributed.identity import Identity
from jaxmnt.errors import ConfigError, PreflightError, UserError, error_of, printable
from jaxmnt.run import fresh
from jaxmnt.run.changes import (
    config_of,
    has_trained,
    not_accepted,
    note_accepted,
    nothing_wrong_with_the_config,
    numbering,
    read_accepted,
    refusal,
    skip_refusal,
    stop_refusal,
    to_be_accepted,
)
from jaxmnt.run.lock import RunLock
from jaxmnt.storage import StoragePath, is_link, publish, read, storage_path
from jaxmnt.telemetry.events import last_commit

_SECONDS = 1800.0
"""How long processes wait for what process 0 finds: it may look at many files, and at another job's signs of life."""


@dataclass(frozen=True)
class Consent:
    """What a person says of this start, besides the config."""

    accept_changes: bool = False
    """Go on although that alters the maths of the run."""
    fresh: bool = False
    """Set aside the run that is in the directory, and begin another."""


@dataclass(frozen=True)
class ResumePoint:
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
    fresh: bool = False
    """Whether --fresh was said: the same command would begin anew once more."""

    @property
    def step(self) -> int:
        return 0 if self.checkpoint is None or self.kind == "init" else self.checkpoint.step

    @property
    def tokens(self) -> int:
        return 0 if self.checkpoint is None or self.kind == "init" else self.checkpoint.manifest.tokens


def checkpoint_root(config: Config) -> StoragePath:
    """Where the run's checkpoints are."""
    assert config.run.dir is not None
    return storage_path(config.checkpoint.dir) if config.checkpoint.dir else Path(config.run.dir)


def run_directories(config: Config) -> list[StoragePath]:
    """The run's directory, and where its checkpoints are if that is elsewhere. Each has the run's id, and a lock."""
    assert config.run.dir is not None
    directory, elsewhere = Path(config.run.dir), checkpoint_root(config)
    return [directory] if _same(directory, elsewhere) else [directory, elsewhere]


def _same(one: StoragePath, other: StoragePath) -> bool:
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
    consent: Consent = Consent(),
) -> ResumePoint:
    """Takes the run's locks, finds the checkpoint to go on from, and compares the config with that one's.

    Process 0 looks and decides; the others are told. Raises `ConfigError` when another job is in the directory, when
    something has changed that the checkpoint cannot be continued with, or should not without being accepted, or when
    there is nothing left to do before `train.stop_after`.
    """
    assert config.run.dir is not None
    directory = Path(config.run.dir)

    def decide() -> ResumePoint:
        begin_anew = consent.fresh and not fresh.done_before(_known(config), os.environ)
        if not begin_anew:
            _refuse_what_is_away(config, directory)
        for where in run_directories(config):
            where.mkdir(parents=True, exist_ok=True)
        remarks = [remark for lock in locks if (remark := lock.acquire(tell))]
        if begin_anew:
            _refuse_to_set_aside(config, _begin(config, data, directory, None))
            remarks += fresh.set_aside(run_directories(config))
        elif consent.fresh:
            remarks.append("--fresh was done at an earlier start of this job, which goes on now")
        return _decide(config, data, directory, remarks, replace(consent, fresh=begin_anew))

    return replace(_decided("start", decide, config, identity), fresh=consent.fresh)


def fall_back(
    start: ResumePoint, damage: DamagedError, config: Config, data: Sources, identity: Identity
) -> ResumePoint:
    """Where the run goes on from when its checkpoint turned out to be damaged: the one before.

    Raises `ConfigError` if there is none that is whole, or if the checkpoint is another run's.
    """
    checkpoint = start.checkpoint
    assert checkpoint is not None

    def decide() -> ResumePoint:
        if start.kind != "own":
            raise ConfigError(f"run.{start.kind}_from: checkpoint {checkpoint.path} is damaged: {damage}; name another")
        aside = quarantine(checkpoint.path)
        remark = f"checkpoint {checkpoint.step} is damaged: {damage}; kept as {aside}"
        return _decide(config, data, start.directory, [remark], Consent())

    return _decided("fall back", decide, config, identity)


def write_config(directory: Path, config: Config) -> None:
    """Writes config.yaml, whole or not at all. By process 0."""
    publish(directory / "config.yaml", dump_config(config))


def read_config(directory: Path) -> Config:
    """The resolved config of a run directory."""
    path = directory / "config.yaml"
    try:
        return parse_config(yaml.safe_load(read(path).decode()), str(path))
    except FileNotFoundError:
        raise ConfigError(f"{directory} is not a run directory: it has no config.yaml") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}; fix the access") from error
    except NO_YAML as error:
        raise ConfigError(f"{path} is damaged ({_line(error)}); restore it or start a new run.dir") from error


def _line(error: Exception) -> str:
    return printable(" ".join(str(error).split())[:200])


def plain_config(config: Config) -> dict[str, Any]:
    """The resolved config as plain values, as checkpoints hold it."""
    return config.model_dump(mode="json", exclude=NOT_OF_THE_RUN)


def _decided(name: str, decide: Callable[[], ResumePoint], config: Config, identity: Identity) -> ResumePoint:
    """What process 0 decides, in all processes. Its error, too."""
    told = None
    if identity.process_id == 0:
        try:
            with nothing_wrong_with_the_config(config):
                told = json.dumps({"start": _to_plain(decide())})
        except (UserError, OSError) as error:
            trouble = _in_words(error, config) if isinstance(error, OSError) else error
            told = json.dumps({"error": str(trouble), "code": trouble.exit_code})
    answer = json.loads(broadcast(name, told, identity, _SECONDS))
    if "error" in answer:
        raise error_of(answer["code"], answer["error"])
    plain = answer["start"]
    checkpoint = None if plain["checkpoint"] is None else storage_path(plain["checkpoint"])
    if isinstance(checkpoint, Path) and not checkpoint.is_dir():
        its_own = any(isinstance(where, Path) and checkpoint.is_relative_to(where) for where in run_directories(config))
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
    """Whose fault it is. A server that does not answer may do so on the next attempt, and what a run has used before
    may be there again; all else has to be mended."""
    where = str(error.filename or "")
    kind = UserError if error.errno in _MAY_PASS or has_trained(config) else ConfigError
    for key, directory in zip(("run.dir", "checkpoint.dir"), run_directories(config), strict=False):
        if where.startswith(str(directory)):
            return kind(
                f"{key}: {directory} cannot be used: {error.strerror or error} ({where}); "
                f"fix that, or choose another {key}"
            )
    return kind(f"{where or 'a file'} cannot be used: {error.strerror or error}; fix that and try again")


def _decide(config: Config, data: Sources, directory: Path, remarks: list[str], consent: Consent) -> ResumePoint:
    root = checkpoint_root(config) / FOLDER
    known = _known(config)
    checkpoint = newest_valid(root, None if known is None else known.run)
    if known is not None:
        if checkpoint is None:
            _refuse_a_contradiction(root, known)
        _refuse_to_forget(config, directory, known.run, 0 if checkpoint is None else checkpoint.step)
    _refuse_to_go_back(root, 0 if checkpoint is None else checkpoint.step)
    told, damaged = clear_up(root, None if known is None else known.run)
    remarks = remarks + told + damaged
    if checkpoint is not None:
        start = _resume(config, data, directory, known, checkpoint, consent)
    elif root.is_dir() and any(".damaged" in path.name for path in root.iterdir()):
        raise ConfigError(
            f"run.dir: no whole checkpoint is left in {root}, only damaged ones "
            f"({'; '.join(remarks) or 'set aside before'}); to train again from step 0 say --fresh, which sets all of "
            "this run aside, or choose other directories"
        )
    else:
        if known is not None:
            _refuse_to_lose(root, directory)
        start = _begin(config, data, directory, known)
    for where in run_directories(config):
        if not (where / RUN_FILE).exists():
            about = {"run": start.run, "lineage": start.lineage, "time": time.time()}
            begun_by = {"begun_by": fresh.marks(os.environ)} if consent.fresh else {}
            publish(where / RUN_FILE, json.dumps(about | begun_by, indent=1) + "\n")
    return replace(start, remarks=remarks + start.remarks, damaged=damaged)


def _known(config: Config) -> RunFile | None:
    """What run.json says; None if this is a new run. Raises `ConfigError` if two places are of different runs."""
    found = [(where, known) for where in run_directories(config) if (known := read_run(where)) is not None]
    if len({known.run for _, known in found}) > 1:
        told = printable(", ".join(f"{where} is of run {known.run}" for where, known in found))
        raise ConfigError(f"checkpoint.dir: {told}; give each run a run.dir and a checkpoint.dir of its own")
    return found[0][1] if found else None


def _refuse_what_is_away(config: Config, directory: Path) -> None:
    """Raises `UserError` if the run's checkpoints lie where nothing is now, as where a mount is away."""
    root, elsewhere = checkpoint_root(config) / FOLDER, run_directories(config)[1:]
    if is_link(root) and not root.is_dir():
        kind = UserError if has_trained(config) else ConfigError
        raise kind(f"run.dir: {root} is a link to a folder that is not there; mount or make that, and try again")
    known = read_run(directory) if elsewhere else None
    if known is None or any(read_run(where) for where in elsewhere) or not has_trained(config):
        return
    earlier = read_config(directory) if (directory / "config.yaml").exists() else None
    if earlier is not None and earlier.checkpoint.dir and _same(storage_path(earlier.checkpoint.dir), elsewhere[0]):
        raise UserError(
            f"checkpoint.dir: {elsewhere[0]} has nothing of run {printable(known.run)}, which has trained with it; "
            "if it is away for the moment, try again; to begin at step 0 say --fresh"
        )


def _refuse_a_contradiction(root: StoragePath, known: RunFile) -> None:
    """Raises `ConfigError` if there are whole checkpoints, and all of another run than run.json says: one is wrong."""
    other = newest_valid(root)
    if other is not None:
        theirs = printable(other.manifest.run)
        raise ConfigError(
            f"run.dir: {RUN_FILE} says that this is run {printable(known.run)}, and no whole checkpoint in {root} is: "
            f"the newest, of step {other.step}, is of run {theirs}; nothing was moved; if these are the run's, put "
            f"{theirs} into {RUN_FILE}, else take them away, or choose another run.dir"
        )


def _refuse_to_go_back(root: StoragePath, step: int) -> None:
    """Raises `UserError` if a later checkpoint than that of `step` is a link to where nothing is now."""
    away = [path for later, path in out_of_reach(root) if later > step]
    if away:
        raise UserError(
            f"run.dir: checkpoint {away[-1]} is a link to what is not there; mount or make that, or remove the link to "
            f"go on from step {step}"
        )


def _refuse_to_lose(root: StoragePath, directory: Path) -> None:
    """Raises `UserError` if checkpoints were there once: whoever begins at step 0 then, loses what has been trained."""
    step = last_commit(directory)
    if step:
        raise UserError(
            f"run.dir: {root} has no checkpoint, and this run committed one of step {step} there; if they are away for "
            "the moment, as with a mount, try again; to begin at step 0 say --fresh, which sets all of this run aside"
        )


def _refuse_to_set_aside(config: Config, begun: ResumePoint) -> None:
    """Raises `ConfigError` if the run that --fresh would begin starts from a checkpoint that it would set aside."""
    source = begun.checkpoint
    if source is None:
        return
    for where in run_directories(config):
        if _same(source.path.parent, where / FOLDER):
            raise ConfigError(
                f"run.{begun.kind}_from: {source.path} is of the run that --fresh sets aside; give another run.dir "
                "instead of --fresh"
            )


def _begin(config: Config, data: Sources, directory: Path, known: RunFile | None) -> ResumePoint:
    """A run that has no checkpoint of its own yet."""
    run = secrets.token_hex(6) if known is None else known.run
    source = config.run.fork_from or config.run.init_from
    if source is None:
        return ResumePoint(directory, run, [], None)
    key = "run.fork_from" if config.run.fork_from else "run.init_from"
    checkpoint = find(source, key)
    if config.run.init_from:
        return ResumePoint(directory, run, [], checkpoint, "init")
    manifest = checkpoint.manifest
    if manifest.step >= config.train.steps:
        raise ConfigError(
            f"train.steps: {config.train.steps} leaves nothing to do after step {manifest.step} of {key}; raise it"
        )
    if words := stop_refusal(config, checkpoint, key):
        raise ConfigError(words)
    parent = {"run": manifest.run, "step": manifest.step, "path": str(checkpoint.path.absolute())}
    earlier = config_of(checkpoint)
    same_rows = manifest.data == data.digests and numbering(earlier) == numbering(config)
    if same_rows and (words := skip_refusal(config, checkpoint)):
        raise ConfigError(words)
    different = changes(earlier, config)
    return ResumePoint(directory, run, [parent, *manifest.lineage], checkpoint, "fork", different)


def _refuse_to_forget(config: Config, directory: Path, run: str, step: int) -> None:
    """Raises `ConfigError` if the run has come further than `step` where its checkpoints were the last time."""
    if not (directory / "config.yaml").exists():
        return
    earlier, now = read_config(directory), checkpoint_root(config)
    before = checkpoint_root(earlier) if earlier.checkpoint.dir else directory
    if _same(before, now):
        return
    newest = newest_valid(before / FOLDER, run)
    if newest is not None and newest.step > step:
        raise ConfigError(
            f"checkpoint.dir: {before} has the checkpoint of step {newest.step} of {directory}, and the newest in "
            f"{now} is of step {step}; undo the change, move the checkpoints, or choose another run.dir"
        )


def _resume(
    config: Config, data: Sources, directory: Path, known: RunFile | None, checkpoint: Committed, consent: Consent
) -> ResumePoint:
    """A run that goes on from a checkpoint of its own."""
    manifest, remarks = checkpoint.manifest, []
    different = changes(config_of(checkpoint), config)
    if words := refusal(config, data, checkpoint, different):
        raise ConfigError(words)
    asked = to_be_accepted(config, checkpoint, different, read_accepted(run_directories(config)))
    if asked and not consent.accept_changes:
        raise ConfigError(not_accepted(config, checkpoint, asked))
    if checkpoint.step < config.train.steps:
        note_accepted(run_directories(config), config, asked)
    if known is not None and known.parents != manifest.lineage:
        remarks.append(f"{RUN_FILE} told of other ancestors than checkpoint {checkpoint.step}, which is believed")
    return ResumePoint(directory, manifest.run, manifest.lineage, checkpoint, "own", different, remarks)


def _to_plain(start: ResumePoint) -> dict[str, Any]:
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


def _from_plain(plain: dict[str, Any]) -> ResumePoint:
    checkpoint = None
    if plain["checkpoint"] is not None:
        checkpoint = Committed(storage_path(plain["checkpoint"]), from_plain(plain["manifest"]))
    return ResumePoint(
        Path(plain["directory"]),
        plain["run"],
        plain["lineage"],
        checkpoint,
        plain["kind"],
        [Change(*change) for change in plain["changes"]],
        plain["remarks"],
        plain["damaged"],
    )
