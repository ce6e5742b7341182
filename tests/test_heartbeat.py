"""The processes hear of each other's failures: heartbeats over real connections, in threads of one process."""

import contextlib
import json
import socket
import threading
import time
from pathlib import Path

import jax
import pytest
from conftest import events, until

from jaxmnt.config.monitoring import Watchdog as Limits
from jaxmnt.distributed import rendezvous
from jaxmnt.distributed.heartbeat import STARTING, Heartbeat, Position, account_of, ending_on_exceptions_in_threads
from jaxmnt.distributed.identity import Identity
from jaxmnt.distributed.json_socket import JsonSocket
from jaxmnt.distributed.process_group import telling
from jaxmnt.distributed.rendezvous import Peer
from jaxmnt.distributed.termination import ExitHandler, ExitReason, StoppedError, exit_reason_of
from jaxmnt.run.failed_start import FailedStartRecorder
from jaxmnt.run.watchdog import Watchdog

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

    def __init__(self, silence=30.0, patience=60.0):
        pairs = {process: socket.socketpair() for process in range(1, COUNT)}
        self.exit_handlers = [Noted() for _ in range(COUNT)]
        identity = lambda process: Identity(process, COUNT, "localhost:1")
        first = {process: Peer(f"host{process}", JsonSocket(pair[0])) for process, pair in pairs.items()}
        make = lambda process, peers: Heartbeat(
            identity(process), peers, self.exit_handlers[process], silence, patience
        )
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
def cluster():
    with contextlib.ExitStack() as scope:

        def make(**limits):
            made = Cluster(**limits)
            scope.callback(made.close)
            return made

        yield make


@pytest.mark.parametrize("culprit", range(COUNT))
@pytest.mark.parametrize(("code", "others"), [(1, 4), (2, 2), (3, 3), (4, 4)])
def test_all_hear_who_failed_and_why(cluster, culprit, code, others):
    made = cluster().start()
    began = time.monotonic()
    exit_reason = made.heartbeats[culprit].fail("ValueError: boom", code)
    assert (exit_reason.kind, exit_reason.process, exit_reason.code) == ("failed", culprit, code)
    for heard in made.exit_reasons(*(process for process in range(COUNT) if process != culprit)):
        assert (heard.kind, heard.process, heard.code) == ("peer_lost", culprit, others)
        assert heard.why.endswith("failed: ValueError: boom") and f"process {culprit} of 3 on" in heard.why
    assert time.monotonic() - began < 8, "silence would take much longer"
    assert not made.exit_handlers[culprit].exit_reasons, "it ends by itself, with its own code"


@pytest.mark.parametrize("culprit", [1, 2])
def test_one_who_goes_without_a_word_is_missed_at_once(cluster, culprit):
    made = cluster().start(culprit)
    made.sockets[culprit].close()
    others = [process for process in range(COUNT) if process != culprit]
    for heard in made.exit_reasons(*others):
        assert heard.process == culprit and "disconnected without a message" in heard.why and heard.code == 4


@pytest.mark.parametrize("kind", [ValueError, jax.errors.JaxRuntimeError])
def test_what_jax_says_of_a_lost_peer_ends_with_the_name_of_who_is_gone(cluster, kind):
    """JAX's error is faster than the connection's end, and has no name: it waits for one."""
    made = cluster().start(1)

    def step():
        with telling(made.heartbeats[0]):
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
    for connection in made.heartbeats[0]._connections.values():
        connection.close()
    for heard in made.exit_reasons(1, 2):
        assert heard.process == 0 and "process 0 of 3 on host0 disconnected without a message" in heard.why


@pytest.mark.slow
def test_silence_counts_less_before_the_first_step(cluster):
    """Process 2 is there, but says nothing, as one that is stopped."""
    made = cluster(silence=4.0, patience=60.0)
    settled = threading.Event()
    for heartbeat in made.heartbeats:
        heartbeat.position = lambda: Position(7, "taking steps", settled=settled.is_set())
    made.start(2)
    time.sleep(6)
    assert not any(exit_handler.exit_reasons for exit_handler in made.exit_handlers)
    settled.set()
    for heard in made.exit_reasons(0, 1):
        assert heard.process == 2 and "has been silent for 4 s" in heard.why
    assert "last seen starting" in made.exit_handlers[0].exit_reasons[0].why


