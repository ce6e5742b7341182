"""Where a run goes on from, whether this config may, and the state that it then begins with."""

import errno
import json
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxmnt.checkpoint.commit import Committed, clear_up, newest_valid, quarantine
from jaxmnt.checkpoint.manifest import DamagedError, from_plain, to_plain
from jaxmnt.checkpoint.refs import CHECKPOINTS, RUN_FILE, RunFile, find
from jaxmnt.checkpoint.restore import restore
from jaxmnt.config.describe import Change, changes
from jaxmnt.config.schema import Config
from jaxmnt.data.order import BranchPoint
from jaxmnt.data.run_tokenizer import of_data
from jaxmnt.data.sources import Sources
from jaxmnt.distributed.coordination import broadcast
from jaxmnt.distributed.identity import Identity
from jaxmnt.errors import ConfigError, PreflightError, UserError, error_of
from jaxmnt.huggingface.fits import (
    SCHEME,
    Origin,
    folder_origin,
    refuse_other_arrays,
    refuse_what_does_not_fit,
    run_origin,
)
from jaxmnt.huggingface.folder import Folder
from jaxmnt.huggingface.load import load_parameters
from jaxmnt.run import fresh
from jaxmnt.run.branch import branch_point, branch_points, branch_remark, config_of
from jaxmnt.run.changes import (
    data_refusal,
    different_data,
    has_trained,
    not_accepted,
    note_accepted,
    numbering,
    read_accepted,
    refusal,
    skip_refusal,
    stop_refusal,
    to_be_accepted,
    unreadable_is_retryable,
)
from jaxmnt.run.learning_rate import rate_remarks
from jaxmnt.run.lock import RunLock
from jaxmnt.run.rundir import (
    check_checkpoints_reachable,
    check_earlier_checkpoint_dir,
    check_no_newer_link,
    check_nothing_committed,
    check_run_id,
    checkpoint_root,
    is_same_place,
    known_run,
    run_directories,
)
from jaxmnt.storage import publish, storage_path
from jaxmnt.strict_json import json_text
from jaxmnt.telemetry.events import Events
from jaxmnt.telemetry.progress import StatusLine
from jaxmnt.training.compile import Program
from jaxmnt.training.state import model_state

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
    weights: Path | None = None
    """Instead of a checkpoint: the folder of Hugging Face whose weights to begin with."""

    @property
    def step(self) -> int:
        return 0 if self.checkpoint is None or self.kind == "init" else self.checkpoint.step

    @property
    def branches(self) -> list[BranchPoint]:
        """Where the run branched off, in its data, the newest first."""
        return branch_points(self.lineage)

    @property
    def tokens(self) -> int:
        return 0 if self.checkpoint is None or self.kind == "init" else self.checkpoint.manifest.tokens


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
        begin_anew = consent.fresh and not fresh.done_before(known_run(config), os.environ)
        if not begin_anew:
            check_checkpoints_reachable(config, directory)
        for where in run_directories(config):
            where.mkdir(parents=True, exist_ok=True)
        remarks = [remark for lock in locks if (remark := lock.acquire(tell))]
        if begin_anew:
            _check_source_stays(config, _begin(config, data, directory, None))
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


def _decided(name: str, decide: Callable[[], ResumePoint], config: Config, identity: Identity) -> ResumePoint:
    """What process 0 decides, in all processes. Its error, too."""
    told = None
    if identity.process_id == 0:
        try:
            with unreadable_is_retryable(config):
                told = json_text({"start": _to_plain(decide())})
        except (UserError, OSError) as error:
            trouble = _in_words(error, config) if isinstance(error, OSError) else error
            told = json_text({"error": str(trouble), "code": trouble.exit_code})
    answer = json.loads(broadcast(name, told, identity, _SECONDS))
    if "error" in answer:
        raise error_of(answer["code"], answer["error"])
    plain = answer["start"]
    if plain["weights"] is not None and not Path(plain["weights"]).is_dir():
        raise ConfigError(
            f"run.init_from: process 0 sees {plain['weights']}, {identity.label} does not; "
            "put it on a file system that all hosts share"
        )
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


_TRANSIENT = (
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN, errno.EHOSTDOWN, errno.EHOSTUNREACH
)  # fmt: skip
"""Errors of a file server that does not answer or has dropped this client: they may pass."""


