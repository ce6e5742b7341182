"""Makes standard output and error robust against a reader that exits, a closed terminal, or a full disk.

Output that cannot be written is dropped without an exception, so that a command never ends because its reader is gone.
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

_CHUNK_BYTES = 1024
"""Number of bytes that can be written at once when `poll` reports room."""
_READER_TIMEOUT_SECONDS = 5.0
"""Time to wait for a reader to make room if the command can continue without its output."""
_RETRY_SECONDS = 0.02
"""Time to wait before writing to a full terminal again."""


class _RawOutput(io.FileIO):
    """A descriptor to which writing never fails."""

    def __init__(self, descriptor: int):
        super().__init__(descriptor, "w", closefd=False)
        self._terminal = _reopen_terminal(descriptor)
        """A separate non-blocking descriptor of the terminal. A blocking write may wait for ever after part of the
        text, and making the shared descriptor non-blocking would affect all processes that share it."""
        self.write_error: OSError | None = None
        """The error because of which output was lost, or None."""
        self.is_optional = False
        """True if the command continues without this output, so that the time to wait for a reader is limited."""
        self._stuck = False

    def write(self, data: Any) -> int:
        """Writes as much as possible and drops the rest, but reports everything as written."""
        pending = memoryview(data).cast("B")
        size = len(pending)
        try:
            timeout = 0.0 if self._stuck else _READER_TIMEOUT_SECONDS
            waiting_since = time.monotonic()
            while pending and self._has_room(timeout):
                written = self._write_some(pending[:_CHUNK_BYTES])
                pending = pending[written:]
                if written:
                    waiting_since = time.monotonic()
                elif self.is_optional and time.monotonic() - waiting_since > timeout:
                    self._stuck = True
                    break
        except OSError as error:
            if self.write_error is None and self.is_optional and self.fileno() != 2:
                remark(f"note: nothing more is shown ({error.strerror}); the work continues")
            self.write_error = error
        return size

    def close(self) -> None:
        if self._terminal is not None:
            os.close(self._terminal)
            self._terminal = None
        super().close()

    def _write_some(self, data: memoryview) -> int:
        """Writes as many bytes of `data` as there is room for, and returns their number."""
        if self._terminal is None:
            return super().write(data) or 0  # None if another process has made the descriptor non-blocking
        try:
            return os.write(self._terminal, data)
        except BlockingIOError:
            time.sleep(_RETRY_SECONDS)
            return 0

    def _has_room(self, timeout: float) -> bool:
        """Waits until there is room: for `timeout` seconds if the output is optional, otherwise without a limit.
        Returns True if there is room."""
        poll = select.poll()
        poll.register(self.fileno(), select.POLLOUT)
        ready = bool(poll.poll(1000 * timeout if self.is_optional else None))
        self._stuck = not ready
        return ready


def _reopen_terminal(descriptor: int) -> int | None:
    """Opens the terminal of a descriptor again, as non-blocking. Returns None if there is no terminal, or if it has no
    name in this container."""
    try:
        return os.open(os.ttyname(descriptor), os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None


def guard() -> None:
    """Replaces stdout and stderr with robust streams, even if this process was started without them.

    Closed standard descriptors are opened on /dev/null. Otherwise the next file that is opened would get their number.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            assert opened == descriptor, "open returns the lowest free descriptor"
            os.set_inheritable(descriptor, True)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:  # its descriptor may belong to another file by now
            setattr(sys, name, never_failing_stream(None, os.open(os.devnull, os.O_WRONLY)))
        elif type(stream) is io.TextIOWrapper and stream.fileno() == descriptor:
            setattr(sys, name, never_failing_stream(stream, descriptor))


def never_failing_stream(replaced: TextIO | None, descriptor: int, *, line_buffering: bool = False) -> TextIO:
    """Returns a text stream on `descriptor` that never fails, and is otherwise like the stream that it replaces."""
    raw = _RawOutput(descriptor)
    replaced_raw = _raw(replaced)
    raw.is_optional = replaced_raw is not None and replaced_raw.is_optional
    flushes_lines = replaced is None or replaced.line_buffering or getattr(replaced, "write_through", False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding="utf-8" if replaced is None else replaced.encoding,
        errors="replace",  # a character that the terminal lacks must not fail
        line_buffering=bool(line_buffering or flushes_lines),
    )


def limit_output_waits() -> None:
    """Limits the time to wait for a reader of stdout and stderr. Called by commands whose result is not their
    output."""
    for stream in (sys.stdout, sys.stderr):
        raw = _raw(stream)
        if raw is not None:
            raw.is_optional = True


def final_exit_code(code: int) -> int:
    """Returns the exit code of a command that ends with `code`, or that of a failure if its output was its result and
    was lost.

    A reader that has exited is not a failure.
    """
    raw = _raw(sys.stdout)
    if raw is None:
        return code
    sys.stdout.flush()
    if raw.write_error is None or raw.is_optional or raw.write_error.errno == errno.EPIPE or code != ExitCode.FINISHED:
        return code
    remark(f"error: the output cannot be written: {raw.write_error.strerror}")
    return int(ExitCode.FAILURE)


def _raw(stream: TextIO | None) -> _RawOutput | None:
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    return raw if isinstance(raw, _RawOutput) else None


def progress(name: str) -> None:
    """Shows on a terminal the name of what is being worked on, in place of the previous one. An empty name clears
    it."""
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1
        print(f"\r{name[:width]:<{width}}\r", end="", file=sys.stderr, flush=True)
