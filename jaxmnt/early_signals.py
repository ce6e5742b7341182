"""Signals in the first moments of a command, while Python still imports what would listen to them.

They are remembered until a `StopRequest` takes over. Without that they would end the process with a code that tells a
launcher of a failure; and process 1 of a container has no default for them: there they would be lost.
"""

import os
import signal
from types import FrameType

HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_STOPPED = 75  # ExitCode.STOPPED, which is not imported yet

_before: dict[int, signal.Handlers | object] = {}
_remembered: list[int] = []


def remember() -> None:
    """From now on. The first thing that a command does; a second signal ends the process at once."""
    for number in HEARD:
        if signal.getsignal(number) != signal.SIG_IGN:
            _before[number] = signal.signal(number, _hear)


def taken() -> list[int]:
    """The signals so far. Somebody else listens now."""
    heard = list(_remembered)
    _remembered.clear()
    return heard


def release() -> None:
    """Signals do again what they did before, also those that have come meanwhile."""
    while _before:
        number, handler = _before.popitem()
        signal.signal(number, handler)  # type: ignore[arg-type]
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
