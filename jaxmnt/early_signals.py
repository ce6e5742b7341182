"""Signals in the first moments of a command, while Python still imports what would listen to them.

They are remembered until a `StopRequest` takes over. Without that they would end the process with a code that tells a
launcher of a failure; and process 1 of a container has no default for them: there they would be lost.
"""

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_STOPPED = 75  # ExitCode.STOPPED, which is not imported yet

_before: dict[int, Any] = {}
_remembered: list[int] = []


def handle(handler: Callable[[int, FrameType | None], Any]) -> dict[int, Any]:
    """Installs a handler for the signals that ask a program to stop; those ignored (as by nohup) stay so. Returns the
    handlers that it replaces."""
    heard = [number for number in HEARD if signal.getsignal(number) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heard}


def restore(handlers: dict[int, Any]) -> None:
    """Installs again what `handle` has returned."""
    for number, handler in handlers.items():
        signal.signal(number, handler)


def remember() -> None:
    """From now on. The first thing that a command does; a second signal ends the process at once."""
    _before.update(handle(_hear))


def taken() -> list[int]:
    """The signals so far. Somebody else listens now."""
    heard = list(_remembered)
    _remembered.clear()
    return heard


def release() -> None:
    """Signals do again what they did before, also those that have come meanwhile."""
    restore(_before)
    _before.clear()
    for number in taken():
        signal.raise_signal(number)


def ignore() -> None:
    """How this process ends is settled: what asks it to stop comes too late to change its exit code."""
    for number in HEARD:
        signal.signal(number, signal.SIG_IGN)


def _hear(number: int, _: FrameType | None) -> None:
    if _remembered:
        os._exit(_STOPPED)  # nothing has begun that could be saved
    _remembered.append(number)
