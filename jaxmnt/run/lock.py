"""A lock that allows one job at a time in a run directory, and that a dead job cannot keep.

`lock.json` is created exclusively and names its holder. A holder on this machine is alive if its process exists. A
holder on another machine is alive if it keeps changing `lock.beat`, a counter, so no clocks are compared. A lock that
cannot be read is treated like one of another machine, and reported with the file's owner and date.
"""

import contextlib
import os
import pwd
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from jaxmnt.checkpoint.refs import RUN_FILE
from jaxmnt.errors import ConfigError, UserError, printable
from jaxmnt.storage import StoragePath, create, is_there, read, remove_if
from jaxmnt.strict_json import json_text

_BEAT_SECONDS = 5.0
_SILENCE_TIMEOUT_SECONDS = 20.0
"""Time without a heartbeat after which a holder on another machine is considered dead."""
_EXIT_TIMEOUT_SECONDS = 10.0
"""Timeout for a holder on this machine to exit. It may be a replaced job that is about to exit."""
_POLL_SECONDS = 0.5
_MAX_READ_SECONDS = 2.0
"""Time for a look at the lock above which the file system counts as slow."""


class _Holder(BaseModel):
    """The content of lock.json: the process that holds the lock."""

    model_config = ConfigDict(extra="forbid", strict=True)

    job: str
    host: str
    process: int
    started: str | None
    machine: str | None
    since: str


class RunLock:
    """The lock of one of a run's directories.

    As a context manager, it releases the lock at the end if it was acquired.
    """

    def __init__(self, directory: StoragePath):
        self._directory = directory
        self._path = directory / "lock.json"
        self._beat = directory / "lock.beat"
        self._own_content = _describe_this_process()
        self._is_held = False
        self._is_lost = False
        self._holder: str | None = None
        """The content of lock.json that another job wrote when it took the lock; None if this job has not lost the
        lock, or if lock.json is gone."""
        self._is_unmounted = False
        """True if the last check found neither the lock nor run.json."""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._send_beats, name="run lock", daemon=True)

    def acquire(self, report_wait: Callable[[str], None] = lambda line: None) -> str | None:
        """Takes the lock. Returns a message for the user if the lock was taken over from a dead job.

        Calls `report_wait` with the reason before it waits. Raises `ConfigError` if another job holds the lock and is
        alive.
        """
        remark = None
        for _ in range(5):
            # Object storage may lose the response to a request, so this job may have the lock although `create` failed.
            if create(self._path, self._own_content) or _read(self._path) == self._own_content:
                self._is_held = True
                self._thread.start()
                return remark
            holder = _read(self._path)
            if holder is None:
                continue  # it was released just now
            description = _describe_holder(holder) if _parse_holder(holder) else self._describe_unreadable()
            outcome = self._watch(holder, description, report_wait)
            if outcome is None:
                remove_if(self._path, holder)
                remark = f"the lock of a dead job was taken over: {description}"
            elif outcome:
                raise ConfigError(
                    f"run.dir: {self._directory} is in use by another job, {description}; stop that job, or choose "
                    "another run.dir and checkpoint.dir"
                )
        raise ConfigError(f"run.dir: several jobs want to lock {self._directory}; start only one of them")

    def check(self) -> None:
        """Raises `UserError` if another job is known to have taken the lock, for example while this job was
        suspended."""
        if self._is_lost:
            details = f", {_describe_holder(self._holder)}" if self._holder else " and has released it"
            raise UserError(
                f"another job has taken the lock of {self._directory}{details}, so this job stops; start "
                "only one job per run directory"
            )

    def confirm(self) -> None:
        """Reads the lock again and raises `UserError` if this job has lost it.

        Call this before any exclusive operation.
        """
        if self._is_held:
            self._check_still_held()
        self.check()
        if self._is_unmounted:
            raise UserError(f"{self._directory} has no files of this run now; check that it is mounted")

    def _check_still_held(self) -> None:
        """Reads the lock and remembers whether this job has lost it. If lock.json is gone, another job took and
        released the lock."""
        content = _read(self._path)
        if content is None:
            time.sleep(_POLL_SECONDS)
            content = _read(self._path)
        # A directory without the run's files is not mounted at the moment, so nothing is known about the lock.
        self._is_unmounted = content is None and not is_there(self._directory / RUN_FILE)
        if content != self._own_content and not self._is_unmounted:
            self._holder, self._is_lost = content, True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._is_held:
            self._thread.join(_BEAT_SECONDS)  # so that the thread does not write lock.beat after its removal
        if self._is_held and not self._is_lost:
            with contextlib.suppress(OSError):  # if the lock remains, it counts as that of a dead job
                if remove_if(self._path, self._own_content):
                    self._beat.unlink(missing_ok=True)

    def release(self, *_: object) -> None:
        """Releases the lock just before the process exits, from any thread."""
        if self._is_held and not self._is_lost:
            self._end.set()
            with contextlib.suppress(OSError):
                remove_if(self._path, self._own_content)

    def _watch(self, holder: str, description: str, report_wait: Callable[[str], None]) -> bool | None:
        """Watches the holder. Returns True if it is alive, None if it is dead, and False if lock.json has changed."""
        is_alive_here = _is_alive_here(holder)
        if is_alive_here is False:
            return None
        report_wait(f"{self._directory} is locked by {description}; waiting to see whether that job is alive")
        timeout = _EXIT_TIMEOUT_SECONDS if is_alive_here else _SILENCE_TIMEOUT_SECONDS
        beat = _read(self._beat)
        silence = 0.0
        while silence < timeout:
            started = time.monotonic()
            time.sleep(_POLL_SECONDS)
            if _read(self._path) != holder:
                return False
            if is_alive_here and _is_alive_here(holder) is False:
                return None
            if not is_alive_here and _read(self._beat) != beat:
                return True
            elapsed = time.monotonic() - started
            # If the file system is slow here, it is also slow for the holder, so count silence only while it is fast.
            silence = silence + elapsed if elapsed < _POLL_SECONDS + _MAX_READ_SECONDS else 0.0
        return True if is_alive_here else None

    def _describe_unreadable(self) -> str:
        """Describes a job whose lock.json cannot be read, by the date and the owner of the file as far as they are
        known."""
        description = "a job whose lock.json cannot be read"
        if isinstance(self._path, Path):
            # The file may be gone, or its owner may have no name here.
            with contextlib.suppress(OSError, KeyError, OverflowError):
                status = self._path.stat()
                description += f", written {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(status.st_mtime))}"
                description += f" by {pwd.getpwuid(status.st_uid).pw_name}"
        return description

    def _send_beats(self) -> None:
        """Changes lock.beat regularly, until this job ends or loses the lock."""
        count = 0
        while not self._end.wait(_BEAT_SECONDS if count else 0):
            count += 1
            with contextlib.suppress(OSError, ValueError):  # files that are unreachable or partly written prove nothing
                self._check_still_held()
                if self._is_lost:
                    return
                if self._is_unmounted:
                    continue
                self._beat.write_bytes(f"{secrets.token_hex(4)} {count}".encode())


