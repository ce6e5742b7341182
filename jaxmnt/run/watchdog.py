"""A hang ends with a name: a thread that sees when this process does not get any further.

A step may take `watchdog.factor` times the median of the last ones, but at least `watchdog.step_seconds`. What happens
between steps and takes long in good health (compiling, restoring, evaluating, saving) has limits of its own.
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
    """Knows where this process is, and tells the heartbeat when it has been there for too long.

    Used as a context manager. The main thread says where it is; a thread of its own looks once a second.
    """

    def __init__(self, settings: Settings, run_dir: Path, process: int, heartbeat: Heartbeat):
        self._settings = settings
        self._stacks = run_dir / "hangs" / f"{process}.txt"
        self._heartbeat = heartbeat
        self._main = threading.current_thread().ident
        self.reads: Callable[[], bool] = lambda: False
        """Whether the main thread waits for input."""
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._step = 0
        self._settled = False
        self.tell: Callable[[str, float, str], None] = lambda phase, seconds, done: None
        """Called about once a second, while something else than a step goes on, with what it is and how far it is."""
        self._phase, self._since, self._done = "starting", time.monotonic(), ""
        self._limit: float | None = None
        self._looks = 0
        """At this process since it got further last. Counted, not timed: one that was suspended does not hang."""
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
        """Inside, this phase is what goes on, for at most so long after `got_further`. None is no limit."""
        before = self._phase, self._limit
        self._enter(phase, seconds)
        try:
            yield
        finally:
            self._enter(*before)

    def steps_begin(self, step: int) -> None:
        """From here on steps are taken, the first of them as number `step`, until the end of the run."""
        self._step = step
        self._enter("taking the first step", self._settings.first_step_seconds)

    def begins(self, step: int) -> None:
        self._step = step

    def finished_step(self, seconds: float) -> None:
        """A step is known to be finished on the devices, and took so long."""
        if self._settled:  # the first one loads programs and opens connections
            self._seconds.append(seconds)
        self._settled = True
        typical = statistics.median(self._seconds) if self._seconds else 0.0
        shortest = self._settings.step_seconds
        limit = None if shortest is None else max(shortest, self._settings.factor * typical)
        self._enter(_STEPS, limit)

    def got_further(self, done: str = "") -> None:
        """What goes on is alive: its time begins anew. `done` says how far it is, such as batch 3 of 20."""
        self._looks, self._done = 0, done

    def position(self) -> Position:
        """From any thread."""
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
            remark(f"note: no stacks in {self._stacks}: {error.strerror}")

    def _enter(self, phase: str, limit: float | None) -> None:
        self.got_further()
        if phase != self._phase:
            self._since = time.monotonic()
        self._phase, self._limit = phase, limit
        self.got_further()

    def _pause(self) -> bool:
        """Until the next look; whether there is none."""
        return self._end.wait(_LOOK_SECONDS)

    def _watch(self) -> None:
        while not self._pause():
            self._looks += 1
            limit, phase, done = self._limit, self._phase, self._done
            if phase != _STEPS and (seconds := time.monotonic() - self._since) >= 1:
                self.tell(phase, seconds, done)
            if limit is not None and self._looks * _LOOK_SECONDS > limit:
                after = f", after {self._step - 1} of them" if self._settled and self._step else ""
                self._heartbeat.halt(f"no progress for {limit:g} s while {phase}{after}")

    def _main_thread(self) -> str:
        """Where in our own code the main thread is."""
        frame = sys._current_frames().get(self._main or 0)
        while frame is not None and f"{_OURS}/" not in frame.f_code.co_filename:
            frame = frame.f_back
        if frame is None:
            return ""
        name = frame.f_code.co_filename.rpartition(f"{_OURS}/")[2]
        return f" ({name} {frame.f_code.co_name})"


_OURS = "jaxmnt"
