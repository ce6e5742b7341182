"""Connects all processes over TCP before JAX starts, and names those that are missing or misconfigured.

`jax.distributed.initialize` answers every such mistake with the same uncatchable abort. Here process 0 listens on the
coordinator's own port; each other process proves that it has the run's key, and sends its hello in one line of JSON.
When all are connected, or the time is up, process 0 sends the outcome to all and stops listening, so that JAX can use
the port. The connections stay open for a `Heartbeat`.
"""

import contextlib
import random
import resource
import socket
import time
from collections.abc import Iterator
from typing import Any

from jaxmnt.distributed import addresses, authentication
from jaxmnt.distributed.identity import Identity
from jaxmnt.distributed.json_socket import JsonSocket
from jaxmnt.distributed.listener import Listener
from jaxmnt.distributed.rendezvous_server import (
    MAX_TROUBLE_CHARACTERS,
    POLL_SECONDS,
    Hello,
    Peer,
    RendezvousServer,
    StopReason,
)
from jaxmnt.distributed.termination import AbsentError, StoppedError, stopped_error
from jaxmnt.errors import ConfigError, ExitCode, PeerError, PreflightError, UserError, error_of, printable_lines, remark

_RETRY_SECONDS, _RETRY_REFUSED_SECONDS = 0.1, 1.0
_MAX_RETRY_SECONDS = 2.0
_ATTEMPTS_PER_SECOND = 2000
"""Rate of connection attempts that all processes of a run together approach, while process 0 does not listen yet. Small
runs stay at `_RETRY_SECONDS`."""
_RETRY_GROWTH = 1.3
_ADDRESS_SECONDS = 10.0
"""Time for which a client uses the addresses of a name before it resolves the name again."""
_MAX_PROOF_SECONDS, _MIN_PROOF_SECONDS = 10.0, 1.0
"""Maximum and minimum time that process 0 has to prove that it has the key. The minimum applies when the time for the
rendezvous is almost up."""
_REFUSAL_TIMEOUT_SECONDS = 20.0
"""Time for which a process retries if process 0 has another key, because another job may be about to leave that
port."""
_OTHER_FILES = 512
"""Number of files that process 0 may open in addition to its connections to the other processes."""


def join(
    identity: Identity,
    facts: dict[str, str],
    timeout_seconds: float,
    key: bytes,
    trouble: UserError | None = None,
    stop_reason: StopReason = lambda: None,
) -> dict[int, Peer]:
    """Waits until every process has connected with the same `facts` (versions, config digest).

    In process 0, returns all other processes by their number. In the others, returns process 0. Only processes with the
    run's `key` can join. `trouble` is the reason why this process cannot take part; it is sent to all.

    Raises one of these errors:

    - `AbsentError`, naming the processes that have not connected in time
    - `PeerError` (exit 4) if a process had connected and then disconnected
    - `StoppedError`, in all connected processes, if one of them was asked to stop (see `stop_reason`)
    - process 0's trouble, if it has any
    - `ConfigError` (exit 2), naming the process whose id, number of processes or config differs from process 0's
    - `PreflightError` (exit 3), naming the host that has trouble, or whose software, data, key or network is wrong
    """
    deadline = time.monotonic() + timeout_seconds
    hello = {
        "process": identity.process_id,
        "processes": identity.processes,
        "host": socket.gethostname(),
        "loopback": addresses.hostname_is_loopback(),
        "facts": facts,
        "trouble": None if trouble is None else str(trouble)[:MAX_TROUBLE_CHARACTERS],
        "code": 0 if trouble is None else int(trouble.exit_code),
    }
    if identity.process_id == 0:
        addresses.check_coordinator_address(identity, timeout_seconds)
        return _listen(identity, hello, deadline, timeout_seconds, key, stop_reason)
    client = _Client(identity, hello, key, stop_reason)
    try:
        return {0: client.connect(deadline, timeout_seconds)}
    except (PeerError, PreflightError):
        if trouble is not None and not client.got_error:  # its own trouble matters more than a missing process 0
            raise trouble from None
        raise


def _listen(
    identity: Identity, own_hello: Hello, deadline: float, timeout: float, key: bytes, stop_reason: StopReason
) -> dict[int, Peer]:
    """Collects hellos in process 0 until all processes are connected, and then sends the same outcome to all."""
    _allow_connections(identity.processes)
    listener = Listener(_open_port(identity), key, identity.processes)
    server = RendezvousServer(identity, own_hello, listener)
    peers: dict[int, Peer] = {}
    try:
        outcome = server.collect(deadline, timeout, stop_reason)
        server.answer(outcome)
        if outcome is not None:
            raise outcome
        peers = server.peers()
    finally:
        listener.close(keeping={peer.connection for peer in peers.values()})
    if listener.refusal_summary:
        remark(f"note: all processes are connected; others were refused: {listener.refusal_summary}")
    return peers


def _open_port(identity: Identity) -> socket.socket:
    host, note = addresses.listening_address(identity)
    if note:
        remark(f"note: {note}")
    port = identity.address[1]
    is_dual_stack = host == "" and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual_stack or ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=4096, dualstack_ipv6=is_dual_stack)
    except OSError as error:
        raise PreflightError(
            f"cluster.coordinator: process 0 cannot listen on port {port} of {socket.gethostname()}: "
            f"{error.strerror}; choose a free port, or end the program that uses it"
        ) from error


