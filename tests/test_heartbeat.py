"""The processes hear of each other's failures: heartbeats over real connections, in threads of one process."""

import contextlib
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from conftest import events, until

from jaxmnt.config.schema import Watchdog as Limits
from jaxmnt.distributed import rendezvous
from jaxmnt.distributed.heartbeat import Heartbeat, Link, ending_on_exceptions_in_threads
from jaxmnt.distributed.identity import Identity
from jaxmnt.distributed.json_socket import MAX_LINE_BYTES, JsonSocket
from jaxmnt.distributed.messages import Beat, Bye, Position, Verdict
from jaxmnt.distributed.process_group import reporting_failures
from jaxmnt.distributed.rendezvous import Peer
from jaxmnt.distributed.termination import ExitHandler, ExitReason, StoppedError
from jaxmnt.errors import ExitCode
from jaxmnt.run.failed_start import FailedStartRecorder
from jaxmnt.run.watchdog import _POLL_SECONDS, Watchdog

COUNT = 3


class Noted(ExitHandler):
    """Notes the reason, and lets the thread go no further."""

    def __init__(self):
        super().__init__()
        self.exit_reasons = []
        self.ended = threading.Event()

    def exit_now(self, exit_reason):
        self.exit_reasons.append(exit_reason)
        self.ended.set()
        threading.Event().wait()


class Cluster:
    """Three heartbeats that hear each other."""

    def __init__(self):
        pairs = {process: socket.socketpair() for process in range(1, COUNT)}
        self.exit_handlers = [Noted() for _ in range(COUNT)]
        identity = lambda process: Identity(process, COUNT, "localhost:1")
        first = {process: Peer(f"host{process}", JsonSocket(pair[0])) for process, pair in pairs.items()}
        make = lambda process, peers: Heartbeat(identity(process), peers, self.exit_handlers[process], 900.0, 900.0)
        self.heartbeats = [make(0, first)]
        self.heartbeats += [make(process, {0: Peer("host0", JsonSocket(pair[1]))}) for process, pair in pairs.items()]
        self.sockets = {process: pair[1] for process, pair in pairs.items()}

    def start(self, *but):
        for process, heartbeat in enumerate(self.heartbeats):
            if process not in but:
                heartbeat.start()
        return self

    def exit_reasons(self, *processes, seconds=8.0):
        """What became of these processes."""
        deadline = time.monotonic() + seconds
        for process in processes:
            assert self.exit_handlers[process].ended.wait(max(0.0, deadline - time.monotonic())), f"{process} goes on"
        return [self.exit_handlers[process].exit_reasons[0] for process in processes]

    def close(self):
        for heartbeat, exit_handler in zip(self.heartbeats, self.exit_handlers, strict=True):
            if not exit_handler.exit_reasons:
                heartbeat.leave()


@pytest.fixture
def cluster(monkeypatch):
    """Makes clusters whose beats follow each other twenty times as fast."""
    monkeypatch.setattr("jaxmnt.distributed.heartbeat.BEAT_SECONDS", 0.05)
    monkeypatch.setattr("jaxmnt.distributed.heartbeat._DRAIN_TIMEOUT_SECONDS", 0.05)
    with contextlib.ExitStack() as scope:

        def make():
            made = Cluster()
            scope.callback(made.close)
            return made

        yield make


@pytest.mark.parametrize("culprit", [0, 2])
def test_all_hear_who_failed_and_why(cluster, culprit):
    made = cluster().start()
    exit_reason = made.heartbeats[culprit].fail("ValueError: boom", ExitCode.CONFIG)
    assert (exit_reason.kind, exit_reason.process, exit_reason.code) == ("failed", culprit, 2)
    for heard in made.exit_reasons(*(process for process in range(COUNT) if process != culprit)):
        assert (heard.kind, heard.process, heard.code) == ("peer_lost", culprit, 2)
        assert heard.why.endswith("failed: ValueError: boom") and f"process {culprit} of 3 on" in heard.why
    assert not made.exit_handlers[culprit].exit_reasons, "it ends by itself, with its own code"


def test_one_who_goes_without_a_word_is_missed_at_once(cluster):
    made = cluster().start(1)
    made.sockets[1].close()
    for heard in made.exit_reasons(0, 2):
        assert heard.process == 1 and "disconnected without a message" in heard.why and heard.code == 4


