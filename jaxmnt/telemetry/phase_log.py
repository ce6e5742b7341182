"""Process 0's account of where the time of each step goes in all processes: a line a step in phases.jsonl, and every
100 steps one with a few numbers of each process."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxmnt.telemetry import clock
from jaxmnt.telemetry.events import PHASE_LINES
from jaxmnt.telemetry.phases import OWN_PHASES, PHASES, StepPhases
from jaxmnt.telemetry.stragglers import Straggler, StragglerDetector
from jaxmnt.telemetry.writer import LineWriter

_LONGEST = 1e9
STEPS_A_SUM = 100
"""Between two lines about processes."""
QUANTILES = (0.1, 0.5, 0.9, 1.0)
"""Of the steps between two such lines."""
_BYTES_A_PROCESS, _MOST_BYTES_A_STEP = 40, 1000
MOST_EACH = 4
"""Processes whose times are all in the line of a step; of more they would not fit."""
_OWN = [PHASES.index(phase) for phase in OWN_PHASES]
_PATIENCE = 512
"""Steps for which a process's times are waited for."""


class PhaseLog:
    """Takes the times of the processes as they come, and writes the sum of each step once all have come.

    `heard` may be called from any thread. Who holds the others up is for `take_findings`.
    """

    def __init__(self, run_dir: Path, processes: int):
        self._processes = processes
        self._lines = LineWriter(run_dir / PHASE_LINES)
        self._detector = StragglerDetector(processes)
        self._steps: dict[int, dict[int, tuple[float, ...]]] = {}
        self._own: list[np.ndarray] = []
        """Of steps since the last line about processes: seconds of each one's own work."""
        self._last_step = 0
        self.latest: dict[str, float] = {}
        """Mean seconds of each phase in the last step that all have told of. For other threads to read."""
        self._findings: list[Straggler] = []
        self._lock = threading.Lock()

    def heard(self, process: int, rows: Sequence[Any]) -> None:
        """The times of some steps of one process: `StepPhases`, or what they are in JSON.

        Raises `ValueError` or `TypeError` if they are not.
        """
        checked = [_checked(*row) for row in rows]
        with self._lock:
            for step, seconds in checked:
                times = self._steps.setdefault(step, {})
                times[process] = seconds
                if len(times) == self._processes:
                    self._complete(step)
            while len(self._steps) > _PATIENCE:
                del self._steps[next(iter(self._steps))]

    def take_findings(self) -> list[Straggler]:
        """Who began to hold the others up, or caught up, since this was last called."""
        with self._lock:
            found, self._findings = self._findings, []
        return found

    @property
    def stragglers(self) -> list[tuple[int, str]]:
        """Who holds the others up now, by process and phase. From any thread."""
        with self._lock:
            return self._detector.known

    def complete_up_to(self, step: int) -> bool:
        """Whether no process's times are missing of this step or one before it. From any thread."""
        with self._lock:
            return all(waiting > step for waiting in self._steps)

    def close(self) -> None:
        with self._lock:
            self._sum_up()
        self._lines.close()

    def _complete(self, step: int) -> None:
        times = self._steps.pop(step)
        seconds = np.array([times[process] for process in range(self._processes)])
        line = _line(step, seconds)
        self.latest = line["mean"]
        self._lines.write(line)
        self._own.append(seconds[:, _OWN].sum(axis=1))
        self._last_step = step
        if len(self._own) == STEPS_A_SUM:
            self._sum_up()
        self._findings += self._detector.see(seconds)

    def _sum_up(self) -> None:
        """A line about the own work of each process, in the steps since the last such line, if these are many enough
        for its length."""
        if len(self._own) * _MOST_BYTES_A_STEP < self._processes * _BYTES_A_PROCESS:
            return
        quantiles = np.quantile(np.stack(self._own), QUANTILES, axis=0)
        self._lines.write({
            "kind": "processes",
            "step": self._last_step,
            "time": clock.now(),
            "steps": len(self._own),
            "own": [[_short(value) for value in row] for row in quantiles.T],
        })  # fmt: skip
        self._own.clear()


def _checked(step: Any, seconds: Any) -> StepPhases:
    times = tuple(map(float, seconds))
    if type(step) is not int or len(times) != len(PHASES) or not all(0 <= time < _LONGEST for time in times):
        raise ValueError("no times of a step")
    return StepPhases(step, times)


def _short(seconds: float) -> float:
    """In few digits: there may be thousands."""
    return float(f"{seconds:.3g}")


def _line(step: int, seconds: np.ndarray) -> dict[str, Any]:
    """Of each phase that took some time: the mean over processes, and the longest with its process."""
    longest, most = seconds.argmax(axis=0).tolist(), seconds.max(axis=0).tolist()
    means = seconds.mean(axis=0).round(6).tolist()
    some = [number for number, value in enumerate(most) if value > 0]
    each = {"each": [[_short(one) for one in row] for row in seconds.tolist()]} if 1 < len(seconds) <= MOST_EACH else {}
    return {
        "kind": "phases",
        "step": step,
        "time": clock.now(),
        "processes": len(seconds),
        "mean": {PHASES[number]: means[number] for number in some},
        "longest": {PHASES[number]: [most[number], longest[number]] for number in some},
        **each,
    }
