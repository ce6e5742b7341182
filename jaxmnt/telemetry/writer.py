"""Appends records to a file in a separate thread, so that logging can neither block nor fail a run."""

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxmnt.errors import counted, remark
from jaxmnt.strict_json import json_text
from jaxmnt.telemetry import clock
from jaxmnt.telemetry.background import BackgroundQueue

LINE_TIMEOUT_SECONDS = 5.0
"""Time that a line may take before `settle` gives up on it, and before a warning says that the file system is slow."""
_RETRY_SECONDS = 1.0
"""Time between two attempts to write a line."""
_IDLE_SECONDS = 10.0
"""Time without a line after which the thread ends."""


class LineWriter:
    """Writes JSON lines to one file, in order. Each line is written completely, and without buffering in this process.

    If writing is slow, decisive lines are written first. A line that cannot be written is tried again every second, and
    a warning is shown once. Afterwards, a record of kind lines_missing says how many lines were lost. The thread ends
    when it is idle.
    """

    def __init__(self, path: Path, **common: Any):
        """`common` has the fields that a record of missing lines shares with all others of this file."""
        self._path = path
        self._common = common
        self._line_began_at: float | None = None
        """Time at which the thread began with its current line; None if it has no line."""
        self._warned = False
        self._lines = BackgroundQueue(
            f"writing {path.name}", self._work, idle_seconds=_IDLE_SECONDS, gap=self._lines_missing
        )

    def write(self, record: dict[str, Any], *, decisive: bool = False) -> None:
        """Queues a record. Floats keep all their digits; NaN and infinity are written as null, as JSON requires."""
        self._lines.put(_encode(record), urgent=decisive)
        self._lines.start()
        line_began_at = self._line_began_at
        if line_began_at is not None and time.monotonic() - line_began_at > LINE_TIMEOUT_SECONDS:
            self._warn(f"has taken no line for {LINE_TIMEOUT_SECONDS:g} s")

    def settle(self) -> None:
        """Waits until all lines are written, or until 5 seconds after the newest was queued. While the file system is
        known to be unavailable, waits only for decisive lines."""
        self._lines.settle(LINE_TIMEOUT_SECONDS, lambda: self._warned)

    def close(self) -> None:
        """Waits for the lines like `settle`, reports lines that could not be written, and lets the thread end. More
        lines may be written afterwards."""
        self.settle()
        self._lines.end()
        if lines := sum(self._lines.waiting_and_dropped()):
            remark(f"note: {self._path} lacks {counted(lines, 'line', 'lines')} that could not be written")

    # The methods below run in the thread.

    def _work(self, lines: Iterator[bytes]) -> None:
        file: int | None = None
        for line in lines:
            while True:
                self._line_began_at = time.monotonic()
                try:
                    if file is None:
                        file = self._open()
                    _append(file, line)
                    break
                except OSError as error:
                    self._warn(f"cannot be written: {error.strerror}")
                    self._close_file(file)
                    file = None
                    time.sleep(_RETRY_SECONDS)
            self._line_began_at = None
            if self._warned and self._lines.waiting_and_dropped() == (1, 0):
                self._warned = False
                remark(
                    f"note: {self._path} is written again; a record of kind lines_missing says if lines are not in it"
                )
        self._close_file(file)

    def _lines_missing(self, lines: int) -> bytes:
        return _encode({"kind": "lines_missing", "time": clock.now(), **self._common, "lines": lines})

    def _open(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            if stat.S_ISREG(os.fstat(file).st_mode) and not _ends_with_newline(self._path):
                os.write(file, b"\n")  # ends the partial line that a killed writer has left
        except BaseException:
            os.close(file)
            raise
        return file

    def _close_file(self, file: int | None) -> None:
        try:
            if file is not None:
                os.close(file)
        except OSError as error:  # a network file system may report a failed write only now
            self._warn(f"cannot be written: {error.strerror}")

    def _warn(self, problem: str) -> None:
        if not self._warned:
            self._warned = True
            remark(f"WARNING {self._path} {problem}; the run does not wait for it")


def _encode(record: dict[str, Any]) -> bytes:
    return (json_text(record) + "\n").encode()


def _append(file: int, line: bytes) -> None:
    """Writes a complete line or nothing. A partial write is removed again, if the file system permits it."""
    written = 0
    try:
        while written < len(line):
            written += os.write(file, line[written:])
    except OSError:
        if written:
            with contextlib.suppress(OSError):
                end = os.lseek(file, 0, os.SEEK_CUR)
                if os.fstat(file).st_size == end:  # no other writer has appended to the file since
                    os.ftruncate(file, end - written)
        raise


def _ends_with_newline(path: Path) -> bool:
    """Returns True if a file is empty or its last line has a line end."""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
