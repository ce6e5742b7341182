"""A roll call over TCP before JAX starts, so that whoever is missing, doubled or misplaced gets a name.

`jax.distributed.initialize` answers every such mistake with the same uncatchable abort. Here process 0 listens
on the coordinator's own port, each other process says who it is in one line of JSON, and when all are there (or
time is up) process 0 tells everyone the outcome and stops listening, so that JAX can. The connections stay open: a
`Lifeline` goes on with them.
"""

import contextlib
import json
import resource
import selectors
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxmnt.cluster import addresses
from jaxmnt.cluster.environment import Identity, is_loopback
from jaxmnt.errors import ConfigError, ExitCode, PeerError, PreflightError, UserError, error_of

_LONGEST_LINE = 2**14
_LONGEST_TROUBLE = 1000
_RETRY_SECONDS = 0.1
_FIRST_NEWS_SECONDS, _NEWS_SECONDS = 5.0, 15.0
"""When, and how often, process 0 says for whom it waits."""

_TELLING_SECONDS = 5.0
"""How long process 0, when something is wrong, waits for the others to tell them."""

_OTHER_FILES = 512
"""Files and connections that process 0 has besides those to the others."""

Hello = dict[str, Any]
"""process, processes, host, time, facts, trouble and its exit code, and whether the host's own name is a loopback
address there."""
CONFIG_FACTS, DATA_FACTS = ("config digest",), ("data digest",)
"""Facts about the config: who differs in them was given another one. The others are about a host."""


@dataclass(frozen=True)
class Peer:
    """Another process that took part, and the open connection to it."""

    host: str
    connection: socket.socket
    clock: tuple[float, float] = (0.0, 0.0)
    """Between which bounds, in seconds, this process's clock is ahead of process 0's. Zero for process 0's peers."""


def hold(
    identity: Identity, facts: dict[str, str], timeout_seconds: float, trouble: UserError | None = None
) -> dict[int, Peer]:
    """Returns once every process has arrived with the same `facts` (versions, config digest).

    Process 0 gets all others by their numbers, the others get process 0.

    `trouble` is why this process cannot take part; everyone is told. Raises `PeerError` (exit 4) naming the processes
    that are missing when time is up, process 0's trouble if that is in any, `ConfigError` (exit 2) naming the process
    whose id, count or config disagree with process 0's, and `PreflightError` (exit 3) naming the host that is in
    trouble or whose software, data or network is not as it should be.
    """
    if identity.alone:
        if trouble is not None:
            raise trouble
        return {}
    deadline = time.monotonic() + timeout_seconds
    hello = {
        "process": identity.process_id,
        "processes": identity.processes,
        "host": socket.gethostname(),
        "loopback": addresses.own_name_misleads(),
        "facts": facts,
        "trouble": None if trouble is None else str(trouble)[:_LONGEST_TROUBLE],
        "code": 0 if trouble is None else int(trouble.exit_code),
    }
    if identity.process_id == 0:
        addresses.check_own(identity, timeout_seconds)
        return _listen(identity, hello, deadline, timeout_seconds)
    try:
        return {0: _report(identity, hello, deadline, timeout_seconds)}
    except PeerError:
        if trouble is not None:  # what is wrong here matters more than that nobody heard of it
            raise trouble from None
        raise


def _listen(identity: Identity, own: Hello, deadline: float, timeout: float) -> dict[int, Peer]:
    """Process 0: collects hellos until all are there, then answers everyone alike."""
    _allow_connections(identity.processes)
    with _open_port(identity) as server, selectors.DefaultSelector() as selector:
        desk = _Desk(identity, own, selector)
        outcome: UserError | None = None
        try:
            outcome = desk.collect(server, deadline, timeout)
            desk.answer(outcome)
        except BaseException:
            desk.close()
            raise
        if outcome is not None:
            desk.close()
            raise outcome
        return desk.peers()


def _open_port(identity: Identity) -> socket.socket:
    host, port = identity.address
    everywhere = identity.bind_host == ""
    dual = everywhere and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual or ":" in host else socket.AF_INET
    try:
        return socket.create_server((identity.bind_host, port), family=family, backlog=4096, dualstack_ipv6=dual)
    except OSError as error:
        raise PreflightError(
            f"cluster.coordinator: process 0 cannot listen on port {port} of {socket.gethostname()}: "
            f"{error.strerror}; choose a free port, or end what has it"
        ) from error