def _describe_this_process() -> str:
    return json_text(
        {
            "job": secrets.token_hex(8),
            "host": socket.gethostname(),
            "process": os.getpid(),
            "started": _start_time(os.getpid()),
            "machine": _machine_id(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
    )


def _is_alive_here(holder: str) -> bool | None:
    """Returns whether the holder's process exists; None if it runs on another machine, or this is not known."""
    parsed = _parse_holder(holder)
    if parsed is None or None in (parsed.machine, parsed.started) or parsed.machine != _machine_id():
        return None
    return _start_time(parsed.process) == parsed.started


def _start_time(process: int) -> str | None:
    """Returns when a process started, in ticks since boot; None if there is no such process.

    Process ids are reused, but the new process has another start time.
    """
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _machine_id() -> str | None:
    """Returns the boot and the process id namespace, which are the same for processes that can see each other."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # not Linux
        return None


def _describe_holder(holder: str) -> str:
    parsed = _parse_holder(holder)
    if parsed is None:
        return "a job whose lock.json cannot be read"
    return printable(f"process {parsed.process} on {parsed.host} since {parsed.since}")


def _parse_holder(holder: str) -> _Holder | None:
    """Parses the content of lock.json.

    Returns None if it is invalid: its writer died while writing it, or it is damaged.
    """
    try:
        return _Holder.model_validate_json(holder)
    except ValidationError:
        return None


def _read(path: StoragePath) -> str | None:
    """Returns the content of a file, which may be invalid UTF-8; None if there is no file."""
    try:
        return read(path).decode(errors="surrogateescape")
    except FileNotFoundError:
        return None
