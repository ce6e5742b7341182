"""Progress on the terminal while a run starts and trains, or while a command works."""

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
    """Seconds of consecutive laps of a start.

    With `of_process` the first lap begins when this process was started, else at construction.
    """

    def __init__(self, *, of_process: bool = False) -> None:
        self.seconds: dict[str, float] = {"process": _age()} if of_process else {}
        self.began = clock.now() - sum(self.seconds.values())
        """When the start began, in unix seconds."""
        self._last = time.perf_counter()
        self._cache_requests = self._cache_hits = 0

    @property
    def elapsed(self) -> float:
        """Seconds since the start began."""
        return clock.now() - self.began

    def lap(self, phase: str) -> None:
        """Assigns the time since the last lap to this phase."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def watch_compile_cache(self) -> None:
        """Counts from now on how many programs JAX finds in its compile cache, and how many it compiles."""
        from jax import monitoring

        def count(event: str, **_: object) -> None:
            self._cache_requests += event == "/jax/compilation_cache/compile_requests_use_cache"
            self._cache_hits += event == "/jax/compilation_cache/cache_hits"

        monitoring.register_event_listener(count)

    @property
    def compile_cache(self) -> dict[str, int]:
        """Hits and misses of the compile cache."""
        return {"hits": self._cache_hits, "misses": self._cache_requests - self._cache_hits}


def _age() -> float:
    """Returns the seconds since this process was started; 0 where the kernel does not report it."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    except OSError:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


_LIVE_SECONDS = 0.1
"""Shortest time between two updates on a terminal."""
_MOMENT_SECONDS = 0.8
"""Time for which the status of a long phase does not replace another line, beyond `_LIVE_SECONDS`."""
_PLAIN_SECONDS = 10.0
"""Shortest time between two updates without a terminal."""
_SOON_SECONDS = 1.0
"""Time that a command works before it shows what it does, and between two updates of that."""
_LONG_SECONDS, _LONG_AGAIN_SECONDS = 2.0, 30.0
"""Without a terminal: how long a phase lasts before a line about it is printed, and the time until the next line."""
_WIDEST_BAR = 20
_WARNING = "WARNING"
RELAY_MARK = "\x1b[2K"
"""Prefix with which a child process marks lines that its launcher shows in place on its terminal."""


class StatusLine:
    """A status line that is rewritten in place on a terminal, and printed now and then without one."""

    relay_columns: ClassVar[int] = 0
    """Width that a launcher leaves for the lines of this process on its terminal; 0 without such a terminal."""

    def __init__(self, out: TextIO, *, quiet: bool = False):
        self._out = out
        self._quiet = quiet
        self._relayed = self.relay_columns > 0 and not out.isatty()
        self._begin, self._end = (RELAY_MARK, "\n") if self._relayed else ("\r\x1b[K", "")
        self.live = out.isatty() or self._relayed
        """True if lines can be rewritten in place on a terminal."""
        may_colour = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._colour = out.isatty() and may_colour
        self._next = 0.0
        self._shown = out.isatty()  # the terminal's current line may hold other text
        self._phase_seconds, self._phase_due = 0.0, _LONG_SECONDS
        self._lock = threading.RLock()

    @property
    def due(self) -> bool:
        """True if an update would be shown now; lets the caller skip composing one that would not."""
        return not self._quiet and time.monotonic() >= self._next

    def progress(self, step: int, steps: int, parts: Sequence[str]) -> None:
        """Shows a bar and as many of the first parts as fit the terminal whole."""
        width = self._width
        cells = min(_WIDEST_BAR, width // 8)
        shown = f"{bar(step / max(steps, 1), cells)} {step}/{steps}"
        for part in parts:
            if len(shown) + 2 + len(part) > width:
                break
            shown += f"  {part}"
        if self._colour:
            shown = f"\x1b[36m{shown[:cells]}\x1b[0m{shown[cells:]}"
        self._show(shown)

    def update(self, text: str) -> None:
        """Shows `text` if enough time has passed since the last update."""
        if not self.due:
            return
        if self.live:
            self._show(text[: self._width])
        else:
            print(text, file=self._out, flush=True)
            self._next = time.monotonic() + _PLAIN_SECONDS

    def waiting(self, phase: str, seconds: float, done: str = "") -> None:
        """Shows a phase that has lasted so many seconds, and how far it is. A thread calls this about once a second.

        A terminal shows it each time, unless another line was shown a moment ago. Without a terminal a line is printed
        when the phase has lasted two seconds, and again every half minute.
        """
        if self._quiet:
            return
        text = f"{phase}{done and f', {done}'} … {duration(seconds)}"
        if self.live:
            if time.monotonic() >= self._next + _MOMENT_SECONDS:
                self._show(text[: self._width])
            return
        if seconds < self._phase_seconds:  # another phase
            self._phase_due = _LONG_SECONDS
        self._phase_seconds = seconds
        if seconds >= self._phase_due:
            self._phase_due = seconds + _LONG_AGAIN_SECONDS
            self.line(text)

    @property
    def _width(self) -> int:
        return (self.relay_columns if self._relayed else shutil.get_terminal_size().columns) - 1

    def _show(self, text: str) -> None:
        with self._lock:
            self._out.write(f"{self._begin}{text}{self._end}")
            self._out.flush()
            self._shown = True
        self._next = time.monotonic() + _LIVE_SECONDS

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
            if self._shown:
                self._out.write(f"{self._begin}{self._end}")
                self._out.flush()
                self._shown = False


@contextmanager
def status_line(*, quiet: bool = False) -> Iterator[StatusLine]:
    """Yields a status line on stdout, which is cleared afterwards, also after an error. A quiet one shows nothing."""
    # A process that was started without a stdout has nowhere to show one.
    status = StatusLine(sys.stdout or io.StringIO(), quiet=quiet or sys.stdout is None)
    try:
        yield status
    finally:
        status.clear()


class Work:
    """Shows on the terminal of stderr what a command is doing."""

    def __init__(self) -> None:
        self._status = StatusLine(sys.stderr or io.StringIO())
        self._lock = threading.Lock()
        self._silent_since = 0.0
        self._text = ""
        self.does("")

    def does(self, text: str) -> None:
        """Sets the text that is shown from now on, with the seconds since now; an empty text shows nothing."""
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
        """Shows the text, and `done`, which says how far it is."""
        with self._lock:
            text, now = self._text, time.monotonic()
            if text and self._status.live and now - self._silent_since >= _SOON_SECONDS:
                self._status.waiting(text, now - self._since, self.done)


@contextmanager
def working(text: str) -> Iterator[Work]:
    """Shows on a terminal what the command does in the body of the `with`, first `text`."""
    work, end = Work(), threading.Event()
    work.does(text)

    def show() -> None:
        while not end.wait(_SOON_SECONDS):
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
    """Returns a progress bar of so many cells, filled to `share`."""
    full = int(share * cells)
    return "█" * full + "░" * (cells - full)


Rows = list[tuple[str, ...]]


def table(rows: Rows, right: set[int]) -> list[str]:
    """Returns lines with aligned columns; columns in `right` are aligned to the right."""
    columns = []
    for number, cells in enumerate(zip(*rows, strict=True)):
        width = max(map(len, cells))
        columns.append([cell.rjust(width) if number in right else cell.ljust(width) for cell in cells])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