@pytest.mark.parametrize("kind", [ValueError, jax.errors.JaxRuntimeError])
def test_what_jax_says_of_a_lost_peer_ends_with_the_name_of_who_is_gone(cluster, kind):
    """JAX's error is faster than the connection's end, and has no name: it waits for one."""
    made = cluster().start(1)

    def step():
        with reporting_failures(made.heartbeats[0]):
            raise kind("UNKNOWN: Gloo AllGather failed: Connection closed by peer [127.0.0.1]:22218")

    threading.Thread(target=step, daemon=True).start()
    threading.Timer(0.5, made.sockets[1].close).start()
    for heard in made.exit_reasons(0, 2):
        assert heard.kind == "peer_lost" and heard.process == 1 and "disconnected without a message" in heard.why


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_exception_in_a_thread_ends_the_run_it_is_in_and_nothing_later(cluster):
    def fail():
        raise ValueError("boom")

    made, before = cluster().start(), threading.excepthook
    with ending_on_exceptions_in_threads(made.heartbeats[1]):
        threading.Thread(target=fail, name="reader", daemon=True).start()
        for heard in made.exit_reasons(0, 2):
            assert heard.process == 1 and heard.why.endswith("failed: ValueError: boom (in thread 'reader')")
    assert threading.excepthook is before


def test_process_0_is_missed_by_all(cluster):
    made = cluster().start(0)
    for connection in made.heartbeats[0]._link.connections.values():
        connection.close()
    for heard in made.exit_reasons(1, 2):
        assert heard.process == 0 and "process 0 of 3 on host0 disconnected without a message" in heard.why


def test_reports_travel_with_the_beats(cluster):
    """Also those that come before somebody wants to hear them."""
    made, heard = cluster().start(), []
    for process in (1, 2):
        reports = iter([[process, "early"], [process, "late"]])
        made.heartbeats[process].report = lambda reports=reports: next(reports, [])
    until(lambda: len(made.heartbeats[0]._reports) >= 2)
    made.heartbeats[0].take_report = lambda process, report: heard.append((process, report))
    until(lambda: len(heard) == 4)
    assert [report for process, report in heard if process == 2] == [[2, "early"], [2, "late"]]


def test_a_halt_is_told_with_everyones_place(cluster):
    made = cluster().start()
    noted = []
    for process, heartbeat in enumerate(made.heartbeats):
        step = 42 if process == 1 else 43
        heartbeat.position = lambda step=step: Position(step, "taking steps", settled=True)
        heartbeat.note_stacks = lambda process=process: noted.append(process)
    threading.Thread(target=made.heartbeats[2].halt, args=("no progress for 45 s",), daemon=True).start()
    for heard in made.exit_reasons(0, 1, 2):
        assert (heard.kind, heard.code, heard.process) == ("hang", 4, 1)
        assert "process 2 of 3 on host2: no progress for 45 s" in heard.why
        assert "process 1 of 3 on host1: in step 42" in heard.why and "processes 0, 2: in step 43" in heard.why
    assert sorted(noted) == [0, 1, 2], "all wrote their stacks, once"


def test_a_stop_that_comes_as_the_rendezvous_ends_is_heard_by_the_heartbeat(cluster):
    """Process 0 has ended the rendezvous, and process 1 is still in it when it is asked to stop."""
    made = cluster()
    caller = rendezvous._Client(Identity(1, COUNT, "localhost:1"), {}, b"", lambda: "SIGTERM")
    with pytest.raises(StoppedError, match=r"\(SIGTERM\)"):
        caller._outcome(JsonSocket(made.sockets[1]), time.monotonic() + 5)
    made.start(1)
    for heard in made.exit_reasons(0, 2):
        assert (heard.kind, heard.code, heard.process) == ("start_abandoned", 75, 1)


