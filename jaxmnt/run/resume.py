"""Decides where a run resumes, and whether it may: process 0 reads its directory, decides, and acts on the decision.

A run without a checkpoint of its own begins: from scratch, with another run's parameters, or as a branch of it.
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

from jaxmnt.checkpoint.commit import Committed, clean_up, quarantine
from jaxmnt.checkpoint.manifest import DamagedError
from jaxmnt.checkpoint.refs import CHECKPOINTS, RUN_FILE, find
from jaxmnt.config.describe import Change, changes
from jaxmnt.config.schema import Config
from jaxmnt.data.run_tokenizer import tokenizer_of_data
from jaxmnt.data.sources import Sources
from jaxmnt.distributed.coordination import broadcast
from jaxmnt.distributed.identity import Identity
from jaxmnt.errors import ConfigError, PreflightError, UserError, error_of, printable
from jaxmnt.huggingface.compatibility import (
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
    rate_remarks,
    refuse_changes,
    refuse_skips,
    refuse_stop,
    row_numbering,
    unaccepted_changes,
    unaccepted_message,
)
from jaxmnt.run.lock import RunLock
from jaxmnt.run.rundir import (
    RunDirectory,
    check_checkpoints_reachable,
    has_trained,
    is_same_directory,
    read_directory,
    record_accepted,
    run_directories,
    run_file_of,
    unreadable_is_retryable,
)
from jaxmnt.storage import publish
from jaxmnt.strict_json import json_text

_SECONDS = 1800.0
"""Timeout for process 0's decision: it may read many files, and wait for the heartbeat of another job."""


@dataclass(frozen=True)
class ResumePoint:
    """The point from which a run begins or continues."""

    run: str
    """The run's id."""
    lineage: list[dict[str, Any]] = field(default_factory=list)
    """The runs and steps that this one was forked from, newest first."""
    checkpoint: Committed | None = None
    """The checkpoint to restore; None begins with a new state."""
    kind: str = "own"
    """The checkpoint's origin: own, fork (another run's whole state) or init (another run's parameters)."""
    changes: list[Change] = field(default_factory=list)
    """Changes of the config since that checkpoint."""
    remarks: list[str] = field(default_factory=list)
    """Messages for the user on what was taken over or set aside."""
    damaged: list[str] = field(default_factory=list)
    """Those of `remarks` that are about damaged checkpoints."""
    fresh: bool = False
    """True if --fresh was passed: repeating the same command may begin another run."""
    weights: Path | None = None
    """The Hugging Face folder whose weights to begin with, instead of a checkpoint."""

    @property
    def step(self) -> int:
        return 0 if self.checkpoint is None or self.kind == "init" else self.checkpoint.step

    @property
    def tokens(self) -> int:
        return 0 if self.checkpoint is None or self.kind == "init" else self.checkpoint.manifest.tokens


@dataclass(frozen=True)
class ResumeFlags:
    """Command-line flags of a start, besides the config."""

    accept_changes: bool = False
    """Continue although a change alters the maths of the run."""
    fresh: bool = False
    """Set aside the run in the directory, and begin another one."""


@dataclass(frozen=True)
class Decision:
    """The decision on a run's directory. Unfinished and damaged checkpoints are always cleaned up first."""

    resume: ResumePoint | None = None
    """Where the run resumes. If it is None, and there is no refusal, the run begins."""
    accepted: list[Change] | None = None
    """Changes to record as accepted; None leaves the record unchanged."""
    refusal: UserError | None = None
    """The error with which the start ends instead."""
    only_damaged: bool = False
    """True if the start ends because only damaged checkpoints are left. Its error names where they are kept."""


def decide(
    contents: RunDirectory, config: Config, digests: dict[str, str], flags: ResumeFlags = ResumeFlags()
) -> Decision:
    """Decides what to do with a run's directory, given the `digests` of the data. Changes nothing.

    Reads no files, except a checkpoint's number of updates if the learning rate schedule has changed. Raises
    `UserError` if nothing in the directory may be changed, not even unfinished or damaged checkpoints.
    """
    _refuse_to_touch(contents)
    if contents.checkpoint is not None:
        try:
            return _resume_from(contents, contents.checkpoint, config, digests, flags)
        except UserError as error:
            return Decision(refusal=error)
    if contents.damaged:
        return Decision(only_damaged=True)
    if contents.committed:
        # The committed checkpoints are missing: a new start at step 0 would lose the training so far.
        return Decision(
            refusal=UserError(
                f"run.dir: {contents.root} has no checkpoint, although this run committed one of step "
                f"{contents.committed} there; check that it is mounted and try again; to begin at step 0, pass "
                "--fresh, which sets the whole run aside"
            )
        )
    return Decision()


