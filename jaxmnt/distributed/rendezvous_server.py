"""What process 0 notes in the rendezvous: who is here, what is wrong with whom, and what everyone is told."""

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
from jaxmnt.distributed.termination import AbsentError, StoppedError, stopped
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

LONGEST_TROUBLE = 1000
LOOK_SECONDS = 0.2
"""How long it takes at most to notice the request to stop."""
_FIRST_NEWS_SECONDS, _NEWS_SECONDS = 5.0, 15.0
"""When, and how often, process 0 says for whom it waits."""

_CLOSING_SECONDS = 5.0
_TELLING_SECONDS = 5.0
"""How long process 0, when something is wrong, waits for the others to tell them."""

Hello = dict[str, Any]
"""process, processes, host, time, facts, trouble and its exit code, whether the host's own name is a loopback
address there."""
StopReason = Callable[[], str | None]
"""What has asked this process to stop, if anything has."""
CONFIG_FACTS, DATA_FACTS = ("config digest",), ("data digest",)
"""Facts about the config: who differs in them was given another one. The others are about a host."""


@dataclass(frozen=True)
class Peer:
    """Another process that took part, and the open connection to it."""

    host: str
    connection: JsonSocket
    clock: tuple[float, float] = (0.0, 0.0)
    """Between which bounds, in seconds, this process's clock is ahead of process 0's. Zero for process 0's peers."""


class RendezvousServer:
    """Where process 0 notes who is here. A process is here for as long as its connection is."""

    def __init__(self, identity: Identity, own: Hello, listener: Listener):
        self._identity, self._listener = identity, listener
        self._hello: dict[int, Hello] = {0: own}
        self._connection_of: dict[int, JsonSocket] = {}
        self._went: set[int] = set()
        """Processes that were here once."""
        self._heard_after: dict[JsonSocket, float] = {}
        """Seconds from a hello's time, by its sender's clock, until it was heard, by ours."""

    def collect(self, deadline: float, timeout: float, stop_reason: StopReason) -> UserError | None:
        """Runs until everyone is here (None) or something is wrong (the error for everyone)."""
        wrong: UserError | None = _trouble_of(self._hello[0])
        deadline = _soon(deadline) if wrong else deadline
        news = time.monotonic() + _FIRST_NEWS_SECONDS
        while len(self._hello) < self._identity.processes:
            if (reason := stop_reason()) is not None:
                return wrong or stopped(reason, self._identity)
            now = time.monotonic()
            if now >= deadline:
                return wrong or self._incomplete(timeout)
            if now >= news and not wrong:
                news = now + _NEWS_SECONDS
                remark(f"{self._missing('not connected yet')} {self._present()}")
            for connection, message in self._listener.wait(min(deadline - now, LOOK_SECONDS)):
                if message is not None and connection not in self._listener.known:
                    continue  # it was dropped for what it said before
                error = self._hear(connection, message)
                if isinstance(error, StoppedError):
                    return wrong or error
                if error is not None and wrong is None:
                    wrong, deadline = error, _soon(deadline)
        return wrong or self._unreachable()

    def answer(self, outcome: UserError | None) -> None:
        """Tells everyone. After a failure they close first, so that no connection of ours keeps the port from JAX."""
        body = {
            "error": None if outcome is None else str(outcome),
            "code": int(outcome.exit_code if outcome else 0),
            "absent": isinstance(outcome, AbsentError),
            "at_fault": next(iter(outcome.processes), None) if outcome else None,
            "host": self._hello[0]["host"],
        }
        for connection in self._listener.known:
            with contextlib.suppress(OSError):  # a peer that has just died is found by the next step of the start
                times = {"time": time.time(), "heard_after": self._heard_after.get(connection, 0.0)}
                connection.send(body | times, _CLOSING_SECONDS)
        if outcome is not None:
            for connection in self._connection_of.values():
                with contextlib.suppress(OSError, ValueError):
                    connection.receive(_CLOSING_SECONDS)

    def peers(self) -> dict[int, Peer]:
        """All others, in order."""
        return {
            process: Peer(str(self._hello[process]["host"]), connection)
            for process, connection in sorted(self._connection_of.items())
        }

    def _hear(self, connection: JsonSocket, message: dict[str, Any] | None) -> UserError | None:
        """Notes what one with the key has said: who it is, or that it was asked to stop. Or that it has hung up."""
        process = next((process for process, known in self._connection_of.items() if known is connection), None)
        if message is None:
            if process is not None:
                self._went.add(process)
                del self._connection_of[process], self._hello[process]
            return None
        try:
            if process is None:
                return self._admit(_hello_of(message), connection)
            reason = shortened(str(message["stopping"]))
        except (ValueError, KeyError, TypeError):  # of another version: what it says is no word of this one
            self._hear(connection, None)
            self._listener.drop(connection)
            return None
        host, count = self._hello[process]["host"], self._identity.processes
        return StoppedError(
            f"process {process} of {count} on {host} was asked to stop before the first step ({reason})"
        ).blaming(processes=[process])

    def _admit(self, hello: Hello, connection: JsonSocket) -> UserError | None:
        """Notes one hello, or says what is wrong with it."""
        own, process, host, count = self._hello[0], hello["process"], hello["host"], self._identity.processes
        if hello["processes"] != count:
            return ConfigError(
                f"cluster.processes: {hello['processes']} in process {process} on {host}, but {count} in process 0 on "
                f"{own['host']}; set the same number in every process"
            )
        if process in self._connection_of and self._connection_of[process].is_over():
            gone = self._connection_of[process]
            self._hear(gone, None)
            self._listener.drop(gone)
        if process in self._hello:
            return ConfigError(
                f"cluster.process_id: {process} was given twice, to processes on {self._hello[process]['host']} "
                f"and {host}; give each process its own id"
            )
        if not 0 < process < count:
            return ConfigError(
                f"cluster.process_id: {process} on {host} is out of range for {count} processes; "
                f"set it from 1 to {count - 1}"
            )
        self._hello[process] = hello
        self._connection_of[process] = connection
        self._heard_after[connection] = time.time() - hello["time"]
        if error := self._difference(hello, [name for name in own["facts"] if name not in DATA_FACTS]):
            return error
        if (trouble := _trouble_of(hello)) is not None:
            # The config is the same, and process 0 can go by it: so it is the host.
            return PreflightError(str(trouble)).blaming(hosts=[host])
        return self._difference(hello, DATA_FACTS)

    def _difference(self, hello: Hello, names: Sequence[str]) -> UserError | None:
        """What of these facts is not as process 0's, in words."""
        own, process, host = self._hello[0], hello["process"], hello["host"]
        for name in names:
            ours, theirs = own["facts"].get(name), hello["facts"].get(name)
            if ours != theirs:
                kind = ConfigError if name in CONFIG_FACTS else PreflightError
                return kind(
                    f"{name} differs: {shortened(str(theirs))} in process {process} on {host}, {ours} in process 0 "
                    f"on {own['host']}; start every process with the same software, config and data"
                ).blaming(hosts=[host])
        return None

    def _unreachable(self) -> UserError | None:
        """Libraries tell each other the address of the own host's name: between hosts it must be a real one."""
        if not any(_from_another_host(connection.connection) for connection in self._connection_of.values()):
            return None
        for process, hello in sorted(self._hello.items()):
            if hello["loopback"]:
                return PreflightError(
                    f"process {process}: {hello['host']} resolves its own name to a loopback address, which other "
                    f"hosts cannot reach; set its real address in /etc/hosts on {hello['host']}"
                ).blaming(hosts=[hello["host"]])
        return None

    def _incomplete(self, timeout: float) -> UserError:
        """Time is up. Those who have never appeared may come to another start."""
        missing = self._absent()
        text = f"{self._missing('did not connect')} within {timeout:g} s {self._present()}"
        if self._listener.with_another_key:
            return PreflightError(
                f"{text}, and {self._listener.account}: share run.dir among all hosts, or set "
                f"{authentication.RUN_KEY} to the same value in every process (it takes precedence over "
                f"run.dir/{authentication.KEY_FILE})"
            ).blaming(processes=missing)
        text += f"; {self._listener.account}" if self._listener.account else ""
        if gone := self._went.intersection(missing):
            return PeerError(
                f"{text}; process{'es' if len(gone) > 1 else ''} {', '.join(map(str, sorted(gone)[:20]))} had "
                "connected and then disconnected: see the log there for the reason"
            ).blaming(processes=sorted(gone))
        return AbsentError(
            f"{text}; check that they were started and can reach the coordinator"
        ).blaming(processes=missing)  # fmt: skip

    def _absent(self) -> list[int]:
        return [process for process in range(self._identity.processes) if process not in self._hello]

    def _missing(self, verb: str) -> str:
        missing = self._absent()
        plural = "es" if len(missing) > 1 else ""
        return f"process{plural} {listed(missing, 20)} of {self._identity.processes} {verb}"

    def _present(self) -> str:
        hosts = ", ".join(f"{process} on {hello['host']}" for process, hello in sorted(self._hello.items())[:8])
        return f"(connected: {hosts})"


