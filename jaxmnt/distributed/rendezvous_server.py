"""Process 0's side of the rendezvous. Records which processes are connected and what is wrong, and sends the
outcome."""

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxmnt.distributed import authentication
from jaxmnt.distributed.identity import Identity, is_loopback
from jaxmnt.distributed.json_socket import JsonSocket
from jaxmnt.distributed.listener import Listener
from jaxmnt.distributed.termination import AbsentError, StoppedError, stopped_error
from jaxmnt.errors import (
    ConfigError,
    ExitCode,
    PeerError,
    PreflightError,
    UserError,
    error_of,
    listed,
    remark,
    shortened,
)

MAX_TROUBLE_CHARACTERS = 1000
POLL_SECONDS = 0.2
"""Maximum time until a request to stop is noticed."""
_FIRST_NOTE_DELAY_SECONDS, _NOTE_INTERVAL_SECONDS = 5.0, 15.0
"""Delay of process 0's first note about missing processes, and the interval between later notes."""

_CLOSING_TIMEOUT_SECONDS = 5.0
_NOTIFY_TIMEOUT_SECONDS = 5.0
"""Time for which process 0, after an error, waits for processes that have not connected yet, so that it can tell
them."""

Hello = dict[str, Any]
"""First message from a process. It has the fields process, processes, host, time, facts, trouble, code (the exit code
of the trouble), and loopback (whether the host resolves its own name to a loopback address)."""
StopReason = Callable[[], str | None]
"""Function that returns what has asked this process to stop, or None."""
CONFIG_FACTS, DATA_FACTS = ("config digest",), ("data digest",)
"""Facts that depend on the config, and facts that depend on the data. A difference in any other is the host's fault."""


@dataclass(frozen=True)
class Peer:
    """Another process of the run, and the open connection to it."""

    host: str
    connection: JsonSocket
    clock: tuple[float, float] = (0.0, 0.0)
    """Bounds, in seconds, of how far this process's clock is ahead of process 0's. Zero for process 0's peers."""


