"""The rendezvous: processes meet over TCP before JAX starts, so that one that is missing or misplaced gets a name.

`jax.distributed.initialize` answers every such mistake with the same uncatchable abort. Here process 0 listens
on the coordinator's own port, each other process shows that it has the run's key and says who it is in one line of
JSON, and when all are there (or time is up) process 0 tells everyone the outcome and stops listening, so that JAX can.
The connections stay open: a `Heartbeat` goes on with them.
"""

import contextlib
import resource
import socket
import time
from typing import Any

from jaxmnt.distributed import addresses, authentication
from jaxmnt.distributed.identity import Identity
from jaxmnt.distributed.json_socket import JsonSocket
from jaxmnt.distributed.listener import Listener
from jaxmnt.distributed.rendezvous_server import (
    LONGEST_TROUBLE,
    LOOK_SECONDS,
    Hello,
    Peer,
    RendezvousServer,
    StopReason,
)
from jaxmnt.distributed.termination import AbsentError, StoppedError, stopped
from jaxmnt.errors import ConfigError, ExitCode, PeerError, PreflightError, UserError, error_of, printable_lines, remark

_RETRY_SECONDS, _RETRY_REFUSED_SECONDS = 0.1, 1.0
_PROOF_SECONDS, _LEAST_SECONDS = 10.0, 1.0
"""How long process 0 may take to show the key, also when time is almost up."""
_REFUSED_SECONDS = 20.0
"""How long a process that has another key than process 0 goes on trying: another job may be leaving that port."""
_OTHER_FILES = 512
"""Files and connections that process 0 has besides those to the others."""


def join(
    identity: Identity,
    facts: dict[str, str],
    timeout_seconds: float,
    key: bytes,
    trouble: UserError | None = None,
    stop_reason: StopReason = lambda: None,
) -> dict[int, Peer]:
    """Returns once every process has arrived with the same `facts` (versions, config digest).

    Process 0 gets all others by their numbers, the others get process 0. Only who has the run's `key` takes part.

    `trouble` is why this process cannot take part; everyone is told. Raises `AbsentError` naming the processes that
    have not appeared when time is up, `PeerError` (exit 4) if one had and has gone away, `StoppedError` in everyone who
    is here when one is asked to stop (`stop_reason`), process 0's trouble if it is in any, `ConfigError` (exit 2)
    naming the process whose id, count or config disagree with process 0's, and `PreflightError` (exit 3) naming the
    host that is in trouble or whose software, data, key or network is not as it should be.
    """
    deadline = time.monotonic() + timeout_seconds
    hello = {
        "process": identity.process_id,
        "processes": identity.processes,
        "host": socket.gethostname(),
        "loopback": addresses.own_name_misleads(),
        "facts": facts,
        "trouble": None if trouble is None else str(trouble)[:LONGEST_TROUBLE],
        "code": 0 if trouble is None else int(trouble.exit_code),
    }
    if identity.process_id == 0:
        addresses.check_own(identity, timeout_seconds)
        return _listen(identity, hello, deadline, timeout_seconds, key, stop_reason)
    caller = _Client(identity, hello, key, stop_reason)
    try:
        return {0: caller.report(deadline, timeout_seconds)}
    except (PeerError, PreflightError):
        if trouble is not None and not caller.heard:  # what is wrong here matters more than that nobody heard of it
            raise trouble from None
        raise


def _listen(
    identity: Identity, own: Hello, deadline: float, timeout: float, key: bytes, stop_reason: StopReason
) -> dict[int, Peer]:
    """Process 0: collects hellos until all are there, then answers everyone alike."""
    _allow_connections(identity.processes)
    listener = Listener(_open_port(identity), key, identity.processes)
    server = RendezvousServer(identity, own, listener)
    peers: dict[int, Peer] = {}
    try:
        outcome = server.collect(deadline, timeout, stop_reason)
        server.answer(outcome)
        if outcome is not None:
            raise outcome
        peers = server.peers()
    finally:
        listener.close(keeping={peer.connection for peer in peers.values()})
    if listener.account:
        remark(f"note: all processes are connected; others were refused: {listener.account}")
    return peers


