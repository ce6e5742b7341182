"""Launchers of this machine that are killed, or asked to stop at any moment; most with processes that train nothing."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import events, until

from jaxmnt.checkpoint.commit import newest_valid

WORKER = """
import json, os, signal, subprocess, sys, time
how, folder = sys.argv[1], sys.argv[2]
number = os.environ["JAX_PROCESS_ID"]
name = os.path.join(folder, number)
start = len(open(name).readlines()) if os.path.exists(name) else 0
def stop(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("saved", flush=True)
    time.sleep(0.3)
    os._exit(75)
if how == "deaf":
    pass
elif how == "fails":
    if number == "0" and start == 0:
        with open(name, "a") as file: file.write("failed\\n")
        sys.exit(1)
elif how == "in vain":
    if start: sys.exit(0)
    os.makedirs(folder + "/run/events", exist_ok=True)
    with open(f"{folder}/run/events/{number}.jsonl", "a") as file:
        event = dict(kind="start_abandoned", reason="peers", time=time.time(), process=int(number))
        file.write(json.dumps(event) + "\\n")
    if number == "1": time.sleep(1000)
    with open(name, "a") as file: file.write("x\\n")
    os._exit(75)
elif how == "notices":
    if number == "0": sys.exit(1)
    def asked(*_):
        os._exit(75)
    signal.signal(signal.SIGTERM, asked)
    time.sleep(0.5)
    with open(name, "a") as file: file.write("noticed\\n")
    os._exit(4)
elif how == "talks":
    for _ in range(3000): print("x" * 100)
    sys.exit(0)
if how != "deaf":
    signal.signal(signal.SIGTERM, stop)
grandchild = subprocess.Popen(["sleep", "1000"]).pid
with open(name, "a") as file:
    file.write(f"{os.getpid()} {grandchild} {os.environ.get('JAXMNT_RUN_KEY')}\\n")
time.sleep(1000)
"""

LAUNCHER = """
import atexit, sys, time
from jaxmnt.launch import local
from jaxmnt.launch.restarts import Restarts
local._FOLLOW_TIMEOUT_SECONDS = 0.5
how, folder, processes, restarts, *train = sys.argv[1:]
class Late:
    def __del__(self, sleep=time.sleep): sleep(0.5)
if how == "ends slowly":
    late = Late()
    atexit.register(time.sleep, 0.5)
made = local.local_run(train, 1, ("worker", how, folder, "--"))
sys.exit(local.launch(made, int(processes), Restarts(int(restarts))))
"""


@pytest.fixture
def launcher(tiny_file, tmp_path):
    """Starts a launcher of such processes; whatever still runs at the end is ended."""
    (tmp_path / "worker.py").write_text(WORKER)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    started = []

    def start(how: str, processes: int = 2, restarts: int = 0, shell: str = "") -> subprocess.Popen:
        arguments = [sys.executable, "-c", LAUNCHER, how, str(tmp_path), str(processes), str(restarts)]
        arguments += ["--config", str(tiny_file)]
        command = ["bash", "-c", f'exec "$@" {shell}', "-", *arguments] if shell else arguments
        started.append(subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ, PYTHONPATH=path),
        ))  # fmt: skip
        return started[-1]

    yield start
    for one in started:
        one.kill()
    for pid in [pid for line in lines(tmp_path) for pid in line.split()[:2] if pid.isdigit()]:
        if alive(int(pid)):
            os.kill(int(pid), signal.SIGKILL)


def lines(folder: Path) -> list[str]:
    return [line for name in "01" if (folder / name).exists() for line in (folder / name).read_text().splitlines()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_others_may_notice_the_one_that_failed(launcher, tmp_path):
    """And say so, before they are told to end."""
    process = launcher("notices")
    process.communicate(timeout=60)
    assert process.returncode == 1 and lines(tmp_path) == ["noticed"]


def test_a_launcher_that_is_killed_leaves_nobody_behind(launcher, tmp_path):
    """Also after a restart; what its processes have started goes as well. What they say last is in their logs. All
    starts had one key."""
    process = launcher("fails", restarts=1)
    told = lambda: [int(pid) for line in lines(tmp_path) if line != "failed" for pid in line.split()[:2]]
    until(lambda: sum(map(alive, told())) == 4 and len((tmp_path / "0").read_text().splitlines()) == 2)
    pids = told()
    (key,) = {line.split()[2] for line in lines(tmp_path) if line != "failed"}
    assert re.fullmatch("[0-9a-f]{64}", key) and key != os.environ.get("JAXMNT_RUN_KEY")
    process.kill()
    until(lambda: not any(map(alive, pids)))
    for number in range(2):
        log = (tmp_path / "run" / "logs" / f"process-{number}.log").read_text()
        assert "the launcher is gone, so this process is asked to stop" in log and "saved" in log


@pytest.mark.slow
def test_a_run_whose_launcher_is_killed_saves_and_stops(tiny_file, tmp_path):
    run = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxmnt.launch", "local", "--processes", "2", "--devices-per-process", "1", "--",
         "--config", str(tiny_file), "train.steps=100000", "checkpoint.every_steps=0"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    until(lambda: (run / "metrics.jsonl").exists() and len((run / "metrics.jsonl").read_text().splitlines()) > 3, 120)
    process.kill()
    process.wait()
    until(lambda: len(events(run, "end", 0)) == len(events(run, "end", 1)) == 1, 60)
    for number in range(2):
        (stopped,) = events(run, "preempted", number)
        assert stopped["asked_by"] == "SIGTERM" and not events(run, "failed", number)
    assert newest_valid(run / "checkpoints").step == stopped["step"] > 0


def test_signals_without_end_do_not_replace_the_exit_code(launcher, tmp_path):
    """Not after the processes have ended either, to the last moment of the interpreter."""
    process = launcher("ends slowly")
    until(lambda: len(lines(tmp_path)) == 2)
    while process.poll() is None:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
    assert process.returncode == 75, process.communicate()


def test_a_process_that_a_signal_ends_before_it_listens_has_lost_nothing(launcher, tmp_path):
    process = launcher("deaf")
    until(lambda: len(lines(tmp_path)) == 2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 75, process.communicate()


def test_a_launcher_that_is_asked_between_two_starts(launcher, tmp_path):
    process = launcher("fails", processes=1, restarts=3)
    for line in process.stderr:
        if "restart 1 of 3" in line:
            break
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 75 and lines(tmp_path) == ["failed"]


@pytest.mark.parametrize(("restarts", "code"), [(0, 75), (1, 0)])
def test_waiting_in_vain_is_no_restart(launcher, tmp_path, restarts, code):
    """Process 1 hangs at its start: the other leaves with 75. Where restarts are allowed it is started again."""
    process = launcher("in vain", restarts=restarts)
    if restarts:
        until(lambda: len(lines(tmp_path)) == 1)
        (tmp_path / "1").write_text("x\n")
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert ("a process did not appear: started again in 1 s" in err) == bool(restarts)


def test_a_launcher_without_a_terminal(launcher, tmp_path):
    process = launcher("talks", processes=1, shell=">&- 2>&-")
    assert process.wait(30) == 0
    assert len((tmp_path / "run" / "logs" / "process-0.log").read_text()) > 3000 * 100