def test_reports_travel_with_the_beats(cluster):
    """Also those that come before somebody wants to hear them."""
    made, heard = cluster().start(), []
    for process in (1, 2):
        reports = iter([[process, "early"], [process, "late"]])
        made.heartbeats[process].report = lambda reports=reports: next(reports, [])
    until(lambda: len(made.heartbeats[0]._reports) >= 2)
    made.heartbeats[0].hear_reports(lambda process, report: heard.append((process, report)))
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


def test_one_who_does_not_answer_is_at_fault(cluster):
    made = cluster().start(1)
    threading.Thread(target=made.heartbeats[0].halt, args=("no progress",), daemon=True).start()
    for heard in made.exit_reasons(0, 2):
        assert heard.process == 1 and "No answer from process 1 of 3 on host1" in heard.why


def test_those_who_say_good_bye_are_not_missed(cluster):
    made = cluster().start()
    made.heartbeats[1].leave()
    made.sockets[1].close()
    time.sleep(1.5)
    assert not any(exit_handler.exit_reasons for exit_handler in made.exit_handlers)


@pytest.mark.parametrize("asked", [0, 2])
def test_those_who_hear_of_an_early_stop_stop_as_well(cluster, asked):
    """With 75, and not with 4: nobody has failed."""
    made = cluster().start()
    error = StoppedError("it was asked to stop before the first step (SIGTERM)", "SIGTERM").blaming(processes=[asked])
    made.heartbeats[asked].stop_early(exit_reason_of(error))
    for heard in made.exit_reasons(*(process for process in range(COUNT) if process != asked)):
        assert (heard.kind, heard.code, heard.process) == ("start_abandoned", 75, asked)
        assert (heard.reason, heard.asked_by, heard.why) == ("stopped", None, str(error))
    assert not made.exit_handlers[asked].exit_reasons, "it ends by itself"


def test_a_stop_that_comes_as_the_rendezvous_ends_is_heard_by_the_heartbeat(cluster):
    """Process 0 has ended the rendezvous, and process 1 is still in it when it is asked to stop."""
    made = cluster()
    caller = rendezvous._Client(Identity(1, COUNT, "localhost:1"), {}, b"", lambda: "SIGTERM")
    with pytest.raises(StoppedError, match=r"\(SIGTERM\)"):
        caller._outcome(JsonSocket(made.sockets[1]), time.monotonic() + 5)
    made.start(1)
    for heard in made.exit_reasons(0, 2):
        assert (heard.kind, heard.code, heard.process) == ("start_abandoned", 75, 1)


@pytest.mark.parametrize(
    "line",
    [
        b"[1]",
        b'{"kind": "beat", "position": {"x": 1}}',
        b'{"kind": "verdict", "exit_reason": {"kind": "failed"}}',
        b'{"kind": "verdict", "exit_reason": 3}',
        b'{"kind": "failed", "why": "x", "code": 77}',
        b'{"no": "kind"}',
        b"[" * 100_000,
    ],
)
def test_a_peer_that_makes_no_sense_is_a_lost_one(cluster, line):
    """Its words end no thread that listens."""
    made = cluster().start(2)
    made.sockets[2].sendall(line + b"\n")
    for heard in made.exit_reasons(0, 1):
        assert (heard.kind, heard.code, heard.process) == ("peer_lost", 4, 2)


def test_accounts():
    label = lambda process: f"p{process}"
    step = lambda number, **more: Position(number, "taking steps", settled=True, **more)
    same = {0: step(5), 1: step(5), 2: step(5)}
    text, suspect = account_of(same, [], label)
    assert suspect is None and "processes 0, 1, 2: in step 5" in text and "the network between them" in text
    assert account_of(same | {1: step(4)}, [], label)[1] == 1
    assert account_of(same | {1: step(4), 2: step(4)}, [], label)[1] is None, "two are behind"
    assert account_of(same | {2: step(5, own=True)}, [], label)[1] == 2
    text, suspect = account_of(same | {1: STARTING}, [2], label)
    assert suspect == 2 and text.startswith("No answer from p2. p1: starting")