def _open_port(identity: Identity) -> socket.socket:
    host, note = addresses.listening_address(identity)
    if note:
        remark(f"note: {note}")
    port = identity.address[1]
    dual = host == "" and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual or ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=4096, dualstack_ipv6=dual)
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


class _Client:
    """Any process but 0: shows its key and says hello, retrying until process 0 listens, and waits for the outcome."""

    def __init__(self, identity: Identity, hello: Hello, key: bytes, stop_reason: StopReason):
        self._identity, self._hello, self._key, self._stop_reason = identity, hello, key, stop_reason
        self._met = False
        """Whether process 0 was there once."""
        self._refused_since: float | None = None
        self.heard = False
        """Whether process 0 has told that something is wrong."""

    def report(self, deadline: float, timeout: float) -> Peer:
        reason, stranger = "no connection was tried", False
        while time.monotonic() < deadline:
            if (asked := self._stop_reason()) is not None:
                raise stopped(asked, self._identity)
            pause, stranger = _RETRY_SECONDS, False
            try:
                # Process 0 may have started later than this process: its own time limit decides.
                return self._ask(deadline - time.monotonic(), timeout + 10)
            except authentication.RefusedError:
                pause = _RETRY_REFUSED_SECONDS
                self._note_refusal()
            except OSError as error:
                self._refused_since, reason = None, error.strerror or str(error)
            except authentication.StrangerError as error:
                stranger, reason = True, str(error)
            except (ValueError, KeyError, TypeError):
                reason = "it gave no answer of this version"
            time.sleep(pause)
        if self._refused_since is not None:
            raise addresses.refused(self._identity)
        raise addresses.unanswered(self._identity, reason, timeout, met=self._met or stranger)

    def _note_refusal(self) -> None:
        now = time.monotonic()
        if self._refused_since is None:
            self._refused_since = now
            remark(f"note: process 0 at {self._identity.coordinator} has another key than this process: trying again")
        if now - self._refused_since > _REFUSED_SECONDS:
            raise addresses.refused(self._identity)

    def _ask(self, connect_seconds: float, answer_seconds: float) -> Peer:
        """One try. Raises `OSError`, or `ValueError` and its like for a stranger."""
        raw = socket.create_connection(self._identity.address, timeout=max(0.1, connect_seconds))
        connection = JsonSocket(raw)
        try:
            authentication.prove(raw, self._key, min(_PROOF_SECONDS, max(_LEAST_SECONDS, connect_seconds)))
            self._met, self._refused_since = True, None
            connection.send(self._hello | {"time": time.time()}, _PROOF_SECONDS)
            outcome = self._outcome(connection, time.monotonic() + answer_seconds)
            heard = time.time()
            error, code, at_fault = outcome["error"], int(outcome["code"]), outcome.get("at_fault")
            clock = (-float(outcome["heard_after"]), heard - float(outcome["time"]))
            peer = Peer(str(outcome["host"]), connection, clock)
        except BaseException:
            connection.close()
            raise
        if error is not None:
            connection.close()
            self.heard = True
            told = _told(code, str(error), absent=bool(outcome.get("absent")))
            raise told.blaming(processes=[] if at_fault is None else [int(at_fault)])
        return peer

    def _outcome(self, connection: JsonSocket, deadline: float) -> dict[str, Any]:
        """What process 0 answers. It hears of it if this process is asked to stop meanwhile."""
        while time.monotonic() < deadline:
            if (reason := self._stop_reason()) is not None:
                error = stopped(reason, self._identity)
                # In the heartbeat's words as well: process 0 may have ended the rendezvous just now.
                with contextlib.suppress(OSError):
                    connection.send({"stopping": reason, "kind": "stopped", "why": str(error)})
                raise error
            if (outcome := connection.receive_one(LOOK_SECONDS)) is not None:
                return outcome
        raise TimeoutError("no outcome in time")


def _told(code: int, text: str, *, absent: bool) -> UserError:
    """The error that process 0 has told of."""
    if absent:
        return AbsentError(printable_lines(text))
    return StoppedError(printable_lines(text)) if code == ExitCode.STOPPED else error_of(code, text)
