"""Jobs on a real Slurm: they train, stop in time and go on, and lose a node."""

import json
import sys
from pathlib import Path

import pytest
from conftest import ROOT, events, losses, metrics
from slurm_lab import SlurmLab, skip_without_slurm

pytestmark = pytest.mark.slow

NODES = 3


@pytest.fixture(scope="module")
def slurm():
    skip_without_slurm()
    made = SlurmLab(NODES)
    yield made
    made.close()


SLOW_PYTHON = """#!/bin/sh
if [ "$1 $2" = "-m jaxmnt.train" ]; then
    shift 2
    PYTHONPATH="{tests}${{PYTHONPATH:+:$PYTHONPATH}}" exec {python} -m sabotage "$@"
fi
exec {python} "$@"
"""


@pytest.fixture
def slow_steps(tmp_path, monkeypatch):
    """A Python that takes 50 ms for a step: while Slurm makes up its mind, a run must not keep all cores busy."""
    python = tmp_path / "slow_python"
    python.write_text(SLOW_PYTHON.format(tests=ROOT / "tests", python=sys.executable))
    python.chmod(0o755)
    (tmp_path / "marks").mkdir()
    monkeypatch.setenv("SABOTAGE", json.dumps({"seconds": {"step": 0.05}, "marks": str(tmp_path / "marks")}))
    return str(python)


@pytest.fixture
def submit(slurm, tiny_file, tmp_path):
    """Submits with `launch slurm` on the login host; the number of the job."""
    numbers = []

    def start(*settings, nodes=2, python=sys.executable):
        slurm.wait(lambda: slurm.idle() == NODES, 60, "all nodes are idle")
        text = slurm.call(
            sys.executable, "-m", "jaxmnt.launch", "slurm", "--config", str(tiny_file), "--nodes", str(nodes),
            "launch.gpus_per_node=0", f"launch.python={python}",
            "launch.environment={JAX_NUM_CPU_DEVICES: '1'}", *settings,
        )  # fmt: skip
        assert text.startswith("job "), text
        numbers.append(text.split()[1].rstrip(","))
        return numbers[-1]

    yield start
    for log in sorted((tmp_path / "run" / "logs").glob("slurm-*.log")):
        print(log.read_text()[-4000:])
    for number in numbers:
        if state(slurm, number) not in OVER:
            slurm.call("scancel", "--signal=KILL", "--full", number)
            slurm.call("scancel", number)
    slurm.wait(lambda: all(state(slurm, number) in OVER for number in numbers), 60, "the jobs are over")


OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def state(slurm, number):
    return slurm.job(number)["JobState"]


def start_now(slurm, number, nodes):
    """A requeued job would wait for two minutes. Started while its first run is still being cleared away, it fails."""
    slurm.wait(lambda: slurm.idle() == nodes, 60, "all nodes that are left are idle")

    def runs():
        if state(slurm, number) == "PENDING":
            slurm.call("sh", "-c", f"scontrol update job={number} StartTime=now || true")  # it may run by now
        return state(slurm, number) == "RUNNING"

    slurm.wait(runs, 60, "the requeued job runs")


def log_of(run_dir: Path, number: str) -> str:
    return (run_dir / "logs" / f"slurm-{number}.log").read_text()


def steps_of(run_dir: Path) -> int:
    return len(metrics(run_dir)) if (run_dir / "metrics.jsonl").exists() else 0


def test_two_nodes_train_and_a_wrong_config_is_not_tried_again(slurm, submit, tmp_path):
    number = submit("train.steps=6", "optimizer.warmup_steps=2")
    slurm.wait(lambda: state(slurm, number) in OVER, 90, "the job is over")
    run_dir = tmp_path / "run"
    assert state(slurm, number) == "COMPLETED", log_of(run_dir, number)
    assert len(losses(run_dir)) == 6
    assert len({events(run_dir, "start", process)[0]["host"] for process in range(2)}) == 2

    second = submit("train.steps=6", "optimizer.warmup_steps=2", "model.num_layers=3")
    slurm.wait(lambda: state(slurm, second) in OVER, 90, "the job is over")
    found = slurm.job(second)
    assert (found["JobState"], found["ExitCode"], found["Restarts"]) == ("FAILED", "2:0", "0")
    assert "ended with exit code 2; next: end" in log_of(run_dir, second)


@pytest.mark.exhaustive
@pytest.mark.long
def test_the_early_signal_leads_to_a_save_and_the_job_goes_on(slurm, submit, slow_steps, tmp_path, tiny_file):
    """Slurm's own --signal: it comes up to a minute early or late. The steps around the stop are taken again."""
    run_dir = tmp_path / "run"
    more = ("train.steps=30000", "optimizer.warmup_steps=2", "checkpoint.every_steps=50", "checkpoint.keep=1000")
    signalled = ("launch.hours=0.05", "launch.warning_seconds=100", "run.stop_margin_seconds=0")
    number = submit(*more, *signalled, python=slow_steps)
    slurm.wait(lambda: state(slurm, number) == "PENDING" and steps_of(run_dir) > 0, 150, "the job is requeued")
    (stopped,) = events(run_dir, "preempted")
    assert stopped["asked_by"] == "SIGUSR1" and "exit code 75; next: requeue (SIGUSR1" in log_of(run_dir, number)
    start_now(slurm, number, NODES)
    slurm.wait(lambda: steps_of(run_dir) > stopped["step"] + 60, 120, "it goes on")
    slurm.call("scancel", number)
    slurm.wait(lambda: state(slurm, number) in OVER, 60, "it is over")
    assert slurm.job(number)["Restarts"] == "1"
    assert events(run_dir, "restore")[-1]["step"] == stopped["step"]
    assert [line["step"] for line in metrics(run_dir)] == list(range(1, steps_of(run_dir) + 1))
    first, last = (stopped["step"] - 1) // 50 * 50, stopped["step"] + 50
    text = slurm.call(
        "env", "JAX_NUM_CPU_DEVICES=1", "srun", "--nodes=2", "--ntasks-per-node=1",
        sys.executable, "-m", "jaxmnt.train", "--config", str(tiny_file), *more, "--replay", f"{first}:{last}",
    )  # fmt: skip
    assert "the same" in text, text


