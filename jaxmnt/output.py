"""Standard output and error that may go away: a reader that has seen enough, a closed terminal, a full disk.

What cannot be shown is dropped, and nothing raises: no work ends because nobody looks at it.
"""

import errno
import io
import os
import select
import shutil
import sys
import time
from typing import Any, TextIO

from jaxmnt.errors import ExitCode, remark

_CHUNK = 1024
"""Bytes that fit at once where `poll` finds any room."""
_PATIENCE_SECONDS = 5.0
_PAUSE_SECONDS = 0.02


class _Raw(io.FileIO):
    """A descriptor to which writing never fails."""

    def __init__(self, descriptor: int):
        super().__init__(descriptor, "w", closefd=False)
        self._terminal = _opened_again(descriptor)
        """A way to the terminal of our own that never waits: a terminal has room for one letter and waits for room for
        the next, and to make the descriptor itself non-blocking would make it so for all who share it."""
        self.lost: OSError | None = None
        """Why something was not written."""
        self.outlived = False
        """Whether the work goes on without this output: then it is waited for only so long."""
        self._stuck = False

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        size = len(left)
        try:
            patience = 0.0 if self._stuck else _PATIENCE_SECONDS
            waiting_since = time.monotonic()
            while left and self._has_room(patience):
                done = self._put(left[:_CHUNK])
                left = left[done:]
                if done:
                    waiting_since = time.monotonic()
                elif self.outlived and time.monotonic() - waiting_since > patience:
                    self._stuck = True
                    break
        except OSError as error:
            if self.lost is None and self.outlived and self.fileno() != 2:
                remark(f"note: nothing more is shown ({error.strerror}); the work goes on")
            self.lost = error
        return size

    def close(self) -> None:
        if self._terminal is not None:
            os.close(self._terminal)
            self._terminal = None
        super().close()

    def _put(self, data: memoryview) -> int:
        """How many bytes were taken: fewer or none where there is room for fewer."""
        if self._terminal is None:
            return super().write(data) or 0  # nothing where somebody has made the descriptor non-blocking
        try:
            return os.write(self._terminal, data)
        except BlockingIOError:
            time.sleep(_PAUSE_SECONDS)
            return 0

    def _has_room(self, patience: float) -> bool:
        """Waits for room: as long as it takes, or once for a few seconds and then no more until there is some."""
        poll = select.poll()
        poll.register(self.fileno(), select.POLLOUT)
        ready = bool(poll.poll(1000 * patience if self.outlived else None))
        self._stuck = not ready
        return ready


def _opened_again(descriptor: int) -> int | None:
    """The terminal at a descriptor, opened without waiting; None where there is none, or none that has a name here."""
    try:
        return os.open(os.ttyname(descriptor), os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None


def guard() -> None:
    """Makes stdout and stderr such streams, also where this process was started without them.

    Descriptors that are closed lead to /dev/null from now on, or the next file that is opened would be one of them.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            assert opened == descriptor, "the lowest that is free"
            os.set_inheritable(descriptor, True)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:  # its descriptor may have become another file's meanwhile
            setattr(sys, name, guarded(None, os.open(os.devnull, os.O_WRONLY)))
        elif type(stream) is io.TextIOWrapper and stream.fileno() == descriptor:
            setattr(sys, name, guarded(stream, descriptor))


def guarded(like: TextIO | None, descriptor: int, *, line_buffering: bool = False) -> TextIO:
    """A text stream on `descriptor` that never fails, otherwise as the one that it takes the place of."""
    raw = _Raw(descriptor)
    before = _raw(like)
    raw.outlived = before is not None and before.outlived
    by_line = line_buffering or like is None or like.line_buffering or getattr(like, "write_through", False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding="utf-8" if like is None else like.encoding,
        errors="replace",  # a terminal that lacks an arrow is no reason to fail
        line_buffering=bool(by_line),
    )


def outlive_output() -> None:
    """For commands whose work is not their output: they wait no longer than a few seconds for whoever reads it."""
    for stream in (sys.stdout, sys.stderr):
        raw = _raw(stream)
        if raw is not None:
            raw.outlived = True


def checked(code: int) -> int:
    """The exit code of a command that ends with `code`: an error if its output is its result and was lost.

    A reader that has gone has seen enough.
    """
    raw = _raw(sys.stdout)
    if raw is None:
        return code
    sys.stdout.flush()
    if raw.lost is None or raw.outlived or raw.lost.errno == errno.EPIPE or code != ExitCode.FINISHED:
        return code
    remark(f"error: the output cannot be written: {raw.lost.strerror}")
    return int(ExitCode.FAILURE)


def _raw(stream: TextIO | None) -> _Raw | None:
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    return raw if isinstance(raw, _Raw) else None


def progress(name: str) -> None:
    """Shows on a terminal what is being worked on, in place of what was shown before; empty clears it."""
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1
        print(f"\r{name[:width]:<{width}}\r", end="", file=sys.stderr, flush=True)
