"""Where the time of a step goes, and who holds the others up."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import events, launch
from hypothesis import given
from hypothesis import strategies as st

from jaxmnt.telemetry.events import PHASE_LINES, read_lines
from jaxmnt.telemetry.phase_log import PhaseLog
from jaxmnt.telemetry.phases import PHASES, StepPhases, StepTimer
from jaxmnt.telemetry.stragglers import StragglerDetector, _median_of_others

LAUNCH = """
import sys
from jaxmnt.launch.local import launch, local_run
from jaxmnt.launch.restarts import Restarts
sys.exit(launch(local_run(sys.argv[2:], 1, ("slow_train", sys.argv[1])), 4, Restarts(0)))
"""


def test_each_moment_belongs_to_one_phase():
    now = [0.0]

    def work(seconds: float) -> None:
        now[0] += seconds

    timer = StepTimer(clock=lambda: now[0])
    work(5)
    timer.restart()
    work(1)
    with timer.during("save"):
        work(2)
        with timer.during("device"):
            work(4)
        work(8)
    timer.move(3, "save", "peers")
    timer.move(99, "data", "peers")  # there was none
    work(16)
    timer.end_step(7)
    with pytest.raises(KeyError), timer.during("data"):
        work(32)
        raise KeyError
    timer.end_step(8)
    seven, eight = timer.take()
    assert seven.step == 7 and dict(zip(PHASES, seven.seconds, strict=True)) == {
        "data": 0, "host_to_device": 0, "dispatch": 0, "device": 4, "save": 7, "evaluation": 0, "probe": 0, "peers": 3,
        "writing": 0, "other": 17,
    }  # fmt: skip
    assert eight.step == 8 and sum(eight.seconds) == eight.seconds[PHASES.index("data")] == 32
    assert timer.take() == []


@given(st.lists(st.lists(st.integers(0, 5), min_size=4, max_size=4), min_size=2, max_size=9))
def test_the_median_of_the_others(rows):
    values = np.array(rows, float).T  # [4, P]
    plain = [[np.median(np.delete(row, i)) for i in range(row.size)] for row in values]
    np.testing.assert_allclose(_median_of_others(values), plain)


def steps_of(processes: int, steps: int, seed: int = 0, noise: float = 0.001) -> np.ndarray:
    """Seconds [steps, P, phases] of steps of 100 ms, in which nobody is slow."""
    random = np.random.default_rng(seed)
    seconds = np.zeros((steps, processes, len(PHASES)))
    for phase, mean in {"data": 0.001, "host_to_device": 0.002, "dispatch": 0.003, "other": 0.004}.items():
        seconds[:, :, PHASES.index(phase)] = mean + noise * random.exponential(size=(steps, processes))
    seconds[::5, :, PHASES.index("save")] = 0.05 + 0.005 * random.random((seconds[::5].shape[0], processes))
    return equalised(seconds)


def equalised(seconds: np.ndarray) -> np.ndarray:
    """Steps of all processes last equally long: who is ready earlier waits on its devices."""
    own = seconds.sum(axis=2)
    seconds[:, :, PHASES.index("device")] = 0.1 + own.max(axis=1, keepdims=True) - own
    return seconds


def seen(seconds: np.ndarray) -> list[tuple[int, int, str, bool]]:
    detector = StragglerDetector(seconds.shape[1])
    found = [(step, one) for step, times in enumerate(seconds) for one in detector.see(times)]
    return [(step, one.process, one.phase, one.began) for step, one in found]


@pytest.mark.parametrize("phase", ["data", "host_to_device", "dispatch", "save", "other"])
@pytest.mark.parametrize("processes", [2, 3, 4, 33, 1000])
def test_who_is_slow_is_named_and_nobody_else(processes, phase):
    seconds = steps_of(processes, 120)
    slow = processes // 2
    kept = seconds[40:80, slow, PHASES.index(phase)]
    kept += (0.08 if phase == "save" else 0.03) * (kept > 0)
    began, over = seen(equalised(np.where(np.array(PHASES) == "device", 0, seconds)))
    assert began[1:] == (slow, phase, True) and 40 < began[0] < 70
    assert over[1:] == (slow, phase, False) and 80 < over[0] < 120


@pytest.mark.parametrize("processes", [1, 2, 4, 64])
def test_nobody_is_named_in_a_quiet_run(processes):
    for seed in range(5):
        assert seen(steps_of(processes, 400, seed)) == []


def test_one_long_step_is_no_straggler():
    """A hiccup of 2 s, and another kind of work every tenth step, are not what a host is."""
    seconds = steps_of(4, 200)
    seconds[50, 1, PHASES.index("data")] += 2
    seconds[::10, 2, PHASES.index("other")] += 0.05
    assert seen(equalised(np.where(np.array(PHASES) == "device", 0, seconds))) == []


def test_two_that_are_slow_are_both_named():
    seconds = steps_of(8, 60)
    seconds[:, [2, 5], PHASES.index("data")] += [0.03, 0.05]
    assert {found[1:] for found in seen(seconds)} == {(2, "data", True), (5, "data", True)}


def test_lines_of_steps_wait_for_all_processes(tmp_path):
    log = PhaseLog(tmp_path, 3)
    row = lambda step, **phases: StepPhases(step, tuple(phases.get(phase, 0.0) for phase in PHASES))
    log.add(0, [row(1, data=0.25), row(2, data=0.5)])
    log.add(2, json.loads(json.dumps([row(1, data=1.0, save=2.0)])))
    log.add(1, [row(2), row(1, data=0.25)])
    log.add(2, [row(2)])
    log.close()
    one, two, processes = read_lines(tmp_path / PHASE_LINES)
    assert (one["step"], one["processes"], two["step"]) == (1, 3, 2)
    assert one["mean"] == {"data": 0.5, "save": pytest.approx(2 / 3, abs=1e-6)}
    assert one["longest"] == {"data": [1.0, 2], "save": [2.0, 2]}
    assert two["longest"] == {"data": [0.5, 0]}
    assert [times[PHASES.index("data")] for times in one["each"]] == [0.25, 0.25, 1.0]
    assert (processes["kind"], processes["step"], processes["steps"]) == ("processes", 2, 2)
    assert [own[1] for own in processes["own"]] == pytest.approx([0.375, 0.125, 1.5]), "the medians"


@pytest.mark.parametrize("rows", [[1], [[1, [0.0]]], [["1", [0.0] * 8]], [[1, [-1.0] * 8]], [[1, ["a"] * 8]], {"a": 1}])
def test_what_another_version_says_is_refused(tmp_path, rows):
    with pytest.raises((ValueError, TypeError)):
        PhaseLog(tmp_path, 2).add(1, rows)


def test_a_line_is_short_with_a_thousand_processes(tmp_path):
    log = PhaseLog(tmp_path, 1000)
    random = np.random.default_rng(0)
    for process in range(1000):
        steps = random.random((110, len(PHASES))).round(6)
        log.add(process, [StepPhases(step, tuple(seconds)) for step, seconds in enumerate(steps.tolist(), 1)])
    log.close()
    lines = read_lines(tmp_path / PHASE_LINES)
    assert [line["kind"] for line in lines].count("phases") == 110
    assert [line["steps"] for line in lines if line["kind"] == "processes"] == [100]
    assert (tmp_path / PHASE_LINES).stat().st_size <= 110 * 1024


@pytest.mark.slow
@pytest.mark.alone
def test_slow_processes_of_a_run_are_named(tiny_file, tmp_path):
    """Four processes, and one after another that sleeps for 30 % of a step: in its input, on the host, in its saves."""
    plan = "2 data 11 45; 1 other 51 85; 3 save 90 125"
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    told = tmp_path / "told.py"
    told.write_text(f"import sys; open({str(tmp_path / 'told')!r}, 'a').write(sys.stdin.read() + chr(10))")
    notify = json.dumps([sys.executable, str(told)])
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, plan, "--config", str(tiny_file), "train.steps=125", "train.eval_every=0",
         "checkpoint.every_steps=5", "data.log_digest=false", "model.hidden_size=128", "data.sequence_length=128",
         f"run.notify={notify}"],
        capture_output=True, text=True, env=dict(os.environ, PYTHONPATH=path), timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    found = [(one["at_fault"], one["phase"], one["step"]) for one in events(run, "straggler")]
    for process, phase, first in ((2, "data", 11), (1, "other", 51), (3, "save", 90)):
        named = [step for number, name, step in found if (number, name) == (process, phase)]
        assert any(first <= step <= first + 30 for step in named), (process, phase, found)
    # What else the machine does may make saves of tiny files long; nothing else is named without a reason.
    assert sum(phase != "save" for _, phase, _ in found) == 2, found
    assert "process 2 of 4 on " in done.stdout and "more than they do for waiting for input" in done.stdout
    heard = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    assert {one["at_fault"] for one in heard if one["kind"] == "straggler"} >= {1, 2, 3}
    lines = [line for line in read_lines(run / PHASE_LINES) if line["kind"] == "phases"]
    assert sorted(line["step"] for line in lines) == list(range(1, 126))
    assert all(line["processes"] == 4 for line in lines)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(1, 10))])
def test_nobody_is_named_in_a_quiet_run_of_two_processes(tiny_file, tmp_path, number):
    done = launch(tiny_file, "train.steps=300", "checkpoint.every_steps=50", processes=2, devices=1)
    assert done.returncode == 0, done.stderr
    assert events(tmp_path / "run", "straggler") == []
    lines = [line for line in read_lines(tmp_path / "run" / PHASE_LINES) if line["kind"] == "phases"]
    assert sorted(line["step"] for line in lines) == list(range(1, 301))