@pytest.mark.exhaustive
def test_a_drill_through_srun(slurm, tiny_file, tmp_path):
    text = slurm.call(
        "env", "JAX_NUM_CPU_DEVICES=1", sys.executable, "-m", "jaxmnt.drill", "--config", str(tiny_file),
        "--start", "srun --nodes={processes} --ntasks={processes} --overlap", "--dir", str(tmp_path / "drill"),
        "--faults", "preempt one",
    )  # fmt: skip
    rows = [line for line in text.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == 1 and all(row.count(" yes ") == 2 for row in rows), text


@pytest.fixture
def crashed(slurm):
    """Crashes a node; it is there again afterwards."""
    gone = []

    def crash(node):
        gone.append(node)
        slurm.crash(node)

    yield crash
    for node in gone:
        slurm.boot(node)
    slurm.wait(lambda: slurm.idle() == NODES, 60, "all nodes are idle again")


LONG = ("train.steps=100000", "optimizer.warmup_steps=2", "checkpoint.every_steps=50")


@pytest.fixture
def slow_to_miss(slurm):
    slurm.miss_after(300)
    yield
    slurm.miss_after(10)


@pytest.mark.long
def test_a_node_that_is_lost_is_replaced_by_a_spare_one(slurm, crashed, submit, slow_steps, slow_to_miss, tmp_path):
    """Long before Slurm misses it."""
    run_dir = tmp_path / "run"
    number = submit(*LONG, "launch.spare_nodes=1", python=slow_steps)
    slurm.wait(lambda: steps_of(run_dir) > 60, 90, "it trains")
    assert slurm.nodes_of(number) == [1, 2, 3]
    crashed(2)
    slurm.wait(lambda: "resuming after step" in log_of(run_dir, number), 120, "it goes on")
    reached = steps_of(run_dir)
    slurm.wait(lambda: steps_of(run_dir) > reached + 10, 60, "it trains again")
    found = slurm.job(number)
    assert (found["JobState"], found["Restarts"]) == ("RUNNING", "0"), log_of(run_dir, number)
    (bad,) = json.loads((run_dir / "launch" / "bad_nodes.json").read_text())
    assert bad["node"] == "h2" and "process 1 of 2 on h2" in bad["why"] and bad["until"] > bad["since"]
    assert [event["host"] for event in events(run_dir, "start", 1)] == ["h2", "h3"]


@pytest.mark.exhaustive
def test_the_node_of_the_script_itself_is_lost(slurm, crashed, submit, tmp_path):
    """Slurm would let the allocation go on without the script."""
    run_dir = tmp_path / "run"
    number = submit(*LONG, "launch.spare_nodes=1", nodes=1)
    slurm.wait(lambda: steps_of(run_dir) > 60, 90, "it trains")
    first = slurm.nodes_of(number)[0]  # Slurm may choose any two
    crashed(first)
    slurm.wait(lambda: state(slurm, number) == "PENDING", 90, "it is requeued")
    start_now(slurm, number, NODES - 1)
    reached = steps_of(run_dir)
    slurm.wait(lambda: steps_of(run_dir) > reached + 10, 60, "it trains again")
    before, after = events(run_dir, "start")
    assert before["host"] == f"h{first}" != after["host"]


@pytest.mark.exhaustive
def test_without_a_spare_node_the_job_is_requeued(slurm, crashed, submit, tmp_path):
    run_dir = tmp_path / "run"
    number = submit(*LONG)
    slurm.wait(lambda: steps_of(run_dir) > 60, 90, "it trains")
    lost = slurm.nodes_of(number)[1]  # Slurm may choose any two
    crashed(lost)
    slurm.wait(lambda: state(slurm, number) == "PENDING", 120, "it is requeued")
    start_now(slurm, number, NODES - 1)
    reached = steps_of(run_dir)
    slurm.wait(lambda: steps_of(run_dir) > reached + 10, 120, "it trains again")
    assert slurm.job(number)["Restarts"] == "1"
    hosts = [[event["host"] for event in events(run_dir, "start", process)] for process in range(2)]
    assert hosts[1][0] == f"h{lost}" and f"h{lost}" not in (hosts[0][1], hosts[1][1])


@pytest.mark.exhaustive
def test_a_scaling_study_by_jobs(slurm, tiny_file, tmp_path):
    """One job after the other, of one node and of two."""
    slurm.wait(lambda: slurm.idle() == NODES, 60, "all nodes are idle")
    text = slurm.call(
        sys.executable, "-m", "jaxmnt.bench", "scaling", "--slurm", "--config", str(tiny_file), "--processes", "1,2",
        "--mode", "weak", "--steps", "9", "--rounds", "1", "launch.gpus_per_node=0", f"launch.python={sys.executable}",
        "launch.environment={JAX_NUM_CPU_DEVICES: '1'}",
    )  # fmt: skip
    assert "weak scaling" in text
    study = json.loads((tmp_path / "run" / "scaling" / "scaling.json").read_text())
    points = study["scalings"][0]["points"]
    assert [(one["processes"], one["devices"]) for one in points] == [(1, 1), (2, 2)]
    assert all(one["predicted"] is None for one in points)  # nothing was measured that could predict