class RendezvousServer:
    """Records, in process 0, which processes are present. A process is present while its connection is open."""

    def __init__(self, identity: Identity, own_hello: Hello, listener: Listener):
        self._identity, self._listener = identity, listener
        self._hellos: dict[int, Hello] = {0: own_hello}
        self._connection_of: dict[int, JsonSocket] = {}
        self._process_of: dict[JsonSocket, int] = {}
        """The reverse of `_connection_of`."""
        self._disconnected: set[int] = set()
        """Processes that were present but have disconnected."""
        self._heard_after: dict[JsonSocket, float] = {}
        """Seconds from the time in a hello, according to its sender's clock, until its arrival, according to ours."""

    def collect(self, deadline: float, timeout: float, stop_reason: StopReason) -> UserError | None:
        """Runs until all processes are present, and returns None, or until there is an error for all of them, and
        returns it."""
        first_error: UserError | None = _trouble_of(self._hellos[0])
        deadline = _deadline_after_error(deadline) if first_error else deadline
        next_note = time.monotonic() + _FIRST_NOTE_DELAY_SECONDS
        while len(self._hellos) < self._identity.processes:
            if (reason := stop_reason()) is not None:
                return first_error or stopped_error(reason, self._identity)
            now = time.monotonic()
            if now >= deadline:
                return first_error or self._timeout_error(timeout)
            if now >= next_note and not first_error:
                next_note = now + _NOTE_INTERVAL_SECONDS
                remark(f"{self._describe_absent('not connected yet')} {self._describe_present()}")
            for connection, message in self._listener.wait(min(deadline - now, POLL_SECONDS)):
                if message is not None and connection not in self._listener.authenticated:
                    continue  # an earlier message has led to its removal
                error = self._handle(connection, message)
                if isinstance(error, StoppedError):
                    return first_error or error
                if error is not None and first_error is None:
                    first_error = error
                    deadline = _deadline_after_error(deadline)
        return first_error or self._loopback_error()

    def answer(self, outcome: UserError | None) -> None:
        """Sends the outcome to all processes.

        After an error, the others close their connections first, so that none of ours blocks the port for JAX.
        """
        body = {
            "error": None if outcome is None else str(outcome),
            "code": int(outcome.exit_code if outcome else 0),
            "absent": isinstance(outcome, AbsentError),
            "at_fault": next(iter(outcome.processes), None) if outcome else None,
            "host": self._hellos[0]["host"],
        }
        for connection in self._listener.authenticated:
            with contextlib.suppress(OSError):  # the next step of the start detects a peer that has just died
                times = {"time": time.time(), "heard_after": self._heard_after.get(connection, 0.0)}
                connection.send(body | times, _CLOSING_TIMEOUT_SECONDS)
        if outcome is not None:
            for connection in self._connection_of.values():
                with contextlib.suppress(OSError, ValueError):
                    connection.receive(_CLOSING_TIMEOUT_SECONDS)

    def peers(self) -> dict[int, Peer]:
        """Returns all other processes, by number and in that order."""
        return {
            process: Peer(str(self._hellos[process]["host"]), connection)
            for process, connection in sorted(self._connection_of.items())
        }

    def _handle(self, connection: JsonSocket, message: dict[str, Any] | None) -> UserError | None:
        """Handles a message from an authenticated client: its hello, a request to stop, or None if it has disconnected.

        Returns the error that ends the rendezvous, or None.
        """
        process = self._process_of.get(connection)
        if message is None:
            if process is not None:
                self._disconnected.add(process)
                del self._process_of[connection], self._connection_of[process], self._hellos[process]
            return None
        try:
            if process is None:
                return self._admit(_hello_of(message), connection)
            reason = shortened(str(message["stopping"]))
        except (ValueError, KeyError, TypeError):  # a message of another version
            self._handle(connection, None)
            self._listener.drop(connection)
            return None
        host, count = self._hellos[process]["host"], self._identity.processes
        return StoppedError(
            f"process {process} of {count} on {host} was asked to stop before the first step ({reason})"
        ).blaming(processes=[process])

    def _admit(self, hello: Hello, connection: JsonSocket) -> UserError | None:
        """Records a hello. Returns an error if the hello is invalid or differs from process 0's, or None otherwise."""
        own_hello = self._hellos[0]
        process, host = hello["process"], hello["host"]
        count = self._identity.processes
        if hello["processes"] != count:
            return ConfigError(
                f"cluster.processes: {hello['processes']} in process {process} on {host}, but {count} in process 0 on "
                f"{own_hello['host']}; set the same number in every process"
            )
        if process in self._connection_of and self._connection_of[process].is_closed():
            # The process was restarted before its old connection was noticed to be closed.
            old_connection = self._connection_of[process]
            self._handle(old_connection, None)
            self._listener.drop(old_connection)
        if process in self._hellos:
            return ConfigError(
                f"cluster.process_id: {process} was given twice, to processes on {self._hellos[process]['host']} "
                f"and {host}; give each process its own id"
            )
        if not 0 < process < count:
            return ConfigError(
                f"cluster.process_id: {process} on {host} is out of range for {count} processes; "
                f"set it from 1 to {count - 1}"
            )
        self._hellos[process] = hello
        self._connection_of[process] = connection
        self._process_of[connection] = process
        self._heard_after[connection] = time.time() - hello["time"]
        if error := self._difference_error(hello, [name for name in own_hello["facts"] if name not in DATA_FACTS]):
            return error
        if (trouble := _trouble_of(hello)) is not None:
            # The config is the same and works for process 0, so the host is at fault.
            return PreflightError(str(trouble)).blaming(hosts=[host])
        return self._difference_error(hello, DATA_FACTS)

    def _difference_error(self, hello: Hello, names: Sequence[str]) -> UserError | None:
        """Returns an error for the first of the named facts that differs from process 0's, or None if none differs."""
        own_hello, process, host = self._hellos[0], hello["process"], hello["host"]
        for name in names:
            ours, theirs = own_hello["facts"].get(name), hello["facts"].get(name)
            if ours != theirs:
                error_type = ConfigError if name in CONFIG_FACTS else PreflightError
                return error_type(
                    f"{name} differs: {shortened(str(theirs))} in process {process} on {host}, {ours} in process 0 "
                    f"on {own_hello['host']}; start every process with the same software, config and data"
                ).blaming(hosts=[host])
        return None

    def _loopback_error(self) -> UserError | None:
        """Returns an error if the run spans hosts and one of them resolves its own name to a loopback address.

        Libraries advertise the address of their host's own name to each other, so other hosts must reach it.
        """
        if not any(_from_another_host(connection.connection) for connection in self._connection_of.values()):
            return None
        for process, hello in sorted(self._hellos.items()):
            if hello["loopback"]:
                return PreflightError(
                    f"process {process}: {hello['host']} resolves its own name to a loopback address, which other "
                    f"hosts cannot reach; set its real address in /etc/hosts on {hello['host']}"
                ).blaming(hosts=[hello["host"]])
        return None

    def _timeout_error(self, timeout: float) -> UserError:
        """Returns the error for a rendezvous whose time is up. It is an `AbsentError` if the missing processes never
        appeared."""
        missing = self._absent_processes()
        text = f"{self._describe_absent('did not connect')} within {timeout:g} s {self._describe_present()}"
        if self._listener.with_another_key:
            return PreflightError(
                f"{text}, and {self._listener.refusal_summary}: share run.dir among all hosts, or set "
                f"{authentication.RUN_KEY} to the same value in every process (it takes precedence over "
                f"run.dir/{authentication.KEY_FILE})"
            ).blaming(processes=missing)
        text += f"; {self._listener.refusal_summary}" if self._listener.refusal_summary else ""
        if lost := self._disconnected.intersection(missing):
            return PeerError(
                f"{text}; process{'es' if len(lost) > 1 else ''} {', '.join(map(str, sorted(lost)[:20]))} had "
                "connected and then disconnected: see the log there for the reason"
            ).blaming(processes=sorted(lost))
        return AbsentError(
            f"{text}; check that they were started and can reach the coordinator"
        ).blaming(processes=missing)  # fmt: skip

    def _absent_processes(self) -> list[int]:
        return [process for process in range(self._identity.processes) if process not in self._hellos]

    def _describe_absent(self, verb: str) -> str:
        missing = self._absent_processes()
        plural = "es" if len(missing) > 1 else ""
        return f"process{plural} {listed(missing, 20)} of {self._identity.processes} {verb}"

    def _describe_present(self) -> str:
        hosts = ", ".join(f"{process} on {hello['host']}" for process, hello in sorted(self._hellos.items())[:8])
        return f"(connected: {hosts})"


