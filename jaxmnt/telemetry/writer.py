"""Appends records to a file from a thread of its own, so that no run waits for, or ends over, what it only tells."""

import contextlib
import os
import stat
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

from jaxmnt.errors import remark
from jaxmnt.strict_json import json_text
from jaxmnt.telemetry import clock

MOST_WAITING = 10_000
"""Lines. Those that come while so many wait are counted and not kept, unless they are decisive."""
AWAITED_SECONDS = 5.0
"""How long a line that is given may take before somebody leaves without it, or is told that the file system is slow."""
_LATE_SECONDS = 1.0
_RETRY_SECONDS = 1.0
_IDLE_SECONDS = 10.0


class _Waiting(NamedTuple):
    number: int
    line: bytes
    since: float


class LineWriter:
    """Writes JSON lines to one file, in order; each is whole, and with the system as soon as it is written.

    When that takes long, decisive lines go first. What cannot be written is tried again every second, and said once;
    afterwards a record of kind lines_missing says how many are not there. Its thread ends when there is nothing to do.
    """

    def __init__(self, path: Path, **common: Any):
        """`common` is what a record of missing lines has like all others of this file."""
        self._path = path
        self._common = common
        self._given = 0
        self._decisive: deque[_Waiting] = deque()
        self._ordinary: deque[_Waiting] = deque()
        self._dropped = 0
        self._begun: float | None = None
        """When the thread began with the line that it is at."""
        self._warned = False
        self._closing = False
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()

    def write(self, record: dict[str, Any], *, decisive: bool = False) -> None:
        """Floats keep all their digits; NaN and infinity are written as null, which JSON can hold."""
        line = _encoded(record)
        with self._changed:
            if not decisive and (self._dropped or len(self._ordinary) >= MOST_WAITING):
                self._dropped += 1
            else:
                self._add(line, self._decisive if decisive else self._ordinary)
            self._closing = False
            self._ensure_thread()
            self._changed.notify_all()
            stuck = self._begun is not None and time.monotonic() - self._begun > AWAITED_SECONDS
        if stuck:
            self._warn(f"has taken no line for {AWAITED_SECONDS:g} s")

    def settle(self) -> None:
        """Returns when all is written, or 5 seconds after the last line was given; while the file system is known to be
        away only decisive lines are waited for."""
        with self._changed:
            while left := self._worth_waiting():
                self._changed.wait(left)

    def close(self) -> None:
        """Settles, says what could not be written, and lets the thread end. More may be written afterwards."""
        self.settle()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            missing = len(self._decisive) + len(self._ordinary) + self._dropped
        if missing:
            remark(f"note: {self._path} lacks {missing} lines that could not be written")

    def _worth_waiting(self) -> float:
        """For how many seconds more."""
        queues = [self._decisive] if self._warned else [self._decisive, self._ordinary]
        newest = max((queue[-1].since for queue in queues if queue), default=None)
        return 0.0 if newest is None else max(0.0, newest + AWAITED_SECONDS - time.monotonic())

    def _add(self, line: bytes, queue: deque[_Waiting]) -> None:
        self._given += 1
        queue.append(_Waiting(self._given, line, time.monotonic()))

    def _ensure_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"writing {self._path.name}", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # no more threads are allowed now; the next line tries again
                self._thread = None

    # In the thread.

    def _work(self) -> None:
        file: int | None = None
        while (waiting := self._next()) is not None:
            self._begun = time.monotonic()
            try:
                if file is None:
                    file = self._open()
                _append(file, waiting.line)
            except OSError as error:
                self._warn(f"cannot be written: {error.strerror}")
                self._close_file(file)
                file = None
                time.sleep(_RETRY_SECONDS)
            else:
                self._written(waiting)
        self._close_file(file)

    def _next(self) -> _Waiting | None:
        """The line to write next, when there is one; None when there has been none for a while."""
        with self._changed:
            if not self._changed.wait_for(self._has_work, _IDLE_SECONDS) or self._is_done():
                self._thread = None
                return None
            first = [queue[0] for queue in (self._decisive, self._ordinary) if queue]
            late = time.monotonic() - min(waiting.since for waiting in first) > _LATE_SECONDS
            return first[0] if late else min(first)

    def _is_done(self) -> bool:
        return self._closing and not self._decisive and not self._ordinary

    def _has_work(self) -> bool:
        return bool(self._closing or self._decisive or self._ordinary)

    def _account(self) -> bytes:
        """The record of lines that were dropped."""
        lines, self._dropped = self._dropped, 0
        return _encoded({"kind": "lines_missing", "time": clock.now(), **self._common, "lines": lines})

    def _written(self, waiting: _Waiting) -> None:
        with self._changed:
            queue = self._decisive if self._decisive and self._decisive[0] is waiting else self._ordinary
            queue.popleft()
            self._begun = None
            if self._dropped and not self._ordinary:
                self._add(self._account(), self._ordinary)
            recovered = self._warned and not self._decisive and not self._ordinary
            if recovered:
                self._warned = False
            self._changed.notify_all()
        if recovered:
            remark(f"note: {self._path} is written again; a record of kind lines_missing says if lines are not in it")

    def _open(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            if stat.S_ISREG(os.fstat(file).st_mode) and not _ends_whole(self._path):
                os.write(file, b"\n")  # what a killed writer left is a line of its own
        except BaseException:
            os.close(file)
            raise
        return file

    def _close_file(self, file: int | None) -> None:
        try:
            if file is not None:
                os.close(file)
        except OSError as error:  # a network file system may say it only now
            self._warn(f"cannot be written: {error.strerror}")

    def _warn(self, what: str) -> None:
        with self._changed:
            told, self._warned = self._warned, True
        if not told:
            remark(f"WARNING {self._path} {what}; the run goes on without it")


def _encoded(record: dict[str, Any]) -> bytes:
    return (json_text(record) + "\n").encode()


def _append(file: int, line: bytes) -> None:
    """All of a line or nothing of it, as far as the file system lets it be taken back."""
    done = 0
    try:
        while done < len(line):
            done += os.write(file, line[done:])
    except OSError:
        if done:
            with contextlib.suppress(OSError):
                end = os.lseek(file, 0, os.SEEK_CUR)
                if os.fstat(file).st_size == end:  # nobody else has written behind it
                    os.ftruncate(file, end - done)
        raise


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