def _in_words(error: OSError, config: Config) -> UserError:
    """A `UserError`, which is tried again, if it may pass: the server does not answer, or this run has used the path
    before. Else a `ConfigError`."""
    where = str(error.filename or "")
    kind = UserError if error.errno in _TRANSIENT or has_trained(config) else ConfigError
    for key, directory in zip(("run.dir", "checkpoint.dir"), run_directories(config), strict=False):
        if where.startswith(str(directory)):
            return kind(
                f"{key}: {directory} cannot be used: {error.strerror or error} ({where}); "
                f"fix that, or choose another {key}"
            )
    return kind(f"{where or 'a file'} cannot be used: {error.strerror or error}; fix that and try again")


def _decide(config: Config, data: Sources, directory: Path, remarks: list[str], consent: Consent) -> ResumePoint:
    root = checkpoint_root(config) / CHECKPOINTS
    known = known_run(config)
    checkpoint = newest_valid(root, None if known is None else known.run)
    if known is not None:
        if checkpoint is None:
            check_run_id(root, known)
        check_earlier_checkpoint_dir(config, directory, known.run, 0 if checkpoint is None else checkpoint.step)
    check_no_newer_link(root, 0 if checkpoint is None else checkpoint.step)
    told, damaged = clear_up(root, None if known is None else known.run)
    remarks = remarks + told + damaged
    if checkpoint is not None:
        start = _resume(config, data, directory, known, checkpoint, consent)
    elif root.is_dir() and any(".damaged" in path.name for path in root.iterdir()):
        raise ConfigError(
            f"run.dir: no whole checkpoint is left in {root}, only damaged ones "
            f"({'; '.join(remarks) or 'set aside before'}); to train again from step 0, pass --fresh, which sets "
            "the whole run aside, or choose other directories"
        )
    else:
        if known is not None:
            check_nothing_committed(root, directory)
        start = _begin(config, data, directory, known)
    for where in run_directories(config):
        if not (where / RUN_FILE).exists():
            about = {"run": start.run, "lineage": start.lineage, "time": time.time()}
            begun_by = {"begun_by": fresh.marks(os.environ)} if consent.fresh else {}
            publish(where / RUN_FILE, json_text(about | begun_by, indent=1) + "\n")
    return replace(start, remarks=remarks + start.remarks, damaged=damaged)


def _begin(config: Config, data: Sources, directory: Path, known: RunFile | None) -> ResumePoint:
    """A run that has no checkpoint of its own yet."""
    run = secrets.token_hex(6) if known is None else known.run
    source = config.run.fork_from or config.run.init_from
    if source is None:
        return ResumePoint(directory, run, [], None)
    key = "run.fork_from" if config.run.fork_from else "run.init_from"
    if config.run.init_from and source.startswith(SCHEME):
        folder = Folder(Path(source.removeprefix(SCHEME)), key)
        remarks = _check_origin(config, data, folder_origin(folder, key))
        return ResumePoint(directory, run, [], None, "init", remarks=remarks, weights=folder.path)
    checkpoint = find(source, key)
    origin = run_origin(source, checkpoint, key)
    remarks = _check_origin(config, data, origin)
    refuse_other_arrays(origin, checkpoint, config.model)
    if config.run.init_from:
        return ResumePoint(directory, run, [], checkpoint, "init", remarks=remarks)
    manifest = checkpoint.manifest
    if manifest.step >= config.train.steps:
        raise ConfigError(
            f"train.steps: {config.train.steps} leaves nothing to do after step {manifest.step} of {key}; raise it"
        )
    if words := stop_refusal(config, checkpoint, key):
        raise ConfigError(words)
    earlier, other_data = config_of(checkpoint), different_data(manifest.data, data.digests)
    if not other_data and numbering(earlier) == numbering(config) and (words := skip_refusal(config, checkpoint)):
        raise ConfigError(words)
    point = branch_point(checkpoint, config)
    remark = branch_remark(checkpoint, config, point, other_data)
    parent = {"run": manifest.run, "path": str(checkpoint.path.absolute()), **point._asdict()}
    remarks += [*([] if remark is None else [remark]), *rate_remarks(checkpoint, config)]
    lineage = [parent, *manifest.lineage]
    return ResumePoint(directory, run, lineage, checkpoint, "fork", changes(earlier, config), remarks)


def _check_origin(config: Config, data: Sources, origin: Origin) -> list[str]:
    """Compares what a run begins with with its config and data. Returns remarks for people."""
    tokenizer = of_data(data.tokenizer, data.vocab_size, data.folder)
    return refuse_what_does_not_fit(origin, config.model, tokenizer, config.run.init_from_changes)