def test_a_json_socket_takes_lines_apart_and_knows_the_end():
    one, other = socket.socketpair()
    connection = JsonSocket(other)
    assert connection.receive() == []
    one.sendall(b'{"kind": "a"}\n{"kind"')
    assert connection.receive() == [{"kind": "a"}]
    one.sendall(b': "b"}\n{"kind": "c"}\n{"kind": "d"}\n')
    assert connection.receive_one(1) == {"kind": "b"} and connection.has_messages
    assert connection.receive() == [{"kind": "c"}, {"kind": "d"}] and not connection.is_over()
    one.sendall(b'{"kind": "e"}\nGET / HTTP/1.1\n')
    assert connection.receive() == [{"kind": "e"}] and connection.has_messages, "what precedes nonsense is heard"
    with pytest.raises(ValueError):
        connection.receive()
    one.close()
    assert connection.is_over()
    with pytest.raises(ConnectionError):
        connection.receive()
    with pytest.raises(ConnectionError):
        connection.send({"kind": "beat"})
    connection.close()


def test_what_comes_with_the_end_of_the_rendezvous_is_heard(cluster):
    """Process 0's first words may arrive together with its answer."""
    made = cluster()
    answer, words = {"error": None}, {"kind": "failed", "why": "boom", "code": 1}
    made.sockets[1].sendall("".join(json.dumps(line) + "\n" for line in (answer, words)).encode())
    assert made.heartbeats[0]._connections[1].receive_one(1) == answer
    made.start(1)
    (heard,) = made.exit_reasons(0)
    assert heard.process == 1 and "failed: boom" in heard.why


# The watchdog.


class Halts:
    """Stands for a heartbeat, and notes what is said of a halt."""

    def __init__(self):
        self.said = []

    def halt(self, why):
        self.said.append(why)


@pytest.fixture
def watchdog(tmp_path, monkeypatch):
    """One that looks a hundred times a second, each time as if a second were over."""
    monkeypatch.setattr(Watchdog, "_pause", lambda self: self._end.wait(0.01))
    with contextlib.ExitStack() as scope:

        def make(**limits):
            heartbeat = Halts()
            made = Watchdog(Limits(**limits), tmp_path, 3, heartbeat)
            scope.enter_context(made)
            return made, heartbeat

        yield make


def test_each_phase_has_its_own_limit(watchdog):
    made, heartbeat = watchdog(step_seconds=10.0, factor=10.0, first_step_seconds=100.0)
    with made.during("compiling", None):
        time.sleep(0.5)
    made.steps_begin(1)
    time.sleep(0.4)
    for _ in range(3):
        made.finished_step(4.0)
    time.sleep(0.25)  # 25 looks, and ten times the median step are 40 seconds
    with made.during("evaluating", 60.0):
        time.sleep(0.4)
    assert not heartbeat.said
    until(lambda: heartbeat.said)
    assert heartbeat.said[0].startswith("no progress for 40 s while taking steps")


def test_a_phase_that_gets_further_is_alive_and_one_that_does_not_is_named(watchdog, tmp_path):
    made, heartbeat = watchdog()
    with made.during("evaluating", 20.0):
        for _ in range(6):
            time.sleep(0.1)
            made.got_further()
        assert not heartbeat.said
        until(lambda: heartbeat.said)
    assert heartbeat.said[0].startswith("no progress for 20 s while evaluating")
    assert "test_a_phase" not in str(heartbeat.position()), "only our own code says where it is"
    heartbeat.note_stacks()
    assert "test_a_phase_that_gets_further" in (tmp_path / "hangs" / "3.txt").read_text()


def test_the_main_thread_is_among_the_stacks_of_many(watchdog, tmp_path):
    """Python's own list of stacks ends after 100 threads, the newest first."""
    _, heartbeat = watchdog()
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
    made, heartbeat = watchdog(step_seconds=None, first_step_seconds=None)
    made.steps_begin(1)
    time.sleep(0.1)
    made.finished_step(1.0)
    time.sleep(0.5)
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
        self._run_hooks(exit_reason, told=True)
