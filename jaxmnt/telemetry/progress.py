"""Shows progress on the terminal while a run starts and trains, or while a command works."""

import io
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, TextIO

from jaxmnt.telemetry import clock
from jaxmnt.units import duration


class StartClock:
    """Measures how many seconds each phase takes while a run starts. The phases are consecutive laps.

    With `of_process`, the first lap began when this process was started. Otherwise it begins at construction.
    """

    def __init__(self, *, of_process: bool = False) -> None:
        self.seconds: dict[str, float] = {"process": _process_age_seconds()} if of_process else {}
        self.began = clock.now() - sum(self.seconds.values())
        """Time at which the run began to start, in Unix seconds."""
        self._last = time.perf_counter()
        self._cache_requests = self._cache_hits = 0

    @property
    def elapsed(self) -> float:
        """Seconds since the run began to start."""
        return clock.now() - self.began

    def lap(self, phase: str) -> None:
        """Ends a lap, and assigns the time since the end of the previous one to `phase`."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def watch_compile_cache(self) -> None:
        """Counts, from now on, how many programs JAX finds in its compile cache, and how many it compiles."""
        from jax import monitoring

        def count(event: str, **_: object) -> None:
            self._cache_requests += event == "/jax/compilation_cache/compile_requests_use_cache"
            self._cache_hits += event == "/jax/compilation_cache/cache_hits"

        monitoring.register_event_listener(count)

    @property
    def compile_cache(self) -> dict[str, int]:
        """Number of hits and misses in the compile cache."""
        return {"hits": self._cache_hits, "misses": self._cache_requests - self._cache_hits}


def _process_age_seconds() -> float:
    """Returns the seconds since this process was started; 0 where the kernel does not report it."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    except OSError:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


_MIN_UPDATE_SECONDS = 0.1
"""Minimum time between two updates on a terminal."""
_HOLD_SECONDS = 0.8
"""Extra time, after `_MIN_UPDATE_SECONDS`, that a line stays before the status of a long phase replaces it."""
_MIN_PRINT_SECONDS = 10.0
"""Minimum time between two updates without a terminal."""
_WORK_UPDATE_SECONDS = 1.0
"""Delay before a command shows what it is doing, and the interval between two updates of that line."""
_FIRST_LINE_SECONDS, _NEXT_LINE_SECONDS = 2.0, 30.0
"""Without a terminal: how long a phase lasts before its first line is printed, and the interval between later lines."""
_MAX_BAR_CELLS = 20
_WARNING = "WARNING"
RELAY_MARK = "\x1b[2K"
"""Prefix with which a child process marks lines that its launcher shows in place on its terminal."""


