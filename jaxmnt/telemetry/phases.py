"""Measures how the main thread of a process spends the time of each step."""

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
"""The phases of a step, and what a process does in each."""

PHASES = tuple(PHASE_ACTIVITIES)

OWN_PHASES = ("data", "host_to_device", "dispatch", "save", "other")
"""Phases in which a process does its own work, and does not wait for others."""

_MAX_ENDED_STEPS = 256
"""Maximum number of steps whose times have not been taken yet. If there are more, only the newest are kept."""


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
        self._ended: deque[StepPhases] = deque(maxlen=_MAX_ENDED_STEPS)
        self._lock = threading.Lock()

    def restart(self) -> None:
        """Times the next step from now on."""
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._since = self._clock()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Within this context, the given phase is open."""
        previous = self._phase
        self._enter(phase)
        try:
            yield
        finally:
            self._enter(previous)

    def move(self, seconds: float, source: str, to: str) -> None:
        """Moves up to `seconds` from phase `source` to phase `to`, but no more than `source` has."""
        moved = min(max(seconds, 0.0), self._seconds[source])  # clocks of other hosts may have been changed meanwhile
        self._seconds[source] -= moved
        self._seconds[to] += moved

    def end_step(self, step: int) -> None:
        """Ends a step. The time since the end of the previous step is assigned to it."""
        self._enter(self._phase)
        ended = StepPhases(step, tuple(round(self._seconds[phase], 6) for phase in PHASES))
        self._seconds = dict.fromkeys(PHASES, 0.0)
        with self._lock:
            self._ended.append(ended)

    def take(self) -> list[StepPhases]:
        """Returns the steps that have ended since the last call. May be called from any thread."""
        with self._lock:
            ended = list(self._ended)
            self._ended.clear()
        return ended

    def _enter(self, phase: str) -> None:
        now = self._clock()
        self._seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now
