"""Starts that are given up before a step, through no fault of the run: nothing is lost, and it can be started again.

Either this process, or another, was asked to stop, or processes were waited for that never appeared.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxmnt.cluster.ending import Ending, Fate
from jaxmnt.cluster.environment import Identity
from jaxmnt.errors import ConfigError, ExitCode, PeerError, UserError

if TYPE_CHECKING:
    from jaxmnt.cluster.lifeline import Lifeline

ABANDONED = "start_abandoned"
"""The event, and the kind of fate."""
STOPPED, PEERS = "stopped", "peers"
_A_DAY_SECONDS = 24 * 3600.0
_TELLING_SECONDS = 3.0
_began = time.monotonic()


class AbsentError(PeerError):
    """Processes of this run have not appeared in time. Where they may still come, that is no failure."""


class StoppedError(UserError):
    """A process was asked to stop before the first step."""

    exit_code = ExitCode.STOPPED

    def __init__(self, text: str, asked_by: str | None = None):
        super().__init__(text)
        self.asked_by = asked_by
        """What asked this process; None if another one was asked."""


@dataclass(frozen=True)
class Abandoned(Fate):
    """The end of such a start."""

    reason: str = STOPPED
    """Or that peers never appeared."""
    asked_by: str | None = None
    waited_seconds: float = 0.0


def fate_of(error: UserError) -> Abandoned:
    """How a process ends that has met with one of these errors."""
    process, waited = next(iter(error.processes), None), time.monotonic() - _began
    if isinstance(error, StoppedError):
        return Abandoned(ABANDONED, str(error), ExitCode.STOPPED, process, None, STOPPED, error.asked_by, waited)
    return Abandoned(ABANDONED, str(error), ExitCode.STOPPED, process, None, PEERS, None, waited)


def stopped(reason: str, identity: Identity) -> StoppedError:
    """What is said of this process when it was asked to stop."""
    return StoppedError(
        f"{identity.label or 'this process'} was asked to stop before the first step ({reason})", reason
    ).blaming(processes=[identity.process_id])  # fmt: skip


class EarlyLeave:
    """Ends this process when it is asked to stop before its first step: at once, from whatever thread, and so that the
    others know."""

    def __init__(self, identity: Identity, ending: Ending):
        self._identity, self._ending = identity, ending
        self.lifeline: Lifeline | None = None
        self._reason: str | None = None
        self._roll_call_is_over = threading.Event()
        self._roll_call_is_over.set()
        self._failed = False

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Inside, the roll call is held: it looks for the wish, and tells the others itself."""
        self._roll_call_is_over.clear()
        try:
            yield
        except BaseException:
            self._failed = True
            raise
        finally:
            self._roll_call_is_over.set()

    def wish(self) -> str | None:
        """What has asked this process to stop, if anything has."""
        return self._reason

    def now(self, reason: str) -> None:
        """Because of this. Called in a thread, while the main thread may be in anything.

        Does not return, unless the main thread ends the process itself, as it does after a roll call that failed.
        """
        self._reason = reason
        self._roll_call_is_over.wait(_TELLING_SECONDS)
        if self._failed:
            return
        fate = fate_of(stopped(reason, self._identity))
        if self.lifeline is not None:
            self.lifeline.stop_early(fate)
        self._ending.now(fate)


def refuse_to_wait_for_ever(records: Sequence[dict[str, Any]], error: AbsentError, now: float) -> None:
    """Raises `ConfigError` if a day has gone by, by this process's own events, in which starts only waited in vain."""
    since: float | None = None
    last = now
    for record in records:
        at = record.get("time")
        if not isinstance(at, (int, float)) or at > now:
            continue
        if record.get("kind") == "start":
            since = None
        elif record.get("kind") == ABANDONED and record.get("reason") == PEERS:
            since = at if since is None or at - last > _A_DAY_SECONDS else since  # else that was another attempt
            last = at
    if since is not None and now - since >= _A_DAY_SECONDS >= now - last:
        raise ConfigError(
            f"{error}; since {time.strftime('%Y-%m-%d %H:%M', time.localtime(since))} no start of this run has met all "
            "of its processes: see why their hosts do not come, or ask for fewer, then start it again"
        ).blaming(processes=error.processes)
