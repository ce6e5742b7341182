"""Decides when a run saves, reports its saves, retries failed ones, and ends the run after too many failures."""

import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jaxmnt.checkpoint.commit import add_loss, step_directories
from jaxmnt.checkpoint.device_digest import start_digests
from jaxmnt.checkpoint.manifest import Base, Manifest
from jaxmnt.checkpoint.names import arrays_by_name
from jaxmnt.checkpoint.refs import CHECKPOINTS
from jaxmnt.checkpoint.retention import SaveTimer, shortage, space_needed
from jaxmnt.checkpoint.saver import Saver, SaveResult
from jaxmnt.config.own_code import own_modules
from jaxmnt.config.schema import Config
from jaxmnt.distributed.coordination import broadcast
from jaxmnt.errors import UserError
from jaxmnt.run.changes import MODULE_PREFIX
from jaxmnt.run.lock import RunLock
from jaxmnt.run.rundir import checkpoint_root, plain_config
from jaxmnt.run.values import CompiledRun
from jaxmnt.storage import is_link
from jaxmnt.telemetry.events import event_file, history
from jaxmnt.telemetry.reliability import seconds_between_failures
from jaxmnt.training.state import saved_state, stored_bytes

_RETRY_SECONDS = (0.0, 30.0, 120.0)
"""Delay before the retry after the first failure in a row, the second one, and each later one."""


def _libraries(config: Config) -> dict[str, str]:
    """Returns the versions of libraries, and the digests of the modules of the user's own code."""
    versions = {name: version(name) for name in ("jax", "orbax-checkpoint", "tensorstore")}
    return versions | {f"{MODULE_PREFIX}{name}": digest for name, digest in own_modules(config).items()}


