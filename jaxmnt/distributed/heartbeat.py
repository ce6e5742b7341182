"""Detects failed, lost, silent and hanging processes of a run, and ends the run with the name of the process at fault.

Every process keeps its connection to process 0 from the rendezvous. A process that is about to fail sends the reason;
the kernel closes the connection of one that is killed; one that is suspended or cut off no longer sends its position
every second. Process 0 informs all, and each exits with a message that names the process at fault. So no process waits
for JAX's heartbeat, which aborts without naming any.
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

from jaxmnt.distributed.failure_detector import BEAT_SECONDS, Act, FailureDetector, Lost
from jaxmnt.distributed.identity import Identity
from jaxmnt.distributed.json_socket import LONGEST_LINE, JsonSocket
from jaxmnt.distributed.messages import STARTING, Beat, Bye, Here, Inquiry, Message, Position, Verdict, parse_message
from jaxmnt.distributed.rendezvous_server import Peer
from jaxmnt.distributed.termination import ExitHandler, ExitReason, may_mean_a_lost_peer
from jaxmnt.errors import ExitCode, code_of, summary

_VERDICT_SECONDS = 10.0
"""Seconds that a process without progress waits for process 0's verdict."""
_DRAIN_SECONDS = 1.0
_LOST_PEER_SECONDS = 3.0
_NOTE_SECONDS = 1.0
_LONGEST_WHY = 10_000
_MOST_REPORTS = 10_000
_DISCONNECTED = "disconnected without a message: it was killed, its host was lost, or it called exit"
_UNKNOWN_MESSAGE = "sent a message that this version does not know; run the same jaxmnt in every process"


class Heartbeat:
    """Listens to the other processes in a thread, sends them the position of this one, and ends this process when the
    run fails. A process without connections has no thread."""

    def __init__(
        self, identity: Identity, peers: dict[int, Peer], exit_handler: ExitHandler, silence: float, patience: float
    ):
        """A process counts as lost after `silence` seconds without a message, or after `patience` until it settles."""
        self._identity = identity
        self._link = Link({process: peer.connection for process, peer in sorted(peers.items())})
        hosts = {identity.process_id: socket.gethostname()} | {i: peer.host for i, peer in peers.items()}
        self._host = hosts[identity.process_id]
        self._detector = FailureDetector(identity, hosts, silence, patience, lambda: self.position())
        self.clock = peers[0].clock if 0 in peers else (0.0, 0.0)
        """Bounds, in seconds, of how far this process's clock is ahead of process 0's."""
        self.exit_handler = exit_handler
        self.position: Callable[[], Position] = lambda: STARTING
        """Returns the position of this process. Called from a thread."""
        self.note_stacks: Callable[[], None] = lambda: None
        """Writes the stack of each thread to a file, once a process makes no progress."""
        self.report: Callable[[], list[Any]] = lambda: []
        """Returns measurements for process 0, as JSON. Called from a thread at each beat, except in process 0."""
        self._reports: deque[tuple[int, list[Any]]] = deque(maxlen=_MOST_REPORTS)
        self.take_report: Callable[[int, list[Any]], None] | None = None
        """Handles each report of another process, in process 0, from a thread; also those that came before it was set.
        It must not raise."""
        self.may_fail: frozenset[str] = frozenset()
        """Packages whose failure does not end the run: exceptions in their threads are only printed."""
        self._halted: str | None = None
        self._stacks_noted = False
        self._leaving = False
        self._announced = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="heartbeat", daemon=True)

    def start(self) -> None:
        if self._link.connections:
            self._thread.start()

    @property
    def failing(self) -> bool:
        """True if this process already fails by itself: then reports of other processes no longer matter."""
        return self.exit_handler.exit_reason is not None

    def fail(self, why: str, code: ExitCode) -> ExitReason:
        """Tells the other processes that this one fails, and why. Returns once they know, or after a few seconds."""
        process = self._identity.process_id
        return self.announce(ExitReason("failed", why[:_LONGEST_WHY], code, process, self._host))

    def announce(self, exit_reason: ExitReason) -> ExitReason:
        """Tells the other processes why this one exits. Returns the reason, or an earlier one if it already exits."""
        if not self.failing:
            self.exit_handler.exit_reason = exit_reason
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._link.wake()
            self._announced.wait(_LOST_PEER_SECONDS)
        return self.exit_handler.exit_reason or exit_reason

    def end(self, why: str, code: ExitCode = ExitCode.FAILURE) -> NoReturn:
        """Reports a failure and ends the process. May be called from any thread."""
        self.exit_handler.exit_now(self.fail(why, code))

    def halt(self, why: str) -> NoReturn:
        """Reports that this process makes no progress: process 0 asks every process for its position, and ends the
        run."""
        if self._thread.is_alive():
            self._halted = why
            self._link.wake()
            time.sleep(_VERDICT_SECONDS)  # the verdict ends this process
        self._note_stacks_once()
        self.exit_handler.exit_now(ExitReason("hang", f"{why}: {self.position()}", ExitCode.PEER))

    def wait_for_verdict(self) -> None:
        """Waits a few seconds after a sign that a peer is lost, so that the heartbeat can identify it.

        If it does, it ends this process with the name of the peer; else this returns.
        """
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            time.sleep(_LOST_PEER_SECONDS)

    def leave(self) -> None:
        """Tells the other processes that this one leaves without a failure, and stops listening."""
        self._leaving = True
        if self._thread.is_alive():
            self._link.wake()
            self._thread.join(_LOST_PEER_SECONDS)

    # In the thread.

    def _listen(self) -> None:
        beat = time.monotonic()
        while not self._leaving:
            self._receive(beat + BEAT_SECONDS - time.monotonic())
            self._handle_local_events()
            if time.monotonic() >= beat + BEAT_SECONDS:
                beat = time.monotonic()
                self._link.send(Beat(self.position(), self.report() if self._identity.process_id else []))
                self._act(self._detector.beat())
        self._link.send(Bye())

    def _receive(self, seconds: float) -> None:
        for process, event in self._link.receive(seconds):
            if isinstance(event, Beat) and event.report:
                self._reports.append((process, event.report))
            self._act(self._detector.on_event(process, event))
        while self.take_report is not None and self._reports:
            self.take_report(*self._reports.popleft())

    def _handle_local_events(self) -> None:
        """Handles the failure or the halt that another thread of this process has reported."""
        if self.exit_handler.exit_reason is not None and not self._announced.is_set():
            self._act(self._detector.fail(self.exit_handler.exit_reason))
            self._announced.set()
        if self._halted is not None and not self.failing:
            self._act(self._detector.halt(self._halted))
            self._halted = None

    def _act(self, acts: list[Act]) -> None:
        for act in acts:
            if not isinstance(act, ExitReason):
                self._link.send(act)
            elif not self.failing and not self._leaving:
                self.exit_handler.exit_now(act)
            if isinstance(act, Verdict):
                self._link.drain(_DRAIN_SECONDS)  # process 0 exits last, because it hosts JAX's service
            if isinstance(act, Inquiry | Here):
                self._note_stacks_once()

    def _note_stacks_once(self) -> None:
        """Writes the stacks, in a thread of its own, since a hanging file system must not stop this one for long."""
        if not self._stacks_noted:
            self._stacks_noted = True
            thread = threading.Thread(target=self.note_stacks, name="stacks", daemon=True)
            thread.start()
            thread.join(_NOTE_SECONDS)


