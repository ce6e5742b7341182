"""Decides whether a run may start, and where it resumes. Process 0 reads its directory, decides, and acts on the
decision.

A run that has no checkpoint yet begins from scratch, with the parameters of another run, or as a branch of one.
"""

import errno
import json
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from jaxmnt.checkpoint.commit import Committed, clean_up, quarantine
from jaxmnt.checkpoint.manifest import DamagedError
from jaxmnt.checkpoint.refs import CHECKPOINTS, RUN_FILE, find
from jaxmnt.config.describe import Change, changes
from jaxmnt.config.load import HUGGING_FACE_PREFIX, MAX_PATH
from jaxmnt.config.schema import Config
from jaxmnt.data.run_tokenizer import tokenizer_of_data
from jaxmnt.data.sources import Sources
from jaxmnt.distributed.coordination import broadcast
from jaxmnt.distributed.identity import Identity
from jaxmnt.errors import ConfigError, PreflightError, UserError, error_of, printable, shortened
from jaxmnt.huggingface.compatibility import (
    Origin,
    check_compatible,
    check_same_parameters,
    folder_origin,
    run_origin,
)
from jaxmnt.huggingface.folder import Folder
from jaxmnt.lora.base import check_without_adapters
from jaxmnt.lora.start import check_adapters, check_branch
from jaxmnt.run import fresh
from jaxmnt.run.branch import branch_point, branch_remark
from jaxmnt.run.changes import (
    changes_outside_config,
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

_DECISION_TIMEOUT_SECONDS = 1800.0
"""Timeout for process 0's decision. Process 0 may have to read many files, and wait for the heartbeat of another
job."""


@dataclass(frozen=True)
class ResumePoint:
    """The point from which a run begins or continues."""

    run_id: Annotated[str, Field(alias="run")]
    """The run's id, which the message to the other processes calls `run`."""
    lineage: list[dict[str, Any]] = field(default_factory=list)
    """The runs and steps that this one was forked from, newest first."""
    checkpoint: Committed | None = None
    """The checkpoint to restore; None to begin with a new state."""
    kind: str = "own"
    """The use of the checkpoint: own (this run's), fork (another run's whole state) or init (another run's
    parameters)."""
    changes: list[Change] = field(default_factory=list)
    """Changes of the config since that checkpoint."""
    remarks: list[str] = field(default_factory=list)
    """Messages for the user about what was taken over, set aside or changed."""
    damage_remarks: list[str] = field(default_factory=list)
    """Those of `remarks` that are about damaged checkpoints."""
    fresh: bool = False
    """True if --fresh was passed, so that the same command may begin another run."""
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
    """Command-line flags of a start, which are not part of the config."""

    accept_changes: bool = False
    """Continue the run although changes alter its maths."""
    fresh: bool = False
    """Set aside the run in the directory, and begin a new one."""


@dataclass(frozen=True)
class Decision:
    """The decision on what to do with a run's directory, once unfinished and damaged checkpoints are cleaned up."""

    resume: ResumePoint | None = None
    """The point at which the run resumes. If this and `refusal` are None and `only_damaged` is False, `begin_run`
    makes the point at which the run begins."""
    changes_to_record: list[Change] | None = None
    """Changes to record as accepted; None to leave the record unchanged."""
    refusal: UserError | None = None
    """The error that refuses this start; None if it may proceed."""
    only_damaged: bool = False
    """True if this start must be refused because only damaged checkpoints are left. `carry_out` raises the error, which
    says where they are kept."""


def decide(
    contents: RunDirectory, config: Config, digests: dict[str, str], flags: ResumeFlags = ResumeFlags()
) -> Decision:
    """Decides what to do with a run's directory, given the `digests` of the data sources. Changes nothing.

    Reads no files, except a checkpoint's number of optimizer updates if the learning rate schedule has changed. Raises
    `UserError` if the directory must be left untouched, so that not even unfinished or damaged checkpoints may be
    cleaned up.
    """
    _check_may_change(contents)
    if contents.checkpoint is not None:
        try:
            return _resume_from(contents, contents.checkpoint, config, digests, flags)
        except UserError as error:
            return Decision(refusal=error)
    if contents.has_damaged:
        return Decision(only_damaged=True)
    if contents.last_committed_step:
        # The committed checkpoints are missing, so a new start at step 0 would lose the training so far.
        return Decision(
            refusal=UserError(
                f"run.dir: there is no checkpoint in {contents.root}, although this run committed one of step "
                f"{contents.last_committed_step} there; check that the folder is mounted and try again, or pass "
                "--fresh, which sets the whole run aside, to begin at step 0"
            )
        )
    return Decision()


def _check_may_change(contents: RunDirectory) -> None:
    """Raises an error if the directory must be left untouched.

    It is a `ConfigError` if the checkpoints may belong to another run, or if the previous checkpoint directory holds a
    later checkpoint than the current directory. It is a `UserError` if a later checkpoint cannot be reached at the
    moment.
    """
    if contents.foreign_checkpoint is not None:
        owner = printable(contents.foreign_checkpoint.manifest.run)
        raise ConfigError(
            f"run.dir: {RUN_FILE} says that this is run {printable(contents.run or '')}, but no valid checkpoint in "
            f"{contents.root} belongs to it, and the newest, of step {contents.foreign_checkpoint.step}, belongs to "
            f"run {owner}; nothing was moved; if the checkpoints are in the right place, write {owner} into "
            f"{RUN_FILE}; otherwise move them elsewhere, or choose another run.dir"
        )
    other_checkpoint = contents.checkpoint_elsewhere
    if other_checkpoint is not None and other_checkpoint.step > contents.step:
        other_directory = other_checkpoint.path.parent.parent
        raise ConfigError(
            f"checkpoint.dir: {other_directory} has the checkpoint of step {other_checkpoint.step} of "
            f"{contents.directory}, but the newest in {contents.root.parent} is that of step {contents.step}; undo the "
            "change of checkpoint.dir, move the checkpoints, or choose another run.dir"
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
    """Decides to resume from a checkpoint of the run.

    Raises `ConfigError` if changes of the config do not allow that, or need --accept-changes.
    """
    manifest = checkpoint.manifest
    accepted = None
    remarks = []
    outside_config = changes_outside_config(checkpoint, config)
    config_changes = [*changes(checkpoint.config, config), *outside_config]
    refuse_changes(config, digests, checkpoint, config_changes)
    unaccepted = unaccepted_changes(config, checkpoint, config_changes, contents.accepted_values)
    if unaccepted and not flags.accept_changes:
        raise ConfigError(unaccepted_message(config, checkpoint, unaccepted))
    if checkpoint.step < config.train.steps:
        # After a change of train.steps that causes no jump of the learning rate here, a restart may fall back to an
        # earlier checkpoint, where the change does cause one. So record the change as accepted, too.
        accepted = [*unaccepted, *(change for change in config_changes if change.key == "train.steps"), *outside_config]
        remarks += rate_remarks(checkpoint, config)
    if contents.run_file is not None and contents.run_file.parents != manifest.lineage:
        remarks.append(
            f"{RUN_FILE} and checkpoint {checkpoint.step} name different parent runs; those of the checkpoint are used"
        )
    return Decision(ResumePoint(manifest.run, manifest.lineage, checkpoint, "own", config_changes, remarks), accepted)


def carry_out(
    decision: Decision, contents: RunDirectory, config: Config, data: Sources, remarks: list[str], flags: ResumeFlags
) -> ResumePoint:
    """Cleans up the run's directory, acts on the decision, and writes run.json. Returns the resume point.

    Its remarks begin with `remarks`. Raises the decision's refusal, and `ConfigError` if the run cannot begin from what
    its config names.
    """
    cleaned, damage_remarks = clean_up(contents.root, contents.run)
    remarks = remarks + cleaned + damage_remarks
    if decision.only_damaged:
        raise ConfigError(
            f"run.dir: no valid checkpoint is left in {contents.root}, only damaged ones "
            f"({'; '.join(remarks) or 'set aside at an earlier start'}); to train again from step 0, pass --fresh, "
            "which sets the whole run aside, or choose another run.dir and checkpoint.dir"
        )
    if decision.refusal is not None:
        raise decision.refusal
    if decision.changes_to_record is not None:
        record_accepted(config, contents.accepted_values, decision.changes_to_record)
    start = decision.resume or begin_run(config, data, contents.run or secrets.token_hex(6))
    for directory in run_directories(config):
        if not (directory / RUN_FILE).exists():
            fields = {"run": start.run_id, "lineage": start.lineage, "time": time.time()}
            begun_by = {"begun_by": fresh.job_identifiers(os.environ)} if flags.fresh else {}
            publish(directory / RUN_FILE, json_text(fields | begun_by, indent=1) + "\n")
    return replace(start, remarks=remarks + start.remarks, damage_remarks=damage_remarks)


def begin_run(config: Config, data: Sources, run: str) -> ResumePoint:
    """Returns the starting point of a run that has no checkpoint yet. `run` is its id.

    Raises `ConfigError` if the run cannot begin from the run or model that its config names.
    """
    source = config.run.fork_from or config.run.init_from
    if source is None:
        if config.lora is not None:
            raise ConfigError(
                "lora: without run.init_from the adapters would train beside random weights; set run.init_from to a "
                "run, or to hf:FOLDER"
            )
        return ResumePoint(run)
    key = "run.fork_from" if config.run.fork_from else "run.init_from"

    def check_origin(origin: Origin) -> list[str]:
        """Checks that the model settings and the tokenizer match. Returns remarks."""
        tokenizer = tokenizer_of_data(data.tokenizer, data.vocab_size, data.folder, data.chat)
        return check_compatible(origin, config.model, tokenizer, config.run.init_from_changes)

    if config.lora is not None and config.lora.init_from is not None:
        check_adapters(config.lora.init_from, config)
    if not config.run.fork_from and source.startswith(HUGGING_FACE_PREFIX):
        folder = Folder(Path(source.removeprefix(HUGGING_FACE_PREFIX)), key)
        remarks = check_origin(folder_origin(folder, key))
        return ResumePoint(run, kind="init", remarks=remarks, weights=folder.path)
    checkpoint = find(source, key)
    if config.run.fork_from:
        check_branch(checkpoint, config)
    else:
        check_without_adapters(checkpoint, key)
    origin = run_origin(source, checkpoint, key)
    remarks = check_origin(origin)
    check_same_parameters(origin, checkpoint, config.model)
    if not config.run.fork_from:
        if config.lora is not None:
            remarks.append(
                f"each start reads the base {checkpoint.path} again; if its run goes on, checkpoint.keep may remove it "
                "(convert to-hf keeps a copy)"
            )
        return ResumePoint(run, checkpoint=checkpoint, kind="init", remarks=remarks)
    if checkpoint.step >= config.train.steps:
        raise ConfigError(
            f"train.steps: {config.train.steps} leaves no steps after step {checkpoint.step} of {key}; raise it"
        )
    refuse_stop(config, checkpoint, key)
    # This is a branch, which continues in the data where its origin stopped.
    manifest, origin_config = checkpoint.manifest, checkpoint.config
    other_data = different_data(manifest.data, data.digests)
    if not other_data and row_numbering(origin_config) == row_numbering(config):
        refuse_skips(config, checkpoint)
    point = branch_point(checkpoint, config)
    branch_message = branch_remark(checkpoint, config, point, other_data)
    parent = {"run": manifest.run, "path": str(checkpoint.path.absolute()), **point._asdict()}
    if branch_message is not None:
        remarks.append(branch_message)
    remarks += rate_remarks(checkpoint, config)
    all_changes = [*changes(origin_config, config), *changes_outside_config(checkpoint, config)]
    return ResumePoint(run, [parent, *manifest.lineage], checkpoint, "fork", all_changes, remarks)


def resume_point(
    config: Config,
    data: Sources,
    identity: Identity,
    locks: Sequence[RunLock],
    report_wait: Callable[[str], None] = lambda line: None,
    flags: ResumeFlags = ResumeFlags(),
) -> ResumePoint:
    """Takes the run's locks, finds the checkpoint to resume from, and compares its config with this one.

    Calls `report_wait` with the reason before it waits for a lock. Raises `ConfigError` if another job uses the
    directory, if a change rules out that the run continues from the checkpoint or must be accepted first, or if no
    steps are left before `train.stop_after`.
    """

    def lock_and_decide() -> ResumePoint:
        must_set_aside = flags.fresh and not fresh.was_begun_by_this_job(run_file_of(config), os.environ)
        directories = run_directories(config)
        if not must_set_aside:
            check_checkpoints_reachable(config)
        for directory in directories:
            directory.mkdir(parents=True, exist_ok=True)
        lock_remarks = [lock.acquire(report_wait) for lock in locks]
        remarks = [remark for remark in lock_remarks if remark]
        if must_set_aside:
            # Check that the new run can begin before the old one is set aside.
            _check_source_stays(config, begin_run(config, data, ""))
            remarks += fresh.set_aside(directories)
        elif flags.fresh:
            remarks.append("--fresh took effect at an earlier start of this job, so the run that it began continues")
        return _read_and_decide(config, data, remarks, flags)

    return replace(_on_process_0("start", lock_and_decide, config, identity), fresh=flags.fresh)


def fall_back(
    start: ResumePoint, damage: DamagedError, config: Config, data: Sources, identity: Identity
) -> ResumePoint:
    """Returns the point to resume from after the checkpoint of `start` proved to be damaged: the newest valid one
    before it.

    Raises `ConfigError` if no checkpoint is valid, or if the damaged one belongs to another run.
    """
    checkpoint = start.checkpoint
    assert checkpoint is not None

    def set_aside_and_decide() -> ResumePoint:
        if start.kind != "own":
            raise ConfigError(f"run.{start.kind}_from: checkpoint {checkpoint.path} is damaged: {damage}; name another")
        new_path = quarantine(checkpoint.path)
        remark = f"checkpoint {checkpoint.step} is damaged: {damage}; kept as {new_path}"
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
            f"run.{start.kind}_from: {source.path} belongs to the run that --fresh sets aside; give another run.dir "
            "instead of --fresh"
        )


# -- sending process 0's decision to all processes


_POINT_ADAPTER = TypeAdapter(ResumePoint)


def _on_process_0(name: str, decide: Callable[[], ResumePoint], config: Config, identity: Identity) -> ResumePoint:
    """Calls `decide` in process 0. Returns its result or raises its error in all processes.

    `name` names the exchange between the processes. Raises `PreflightError` or `ConfigError` if this process does not
    see the checkpoint to restore.
    """
    message = None
    if identity.process_id == 0:
        try:
            with unreadable_is_retryable(config):
                message = json_text({"start": _POINT_ADAPTER.dump_python(decide(), mode="json", by_alias=True)})
        except (UserError, OSError) as error:
            trouble = _user_error(error, config) if isinstance(error, OSError) else error
            message = json_text({"error": str(trouble), "code": trouble.exit_code})
    answer = json.loads(broadcast(name, message, identity, _DECISION_TIMEOUT_SECONDS))
    if "error" in answer:
        raise error_of(answer["code"], answer["error"])
    start = _POINT_ADAPTER.validate_python(answer["start"])
    # Check that the directory is on a file system that this process shares.
    checkpoint = None if start.checkpoint is None else start.checkpoint.path
    source = start.weights or checkpoint
    if not isinstance(source, Path) or source.is_dir():
        return start
    problem = f"process 0 sees {source}, but {identity.label} does not; put"
    directories = [directory for directory in run_directories(config) if isinstance(directory, Path)]
    if start.weights is None and any(source.is_relative_to(directory) for directory in directories):
        raise PreflightError(f"run.dir: {problem} the run directory on a file system that all hosts share").blaming(
            processes=[identity.process_id]
        )
    raise ConfigError(f"run.{start.kind}_from: {problem} it on a file system that all hosts share")


_TRANSIENT_ERRORS = (
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN, errno.EHOSTDOWN, errno.EHOSTUNREACH
)  # fmt: skip
"""Errors of a file server that does not respond or has dropped this client, which may be temporary."""


def _user_error(error: OSError, config: Config) -> UserError:
    """Returns the error that refuses the start.

    It is a `UserError`, so that the start is retried, if a file server does not respond or this run has trained before.
    Otherwise it is a `ConfigError`.
    """
    path = str(error.filename or "")
    kind = UserError if error.errno in _TRANSIENT_ERRORS or has_trained(config) else ConfigError
    for key, directory in zip(("run.dir", "checkpoint.dir"), run_directories(config), strict=False):
        if path.startswith(str(directory)):
            return kind(
                f"{key}: {directory} cannot be used: {error.strerror or error} ({path}); "
                f"fix that, or choose another {key}"
            )
    # A damaged config.yaml may have a path of any length.
    where = path or "a file" if len(path) <= MAX_PATH else shortened(path)
    return kind(f"{where} cannot be used: {error.strerror or error}; fix that and try again")
