"""The wish to stop: SIGINT, SIGTERM and SIGHUP end the run after a step, with a checkpoint."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]


@contextmanager
def on_stop_signals(handler: Handler) -> Iterator[None]:
    """While entered, `handler` gets the signals that ask a program to stop; those ignored (as by nohup) stay so."""
    asked = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    heard = [number for number in asked if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


class StopRequest:
    """Whether this process was asked to stop. The first signal sets `wanted`; the second interrupts at once."""

    def __init__(self) -> None:
        self.wanted = False

    def hear(self, number: int, _: FrameType | None) -> None:
        """A signal handler."""
        if self.wanted:
            raise KeyboardInterrupt
        self.wanted = True
        name = signal.Signals(number).name
        line = f"\n{name}: saving a checkpoint after this step, then stopping (again: stop at once)\n"
        # Not print: the signal may have come in the middle of one. A closed terminal must not keep us from saving.
        with contextlib.suppress(OSError):
            os.write(2, line.encode())


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """A stop request that hears the stop signals while entered."""
    request = StopRequest()
    with on_stop_signals(request.hear):
        yield request
