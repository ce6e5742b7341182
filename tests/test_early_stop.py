"""Starts that are asked to stop before their first step, or that wait in vain: exit code 75, and an event of it."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import events, until
from test_authentication import Roll

from jaxmnt.distributed import termination
from jaxmnt.distributed.identity import Identity
from jaxmnt.distributed.termination import ABANDONED, AbsentError, EarlyExit, ExitHandler, check_abandoned_starts
from jaxmnt.errors import ConfigError, PeerError
from jaxmnt.run import preemption
from jaxmnt.run.failed_start import FailedStartRecorder
from jaxmnt.run.preemption import StopRequest, seconds_left, stop_request

SLOW_IMPORT = """
import importlib.abc, pathlib, sys, time

class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "pydantic":
            sys.meta_path.remove(self)
            pathlib.Path({mark!r}).touch()
            time.sleep(2)

sys.meta_path.insert(0, Slow())
"""


@pytest.fixture
def started():
    """Starts jaxmnt commands; whatever still runs at the end is ended."""
    processes = []

    def start(*command, **environment):
        process = subprocess.Popen(
            [sys.executable, "-m", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=dict(os.environ, JAX_NUM_CPU_DEVICES="1", **environment),
        )  # fmt: skip
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("command", [["jaxmnt.train"], ["jaxmnt", "train"]])
def test_a_signal_while_python_imports_is_a_wish_to_stop(started, tiny_file, tmp_path, command):
    (tmp_path / "site").mkdir()
    mark = tmp_path / "mark"
    (tmp_path / "site" / "sitecustomize.py").write_text(SLOW_IMPORT.format(mark=str(mark)))
    path = os.pathsep.join(filter(None, [str(tmp_path / "site"), os.environ.get("PYTHONPATH")]))
    process = started(*command, "--config", str(tiny_file), PYTHONPATH=path)
    until(mark.exists)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert "SIGTERM: nothing to save before the first step: stopping" in err
    (event,) = events(tmp_path / "run", ABANDONED)
    assert [event[name] for name in ("reason", "asked_by", "code", "at_fault")] == ["stopped", "SIGTERM", 75, 0]
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("asked", [0, 1])
def test_a_signal_in_the_rendezvous_ends_the_start_for_all_who_are_here(started, tiny_file, tmp_path, asked):
    """Process 2 of 3 does not come. Nobody waits for it any longer, and nobody calls it a failure."""
    roll = Roll(processes=3)
    settings = [f"cluster.coordinator={roll.address}", "cluster.processes=3", "cluster.start_timeout_seconds=100"]
    processes = [
        started("jaxmnt.train", "--config", str(tiny_file), *settings, f"cluster.process_id={number}")
        for number in range(2)
    ]
    until(lambda: is_connected(roll.port), 60)
    time.sleep(0.3)
    began = time.monotonic()
    processes[asked].send_signal(signal.SIGTERM)
    outputs = [process.communicate(timeout=30)[1] for process in processes]
    assert [process.returncode for process in processes] == [75, 75], outputs
    assert time.monotonic() - began < 20
    for number, err in enumerate(outputs):
        assert f"process {asked} of 3 on" in err and "was asked to stop before the first step (SIGTERM)" in err, err
        assert "Traceback" not in err
        assert not re.search(rf"process {asked} of 3 .*process {asked} of 3 ", err), err
        (event,) = events(tmp_path / "run", ABANDONED, number)
        told = [event[name] for name in ("reason", "asked_by", "at_fault")]
        assert told == ["stopped", "SIGTERM" if number == asked else None, asked]


def is_connected(port):
    ends = [line.split()[1:4] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(here.endswith(f":{port:04X}") and state == "01" for here, _, state in ends)


# Parts of it, in one process.


class Noted(ExitHandler):
    """Notes the reason, and lets the thread go no further."""

    def __init__(self):
        super().__init__()
        self.exit_reasons = []

    def exit_now(self, exit_reason):
        self.exit_reasons.append(exit_reason)
        raise SystemExit


def test_before_the_first_step_a_wish_ends_the_process_and_after_it_it_waits(tmp_path):
    ended = []
    with StopRequest(tmp_path, lambda why: None, end_before_steps=ended.append) as request:
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: ended)
    assert ended == ["SIGTERM"]
    with StopRequest(tmp_path, lambda why: None, end_before_steps=ended.append) as request:
        request.begin_steps()
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: request.wanted)
        time.sleep(0.1)
    assert ended == ["SIGTERM"]


def test_a_stop_file_is_removed_when_it_ends_a_start(tmp_path, monkeypatch):
    monkeypatch.setattr(preemption, "_POLL_SECONDS", 0.01)
    (tmp_path / "STOP").touch()
    ended = []
    with StopRequest(tmp_path, lambda why: None, end_before_steps=ended.append):
        until(lambda: ended)
    assert ended == ["STOP"] and not (tmp_path / "STOP").exists()


def test_a_stop_file_that_cannot_be_removed_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(preemption, "_POLL_SECONDS", 0.01)
    (tmp_path / "STOP").mkdir()
    with StopRequest(tmp_path, lambda why: None) as request:
        until(lambda: request.wanted)
        request.mark_done()
    assert "STOP cannot be removed: Is a directory; the next start will stop at once" in capsys.readouterr().err


def test_a_stop_file_is_for_the_run_and_not_for_a_replay_of_it(tiny, monkeypatch):
    monkeypatch.setattr(preemption, "_POLL_SECONDS", 0.01)
    config = tiny()
    run = Path(config.run.dir)
    run.mkdir()
    (run / "STOP").touch()
    with stop_request(config, Identity(), lambda why: None, ignore_file=True) as request:
        time.sleep(0.1)
    assert not request.wanted and (run / "STOP").exists()


def test_no_step_begins_in_a_process_that_is_leaving(tmp_path):
    leaving, left = threading.Event(), threading.Event()

    def early(reason):
        leaving.set()
        time.sleep(0.3)
        left.set()

    with StopRequest(tmp_path, lambda why: None, end_before_steps=early) as request:
        os.kill(os.getpid(), signal.SIGTERM)
        assert leaving.wait(5)
        request.begin_steps()
        assert left.is_set()


@pytest.mark.parametrize("text", ["77x", "²", "1" * 400, "-5", "Unknown"])
def test_an_end_of_the_allocation_that_is_none(text):
    with pytest.raises(ConfigError, match=r"^SLURM_JOB_END_TIME: "):
        seconds_left(None, 60, {"SLURM_JOB_END_TIME": text})


def test_those_who_never_appeared_and_those_who_went_away_are_told_apart():
    """The first may come to another start; what became of the others is a failure."""
    start = Roll(processes=3)
    start.come(0, timeout=1.0)
    outcome = start.outcome(0)
    assert isinstance(outcome, AbsentError) and outcome.processes == [1, 2]
    start = Roll(processes=3)
    start.come(0, timeout=1.5)
    with start.stranger_with_the_key(1):
        time.sleep(0.3)
    start.come(2)
    for number in (0, 2):
        outcome = start.outcome(number)
        assert isinstance(outcome, PeerError) and not isinstance(outcome, AbsentError)
        assert "process 1 had connected and then disconnected" in str(outcome) and list(outcome.processes) == [1]


def test_a_process_0_that_never_answered_is_the_same_case(monkeypatch):
    for environment, coordinator in ((None, None), ("10.0.0.1", "nowhere.invalid:1234")):
        start = Roll(processes=2)
        if environment:  # a pod has a name only from when it is there
            monkeypatch.setenv("KUBERNETES_SERVICE_HOST", environment)
            start.address = coordinator
        outcome = start.come(1, timeout=0.3).outcome(1)
        assert isinstance(outcome, AbsentError) and list(outcome.processes) == [0], outcome


def peers(at):
    return {"kind": ABANDONED, "process": 0, "reason": "peers", "time": at}


DAY, NOW = 86400.0, 1e9
VAIN = [peers(NOW - DAY - 600 + 1800 * number) for number in range(49)]


@pytest.mark.parametrize(
    ("records", "for_ever"),
    [
        (VAIN, True),
        (VAIN[1:], False),
        ([*VAIN[:30], {"kind": "start", "time": VAIN[30]["time"]}, *VAIN[30:]], False),
        ([{"kind": "start", "time": NOW - 2 * DAY}, *VAIN], True),
        ([*VAIN[:2], VAIN[-1]], True),
        ([peers(NOW - 9 * DAY), peers(NOW - 100)], False),  # somebody started it again after a while
        ([peers(NOW - 9 * DAY)], False),
        ([{"kind": ABANDONED, "reason": "stopped", "time": NOW - DAY - 1}, peers(NOW - 60)], False),
        ([{"kind": ABANDONED, "reason": "peers", "time": "soon"}, {"kind": "x"}, {}], False),
        ([], False),
    ],
)
def test_waiting_in_vain_has_an_end(records, for_ever):
    error = AbsentError("process 1 of 2 did not connect").blaming(processes=[1])
    if not for_ever:
        check_abandoned_starts(records, error, NOW)
        return
    with pytest.raises(
        ConfigError, match=r"process 1 of 2 did not connect; since .* no start of this run has connected all"
    ):
        check_abandoned_starts(records, error, NOW)


def test_a_day_of_waiting_ends_with_exit_code_2(tiny):
    """And each of the waits before it with 75."""
    config = tiny()
    error = AbsentError("process 1 of 2 did not connect").blaming(processes=[1])
    exit_handler = Noted()
    with pytest.raises(SystemExit), FailedStartRecorder(config, Identity(0, 2, "h:1"), exit_handler):
        raise error
    (exit_reason,) = exit_handler.exit_reasons
    assert (exit_reason.kind, exit_reason.code, exit_reason.reason, exit_reason.process) == (ABANDONED, 75, "peers", 1)
    path = Path(config.run.dir) / "events" / "0.jsonl"
    path.parent.mkdir(parents=True)
    records = [record | {"time": record["time"] - NOW + time.time()} for record in VAIN]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    with (
        pytest.raises(ConfigError, match="no start of this run has connected all"),
        FailedStartRecorder(config, Identity(0, 2, "h:1"), Noted()),
    ):
        raise error
    assert events(config.run.dir, "start_failed")[0]["code"] == 2


def test_what_ends_a_process_before_it_has_met_the_others_is_noted(tiny):
    """Those who wait for it leave with 75: a launcher has to see that this start failed."""
    config = tiny()
    with pytest.raises(ImportError), FailedStartRecorder(config, Identity(0, 2, "h:1"), Noted()):
        raise ImportError("no such module")
    (event,) = events(config.run.dir, "failed")
    assert (event["code"], event["at_fault"], event["why"]) == (1, 0, "ImportError: no such module")


def test_leaving_gives_the_rendezvous_time_to_tell_the_others(monkeypatch):
    """What that raises ends the process then, and not the thread that heard the signal."""
    monkeypatch.setattr(termination, "_NOTIFY_TIMEOUT_SECONDS", 0.2)
    for raises in (True, False):
        exit_handler = Noted()
        early_exit = EarlyExit(Identity(1, 3, "h:1"), exit_handler)
        thread = threading.Thread(
            target=lambda early_exit=early_exit: ignoring(early_exit.exit_early, "SIGTERM"), daemon=True
        )
        with contextlib.suppress(PeerError), early_exit.during_rendezvous():
            thread.start()
            until(lambda early_exit=early_exit: early_exit.reason)
            assert not exit_handler.exit_reasons
            if raises:
                raise PeerError("")
            thread.join(5)
        thread.join(5)
        assert len(exit_handler.exit_reasons) == (0 if raises else 1)
    (exit_reason,) = exit_handler.exit_reasons
    assert exit_reason.why.startswith("process 1 of 3 on") and (exit_reason.reason, exit_reason.asked_by) == (
        "stopped",
        "SIGTERM",
    )


def ignoring(act, *arguments):
    with contextlib.suppress(SystemExit):
        act(*arguments)
