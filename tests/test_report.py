"""The report of a run: what its time went into, and what it cost."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import command, metrics, until

from jaxmnt.errors import ConfigError, ExitCode
from jaxmnt.report.__main__ import main
from jaxmnt.report.contents import report_of
from jaxmnt.report.goodput import PARTS, attempt_parts, goodput, sliding_ettr, typical_step
from jaxmnt.report.history import read_attempts
from jaxmnt.report.perfetto import trace_of
from jaxmnt.report.text import summary_text

LAPS = {
    "process": 1.0, "environment": 1.0, "import": 3.0, "rendezvous": 2.0, "preflight": 1.0, "data": 2.0,
    "compile": 20.0, "restore": 10.0, "first_step": 5.0,
}  # fmt: skip


class Log:
    """Writes the lines of a run under a clock of its own."""

    def __init__(self, run: Path):
        self.run, self.now, self.attempt, self.tokens = run, 1000.0, -1, 0
        self.events: list[dict] = []
        self.lines: list[dict] = []

    def event(self, kind: str, **more) -> None:
        self.events.append({"kind": kind, "time": self.now, "process": 0, "host": "a", "attempt": self.attempt} | more)

    def start(self, step: int, **more) -> None:
        """40 s until the first step begins, 10 of them before the event."""
        self.attempt += 1
        began = self.now
        self.now += 10
        self.event("start", run="r", step=step, devices=8, began=began, **more)
        self.now += 30

    def step(self, number: int, seconds: float = 10.0, wait: float = 0.0) -> None:
        self.now += seconds
        self.tokens = 100 * number
        self.lines.append({
            "kind": "train", "step": number, "time": self.now, "attempt": self.attempt, "loss": 1.0, "grad_norm": 1.0,
            "tokens": self.tokens, "step_seconds": seconds, "data_wait_seconds": wait,
        })  # fmt: skip
        if not any(one["kind"] == "started" and one["attempt"] == self.attempt for one in self.events):
            self.event("started", step=number, seconds=LAPS)

    def write(self) -> Path:
        (self.run / "events").mkdir(parents=True)
        text = lambda records: "".join(json.dumps(record) + "\n" for record in records)
        (self.run / "events" / "0.jsonl").write_text(text(self.events))
        (self.run / "metrics.jsonl").write_text(text(self.lines))
        return self.run


@pytest.fixture
def restarted(tmp_path) -> Path:
    """Three attempts: one is killed, one hangs, one ends."""
    log = Log(tmp_path / "run")
    log.start(0, cost_per_gpu_hour=2.0)
    log.step(1, 15.0)
    for number in range(2, 11):
        log.step(number)
    log.now += 4.0
    log.event("checkpoint_commit", step=10, blocked_seconds=4.0)
    log.step(11, 12.0, wait=3.0)
    log.step(12, 10.0, wait=3.0)
    log.lines, lost = [line for line in log.lines if line["step"] <= 10], log.now
    # Killed; 100 s later the scheduler starts it again.
    log.now += 100
    log.start(10)
    log.event("steps_again", of_attempt=0, steps=2, seconds=22.0, until=lost)
    log.step(11, 10.0)
    log.step(12, 13.0, wait=4.0)
    log.event("bad_step", step=13)
    log.step(13)
    log.now += 45
    log.event("hang", why="no progress", code=4)
    log.now += 5
    log.start(13)
    log.step(14)
    log.now += 7
    log.lines.append({"kind": "eval", "step": 14, "time": log.now, "loss": 1.0, "seconds": 7.0})
    log.now += 6
    log.event("checkpoint_commit", step=14, blocked_seconds=2.0)
    log.event("end", step=14, finished=True)
    return log.write()


def test_the_parts_are_those_of_a_sum_by_hand(restarted):
    attempts = read_attempts(restarted)
    whole = goodput(attempts)
    by_hand = {
        # Of the first step of each attempt what a typical one takes, and of the twelfth all but 3 s of waiting.
        "steps": 10 + 9 * 10 + (10 + 10) + 10,
        "data": 3,
        "start": 3 * 10,
        "compile": 3 * 20 + 5,
        "restore": 3 * 10,
        "checkpoint": 4 + 2 + 4,
        "evaluation": 7,
        "bad_steps": 10,
        "no_targets": 0,
        "again": 22,
        "hang": 45,
        "failure": 0,
        "between": 100 + 5,
        "other": 0,
    }
    assert set(by_hand) == set(PARTS)
    assert whole.seconds == pytest.approx(by_hand)
    assert whole.wall_seconds == pytest.approx(attempts[-1].end_time - attempts[0].begin_time) == sum(by_hand.values())
    assert whole.ettr == pytest.approx(by_hand["steps"] / whole.wall_seconds)
    running = whole.wall_seconds - by_hand["between"]
    assert whole.gpu_hours == pytest.approx(8 * running / 3600)
    assert whole.cost == pytest.approx(2 * whole.gpu_hours), "a later attempt has the last price that is known"
    assert whole.cost_per_billion_tokens == pytest.approx(whole.cost / 1400 * 1e9)
    assert whole.productive_cost == pytest.approx(whole.cost * by_hand["steps"] / running)
    typical = typical_step(attempts)
    for attempt in attempts:
        assert sum(attempt_parts(attempt, typical).values()) == pytest.approx(attempt.seconds)
    assert [attempt.end_kind for attempt in attempts] == [None, "hang", "end"]


def test_steps_without_targets_are_a_part_of_their_own(tmp_path):
    """They change nothing, so they are not productive; they are no bad steps, and no trace has their loss."""
    log = Log(tmp_path / "run")
    log.start(0)
    for number in range(1, 6):
        log.step(number)
        log.lines[-1]["tokens_per_second"] = 0.0 if number in (2, 3) else 10.0
        log.lines[-1] |= {"loss": None, "grad_norm": None} if number in (2, 3, 4) else {}
    log.event("bad_step", step=4)
    log.event("end", step=5, finished=True)
    run = log.write()
    whole = goodput(read_attempts(run))
    parts = {name: whole.seconds[name] for name in ("steps", "no_targets", "bad_steps")}
    assert parts == {"steps": 20.0, "no_targets": 20.0, "bad_steps": 10.0}
    report = report_of([str(run)])
    summary = report["runs"][0]["summary"]
    assert (summary["steps_without_targets"], summary["bad_steps"]) == (2, 1)
    assert "note    2 steps had no targets and changed nothing" in summary_text(report)
    traced = [span for span in json.loads(trace_of([str(run)]))["traceEvents"] if span["name"] == "loss"]
    assert [span["args"] for span in traced] == [{"loss": 1.0}, {"loss": 1.0}]


def test_steps_that_are_lost_belong_to_who_took_them(tmp_path):
    """An attempt that does not get to a step lies between; and one falls back past the checkpoint of the one before."""
    log = Log(tmp_path / "run")
    log.start(0)
    for number in range(1, 21):
        log.step(number)
    first, log.lines = log.now, log.lines[:5]
    log.now += 50
    log.start(10)
    log.event("failed", why="no memory")
    log.now += 5
    log.start(10)
    for number in range(11, 14):
        log.step(number)
    second, log.lines = log.now, log.lines[:5]
    log.now += 20
    log.start(5)
    log.event("steps_again", of_attempt=0, steps=15, seconds=150.0, until=first)
    log.event("steps_again", of_attempt=2, steps=3, seconds=30.0, until=second)
    log.step(6)
    log.event("end", step=6, finished=True)
    attempts = read_attempts(log.write())
    whole = goodput(attempts)
    assert [attempt.seconds for attempt in attempts] == [40 + 200, 40, 40 + 30, 40 + 10]
    assert [attempt.lost_steps for attempt in attempts] == [15, 0, 3, 0]
    assert whole.seconds["again"] == 180 and whole.seconds["between"] == 50 + 5 + 20
    assert sum(whole.seconds.values()) == pytest.approx(whole.wall_seconds) == log.now - 1000
    assert whole.ettr == whole.ettr_last_hour, "of a run that is shorter than an hour"


def test_clocks_that_were_set_do_not_make_time(tmp_path):
    log = Log(tmp_path / "run")
    log.start(0)
    for number in range(1, 11):
        log.step(number)
    log.now -= 500
    log.step(11)
    log.event("end", step=11, finished=True)
    whole = goodput(read_attempts(log.write()))
    assert sum(whole.seconds.values()) == pytest.approx(whole.wall_seconds)


@pytest.mark.parametrize("ahead", [86400.0, -86400.0 * 365])
def test_attempts_follow_each_other_by_their_numbers(tmp_path, capsys, ahead):
    """The clock of the first host is a day ahead, or a year behind. What its events tell keeps its seconds."""
    log = Log(tmp_path / "run")
    log.now = 1e9 + ahead
    log.start(0, cost_per_gpu_hour=3600.0 / 8)
    for number in range(1, 7):
        log.step(number)
    log.event("failed", why="a fault")
    log.now -= ahead
    log.now += 50
    log.start(6)
    for number in range(7, 13):
        log.step(number)
    log.event("end", step=12, finished=True)
    run = str(log.write())
    attempts = read_attempts(Path(run))
    assert [(one.number, one.seconds, one.lost_steps) for one in attempts] == [(0, 100, 0), (1, 100, 0)]
    (told,) = report_of([run])["runs"]
    between = 0 if ahead > 0 else 30 * 86400
    assert told["state"] == "finished" and told["summary"]["tokens"] == 1200
    assert told["goodput"]["cost"] == 200 and told["goodput"]["wall_seconds"] == 200 + between
    assert sum(told["goodput"]["seconds"].values()) == pytest.approx(200 + between)
    assert told["goodput"]["seconds"]["between"] == between and told["goodput"]["ettr_last_hour"] <= 1
    (failed,) = told["failures"]
    assert (failed["attempt"], failed["why"]) == (0, "a fault")
    assert failed["time"] == attempts[0].end_time == attempts[1].begin_time - between
    kinds = [one["kind"] for one in told["timeline"]]
    assert kinds == ["start", "started", "failed", "start", "started", "end"]


def test_the_last_hour_counts_by_itself(tmp_path):
    log = Log(tmp_path / "run")
    log.start(0)
    log.step(1)
    for number in range(2, 400):
        log.step(number)
    log.now += 900
    for number in range(400, 580):
        log.step(number)
    whole = goodput(read_attempts(log.write()))
    assert whole.ettr_last_hour == pytest.approx((3600 - 900) / 3600)
    sliding = sliding_ettr(read_attempts(tmp_path / "run"))
    assert len(sliding) == 579 and sliding[-1] == pytest.approx(whole.ettr_last_hour)
    assert sliding[398] == pytest.approx(1.0) and min(sliding[50:]) == pytest.approx(2700 / 3600, abs=0.01)
    assert whole.seconds["other"] == pytest.approx(900)


def test_every_number_is_there_as_json(restarted, capsys):
    assert main([str(restarted), "--json", "--price", "3.5"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["runs"]
    assert told["goodput"]["cost"] == pytest.approx(3.5 * told["goodput"]["gpu_hours"])
    assert [attempt["steps"] for attempt in told["attempts"]] == [10, 3, 1]
    assert main([str(restarted), "--text"]) == 0
    text = capsys.readouterr().out
    assert not (restarted / "report.html").exists()
    assert "goodput" in text and "hanging until the watchdog ended the attempt" in text
    assert "2 more were repeated later" in text
    assert "hang: no progress" in text and "finished" in text


GIB = 2**30


def advised(
    tmp_path, *, compiled=None, events=(), wait=0.0, config=None, steps=40, phases=None, line=None, kind="NVIDIA H100"
):
    """The rules that speak of a run of steps of 10 s, with their words."""
    log = Log(tmp_path / "run")
    log.start(0, environment={"device kind": kind})
    log.event("compile", seconds=20.0, **(compiled or {}))
    for number in range(1, steps + 1):
        log.step(number, 10.0, wait)
        log.lines[-1] |= line or {}
        for name, at, more in events:
            if at == number:
                log.event(name, step=number, **more)
    run = log.write()
    (run / "config.yaml").write_text(json.dumps(config or {}))
    if phases is not None:
        line = {"kind": "phases", "time": log.now, "step": steps, "steps": steps, "mean": phases}
        (run / "phases.jsonl").write_text(json.dumps(line) + "\n")
    (told,) = report_of([str(run)])["runs"]
    return {one["rule"]: f"{one['evidence']}; {one['do']}" for one in told["advice"]}


ROOMY = {"memory": {"peak": 30 * GIB, "limit": 73 * GIB}}
FULL = {"memory": {"peak": 70 * GIB, "limit": 73 * GIB}, "idle_share": 0.02, "microbatches": 8}


def expected(seconds, **exposed):
    return {"expected_step_seconds": seconds, "expected_exposed_seconds": exposed}


@pytest.mark.parametrize(
    ("more", "rule", "words"),
    [
        ({"phases": {"data": 1.2, "device": 8.0}}, "input-bound", ["1200 ms", "12%", "data.read_threads"]),
        (
            {"compiled": FULL | expected(9.0, fsdp=0.4, model=2.0)},
            "communication-bound", ["mesh.model", "2.4 s", "jaxmnt.plan"],
        ),
        (
            {"compiled": FULL | expected(5.0)},
            "slower than expected", ["10 s", "2.00 times", "profile"],
        ),
        ({"compiled": FULL | {"idle_share": 0.25}}, "bubble", ["20%", "train.microbatch_size"]),
        (
            {"compiled": FULL | ROOMY, "config": {"train": {"remat": "full"}}},
            "remat not needed", ["30 GiB", "41%", "train.remat=dots"],
        ),
        (
            {"compiled": FULL | ROOMY, "config": {"train": {"remat": "none"}}},
            "memory unused", ["train.microbatch_size"],
        ),
        (
            {"events": [("checkpoint_commit", at, {"blocked_seconds": 9.0}) for at in (10, 20, 30, 40)]},
            "checkpoints too often", ["every 100 s", "9 s", "every_minutes: auto", "every_steps: 0"],
        ),
        (
            {"events": [
                ("straggler", 20, {"at_fault": 3, "at_fault_host": "n7", "phase": "data", "slower_seconds": 2.0}),
            ]},
            "slow host", ["process 3 on n7", "2000 ms", "data"],
        ),
        (
            {"events": [("config_change", 1, {"key": "data.global_batch_size", "before": 256, "now": 1024})]},
            "learning rate", ["1024", "2.00", "optimizer.learning_rate"],
        ),
    ],
)  # fmt: skip
def test_advice_is_given_with_its_evidence(tmp_path, more, rule, words):
    found = advised(tmp_path, **({"compiled": FULL} | more))
    assert list(found) == [rule]
    for word in words:
        assert word in found[rule], found[rule]


def test_remat_is_left_alone_on_cpus(tmp_path):
    """Where computing again is often quicker than going through memory."""
    assert not advised(tmp_path, compiled=FULL | ROOMY, config={"train": {"remat": "full"}}, kind="cpu")


def test_a_good_run_gets_no_advice(tmp_path, capsys):
    assert advised(tmp_path, compiled=FULL | {"expected_step_seconds": 9.5}, phases={"data": 0.1}) == {}
    assert main([str(tmp_path / "run"), "--advise"]) == 0
    assert "no rule found an improvement" in capsys.readouterr().out


def test_a_host_that_is_slow_again_is_told(tmp_path):
    who = {"at_fault": 3, "at_fault_host": "n7", "phase": "data"}
    events = [
        ("straggler", 10, who | {"slower_seconds": 2.0}), ("straggler_over", 20, who),
        ("straggler", 30, who | {"slower_seconds": 3.0}),
    ]  # fmt: skip
    assert "3000 ms" in advised(tmp_path, compiled=FULL, events=events)["slow host"]


def test_a_batch_beyond_the_noise_scale(tmp_path):
    """Squares of which the scale is 20 rows: a batch of 16 is within it, one of 64 is not. A few steps do not tell."""
    of = lambda rows: 1 + 20 / rows
    for rows, steps, is_beyond in ((16, 100, False), (64, 99, False), (64, 100, True)):
        lines = {"gradient_squares": {"small": of(4), "large": of(rows)}}
        compiled = FULL | {"rows": rows, "rows_of_small_batches": 4}
        found = advised(tmp_path / f"{rows}-{steps}", compiled=compiled, line=lines, steps=steps)
        assert ("batch beyond the critical size" in found) == is_beyond
    assert (
        "20 rows" in found["batch beyond the critical size"] and "4.2 times" in found["batch beyond the critical size"]
    )


def test_what_is_set_already_is_not_advised(tmp_path):
    saves = [("checkpoint_commit", at, {"blocked_seconds": 9.0}) for at in (10, 20, 30, 40)]
    config = {"checkpoint": {"every_minutes": "auto", "every_steps": 0}, "train": {"remat": "none"}}
    compiled = FULL | ROOMY | {"microbatches": 1}  # a larger microbatch there is none
    assert advised(tmp_path, compiled=compiled, events=saves, config=config) == {}


def test_a_slow_host_that_is_over_and_a_rate_that_was_changed_need_no_advice(tmp_path):
    who = {"at_fault": 3, "at_fault_host": "n7", "phase": "data"}
    change = lambda key, before, now: ("config_change", 1, {"key": key, "before": before, "now": now})
    events = [
        ("straggler", 10, who | {"slower_seconds": 2.0}), ("straggler_over", 20, who),
        change("data.global_batch_size", 256, 1024), change("optimizer.learning_rate", 1e-4, 2e-4),
    ]  # fmt: skip
    assert advised(tmp_path, compiled=FULL, events=events) == {}


def test_restarts_that_compile_again_are_told(restarted):
    (told,) = report_of([str(restarted)])["runs"]
    assert [one["rule"] for one in told["advice"] if one["rule"] == "recompilations"] == []
    text = (restarted / "events" / "0.jsonl").read_text()
    (restarted / "events" / "0.jsonl").write_text(text.replace('"compile": 20.0', '"compile": 25.0'))
    (told,) = report_of([str(restarted)])["runs"]
    assert "run.compile_cache" in next(one["do"] for one in told["advice"] if one["rule"] == "recompilations")


def test_a_directory_without_a_run_is_named(tmp_path):
    with pytest.raises(ConfigError, match="there is no such folder"):
        read_attempts(tmp_path / "none")
    with pytest.raises(ConfigError, match=f"there is no such folder; give the run without a step, {tmp_path}$"):
        read_attempts(Path(f"{tmp_path}@best"))
    log = Log(tmp_path / "run")
    log.lines = []
    log.write()
    with pytest.raises(ConfigError, match="it is not the directory of a run"):
        read_attempts(tmp_path / "run")
    log.event("start", attempt=0, step=0)
    (tmp_path / "run" / "events" / "0.jsonl").write_text(json.dumps(log.events[0]) + "\n")
    assert main([str(tmp_path / "run"), "--text"]) == 0, "a start of which nothing else is known"


def test_torn_and_foreign_lines_are_passed_over(restarted, capfd):
    whole = goodput(read_attempts(restarted))
    for name in ("events/0.jsonl", "metrics.jsonl"):
        path = restarted / name
        path.write_bytes(
            b'{"kind": "train", "time": 1, "step": 1, "loss": 1, "grad_norm": 1, "tokens": 1, "step_seconds": "x"}\n'
            b'{"kind": "start"}\nnull\n\xff\n{"kind": "new", "time": 1, "what": [1]}\n' + path.read_bytes() + b'{"kind"'
        )
    assert goodput(read_attempts(restarted)) == whole
    assert "cannot be read" in capfd.readouterr().err


def test_the_command_needs_no_jax(restarted):
    done = command(
        "jaxmnt.report", str(restarted), "--perfetto", str(restarted / "trace.json"), PYTHONPROFILEIMPORTTIME="1"
    )
    assert done.returncode == 0 and "goodput" in done.stdout
    assert not any(line.endswith("| jax") for line in done.stderr.splitlines())


@pytest.mark.slow
@pytest.mark.alone
def test_a_run_with_two_restarts_adds_up_to_its_wall_time(tiny_file, tmp_path):
    """It is stopped once and killed once."""
    arguments = ["-m", "jaxmnt.train", "--config", str(tiny_file), "train.steps=300", "checkpoint.every_steps=10"]
    start = lambda *more: subprocess.Popen(
        [sys.executable, *arguments, *more],
        env=dict(os.environ, JAX_NUM_CPU_DEVICES="1"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    run = tmp_path / "run"
    began = time.time()
    assert start("train.stop_after=25").wait(120) == ExitCode.STOPPED
    killed = start()
    until(lambda: len(metrics(run)) >= 40, 60)
    killed.kill()
    killed.wait()
    time.sleep(2)  # as if in a queue
    assert start().wait(120) == ExitCode.FINISHED
    exited = time.time()
    attempts = read_attempts(run)
    whole = goodput(attempts)
    (ended,) = (record["time"] for record in attempts[-1].events if record["kind"] == "end")
    wall = ended - began
    assert exited - ended < 3, "what Python does after the last event is not known to the run"
    assert sum(whole.seconds.values()) == pytest.approx(whole.wall_seconds) == pytest.approx(wall, rel=0.01)
    assert [attempt.end_kind for attempt in attempts] == ["end", None, "end"] and attempts[1].lost_steps > 0
    assert whole.seconds["again"] > 0 and whole.seconds["between"] >= 2
    assert whole.seconds["other"] < 0.05 * wall, whole.seconds
