"""The request to stop: by signal, by a file STOP in the run directory, or because the allocation ends.

The run then ends after a step, with a checkpoint; before the first step of a start it ends at once. A second signal
ends it at once, whatever the main thread is in.
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

ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
WARNING = signal.SIGUSR1
"""What a scheduler sends ahead of the end (Slurm: --signal=USR1@SECONDS). What follows it is a first signal."""
STOP_FILE = "STOP"

_LATEST = 2**40
"""No clock shows more seconds."""
_LOOK_SECONDS = 2.0
_SAME_SECONDS = 1.0
"""What comes so soon after a first signal is the same request once more, handed on by a launcher."""


class StopRequest:
    """Whether this process was asked to stop. Used as a context manager, in the main thread.

    Signals are heard by a thread, because Python's own handlers wait while the main thread is in a library.
    """

    def __init__(
        self,
        run_dir: Path | None,
        at_once: Callable[[str], Any],
        seconds: float | None = None,
        early: Callable[[str], Any] | None = None,
    ):
        """`run_dir` is watched for the file STOP, and the run stops after `seconds`, if given: by process 0.

        `at_once` is called with the reason when a second signal comes, `early` when the wish comes before the first
        step, to end the process; without it that step is taken.
        """
        self.reason: str | None = None
        """What asked for it, in a word; None if nothing did."""
        self._file = None if run_dir is None else run_dir / STOP_FILE
        self._at_once = at_once
        self._ends_at = None if seconds is None else time.monotonic() + seconds
        self._early = early
        self._leaving = threading.Lock()
        self._asked: float | None = None
        self._over = False
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
            what = "nothing to save before the first step: stopping"
            if early is None:
                what = "saving a checkpoint after this step, then stopping (a second signal stops at once)"
            with contextlib.suppress(OSError, ValueError):  # a closed terminal must not keep us from saving
                print(f"\n{reason}: {what}", file=sys.stderr, flush=True)
            if early is not None:
                self.obeyed()
                early(reason)

    def steps_begin(self) -> None:
        """From now on there may be something to save. Does not return if the process is leaving already."""
        with self._leaving:
            self._early = None

    def obeyed(self) -> None:
        """The run is over, and nothing more to be asked of it. Removes the file that asked for it: else the next start
        would stop as well."""
        self._over = True
        if self._file is not None and self.reason == STOP_FILE:
            try:
                self._file.unlink(missing_ok=True)
            except OSError as error:
                remark(f"note: {self._file} cannot be removed: {error.strerror}; the next start will stop at once")

    def __enter__(self) -> "StopRequest":
        ear, bell = socket.socketpair()
        bell.setblocking(False)
        ear.settimeout(_LOOK_SECONDS)
        self._wakeup_read, self._wakeup_write = ear, bell
        self._scope.callback(early_signals.release)
        # First, so that there is no moment in which a signal is neither remembered nor heard.
        before = signal.set_wakeup_fd(bell.fileno(), warn_on_full_buffer=False)
        self._scope.callback(signal.set_wakeup_fd, before)
        self._scope.callback(early_signals.restore, early_signals.handle(lambda *_: None))
        bell.send(bytes(early_signals.taken()))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._scope.close()
        self._end.set()
        with contextlib.suppress(OSError):
            self._wakeup_write.send(b"\0")
        self._thread.join(_LOOK_SECONDS)
        if not self._thread.is_alive():  # else it is in a file system that hangs
            self._wakeup_read.close()
            self._wakeup_write.close()

    def _listen(self) -> None:
        while not self._end.is_set():
            with contextlib.suppress(TimeoutError):
                for number in self._wakeup_read.recv(64):
                    self._hear(number)
            if not self.wanted:
                with contextlib.suppress(OSError):  # a file system that is away asks for nothing
                    self._look()

    def _hear(self, number: int) -> None:
        if self._over:
            return
        if number == WARNING:
            self.ask(signal.Signals(number).name)
        elif number in ASKING:
            name = signal.Signals(number).name
            now = time.monotonic()
            if self._asked is None:
                self._asked = now
            elif now - self._asked > _SAME_SECONDS:
                self._at_once(f"stopped at once by a second signal, {name}")
            self.ask(name)

    def _look(self) -> None:
        """For what asks without a signal."""
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
    """What hears of requests to stop. In process 0 also by the end of the allocation, and by the file STOP, unless this
    works `beside` the run: the file is for the run, and removed when it is obeyed."""
    if identity.process_id != 0:
        return StopRequest(None, at_once, None, early)
    seconds = seconds_left(config.run.max_minutes, config.run.stop_margin_seconds, os.environ)
    return StopRequest(None if beside else config.run_dir, at_once, seconds, early)


def seconds_left(minutes: float | None, margin: float, environment: Mapping[str, str]) -> float | None:
    """Seconds until the run has to stop, `margin` before the allocation ends; None if no end is known.

    It ends after `minutes`, or when Slurm says so (SLURM_JOB_END_TIME, in Unix seconds), whichever is sooner.
    """
    left = [60 * minutes] if minutes is not None else []
    told = environment.get("SLURM_JOB_END_TIME")
    if told and (slurm := parse_number("SLURM_JOB_END_TIME", told, most=_LATEST) - time.time()) > 0:
        left.append(slurm)
    return min(left) - margin if left else None
