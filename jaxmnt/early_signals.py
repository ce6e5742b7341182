"""Handles stop signals during the first moments of a command, while Python still imports the code that handles them.

They are recorded until a `StopRequest` takes over. Otherwise they would end the process with an exit code that reports
a failure to the launcher. As PID 1 of a container, which has no default handlers, the process would lose them.
"""

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_STOPPED = 75  # ExitCode.STOPPED, which is not imported yet

_previous_handlers: dict[int, Any] = {}
_received: list[int] = []


def handle(handler: Callable[[int, FrameType | None], Any]) -> dict[int, Any]:
    """Installs a handler for the signals that ask a program to stop, except those that are ignored, for example because
    of nohup. Returns the handlers that it replaces."""
    handled = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in handled}


def restore(handlers: dict[int, Any]) -> None:
    """Restores the handlers that `handle` has returned."""
    for number, handler in handlers.items():
        signal.signal(number, handler)


def remember() -> None:
    """Starts to record signals, which is the first thing that a command does. A second signal ends the process at
    once."""
    _previous_handlers.update(handle(_record))


def take_received() -> list[int]:
    """Returns the signals that were recorded so far, for the caller to handle, and clears the record."""
    received = list(_received)
    _received.clear()
    return received


def release() -> None:
    """Restores the earlier handlers, and raises the recorded signals again."""
    restore(_previous_handlers)
    _previous_handlers.clear()
    for number in take_received():
        signal.raise_signal(number)


def ignore() -> None:
    """Ignores stop signals from now on. Called once the exit code of this process is final."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _record(number: int, _: FrameType | None) -> None:
    if _received:
        os._exit(_STOPPED)  # there is no work yet that could be saved
    _received.append(number)
