"""What the processes of a run hear of each other: who failed, who went away, who is silent, and where each one is.

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
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any, NoReturn

from jaxmnt.distributed.identity import Identity
from jaxmnt.distributed.json_socket import LONGEST_LINE
from jaxmnt.distributed.rendezvous_server import Peer
from jaxmnt.distributed.termination import (
    ABANDONED,
    AbandonedStart,
    ExitHandler,
    ExitReason,
    code_for_peers,
    may_mean_a_lost_peer,
)
from jaxmnt.errors import ExitCode, code_of, printable_lines, summary

_BEAT_SECONDS = 1.0
_ANSWER_SECONDS = 3.0
"""For all to say where they are when one has come to a halt."""
_VERDICT_SECONDS = 10.0
"""How long a process that has come to a halt waits for process 0's account."""
_GOING_LAST_SECONDS = 1.0
_MISSED_SECONDS = 3.0
_NOTE_SECONDS = 1.0
_LONGEST_WHY = 10_000
_MOST_REPORTS = 10_000

_GONE = "disconnected without a message: it was killed, its host was lost, or it called exit"
_NONSENSE = "sent a message that this version does not know; run the same jaxmnt in every process"


@dataclass(frozen=True)
class Position:
    """Where a process is."""

    step: int
    """Steps that it has begun."""
    phase: str
    settled: bool = False
    """Whether a step is finished: what takes long the first time is behind it."""
    own: bool = False
    """Whether it waits for something of its own, such as input, and not for the devices or another process."""

    def __str__(self) -> str:
        return f"in step {self.step}, {self.phase}" if self.step else self.phase


STARTING = Position(0, "starting")


