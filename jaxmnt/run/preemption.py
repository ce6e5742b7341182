"""The request to stop: by signal, by a file STOP in the run directory, or because the allocation ends.

The run then saves a checkpoint after the current step and ends. Before the first step of a start it ends at once. A
second signal also ends it at once, whatever the main thread is doing.
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
"""Sent by a scheduler some time before the allocation ends (Slurm: --signal=USR1@SECONDS). The next stop signal still
counts as the first one."""
STOP_FILE = "STOP"

_MAX_UNIX_SECONDS = 2**40
"""Maximum number of Unix seconds that the environment may give."""
_POLL_SECONDS = 2.0
_DUPLICATE_SIGNAL_SECONDS = 1.0
"""A signal that comes within this time after the first one is a copy of it, which a launcher has forwarded."""


class StopRequest:
    """Context manager that listens for requests to stop this process. Enter it in the main thread.

    A thread receives the signals, because Python's own handlers do not run while the main thread is in a C library.
    """

    def __init__(
        self,
        run_dir: Path | None,
        end_now: Callable[[str], Any],
        seconds: float | None = None,
        end_before_steps: Callable[[str], Any] | None = None,
    ):
        """Watches `run_dir` for the file STOP, and stops the run after `seconds`. Only process 0 passes these.

        A second signal calls `end_now` with the reason. A request before the first step calls `end_before_steps` with
        the reason, which ends the process. Without `end_before_steps`, the first step is taken.
        """
        self.reason: str | None = None
        """The source of the request, such as SIGTERM; None if there was no request."""
        self._stop_file = None if run_dir is None else run_dir / STOP_FILE
        self._end_now = end_now
        self._ends_at = None if seconds is None else time.monotonic() + seconds
        self._end_before_steps = end_before_steps
        self._early_end_lock = threading.Lock()
        self._first_signal_time: float | None = None
        self._is_done = False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="stop", daemon=True)
        self._scope = contextlib.ExitStack()
        self._ignores_afterwards = False

    @property
    def wanted(self) -> bool:
        return self.reason is not None

    def ask(self, reason: str) -> None:
        """Requests that the run stops, unless that was requested before."""
        if self.reason is not None:
            return
        with self._early_end_lock:
            self.reason = reason
            end_before_steps = self._end_before_steps
            action = "nothing to save before the first step: stopping"
            if end_before_steps is None:
                action = "saving a checkpoint after this step, then stopping (a second signal stops at once)"
            with contextlib.suppress(OSError, ValueError):  # a closed terminal must not prevent the save
                print(f"\n{reason}: {action}", file=sys.stderr, flush=True)
            if end_before_steps is not None:
                self.mark_done()
                end_before_steps(reason)

    def begin_steps(self) -> None:
        """Lets later requests save a checkpoint before the run ends.

        Does not return if the process is already exiting.
        """
        with self._early_end_lock:
            self._end_before_steps = None

    def mark_done(self) -> None:
        """Ignores further requests, because the run is ending. Removes the file STOP if that requested the stop;
        otherwise the next start would stop as well."""
        self._is_done = True
        if self._stop_file is not None and self.reason == STOP_FILE:
            try:
                self._stop_file.unlink(missing_ok=True)
            except OSError as error:
                remark(f"note: {self._stop_file} cannot be removed: {error.strerror}; the next start will stop at once")

    def ignore_afterwards(self) -> None:
        """Ignores stop signals once this listener ends, because the exit code of the process is final. Otherwise a
        signal between the end of the listener and the end of the process would replace the code."""
        self._ignores_afterwards = True

    def __enter__(self) -> "StopRequest":
        self._wakeup_read, self._wakeup_write = socket.socketpair()
        self._wakeup_write.setblocking(False)
        self._wakeup_read.settimeout(_POLL_SECONDS)
        self._scope.callback(early_signals.release)
        # Set the wakeup descriptor before the handlers, so that no signal is lost in between.
        old_descriptor = signal.set_wakeup_fd(self._wakeup_write.fileno(), warn_on_full_buffer=False)
        self._scope.callback(signal.set_wakeup_fd, old_descriptor)
        self._scope.callback(early_signals.restore, early_signals.handle(lambda *_: None))
        # Handle signals that came earlier like later ones.
        self._wakeup_write.send(bytes(early_signals.take_received()))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._ignores_afterwards:
            early_signals.ignore()
            # Other signals, such as the profiler's, must not be written to a socket that is closed below.
            signal.set_wakeup_fd(-1)
        else:
            self._scope.close()
        self._end.set()
        with contextlib.suppress(OSError):
            self._wakeup_write.send(b"\0")
        self._thread.join(_POLL_SECONDS)
        if not self._thread.is_alive():  # the thread is alive, and still uses the sockets, if its file system hangs
            self._wakeup_read.close()
            self._wakeup_write.close()

    def _listen(self) -> None:
        while not self._end.is_set():
            with contextlib.suppress(TimeoutError):
                for number in self._wakeup_read.recv(64):
                    self._handle_signal(number)
            if not self.wanted:
                with contextlib.suppress(OSError):  # a file system that cannot be reached is no request
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
            elif now - self._first_signal_time > _DUPLICATE_SIGNAL_SECONDS:
                self._end_now(f"stopped at once by a second signal, {name}")
            self.ask(name)

    def _check_file_and_time(self) -> None:
        """Requests a stop if the file STOP exists, or if the allocation is about to end."""
        if self._stop_file is not None and self._stop_file.exists():
            self.ask(STOP_FILE)
        elif self._ends_at is not None and time.monotonic() >= self._ends_at:
            self.ask("the allocation ends")


def stop_request(
    config: Config,
    identity: Identity,
    end_now: Callable[[str], object],
    end_before_steps: Callable[[str], object] | None = None,
    *,
    ignore_file: bool = False,
) -> StopRequest:
    """Makes the listener for requests to stop. In process 0 it also watches for the end of the allocation and the file
    STOP. With `ignore_file` it does not watch for the file, which is meant for the run and not for this command."""
    if identity.process_id != 0:
        return StopRequest(None, end_now, None, end_before_steps)
    seconds = seconds_left(config.run.max_minutes, config.run.stop_margin_seconds, os.environ)
    return StopRequest(None if ignore_file else config.run_dir, end_now, seconds, end_before_steps)


def seconds_left(minutes: float | None, margin: float, environment: Mapping[str, str]) -> float | None:
    """Returns the seconds until the run must stop, which is `margin` seconds before the allocation ends; None if it is
    not known when that is.

    The allocation ends after `minutes`, or at SLURM_JOB_END_TIME (Unix seconds), whichever is sooner.
    """
    limits = [60 * minutes] if minutes is not None else []
    end_time = environment.get("SLURM_JOB_END_TIME")
    # A time in the past belongs to another job, whose environment this one has inherited.
    slurm_limit = 0.0
    if end_time:
        slurm_limit = parse_number("SLURM_JOB_END_TIME", end_time, maximum=_MAX_UNIX_SECONDS) - time.time()
    if slurm_limit > 0:
        limits.append(slurm_limit)
    return min(limits) - margin if limits else None
