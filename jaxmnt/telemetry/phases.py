"""Measures where the time of each step goes in a process, by the clock of its main thread."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

PHASE_ACTIVITIES = {
    "data": "waiting for input",
    "host_to_device": "copying input to the devices",
    "dispatch": "starting steps",
    "device": "waiting for the devices",
    "save": "saving",
    "evaluation": "evaluating",
    "probe": "timing each device by itself",
    "peers": "waiting for other processes between steps",
    "writing": "writing what one process writes for all",
    "other": "other work on the host",
}
"""Phases of a step, each with what the process does in it."""

PHASES = tuple(PHASE_ACTIVITIES)

OWN_PHASES = ("data", "host_to_device", "dispatch", "save", "other")
"""Phases in which a process does its own work, and does not wait for others."""

_MOST_WAITING = 256
"""Limit of steps whose times have not been taken; beyond it only the newest are kept."""


class StepPhases(NamedTuple):
    """The time of one step in one process."""

    step: int
    seconds: tuple[float, ...]
    """Seconds of each phase, in the order of `PHASES`."""


class StepTimer:
    """Assigns each moment of the main thread to the innermost open phase, or to `other`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._phase = "other"
        self.restart()
        self._ended: deque[StepPhases] = deque(maxlen=_MOST_WAITING)
        self._lock = threading.Lock()

    def restart(self) -> None:
        """Times the next step from now on."""
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._since = self._clock()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Opens a phase for the body of a `with`."""
        before = self._phase
        self._enter(phase)
        try:
            yield
        finally:
            self._enter(before)

    def move(self, seconds: float, source: str, to: str) -> None:
        """Moves so many seconds from phase `source` to phase `to`, at most what `source` has."""
        moved = min(max(seconds, 0.0), self._seconds[source])  # clocks of other hosts may have been set meanwhile
        self._seconds[source] -= moved
        self._seconds[to] += moved

    def end_step(self, step: int) -> None:
        """Ends a step, which gets the time since the end of the previous one."""
        self._enter(self._phase)
        ended = StepPhases(step, tuple(round(self._seconds[phase], 6) for phase in PHASES))
        self._seconds = dict.fromkeys(PHASES, 0.0)
        with self._lock:
            self._ended.append(ended)

    def take(self) -> list[StepPhases]:
        """Returns the steps that have ended since the last call. From any thread."""
        with self._lock:
            ended = list(self._ended)
            self._ended.clear()
        return ended

    def _enter(self, phase: str) -> None:
        now = self._clock()
        self._seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now