class Heartbeat:
    """The connections of this process, and the thread that listens to them. Alone there are none, and no thread."""

    def __init__(
        self, identity: Identity, peers: dict[int, Peer], exit_handler: ExitHandler, silence: float, patience: float
    ):
        """A process is missed after `silence` seconds without a word; after `patience` until it has settled."""
        self._identity = identity
        self._connections = {process: peer.connection for process, peer in sorted(peers.items())}
        for connection in self._connections.values():
            connection.longest_line = LONGEST_LINE
        self._hosts = {identity.process_id: socket.gethostname()} | {i: peer.host for i, peer in peers.items()}
        self._positions = dict.fromkeys(peers, STARTING)
        self._unheard = dict.fromkeys(peers, 0)
        self.clock = peers[0].clock if 0 in peers else (0.0, 0.0)
        """Between which bounds, in seconds, this process's clock is ahead of process 0's."""
        self._silence, self._patience = silence, patience
        self.exit_handler = exit_handler
        self.position: Callable[[], Position] = lambda: STARTING
        """Says where this process is. Called from a thread."""
        self.note_stacks: Callable[[], None] = lambda: None
        """Writes down where each thread is, when somebody has come to a halt."""
        self.report: Callable[[], list[Any]] = lambda: []
        """What process 0 is to know besides; JSON. Called from a thread, with each beat but process 0's."""
        self._reports: deque[tuple[int, list[Any]]] = deque(maxlen=_MOST_REPORTS)
        """Those that nobody has wanted to hear yet."""
        self._take_report: Callable[[int, list[Any]], None] | None = None
        self.may_fail: frozenset[str] = frozenset()
        """Packages without which the run goes on: exceptions in their threads are printed and no more."""
        self._own: ExitReason | None = None
        """Set when this process fails by itself: what others say of it does not matter then."""
        self._halted: str | None = None
        self._inquiry: _Inquiry | None = None
        self._noted = False
        self._leaving = False
        self._told = threading.Event()
        self._wakeup_read, self._wakeup_write = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._listen, name="heartbeat", daemon=True)

    def start(self) -> None:
        if not self._connections:
            return
        self._selector.register(self._wakeup_read, selectors.EVENT_READ, None)
        for process, connection in self._connections.items():
            self._selector.register(connection, selectors.EVENT_READ, process)
        self._thread.start()

    @property
    def failing(self) -> bool:
        """Whether this process is known to fail by itself."""
        return self._own is not None

    def fail(self, why: str, code: int) -> ExitReason:
        """Tells the others that this process fails, and why. Returns when they know, or after a few seconds."""
        return self._announce(self._exit_reason("failed", why[:_LONGEST_WHY], code))

    def stop_early(self, exit_reason: AbandonedStart) -> None:
        """Tells the others that this process was asked to stop before its first step: they stop, too. Returns as `fail`
        does."""
        self._announce(exit_reason)

    def _announce(self, exit_reason: ExitReason) -> ExitReason:
        if self._own is None:
            self._own = self.exit_handler.exit_reason = exit_reason
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._wakeup_write.send(b"!")
            self._told.wait(_MISSED_SECONDS)
        return self._own

    def end(self, why: str, code: int) -> NoReturn:
        """Fails and ends the process. From any thread."""
        self.exit_handler.exit_now(self.fail(why, code))

    def fail_now(self, why: str) -> NoReturn:
        """`end` as a failure."""
        self.end(why, ExitCode.FAILURE)

    def hear_reports(self, take: Callable[[int, list[Any]], None]) -> None:
        """In process 0: `take` gets the reports of all, from a thread, and those of before. It must not raise."""
        self._take_report = take
        while self._reports:
            try:
                process, report = self._reports.popleft()
            except IndexError:  # another thread was as quick
                return
            take(process, report)

    def halt(self, why: str) -> NoReturn:
        """This process does not get any further: all are asked where they are, and the run ends."""
        if self._thread.is_alive():
            self._halted = why
            self._wakeup_write.send(b"!")
            time.sleep(_VERDICT_SECONDS)  # the verdict ends this process
        self._note_stacks_once()
        self.exit_handler.exit_now(self._exit_reason("hang", f"{why}: {self.position()}", ExitCode.PEER))

    def miss(self) -> None:
        """A peer seems to be gone. Waits a few seconds: if the heartbeat finds out who, it ends this process with that
        name; else this returns."""
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            time.sleep(_MISSED_SECONDS)

    def leave(self) -> None:
        """Says good-bye: what becomes of the connections does not matter any more."""
        self._leaving = True
        if self._thread.is_alive():
            self._wakeup_write.send(b"!")
            self._thread.join(_MISSED_SECONDS)

    # In the thread.

    def _listen(self) -> None:
        beat = time.monotonic()
        for process, connection in tuple(self._connections.items()):
            if connection.has_messages:  # they have come with the end of the rendezvous
                self._hear(process)
        while not self._leaving:
            for event, _ in self._selector.select(max(0.0, beat + _BEAT_SECONDS - time.monotonic())):
                if event.data is None:
                    self._wakeup_read.recv(16)
                elif event.data in self._connections:
                    self._hear(event.data)
            self._attend_to_own()
            if time.monotonic() >= beat + _BEAT_SECONDS:
                beat = time.monotonic()
                self._beat()
        self._broadcast({"kind": "bye"})

    def _attend_to_own(self) -> None:
        """What other threads of this process have left for this one."""
        if self._own is not None and not self._told.is_set():
            if self._identity.process_id == 0:
                self._tell_all(self._own)
            else:
                kind = "stopped" if isinstance(self._own, AbandonedStart) else "failed"
                self._broadcast({"kind": kind, "why": self._own.why, "code": int(self._own.code)})
            self._told.set()
        halted, self._halted = self._halted, None
        if halted is None or self._own is not None:
            return
        if self._identity.process_id == 0:
            self._inquire(halted, self._identity.process_id)
        else:
            self._broadcast({"kind": "halted", "why": halted})

    def _beat(self) -> None:
        position = self.position()
        report = {} if self._identity.process_id == 0 else {"report": self.report()}
        self._broadcast({"kind": "beat", "position": asdict(position), **report})
        for process in tuple(self._connections):
            # Counted, not timed: a machine that was suspended does not blame the others for its own absence.
            self._unheard[process] += 1
            limit = self._silence if position.settled else self._patience
            if self._unheard[process] * _BEAT_SECONDS > limit:
                where = f", last seen {self._positions[process]}" if self._identity.process_id == 0 else ""
                self._lost(
                    process, f"has been silent for {limit:g} s: it is stopped, or cut off from the network{where}"
                )
        if self._inquiry is not None and time.monotonic() > self._inquiry.until:
            self._conclude()

    def _hear(self, process: int) -> None:
        """What one peer has to say."""
        try:
            messages = self._connections[process].receive()
        except (OSError, ValueError) as error:
            self._drop(process)
            self._lost(process, _NONSENSE if isinstance(error, ValueError) else _GONE)
            return
        self._unheard[process] = 0
        for message in messages:
            try:
                told = Position(**message["position"]) if "position" in message else None
                exit_reason = _exit_reason_from(message["exit_reason"]) if message["kind"] == "verdict" else None
                code = ExitCode(message.get("code", ExitCode.PEER))
                report = message.get("report") or []
            except (ValueError, KeyError, TypeError):
                self._lost(process, _NONSENSE)
                return
            if told is not None:
                self._positions[process] = told
            if report:
                self._report(process, report)
            self._obey(process, message, exit_reason, code)
        if process in self._connections and self._connections[process].has_messages:
            self._hear(process)  # what follows makes no sense

    def _report(self, process: int, report: list[Any]) -> None:
        self._reports.append((process, report))
        if self._take_report is not None:
            self.hear_reports(self._take_report)

    def _obey(self, process: int, message: dict[str, Any], exit_reason: ExitReason | None, code: ExitCode) -> None:
        kind, why = message["kind"], printable_lines(str(message.get("why")))
        if kind == "bye" and process in self._connections:
            self._drop(process)
        elif kind == "failed":
            failed = self._exit_reason("peer_lost", f"failed: {why}", code, process)
            self._tell_all(replace(failed, by_itself=True))
        elif kind == "stopped":
            self._tell_all(AbandonedStart(ABANDONED, why, ExitCode.STOPPED, process, self._hosts[process]))
        elif kind == "halted":
            self._inquire(why, process)
        elif kind == "inquiry":
            self._broadcast({"kind": "here", "position": asdict(self.position())})
            self._note_stacks_once()
        elif kind == "gave_up":
            why = f"was declared lost by {self._label(process)}: {why}"
            self._tell_all(self._exit_reason("peer_lost", why, ExitCode.PEER, 0))
        elif kind == "here" and self._inquiry is not None:
            self._inquiry.answered.add(process)
            if self._inquiry.answered >= set(self._connections):
                self._conclude()
        elif exit_reason is not None:
            self._end(exit_reason)

    def _lost(self, process: int, why: str) -> None:
        if process == 0:
            self._broadcast({"kind": "gave_up", "why": why})  # in case that it is only this process that cannot hear it
        self._tell_all(self._exit_reason("peer_lost", why, ExitCode.PEER, process))

    def _inquire(self, why: str, process: int) -> None:
        """Process 0 asks all where they are."""
        if self._inquiry is not None:
            return
        self._inquiry = _Inquiry(f"{self._label(process)}: {why}", time.monotonic() + _ANSWER_SECONDS)
        self._broadcast({"kind": "inquiry"})
        self._note_stacks_once()

    def _note_stacks_once(self) -> None:
        """In a thread: a file system that hangs must not keep this one from listening for long."""
        if not self._noted:
            self._noted = True
            noting = threading.Thread(target=self.note_stacks, name="stacks", daemon=True)
            noting.start()
            noting.join(_NOTE_SECONDS)

    def _conclude(self) -> None:
        assert self._inquiry is not None
        positions = self._positions | {0: self.position()}
        silent = sorted(set(self._connections) - self._inquiry.answered)
        account, suspect = account_of(positions, silent, self._label)
        self._tell_all(self._exit_reason("hang", f"{self._inquiry.why}. {account}", ExitCode.PEER, suspect))

    def _tell_all(self, exit_reason: ExitReason) -> None:
        """Ends the run: process 0 tells the others why, and goes last, because JAX's service goes with it."""
        if self._identity.process_id == 0:
            told = asdict(exit_reason) | {"code": int(code_for_peers(exit_reason.code))}
            if isinstance(exit_reason, AbandonedStart):
                told |= {"code": int(exit_reason.code), "asked_by": None}
            if exit_reason.kind == "failed":
                why = self._blame(exit_reason.process, f"failed: {exit_reason.why}")
                told |= {"kind": "peer_lost", "why": why, "by_itself": True}
            self._broadcast({"kind": "verdict", "exit_reason": told})
            until = time.monotonic() + _GOING_LAST_SECONDS
            while self._connections and time.monotonic() < until:
                for event, _ in self._selector.select(0.05):
                    if event.data in self._connections:
                        self._heed_no_more(event.data)
        self._end(exit_reason)

    def _end(self, exit_reason: ExitReason) -> None:
        if self._own is None and not self._leaving:
            self.exit_handler.exit_now(exit_reason)

    def _broadcast(self, message: dict[str, Any]) -> None:
        for connection in self._connections.values():
            with contextlib.suppress(OSError):  # one that cannot hear it is found by its silence
                connection.send(message)

    def _heed_no_more(self, process: int) -> None:
        """Takes what a peer still says, until it is gone."""
        try:
            self._connections[process].receive()
        except (OSError, ValueError):
            self._drop(process)

    def _drop(self, process: int) -> None:
        connection = self._connections.pop(process)
        self._selector.unregister(connection)
        connection.close()

    def _exit_reason(self, kind: str, why: str, code: int, process: int | None = None) -> ExitReason:
        if kind == "failed":
            me = self._identity.process_id
            return ExitReason(kind, why, code, me, self._hosts[me])
        if kind == "peer_lost":
            return ExitReason(
                kind, self._blame(process, why), int(code_for_peers(code)), process, self._hosts[process or 0]
            )
        return ExitReason(kind, why, code, process, None if process is None else self._hosts[process])

    def _blame(self, process: int | None, why: str) -> str:
        return f"{self._label(process or 0)} {why}"

    def _label(self, process: int) -> str:
        return f"process {process} of {self._identity.processes} on {self._hosts[process]}"


