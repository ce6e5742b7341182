"""Runs of several real processes on this machine: the same numbers, and failures with a name."""

import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import child_of, command, events, launch, losses, metrics

from jaxmnt.checkpoint.arrays import Reader
from jaxmnt.checkpoint.commit import newest_valid, valid_checkpoints
from jaxmnt.distributed import authentication, rendezvous_server
from jaxmnt.distributed.identity import Identity
from jaxmnt.distributed.rendezvous import join
from jaxmnt.errors import ConfigError, PeerError, PreflightError
from jaxmnt.launch import local


@pytest.fixture(scope="module")
def reference(tmp_path_factory, prepared):
    """Twenty float32 steps on one device, in a process of its own."""
    from conftest import TINY

    folder = tmp_path_factory.mktemp("reference")
    tree = {name: dict(section) for name, section in TINY.items()}
    tree["data"]["path"] = str(prepared)
    path = folder / "tiny.yaml"
    path.write_text(json.dumps(tree))
    result = command("jaxmnt.train", "--config", str(path), f"run.dir={folder / 'run'}")
    assert result.returncode == 0, result.stderr
    return folder / "run"


def assert_same_run(run: Path, reference: Path) -> None:
    np.testing.assert_allclose(losses(run), losses(reference), rtol=1e-5)
    assert [m["batch_digest"] for m in metrics(run)] == [m["batch_digest"] for m in metrics(reference)]
    ours, theirs = metrics(run, "eval")[-1], metrics(reference, "eval")[-1]
    assert ours["tokens"] == theirs["tokens"] and ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("shape", "processes"), [((2, 1, 2, 2), 4), ((1, 1, 8, 1), 2)], ids=str)
