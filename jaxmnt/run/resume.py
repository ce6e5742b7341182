"""Where a run goes on from, and whether it may: process 0 reads its directory, decides, and carries it out.

A run that has no checkpoint of its own begins: anew, with another's parameters, or as a branch of another run.
"""

import errno
import json
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from jaxmnt.checkpoint.commit import Committed, clear_up, quarantine
from jaxmnt.checkpoint.manifest import DamagedError
from jaxmnt.checkpoint.refs import CHECKPOINTS, RUN_FILE, find
from jaxmnt.config.describe import Change, changes
from jaxmnt.config.schema import Config
from jaxmnt.data.run_tokenizer import tokenizer_of_data
from jaxmnt.data.sources import Sources
from jaxmnt.distributed.coordination import broadcast
from jaxmnt.distributed.identity import Identity
from jaxmnt.errors import ConfigError, PreflightError, UserError, error_of, printable
from jaxmnt.huggingface.fits import (
    SCHEME,
    check_compatible,
    check_same_parameters,
    folder_origin,
    run_origin,
)
from jaxmnt.huggingface.folder import Folder
from jaxmnt.run import fresh
from jaxmnt.run.branch import branch_point, branch_remark
from jaxmnt.run.changes import (
    different_data,
    not_accepted,
    numbering,
    rate_remarks,
    refuse_changes,
    refuse_skips,
    refuse_stop,
    to_be_accepted,
)
from jaxmnt.run.lock import RunLock
from jaxmnt.run.rundir import (
    RunDirectory,
    check_checkpoints_reachable,
    has_trained,
    is_same_place,
    known_run,
    note_accepted,
    read_directory,
    run_directories,
    unreadable_is_retryable,
)
from jaxmnt.storage import publish
from jaxmnt.strict_json import json_text

_SECONDS = 1800.0
"""How long processes wait for what process 0 finds: it may look at many files, and at another job's signs of life."""


@dataclass(frozen=True)
class ResumePoint:
    """Where a run stands before it goes on."""

    run: str
    """The run's id."""
    lineage: list[dict[str, Any]] = field(default_factory=list)
    """The runs and steps that this one was forked from, newest first."""
    checkpoint: Committed | None = None
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
    def tokens(self) -> int:
        return 0 if self.checkpoint is None or self.kind == "init" else self.checkpoint.manifest.tokens


@dataclass(frozen=True)
class ResumeFlags:
    """What a person says of this start, besides the config."""

    accept_changes: bool = False
    """Go on although that alters the maths of the run."""
    fresh: bool = False
    """Set aside the run that is in the directory, and begin another."""


@dataclass(frozen=True)
class Decision:
    """What to do in a run's directory. What was cut off or damaged is cleared up first, whatever follows."""

    resume: ResumePoint | None = None
    """Where the run goes on from. If that is None, and nothing is refused, the run begins."""
    accepted: list[Change] | None = None
    """Changes to be noted as accepted; None leaves the notes as they are."""
    refusal: UserError | None = None
    """Why the start ends instead."""
    only_damaged: bool = False
    """Whether it ends because no whole checkpoint is left, which is said once it is known where they were kept."""


def decide(
    found: RunDirectory, config: Config, digests: dict[str, str], flags: ResumeFlags = ResumeFlags()
) -> Decision:
    """Decides what becomes of a run's directory, given the `digests` of the data. Changes nothing. Of files it reads
    only how many updates a checkpoint has, if the schedule of the learning rate is another.

    Raises `UserError` where not even what is cut off or damaged may be touched.
    """
    _refuse_to_touch(found)
    if found.checkpoint is not None:
        try:
            return _go_on(found, found.checkpoint, config, digests, flags)
        except UserError as error:
            return Decision(refusal=error)
    if found.damaged:
        return Decision(only_damaged=True)
    if found.committed:  # who begins at step 0 then, loses what has been trained
        return Decision(
            refusal=UserError(
                f"run.dir: {found.root} has no checkpoint, although this run committed one of step {found.committed} "
                "there; check that it is mounted and try again; to begin at step 0, pass --fresh, which sets the whole "
                "run aside"
            )
        )
    return Decision()


def _refuse_to_touch(found: RunDirectory) -> None:
    """Raises `ConfigError` if the checkpoints may be another run's, or there is a later one elsewhere, and `UserError`
    if a later one cannot be reached now."""
    if found.of_others is not None:
        theirs = printable(found.of_others.manifest.run)
        raise ConfigError(
            f"run.dir: {RUN_FILE} says that this is run {printable(found.run or '')}, but no whole checkpoint in "
            f"{found.root} belongs to it: the newest, of step {found.of_others.step}, belongs to run {theirs}; nothing "
            f"was moved; if the checkpoints are right, write {theirs} into {RUN_FILE}; otherwise move them elsewhere, "
            "or choose another run.dir"
        )
    if found.earlier is not None and found.earlier.step > found.step:
        raise ConfigError(
            f"checkpoint.dir: {found.earlier.path.parent.parent} has the checkpoint of step {found.earlier.step} of "
            f"{found.directory}, and the newest in {found.root.parent} is of step {found.step}; undo the change, move "
            "the checkpoints, or choose another run.dir"
        )
    away = [path for step, path in found.out_of_reach if step > found.step]
    if away:
        raise UserError(
            f"run.dir: checkpoint {away[-1]} is a broken link; mount or restore its target, or remove the link to "
            f"continue from step {found.step}"
        )