def _allow_connections(processes: int) -> None:
    """Lets this process have a connection to each other, of ours and of JAX's service.

    Raises `ConfigError` if it may not have so many.
    """
    needed = 2 * processes + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"process 0 on {socket.gethostname()} may open {hard} files, and {processes} processes need {needed}; "
            "raise the limit there (ulimit -Hn)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class _Desk:
    """Where process 0 notes who is here. A process is here for as long as its connection is."""

    def __init__(self, identity: Identity, own: Hello, selector: selectors.BaseSelector):
        self._identity = identity
        self._selector = selector
        self._hello: dict[int, Hello] = {0: own}
        self._connection_of: dict[int, socket.socket] = {}
        self._received: dict[socket.socket, bytes] = {}
        """What each open connection has sent that is not yet a hello."""
        self._heard_after: dict[socket.socket, float] = {}
        """Seconds from a hello's time, by its sender's clock, until it was heard, by ours."""

    def collect(self, server: socket.socket, deadline: float, timeout: float) -> UserError | None:
        """Runs until everyone is here (None) or something is wrong (the error for everyone)."""
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)
        wrong: UserError | None = _trouble_of(self._hello[0])
        deadline = _soon(deadline) if wrong else deadline
        news = time.monotonic() + _FIRST_NEWS_SECONDS
        while len(self._hello) < self._identity.processes:
            now = time.monotonic()
            if now >= deadline:
                return wrong or PeerError(
                    f"{self._missing('did not arrive')} within {timeout:g} s {self._present()}; check that they were "
                    "started and can reach the coordinator"
                ).blaming(processes=[one for one in range(self._identity.processes) if one not in self._hello])
            if now >= news and not wrong:
                news = now + _NEWS_SECONDS
                print(f"jaxmnt: {self._missing('still to come')} {self._present()}", file=sys.stderr, flush=True)
            for event, _ in self._selector.select(min(deadline, news) - now):
                connection = event.fileobj
                assert isinstance(connection, socket.socket)
                if connection is server:
                    self._accept(server)
                elif (line := self._read(connection)) is not None:
                    error = self._admit(line, connection)
                    if error is not None and wrong is None:
                        wrong, deadline = error, _soon(deadline)
        return wrong or self._unreachable()

    def answer(self, outcome: UserError | None) -> None:
        """Tells everyone. After a failure they close first, so that no connection of ours keeps the port from JAX."""
        body = {
            "error": None if outcome is None else str(outcome),
            "code": int(outcome.exit_code if outcome else 0),
            "host": self._hello[0]["host"],
        }
        for connection in self._received:
            with contextlib.suppress(OSError):  # a peer that has just died is found by the next step of the start
                connection.settimeout(5)
                times = {"time": time.time(), "heard_after": self._heard_after.get(connection, 0.0)}
                connection.sendall(json.dumps(body | times).encode() + b"\n")
        if outcome is not None:
            for connection in self._connection_of.values():
                with contextlib.suppress(OSError):
                    connection.recv(1)

    def peers(self) -> dict[int, Peer]:
        """All others, in order. Connections that are nobody's are closed."""
        for connection in set(self._received) - set(self._connection_of.values()):
            connection.close()
        return {
            process: Peer(str(self._hello[process]["host"]), connection)
            for process, connection in sorted(self._connection_of.items())
        }

    def close(self) -> None:
        for connection in self._received:
            connection.close()

    def _accept(self, server: socket.socket) -> None:
        connection, _ = server.accept()
        connection.setblocking(False)
        self._received[connection] = b""
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> bytes | None:
        """A whole line once it has arrived. Who hangs up is no longer here; who says too much is dropped."""
        try:
            chunk = connection.recv(_LONGEST_LINE)
        except OSError:
            chunk = b""
        received = self._received[connection] + chunk
        if not chunk or len(received) > _LONGEST_LINE:
            self._drop(connection)
            return None
        self._received[connection] = received
        return received if received.endswith(b"\n") else None

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._received[connection]
        for process, known in list(self._connection_of.items()):
            if known is connection:
                del self._connection_of[process], self._hello[process]
        connection.close()

    def _admit(self, line: bytes, connection: socket.socket) -> UserError | None:
        """Notes one hello, or says what is wrong with it. A line that is no hello is dropped with its sender."""
        try:
            hello = json.loads(line)
            process, processes, host = int(hello["process"]), int(hello["processes"]), str(hello["host"])
            hello["facts"], trouble = dict(hello["facts"]), _trouble_of(hello)
            sent, hello["loopback"] = float(hello.get("time", time.time())), bool(hello.get("loopback"))
        except (ValueError, KeyError, TypeError):
            self._drop(connection)
            return None
        own = self._hello[0]
        if processes != self._identity.processes:
            return ConfigError(
                f"cluster.processes: process {process} on {host} was told {processes} processes, "
                f"process 0 on {own['host']} {self._identity.processes}; give all the same number"
            )
        if process in self._connection_of and _hung_up(self._connection_of[process]):
            self._drop(self._connection_of[process])
        if process in self._hello:
            return ConfigError(
                f"cluster.process_id: {process} was given twice, to processes on {self._hello[process]['host']} "
                f"and {host}; give each process its own id"
            )
        if not 0 < process < processes:
            return ConfigError(f"cluster.process_id: {process} on {host} is out of range for {processes} processes")
        self._hello[process] = hello
        self._connection_of[process] = connection
        self._heard_after[connection] = time.time() - sent
        if error := self._difference(hello, [name for name in own["facts"] if name not in DATA_FACTS]):
            return error
        if trouble is not None:  # the config is the same, and process 0 can go by it: so it is the host
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
                    f"{name} of process {process} on {host} is {theirs}, of process 0 on {own['host']} "
                    f"{ours}; start every process with the same software, config and data"
                ).blaming(hosts=[host])
        return None

    def _unreachable(self) -> UserError | None:
        """Libraries tell each other the address of the own host's name: between hosts it must be a real one."""
        elsewhere = [connection for connection in self._connection_of.values() if _from_another_host(connection)]
        for process, hello in sorted(self._hello.items()):
            if elsewhere and hello["loopback"]:
                return PreflightError(
                    f"process {process}: {hello['host']} takes its own name for a loopback address, which the others "
                    f"cannot reach; give {hello['host']} its real address in /etc/hosts there"
                ).blaming(hosts=[hello["host"]])
        return None

    def _missing(self, verb: str) -> str:
        processes = self._identity.processes
        missing = [str(process) for process in range(processes) if process not in self._hello]
        shown = ", ".join(missing[:20]) + (f" and {len(missing) - 20} more" if len(missing) > 20 else "")
        return f"process{'es' if len(missing) > 1 else ''} {shown} of {processes} {verb}"

    def _present(self) -> str:
        hosts = ", ".join(f"{process} on {hello['host']}" for process, hello in sorted(self._hello.items())[:8])
        return f"(here: {hosts})"


