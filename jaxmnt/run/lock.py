"""A lock that allows one job at a time in a run directory, and that a dead job cannot keep.

`lock.json` is created exclusively and names its holder. A holder on this machine is alive if its process exists. A
holder elsewhere is alive if it keeps changing `lock.beat`, a counter; no clocks are compared. A lock that cannot be
read is treated as one from elsewhere, and reported with the file's owner and date.
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
_SILENCE_SECONDS = 20.0
"""A holder elsewhere whose heartbeat has not changed for so long is considered dead."""
_LEAVING_SECONDS = 10.0
"""Wait for a holder that is alive on this machine: it may be a replaced job that is about to exit."""
_LOOK_SECONDS = 0.5
_PROMPT_SECONDS = 2.0


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
    """The lock of a directory of a run. As a context manager, it releases the lock at the end if it was acquired."""

    def __init__(self, directory: StoragePath):
        self._directory = directory
        self._path = directory / "lock.json"
        self._beat = directory / "lock.beat"
        self._own_content = _describe_me()
        self._held = False
        self._lost = False
        self._holder: str | None = None
        """The content of the lock of the job that has taken it, once it is lost."""
        self._unmounted = False
        """True if the last check found neither the lock nor run.json."""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._send_beats, name="run lock", daemon=True)

    def acquire(self, tell: Callable[[str], None] = lambda line: None) -> str | None:
        """Takes the lock. Returns a message for the user if it was taken over from a dead job.

        Calls `tell` with the reason before a wait. Raises `ConfigError` if another job holds the lock and is alive.
        """
        remark = None
        for _ in range(5):
            # The lock may be ours although `create` failed: object storage may lose the response to a request.
            if create(self._path, self._own_content) or _read(self._path) == self._own_content:
                self._held = True
                self._thread.start()
                return remark
            holder = _read(self._path)
            if holder is None:
                continue  # it was released just now
            who = _describe_holder(holder) if _parse_holder(holder) else self._describe_unreadable()
            is_alive = self._watch(holder, who, tell)
            if is_alive is None:
                remove_if(self._path, holder)
                remark = f"the lock of a dead job was taken over: {who}"
            elif is_alive:
                raise ConfigError(
                    f"run.dir: {self._directory} is in use by another job, {who}; stop that job, or choose another "
                    "run.dir and checkpoint.dir"
                )
        raise ConfigError(f"run.dir: several jobs want {self._directory}; start one of them")

    def check(self) -> None:
        """Raises `UserError` if another job is known to have taken the lock, such as while this job was suspended."""
        if self._lost:
            who = f", {_describe_holder(self._holder)}" if self._holder else " and has released it"
            raise UserError(
                f"another job has taken the lock of {self._directory}{who}; this job stops: start only "
                "one job per run directory"
            )

    def confirm(self) -> None:
        """Reads the lock again and raises `UserError` if it is lost. Call this before any exclusive operation."""
        if self._held:
            self._read_again()
        self.check()
        if self._unmounted:
            raise UserError(f"{self._directory} has no files of this run now; check that it is mounted")

    def _read_again(self) -> None:
        """Reads the lock and remembers if this job has lost it. If it is gone, another job took and released it."""
        content = _read(self._path)
        if content is None:
            time.sleep(_LOOK_SECONDS)
            content = _read(self._path)
        # A directory without any files of the run is not mounted at the moment, which says nothing about the lock.
        self._unmounted = content is None and not is_there(self._directory / RUN_FILE)
        if content != self._own_content and not self._unmounted:
            self._holder, self._lost = content, True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._held:
            self._thread.join(_BEAT_SECONDS)  # so that it does not write lock.beat after its removal
        if self._held and not self._lost:
            with contextlib.suppress(OSError):  # a lock that remains counts as that of a dead job
                if remove_if(self._path, self._own_content):
                    self._beat.unlink(missing_ok=True)

    def release(self, *_: object) -> None:
        """Releases the lock just before the process exits, from any thread."""
        if self._held and not self._lost:
            self._end.set()
            with contextlib.suppress(OSError):
                remove_if(self._path, self._own_content)

    def _watch(self, holder: str, who: str, tell: Callable[[str], None]) -> bool | None:
        """Watches the holder. Returns True if it is alive, None if it is dead, False if the lock has changed."""
        alive = _is_alive_here(holder)
        if alive is False:
            return None
        tell(f"{self._directory} is locked by {who}; waiting to see whether that job is alive")
        patience = _LEAVING_SECONDS if alive else _SILENCE_SECONDS
        beat, silence = _read(self._beat), 0.0
        while silence < patience:
            before = time.monotonic()
            time.sleep(_LOOK_SECONDS)
            if _read(self._path) != holder:
                return False
            if alive and _is_alive_here(holder) is False:
                return None
            if not alive and _read(self._beat) != beat:
                return True
            took = time.monotonic() - before
            # If the file system is slow for us, it is slow for the holder: only count silence while it is fast.
            silence = silence + took if took < _LOOK_SECONDS + _PROMPT_SECONDS else 0.0
        return True if alive else None

    def _describe_unreadable(self) -> str:
        """Describes a lock that cannot be read by the date and the owner of its file, as far as they are known."""
        description = "a job whose lock.json cannot be read"
        if isinstance(self._path, Path):
            with contextlib.suppress(OSError, KeyError, OverflowError):  # it is gone, or its owner has no name here
                status = self._path.stat()
                description += f", written {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(status.st_mtime))}"
                description += f" by {pwd.getpwuid(status.st_uid).pw_name}"
        return description

    def _send_beats(self) -> None:
        """Changes lock.beat regularly until the end, or until the lock is lost."""
        number = 0
        while not self._end.wait(_BEAT_SECONDS if number else 0):
            number += 1
            with contextlib.suppress(OSError, ValueError):  # unreachable or partly written files prove nothing
                self._read_again()
                if self._lost:
                    return
                if self._unmounted:
                    continue
                self._beat.write_bytes(f"{secrets.token_hex(4)} {number}".encode())


def _describe_me() -> str:
    return json_text(
        {
            "job": secrets.token_hex(8),
            "host": socket.gethostname(),
            "process": os.getpid(),
            "started": _start_time(os.getpid()),
            "machine": _machine(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
    )


def _is_alive_here(holder: str) -> bool | None:
    """Returns True if the holder's process exists, and None if it runs where this process cannot see it."""
    parsed = _parse_holder(holder)
    if parsed is None or None in (parsed.machine, parsed.started) or parsed.machine != _machine():
        return None
    return _start_time(parsed.process) == parsed.started


def _start_time(process: int) -> str | None:
    """Returns when a process started, in ticks since boot; None if there is no such process.

    Process ids are reused, but not with the same start time.
    """
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _machine() -> str | None:
    """Returns what identifies processes that see each other: the boot and the namespace of process ids."""
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
    """Parses a lock; returns None if it is invalid, because its writer died while writing it or it was damaged."""
    try:
        return _Holder.model_validate_json(holder)
    except ValidationError:
        return None


def _read(path: StoragePath) -> str | None:
    """Returns the content of a file, which need not be valid text; None if there is no file."""
    try:
        return read(path).decode(errors="surrogateescape")
    except FileNotFoundError:
        return None