def _hello_of(message: dict[str, Any]) -> Hello:
    """Parses a process's hello. Raises `ValueError`, `KeyError` or `TypeError` if it is invalid."""
    process, processes = message["process"], message["processes"]
    facts, trouble = message["facts"], message.get("trouble")
    if type(process) is not int or type(processes) is not int or not isinstance(facts, dict):
        raise TypeError("no hello")
    return {
        "process": process,
        "processes": processes,
        "host": shortened(str(message["host"])),
        "facts": facts,
        "trouble": None if trouble is None else str(trouble)[:MAX_TROUBLE_CHARACTERS],
        "time": float(message.get("time", time.time())),
        "loopback": bool(message.get("loopback")),
    }


def _deadline_after_error(deadline: float) -> float:
    """Returns the deadline for a start that has failed, which waits only to tell the processes that connect late."""
    return min(deadline, time.monotonic() + _NOTIFY_TIMEOUT_SECONDS)


def _trouble_of(hello: Hello) -> UserError | None:
    """Returns the trouble that a process reports in its hello, or None."""
    text, code = hello.get("trouble"), hello.get("code")
    if text is None:
        return None
    valid_code = code if code in list(ExitCode) else ExitCode.CONFIG
    return error_of(valid_code, f"process {hello['process']} on {hello['host']}: {text}")


def _from_another_host(connection: socket.socket) -> bool:
    """Returns True unless both ends of a connection have the same address, or loopback addresses."""
    try:
        ends = connection.getsockname(), connection.getpeername()
        here, there = (str(end[0]).removeprefix("::ffff:") for end in ends)
        return here != there and not (is_loopback(here) and is_loopback(there))
    except OSError:  # it has just been closed
        return False
