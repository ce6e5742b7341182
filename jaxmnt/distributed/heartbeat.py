"""Detects failed, lost, silent and hanging processes of a run, and ends the run with the name of the process at fault.

Every process keeps its connection to process 0 from the rendezvous. A process that is about to fail sends the reason.
If a process is killed, the kernel closes its connection. If it is suspended or cut off from the network, it no longer
sends its position every second. Process 0 informs all processes, and each exits with a message that names the process
at fault. So no process waits for JAX's heartbeat, which aborts without naming a process.
"""

import contextlib
import selectors
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any, NoReturn

from jaxmnt.distributed.failure_detector import BEAT_SECONDS, Action, ConnectionLost, FailureDetector
from jaxmnt.distributed.identity import Identity
from jaxmnt.distributed.json_socket import MAX_LINE_BYTES, JsonSocket, encode_line
from jaxmnt.distributed.messages import STARTING, Beat, Bye, Here, Inquiry, Message, Position, Verdict, parse_message
from jaxmnt.distributed.rendezvous_server import Peer
from jaxmnt.distributed.termination import ExitHandler, ExitReason, may_mean_a_lost_peer
from jaxmnt.errors import ExitCode, code_of, summary

_VERDICT_TIMEOUT_SECONDS = 10.0
"""Time for which a process without progress waits for process 0's verdict."""
_DRAIN_TIMEOUT_SECONDS = 1.0
"""Time for which process 0 waits, after its verdict, until the others have disconnected."""
_LOST_PEER_TIMEOUT_SECONDS = 3.0
"""Time for which other threads wait until the heartbeat's thread has sent a message or has identified a lost peer."""
_SEND_TIMEOUT_SECONDS, _FLUSH_SECONDS = 1.0, 0.01
"""Time for which all peers together may take to accept a message, and the interval between two attempts."""
_MAX_REPORT_SECONDS = 0.2
"""Time for reports, after which messages that may end this process are handled first."""
_STACKS_TIMEOUT_SECONDS = 1.0
"""Time for which the heartbeat waits until the stacks are written."""
_MAX_REASON_CHARACTERS = 10_000
_MAX_REPORTS = 10_000
"""Maximum number of reports that are kept until `Heartbeat.take_report` is set."""
_DISCONNECTED = "disconnected without a message: it was killed, its host was lost, or it called exit"
_UNKNOWN_MESSAGE = "sent a message that this version does not know; run the same jaxmnt in every process"


