"""Detects processes that delay the others, and the phase in which they are slow.

Collectives make the steps of all processes last equally long. A slow process stands out by the time that it spends in a
phase of its own work, while the others wait for it on their devices. So only such phases count, and a process is
compared with the median of the others.

Shapes: P processes.
"""

from collections import deque
from typing import NamedTuple

import numpy as np

from jaxmnt.telemetry.phases import OWN_PHASES, PHASES

WINDOW = 16
"""Number of latest times of a phase that are examined."""
_EVERY = 4
"""Steps between two examinations."""
_SELDOM = {"save": (5, 4)}
"""Phases that do not occur in each step: how many times of them are examined, and how many suffice."""
_SELDOM_SHARE, _SELDOM_SECONDS = 0.5, 0.05
"""Excess of a straggler in such a phase, as a fraction of the others' time, and in seconds at least. It is larger
because few times are compared, they vary, and process 0 does more for Orbax than the others."""
_SHARE = 0.1
"""Excess of a straggler, as a fraction of a step."""
_LEAST_SECONDS = 0.005
"""Least excess of a straggler."""
_SPREADS = 6.0
"""Median absolute deviations of the others by which a straggler must be slower as well."""
_STEADY = 0.75
"""Share of the times in which a straggler must be slower."""
_FEW = 4
"""Number of processes below which the spread of the others is meaningless."""
_RECOVERED = 0.5
"""Fraction of the threshold below which a straggler has caught up."""


class Straggler(NamedTuple):
    process: int
    phase: str
    seconds: float
    """Excess over the median of the others, in the median of its last times."""
    step_seconds: float
    """Median seconds of a step."""
    began: bool
    """True if it became a straggler, False if it caught up."""


class StragglerDetector:
    """Follows the phases of all processes step by step; reports when a process begins to delay the others, and when it
    has caught up."""

    def __init__(self, processes: int):
        self._times: dict[str, deque[np.ndarray]] = {phase: deque(maxlen=_window(phase)[0]) for phase in OWN_PHASES}
        self._steps: deque[float] = deque(maxlen=WINDOW)
        self._seen = 0
        self._current: set[tuple[int, str]] = set()
        self._processes = processes

    @property
    def current(self) -> list[tuple[int, str]]:
        """The processes that delay the others now, each with the phase."""
        return sorted(self._current)

    def see(self, seconds: np.ndarray) -> list[Straggler]:
        """Adds the seconds that each process spent in each phase of a step, [P, phases]. Returns the changes."""
        if self._processes < 2:
            return []
        self._seen += 1
        self._steps.append(float(np.median(seconds.sum(axis=1))))
        for phase, times_P in zip(PHASES, seconds.T, strict=True):
            if phase in OWN_PHASES and (phase not in _SELDOM or times_P.max() > 0):
                self._times[phase].append(times_P)
        return self._changes() if self._seen % _EVERY == 0 else []

    def _may_be_slow(self, times_TP: np.ndarray, threshold: float) -> bool:
        """Returns True if the processes differ by more than the threshold at all. It is cheaper than `_outliers`."""
        ordered_TP = np.sort(times_TP, axis=0)
        middle_P = ordered_TP[len(ordered_TP) // 2], ordered_TP[(len(ordered_TP) - 1) // 2]
        return bool(middle_P[0].max() - middle_P[1].min() > threshold)

    def _changes(self) -> list[Straggler]:
        """Returns the processes that have become stragglers, or caught up, in some phase."""
        step = float(np.median(self._steps))
        threshold = max(_LEAST_SECONDS, _SHARE * step)
        changes = []
        for phase, recent in self._times.items():
            if len(recent) < _window(phase)[1]:
                continue
            times_TP = np.stack(recent)
            has_straggler = any(phase == slow_phase for _, slow_phase in self._current)
            if not has_straggler and not self._may_be_slow(times_TP, threshold):
                continue
            share, least = (_SELDOM_SHARE, _SELDOM_SECONDS) if phase in _SELDOM else (0.0, 0.0)
            slow_P, slower_P = _outliers(times_TP, max(threshold, least), share)
            for process in range(self._processes):
                slower = float(slower_P[process])
                was_slow = (process, phase) in self._current
                changed = slower < _RECOVERED * threshold if was_slow else slow_P[process]
                if changed:
                    self._current ^= {(process, phase)}
                    changes.append(Straggler(process, phase, slower, step, began=not was_slow))
        return changes


def _window(phase: str) -> tuple[int, int]:
    """Returns how many times of a phase are examined, and how many suffice."""
    return _SELDOM.get(phase, (WINDOW, WINDOW))


def _outliers(times_TP: np.ndarray, threshold: float, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns which processes are slow, and by how many seconds each is slower than the median of the others. T: times.

    A slow process is slower by `threshold` seconds, and by `share` of the time that the others take.
    """
    typical_P = np.median(times_TP, axis=0)
    others_P = _median_of_others(typical_P)
    slower_P = typical_P - others_P
    spread_P = _median_of_others(np.abs(typical_P - np.median(typical_P)))
    if typical_P.size < _FEW:  # a single slow process would dominate the spread
        spread_P = np.zeros_like(spread_P)
    least_P = np.maximum(threshold, share * others_P)
    steady_P = np.mean(times_TP - _median_of_others(times_TP) > least_P / 2, axis=0)
    return (slower_P > least_P) & (slower_P > _SPREADS * spread_P) & (steady_P >= _STEADY), slower_P


def _median_of_others(values: np.ndarray) -> np.ndarray:
    """Returns, for each value along the last axis, the median of the others."""
    ordered = np.sort(values, axis=-1)
    others = values.shape[-1] - 1

    def pick(rank: int) -> np.ndarray:
        """Returns the value at this rank among the others: the next one where the value itself ranks before it."""
        here, following = ordered[..., [rank]], ordered[..., [rank + 1]]
        return np.where(values <= here, following, here)

    middle: np.ndarray = (pick((others - 1) // 2) + pick(others // 2)) / 2
    return middle