def _check_source_stays(config: Config, begun: ResumePoint) -> None:
    """Raises `ConfigError` if the run that --fresh would begin starts from a checkpoint that it would set aside."""
    source = begun.checkpoint
    if source is None:
        return
    for where in run_directories(config):
        if is_same_place(source.path.parent, where / CHECKPOINTS):
            raise ConfigError(
                f"run.{begun.kind}_from: {source.path} is of the run that --fresh sets aside; give another run.dir "
                "instead of --fresh"
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
        # The rate may jump at an earlier checkpoint, which a restart may need, although it does not jump at this one.
        noted = [*asked, *(change for change in different if change.key == "train.steps")]
        note_accepted(run_directories(config), config, noted)
        remarks += rate_remarks(checkpoint, config)
    if known is not None and known.parents != manifest.lineage:
        remarks.append(
            f"{RUN_FILE} and checkpoint {checkpoint.step} name different parent runs; those of the checkpoint count"
        )
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
        "weights": None if start.weights is None else str(start.weights),
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
        weights=None if plain["weights"] is None else Path(plain["weights"]),
    )


def refuse_other_data(config: Config, data: Sources, start: ResumePoint) -> None:
    """Raises `ConfigError` if data, of which more is known now, is not what the run's own checkpoint was trained on."""
    if start.checkpoint is not None and start.kind == "own" and (words := data_refusal(config, data, start.checkpoint)):
        raise ConfigError(words)


# -- the state

REQUIRED_PARTS = ("params", "optimizer", "counters")
"""Every checkpoint has these parts of the state; others may have been added since it was written."""


def starting_state(
    config: Config,
    data: Sources,
    program: Program,
    start: ResumePoint,
    identity: Identity,
    events: Events,
    status: StatusLine,
) -> tuple[ResumePoint, Any]:
    """The state to go on from, and where that is: earlier than `start` if its checkpoint turns out to be damaged."""
    while (checkpoint := start.checkpoint) is not None:
        wanted = wanted_of(program, checkpoint, parameters_only=start.kind == "init")
        spread = _spreads(config, program, identity)
        try:
            restored = restore(checkpoint, wanted, identity, verify=config.checkpoint.verify, spread=spread)
        except DamagedError as damage:
            events.write("checkpoint_damaged", step=checkpoint.step, why=str(damage))
            start = fall_back(start, damage, config, data, identity)
            for remark in start.remarks:
                status.line(f"WARNING {remark}")
            found = "from the start" if start.checkpoint is None else f"from step {start.step}"
            status.line(f"WARNING going on {found} instead")
            continue
        events.write(
            "restore",
            step=checkpoint.step,
            source=start.kind,
            bytes=restored.bytes,
            read_seconds=restored.read_seconds,
            verify_seconds=restored.verify_seconds,
        )
        return start, completed(program, program.from_canonical(restored.state))
    if start.weights is not None:
        return start, _begun_with_weights(program, start.weights, identity, events)
    return start, program.init()


def _begun_with_weights(program: Program, path: Path, identity: Identity, events: Events) -> dict[str, Any]:
    """The state at the start of a run, with the parameters of a folder of Hugging Face."""
    abstract = program.canonical_abstract_state["params"]
    loaded = load_parameters(path, program.spec.definition, abstract, identity)
    events.write("restore", step=0, source="hf", bytes=loaded.bytes, read_seconds=loaded.seconds, verify_seconds=0.0)
    return completed(program, program.from_canonical({"params": loaded.params}))


def wanted_of(program: Program, checkpoint: Committed, *, parameters_only: bool = False) -> dict[str, Any]:
    """The abstract state of what is taken from the checkpoint, by part."""
    abstract = program.canonical_abstract_state
    stored = {name.partition("/")[0] for name in checkpoint.manifest.arrays}
    if parameters_only:
        return {part: tree for part, tree in model_state(abstract).items() if part == "params" or part in stored}
    if missing := sorted(set(REQUIRED_PARTS) - stored):
        raise ConfigError(f"checkpoint {checkpoint.path} lacks {missing[0]}; it was not written by a training run")
    return {part: tree for part, tree in abstract.items() if part in stored}


def completed(program: Program, state: dict[str, Any]) -> dict[str, Any]:
    """The state with the parts that the checkpoint does not have, as at the start of a run."""
    missing = [part for part in program.abstract_state if part not in state]
    if not missing:
        return state
    fresh = program.init()
    return {part: state.get(part, fresh[part]) for part in program.abstract_state}


def _spreads(config: Config, program: Program, identity: Identity) -> bool:
    """Whether replicas share the reading. On CPU, and inside a host, the file cache is quicker than the exchange."""
    if config.checkpoint.read != "auto":
        return config.checkpoint.read == "spread"
    return not identity.alone and program.placement.mesh.devices.flat[0].platform != "cpu"
