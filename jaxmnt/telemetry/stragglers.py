"""Detects processes that delay the others, and the phase in which they are slow.

Collectives make the steps of all processes last equally long. What gives a slow process away is the time that it spends
in a phase of its own work, while the others wait for it on their devices. So only such phases count, and each process
is compared with the median of the others.

Shapes: P processes.
"""

from collections import deque
from typing import NamedTuple

import numpy as np

from jaxmnt.telemetry.phases import OWN_PHASES, PHASES

WINDOW_STEPS = 16
"""Number of the latest times of a phase that are examined."""
_EXAMINATION_INTERVAL = 4
"""Number of steps between two examinations."""
_RARE_PHASES = {"save": (5, 4)}
"""Phases that do not occur in every step, each with the number of times that are examined, and the number that
suffice."""
_RARE_PHASE_MIN_EXCESS, _RARE_PHASE_MIN_SECONDS = 0.5, 0.05
"""Minimum excess of a straggler in a rare phase, as a fraction of the others' time and in seconds. It is larger than in
other phases because few times are compared, they vary, and process 0 does more for Orbax than the others."""
_MIN_EXCESS = 0.1
"""Minimum excess of a straggler, as a fraction of a step."""
_MIN_EXCESS_SECONDS = 0.005
"""Minimum excess of a straggler in seconds."""
_MIN_DEVIATIONS = 6.0
"""Minimum number of median absolute deviations of the others by which a straggler is slower as well."""
_MIN_STEADY_SHARE = 0.75
"""Minimum share of the examined times in which a straggler is slower."""
_MIN_PROCESSES_FOR_SPREAD = 4
"""Minimum number of processes for which the spread of the others is meaningful."""
_RECOVERY_FRACTION = 0.5
"""Fraction of the threshold below which a straggler has caught up."""


class Straggler(NamedTuple):
    """A process that began to delay the others in a phase, or caught up."""

    process: int
    phase: str
    seconds: float
    """Seconds by which the median of its last times exceeds the median of the others."""
    step_seconds: float
    """Median seconds of a step."""
    began: bool
    """True if it became a straggler, False if it caught up."""


class StragglerDetector:
    """Follows the phases of all processes step by step. Reports when a process begins to delay the others, and when it
    has caught up."""

    def __init__(self, processes: int):
        self._times: dict[str, deque[np.ndarray]] = {phase: deque(maxlen=_window(phase)[0]) for phase in OWN_PHASES}
        self._steps: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._seen = 0
        self._current: set[tuple[int, str]] = set()
        self._processes = processes

    @property
    def current(self) -> list[tuple[int, str]]:
        """The processes that delay the others now, each with its slow phase."""
        return sorted(self._current)

    def see(self, seconds: np.ndarray) -> list[Straggler]:
        """Adds the seconds that each process spent in each phase of a step, [P, phases]. Returns the processes that
        began to delay the others, or caught up."""
        if self._processes < 2:
            return []
        self._seen += 1
        self._steps.append(float(np.median(seconds.sum(axis=1))))
        for phase, times_P in zip(PHASES, seconds.T, strict=True):
            if phase in OWN_PHASES and (phase not in _RARE_PHASES or times_P.max() > 0):
                self._times[phase].append(times_P)
        return self._changes() if self._seen % _EXAMINATION_INTERVAL == 0 else []

    def _may_be_slow(self, times_TP: np.ndarray, threshold: float) -> bool:
        """Returns True if the processes differ by more than the threshold at all. This is cheaper than `_outliers`."""
        ordered_TP = np.sort(times_TP, axis=0)
        middle_P = ordered_TP[len(ordered_TP) // 2], ordered_TP[(len(ordered_TP) - 1) // 2]
        return bool(middle_P[0].max() - middle_P[1].min() > threshold)

    def _changes(self) -> list[Straggler]:
        """Returns the processes that have become stragglers, or caught up, in some phase."""
        step = float(np.median(self._steps))
        threshold = max(_MIN_EXCESS_SECONDS, _MIN_EXCESS * step)
        changes = []
        for phase, recent_times in self._times.items():
            if len(recent_times) < _window(phase)[1]:
                continue
            times_TP = np.stack(recent_times)
            has_straggler = any(phase == slow_phase for _, slow_phase in self._current)
            if not has_straggler and not self._may_be_slow(times_TP, threshold):
                continue
            share, minimum_seconds = (
                (_RARE_PHASE_MIN_EXCESS, _RARE_PHASE_MIN_SECONDS) if phase in _RARE_PHASES else (0.0, 0.0)
            )
            slow_P, slower_P = _outliers(times_TP, max(threshold, minimum_seconds), share)
            for process in range(self._processes):
                slower = float(slower_P[process])
                was_slow = (process, phase) in self._current
                has_changed = slower < _RECOVERY_FRACTION * threshold if was_slow else slow_P[process]
                if has_changed:
                    self._current ^= {(process, phase)}
                    changes.append(Straggler(process, phase, slower, step, began=not was_slow))
        return changes


def _window(phase: str) -> tuple[int, int]:
    """Returns the number of times of a phase that are examined, and the number that suffice."""
    return _RARE_PHASES.get(phase, (WINDOW_STEPS, WINDOW_STEPS))


def _outliers(times_TP: np.ndarray, threshold: float, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns which processes are slow, and by how many seconds each process is slower than the median of the others. T
    is the number of times.

    A slow process is slower by at least `threshold` seconds, and by at least `share` of the time that the others take.
    """
    median_P = np.median(times_TP, axis=0)
    others_P = _median_of_others(median_P)
    slower_P = median_P - others_P
    spread_P = _median_of_others(np.abs(median_P - np.median(median_P)))
    if median_P.size < _MIN_PROCESSES_FOR_SPREAD:  # a single slow process would dominate the spread
        spread_P = np.zeros_like(spread_P)
    minimum_P = np.maximum(threshold, share * others_P)
    steady_P = np.mean(times_TP - _median_of_others(times_TP) > minimum_P / 2, axis=0)
    return (slower_P > minimum_P) & (slower_P > _MIN_DEVIATIONS * spread_P) & (steady_P >= _MIN_STEADY_SHARE), slower_P


def _median_of_others(values: np.ndarray) -> np.ndarray:
    """Returns, for each value along the last axis, the median of the others."""
    ordered = np.sort(values, axis=-1)
    others = values.shape[-1] - 1

    def pick(rank: int) -> np.ndarray:
        """Returns the value at this rank among the others, which is the next one if the value itself ranks before
        it."""
        here, following = ordered[..., [rank]], ordered[..., [rank + 1]]
        return np.where(values <= here, following, here)

    middle: np.ndarray = (pick((others - 1) // 2) + pick(others // 2)) / 2
    return middle
