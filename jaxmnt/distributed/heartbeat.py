"""The processes of a run report to each other who failed, who left, who is silent, and where each one is.

Every process keeps its connection to process 0 from the rendezvous. A process that is about to fail says why;
one that is killed says it by its connection, which its kernel closes; one that is stopped or cut off no longer says
every second where it is. Process 0 tells all, and each ends with a message that names the process at fault. So nobody
waits for JAX's heartbeat, whose end is an abort without a name.
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
"""How long a process that has come to a halt waits for process 0's account."""
_GOING_LAST_SECONDS = 1.0
_MISSED_SECONDS = 3.0
_NOTE_SECONDS = 1.0
_LONGEST_WHY = 10_000
_MOST_REPORTS = 10_000
_GONE = "disconnected without a message: it was killed, its host was lost, or it called exit"
_NONSENSE = "sent a message that this version does not know; run the same jaxmnt in every process"


class Heartbeat:
    """The thread that listens to the other processes, tells them where this one is, and ends this process when the run
    fails. A process without connections has no thread."""

    def __init__(
        self, identity: Identity, peers: dict[int, Peer], exit_handler: ExitHandler, silence: float, patience: float
    ):
        """A process is lost after `silence` seconds without a message; after `patience` until it has settled."""
        self._identity = identity
        self._link = Link({process: peer.connection for process, peer in sorted(peers.items())})
        hosts = {identity.process_id: socket.gethostname()} | {i: peer.host for i, peer in peers.items()}
        self._host = hosts[identity.process_id]
        self._detector = FailureDetector(identity, hosts, silence, patience, lambda: self.position())
        self.clock = peers[0].clock if 0 in peers else (0.0, 0.0)
        """Between which bounds, in seconds, this process's clock is ahead of process 0's."""
        self.exit_handler = exit_handler
        self.position: Callable[[], Position] = lambda: STARTING
        """Says where this process is. Called from a thread."""
        self.note_stacks: Callable[[], None] = lambda: None
        """Writes down where each thread is, when a process has come to a halt."""
        self.report: Callable[[], list[Any]] = lambda: []
        """Returns what process 0 needs to know besides; JSON. Called from a thread, with each beat but process 0's."""
        self._reports: deque[tuple[int, list[Any]]] = deque(maxlen=_MOST_REPORTS)
        self.take_report: Callable[[int, list[Any]], None] | None = None
        """In process 0: gets the reports of all, from a thread, and those of before. It must not raise."""
        self.may_fail: frozenset[str] = frozenset()
        """Packages without which the run goes on: exceptions in their threads are printed and no more."""
        self._halted: str | None = None
        self._noted = False
        self._leaving = False
        self._announced = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="heartbeat", daemon=True)

    def start(self) -> None:
        if self._link.connections:
            self._thread.start()

    @property
    def failing(self) -> bool:
        """Whether this process is known to fail by itself: what others report does not matter then."""
        return self.exit_handler.exit_reason is not None

    def fail(self, why: str, code: ExitCode) -> ExitReason:
        """Tells the others that this process fails, and why. Returns when they know, or after a few seconds."""
        process = self._identity.process_id
        return self.announce(ExitReason("failed", why[:_LONGEST_WHY], code, process, self._host))

    def announce(self, exit_reason: ExitReason) -> ExitReason:
        """Tells the others why this process ends, unless it ends for another reason already, which is returned."""
        if not self.failing:
            self.exit_handler.exit_reason = exit_reason
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._link.wake()
            self._announced.wait(_MISSED_SECONDS)
        return self.exit_handler.exit_reason or exit_reason

    def end(self, why: str, code: ExitCode = ExitCode.FAILURE) -> NoReturn:
        """Fails and ends the process. From any thread."""
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

    def miss(self) -> None:
        """A peer seems to be gone. Waits a few seconds: if the heartbeat finds out who, it ends this process with that
        name; else this returns."""
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            time.sleep(_MISSED_SECONDS)

    def leave(self) -> None:
        """Says good-bye: what becomes of the connections does not matter any more."""
        self._leaving = True
        if self._thread.is_alive():
            self._link.wake()
            self._thread.join(_MISSED_SECONDS)

    # In the thread.

    def _listen(self) -> None:
        beat = time.monotonic()
        while not self._leaving:
            self._receive(beat + BEAT_SECONDS - time.monotonic())
            self._tell_of_this_process()
            if time.monotonic() >= beat + BEAT_SECONDS:
                beat = time.monotonic()
                self._link.send(Beat(self.position(), self.report() if self._identity.process_id else []))
                self._act(self._detector.beat())
        self._link.send(Bye())

    def _receive(self, seconds: float) -> None:
        for process, event in self._link.receive(seconds):
            if isinstance(event, Beat) and event.report:
                self._reports.append((process, event.report))
            self._act(self._detector.hear(process, event))
        while self.take_report is not None and self._reports:
            self.take_report(*self._reports.popleft())

    def _tell_of_this_process(self) -> None:
        """Sends what other threads of this process have left for this one."""
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
                self._link.drain(_GOING_LAST_SECONDS)  # process 0 goes last: JAX's service goes with it
            if isinstance(act, Inquiry | Here):
                self._note_stacks_once()

    def _note_stacks_once(self) -> None:
        """Uses a thread: a file system that hangs must not keep this one from listening for long."""
        if not self._noted:
            self._noted = True
            noting = threading.Thread(target=self.note_stacks, name="stacks", daemon=True)
            noting.start()
            noting.join(_NOTE_SECONDS)


