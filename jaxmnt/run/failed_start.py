"""Records why a start failed, so that a launcher can exclude a host, or start again without counting a failure."""

import socket
from contextlib import ExitStack, suppress
from typing import Any, Self

from jaxmnt.config.schema import Config
from jaxmnt.distributed.identity import Identity
from jaxmnt.distributed.termination import (
    AbandonedStart,
    AbsentError,
    ExitHandler,
    ExitReason,
    StoppedError,
    check_abandoned_starts,
    exit_reason_of,
)
from jaxmnt.errors import ConfigError, ExitCode, UserError, summary
from jaxmnt.telemetry import clock
from jaxmnt.telemetry.events import FAILED_START, Events, event_file, read_lines
from jaxmnt.telemetry.notify import Notifier

_START_ERROR_CODES = (ExitCode.CONFIG, ExitCode.PREFLIGHT)
"""Exit codes of errors that are found at the start. An error that names a host is recorded as a failed start."""


class FailedStartRecorder:
    """Context manager that writes an event if an error in it names hosts or processes, or if this process ends in it.

    If the start is abandoned, ends the process with the exit code that means that nothing is lost. After `run_opened()`
    the run records its own end, and this class records only errors that name a host or a process.
    """

    def __init__(self, config: Config, identity: Identity, exit_handler: ExitHandler):
        self._run_dir, self._identity, self._exit_handler = config.run_dir, identity, exit_handler
        self._notify = config.run.notify
        self._run_is_open = False
        self._hooks = ExitStack()

    def run_opened(self) -> None:
        """Call this when the run begins to write its own events."""
        self._run_is_open = True

    def __enter__(self) -> Self:
        self._hooks.enter_context(self._exit_handler.with_hook(self._record))
        return self

    def __exit__(self, kind: object, raised: BaseException | None, trace: object) -> None:
        if raised is None:
            self._hooks.close()  # after an error the hook stays, because the process is about to end
        elif isinstance(raised, UserError):
            self._end_with(raised)
        elif isinstance(raised, Exception) and not self._run_is_open and self._exit_handler.exit_reason is None:
            # If there is an exit reason, the other processes know of the failure, and the hook records it.
            why, host = summary(raised), socket.gethostname()
            self._try_to_record(ExitReason("failed", why, ExitCode.FAILURE, self._identity.process_id, host))

    def _end_with(self, raised: UserError) -> None:
        """Records the error, or ends the process if the start is abandoned. May raise another error instead."""
        error = self._final_error(raised)
        if error is None:
            self._exit_handler.exit_now(exit_reason_of(raised))
        if error.hosts or error.processes:
            process, host = next(iter(error.processes), None), next(iter(error.hosts), None)
            self._try_to_record(ExitReason(FAILED_START, str(error), error.exit_code, process, host))
        if error is not raised:
            raise error from raised.__cause__

    def _final_error(self, error: UserError) -> UserError | None:
        """Returns the error with which the start fails; None if the start is abandoned, so that it can be tried
        again."""
        if isinstance(error, AbsentError):
            events = read_lines(event_file(self._run_dir, self._identity.process_id))
            try:
                check_abandoned_starts(events, error, clock.now())
            except ConfigError as final_error:
                return final_error
        return None if isinstance(error, (AbsentError, StoppedError)) else error

    def _record(self, exit_reason: ExitReason) -> None:
        if not self._run_is_open and exit_reason.code not in _START_ERROR_CODES:
            note_exit_reason(self._open_events(), exit_reason)

    def _open_events(self) -> Events:
        """Opens this process's event log. Its events are passed to `run.notify` like those of a run."""
        events = Events(self._run_dir, self._identity.process_id)
        with suppress(ConfigError):  # the program of run.notify does not exist; the run itself will report that
            events.on_written = Notifier(self._notify, self._identity.process_id, str(self._run_dir.absolute()))
        return events

    def _try_to_record(self, exit_reason: ExitReason) -> None:
        """Records the reason if possible. Ignores failures, because the run directory may be the cause of the error,
        which is shown anyway."""
        with suppress(OSError, ValueError):
            note_exit_reason(self._open_events(), exit_reason)


def note_exit_reason(events: Events, exit_reason: ExitReason, **position: Any) -> None:
    """Writes the event about the end of this process and its reason. `position` has the step that the process was
    taking."""
    start_details = {}
    if isinstance(exit_reason, AbandonedStart):
        start_details = {
            "reason": exit_reason.reason,
            "asked_by": exit_reason.asked_by,
            "waited_seconds": exit_reason.waited_seconds,
        }
    events.write(
        exit_reason.kind,
        why=exit_reason.why,
        **start_details,
        code=int(exit_reason.code),
        at_fault=exit_reason.process,
        at_fault_host=exit_reason.host,
        by_itself=exit_reason.by_itself,
        **position,
    )
