"""What processes conclude of each other's failures: detectors that send each other messages, without threads or clocks.

Also the messages themselves, and the connections that carry them.
"""

import json
import socket
from collections import deque
from dataclasses import asdict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxmnt.distributed.failure_detector import ConnectionLost, FailureDetector, describe_positions
from jaxmnt.distributed.heartbeat import Link
from jaxmnt.distributed.identity import Identity
from jaxmnt.distributed.json_socket import JsonSocket
from jaxmnt.distributed.messages import (
    STARTING,
    Beat,
    Bye,
    Failed,
    GaveUp,
    Halted,
    Here,
    Inquiry,
    Position,
    Stopped,
    Verdict,
    parse_message,
)
from jaxmnt.distributed.termination import (
    ABANDONED,
    AbandonedStart,
    ExitReason,
    StoppedError,
    code_for_peers,
    exit_reason_of,
)
from jaxmnt.errors import ExitCode

SILENCE, PATIENCE = 3.0, 6.0


class Process:
    """A process that does what its detector says, as a `Heartbeat` does. `state` is running, frozen, ending (by
    itself) or gone."""

    def __init__(self, number, count):
        peers = range(1, count) if number == 0 else [0]
        self.number, self.state, self.position = number, "running", STARTING
        self.ended: ExitReason | None = None
        self.links = {peer: deque() for peer in peers}
        """What arrives from each peer; None is the end of the connection."""
        hosts = {process: f"host{process}" for process in (number, *peers)}
        identity = Identity(number, count, "localhost:1")
        self.detector = FailureDetector(identity, hosts, SILENCE, PATIENCE, lambda: self.position)


class Cluster:
    def __init__(self, count=3):
        self.processes = [Process(number, count) for number in range(count)]

    def __getitem__(self, number) -> Process:
        return self.processes[number]

    def act(self, number, acts):
        """The process sends these messages, or ends."""
        process = self[number]
        for act in acts:
            if not isinstance(act, ExitReason):
                self.send(number, json.loads(json.dumps(asdict(act))))
            elif process.state == "running":
                process.ended = act
                self.close(number)
                return

    def send(self, number, record):
        for peer in self[number].links:
            if number in self[peer].links:
                self[peer].links[number].append(record)

    def close(self, number):
        self.send(number, None)
        self[number].state, self[number].links = "gone", {}

    def fail(self, number, exit_reason):
        """The process ends by itself."""
        self[number].state = "ending"
        self.act(number, self[number].detector.fail(exit_reason))
        self.close(number)

    def leave(self, number):
        self.send(number, asdict(Bye()))
        self.close(number)

    def receive(self, number, peer):
        """The process takes one message from the peer."""
        record = self[number].links[peer].popleft()
        event = ConnectionLost("disconnected") if record is None else parse_message(record)
        if isinstance(event, Bye | ConnectionLost):
            del self[number].links[peer]
        self.act(number, self[number].detector.on_event(peer, event))

    def waiting(self):
        """Who can receive a message from whom."""
        return [
            (process.number, peer)
            for process in self.processes
            if process.state == "running"
            for peer, messages in process.links.items()
            if messages
        ]

    def settle(self):
        """All messages arrive."""
        while waiting := self.waiting():
            self.receive(*waiting[0])

    def second(self):
        self.settle()
        for process in self.processes:
            if process.state == "running":
                self.send(process.number, asdict(Beat(process.position)))
                self.act(process.number, process.detector.beat())
        self.settle()

    def seconds(self, seconds):
        for _ in range(seconds):
            self.second()

    def ends(self):
        self.settle()
        return {process.number: process.ended for process in self.processes if process.ended is not None}


def failed(process, code=ExitCode.FAILURE):
    return ExitReason("failed", "ValueError: boom", code, process, f"host{process}")


def stopped(process):
    error = StoppedError("it was asked to stop before the first step (SIGTERM)", "SIGTERM").blaming(processes=[process])
    return exit_reason_of(error)