def _exit_reason_from(record: dict[str, Any]) -> ExitReason:
    """What process 0 says. Raises `TypeError` or `ValueError` if that makes no sense."""
    ExitCode(record["code"])
    exit_reason = AbandonedStart(**record) if record["kind"] == ABANDONED else ExitReason(**record)
    texts = (exit_reason.kind, exit_reason.why, "" if exit_reason.host is None else exit_reason.host)
    process = 0 if exit_reason.process is None else exit_reason.process
    sound = type(process) is int and process >= 0 and type(exit_reason.by_itself) is bool
    if not sound or not all(type(one) is str for one in texts):
        raise TypeError("no exit_reason")
    return replace(exit_reason, why=printable_lines(exit_reason.why))


@dataclass
class _Inquiry:
    """Process 0 waits for all to say where they are."""

    why: str
    until: float

    def __post_init__(self) -> None:
        self.answered: set[int] = set()


def account_of(
    positions: dict[int, Position], silent: list[int], label: Callable[[int], str]
) -> tuple[str, int | None]:
    """Which process is where, in words, and the one at fault if that can be told: who is silent, behind, or
    waits for something of its own, if that is one."""
    sentences = []
    if silent:
        sentences.append(f"No answer from {_listed([label(process) for process in silent])}")
    places: dict[tuple[int, str], list[int]] = {}
    for process, position in sorted(positions.items()):
        if process not in silent:
            places.setdefault((position.step, str(position)), []).append(process)
    for (_, words), processes in sorted(places.items()):
        who = label(processes[0]) if len(processes) == 1 else f"processes {_listed([str(i) for i in processes])}"
        sentences.append(f"{who}: {words}")
    if len(places) == 1 and len(positions) > 1 and not silent:
        sentences.append("All are at the same place: look at the network between them, and at the slowest device")
    first = min(places)[0] if places else 0
    behind = [process for (step, _), processes in places.items() if step == first for process in processes]
    apart = [process for process, position in sorted(positions.items()) if position.own and process not in silent]
    suspects = silent or (behind if len({step for step, _ in places}) > 1 else apart)
    return ". ".join(sentences), suspects[0] if len(suspects) == 1 else None


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def heartbeat_alone(identity: Identity) -> Heartbeat:
    """For a run that has no other processes, or does not want to hear of them."""
    return Heartbeat(identity, {}, ExitHandler(identity.label), 0.0, 0.0)


def _packages_in(trace: TracebackType | None) -> Iterator[str]:
    while trace is not None:
        yield str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0]
        trace = trace.tb_next


@contextlib.contextmanager
def ending_on_exceptions_in_threads(heartbeat: Heartbeat) -> Iterator[None]:
    """Inside, an exception that nobody catches, in whatever thread, ends the process as one in the main thread does."""

    def raised(arguments: threading.ExceptHookArgs) -> None:
        threading.__excepthook__(arguments)
        error = arguments.exc_value
        if error is None or isinstance(error, SystemExit):
            return
        if heartbeat.may_fail & set(_packages_in(arguments.exc_traceback)):
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