class CheckpointManager:
    """Saves the checkpoints of a run. All processes must call the same methods after the same steps."""

    def __init__(self, run: CompiledRun, base: Base | None):
        """`base` describes the frozen parameters of a run with adapters."""
        config, program = run.config, run.program
        self._settings = config.checkpoint
        self._program = program
        self._events = run.events
        self._status = run.status
        self._identity = run.identity
        self._root = checkpoint_root(config) / CHECKPOINTS
        needed = space_needed(stored_bytes(program.saved_abstract_state), run.identity.processes)
        self._space_needed = needed
        self._locks = run.locks
        self._eval_tokens = config.train.eval_tokens
        self.saver = Saver(self._root, config.checkpoint, needed, run.identity, lambda: _confirm_locks(run.locks))
        self._manifest = partial(
            Manifest,
            run=run.start.run_id,
            config=plain_config(config),
            data=run.data.digests,
            lineage=run.start.lineage,
            libraries=_libraries(config),
            base=base,
        )
        self._timer = self._make_timer(run.directory, program.placement.mesh.size)
        self._saved_step = run.start.step
        self._failed_in_a_row = 0
        self._last_failure = ""
        self._retry_at: float | None = None
        self._last_blocked_seconds = 0.0
        self.count = 0
        """Number of checkpoints that this start has committed."""
        self.blocked_seconds = 0.0
        """Seconds for which saves of this start have blocked training."""

    def prepare(self, state: Any) -> None:
        """Compiles the programs that a save runs on the devices, so that the first save does not wait for them."""
        start_digests(arrays_by_name(self._to_saved(state))).wait()

    def _to_saved(self, state: Any) -> Any:
        """Returns the part of the state that a checkpoint contains, in the checkpoint layout."""
        return self._program.to_canonical(saved_state(self._program.spec, state))

    @property
    def succeeded(self) -> bool:
        """True if the last save succeeded."""
        return not self._failed_in_a_row

    def check_room(self) -> None:
        """Raises `UserError`, in all processes, if there is no space for a checkpoint.

        Prints a note if there is no space for all checkpoints that are to be kept.
        """
        message = None
        if self._identity.process_id == 0:
            message = shortage(self._root, self._space_needed) or ""
        missing_space = broadcast("room for a checkpoint", message, self._identity)
        if missing_space:
            raise UserError(
                f"checkpoint.dir: not enough space for one checkpoint: {missing_space}; free space or choose "
                "another directory"
            )
        if self._identity.process_id == 0 and isinstance(self._root, Path):
            present = sum(not is_link(path) for _, path in step_directories(self._root))
            further_checkpoints = max(1, self._settings.keep + 1 - present)
            message = shortage(self._root, self._space_needed, further_checkpoints)
            if message:
                self._status.line(f"note    {self._settings.keep + 1} checkpoints will not fit: {message}")

    def wants_save(self) -> bool:
        """Returns True if this is process 0 and it requests a save, because one is due by time or the last one
        failed."""
        if self._identity.process_id != 0 or self.saver.is_saving:
            return False
        now = time.monotonic()
        return self._timer.is_due(now) or (self._retry_at is not None and now >= self._retry_at)

    def is_due(self, step: int, requested_in: int) -> bool:
        """Returns True if a save is due after `step`, given the last step in which a process requested one."""
        interval = self._settings.every_steps
        return (interval > 0 and step % interval == 0) or requested_in > self._saved_step

    def save(self, step: int, state: Any, tokens: int, loss: float | None) -> float:
        """Starts a save of the state after `step`. Returns for how many seconds that blocked training.

        Raises `UserError` if `checkpoint.max_failed_saves` saves have failed in a row.
        """
        started = time.perf_counter()
        self.poll(wait=True)
        self._give_up_after_too_many()
        self._events.write("checkpoint_begin", step=step)
        self._timer.last_save_time = time.monotonic()
        self._saved_step, self._retry_at = step, None
        describe = lambda arrays: self._manifest(step=step, arrays=arrays, tokens=tokens, loss=loss, time=time.time())
        self.saver.save(step, self._to_saved(state), describe)
        self._last_blocked_seconds = time.perf_counter() - started
        self.blocked_seconds += self._last_blocked_seconds
        return self._last_blocked_seconds

    def add_loss(self, step: int, loss: float | None) -> None:
        """Adds the held-out loss of a later evaluation to the committed checkpoint of `step`, in process 0.

        From then on `checkpoint.keep_best` and RUN@best consider the checkpoint.
        """
        if self._identity.process_id != 0 or loss is None:
            return
        try:
            _confirm_locks(self._locks)
            add_loss(self._root / str(step), loss, self._eval_tokens)
        except (OSError, UserError) as error:
            self._status.line(
                f"WARNING the held-out loss of checkpoint {step} could not be added to it: {error}; RUN@best and "
                "checkpoint.keep_best ignore this checkpoint"
            )

    def poll(self, *, wait: bool = False) -> None:
        """Reports the outcome of the last save, if it is known by now. With `wait`, waits until it is."""
        result = self.saver.result(wait=wait)
        if result is None:
            return
        if result.failure is not None:
            self._report_failure(result, result.failure)
            return
        if result.removal_failure is not None:
            self._status.line(
                f"WARNING older checkpoints could not be removed: {result.removal_failure}; fix that, and the next "
                "save will remove them"
            )
        self._failed_in_a_row = 0
        self.count += 1
        self._timer.record_cost(self._last_blocked_seconds, result.seconds)
        self._events.write(
            "checkpoint_commit",
            step=result.step,
            seconds=result.seconds,
            blocked_seconds=self._last_blocked_seconds,
            bytes=result.bytes,
            next_seconds=self._timer.seconds,
            not_removed=result.removal_failure,
        )

    def finish(self, step: int, state: Any, tokens: int, loss: float | None) -> None:
        """Returns when the save of the last step is committed. Repeats a save that failed."""
        self.poll(wait=True)
        while self._failed_in_a_row:
            self.save(step, state, tokens, loss)
            self.poll(wait=True)

    def _report_failure(self, result: SaveResult, why: str) -> None:
        self._failed_in_a_row += 1
        delay = _RETRY_SECONDS[min(self._failed_in_a_row, len(_RETRY_SECONDS)) - 1]
        self._retry_at = time.monotonic() + delay
        self._events.write("checkpoint_failed", step=result.step, why=why, failed_in_a_row=self._failed_in_a_row)
        self._status.line(
            f"WARNING checkpoint {result.step} could not be saved: {why}; the save will be tried again (failure "
            f"{self._failed_in_a_row} of {self._settings.max_failed_saves} in a row)"
        )
        self._last_failure = why

    def _give_up_after_too_many(self) -> None:
        if self._failed_in_a_row >= self._settings.max_failed_saves:
            raise UserError(
                f"{self._failed_in_a_row} saves in a row failed in {self._root}: {self._last_failure}; "
                "check space and permissions, then start the run again, which resumes from the last checkpoint"
            )

    def _make_timer(self, run_dir: Path, devices: int) -> SaveTimer:
        failures, running_seconds = history(event_file(run_dir, 0))
        configured_hours = self._settings.hours_between_failures
        mean_seconds, source = seconds_between_failures(configured_hours, failures, running_seconds, devices)
        if self._settings.every_minutes == "auto" and self._identity.process_id == 0:
            self._status.line(
                f"note    saves are timed for one failure every {mean_seconds / 3600:.1f} hours ({source})"
            )
        return SaveTimer(self._settings.every_minutes, mean_seconds, time.monotonic())


def _confirm_locks(locks: list[RunLock]) -> None:
    for lock in locks:
        lock.confirm()
