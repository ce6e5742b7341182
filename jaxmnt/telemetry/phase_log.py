"""Process 0's record of where the time of each step goes in all processes: one line per step in phases.jsonl, and every
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
STEPS_PER_SUMMARY = 100
"""Steps between two lines about processes."""
QUANTILES = (0.1, 0.5, 0.9, 1.0)
"""Quantiles over the steps between two such lines."""
_BYTES_PER_PROCESS, _MOST_BYTES_PER_STEP = 40, 1000
"""Size of a process in such a line, and the average size per step that such lines may have."""
MOST_EACH = 4
"""Largest number of processes for which the line of a step has the times of each."""
_OWN = [PHASES.index(phase) for phase in OWN_PHASES]
_PATIENCE = 512
"""Steps for which missing times of a process are waited for."""


class PhaseLog:
    """Collects the times of the processes as they arrive, and writes a summary of each step once all have arrived.

    `add` may be called from any thread. `take_findings` returns the stragglers.
    """

    def __init__(self, run_dir: Path, processes: int):
        self._processes = processes
        self._lines = LineWriter(run_dir / PHASE_LINES)
        self._detector = StragglerDetector(processes)
        self._steps: dict[int, dict[int, tuple[float, ...]]] = {}
        self._own: list[np.ndarray] = []
        """Seconds of each process's own work, for each step since the last line about processes."""
        self._last_step = 0
        self.latest: dict[str, float] = {}
        """Mean seconds of each phase in the last step that all processes have reported. Other threads read it."""
        self._findings: list[Straggler] = []
        self._lock = threading.Lock()

    def add(self, process: int, rows: Sequence[Any]) -> None:
        """Adds the times of some steps of one process: `StepPhases`, or their form in JSON.

        Raises `ValueError` or `TypeError` for anything else.
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
        """Returns the processes that began to delay the others, or caught up, since the last call."""
        with self._lock:
            findings, self._findings = self._findings, []
        return findings

    @property
    def stragglers(self) -> list[tuple[int, str]]:
        """The processes that delay the others now, each with the phase. From any thread."""
        with self._lock:
            return self._detector.current

    def complete_up_to(self, step: int) -> bool:
        """Returns True if no process's times of this step or an earlier one are missing. From any thread."""
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
        if len(self._own) == STEPS_PER_SUMMARY:
            self._sum_up()
        self._findings += self._detector.see(seconds)

    def _sum_up(self) -> None:
        """Writes a line about the own work of each process in the steps since the last such line, unless these are too
        few for its length."""
        if len(self._own) * _MOST_BYTES_PER_STEP < self._processes * _BYTES_PER_PROCESS:
            return
        quantiles = np.quantile(np.stack(self._own), QUANTILES, axis=0)
        self._lines.write({
            "kind": "processes",
            "step": self._last_step,
            "time": clock.now(),
            "steps": len(self._own),
            "own": [[_short(seconds) for seconds in row] for row in quantiles.T],
        })  # fmt: skip
        self._own.clear()


def _checked(step: Any, seconds: Any) -> StepPhases:
    """Returns validated times of a step."""
    times = tuple(map(float, seconds))
    if type(step) is not int or len(times) != len(PHASES) or not all(0 <= time < _LONGEST for time in times):
        raise ValueError("no times of a step")
    return StepPhases(step, times)


def _short(seconds: float) -> float:
    """Rounds to three digits, as a line may have thousands of numbers."""
    return float(f"{seconds:.3g}")


def _line(step: int, seconds: np.ndarray) -> dict[str, Any]:
    """Returns the record of a step: for each phase that took time, the mean over processes, and the longest time with
    its process."""
    slowest = seconds.argmax(axis=0).tolist()
    longest = seconds.max(axis=0).tolist()
    means = seconds.mean(axis=0).round(6).tolist()
    some = [phase for phase, time in enumerate(longest) if time > 0]
    by_process = {}
    if 1 < len(seconds) <= MOST_EACH:
        by_process = {"each": [[_short(time) for time in row] for row in seconds.tolist()]}
    return {
        "kind": "phases",
        "step": step,
        "time": clock.now(),
        "processes": len(seconds),
        "mean": {PHASES[phase]: means[phase] for phase in some},
        "longest": {PHASES[phase]: [longest[phase], slowest[phase]] for phase in some},
        **by_process,
    }
