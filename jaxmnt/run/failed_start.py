"""What is noted of a start that came to nothing: a launcher can then leave a host out, or start again at no cost."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jaxmnt.config.schema import Config
from jaxmnt.distributed.identity import Identity
from jaxmnt.distributed.termination import (
    AbandonedStart,
    AbsentError,
    ExitHandler,
    ExitReason,
    StoppedError,
    exit_reason_of,
    refuse_to_wait_for_ever,
)
from jaxmnt.errors import ConfigError, ExitCode, UserError, summary
from jaxmnt.telemetry.events import FAILED_START, Events, read_lines

_ABOUT_THE_START = (ExitCode.CONFIG, ExitCode.PREFLIGHT)
"""With these a start ends by an error of ours. Where that names a host, it is noted as a failed start."""


@contextmanager
def noting_a_failed_start(
    config: Config, identity: Identity, exit_handler: ExitHandler, has_opened: Callable[[], bool]
) -> Iterator[None]:
    """Writes an event about an error inside that names hosts or processes, and about this process's end.

    A start that is abandoned ends the process here, with the code that says that nothing is lost. From when the run has
    its own events, which `has_opened` tells, all that is its own matter.
    """
    assert config.run.dir is not None
    run_dir = Path(config.run.dir)

    def note(exit_reason: ExitReason) -> None:
        if not has_opened() and exit_reason.code not in _ABOUT_THE_START:
            note_exit_reason(Events(run_dir, identity.process_id), exit_reason)

    try:
        with exit_handler.with_hook(note):
            yield
    except UserError as raised:
        error = _judged(raised, run_dir, identity)
        if error is None:
            exit_handler.exit_now(exit_reason_of(raised))
        if error.hosts or error.processes:
            process, host = next(iter(error.processes), None), next(iter(error.hosts), None)
            _try_to_note(run_dir, identity, ExitReason(FAILED_START, str(error), error.exit_code, process, host))
        raise error from raised.__cause__
    except Exception as raised:
        if (
            exit_handler.exit_reason is None and not has_opened()
        ):  # else the others have heard of it, and it is noted at the end
            why, host = summary(raised), socket.gethostname()
            _try_to_note(run_dir, identity, ExitReason("failed", why, ExitCode.FAILURE, identity.process_id, host))
        raise


def _judged(error: UserError, run_dir: Path, identity: Identity) -> UserError | None:
    """The error with which the start ends; None if it is abandoned, and can be made again."""
    if not isinstance(error, (AbsentError, StoppedError)):
        return error
    if isinstance(error, AbsentError):
        try:
            refuse_to_wait_for_ever(read_lines(run_dir / "events" / f"{identity.process_id}.jsonl"), error, time.time())
        except ConfigError as final:
            return final
    return None


def _try_to_note(run_dir: Path, identity: Identity, exit_reason: ExitReason) -> None:
    """The run directory may be what is wrong, and the error itself is told anyway."""
    with suppress(OSError, ValueError):
        note_exit_reason(Events(run_dir, identity.process_id), exit_reason)


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
    )