def _go_on(
    found: RunDirectory, checkpoint: Committed, config: Config, digests: dict[str, str], flags: ResumeFlags
) -> Decision:
    """A run that goes on from a checkpoint of its own. Raises `ConfigError` if this config cannot, or has to ask."""
    manifest, accepted, remarks = checkpoint.manifest, None, []
    different = changes(checkpoint.config, config)
    refuse_changes(config, digests, checkpoint, different)
    asked = to_be_accepted(config, checkpoint, different, found.accepted)
    if asked and not flags.accept_changes:
        raise ConfigError(not_accepted(config, checkpoint, asked))
    if checkpoint.step < config.train.steps:
        # The rate may jump at an earlier checkpoint, which a restart may need, although it does not jump at this one.
        accepted = [*asked, *(change for change in different if change.key == "train.steps")]
        remarks += rate_remarks(checkpoint, config)
    if found.known is not None and found.known.parents != manifest.lineage:
        remarks.append(
            f"{RUN_FILE} and checkpoint {checkpoint.step} name different parent runs; those of the checkpoint count"
        )
    return Decision(ResumePoint(manifest.run, manifest.lineage, checkpoint, "own", different, remarks), accepted)


def carry_out(
    decision: Decision, found: RunDirectory, config: Config, data: Sources, remarks: list[str], flags: ResumeFlags
) -> ResumePoint:
    """Does in the directory what was decided, and names the run there. Returns where it stands, with `remarks` first.

    Raises what the decision refuses, and `ConfigError` if the run cannot begin with what its config names.
    """
    cleared, damaged = clear_up(found.root, found.run)
    remarks = remarks + cleared + damaged
    if decision.only_damaged:
        raise ConfigError(
            f"run.dir: no whole checkpoint is left in {found.root}, only damaged ones "
            f"({'; '.join(remarks) or 'set aside before'}); to train again from step 0, pass --fresh, which sets "
            "the whole run aside, or choose other directories"
        )
    if decision.refusal is not None:
        raise decision.refusal
    if decision.accepted is not None:
        note_accepted(config, found.accepted, decision.accepted)
    start = decision.resume or begin(config, data, found.run or secrets.token_hex(6))
    for where in run_directories(config):
        if not (where / RUN_FILE).exists():
            about = {"run": start.run, "lineage": start.lineage, "time": time.time()}
            begun_by = {"begun_by": fresh.marks(os.environ)} if flags.fresh else {}
            publish(where / RUN_FILE, json_text(about | begun_by, indent=1) + "\n")
    return replace(start, remarks=remarks + start.remarks, damaged=damaged)


def begin(config: Config, data: Sources, run: str) -> ResumePoint:
    """Where a run stands that has no checkpoint of its own yet.

    Raises `ConfigError` if the config names another run or model that it cannot begin with.
    """
    source = config.run.fork_from or config.run.init_from
    if source is None:
        return ResumePoint(run)
    key = "run.fork_from" if config.run.fork_from else "run.init_from"
    tokenizer = lambda: tokenizer_of_data(data.tokenizer, data.vocab_size, data.folder)
    fits = lambda origin: check_compatible(origin, config.model, tokenizer(), config.run.init_from_changes)
    if config.run.init_from and source.startswith(SCHEME):
        folder = Folder(Path(source.removeprefix(SCHEME)), key)
        remarks = fits(folder_origin(folder, key))
        return ResumePoint(run, kind="init", remarks=remarks, weights=folder.path)
    checkpoint = find(source, key)
    origin = run_origin(source, checkpoint, key)
    remarks = fits(origin)
    check_same_parameters(origin, checkpoint, config.model)
    if config.run.init_from:
        return ResumePoint(run, checkpoint=checkpoint, kind="init", remarks=remarks)
    if checkpoint.step >= config.train.steps:
        raise ConfigError(
            f"train.steps: {config.train.steps} leaves nothing to do after step {checkpoint.step} of {key}; raise it"
        )
    refuse_stop(config, checkpoint, key)
    manifest, earlier = checkpoint.manifest, checkpoint.config
    other_data = different_data(manifest.data, data.digests)
    if not other_data and numbering(earlier) == numbering(config):
        refuse_skips(config, checkpoint)
    point = branch_point(checkpoint, config)
    remark = branch_remark(checkpoint, config, point, other_data)
    parent = {"run": manifest.run, "path": str(checkpoint.path.absolute()), **point._asdict()}
    remarks += [*([] if remark is None else [remark]), *rate_remarks(checkpoint, config)]
    return ResumePoint(run, [parent, *manifest.lineage], checkpoint, "fork", changes(earlier, config), remarks)


