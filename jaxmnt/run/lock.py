"""One job at a time in a run directory: a lock that a dead job cannot keep.

`lock.json` is made only if there is none, and says who holds it. A holder on this machine is alive if its process is.
One elsewhere is alive if it gives signs of life, a number in `lock.beat` that goes up: nobody's clock is believed.
A lock that cannot be read is treated like one from elsewhere, by its signs, and told with its owner and its date.
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
"""Without a sign of life for so long, a holder elsewhere counts as dead."""
_LEAVING_SECONDS = 10.0
"""A job that has just been replaced may still be on its way out."""
_LOOK_SECONDS = 0.5
_PROMPT_SECONDS = 2.0


class _Holder(BaseModel):
    """The content of a lock: the process that holds it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    job: str
    host: str
    process: int
    started: str | None
    machine: str | None
    since: str


class RunLock:
    """The lock of the place where a run's checkpoints are.

    Used as a context manager, it is released at the end if it was acquired.
    """

    def __init__(self, directory: StoragePath):
        self._directory = directory
        self._path = directory / "lock.json"
        self._beat = directory / "lock.beat"
        self._me = _describe_me()
        self._held = False
        self._lost = False
        self._holder: str | None = None
        """Who has it instead, once it is lost."""
        self._away = False
        """Whether the last look found nothing at all."""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._give_signs, name="run lock", daemon=True)

    def acquire(self, tell: Callable[[str], None] = lambda line: None) -> str | None:
        """Takes the lock; a line for people if that took it from a dead job. `tell` hears why this takes a while.

        Raises `ConfigError` if another job holds it and is alive.
        """
        remark = None
        for _ in range(5):
            if create(self._path, self._me) or _read(self._path) == self._me:  # the answer to a first try was lost
                self._held = True
                self._thread.start()
                return remark
            holder = _read(self._path)
            if holder is None:
                continue  # it was released just now
            who = _who(holder) if _parsed(holder) else self._owner()
            sign = self._watch(holder, who, tell)
            if sign is None:
                remove_if(self._path, holder)
                remark = f"the lock of a dead job was taken over: {who}"
            elif sign:
                raise ConfigError(
                    f"run.dir: {self._directory} is in use by another job, {who}; stop that job, or choose another "
                    "run.dir and checkpoint.dir"
                )
        raise ConfigError(f"run.dir: several jobs want {self._directory}; start one of them")

    def check(self) -> None:
        """Raises `UserError` if another job is known to have taken the lock, as it may when this one was suspended."""
        if self._lost:
            who = f", {_who(self._holder)}" if self._holder else " and has released it"
            raise UserError(
                f"another job has taken the lock of {self._directory}{who}; this job stops: start only "
                "one job per run directory"
            )

    def confirm(self) -> None:
        """Looks whether the lock is still this job's, then checks: before something that no other job may do, too."""
        if self._held:
            self._look()
        self.check()
        if self._away:
            raise UserError(f"{self._directory} has no files of this run now; check that it is mounted")

    def _look(self) -> None:
        """Notes if the lock is not this job's any more. One that is gone was another job's last."""
        found = _read(self._path)
        if found is None:
            time.sleep(_LOOK_SECONDS)
            found = _read(self._path)
        # A place that has nothing of the run is not mounted for the moment: that says nothing about the lock.
        self._away = found is None and not is_there(self._directory / RUN_FILE)
        if found != self._me and not self._away:
            self._holder, self._lost = found, True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._held:
            self._thread.join(_BEAT_SECONDS)  # or it might give a sign after the last
        if self._held and not self._lost:
            with contextlib.suppress(OSError):  # what is left behind is a dead job's lock
                if remove_if(self._path, self._me):
                    self._beat.unlink(missing_ok=True)

    def let_go(self, *_: object) -> None:
        """Releases the lock in the last moment of a process, from any thread."""
        if self._held and not self._lost:
            self._end.set()
            with contextlib.suppress(OSError):
                remove_if(self._path, self._me)

    def _watch(self, holder: str, who: str, tell: Callable[[str], None]) -> bool | None:
        """True: the holder is alive. None: it is dead. False: the lock has changed, look again."""
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
            # Where looking takes long, giving signs does, too: such silence says nothing.
            silence = silence + took if took < _LOOK_SECONDS + _PROMPT_SECONDS else 0.0
        return True if alive else None

    def _owner(self) -> str:
        """Of a lock that cannot be read: whose file it is and from when, as far as files tell."""
        told = "a job whose lock.json cannot be read"
        if isinstance(self._path, Path):
            with contextlib.suppress(OSError, KeyError, OverflowError):  # it is gone, or its owner has no name here
                status = self._path.stat()
                told += f", written {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(status.st_mtime))}"
                told += f" by {pwd.getpwuid(status.st_uid).pw_name}"
        return told

    def _give_signs(self) -> None:
        number = 0
        while not self._end.wait(_BEAT_SECONDS if number else 0):
            number += 1
            with contextlib.suppress(OSError, ValueError):  # files that are away or torn are no sign of anything
                self._look()
                if self._lost:
                    return
                if self._away:
                    continue
                self._beat.write_bytes(f"{secrets.token_hex(4)} {number}".encode())


def _describe_me() -> str:
    return json_text(
        {
            "job": secrets.token_hex(8),
            "host": socket.gethostname(),
            "process": os.getpid(),
            "started": _start_of(os.getpid()),
            "machine": _machine(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
    )


def _is_alive_here(holder: str) -> bool | None:
    """Whether the holder's process exists; None if it is not one that can be seen from here."""
    known = _parsed(holder)
    if known is None or None in (known.machine, known.started) or known.machine != _machine():
        return None
    return _start_of(known.process) == known.started


def _start_of(process: int) -> str | None:
    """When a process started, in ticks since boot: ids are used again, this is not. None if there is none."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _machine() -> str | None:
    """What processes have in common that see each other: the boot and the namespace of process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # not Linux
        return None


def _who(holder: str) -> str:
    known = _parsed(holder)
    if known is None:
        return "a job whose lock.json cannot be read"
    return printable(f"process {known.process} on {known.host} since {known.since}")


def _parsed(holder: str) -> _Holder | None:
    """What a lock says; None if that is not what locks say: its writer died in the middle of it, or it was damaged."""
    try:
        return _Holder.model_validate_json(holder)
    except ValidationError:
        return None


def _read(path: StoragePath) -> str | None:
    """What is in a file, be it no text; None if there is none."""
    try:
        return read(path).decode(errors="surrogateescape")
    except FileNotFoundError:
        return None
