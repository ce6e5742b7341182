"""Detects in a background thread that this process hangs, and reports where.

The time limit of a step is `watchdog.factor` times the median time of the last steps, but at least
`watchdog.step_seconds`. Phases that normally take long (compiling, restoring, evaluating, saving) have their own
limits.
"""

import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxmnt.config.schema import Watchdog as Settings
from jaxmnt.distributed.heartbeat import Heartbeat
from jaxmnt.distributed.messages import Position
from jaxmnt.errors import remark
from jaxmnt.telemetry.stacks import write_stacks

_POLL_SECONDS = 0.5
_REMEMBERED_STEPS = 64
_STEP_PHASE = "taking steps"


class Watchdog:
    """Tracks the phase of this process, and calls `heartbeat.halt` when a phase takes too long.

    Used as a context manager. The main thread reports its phase, and a background thread checks it twice a second.
    """

    def __init__(self, settings: Settings, run_dir: Path, process: int, heartbeat: Heartbeat):
        self._settings = settings
        self._stacks = run_dir / "hangs" / f"{process}.txt"
        self._heartbeat = heartbeat
        self._main_thread_id = threading.current_thread().ident
        self.is_reading: Callable[[], bool] = lambda: False
        """Function that returns True while the main thread waits for input."""
        self._step_seconds: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        self._step = 0
        self._settled = False
        """True once a step is finished on the devices."""
        self.show_wait: Callable[[str, float, str], None] = lambda phase, seconds, progress: None
        """Function that is called about twice a second outside of steps, with the phase, its seconds and its
        progress."""
        self._phase, self._phase_began, self._progress = "starting", time.monotonic(), ""
        self._limit: float | None = None
        self._checks = 0
        """Number of checks since the last progress. Checks are counted instead of the time, so that a process that was
        suspended does not seem to hang."""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        heartbeat.position, heartbeat.note_stacks = self.position, self.note_stacks

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(_POLL_SECONDS)

    @contextmanager
    def during(self, phase: str, seconds: float | None) -> Iterator[None]:
        """Context manager in which this process is in `phase`, which may take `seconds` after each call of
        `note_progress`.

        None means that there is no limit.
        """
        previous_phase, previous_limit = self._phase, self._limit
        self._enter(phase, seconds)
        try:
            yield
        finally:
            self._enter(previous_phase, previous_limit)

    def begin_steps(self, step: int) -> None:
        """Call this before the first step of this start, which is number `step`."""
        self._step = step
        self._enter("taking the first step", self._settings.first_step_seconds)

    def begin_step(self, step: int) -> None:
        self._step = step

    def finished_step(self, seconds: float) -> None:
        """Call this with the duration of each step that is finished on the devices. Adapts the time limit of a step."""
        if self._settled:  # the first step is no measure, because it loads programs and opens connections
            self._step_seconds.append(seconds)
        self._settled = True
        median_seconds = statistics.median(self._step_seconds) if self._step_seconds else 0.0
        min_limit = self._settings.step_seconds
        limit = None if min_limit is None else max(min_limit, self._settings.factor * median_seconds)
        self._enter(_STEP_PHASE, limit)

    def note_progress(self, progress: str = "") -> None:
        """Restarts the time limit of the current phase. `progress` says how far the phase is, such as batch 3 of 20."""
        self._checks, self._progress = 0, progress

    def position(self) -> Position:
        """Returns where this process is. May be called from any thread."""
        is_reading = self.is_reading()
        phase = "waiting for input" if is_reading else self._phase
        return Position(self._step, f"{phase}{self._main_thread_location()}", self._settled, own=is_reading)

    def note_stacks(self) -> None:
        """Appends the stacks of all threads to `run.dir/hangs/PROCESS.txt`."""
        try:
            self._stacks.parent.mkdir(parents=True, exist_ok=True)
            with self._stacks.open("ab") as file:
                file.write(f"\n{time.strftime('%Y-%m-%d %H:%M:%S')}: {self.position()}\n".encode())
                write_stacks(file)
        except OSError as error:
            remark(f"note: the stacks could not be written to {self._stacks}: {error.strerror}")

    def _enter(self, phase: str, limit: float | None) -> None:
        self.note_progress()
        if phase != self._phase:
            self._phase_began = time.monotonic()
        self._phase, self._limit = phase, limit
        self.note_progress()

    def _pause(self) -> bool:
        """Waits until the next check. Returns True if the watchdog has ended."""
        return self._end.wait(_POLL_SECONDS)

    def _watch(self) -> None:
        while not self._pause():
            self._checks += 1
            limit, phase, progress = self._limit, self._phase, self._progress
            seconds = time.monotonic() - self._phase_began
            if phase != _STEP_PHASE and seconds >= 1:
                self.show_wait(phase, seconds, progress)
            if limit is not None and self._checks * _POLL_SECONDS > limit:
                after = f", after {self._step - 1} of them" if self._settled and self._step else ""
                self._heartbeat.halt(f"no progress for {limit:g} s while {phase}{after}")

    def _main_thread_location(self) -> str:
        """Returns the file and function of our code that the main thread is executing; empty if there is none."""
        frame = sys._current_frames().get(self._main_thread_id or 0)
        while frame is not None and f"{_PACKAGE}/" not in frame.f_code.co_filename:
            frame = frame.f_back
        if frame is None:
            return ""
        file = frame.f_code.co_filename.rpartition(f"{_PACKAGE}/")[2]
        return f" ({file} {frame.f_code.co_name})"


_PACKAGE = "jaxmnt"
