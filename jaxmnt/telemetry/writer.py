"""Appends records to a file from a thread of its own, so that logging can neither block nor fail a run."""

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

AWAITED_SECONDS = 5.0
"""Seconds that a line may take before `settle` gives up on it, or a warning says that the file system is slow."""
_RETRY_SECONDS = 1.0
"""Seconds between two attempts to write a line."""
_IDLE_SECONDS = 10.0
"""Seconds without a line after which the thread ends."""


class LineWriter:
    """Writes JSON lines to one file, in order; each is written whole and without buffering in this process.

    When writing is slow, decisive lines go first. A line that cannot be written is retried every second, and a warning
    is shown once; afterwards a record of kind lines_missing says how many lines were lost. The thread ends when it is
    idle.
    """

    def __init__(self, path: Path, **common: Any):
        """`common` has the fields that a record of missing lines shares with all others of this file."""
        self._path = path
        self._common = common
        self._begun: float | None = None
        """When the thread began with its current line; None if it has none."""
        self._warned = False
        self._lines = BackgroundQueue(
            f"writing {path.name}", self._work, idle_seconds=_IDLE_SECONDS, gap=self._lines_missing
        )

    def write(self, record: dict[str, Any], *, decisive: bool = False) -> None:
        """Queues a record. Floats keep all their digits; NaN and infinity are written as null, as JSON requires."""
        self._lines.put(_encoded(record), urgent=decisive)
        self._lines.start()
        begun = self._begun
        if begun is not None and time.monotonic() - begun > AWAITED_SECONDS:
            self._warn(f"has taken no line for {AWAITED_SECONDS:g} s")

    def settle(self) -> None:
        """Waits until all lines are written, or until 5 seconds after the newest was queued. While the file system is
        known to be unavailable, only decisive lines are waited for."""
        self._lines.settle(AWAITED_SECONDS, lambda: self._warned)

    def close(self) -> None:
        """Settles, reports lines that could not be written, and lets the thread end. Lines may be written afterwards,
        too."""
        self.settle()
        self._lines.end()
        if lines := sum(self._lines.missing()):
            remark(f"note: {self._path} lacks {counted(lines, 'line', 'lines')} that could not be written")

    # The methods below run in the thread.

    def _work(self, lines: Iterator[bytes]) -> None:
        file: int | None = None
        for line in lines:
            while True:
                self._begun = time.monotonic()
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
            self._begun = None
            if self._warned and self._lines.missing() == (1, 0):
                self._warned = False
                remark(
                    f"note: {self._path} is written again; a record of kind lines_missing says if lines are not in it"
                )
        self._close_file(file)

    def _lines_missing(self, lines: int) -> bytes:
        return _encoded({"kind": "lines_missing", "time": clock.now(), **self._common, "lines": lines})

    def _open(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            if stat.S_ISREG(os.fstat(file).st_mode) and not _ends_whole(self._path):
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


def _encoded(record: dict[str, Any]) -> bytes:
    return (json_text(record) + "\n").encode()


def _append(file: int, line: bytes) -> None:
    """Writes a whole line or nothing: a partial write is truncated away, if the file system permits it."""
    done = 0
    try:
        while done < len(line):
            done += os.write(file, line[done:])
    except OSError:
        if done:
            with contextlib.suppress(OSError):
                end = os.lseek(file, 0, os.SEEK_CUR)
                if os.fstat(file).st_size == end:  # no other writer has appended behind it
                    os.ftruncate(file, end - done)
        raise


def _ends_whole(path: Path) -> bool:
    """Returns True if a file is empty or its last line has a line end."""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
