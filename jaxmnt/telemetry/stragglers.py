"""Which process holds the others up, and in what.

Collectives make the steps of all processes last equally long: a slow one shows by the time that it spends in a phase of
its own, while the others wait for it on their devices. So only phases count in which a process does its own work, and
a process is compared with the median of the others.

Shapes: P processes.
"""

from collections import deque
from typing import NamedTuple

import numpy as np

from jaxmnt.telemetry.phases import OWN_PHASES, PHASES

WINDOW = 16
"""Last times of a phase that are looked at."""
_EVERY = 4
"""Steps between two looks."""
_SELDOM = {"save": (5, 4)}
"""Phases that are not in each step: how many times of them are looked at, and how many suffice."""
_SELDOM_SHARE, _SELDOM_SECONDS = 0.5, 0.05
"""What a process must be slower by in such a phase, of what it takes the others, and at least: few times are compared,
they vary, and process 0 does more for Orbax than the others."""
_SHARE = 0.1
"""Of a step: what a process must be slower by."""
_LEAST_SECONDS = 0.005
_SPREADS = 6.0
"""Median absolute deviations of the others, by which it must be slower as well."""
_STEADY = 0.75
"""Share of the times in which it must be slower."""
_FEW = 4
"""With fewer processes the spread of the others says nothing."""
_RECOVERED = 0.5
"""Of the threshold: a process that is slower by less has caught up."""


class Straggler(NamedTuple):
    process: int
    phase: str
    seconds: float
    """By how much it is slower than the median of the others, in the median of its last times."""
    step_seconds: float
    """The median step."""
    began: bool
    """Whether this is new; else it has caught up."""


class StragglerDetector:
    """Sees the phases of all processes step by step; says when one begins to hold the others up, and when it ends."""

    def __init__(self, processes: int):
        self._times: dict[str, deque[np.ndarray]] = {phase: deque(maxlen=_window(phase)[0]) for phase in OWN_PHASES}
        self._steps: deque[float] = deque(maxlen=WINDOW)
        self._seen = 0
        self._known: set[tuple[int, str]] = set()
        self._processes = processes

    @property
    def known(self) -> list[tuple[int, str]]:
        """Who holds the others up now, by process and phase."""
        return sorted(self._known)

    def see(self, seconds: np.ndarray) -> list[Straggler]:
        """What is new after a step in which each process spent so many seconds in each phase, [P, phases]."""
        if self._processes < 2:
            return []
        self._seen += 1
        self._steps.append(float(np.median(seconds.sum(axis=1))))
        for phase, times_P in zip(PHASES, seconds.T, strict=True):
            if phase in OWN_PHASES and (phase not in _SELDOM or times_P.max() > 0):
                self._times[phase].append(times_P)
        return self._look() if self._seen % _EVERY == 0 else []

    def _may_be_slow(self, times_TP: np.ndarray, threshold: float) -> bool:
        """Whether the processes differ by so much at all: what follows takes longer to find out."""
        ordered_TP = np.sort(times_TP, axis=0)
        middle_P = ordered_TP[len(ordered_TP) // 2], ordered_TP[(len(ordered_TP) - 1) // 2]
        return bool(middle_P[0].max() - middle_P[1].min() > threshold)

    def _look(self) -> list[Straggler]:
        step = float(np.median(self._steps))
        threshold = max(_LEAST_SECONDS, _SHARE * step)
        found = []
        for phase, recent in self._times.items():
            if len(recent) < _window(phase)[1]:
                continue
            times_TP = np.stack(recent)
            if not self._may_be_slow(times_TP, threshold) and not any(known == phase for _, known in self._known):
                continue
            share, least = (_SELDOM_SHARE, _SELDOM_SECONDS) if phase in _SELDOM else (0.0, 0.0)
            slow_P, slower_P = _outliers(times_TP, max(threshold, least), share)
            for process in range(self._processes):
                slower, known = float(slower_P[process]), (process, phase) in self._known
                changed = slower < _RECOVERED * threshold if known else slow_P[process]
                if changed:
                    self._known ^= {(process, phase)}
                    found.append(Straggler(process, phase, slower, step, began=not known))
        return found


def _window(phase: str) -> tuple[int, int]:
    """How many times of a phase are looked at, and how many suffice."""
    return _SELDOM.get(phase, (WINDOW, WINDOW))


def _outliers(times_TP: np.ndarray, threshold: float, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Which processes are slow, and by how many seconds each is slower than the median of the others. T: times.

    A slow one is slower by `threshold`, and by `share` of what the others take.
    """
    typical_P = np.median(times_TP, axis=0)
    others_P = _median_of_others(typical_P)
    slower_P = typical_P - others_P
    spread_P = _median_of_others(np.abs(typical_P - np.median(typical_P)))
    if typical_P.size < _FEW:  # one that is slow would be half of what the others are compared with
        spread_P = np.zeros_like(spread_P)
    least_P = np.maximum(threshold, share * others_P)
    steady_P = np.mean(times_TP - _median_of_others(times_TP) > least_P / 2, axis=0)
    return (slower_P > least_P) & (slower_P > _SPREADS * spread_P) & (steady_P >= _STEADY), slower_P


def _median_of_others(values: np.ndarray) -> np.ndarray:
    """For each along the last axis, the median of the others."""
    ordered = np.sort(values, axis=-1)
    others = values.shape[-1] - 1

    def pick(place: int) -> np.ndarray:
        """What is at this place of the others in order: the next, for those that come before it."""
        here, following = ordered[..., [place]], ordered[..., [place + 1]]
        return np.where(values <= here, following, here)

    middle: np.ndarray = (pick((others - 1) // 2) + pick(others // 2)) / 2
    return middle