class Heartbeat:
    """Listens to the other processes in a thread, sends them the position of this one, and ends this process when the
    run fails. A process without connections has no thread."""

    def __init__(
        self, identity: Identity, peers: dict[int, Peer], exit_handler: ExitHandler,
        silence_seconds: float, settling_seconds: float,
    ):  # fmt: skip
        """`silence_seconds` and `settling_seconds` are the limits of `FailureDetector`."""
        self._identity = identity
        self._link = Link({process: peer.connection for process, peer in sorted(peers.items())})
        hosts = {identity.process_id: socket.gethostname()} | {i: peer.host for i, peer in peers.items()}
        self._host = hosts[identity.process_id]
        self._detector = FailureDetector(identity, hosts, silence_seconds, settling_seconds, lambda: self.position())
        self.clock = peers[0].clock if 0 in peers else (0.0, 0.0)
        """Bounds, in seconds, of how far this process's clock is ahead of process 0's."""
        self.exit_handler = exit_handler
        self.position: Callable[[], Position] = lambda: STARTING
        """Function that returns the position of this process. It is called from a thread."""
        self.note_stacks: Callable[[], None] = lambda: None
        """Function that writes the stack of each thread to a file. It is called once, when a process makes no
        progress."""
        self.report: Callable[[], list[Any]] = lambda: []
        """Function that returns measurements for process 0, as JSON. It is called from a thread at each beat, but not
        in process 0."""
        self._reports: deque[tuple[int, list[Any]]] = deque(maxlen=_MAX_REPORTS)
        self.take_report: Callable[[int, list[Any]], None] | None = None
        """Function that process 0 calls, from a thread, with the number of another process and a report from it. It
        also gets the reports that arrived before it was set. It must not raise an exception."""
        self.may_fail: frozenset[str] = frozenset()
        """Packages whose failure does not end the run, because exceptions in their threads are only printed."""
        self._halt_reason: str | None = None
        self._stacks_noted = False
        self._leaving = False
        self._announced = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="heartbeat", daemon=True)

    def start(self) -> None:
        if self._link.connections:
            self._thread.start()

    @property
    def failing(self) -> bool:
        """True if this process is about to exit for a reason of its own, so that reports from others no longer
        matter."""
        return self.exit_handler.exit_reason is not None

    def fail(self, why: str, code: ExitCode) -> ExitReason:
        """Tells the other processes that this one is failing, and why. Returns once that is sent, or after a few
        seconds."""
        process = self._identity.process_id
        return self.announce(ExitReason("failed", why[:_MAX_REASON_CHARACTERS], code, process, self._host))

    def announce(self, exit_reason: ExitReason) -> ExitReason:
        """Tells the other processes why this one is exiting. Returns that reason, or the earlier one if this process
        was already about to exit."""
        if not self.failing:
            self.exit_handler.exit_reason = exit_reason
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._link.wake()
            self._announced.wait(_LOST_PEER_TIMEOUT_SECONDS)
        return self.exit_handler.exit_reason or exit_reason

    def end(self, why: str, code: ExitCode = ExitCode.FAILURE) -> NoReturn:
        """Reports a failure and ends the process. May be called from any thread."""
        self.exit_handler.exit_now(self.fail(why, code))

    def halt(self, why: str) -> NoReturn:
        """Reports that this process makes no progress. Process 0 then asks every process for its position, and ends the
        run."""
        if self._thread.is_alive():
            self._halt_reason = why
            self._link.wake()
            time.sleep(_VERDICT_TIMEOUT_SECONDS)  # the verdict ends this process
        self._note_stacks_once()
        self.exit_handler.exit_now(ExitReason("hang", f"{why}: {self.position()}", ExitCode.PEER))

    def wait_for_verdict(self) -> None:
        """Waits a few seconds, after a sign that a peer is lost, for the heartbeat to identify the peer.

        If the heartbeat identifies it, it ends this process with the name of the peer. Otherwise this method returns.
        """
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            time.sleep(_LOST_PEER_TIMEOUT_SECONDS)

    def leave(self) -> None:
        """Tells the other processes that this one leaves without a failure, and stops listening."""
        self._leaving = True
        if self._thread.is_alive():
            self._link.wake()
            self._thread.join(_LOST_PEER_TIMEOUT_SECONDS)

    # The methods below run in the thread.

    def _listen(self) -> None:
        beat = time.monotonic()
        while not self._leaving:
            self._receive(beat + BEAT_SECONDS - time.monotonic())
            self._handle_local_events()
            if time.monotonic() >= beat + BEAT_SECONDS:
                beat = time.monotonic()
                self._link.send(Beat(self.position(), self.report() if self._identity.process_id else []))
                self._perform(self._detector.beat())
        self._link.send(Bye())

    def _receive(self, seconds: float) -> None:
        for process, event in self._link.receive(seconds):
            if isinstance(event, Beat) and event.report:
                self._reports.append((process, event.report))
            self._perform(self._detector.on_event(process, event))
        deadline = time.monotonic() + _MAX_REPORT_SECONDS
        while self.take_report is not None and self._reports and time.monotonic() < deadline:
            self.take_report(*self._reports.popleft())

    def _handle_local_events(self) -> None:
        """Handles the failure or the halt that another thread of this process has reported."""
        if self.exit_handler.exit_reason is not None and not self._announced.is_set():
            self._perform(self._detector.fail(self.exit_handler.exit_reason))
            self._announced.set()
        if self._halt_reason is not None and not self.failing:
            self._perform(self._detector.halt(self._halt_reason))
            self._halt_reason = None

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            if not isinstance(action, ExitReason):
                self._link.send(action)
            elif not self.failing and not self._leaving:
                self.exit_handler.exit_now(action)
            if isinstance(action, Verdict):
                self._link.drain(_DRAIN_TIMEOUT_SECONDS)  # process 0 exits last, because it hosts JAX's service
            if isinstance(action, Inquiry | Here):
                self._note_stacks_once()

    def _note_stacks_once(self) -> None:
        """Writes the stacks in a separate thread, since a hanging file system must not stop this one for long."""
        if not self._stacks_noted:
            self._stacks_noted = True
            thread = threading.Thread(target=self.note_stacks, name="stacks", daemon=True)
            thread.start()
            thread.join(_STACKS_TIMEOUT_SECONDS)