def _allow_connections(processes: int) -> None:
    """Raises the limit of open files, so that this process can have two connections to each of the others: ours and
    JAX's.

    Raises `ConfigError` if the hard limit is too low.
    """
    needed = 2 * processes + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"process 0 on {socket.gethostname()} may open {hard} files, but {processes} processes need {needed}; "
            "raise the limit there (ulimit -Hn)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class _Client:
    """Connects a process other than 0. It proves that it has the key and sends its hello, retrying until process 0
    listens."""

    def __init__(self, identity: Identity, hello: Hello, key: bytes, stop_reason: StopReason):
        self._identity, self._hello, self._key, self._stop_reason = identity, hello, key, stop_reason
        self._was_reached = False
        """True if process 0 has proved once that it has the key."""
        self._refused_since: float | None = None
        self._resolved: tuple[float, list[Any]] = (-_ADDRESS_SECONDS, [])
        """Time at which process 0's name was resolved, and its addresses."""
        self.got_error = False
        """True if process 0 has sent an error as the outcome."""

    def connect(self, deadline: float, timeout: float) -> Peer:
        """Waits for the outcome, and returns process 0. Raises the errors of `join`."""
        reason, stranger = "no connection was attempted", False
        pauses = retry_pauses(self._identity.process_id, self._identity.processes)
        while time.monotonic() < deadline:
            if (stop_reason := self._stop_reason()) is not None:
                raise stopped_error(stop_reason, self._identity)
            pause, stranger = next(pauses), False
            try:
                # Process 0 may have started later than this process, so its time limit decides.
                return self._try_once(deadline - time.monotonic(), timeout + 10)
            except authentication.RefusedError:
                pause = _RETRY_REFUSED_SECONDS
                self._note_refusal()
            except OSError as error:
                self._refused_since, reason = None, error.strerror or str(error)
            except authentication.StrangerError as error:
                stranger, reason = True, str(error)
            except (ValueError, KeyError, TypeError):
                reason = "its answer is from another version of jaxmnt"
            time.sleep(pause)
        if self._refused_since is not None:
            raise addresses.refused_error(self._identity)
        raise addresses.unanswered_error(self._identity, reason, timeout, was_reached=self._was_reached or stranger)

    def _note_refusal(self) -> None:
        now = time.monotonic()
        if self._refused_since is None:
            self._refused_since = now
            remark(f"note: process 0 at {self._identity.coordinator} has another key than this process; trying again")
        if now - self._refused_since > _REFUSAL_TIMEOUT_SECONDS:
            raise addresses.refused_error(self._identity)

    def _try_once(self, connect_seconds: float, answer_seconds: float) -> Peer:
        """Makes one attempt to connect. Raises `OSError` if that fails, and `ValueError`, `KeyError` or `TypeError` for
        an invalid answer."""
        raw = self._connect(max(0.1, connect_seconds))
        connection = JsonSocket(raw)
        try:
            authentication.prove(raw, self._key, min(_MAX_PROOF_SECONDS, max(_MIN_PROOF_SECONDS, connect_seconds)))
            self._was_reached, self._refused_since = True, None
            connection.send(self._hello | {"time": time.time()}, _MAX_PROOF_SECONDS)
            outcome = self._outcome(connection, time.monotonic() + answer_seconds)
            received = time.time()
            error, code, at_fault = outcome["error"], int(outcome["code"]), outcome.get("at_fault")
            # No message arrives before it was sent, so each of the two bounds the difference between the clocks.
            clock = (-float(outcome["heard_after"]), received - float(outcome["time"]))
            peer = Peer(str(outcome["host"]), connection, clock)
        except BaseException:
            connection.close()
            raise
        if error is not None:
            connection.close()
            self.got_error = True
            received_error = _received_error(code, str(error), absent=bool(outcome.get("absent")))
            raise received_error.blaming(processes=[] if at_fault is None else [int(at_fault)])
        return peer

    def _connect(self, seconds: float) -> socket.socket:
        """Connects to the first address of process 0 that accepts. Raises the `OSError` of the last that does not."""
        resolved, entries = self._resolved
        if time.monotonic() - resolved >= _ADDRESS_SECONDS:
            host, port = self._identity.address
            entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            self._resolved = time.monotonic(), entries
        error = OSError("the name of process 0's host has no address")
        for *_, address in entries:
            try:
                return socket.create_connection(address[:2], timeout=seconds)
            except OSError as failure:
                error = failure
        raise error

    def _outcome(self, connection: JsonSocket, deadline: float) -> dict[str, Any]:
        """Returns process 0's outcome. Tells process 0, and raises `StoppedError`, if this process is asked to stop."""
        while time.monotonic() < deadline:
            if (reason := self._stop_reason()) is not None:
                error = stopped_error(reason, self._identity)
                # This is also a valid message for the heartbeat, in case process 0 has just ended the rendezvous.
                with contextlib.suppress(OSError):
                    connection.send({"stopping": reason, "kind": "stopped", "why": str(error)})
                raise error
            if (outcome := connection.receive_one(POLL_SECONDS)) is not None:
                return outcome
        raise TimeoutError("no outcome in time")


def retry_pauses(process: int, processes: int) -> Iterator[float]:
    """Yields the seconds to wait after each failed attempt of a process to connect to process 0.

    The pauses grow until all processes together make about `_ATTEMPTS_PER_SECOND` attempts, and differ between
    processes, so that these do not connect at the same time.
    """
    longest = min(_MAX_RETRY_SECONDS, max(_RETRY_SECONDS, processes / _ATTEMPTS_PER_SECOND))
    jitter = random.Random(process)  # noqa: S311
    pause = _RETRY_SECONDS
    while True:
        yield pause * jitter.uniform(0.5, 1.0)
        pause = min(longest, pause * _RETRY_GROWTH)


def _received_error(code: int, text: str, *, absent: bool) -> UserError:
    """Returns the error that process 0 has sent as the outcome."""
    if absent:
        return AbsentError(printable_lines(text))
    return StoppedError(printable_lines(text)) if code == ExitCode.STOPPED else error_of(code, text)
