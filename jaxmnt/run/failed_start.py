"""What is noted of a start that came to nothing: a launcher can then leave a host out, or start again at no cost."""

import socket
from contextlib import ExitStack, suppress
from typing import Self

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

_ABOUT_THE_START = (ExitCode.CONFIG, ExitCode.PREFLIGHT)
"""With these a start ends by an error of ours. Where that names a host, it is noted as a failed start."""


class FailedStartRecorder:
    """Writes an event about an error inside that names hosts or processes, and about this process's end.

    Used as a context manager. A start that is abandoned ends the process here, with the code that says that nothing is
    lost. After `run_opened()` the run notes its own end, and this notes only errors that name a host or a process.
    """

    def __init__(self, config: Config, identity: Identity, exit_handler: ExitHandler):
        self._run_dir, self._identity, self._exit_handler = config.run_dir, identity, exit_handler
        self._notify = config.run.notify
        self._over = False
        self._held = ExitStack()

    def run_opened(self) -> None:
        """The run has events of its own."""
        self._over = True

    def __enter__(self) -> Self:
        self._held.enter_context(self._exit_handler.with_hook(self._note))
        return self

    def __exit__(self, kind: object, raised: BaseException | None, trace: object) -> None:
        if raised is None:
            self._held.close()  # else the hook stays, for the end that follows
        elif isinstance(raised, UserError):
            self._end_with(raised)
        elif isinstance(raised, Exception) and not self._over and self._exit_handler.exit_reason is None:
            # Else the others have heard of it, and it is noted at the end.
            why, host = summary(raised), socket.gethostname()
            self._try_to_note(ExitReason("failed", why, ExitCode.FAILURE, self._identity.process_id, host))

    def _end_with(self, raised: UserError) -> None:
        """Raises another error in its place if a person has to look after it."""
        error = self._judged(raised)
        if error is None:
            self._exit_handler.exit_now(exit_reason_of(raised))
        if error.hosts or error.processes:
            process, host = next(iter(error.processes), None), next(iter(error.hosts), None)
            self._try_to_note(ExitReason(FAILED_START, str(error), error.exit_code, process, host))
        if error is not raised:
            raise error from raised.__cause__

    def _judged(self, error: UserError) -> UserError | None:
        """The error with which the start ends; None if it is abandoned, and can be made again."""
        if isinstance(error, AbsentError):
            try:
                check_abandoned_starts(
                    read_lines(event_file(self._run_dir, self._identity.process_id)), error, clock.now()
                )
            except ConfigError as final:
                return final
        return None if isinstance(error, (AbsentError, StoppedError)) else error

    def _note(self, exit_reason: ExitReason) -> None:
        if not self._over and exit_reason.code not in _ABOUT_THE_START:
            note_exit_reason(self._events(), exit_reason)

    def _events(self) -> Events:
        """Of this process; who is told of a run's events is told of these, too."""
        events = Events(self._run_dir, self._identity.process_id)
        with suppress(ConfigError):  # there is no such program, which the run itself will say
            events.written = Notifier(self._notify, self._identity.process_id, str(self._run_dir.absolute()))
        return events

    def _try_to_note(self, exit_reason: ExitReason) -> None:
        """The run directory may be what is wrong, and the error itself is told anyway."""
        with suppress(OSError, ValueError):
            note_exit_reason(self._events(), exit_reason)


def note_exit_reason(events: Events, exit_reason: ExitReason) -> None:
    more = {}
    if isinstance(exit_reason, AbandonedStart):
        more = {
            "reason": exit_reason.reason,
            "asked_by": exit_reason.asked_by,
            "waited_seconds": exit_reason.waited_seconds,
        }
    events.write(
        exit_reason.kind,
        why=exit_reason.why,
        **more,
        code=int(exit_reason.code),
        at_fault=exit_reason.process,
        at_fault_host=exit_reason.host,
        by_itself=exit_reason.by_itself,
    )
