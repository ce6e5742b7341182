"""The request to stop: by signal, by a file STOP in the run directory, or because the allocation ends.

The run then ends after the current step, with a checkpoint; before the first step of a start it ends at once. A second
signal ends it at once, whatever the main thread is doing.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxmnt import early_signals
from jaxmnt.config.schema import Config
from jaxmnt.distributed.identity import Identity
from jaxmnt.distributed.launchers import parse_number
from jaxmnt.errors import remark

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
WARNING_SIGNAL = signal.SIGUSR1
"""Sent by a scheduler before the end (Slurm: --signal=USR1@SECONDS). The next stop signal counts as a first one."""
STOP_FILE = "STOP"

_LATEST = 2**40
"""Upper limit on Unix seconds in the environment."""
_LOOK_SECONDS = 2.0
_SAME_SECONDS = 1.0
"""A signal so soon after the first one is a copy of it, forwarded by a launcher."""


class StopRequest:
    """Listens for requests to stop this process. Used as a context manager, in the main thread.

    A thread receives the signals, because Python's own handlers do not run while the main thread is in a C library.
    """

    def __init__(
        self,
        run_dir: Path | None,
        at_once: Callable[[str], Any],
        seconds: float | None = None,
        early: Callable[[str], Any] | None = None,
    ):
        """Watches `run_dir` for the file STOP, and stops the run after `seconds`. Process 0 passes these.

        Calls `at_once` with the reason at a second signal. Calls `early` with the reason at a request before the first
        step, to end the process; without `early`, the first step is taken.
        """
        self.reason: str | None = None
        """The source of the request, such as SIGTERM; None if there was no request."""
        self._file = None if run_dir is None else run_dir / STOP_FILE
        self._at_once = at_once
        self._ends_at = None if seconds is None else time.monotonic() + seconds
        self._early = early
        self._leaving = threading.Lock()
        self._first_signal_time: float | None = None
        self._is_done = False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="stop", daemon=True)
        self._scope = contextlib.ExitStack()

    @property
    def wanted(self) -> bool:
        return self.reason is not None

    def ask(self, reason: str) -> None:
        """Asks the run to stop, unless something has before."""
        if self.reason is not None:
            return
        with self._leaving:
            self.reason = reason
            early = self._early
            action = "nothing to save before the first step: stopping"
            if early is None:
                action = "saving a checkpoint after this step, then stopping (a second signal stops at once)"
            with contextlib.suppress(OSError, ValueError):  # a closed terminal must not keep us from saving
                print(f"\n{reason}: {action}", file=sys.stderr, flush=True)
            if early is not None:
                self.mark_done()
                early(reason)

    def begin_steps(self) -> None:
        """From now on a request saves a checkpoint first. Does not return if the process is already exiting."""
        with self._leaving:
            self._early = None

    def mark_done(self) -> None:
        """Ignores further requests, since the run is ending. Removes the file STOP if it requested the stop, because
        the next start would stop as well."""
        self._is_done = True
        if self._file is not None and self.reason == STOP_FILE:
            try:
                self._file.unlink(missing_ok=True)
            except OSError as error:
                remark(f"note: {self._file} cannot be removed: {error.strerror}; the next start will stop at once")

    def __enter__(self) -> "StopRequest":
        self._wakeup_read, self._wakeup_write = socket.socketpair()
        self._wakeup_write.setblocking(False)
        self._wakeup_read.settimeout(_LOOK_SECONDS)
        self._scope.callback(early_signals.release)
        # Set the wakeup descriptor before the handlers, so that no signal is lost in between.
        before = signal.set_wakeup_fd(self._wakeup_write.fileno(), warn_on_full_buffer=False)
        self._scope.callback(signal.set_wakeup_fd, before)
        self._scope.callback(early_signals.restore, early_signals.handle(lambda *_: None))
        # Signals that came earlier are handled like later ones.
        self._wakeup_write.send(bytes(early_signals.take_received()))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._scope.close()
        self._end.set()
        with contextlib.suppress(OSError):
            self._wakeup_write.send(b"\0")
        self._thread.join(_LOOK_SECONDS)
        if not self._thread.is_alive():  # it is alive if its file system hangs, and then still uses the sockets
            self._wakeup_read.close()
            self._wakeup_write.close()

    def _listen(self) -> None:
        while not self._end.is_set():
            with contextlib.suppress(TimeoutError):
                for number in self._wakeup_read.recv(64):
                    self._handle_signal(number)
            if not self.wanted:
                with contextlib.suppress(OSError):  # a file system that cannot be reached requests nothing
                    self._check_file_and_time()

    def _handle_signal(self, number: int) -> None:
        if self._is_done:
            return
        if number == WARNING_SIGNAL:
            self.ask(signal.Signals(number).name)
        elif number in STOP_SIGNALS:
            name = signal.Signals(number).name
            now = time.monotonic()
            if self._first_signal_time is None:
                self._first_signal_time = now
            elif now - self._first_signal_time > _SAME_SECONDS:
                self._at_once(f"stopped at once by a second signal, {name}")
            self.ask(name)

    def _check_file_and_time(self) -> None:
        """Checks for the file STOP, and for the end of the allocation."""
        if self._file is not None and self._file.exists():
            self.ask(STOP_FILE)
        elif self._ends_at is not None and time.monotonic() >= self._ends_at:
            self.ask("the allocation ends")


def stop_request(
    config: Config,
    identity: Identity,
    at_once: Callable[[str], object],
    early: Callable[[str], object] | None = None,
    *,
    beside: bool = False,
) -> StopRequest:
    """Makes the listener for requests to stop. In process 0 it also watches for the end of the allocation and the file
    STOP. A command `beside` the run ignores the file: it is for the run, which removes it."""
    if identity.process_id != 0:
        return StopRequest(None, at_once, None, early)
    seconds = seconds_left(config.run.max_minutes, config.run.stop_margin_seconds, os.environ)
    return StopRequest(None if beside else config.run_dir, at_once, seconds, early)


def seconds_left(minutes: float | None, margin: float, environment: Mapping[str, str]) -> float | None:
    """Returns the seconds until the run must stop, `margin` before the allocation ends; None if no end is known.

    The allocation ends after `minutes`, or at SLURM_JOB_END_TIME (Unix seconds), whichever is sooner.
    """
    limits = [60 * minutes] if minutes is not None else []
    end_time = environment.get("SLURM_JOB_END_TIME")
    # A time in the past is that of another job, inherited from its environment.
    if end_time and (slurm_limit := parse_number("SLURM_JOB_END_TIME", end_time, maximum=_LATEST) - time.time()) > 0:
        limits.append(slurm_limit)
    return min(limits) - margin if limits else None