def _refuse_to_touch(contents: RunDirectory) -> None:
    """Raises `ConfigError` if the checkpoints may be another run's, or there is a later one elsewhere, and `UserError`
    if a later one cannot be reached now."""
    if contents.foreign_checkpoint is not None:
        theirs = printable(contents.foreign_checkpoint.manifest.run)
        raise ConfigError(
            f"run.dir: {RUN_FILE} says that this is run {printable(contents.run or '')}, but no whole checkpoint in "
            f"{contents.root} belongs to it: the newest, of step {contents.foreign_checkpoint.step}, belongs to run "
            f"{theirs}; nothing was moved; if the checkpoints are right, write {theirs} into {RUN_FILE}; otherwise "
            "move them elsewhere, or choose another run.dir"
        )
    elsewhere = contents.checkpoint_elsewhere
    if elsewhere is not None and elsewhere.step > contents.step:
        raise ConfigError(
            f"checkpoint.dir: {elsewhere.path.parent.parent} has the checkpoint of step {elsewhere.step} of "
            f"{contents.directory}, and the newest in {contents.root.parent} is of step {contents.step}; undo the "
            "change, move the checkpoints, or choose another run.dir"
        )
    broken_links = [path for step, path in contents.unreachable if step > contents.step]
    if broken_links:
        raise UserError(
            f"run.dir: checkpoint {broken_links[-1]} is a broken link; mount or restore its target, or remove the link "
            f"to continue from step {contents.step}"
        )


def _resume_from(
    contents: RunDirectory, checkpoint: Committed, config: Config, digests: dict[str, str], flags: ResumeFlags
) -> Decision:
    """Decides to resume from a checkpoint of the run. Raises `ConfigError` if the config's changes do not allow it, or
    need --accept-changes."""
    manifest = checkpoint.manifest
    accepted = None
    remarks = []
    different = changes(checkpoint.config, config)
    refuse_changes(config, digests, checkpoint, different)
    unaccepted = unaccepted_changes(config, checkpoint, different, contents.accepted)
    if unaccepted and not flags.accept_changes:
        raise ConfigError(unaccepted_message(config, checkpoint, unaccepted))
    if checkpoint.step < config.train.steps:
        # A restart may fall back to an earlier checkpoint, where a change of train.steps may make the rate jump
        # although it does not here: record it as accepted, too.
        accepted = [*unaccepted, *(change for change in different if change.key == "train.steps")]
        remarks += rate_remarks(checkpoint, config)
    if contents.run_file is not None and contents.run_file.parents != manifest.lineage:
        remarks.append(
            f"{RUN_FILE} and checkpoint {checkpoint.step} name different parent runs; those of the checkpoint count"
        )
    return Decision(ResumePoint(manifest.run, manifest.lineage, checkpoint, "own", different, remarks), accepted)


def carry_out(
    decision: Decision, contents: RunDirectory, config: Config, data: Sources, remarks: list[str], flags: ResumeFlags
) -> ResumePoint:
    """Acts on a decision in the run's directory, and writes run.json. Returns the resume point, with `remarks` first.

    Raises the decision's refusal, and `ConfigError` if the run cannot begin with what its config names.
    """
    cleaned, damaged = clean_up(contents.root, contents.run)
    remarks = remarks + cleaned + damaged
    if decision.only_damaged:
        raise ConfigError(
            f"run.dir: no whole checkpoint is left in {contents.root}, only damaged ones "
            f"({'; '.join(remarks) or 'set aside before'}); to train again from step 0, pass --fresh, which sets "
            "the whole run aside, or choose other directories"
        )
    if decision.refusal is not None:
        raise decision.refusal
    if decision.accepted is not None:
        record_accepted(config, contents.accepted, decision.accepted)
    start = decision.resume or begin(config, data, contents.run or secrets.token_hex(6))
    for directory in run_directories(config):
        if not (directory / RUN_FILE).exists():
            fields = {"run": start.run, "lineage": start.lineage, "time": time.time()}
            begun_by = {"begun_by": fresh.job_identifiers(os.environ)} if flags.fresh else {}
            publish(directory / RUN_FILE, json_text(fields | begun_by, indent=1) + "\n")
    return replace(start, remarks=remarks + start.remarks, damaged=damaged)


def begin(config: Config, data: Sources, run: str) -> ResumePoint:
    """Returns the starting point of a run that has no checkpoint of its own yet.

    Raises `ConfigError` if the config names another run or model that it cannot begin with.
    """
    source = config.run.fork_from or config.run.init_from
    if source is None:
        return ResumePoint(run)
    key = "run.fork_from" if config.run.fork_from else "run.init_from"
    # Parameters of another model: their shapes and tokenizer must match.
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
    # A branch: it continues in the data where its origin stopped.
    manifest, earlier = checkpoint.manifest, checkpoint.config
    other_data = different_data(manifest.data, data.digests)
    if not other_data and row_numbering(earlier) == row_numbering(config):
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
    """Takes the run's locks, finds the checkpoint to resume from, and compares its config with this one.

    Raises `ConfigError` if another job uses the directory, if a change does not allow the checkpoint to be continued,
    or needs to be accepted, or if there is nothing left to do before `train.stop_after`.
    """

    def lock_and_decide() -> ResumePoint:
        begins_anew = flags.fresh and not fresh.begun_by_this_job(run_file_of(config), os.environ)
        directories = run_directories(config)
        if not begins_anew:
            check_checkpoints_reachable(config)
        for directory in directories:
            directory.mkdir(parents=True, exist_ok=True)
        remarks = [remark for lock in locks if (remark := lock.acquire(tell))]
        if begins_anew:
            # Check that the new run can begin, before the old one is set aside.
            _check_source_stays(config, begin(config, data, ""))
            remarks += fresh.set_aside(directories)
        elif flags.fresh:
            remarks.append("--fresh was done at an earlier start of this job, which goes on now")
        return _read_and_decide(config, data, remarks, flags)

    return replace(_on_process_0("start", lock_and_decide, config, identity), fresh=flags.fresh)