def heartbeat_alone(identity: Identity) -> Heartbeat:
    """For a run that has no other processes, or does not want to hear of them."""
    return Heartbeat(identity, {}, ExitHandler(identity.label), 0.0, 0.0)


@contextlib.contextmanager
def ending_on_exceptions_in_threads(heartbeat: Heartbeat) -> Iterator[None]:
    """Inside, an exception that nobody catches, in whatever thread, ends the process as one in the main thread does."""

    def raised(arguments: threading.ExceptHookArgs) -> None:
        threading.__excepthook__(arguments)
        error = arguments.exc_value
        if error is None or isinstance(error, SystemExit):
            return
        frames = (frame for frame, _ in traceback.walk_tb(arguments.exc_traceback))
        if heartbeat.may_fail & {str(frame.f_globals.get("__name__")).partition(".")[0] for frame in frames}:
            return
        if may_mean_a_lost_peer(error):
            heartbeat.miss()
        name = arguments.thread.name if arguments.thread else "a thread"
        heartbeat.end(f"{summary(error)} (in thread {name!r})", code_of(error))

    before, threading.excepthook = threading.excepthook, raised
    try:
        yield
    finally:
        threading.excepthook = before


class Link:
    """The connections of a process to its peers, as streams of messages. For one thread, except for `wake`."""

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
        """Ends the wait in `receive`. From any thread."""
        self._wakeup_write.send(b"!")

    def send(self, message: Message) -> None:
        """To all."""
        record = asdict(message)
        for connection in self.connections.values():
            with contextlib.suppress(OSError):  # its silence reports a peer that cannot receive
                connection.send(record)

    def receive(self, seconds: float) -> Iterator[tuple[int, Message | Lost]]:
        """What arrives from which process; waits for at most so many seconds."""
        ready = self._ready or [event.data for event, _ in self._selector.select(max(0.0, seconds))]
        self._ready = ()
        for process in ready:
            if process is None:
                self._wakeup_read.recv(16)
            elif process in self.connections:
                for event in self._read(process):
                    yield process, event

    def drain(self, seconds: float) -> None:
        """Discards messages until every peer has disconnected, or the seconds are over."""
        until = time.monotonic() + seconds
        while self.connections and time.monotonic() < until:
            for _ in self.receive(0.05):
                pass

    def _read(self, process: int) -> Iterator[Message | Lost]:
        connection, more = self.connections[process], True
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
            yield Lost(_GONE)
        except ValueError:
            yield Lost(_NONSENSE)

    def _drop(self, process: int) -> None:
        connection = self.connections.pop(process, None)
        if connection is not None:  # else `drain` has dropped it while `receive` waited for its caller
            self._selector.unregister(connection)
            connection.close()