@pytest.mark.parametrize("culprit", range(3))
@pytest.mark.parametrize(("code", "others"), [(1, 4), (2, 2), (3, 3), (4, 4)])
def test_all_hear_who_failed_and_why(culprit, code, others):
    cluster = Cluster()
    cluster.fail(culprit, failed(culprit, ExitCode(code)))
    why = f"process {culprit} of 3 on host{culprit} failed: ValueError: boom"
    reason = ExitReason("peer_lost", why, ExitCode(others), culprit, f"host{culprit}", by_itself=True)
    assert cluster.ends() == {number: reason for number in range(3) if number != culprit}


@pytest.mark.parametrize("culprit", range(3))
def test_a_process_that_disconnects_is_lost_at_once(culprit):
    cluster = Cluster()
    cluster.close(culprit)
    why = f"process {culprit} of 3 on host{culprit} disconnected"
    reason = ExitReason("peer_lost", why, ExitCode.PEER, culprit, f"host{culprit}")
    assert cluster.ends() == {number: reason for number in range(3) if number != culprit}


def test_a_verdict_that_names_no_process_of_the_run_ends_it_all_the_same():
    process = Process(1, 3)
    for number, known in ((2, 2), (100_000, None)):
        reason = ExitReason("peer_lost", "why", ExitCode.PEER, number, "host2")
        (found,) = process.detector.on_event(0, Verdict(reason))
        assert (found.why, found.process, found.host) == ("why", known, known and "host2")


@pytest.mark.parametrize("settled", [False, True])
def test_silence_counts_less_before_the_first_step(settled):
    cluster = Cluster()
    limit = int(SILENCE if settled else PATIENCE)
    for number in (0, 1):
        cluster[number].position = Position(7, "taking steps", settled)
    cluster[2].state = "frozen"
    cluster.seconds(limit)
    assert not cluster.ends()
    cluster.second()
    ends = cluster.ends()
    assert {end.process for end in ends.values()} == {2} and ends.keys() == {0, 1}
    assert f"has been silent for {limit} s: it is stopped, or cut off from" in ends[0].why
    assert ends[0].why.endswith("last seen starting")


def test_a_process_that_hears_nothing_of_process_0_says_so():
    """Perhaps it is only this process that does not hear it: process 0 ends the others."""
    detector = FailureDetector(Identity(2, 3, "h:1"), {2: "host2", 0: "host0"}, 1.0, 1.0, lambda: STARTING)
    assert detector.beat() == []
    say, end = detector.beat()
    assert isinstance(say, GaveUp) and end.process == 0
    cluster = Cluster()
    cluster.act(2, [say, end])
    (why,) = {end.why for number, end in cluster.ends().items() if number != 2}
    assert why.startswith("process 0 of 3 on host0 was declared lost by process 2 of 3 on host2: has been silent")


@pytest.mark.parametrize("halted", range(3))
def test_a_halt_ends_with_the_position_of_every_process(halted):
    cluster = Cluster()
    for number in range(3):
        cluster[number].position = Position(42 if number == 1 else 43, "taking steps", settled=True)
    cluster.act(halted, cluster[halted].detector.halt("no progress for 45 s"))
    cluster.settle()
    assert not cluster.ends(), "until the next beat"
    cluster.second()
    ends = cluster.ends()
    assert ends.keys() == {0, 1, 2}
    for end in ends.values():
        assert (end.kind, end.code, end.process, end.host) == ("hang", 4, 1, "host1")
        assert f"process {halted} of 3 on host{halted}: no progress for 45 s. process 1 of 3 on host1: in" in end.why
        assert "processes 0, 2: in step 43" in end.why


def test_a_process_that_does_not_answer_an_inquiry_is_at_fault():
    cluster = Cluster()
    cluster[1].state = "frozen"
    cluster.act(2, cluster[2].detector.halt("no progress"))
    cluster.seconds(3)
    assert not cluster.ends(), "an answer has three seconds"
    cluster.second()
    for end in cluster.ends().values():
        assert end.process == 1 and "No answer from process 1 of 3 on host1" in end.why


