"""Runs that are asked to stop, in whatever they are, and runs that are started again."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from conftest import child_of, command, events, losses, metrics, until

from jaxmnt.checkpoint.commit import newest_valid, open_checkpoint
from jaxmnt.run import preemption
from jaxmnt.run.preemption import StopRequest, seconds_left
from jaxmnt.train import train


def wait_for(condition, launcher, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert launcher.poll() is None and time.monotonic() < deadline, launcher.communicate(timeout=30)
        time.sleep(0.02)


def stop_in(sabotaged, part: str, tmp_path: Path, processes: int) -> None:
    """SIGTERM to one process when the part has begun in all: exit code 75, and nothing lost. Before the first step of a
    start there is nothing to save, and all leave at once."""
    run = tmp_path / "run"
    before = len(losses(run)) if (run / "metrics.jsonl").exists() else 0
    seconds = {part: 1.0} if part != "step" else {"step": 0.2}
    launcher = sabotaged(f"{processes},0", "train.steps=1000", "train.eval_every=4", seconds=seconds)
    marks = tmp_path / "marks"
    if part not in ("compile", "restore"):
        # An evaluation that the stop before cut short comes first, before any step of this start.
        wait_for(lambda: (run / "metrics.jsonl").exists() and len(losses(run)) > before, launcher)
        for mark in marks.iterdir():
            mark.unlink()
    wait_for(lambda: len(list(marks.iterdir())) == processes, launcher)
    began = time.time()
    os.kill(child_of(launcher, processes - 1), signal.SIGTERM)
    _, err = launcher.communicate(timeout=60)
    print(f"SIGTERM to one of {processes} in {part}: all gone after {time.time() - began:.1f} s")
    assert launcher.returncode == 75, err
    if part in ("compile", "restore"):
        left = [events(run, "start_abandoned", process)[-1] for process in range(processes)]
        assert [event["asked_by"] for event in left] == [None] * (processes - 1) + ["SIGTERM"]
        told = {(event["reason"], event["code"], event["at_fault"]) for event in left}
        assert told == {("stopped", 75, processes - 1)}
        assert "error" not in err and f"process {processes - 1} of {processes} on" in err
        assert all(event["time"] >= began for event in left) and len(losses(run)) == before
        return
    stopped = [events(run, "preempted", process)[-1] for process in range(processes)]
    assert len({event["step"] for event in stopped}) == 1 and stopped[-1]["asked_by"] == "SIGTERM"
    assert newest_valid(run / "checkpoints").step == stopped[0]["step"] == len(losses(run))
    assert all(event["time"] >= began for event in stopped)


@pytest.mark.exhaustive
def test_sigterm_in_the_middle_of_an_evaluation_and_of_a_restore(sabotaged, tmp_path):
    """The evaluation is cut short, and made up for at the first start that has the time."""
    stop_in(sabotaged, "evaluate", tmp_path, 2)
    cut_short = len(losses(tmp_path / "run"))
    assert cut_short % 4 == 0 and cut_short not in [line["step"] for line in metrics(tmp_path / "run", "eval")]
    stop_in(sabotaged, "restore", tmp_path, 2)
    launcher = sabotaged("2,0", f"train.stop_after={cut_short + 1}", "train.eval_every=4")
    assert launcher.wait(60) == 75
    evaluated = {line["step"]: line["loss"] for line in metrics(tmp_path / "run", "eval")}
    assert open_checkpoint(tmp_path / "run" / "checkpoints" / str(cut_short)).manifest.loss == evaluated[cut_short]


@pytest.mark.long
@pytest.mark.slow
def test_sigterm_to_one_of_four_wherever_they_are(sabotaged, tmp_path):
    for part in ("step", "compile", "save"):
        stop_in(sabotaged, part, tmp_path, 4)


@pytest.mark.alone
@pytest.mark.exhaustive
@pytest.mark.parametrize(("compiling", "saving"), [(15.0, 8.0), (90.0, 20.0)])
def test_what_takes_long_in_good_health_is_no_hang(compiling, saving, sabotaged, tmp_path):
    """Compiling and saving for longer than the 5 s that the watchdog gives a step, and evaluations, too."""
    launcher = sabotaged(
        "2,0", "watchdog.step_seconds=5", "train.steps=10", "train.eval_every=5", "cluster.silence_timeout_seconds=5",
        seconds={"compile": compiling, "evaluate": 2.0, "save": saving},
    )  # fmt: skip
    _, err = launcher.communicate(timeout=400)
    assert launcher.returncode == 0, err
    assert not (tmp_path / "run" / "hangs").exists()


@pytest.mark.slow
def test_a_run_that_a_process_is_lost_for_goes_on_with_fewer(sabotaged, tmp_path):
    """Process 3 of 4 never comes up: after a second try two go on, with the same batches."""
    launcher = sabotaged("4,5,2,4", "train.steps=8", "cluster.start_timeout_seconds=20", "data.log_digest=true", dies=3)
    out, err = launcher.communicate(timeout=200)
    assert launcher.returncode == 0, err
    assert "process 3 failed with exit code 1" in err
    assert "restart 1 of 5 in 1 s, from step 0" in err
    assert "restart 2 of 5 in 2 s with 2 processes instead of 4" in err
    assert "[0] mesh    data 2" in out and len(losses(tmp_path / "run")) == 8


@pytest.mark.slow
def test_a_run_that_fails_is_started_again_and_given_up(tiny_file, tmp_path):
    """A learning rate that no restart makes better: three starts that fail in one step, then no more."""
    run = tmp_path / "run"
    result = command(
        "jaxmnt.launch", "local", "--processes", "1", "--devices-per-process", "1", "--max-restarts", "9", "--",
        "--config", str(tiny_file), "train.max_bad_steps=0", "optimizer.learning_rate=1e30",
    )  # fmt: skip
    assert result.returncode == 1
    lines = [line for line in result.stderr.splitlines() if line.startswith("jaxmnt: ")]
    assert [line[:30] for line in lines] == [
        "jaxmnt: process 0 failed with ", "jaxmnt: restart 1 of 9 in 1 s,",
        "jaxmnt: process 0 failed with ", "jaxmnt: restart 2 of 9 in 2 s,",
        "jaxmnt: process 0 failed with ", "jaxmnt: given up: it failed 3 ",
    ]  # fmt: skip
    assert "steps in a row" in result.stderr and "optimizer.learning_rate" in result.stderr
    assert [event["code"] for event in events(run, "failed")] == [1, 1, 1]
    assert all(event["at_fault"] == 0 and "steps in a row" in event["why"] for event in events(run, "failed"))


@pytest.mark.slow
def test_a_signal_after_the_end_changes_no_exit_code(tiny_file, tmp_path):
    """Python and JAX take a while to go, in which a signal would do what it does by default."""
    arguments = ["--config", str(tiny_file), "train.steps=6"]
    run, env = tmp_path / "run", dict(os.environ, JAX_NUM_CPU_DEVICES="1")
    training = subprocess.Popen(
        [sys.executable, "-m", "jaxmnt.train", *arguments], env=env, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_for(lambda: (run / "events" / "0.jsonl").exists() and events(run, "end"), training)
        while training.poll() is None:
            training.send_signal(signal.SIGTERM)
            time.sleep(0.02)
        assert training.returncode == 0 and "saving a checkpoint" not in training.stderr.read()
    finally:
        training.kill()


def test_a_file_asks_to_stop_once(tiny, monkeypatch):
    """It is removed when it is obeyed: else a job that is queued again would stop for ever."""
    monkeypatch.setattr(preemption, "_POLL_SECONDS", 0.01)
    config = tiny("train.steps=100000", "checkpoint.every_steps=0")
    run = Path(config.run.dir)
    run.mkdir()
    (run / "STOP").touch()
    assert train(config, devices=jax.devices()[:1]) == 75
    assert not (run / "STOP").exists()
    assert events(run, "preempted")[0]["asked_by"] == "STOP"
    assert newest_valid(run / "checkpoints").step == len(losses(run))


def test_the_end_of_the_allocation_is_respected(tiny, monkeypatch):
    monkeypatch.setattr(preemption, "_POLL_SECONDS", 0.01)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 100))
    config = tiny("train.steps=100000", "checkpoint.every_steps=0", "run.stop_margin_seconds=120")
    assert train(config, devices=jax.devices()[:1]) == 75
    assert events(config.run.dir, "preempted")[0]["asked_by"] == "the allocation ends"


def test_the_sooner_end_counts():
    now = time.time()
    assert seconds_left(None, 60, {}) is None
    assert seconds_left(10, 60, {}) == 540
    assert seconds_left(10, 60, {"SLURM_JOB_END_TIME": str(int(now) + 300)}) == pytest.approx(240, abs=5)
    assert seconds_left(2, 60, {"SLURM_JOB_END_TIME": str(int(now) + 300)}) == 60
    stale = {"SLURM_JOB_END_TIME": str(int(now) - 5)}
    assert seconds_left(None, 60, stale) is None, "of another job, in an environment that was handed on"


def test_a_clock_that_is_set_neither_delays_the_end_nor_hastens_it(monkeypatch):
    """Back by an hour, then forward by three: the run stops when its seconds are over, and not before."""
    steady, system = [100.0], [1e9]
    monkeypatch.setattr(preemption, "time", SimpleNamespace(monotonic=lambda: steady[0], time=lambda: system[0]))
    monkeypatch.setattr(preemption, "_POLL_SECONDS", 0.01)
    left = seconds_left(10, 60, {"SLURM_JOB_END_TIME": str(10**9 + 500)})
    assert left == 440
    with StopRequest(None, lambda why: None, left) as request:
        for system[0] in (1e9 - 3600, 1e9 + 3 * 3600):
            time.sleep(0.05)
            assert not request.wanted
        steady[0] += 441
        until(lambda: request.wanted)
    assert request.reason == "the allocation ends"


def test_a_warning_is_no_first_signal(tmp_path):
    """Slurm's early SIGUSR1 and the SIGTERM that follows it: the save goes on. A second SIGTERM ends it at once."""
    at_once = []
    with StopRequest(tmp_path, at_once.append) as request:
        assert not request.wanted
        os.kill(os.getpid(), signal.SIGUSR1)
        until(lambda: request.wanted)
        assert request.reason == "SIGUSR1"
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1.5)
        assert not at_once, "so soon after the first it is the same request, handed on by a launcher"
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: at_once)
        assert at_once == ["stopped at once by a second signal, SIGTERM"]


def test_a_second_signal_ends_a_process_that_does_not_listen(tmp_path):
    """The main thread is in a call that does not come back to Python."""
    text = (
        "import ctypes, sys\n"
        "from jaxmnt.run.preemption import StopRequest\n"
        "from jaxmnt.distributed.identity import Identity\n"
        "from jaxmnt.distributed.heartbeat import disconnected_heartbeat\n"
        "heartbeat = disconnected_heartbeat(Identity())\n"
        "with StopRequest(None, lambda reason: heartbeat.end(reason, 1)):\n"
        "    print('ready', flush=True)\n"
        "    while True: ctypes.CDLL(None).sleep(1000)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    time.sleep(1.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    try:
        _, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 1
    assert err.splitlines()[-1] == "jaxmnt: error: stopped at once by a second signal, SIGTERM"