def test_a_json_socket_takes_lines_apart_and_knows_the_end():
    one, other = socket.socketpair()
    connection = JsonSocket(other)
    assert connection.receive() == []
    one.sendall(b'{"kind": "a"}\n{"kind"')
    assert connection.receive() == [{"kind": "a"}]
    one.sendall(b': "b"}\n{"kind": "c"}\n{"kind": "d"}\n')
    assert connection.receive_one(1) == {"kind": "b"} and connection.has_messages
    assert connection.receive() == [{"kind": "c"}, {"kind": "d"}] and not connection.is_closed()
    one.sendall(b'{"kind": "e"}\nGET / HTTP/1.1\n')
    assert connection.receive() == [{"kind": "e"}] and connection.has_messages, "what precedes nonsense is heard"
    with pytest.raises(ValueError):
        connection.receive()
    one.close()
    assert connection.is_closed()
    with pytest.raises(ConnectionError):
        connection.receive()
    with pytest.raises(ConnectionError):
        connection.send({"kind": "beat"})
    connection.close()


def test_a_peer_that_reads_nothing_delays_no_other(monkeypatch):
    """Its buffers are full: beats are left out for it, a verdict waits a second for all together. Once it reads again,
    it gets whole lines."""
    pairs = {process: socket.socketpair() for process in range(1, 6)}
    for ours, theirs in pairs.values():
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    link = Link({process: JsonSocket(ours) for process, (ours, _) in pairs.items()})
    readers = {process: JsonSocket(pairs[process][1]) for process in (1, 2)}
    heard = dict.fromkeys(readers, 0)
    waits: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(waits), sleep=waits.append)
    monkeypatch.setattr("jaxmnt.distributed.heartbeat.time", clock)
    for step in range(2000):
        link.send(Beat(Position(step, "x" * 100)))
        for process, reader in readers.items():
            heard[process] += len(reader.receive())
    assert heard == {1: 2000, 2: 2000} and not waits, "three others read nothing"
    link.send(Verdict(ExitReason("peer_lost", "process 9 is gone", ExitCode.PEER)))
    assert sum(waits) == pytest.approx(1.0, abs=0.02)
    late, messages = JsonSocket(pairs[3][1]), []
    until(lambda: messages.extend(late.receive()) or link.send(Bye()) or messages[-1:] == [{"kind": "bye"}])
    assert {message["kind"] for message in messages} == {"beat", "verdict", "bye"}
    assert [message["position"]["step"] for message in messages if message["kind"] == "beat"][:3] == [0, 1, 2]


def test_what_ends_a_process_is_handled_before_reports(cluster, monkeypatch):
    """Reports that take long do not keep a failure from being told."""
    monkeypatch.setattr("jaxmnt.distributed.heartbeat._MAX_REPORT_SECONDS", 0.01)
    made = cluster().start()
    made.heartbeats[0].take_report = lambda process, report: time.sleep(0.05)
    made.heartbeats[0]._reports.extend((1, [number]) for number in range(2000))
    until(lambda: len(made.heartbeats[0]._reports) < 2000)
    made.heartbeats[2].fail("ValueError: boom", ExitCode.FAILURE)
    made.exit_reasons(0, 1)
    assert made.heartbeats[0]._reports, "they would take 100 s"


def test_long_lines_of_one_process_delay_no_verdict(cluster):
    """As long as a line may be, at every beat."""
    made, heard = cluster().start(), []
    made.heartbeats[1].report = lambda: ["x" * (MAX_LINE_BYTES - 1000)]
    made.heartbeats[0].take_report = lambda process, report: heard.append(process)
    until(lambda: len(heard) > 3)
    made.heartbeats[2].fail("ValueError: boom", ExitCode.FAILURE)
    made.exit_reasons(0, 1)


def test_five_hundred_that_vanish_at_once_are_one_verdict(cluster):
    pairs = {process: socket.socketpair() for process in range(1, 501)}
    exit_handler = Noted()
    peers = {process: Peer(f"host{process}", JsonSocket(pair[0])) for process, pair in pairs.items()}
    heartbeat = Heartbeat(Identity(0, 501, "localhost:1"), peers, exit_handler, 900.0, 900.0)
    heartbeat.start()
    for _, theirs in pairs.values():
        theirs.close()
    assert exit_handler.ended.wait(10)
    assert "disconnected without a message" in exit_handler.exit_reasons[0].why


# The watchdog.


class Halts:
    """Stands for a heartbeat, and notes what is said of a halt."""

    def __init__(self):
        self.said = []

    def halt(self, why):
        self.said.append(why)