def resume_point(
    config: Config,
    data: Sources,
    identity: Identity,
    locks: Sequence[RunLock],
    tell: Callable[[str], None] = lambda line: None,
    flags: ResumeFlags = ResumeFlags(),
) -> ResumePoint:
    """Takes the run's locks, finds the checkpoint to go on from, and compares the config with that one's.

    Raises `ConfigError` when another job is in the directory, when something has changed that the checkpoint cannot be
    continued with, or should not without being accepted, or when there is nothing left to do before `train.stop_after`.
    """

    def at_this_start() -> ResumePoint:
        begins_anew = flags.fresh and not fresh.done_before(known_run(config), os.environ)
        places = run_directories(config)
        if not begins_anew:
            check_checkpoints_reachable(config)
        for where in places:
            where.mkdir(parents=True, exist_ok=True)
        remarks = [remark for lock in locks if (remark := lock.acquire(tell))]
        if begins_anew:
            _check_source_stays(config, begin(config, data, ""))
            remarks += fresh.set_aside(places)
        elif flags.fresh:
            remarks.append("--fresh was done at an earlier start of this job, which goes on now")
        return _read_and_decide(config, data, remarks, flags)

    return replace(_by_process_0("start", at_this_start, config, identity), fresh=flags.fresh)


def fall_back(
    start: ResumePoint, damage: DamagedError, config: Config, data: Sources, identity: Identity
) -> ResumePoint:
    """Where the run goes on from when its checkpoint turned out to be damaged: the one before.

    Raises `ConfigError` if there is none that is whole, or if the checkpoint is another run's.
    """
    checkpoint = start.checkpoint
    assert checkpoint is not None

    def from_an_earlier_one() -> ResumePoint:
        if start.kind != "own":
            raise ConfigError(f"run.{start.kind}_from: checkpoint {checkpoint.path} is damaged: {damage}; name another")
        aside = quarantine(checkpoint.path)
        remark = f"checkpoint {checkpoint.step} is damaged: {damage}; kept as {aside}"
        return _read_and_decide(config, data, [remark], ResumeFlags())

    return _by_process_0("fall back", from_an_earlier_one, config, identity)


def _read_and_decide(config: Config, data: Sources, remarks: list[str], flags: ResumeFlags) -> ResumePoint:
    found = read_directory(config)
    return carry_out(decide(found, config, data.digests, flags), found, config, data, remarks, flags)


def _check_source_stays(config: Config, begun: ResumePoint) -> None:
    """Raises `ConfigError` if the run that --fresh would begin starts from a checkpoint that it would set aside."""
    source = begun.checkpoint
    if source is not None and any(
        is_same_place(source.path.parent, where / CHECKPOINTS) for where in run_directories(config)
    ):
        raise ConfigError(
            f"run.{begun.kind}_from: {source.path} is of the run that --fresh sets aside; give another run.dir "
            "instead of --fresh"
        )


# -- what process 0 decides, in all processes


_POINT = TypeAdapter(ResumePoint)


def _by_process_0(name: str, decide: Callable[[], ResumePoint], config: Config, identity: Identity) -> ResumePoint:
    """What process 0 decides, in all processes. Its error, too."""
    told = None
    if identity.process_id == 0:
        try:
            with unreadable_is_retryable(config):
                told = json_text({"start": _POINT.dump_python(decide(), mode="json")})
        except (UserError, OSError) as error:
            trouble = _in_words(error, config) if isinstance(error, OSError) else error
            told = json_text({"error": str(trouble), "code": trouble.exit_code})
    answer = json.loads(broadcast(name, told, identity, _SECONDS))
    if "error" in answer:
        raise error_of(answer["code"], answer["error"])
    start = _POINT.validate_python(answer["start"])
    checkpoint = None if start.checkpoint is None else start.checkpoint.path
    here = start.weights or checkpoint
    if not isinstance(here, Path) or here.is_dir():
        return start
    missing = f"process 0 sees {here}, {identity.label} does not; put"
    places = [where for where in run_directories(config) if isinstance(where, Path)]
    if start.weights is None and any(here.is_relative_to(where) for where in places):
        raise PreflightError(f"run.dir: {missing} the run directory on a file system that all hosts share").blaming(
            processes=[identity.process_id]
        )
    raise ConfigError(f"run.{start.kind}_from: {missing} it on a file system that all hosts share")


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