class StatusLine:
    """A status line that is rewritten in place on a terminal. Without a terminal, it is printed now and then."""

    relay_columns: ClassVar[int] = 0
    """Columns that are available on the launcher's terminal for lines of this process; 0 if it has no terminal or is
    gone."""

    def __init__(self, out: TextIO, *, quiet: bool = False):
        self._out = out
        self._quiet = quiet
        self._relayed = self.relay_columns > 0 and not out.isatty()
        self._begin, self._end = (RELAY_MARK, "\n") if self._relayed else ("\r\x1b[K", "")
        self.live = out.isatty() or self._relayed
        """True if lines can be rewritten in place on a terminal."""
        may_colour = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._colour = out.isatty() and may_colour
        self._next_update = 0.0
        self._has_shown_line = out.isatty()  # the current line of the terminal may contain other text
        self._phase_seconds, self._phase_due = 0.0, _FIRST_LINE_SECONDS
        self._lock = threading.RLock()

    @property
    def due(self) -> bool:
        """True if an update would be shown now. A caller need not compose an update that would not be shown."""
        return not self._quiet and time.monotonic() >= self._next_update

    def progress(self, step: int, steps: int, parts: Sequence[str]) -> None:
        """Shows a progress bar, followed by those of the first parts that fit on the terminal without being cut."""
        width = self._width
        cells = min(_MAX_BAR_CELLS, width // 8)
        text = f"{bar(step / max(steps, 1), cells)} {step}/{steps}"
        for part in parts:
            if len(text) + 2 + len(part) > width:
                break
            text += f"  {part}"
        if self._colour:
            text = f"\x1b[36m{text[:cells]}\x1b[0m{text[cells:]}"
        self._show(text)

    def update(self, text: str) -> None:
        """Shows `text` if enough time has passed since the last update."""
        if not self.due:
            return
        if self.live:
            self._show(text[: self._width])
        else:
            print(text, file=self._out, flush=True)
            self._next_update = time.monotonic() + _MIN_PRINT_SECONDS

    def waiting(self, phase: str, seconds: float, done: str = "") -> None:
        """Shows a phase that has lasted for `seconds`, and how far it is (`done`). A thread calls this about once a
        second.

        On a terminal it is shown each time, unless another line was shown a moment ago. Without a terminal, a line is
        printed when the phase has lasted for two seconds, and then every half minute.
        """
        if self._quiet:
            return
        text = f"{phase}{done and f', {done}'} … {duration(seconds)}"
        if self.live:
            if time.monotonic() >= self._next_update + _HOLD_SECONDS:
                self._show(text[: self._width])
            return
        if seconds < self._phase_seconds:  # another phase has begun
            self._phase_due = _FIRST_LINE_SECONDS
        self._phase_seconds = seconds
        if seconds >= self._phase_due:
            self._phase_due = seconds + _NEXT_LINE_SECONDS
            self.line(text)

    @property
    def _width(self) -> int:
        columns = self.relay_columns if self._relayed else shutil.get_terminal_size().columns
        return max(0, columns - 1)

    def _show(self, text: str) -> None:
        with self._lock:
            self._rewrite(text)
            self._has_shown_line = True
        self._next_update = time.monotonic() + _MIN_UPDATE_SECONDS

    def line(self, text: str) -> None:
        """Prints a line that stays."""
        if self._quiet:
            return
        if self._colour and text.startswith(_WARNING):
            text = f"\x1b[33m{text}\x1b[0m"
        with self._lock:
            self.clear()
            print(text, file=self._out, flush=True)

    def clear(self) -> None:
        """Removes the line that is shown in place."""
        with self._lock:
            if self._has_shown_line:
                self._rewrite("")
                self._has_shown_line = False

    def _rewrite(self, text: str) -> None:
        if self._relayed and not self.relay_columns:
            return  # the launcher is gone
        self._out.write(f"{self._begin}{text}{self._end}")
        self._out.flush()


@contextmanager
def status_line(*, quiet: bool = False) -> Iterator[StatusLine]:
    """Yields a status line on stdout, which is cleared at the end, even after an error. A quiet status line shows
    nothing."""
    # A process that was started without a stdout has nowhere to show one.
    status = StatusLine(sys.stdout or io.StringIO(), quiet=quiet or sys.stdout is None)
    try:
        yield status
    finally:
        status.clear()


class Work:
    """Shows on a terminal, through stderr, what a command is doing."""

    def __init__(self) -> None:
        self._status = StatusLine(sys.stderr or io.StringIO())
        self._lock = threading.Lock()
        self._silent_since = 0.0
        self._text = ""
        self.does("")

    def does(self, text: str) -> None:
        """Sets the text that is shown from now on, followed by the time since this call. An empty text shows
        nothing."""
        with self._lock:
            now = time.monotonic()
            # Consecutive short phases count together, as their sum may be long.
            if not (text and self._text):
                self._silent_since = now
            self.done, self._text, self._since = "", text, now
            if not text:
                self._status.clear()

    def line(self, text: str) -> None:
        """Prints a line that stays, on stderr."""
        self._status.line(text)

    def show(self) -> None:
        """Shows the text, and `done`, which says how far the work is."""
        with self._lock:
            text, now = self._text, time.monotonic()
            if text and self._status.live and now - self._silent_since >= _WORK_UPDATE_SECONDS:
                self._status.waiting(text, now - self._since, self.done)


@contextmanager
def working(text: str) -> Iterator[Work]:
    """Within this context, shows on a terminal what the command is doing, which is `text` at first."""
    work, end = Work(), threading.Event()
    work.does(text)

    def show() -> None:
        while not end.wait(_WORK_UPDATE_SECONDS):
            work.show()

    thread = threading.Thread(target=show, name="what the command does", daemon=True)
    thread.start()
    try:
        yield work
    finally:
        end.set()
        thread.join()
        work.does("")


def bar(share: float, cells: int) -> str:
    """Returns a progress bar of `cells` cells, filled to `share` (from 0 to 1)."""
    full = int(share * cells)
    return "█" * full + "░" * (cells - full)


TableRows = list[tuple[str, ...]]


def table(rows: TableRows, right: set[int]) -> list[str]:
    """Formats rows of cells as lines with aligned columns. The columns in `right` are aligned to the right."""
    columns = []
    for number, cells in enumerate(zip(*rows, strict=True)):
        width = max(map(len, cells))
        columns.append([cell.rjust(width) if number in right else cell.ljust(width) for cell in cells])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