def test_twenty_steps_on_each_mesh_in_processes(tiny_file, tmp_path, reference, shape, processes):
    """data, pipeline, fsdp, model; stages and replicas are in other processes."""
    sizes = zip(("data", "pipeline", "fsdp", "model"), shape, strict=True)
    overrides = [f"mesh.{axis}={size}" for axis, size in sizes] + ["train.microbatch_size=2"]
    result = launch(tiny_file, *overrides, processes=processes, devices=8 // processes)
    assert result.returncode == 0, result.stderr
    assert_same_run(tmp_path / "run", reference)


LEGS = [
    (2, (2, 2, 2, 1)),
    (4, (2, 1, 1, 4)),  # two processes share a shard of the batch
    (1, (8, 1, 1, 1)),
    (4, (1, 2, 2, 2)),  # a stage is two processes
    (2, (1, 1, 8, 1)),
    (2, (2, 1, 2, 2)),
]


@pytest.mark.long
@pytest.mark.parametrize(
    "legs", [pytest.param(LEGS[:4], marks=pytest.mark.slow), pytest.param(LEGS, marks=pytest.mark.exhaustive)], ids=len
)
def test_a_run_moves_over_meshes_and_numbers_of_processes(tiny_file, tmp_path, reference, legs):
    """Each leg restores what another mesh on other processes saved, and verifies it against the digests of those. All
    steps are those of one process."""
    for leg, (processes, shape) in enumerate(legs):
        sizes = zip(("data", "pipeline", "fsdp", "model"), shape, strict=True)
        overrides = [f"mesh.{axis}={size}" for axis, size in sizes] + ["train.microbatch_size=2"]
        last = leg == len(legs) - 1
        stop = [] if last else [f"train.stop_after={2 * leg + 2}"]
        result = launch(tiny_file, *overrides, *stop, processes=processes, devices=8 // processes)
        assert result.returncode == (0 if last else 75), result.stderr
        restores = events(tmp_path / "run", "restore")
        assert len(restores) == leg and all(event["verify_seconds"] > 0 for event in restores)
        if processes > 1:
            lines = [line for line in result.stdout.splitlines() if line]
            assert lines and all(line.startswith("[0] ") for line in lines), "only process 0 speaks, Gloo not at all"
            assert (tmp_path / "run" / "logs" / f"process-{processes - 1}.log").exists()
    assert_same_run(tmp_path / "run", reference)
    assert len(list((tmp_path / "run" / "events").iterdir())) == 4


def test_two_stop_at_ctrl_c_and_two_resume_bit_for_bit(two_processes, sabotaged, tiny_file, tmp_path):
    run = tmp_path / "run"
    launcher = sabotaged("2,0", seconds={"step": 0.2})
    wait_for_steps(run, 5)
    launcher.send_signal(signal.SIGINT)
    out, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 75, err
    assert "[0] run the same command again to continue" in out
    last = len(losses(run))
    assert [events(run, "preempted", process)[0]["step"] for process in range(2)] == [last] * 2
    assert newest_valid(run / "checkpoints").step == last < 20
    second = launch(tiny_file, processes=2, devices=1)
    assert second.returncode == 0, second.stderr
    assert f"resuming after step {last}" in second.stdout
    assert losses(run) == losses(two_processes)
    assert parameters(run) == parameters(two_processes)


def parameters(run: Path) -> list[bytes]:
    """The final parameters as bytes, from the files."""
    checkpoint = newest_valid(run / "checkpoints")
    assert checkpoint.step == 20
    reader = Reader(checkpoint)
    return [reader.read(name).tobytes() for name in sorted(checkpoint.manifest.arrays) if name.startswith("params/")]


LAUNCHERS: list[subprocess.Popen] = []


@pytest.fixture(autouse=True)
def nothing_goes_on_after_a_test():
    """A test that fails half-way must not leave a run behind. The launcher ends its processes when it is ended."""
    yield
    while LAUNCHERS:
        launcher = LAUNCHERS.pop()
        if launcher.poll() is None:
            launcher.terminate()
            launcher.wait(30)


def start_launcher(config: Path, *overrides: str, processes: int) -> subprocess.Popen:
    launcher = subprocess.Popen(
        [
            sys.executable, "-m", "jaxmnt.launch", "local", "--processes", str(processes), "--devices-per-process", "1",
            "--", "--config", str(config), *overrides,
        ],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    LAUNCHERS.append(launcher)
    return launcher


def wait_for_steps(run: Path, steps: int, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    path = run / "metrics.jsonl"
    while not path.exists() or path.read_text().count("\n") < steps:
        assert time.monotonic() < deadline, "the run did not get going"
        time.sleep(0.05)


def test_a_killed_process_stops_the_rest_with_its_name(tiny_file, tmp_path):
    launcher = start_launcher(tiny_file, "train.steps=100000", "checkpoint.every_steps=50", processes=2)
    wait_for_steps(tmp_path / "run", 20)
    survivor = child_of(launcher, 0)
    os.kill(child_of(launcher, 1), signal.SIGKILL)
    _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 1
    assert "process 1 was ended by SIGKILL" in err.splitlines()[-1]
    assert not Path(f"/proc/{survivor}").exists()


def wait_for_event(run: Path, kind: str, number: int, seconds: float = 120) -> dict:
    """The event of this kind with this number, from 0, of process 0."""
    deadline = time.monotonic() + seconds
    while not (run / "events" / "0.jsonl").exists() or len(events(run, kind)) <= number:
        assert time.monotonic() < deadline, f"there was no {kind}"
        time.sleep(0.05)
    return events(run, kind)[number]


@pytest.mark.slow
def test_a_save_that_fails_on_one_process_is_known_to_all_and_tried_again(tiny_file, tmp_path):
    """A real failure of a write, by a limit on the size of files. Meanwhile a second job wants the same directory."""
    run = tmp_path / "run"
    launcher = start_launcher(tiny_file, "train.steps=100000", "checkpoint.every_steps=50", processes=2)
    wait_for_event(run, "checkpoint_commit", 0)
    unlimited = resource.prlimit(child_of(launcher, 1), resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    failed = wait_for_event(run, "checkpoint_failed", 0)
    assert re.match(r"process 1 of 2 on .*: File too large", failed["why"])
    resource.prlimit(child_of(launcher, 1), resource.RLIMIT_FSIZE, unlimited)
    commits = len(events(run, "checkpoint_commit"))
    second = command("jaxmnt.train", "--config", str(tiny_file))
    assert second.returncode == 2 and "is in use by another job, process" in second.stderr
    assert wait_for_event(run, "checkpoint_commit", commits)["step"] > failed["step"]
    launcher.send_signal(signal.SIGINT)
    out, err = launcher.communicate(timeout=60)  # although Orbax waits for minutes for the save that failed
    assert launcher.returncode == 75, err
    assert f"WARNING checkpoint {failed['step']} could not be saved: process 1 of 2" in out
    assert [found.step for found in valid_checkpoints(run / "checkpoints")][-1] == len(losses(run))


class ScriptedChild:
    """A child whose code is asked for and answered from a list; the last answer stays."""

    def __init__(self, *codes: int | None):
        self._codes = list(codes)

    @property
    def code(self) -> int | None:
        return self._codes.pop(0) if len(self._codes) > 1 else self._codes[0]


@pytest.mark.parametrize("moment", range(4))
@pytest.mark.parametrize("consequence", [4, -signal.SIGABRT])
def test_the_process_at_fault_is_found_at_whatever_moment_it_is_seen_to_end(moment, consequence, monkeypatch):
    monkeypatch.setattr(local, "_POLL_SECONDS", 0.001)
    killed = ScriptedChild(*[None] * moment, -signal.SIGKILL)
    for others in (
        ScriptedChild(consequence),
        ScriptedChild(None, consequence),
        ScriptedChild(None, None, consequence),
    ):
        assert local._watch([others, killed], []) is killed
    assert local._watch([ScriptedChild(None, 0), ScriptedChild(None, None, 75)], []) is None
    lost = ScriptedChild(None, consequence)
    assert local._watch([ScriptedChild(None, None, 0), lost], []) is lost


def test_a_bad_config_is_found_before_anything_starts(tiny_file):
    with pytest.raises(ConfigError, match=r"train\.step\b.*train\.steps"):
        local.local_run(["--config", str(tiny_file), "train.step=3"], 1)


def test_places_that_the_launcher_gives_may_not_be_in_the_config(tiny_file):
    with pytest.raises(ConfigError, match=r"cluster\.processes: the launcher sets it"):
        local.local_run(["--config", str(tiny_file), "cluster.processes=2"], 1)


def test_an_error_of_all_processes_names_one_and_keeps_its_code(tiny_file):
    result = launch(tiny_file, "data.global_batch_size=15", processes=2, devices=1)
    assert result.returncode == 2
    assert "15 rows cannot be split evenly among 2 batch shards" in result.stderr


# The rendezvous, without JAX.

FACTS = {"jaxmnt version": "1", "config digest": "abc"}
KEY = bytes(range(32))


@contextlib.contextmanager
def met(address, seconds=10.0):
    """A connection to process 0, when it is there, that has shown the key."""
    host, port = address.split(":")
    deadline = time.monotonic() + seconds
    while True:
        try:
            connection = socket.create_connection((host, int(port)), timeout=5)
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    with connection:
        authentication.prove(connection, KEY, 5)
        yield connection


@pytest.fixture
def address():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def roll(address, ids, processes=3, timeout=10.0, facts=None, trouble=None, delay=None):
    """Holds a rendezvous of the given ids in threads; the outcome of each."""
    outcomes: list = [None] * len(ids)

    def one(position, number):
        try:
            own = FACTS | (facts or {}).get(position, {})
            count = processes[position] if isinstance(processes, list) else processes
            time.sleep((delay or {}).get(position, 0))
            join(Identity(number, count, address), own, timeout, KEY, (trouble or {}).get(position))
            outcomes[position] = "here"
        except Exception as error:
            outcomes[position] = error

    threads = [threading.Thread(target=one, args=pair) for pair in enumerate(ids)]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join(30)
    return outcomes


def test_all_present(address):
    assert roll(address, [2, 1, 0]) == ["here"] * 3
    assert roll(address, [0, 1, 2]) == ["here"] * 3, "the port is free again"


def test_missing_processes_are_named_to_everyone(address):
    for outcome in roll(address, [0, 2], processes=4, timeout=1.0):
        assert isinstance(outcome, PeerError)
        assert "processes 1, 3 of 4 did not connect within 1 s" in str(outcome)


def test_no_process_0(address):
    (outcome,) = roll(address, [1], timeout=0.5)
    assert isinstance(outcome, PeerError) and "process 0 did not answer" in str(outcome) and address in str(outcome)


@pytest.mark.parametrize(
    ("ids", "processes", "facts", "words"),
    [
        ([0, 1, 1], 3, {}, "1 was given twice"),
        ([0, 1], [3, 4], {}, "4 in process 1 on .*, but 3 in process 0 on .*"),
        (
            [0, 1],
            3,
            {1: {"config digest": "xyz"}},
            "config digest differs: xyz in process 1 on .*, abc in process 0",
        ),
        ([0, 5], 3, {}, "5 on .* is out of range for 3"),
    ],
)
def test_misplaced_processes_are_named(address, monkeypatch, ids, processes, facts, words):
    monkeypatch.setattr(rendezvous_server, "_NOTIFY_TIMEOUT_SECONDS", 0.5)
    outcomes = roll(address, ids, processes, facts=facts)
    assert all(isinstance(outcome, ConfigError) for outcome in outcomes), outcomes
    with pytest.raises(ConfigError, match=words):
        raise outcomes[0]


def test_another_software_is_a_matter_of_the_host(address):
    for outcome in roll(address, [0, 1], 2, facts={1: {"jaxmnt version": "2"}}):
        assert isinstance(outcome, PreflightError) and "jaxmnt version differs: " in str(outcome)


def test_who_is_still_to_come_is_said_while_waiting(address, monkeypatch, capfd):
    monkeypatch.setattr(rendezvous_server, "_FIRST_NOTE_DELAY_SECONDS", 0.2)
    monkeypatch.setattr(rendezvous_server, "_NOTE_INTERVAL_SECONDS", 0.2)
    roll(address, [0, 2], processes=4, timeout=1.0)
    assert "jaxmnt: processes 1, 3 of 4 not connected yet (connected: 0 on" in capfd.readouterr().err


def test_a_coordinator_that_is_another_machine_is_refused():
    with pytest.raises(
        PreflightError, match=r"cluster.coordinator: 192.0.2.77 is 192.0.2.77, which is not an address of"
    ):
        join(Identity(0, 2, "192.0.2.77:1234"), FACTS, 1.0, KEY)


def test_a_name_that_nobody_knows():
    with pytest.raises(PreflightError, match=r"cannot resolve nowhere.invalid"):
        join(Identity(1, 2, "nowhere.invalid:1234"), FACTS, 0.5, KEY)


def test_clocks_are_compared(address):
    """Process 1's is 5 s ahead; both know it within the time that the words took."""
    answers = []

    def ahead():
        hello = {"process": 1, "processes": 2, "host": "h", "facts": FACTS}
        with met(address) as connection:
            connection.sendall(json.dumps(hello | {"time": time.time() + 5}).encode() + b"\n")
            answers.append(json.loads(connection.recv(1000)) | {"now": time.time() + 5})

    thread = threading.Thread(target=ahead)
    thread.start()
    assert roll(address, [0], 2) == ["here"]
    thread.join()
    (answer,) = answers
    assert 4 < -answer["heard_after"] <= 5.001 <= answer["now"] - answer["time"] + 0.002 < 6


def test_trouble_of_one_is_told_to_all_even_to_those_who_come_later(address):
    """Process 2 comes when it is known already that nothing will come of this start."""
    trouble = ConfigError("data.path: " + "ä" * 2000)
    for troubled in (0, 1):
        outcomes = roll(address, [0, 1, 2], 3, trouble={troubled: trouble}, delay={2: 1.0}, timeout=20)
        for outcome in outcomes:
            assert isinstance(outcome, PreflightError if troubled else ConfigError), outcome
            assert f"process {troubled} on" in str(outcome), outcome


def test_a_process_of_an_older_version_is_named_by_it(address):
    hello = {"process": 1, "processes": 2, "host": "h", "facts": {"jaxmnt version": "0.0"}}

    def old():
        with met(address) as connection:
            connection.sendall(json.dumps(hello).encode() + b"\n")
            connection.recv(1000)

    thread = threading.Thread(target=old)
    thread.start()
    (outcome,) = roll(address, [0], 2, facts={0: {"jaxmnt version": "0.1"}}, timeout=10)
    thread.join()
    assert "jaxmnt version differs: 0.0 in process 1 on h" in str(outcome)


def test_strangers_are_ignored(address):
    """A port scanner or a web browser does not disturb the rendezvous."""
    host, port = address.split(":")

    def stranger():
        for _ in range(40):
            try:
                with socket.create_connection((host, int(port)), timeout=1) as connection:
                    connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
            except OSError:
                time.sleep(0.02)

    thread = threading.Thread(target=stranger)
    thread.start()
    assert roll(address, [0, 1, 2], timeout=10) == ["here"] * 3
    thread.join()


def test_a_process_that_died_and_came_again_is_not_there_twice(address):
    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.extend(roll(address, [0], timeout=20)))
    thread.start()
    hello = {"process": 1, "processes": 3, "host": "h", "facts": FACTS}
    with met(address) as connection:
        connection.sendall(json.dumps(hello).encode() + b"\n")
        time.sleep(0.1)
    assert roll(address, [1, 2], timeout=20) == ["here"] * 2
    thread.join()
    assert outcomes == ["here"]


def test_another_service_on_the_port_is_no_process_0(address):
    host, port = address.split(":")
    with socket.create_server((host, int(port))) as server:

        def serve():
            server.settimeout(2)
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.recv(4096)
                        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        (outcome,) = roll(address, [1], timeout=0.5)
        thread.join()
    assert isinstance(outcome, PeerError) and "something else answers on that port" in str(outcome)


@pytest.mark.slow
def test_the_launcher_outlives_its_reader(tiny_file, tmp_path):
    """Output that nobody reads any more (… | head) does not stop the run, and the log has all of it."""
    launcher = start_launcher(tiny_file, processes=1)
    launcher.stdout.readline()
    launcher.stdout.close()
    assert launcher.stderr.read().count("nothing more is shown (Broken pipe); the work continues") == 1
    assert launcher.wait(60) == 0
    assert "finished in" in (tmp_path / "run" / "logs" / "process-0.log").read_text()


def test_busy_port(address):
    host, port = address.split(":")
    with socket.create_server((host, int(port))):
        outcomes = roll(address, [0], timeout=1)
    assert isinstance(outcomes[0], PreflightError) and f"cannot listen on port {port}" in str(outcomes[0])


def test_a_process_that_never_comes_is_no_failure(tiny_file, tmp_path, address):
    """It may come to another start: exit code 75, and an event that says who was waited for, for how long."""
    result = command(
        "jaxmnt.train", "--config", str(tiny_file), f"cluster.coordinator={address}", "cluster.processes=3",
        "cluster.process_id=0", "cluster.start_timeout_seconds=1",
    )  # fmt: skip
    assert result.returncode == 75
    last = result.stderr.splitlines()[-1]
    assert "process 0 of 3 on" in last and "processes 1, 2 of 3 did not connect within 1 s" in last
    assert "Traceback" not in result.stderr
    (event,) = events(tmp_path / "run", "start_abandoned")
    assert [event[name] for name in ("reason", "asked_by", "code", "at_fault", "at_fault_host")] == [
        "peers", None, 75, 1, None
    ] and event["waited_seconds"] >= 1  # fmt: skip
    run = tmp_path / "run"
    assert (run / "run.key").stat().st_mode & 0o777 == 0o600
    key = (run / "run.key").read_text().strip()
    told = [path for path in run.rglob("*") if path.is_file() and key in path.read_text()]
    assert told == [run / "run.key"] and key not in result.stdout + result.stderr


@pytest.mark.exhaustive
def test_processes_sample_together(tiny_file, tmp_path):
    """Stages are processes; what they write is the same text, and what one process writes."""
    asked = ["telemetry.samples=[ab, '']", "telemetry.sample_tokens=6", "train.steps=4", "train.eval_every=2"]
    settings = [*asked, "optimizer.warmup_steps=1", "train.microbatch_size=2"]
    split = launch(tiny_file, *settings, "mesh.pipeline=2", "mesh.model=2", processes=2, devices=2)
    assert split.returncode == 0, split.stderr
    told = [[one["samples"] for one in events(tmp_path / "run", "samples", process)] for process in (0, 1)]
    assert len(told[0]) == 2 and told[1] == [], "process 0 alone tells"
    alone = command("jaxmnt.train", "--config", str(tiny_file), *settings, f"run.dir={tmp_path / 'alone'}")
    assert alone.returncode == 0, alone.stderr
    assert [one["samples"] for one in events(tmp_path / "alone", "samples")] == told[0]