def test_processes_that_leave_are_not_missed():
    cluster = Cluster()
    cluster.leave(1)
    cluster.seconds(20)
    assert not cluster.ends()
    cluster.leave(0)
    cluster.seconds(20)
    assert not cluster.ends()


@pytest.mark.parametrize("asked", range(3))
def test_processes_that_hear_of_an_early_stop_stop_as_well(asked):
    """With 75, and not with 4: no process has failed."""
    cluster = Cluster()
    exit_reason = stopped(asked)
    cluster.fail(asked, exit_reason)
    ends = cluster.ends()
    assert ends.keys() == set(range(3)) - {asked}
    for end in ends.values():
        assert isinstance(end, AbandonedStart) and (end.kind, end.code, end.process) == (ABANDONED, 75, asked)
        assert (end.reason, end.asked_by, end.why) == ("stopped", None, exit_reason.why)


def test_accounts():
    label = lambda process: f"p{process}"
    step = lambda number, **more: Position(number, "taking steps", settled=True, **more)
    same = {0: step(5), 1: step(5), 2: step(5)}
    text, suspect = describe_positions(same, [], label)
    assert suspect is None and "processes 0, 1, 2: in step 5" in text and "the network between them" in text
    assert describe_positions(same | {1: step(4)}, [], label)[1] == 1
    assert describe_positions(same | {1: step(4), 2: step(4)}, [], label)[1] is None, "two are behind"
    assert describe_positions(same | {2: step(5, own=True)}, [], label)[1] == 2
    text, suspect = describe_positions(same | {1: STARTING}, [2], label)
    assert suspect == 2 and text.startswith("No answer from p2. p1: starting")


class Faults(RuleBasedStateMachine):
    """Processes that fail in whatever order, while messages travel.

    A process ends only if another has a fault, names one with that fault, and each that can hear of it ends.
    """

    def __init__(self):
        super().__init__()
        self.cluster = Cluster(4)
        self.faults: dict[int, str] = {}

    def running(self):
        return [process.number for process in self.cluster.processes if process.state == "running"]

    @precondition(lambda self: self.running())
    @rule(
        data=st.data(),
        fault=st.sampled_from(["killed", "frozen", "failed", "stopped", "halted"]),
        code=st.integers(1, 4),
    )
    def a_process_has_a_fault(self, data, fault, code):
        number = data.draw(st.sampled_from(self.running()))
        self.faults[number] = fault
        if fault == "killed":
            self.cluster.close(number)
        elif fault == "frozen":
            self.cluster[number].state = "frozen"
        elif fault == "halted":
            self.cluster.act(number, self.cluster[number].detector.halt("no progress"))
        else:
            self.cluster.fail(number, failed(number, ExitCode(code)) if fault == "failed" else stopped(number))

    @precondition(lambda self: self.running())
    @rule(data=st.data(), step=st.integers(0, 3))
    def a_process_takes_a_step(self, data, step):
        number = data.draw(st.sampled_from(self.running()))
        self.cluster[number].position = Position(step, "taking steps", settled=step > 0)

    @precondition(lambda self: self.cluster.waiting())
    @rule(data=st.data())
    def a_message_arrives(self, data):
        self.cluster.receive(*data.draw(st.sampled_from(self.cluster.waiting())))

    @precondition(lambda self: [number for number in self.running() if number and number not in self.faults])
    @rule(data=st.data())
    def a_process_leaves(self, data):
        """Not process 0, by which the others hear of each other."""
        staying = [number for number in self.running() if number and number not in self.faults]
        self.cluster.leave(data.draw(st.sampled_from(staying)))

    @rule()
    def a_second_passes(self):
        self.cluster.second()

    @invariant()
    def an_end_names_a_process_with_a_fault(self):
        for process in self.cluster.processes:
            if (end := process.ended) is None:
                continue
            assert self.faults, "nothing was wrong"
            fault = self.faults.get(end.process)
            if end.kind == "hang":
                assert "halted" in self.faults.values() and end.code == ExitCode.PEER
            elif end.kind == ABANDONED:
                assert fault == "stopped" and end.code == ExitCode.STOPPED
            else:
                assert end.kind == "peer_lost" and fault is not None
                assert end.by_itself == ("failed: " in end.why) and (not end.by_itself or fault == "failed")
                assert end.code == code_for_peers(end.code)

    def teardown(self):
        self.cluster.seconds(int(PATIENCE) + 5)
        if self.faults:
            assert not self.running(), "these do not hear of it"