def fall_back(
    start: ResumePoint, damage: DamagedError, config: Config, data: Sources, identity: Identity
) -> ResumePoint:
    """Returns the point to resume from if a run's checkpoint proved to be damaged: the newest valid one before it.

    Raises `ConfigError` if there is no valid one, or if the damaged checkpoint is another run's.
    """
    checkpoint = start.checkpoint
    assert checkpoint is not None

    def set_aside_and_decide() -> ResumePoint:
        if start.kind != "own":
            raise ConfigError(f"run.{start.kind}_from: checkpoint {checkpoint.path} is damaged: {damage}; name another")
        aside = quarantine(checkpoint.path)
        remark = f"checkpoint {checkpoint.step} is damaged: {damage}; kept as {aside}"
        return _read_and_decide(config, data, [remark], ResumeFlags())

    return _on_process_0("fall back", set_aside_and_decide, config, identity)


def _read_and_decide(config: Config, data: Sources, remarks: list[str], flags: ResumeFlags) -> ResumePoint:
    contents = read_directory(config)
    decision = decide(contents, config, data.digests, flags)
    return carry_out(decision, contents, config, data, remarks, flags)


def _check_source_stays(config: Config, start: ResumePoint) -> None:
    """Raises `ConfigError` if the run that --fresh would begin starts from a checkpoint that it would set aside."""
    source = start.checkpoint
    if source is not None and any(
        is_same_directory(source.path.parent, directory / CHECKPOINTS) for directory in run_directories(config)
    ):
        raise ConfigError(
            f"run.{start.kind}_from: {source.path} is of the run that --fresh sets aside; give another run.dir "
            "instead of --fresh"
        )


# -- sending process 0's decision to all processes


_POINT = TypeAdapter(ResumePoint)


def _on_process_0(name: str, decide: Callable[[], ResumePoint], config: Config, identity: Identity) -> ResumePoint:
    """Calls `decide` in process 0, and returns its result, or raises its error, in all processes.

    Raises `PreflightError` or `ConfigError` if this process does not see the checkpoint to restore.
    """
    message = None
    if identity.process_id == 0:
        try:
            with unreadable_is_retryable(config):
                message = json_text({"start": _POINT.dump_python(decide(), mode="json")})
        except (UserError, OSError) as error:
            trouble = _user_error(error, config) if isinstance(error, OSError) else error
            message = json_text({"error": str(trouble), "code": trouble.exit_code})
    answer = json.loads(broadcast(name, message, identity, _SECONDS))
    if "error" in answer:
        raise error_of(answer["code"], answer["error"])
    start = _POINT.validate_python(answer["start"])
    # The directory may not be on a file system that this process shares.
    checkpoint = None if start.checkpoint is None else start.checkpoint.path
    source = start.weights or checkpoint
    if not isinstance(source, Path) or source.is_dir():
        return start
    missing = f"process 0 sees {source}, {identity.label} does not; put"
    directories = [directory for directory in run_directories(config) if isinstance(directory, Path)]
    if start.weights is None and any(source.is_relative_to(directory) for directory in directories):
        raise PreflightError(f"run.dir: {missing} the run directory on a file system that all hosts share").blaming(
            processes=[identity.process_id]
        )
    raise ConfigError(f"run.{start.kind}_from: {missing} it on a file system that all hosts share")


_TRANSIENT = (
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN, errno.EHOSTDOWN, errno.EHOSTUNREACH
)  # fmt: skip
"""Errors of a file server that does not answer or has dropped this client: they may be temporary."""


def _user_error(error: OSError, config: Config) -> UserError:
    """Returns a `UserError`, so that the start is retried, if the server does not answer or this run has used the path
    before; else a `ConfigError`."""
    path = str(error.filename or "")
    kind = UserError if error.errno in _TRANSIENT or has_trained(config) else ConfigError
    for key, directory in zip(("run.dir", "checkpoint.dir"), run_directories(config), strict=False):
        if path.startswith(str(directory)):
            return kind(
                f"{key}: {directory} cannot be used: {error.strerror or error} ({path}); "
                f"fix that, or choose another {key}"
            )
    return kind(f"{path or 'a file'} cannot be used: {error.strerror or error}; fix that and try again")