def _hello_of(said: dict[str, Any]) -> Hello:
    """What a process says of itself. Raises `ValueError`, `KeyError` or `TypeError` if that makes no sense."""
    process, processes, facts, trouble = said["process"], said["processes"], said["facts"], said.get("trouble")
    if type(process) is not int or type(processes) is not int or not isinstance(facts, dict):
        raise TypeError("no hello")
    return {
        "process": process,
        "processes": processes,
        "host": shortened(str(said["host"])),
        "facts": facts,
        "trouble": None if trouble is None else str(trouble)[:LONGEST_TROUBLE],
        "time": float(said.get("time", time.time())),
        "loopback": bool(said.get("loopback")),
    }


def _soon(deadline: float) -> float:
    """Nothing can come of this start any more: wait only to tell those who are on their way."""
    return min(deadline, time.monotonic() + _TELLING_SECONDS)


def _trouble_of(hello: Hello) -> UserError | None:
    text, code = hello.get("trouble"), hello.get("code")
    if text is None:
        return None
    known = code if code in list(ExitCode) else ExitCode.CONFIG
    return error_of(known, f"process {hello['process']} on {hello['host']}: {text}")


def _from_another_host(connection: socket.socket) -> bool:
    """A connection from this host has the same address at both ends, or loopback addresses."""
    try:
        ends = connection.getsockname(), connection.getpeername()
        here, there = (str(end[0]).removeprefix("::ffff:") for end in ends)
        return here != there and not (is_loopback(here) and is_loopback(there))
    except OSError:  # it has just been closed
        return False
