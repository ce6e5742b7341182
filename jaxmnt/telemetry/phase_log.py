"""Process 0's record of how all processes spend the time of each step. It writes one line for each step to
phases.jsonl, and every 100 steps a line with a few numbers for each process."""

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

_MAX_PHASE_SECONDS = 1e9
STEPS_PER_SUMMARY = 100
"""Number of steps between two summary lines, which are about processes."""
QUANTILES = (0.1, 0.5, 0.9, 1.0)
"""Quantiles in a summary line, over the steps since the previous one."""
_BYTES_PER_PROCESS, _MAX_BYTES_PER_STEP = 40, 1000
"""Size of one process's entry in a summary line, and the maximum average size per step of these lines."""
MAX_PROCESSES_LISTED = 4
"""Maximum number of processes for which the line of a step lists the times of each process."""
_OWN_INDICES = [PHASES.index(phase) for phase in OWN_PHASES]
_MAX_INCOMPLETE_STEPS = 512
"""Maximum number of steps that may wait for the times of some process. Older ones are dropped."""


class PhaseLog:
    """Collects the times of the processes as they arrive, and writes a summary of each step once all have arrived.

    `add` may be called from any thread. `take_findings` returns the stragglers.
    """

    def __init__(self, run_dir: Path, processes: int):
        self._processes = processes
        self._lines = LineWriter(run_dir / PHASE_LINES)
        self._detector = StragglerDetector(processes)
        self._steps: dict[int, dict[int, tuple[float, ...]]] = {}
        self._own_seconds: list[np.ndarray] = []
        """Seconds of each process's own work in each step since the last summary line."""
        self._last_step = 0
        self.latest: dict[str, float] = {}
        """Mean seconds of each phase in the last step that all processes have reported. Other threads read
        it."""
        self._findings: list[Straggler] = []
        self._lock = threading.Lock()

    def add(self, process: int, rows: Sequence[Any]) -> None:
        """Adds the times of some steps of one process. Each row is a `StepPhases`, or the same parsed from JSON.

        Raises `ValueError` or `TypeError` if a row is anything else.
        """
        checked = [_checked(*row) for row in rows]
        with self._lock:
            for step, seconds in checked:
                times = self._steps.setdefault(step, {})
                times[process] = seconds
                if len(times) == self._processes:
                    self._complete(step)
            while len(self._steps) > _MAX_INCOMPLETE_STEPS:
                del self._steps[next(iter(self._steps))]

    def take_findings(self) -> list[Straggler]:
        """Returns the processes that began to delay the others, or caught up, since the last call."""
        with self._lock:
            findings, self._findings = self._findings, []
        return findings

    @property
    def stragglers(self) -> list[tuple[int, str]]:
        """The processes that delay the others now, each with its slow phase. It may be read from any thread."""
        with self._lock:
            return self._detector.current

    def complete_up_to(self, step: int) -> bool:
        """Returns True unless this step or an earlier one waits for the times of some process. May be called from any
        thread."""
        with self._lock:
            return all(waiting > step for waiting in self._steps)

    def close(self) -> None:
        with self._lock:
            self._write_summary()
        self._lines.close()

    def _complete(self, step: int) -> None:
        times = self._steps.pop(step)
        seconds = np.array([times[process] for process in range(self._processes)])
        line = _step_record(step, seconds)
        self.latest = line["mean"]
        self._lines.write(line)
        self._own_seconds.append(seconds[:, _OWN_INDICES].sum(axis=1))
        self._last_step = step
        if len(self._own_seconds) == STEPS_PER_SUMMARY:
            self._write_summary()
        self._findings += self._detector.see(seconds)

    def _write_summary(self) -> None:
        """Writes a summary line about each process's own work since the last one, unless there are too few steps for
        the length of the line."""
        if len(self._own_seconds) * _MAX_BYTES_PER_STEP < self._processes * _BYTES_PER_PROCESS:
            return
        quantiles = np.quantile(np.stack(self._own_seconds), QUANTILES, axis=0)
        self._lines.write({
            "kind": "processes",
            "step": self._last_step,
            "time": clock.now(),
            "steps": len(self._own_seconds),
            "own": [[_rounded(seconds) for seconds in row] for row in quantiles.T],
        })  # fmt: skip
        self._own_seconds.clear()


def _checked(step: Any, seconds: Any) -> StepPhases:
    """Returns the validated times of a step. Raises `ValueError` or `TypeError` if they are invalid."""
    times = tuple(map(float, seconds))
    if type(step) is not int or len(times) != len(PHASES) or not all(0 <= time < _MAX_PHASE_SECONDS for time in times):
        raise ValueError("not the times of a step")
    return StepPhases(step, times)


def _rounded(seconds: float) -> float:
    """Rounds to three digits, because a line may have thousands of numbers."""
    return float(f"{seconds:.3g}")


def _step_record(step: int, seconds: np.ndarray) -> dict[str, Any]:
    """Returns the record of a step. For each phase that took any time, it has the mean over processes, and the longest
    time with its process."""
    slowest = seconds.argmax(axis=0).tolist()
    longest = seconds.max(axis=0).tolist()
    means = seconds.mean(axis=0).round(6).tolist()
    used_phases = [phase for phase, time in enumerate(longest) if time > 0]
    by_process = {}
    if 1 < len(seconds) <= MAX_PROCESSES_LISTED:
        by_process = {"each": [[_rounded(time) for time in row] for row in seconds.tolist()]}
    return {
        "kind": "phases",
        "step": step,
        "time": clock.now(),
        "processes": len(seconds),
        "mean": {PHASES[phase]: means[phase] for phase in used_phases},
        "longest": {PHASES[phase]: [longest[phase], slowest[phase]] for phase in used_phases},
        **by_process,
    }