class Looks:
    """Lets a watchdog look for as many seconds as a test says, without waiting for them."""

    def __init__(self):
        self._asked, self._idle = threading.Semaphore(0), threading.Semaphore(0)

    def pause(self, watchdog):
        """Stands for `Watchdog._pause`."""
        self._idle.release()
        while not self._asked.acquire(timeout=0.01):
            if watchdog._end.is_set():
                return True
        return False

    def __call__(self, seconds):
        for _ in range(round(seconds / _POLL_SECONDS)):
            assert self._idle.acquire(timeout=10)
            self._asked.release()
        assert self._idle.acquire(timeout=10)
        self._idle.release()


@pytest.fixture
def watchdog(tmp_path, monkeypatch):
    with contextlib.ExitStack() as scope:

        def make(**limits):
            heartbeat, looks = Halts(), Looks()
            monkeypatch.setattr(Watchdog, "_pause", lambda self: looks.pause(self))
            made = Watchdog(Limits(**limits), tmp_path, 3, heartbeat)
            scope.enter_context(made)
            return made, heartbeat, looks

        yield make


def test_each_phase_has_its_own_limit(watchdog):
    made, heartbeat, pass_seconds = watchdog(step_seconds=10.0, factor=10.0, first_step_seconds=100.0)
    with made.during("compiling", None):
        pass_seconds(500)
    made.begin_steps(1)
    pass_seconds(100)
    for _ in range(3):
        made.finished_step(4.0)
    pass_seconds(40)  # ten times the median step
    with made.during("evaluating", 60.0):
        pass_seconds(60)
    pass_seconds(40)
    assert not heartbeat.said
    pass_seconds(1)
    assert heartbeat.said[0].startswith("no progress for 40 s while taking steps")


def test_a_phase_that_gets_further_is_alive_and_one_that_does_not_is_named(watchdog, tmp_path):
    made, heartbeat, pass_seconds = watchdog()
    with made.during("evaluating", 20.0):
        for _ in range(6):
            pass_seconds(20)
            made.note_progress()
        assert not heartbeat.said
        pass_seconds(21)
    assert heartbeat.said[0].startswith("no progress for 20 s while evaluating")
    assert "test_a_phase" not in str(heartbeat.position()), "only our own code says where it is"
    heartbeat.note_stacks()
    assert "test_a_phase_that_gets_further" in (tmp_path / "hangs" / "3.txt").read_text()


def test_the_main_thread_is_among_the_stacks_of_many(watchdog, tmp_path):
    """Python's own list of stacks ends after 100 threads, the newest first."""
    _, heartbeat, _ = watchdog()
    end = threading.Event()
    idle = [threading.Thread(target=end.wait) for _ in range(110)]
    for thread in idle:
        thread.start()
    try:
        heartbeat.note_stacks()
        text = (tmp_path / "hangs" / "3.txt").read_text()
        assert text.count("test_the_main_thread_is_among") == 1, "by its own list alone"
    finally:
        end.set()
        for thread in idle:
            thread.join()


def test_the_watchdog_can_be_turned_off(watchdog):
    made, heartbeat, pass_seconds = watchdog(step_seconds=None, first_step_seconds=None)
    made.begin_steps(1)
    pass_seconds(100)
    made.finished_step(1.0)
    pass_seconds(500)
    assert not heartbeat.said


@pytest.mark.parametrize(("has_opened", "code", "noted"), [(False, 4, True), (True, 4, False), (False, 2, False)])
def test_an_end_before_the_run_is_open_is_noted(tiny, has_opened, code, noted):
    """From then on the run has its own events, and a wrong config is nobody's fault."""
    config, exit_handler = tiny(), Acting()
    with FailedStartRecorder(config, Identity(), exit_handler) as notes:
        if has_opened:
            notes.run_opened()
        exit_handler.act(ExitReason("peer_lost", "process 1 of 2 on n2 went away", code, 1, "n2"))
    if noted:
        assert [event["at_fault_host"] for event in events(config.run.dir, "peer_lost")] == ["n2"]
    else:
        assert not (Path(config.run.dir) / "events").exists()


class Acting(ExitHandler):
    def act(self, exit_reason):
        self._run_hooks(exit_reason, is_reported=True)