def disconnected_heartbeat(identity: Identity) -> Heartbeat:
    """Returns a heartbeat without connections, for a run that has no other processes, or does not watch them."""
    return Heartbeat(identity, {}, ExitHandler(identity.label), 0.0, 0.0)


@contextlib.contextmanager
def ending_on_exceptions_in_threads(heartbeat: Heartbeat) -> Iterator[None]:
    """Within this context, an uncaught exception in any thread ends the process, like one in the main thread."""

    def end_on_exception(arguments: threading.ExceptHookArgs) -> None:
        threading.__excepthook__(arguments)
        error = arguments.exc_value
        if error is None or isinstance(error, SystemExit):
            return
        frames = (frame for frame, _ in traceback.walk_tb(arguments.exc_traceback))
        if heartbeat.may_fail & {str(frame.f_globals.get("__name__")).partition(".")[0] for frame in frames}:
            return
        if may_mean_a_lost_peer(error):
            heartbeat.wait_for_verdict()
        name = arguments.thread.name if arguments.thread else "a thread"
        heartbeat.end(f"{summary(error)} (in thread {name!r})", code_of(error))

    previous_hook = threading.excepthook
    threading.excepthook = end_on_exception
    try:
        yield
    finally:
        threading.excepthook = previous_hook


def _flush(connection: JsonSocket) -> bool:
    """Sends what is queued for a peer. Returns False if the peer does not accept all of it now."""
    try:
        return connection.flush()
    except OSError:  # the loss of the connection is noticed when it is read
        return True


class Link:
    """Connects a process to its peers with streams of messages. Only `wake` may be called from another thread."""

    def __init__(self, connections: dict[int, JsonSocket]):
        self.connections = connections
        # The first messages may have arrived with the end of the rendezvous, where a selector does not see them.
        self._ready: Iterable[int | None] = tuple(connections)
        self._wakeup_read, self._wakeup_write = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakeup_read, selectors.EVENT_READ, None)
        for process, connection in connections.items():
            connection.max_line_bytes = MAX_LINE_BYTES
            self._selector.register(connection, selectors.EVENT_READ, process)

    def wake(self) -> None:
        """Ends the wait in `receive`. May be called from any thread."""
        self._wakeup_write.send(b"!")

    def send(self, message: Message) -> None:
        """Sends a message to all peers. Peers that accept nothing now do not delay the others.

        A beat is not waited for, and is left out for a peer that has not accepted the last one. All peers together get
        a second to accept any other message.
        """
        line = encode_line(asdict(message))
        is_beat = isinstance(message, Beat)
        for connection in self.connections.values():
            if not is_beat or _flush(connection):
                connection.queue_line(line)
        deadline = time.monotonic() + (0.0 if is_beat else _SEND_TIMEOUT_SECONDS)
        pending = [connection for connection in self.connections.values() if not _flush(connection)]
        while pending and time.monotonic() < deadline:
            time.sleep(_FLUSH_SECONDS)
            pending = [connection for connection in pending if not _flush(connection)]

    def receive(self, seconds: float) -> Iterator[tuple[int, Message | ConnectionLost]]:
        """Yields each message or loss of a connection, with the number of its process. Waits for at most `seconds`."""
        ready = self._ready or [event.data for event, _ in self._selector.select(max(0.0, seconds))]
        self._ready = ()
        for process in ready:
            if process is None:
                self._wakeup_read.recv(16)
            elif process in self.connections:
                for event in self._read(process):
                    yield process, event

    def drain(self, seconds: float) -> None:
        """Discards messages until every peer has disconnected, for at most `seconds`."""
        deadline = time.monotonic() + seconds
        while self.connections and time.monotonic() < deadline:
            for connection in self.connections.values():
                _flush(connection)
            for _ in self.receive(0.05):
                pass

    def _read(self, process: int) -> Iterator[Message | ConnectionLost]:
        connection = self.connections[process]
        more = True
        try:
            while more:
                for record in connection.receive():
                    message = parse_message(record)
                    yield message
                    if isinstance(message, Bye):
                        self._drop(process)
                        return
                more = connection.has_messages
        except OSError:
            self._drop(process)
            yield ConnectionLost(_DISCONNECTED)
        except ValueError:
            yield ConnectionLost(_UNKNOWN_MESSAGE)

    def _drop(self, process: int) -> None:
        connection = self.connections.pop(process, None)
        if connection is not None:  # else `drain` has dropped it while `receive` waited for its caller
            self._selector.unregister(connection)
            connection.close()
