"""Detects that this process hangs, and reports where, from a background thread.

A step may take `watchdog.factor` times the median of the last steps, but at least `watchdog.step_seconds`. Phases that
normally take long (compiling, restoring, evaluating, saving) have limits of their own.
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

_LOOK_SECONDS = 0.5
_REMEMBERED = 64
_STEPS = "taking steps"


class Watchdog:
    """Tracks the phase of this process, and calls `heartbeat.halt` when a phase takes too long.

    Used as a context manager. The main thread reports its phase; a background thread checks it twice a second.
    """

    def __init__(self, settings: Settings, run_dir: Path, process: int, heartbeat: Heartbeat):
        self._settings = settings
        self._stacks = run_dir / "hangs" / f"{process}.txt"
        self._heartbeat = heartbeat
        self._main = threading.current_thread().ident
        self.reads: Callable[[], bool] = lambda: False
        """Returns True while the main thread waits for input."""
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._step = 0
        self._settled = False
        self.tell: Callable[[str, float, str], None] = lambda phase, seconds, done: None
        """Called about twice a second outside of steps, with the phase, its seconds and its progress."""
        self._phase, self._since, self._done = "starting", time.monotonic(), ""
        self._limit: float | None = None
        self._checks = 0
        """Checks since the last progress: counted instead of timed, so a suspended process does not seem to hang."""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        heartbeat.position, heartbeat.note_stacks = self.position, self.note_stacks

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(_LOOK_SECONDS)

    @contextmanager
    def during(self, phase: str, seconds: float | None) -> Iterator[None]:
        """Makes this the phase in its context, which may take `seconds` after each `note_progress`; None: no limit."""
        before = self._phase, self._limit
        self._enter(phase, seconds)
        try:
            yield
        finally:
            self._enter(*before)

    def begin_steps(self, step: int) -> None:
        """Call this before the first step of this start, which is number `step`."""
        self._step = step
        self._enter("taking the first step", self._settings.first_step_seconds)

    def begin_step(self, step: int) -> None:
        self._step = step

    def finished_step(self, seconds: float) -> None:
        """Call this when a step is finished on the devices, with its duration. Adapts the limit of a step."""
        if self._settled:  # the first one loads programs and opens connections
            self._seconds.append(seconds)
        self._settled = True
        typical = statistics.median(self._seconds) if self._seconds else 0.0
        shortest = self._settings.step_seconds
        limit = None if shortest is None else max(shortest, self._settings.factor * typical)
        self._enter(_STEPS, limit)

    def note_progress(self, done: str = "") -> None:
        """Restarts the time limit of the current phase. `done` says how far it is, such as batch 3 of 20."""
        self._checks, self._done = 0, done

    def position(self) -> Position:
        """Returns where this process is. Callable from any thread."""
        reads = self.reads()
        phase = "waiting for input" if reads else self._phase
        return Position(self._step, f"{phase}{self._main_thread()}", self._settled, own=reads)

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
            self._since = time.monotonic()
        self._phase, self._limit = phase, limit
        self.note_progress()

    def _pause(self) -> bool:
        """Waits until the next check. Returns True if the watchdog has ended."""
        return self._end.wait(_LOOK_SECONDS)

    def _watch(self) -> None:
        while not self._pause():
            self._checks += 1
            limit, phase, done = self._limit, self._phase, self._done
            if phase != _STEPS and (seconds := time.monotonic() - self._since) >= 1:
                self.tell(phase, seconds, done)
            if limit is not None and self._checks * _LOOK_SECONDS > limit:
                after = f", after {self._step - 1} of them" if self._settled and self._step else ""
                self._heartbeat.halt(f"no progress for {limit:g} s while {phase}{after}")

    def _main_thread(self) -> str:
        """Returns the file and function of our own code that the main thread is in."""
        frame = sys._current_frames().get(self._main or 0)
        while frame is not None and f"{_PACKAGE}/" not in frame.f_code.co_filename:
            frame = frame.f_back
        if frame is None:
            return ""
        name = frame.f_code.co_filename.rpartition(f"{_PACKAGE}/")[2]
        return f" ({name} {frame.f_code.co_name})"


_PACKAGE = "jaxmnt"