Faults.TestCase.settings = settings(max_examples=150, stateful_step_count=20)
TestFaults = Faults.TestCase


# Messages and connections.

POSITION = {"step": 7, "phase": "taking steps", "settled": True, "own": False}
REASON = {"kind": "peer_lost", "why": "x", "code": 4, "process": 1, "host": "n2", "by_itself": True}
MORE = {"kind": ABANDONED, "code": 75, "reason": "stopped", "asked_by": None, "waited_seconds": 1.5}
AT = Position(7, "taking steps", settled=True)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"kind": "beat", "position": POSITION, "report": [1]}, Beat(AT, [1])),
        ({"kind": "failed", "why": "x", "code": 2}, Failed("x", ExitCode.CONFIG)),
        ({"kind": "stopped", "why": "x", "code": 75}, Stopped("x")),
        ({"kind": "halted", "why": "x"}, Halted("x")),
        ({"kind": "inquiry"}, Inquiry()),
        ({"kind": "here", "position": POSITION}, Here(AT)),
        ({"kind": "gave_up", "why": "x"}, GaveUp("x")),
        ({"kind": "verdict", "exit_reason": REASON}, Verdict(ExitReason(**REASON))),
        ({"kind": "verdict", "exit_reason": REASON | MORE}, Verdict(AbandonedStart(**REASON | MORE))),
        ({"kind": "bye"}, Bye()),
    ],
)
def test_a_message_is_this_json(record, message):
    assert json.loads(json.dumps(asdict(message))) == record
    assert parse_message(record) == message


def test_a_message_may_lack_what_has_a_default():
    assert parse_message({"kind": "beat", "position": {"step": 0, "phase": "starting"}}) == Beat(STARTING)
    assert parse_message({"kind": "stopped", "why": "x", "stopping": "SIGTERM"}) == Stopped("x")
    assert parse_message({"kind": "failed", "why": "a\x1bb\nc"}) == Failed("a\\x1bb\nc", ExitCode.PEER)


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
def test_a_message_that_makes_no_sense_is_the_last_of_its_process(line):
    """What precedes it counts, and the end of the connection has a name of its own."""
    here, there = socket.socketpair()
    link = Link({1: JsonSocket(here)})
    there.sendall(b'{"kind": "inquiry"}\n' + line + b"\n")
    events = list(link.receive(0))
    while len(events) < 2:
        events += link.receive(1)
    assert events[0] == (1, Inquiry()) and events[1][0] == 1 and "does not know; run the same" in events[1][1].why
    there.close()
    while link.connections:
        events = list(link.receive(1))
    assert "disconnected without a message" in events[-1][1].why


def test_what_comes_with_the_end_of_the_rendezvous_is_heard():
    """Process 0's first words may arrive together with its answer."""
    here, there = socket.socketpair()
    answer, words = {"error": None}, {"kind": "failed", "why": "boom", "code": 1}
    there.sendall("".join(json.dumps(line) + "\n" for line in (answer, words)).encode())
    connection = JsonSocket(here)
    assert connection.receive_one(1) == answer
    assert list(Link({0: connection}).receive(60)) == [(0, Failed("boom", ExitCode.FAILURE))]


def test_a_connection_that_ends_after_good_bye_is_no_loss():
    (here, there), (mine, other) = socket.socketpair(), socket.socketpair()
    link = Link({1: JsonSocket(here), 2: JsonSocket(mine)})
    there.sendall(b'{"kind": "bye"}\n{"kind": "bye"}\n{"kind": "here"}\n')
    there.close()
    assert [event for _ in range(3) for event in link.receive(0.01)] == [(1, Bye())]
    link.send(Inquiry())
    assert json.loads(other.recv(100)) == {"kind": "inquiry"}
    link.wake()
    assert list(link.receive(60)) == []