def disconnected_heartbeat(identity: Identity) -> Heartbeat:
    """Returns a heartbeat without connections, for a run that has, or watches, no other processes."""
    return Heartbeat(identity, {}, ExitHandler(identity.label), 0.0, 0.0)


@contextlib.contextmanager
def ending_on_exceptions_in_threads(heartbeat: Heartbeat) -> Iterator[None]:
    """Within this context, an uncaught exception in any thread ends the process, as one in the main thread does."""

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


class Link:
    """Connects a process to its peers with streams of messages. Only `wake` may be called from another thread."""

    def __init__(self, connections: dict[int, JsonSocket]):
        self.connections = connections
        # The first messages may have arrived with the end of the rendezvous: a selector does not see those.
        self._ready: Iterable[int | None] = tuple(connections)
        self._wakeup_read, self._wakeup_write = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakeup_read, selectors.EVENT_READ, None)
        for process, connection in connections.items():
            connection.longest_line = LONGEST_LINE
            self._selector.register(connection, selectors.EVENT_READ, process)

    def wake(self) -> None:
        """Ends the wait in `receive`. May be called from any thread."""
        self._wakeup_write.send(b"!")

    def send(self, message: Message) -> None:
        """Sends a message to all peers."""
        record = asdict(message)
        for connection in self.connections.values():
            with contextlib.suppress(OSError):  # a peer that cannot receive is detected by its silence
                connection.send(record)

    def receive(self, seconds: float) -> Iterator[tuple[int, Message | Lost]]:
        """Yields the messages and losses of connections, each with its process. Waits for at most `seconds`."""
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
            for _ in self.receive(0.05):
                pass

    def _read(self, process: int) -> Iterator[Message | Lost]:
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
            yield Lost(_DISCONNECTED)
        except ValueError:
            yield Lost(_UNKNOWN_MESSAGE)

    def _drop(self, process: int) -> None:
        connection = self.connections.pop(process, None)
        if connection is not None:  # else `drain` has dropped it while `receive` waited for its caller
            self._selector.unregister(connection)
            connection.close()