def _soon(deadline: float) -> float:
    """Nothing can come of this start any more: wait only to tell those who are on their way."""
    return min(deadline, time.monotonic() + _TELLING_SECONDS)


def _trouble_of(hello: Hello) -> UserError | None:
    text = hello.get("trouble")
    if text is None:
        return None
    return error_of(int(hello.get("code", ExitCode.CONFIG)), f"process {hello['process']} on {hello['host']}: {text}")


def _from_another_host(connection: socket.socket) -> bool:
    """A connection from this host has the same address at both ends, or loopback addresses."""
    try:
        ends = connection.getsockname(), connection.getpeername()
        here, there = (str(end[0]).removeprefix("::ffff:") for end in ends)
        return here != there and not (is_loopback(here) and is_loopback(there))
    except OSError:  # it has just been closed
        return False


def _hung_up(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _report(identity: Identity, hello: Hello, deadline: float, timeout: float) -> Peer:
    """Any other process: says hello, retrying until process 0 listens, and waits for the outcome."""
    reason = "no connection was tried"
    while time.monotonic() < deadline:
        try:
            # Process 0 may have started later than this process: its own time limit decides.
            return _ask(identity.address, hello, deadline - time.monotonic(), timeout + 10)
        except OSError as error:
            reason = error.strerror or str(error)
        except (ValueError, KeyError, TypeError):
            reason = "something else answers on that port"
        time.sleep(_RETRY_SECONDS)
    raise addresses.unanswered(identity, reason, timeout)


def _ask(address: tuple[str, int], hello: Hello, connect_seconds: float, answer_seconds: float) -> Peer:
    """One try: says hello and hears the outcome. Raises `OSError`, or `ValueError` and its like for a stranger."""
    connection = socket.create_connection(address, timeout=max(0.1, connect_seconds))
    try:
        connection.sendall(json.dumps(hello | {"time": time.time()}).encode() + b"\n")
        connection.settimeout(answer_seconds)
        outcome = json.loads(_line(connection))
        heard = time.time()
        error, code = outcome["error"], int(outcome["code"])
        clock = (-float(outcome["heard_after"]), heard - float(outcome["time"]))
        peer = Peer(str(outcome["host"]), connection, clock)
    except BaseException:
        connection.close()
        raise
    if error is not None:
        connection.close()
        raise error_of(code, error)
    return peer


def _line(connection: socket.socket) -> bytes:
    """One line and nothing of what may follow it."""
    line = b""
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte:
            raise ConnectionResetError("it closed the connection without an answer")
        line += byte
        if len(line) > _LONGEST_LINE * 4:
            raise ValueError("a line without an end")
    return line
