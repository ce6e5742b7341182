"""Makes standard output and error robust against a reader that exits, a closed terminal, or a full disk.

Output that cannot be written is dropped without an exception, so that work never ends for lack of a reader.
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
"""Bytes that can be written at once when `poll` reports room."""
_PATIENCE_SECONDS = 5.0
"""Time to wait for room if the work continues without its output."""
_PAUSE_SECONDS = 0.02
"""Pause before a full terminal is tried again."""


class _Raw(io.FileIO):
    """A descriptor to which writing never fails."""

    def __init__(self, descriptor: int):
        super().__init__(descriptor, "w", closefd=False)
        self._terminal = _opened_again(descriptor)
        """A separate non-blocking descriptor of the terminal. A blocking write may stop after part of the text, and
        making the shared descriptor non-blocking would affect all processes that share it."""
        self.lost: OSError | None = None
        """Error by which output was lost."""
        self.outlived = False
        """True if the work continues without this output, so that waiting for a reader is limited."""
        self._stuck = False

    def write(self, data: Any) -> int:
        """Writes as much as possible, drops the rest, and reports all as written."""
        pending = memoryview(data).cast("B")
        size = len(pending)
        try:
            patience = 0.0 if self._stuck else _PATIENCE_SECONDS
            waiting_since = time.monotonic()
            while pending and self._has_room(patience):
                done = self._put(pending[:_CHUNK])
                pending = pending[done:]
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
        """Writes some bytes. Returns their number, which is smaller than `data` if there is less room."""
        if self._terminal is None:
            return super().write(data) or 0  # None if another process has made the descriptor non-blocking
        try:
            return os.write(self._terminal, data)
        except BlockingIOError:
            time.sleep(_PAUSE_SECONDS)
            return 0

    def _has_room(self, patience: float) -> bool:
        """Waits for room, without a limit; if the output is outlived, for `patience` seconds. Returns True if there is
        room."""
        poll = select.poll()
        poll.register(self.fileno(), select.POLLOUT)
        ready = bool(poll.poll(1000 * patience if self.outlived else None))
        self._stuck = not ready
        return ready


def _opened_again(descriptor: int) -> int | None:
    """Opens the terminal of a descriptor again, non-blocking. Returns None if there is none, or it has no name here."""
    try:
        return os.open(os.ttyname(descriptor), os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None


def guard() -> None:
    """Replaces stdout and stderr by robust streams, also if this process was started without them.

    Closed standard descriptors are opened on /dev/null, or else the next file that is opened would get their number.
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
        if stream is None:  # its descriptor may belong to another file by now
            setattr(sys, name, guarded(None, os.open(os.devnull, os.O_WRONLY)))
        elif type(stream) is io.TextIOWrapper and stream.fileno() == descriptor:
            setattr(sys, name, guarded(stream, descriptor))


def guarded(like: TextIO | None, descriptor: int, *, line_buffering: bool = False) -> TextIO:
    """Returns a text stream on `descriptor` that never fails, otherwise like the stream `like` that it replaces."""
    raw = _Raw(descriptor)
    before = _raw(like)
    raw.outlived = before is not None and before.outlived
    by_line = line_buffering or like is None or like.line_buffering or getattr(like, "write_through", False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding="utf-8" if like is None else like.encoding,
        errors="replace",  # a character that the terminal lacks must not fail
        line_buffering=bool(by_line),
    )


def outlive_output() -> None:
    """Limits the time to wait for a reader of stdout and stderr. For commands whose work is not their output."""
    for stream in (sys.stdout, sys.stderr):
        raw = _raw(stream)
        if raw is not None:
            raw.outlived = True


def checked(code: int) -> int:
    """Returns the exit code of a command that ends with `code`: an error if its result was its output, and was lost.

    A reader that has exited is no error.
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
    """Shows on a terminal what is being worked on, replacing the previous name; an empty one clears it."""
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1
        print(f"\r{name[:width]:<{width}}\r", end="", file=sys.stderr, flush=True)
