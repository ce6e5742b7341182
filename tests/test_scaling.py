"""A scaling study: what is read off its runs, how it is shown, and the command."""

import contextlib
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT
from test_calibration import of_a_cpu

from jaxmnt.bench import __main__ as command
from jaxmnt.bench import scaling
from jaxmnt.bench.scaling import ScalingRequest, check
from jaxmnt.config import load_config
from jaxmnt.errors import ConfigError, UserError
from jaxmnt.report.scaling import FILE, FOLDER, Point, Scaling, Study, as_text, draw, read_study
from jaxmnt.telemetry.events import event_file


def point(processes, rows, seconds, predicted=None, waits=0.0, **exposed):
    phases = {"device": waits, "dispatch": min(seconds) - waits, "data": 0.0}
    return Point(
        processes=processes, devices=processes, rows=rows, seconds=seconds, phases=phases, predicted=predicted,
        exposed=exposed,
    )  # fmt: skip


WEAK = Scaling(mode="weak", points=(
    point(1, 8, (1.0, 1.1), 1.0), point(2, 16, (1.25, 1.1), 1.25, waits=0.2), point(4, 32, (2.0, 2.2), 1.6, waits=0.9,
                                                                                    fsdp=0.5, data=0.1),
))  # fmt: skip
STRONG = Scaling(mode="strong", points=(point(1, 8, (1.0, 1.0)), point(2, 8, (0.5, 0.4))))
STUDY = Study(date="2026-01-01", device="cpu", length=32, environment={}, settings=("seed=1",), scalings=(WEAK, STRONG))


def test_efficiency_is_speed_over_that_of_as_many_alone():
    """Of each round against the same round, so that a machine that drifts is compared with itself."""
    assert WEAK.efficiencies(WEAK.points[1]) == pytest.approx([1 / 1.25, 1.0])
    assert WEAK.efficiencies(WEAK.points[0]) == [1.0, 1.0]
    assert STRONG.efficiencies(STRONG.points[1]) == pytest.approx([1.0, 1.25])
    assert WEAK.predicted_efficiency(WEAK.points[1]) == pytest.approx(0.8)
    assert STRONG.predicted_efficiency(STRONG.points[1]) is None


def test_what_costs_most_is_named():
    (told,) = WEAK.warnings()
    assert "weak scaling to 4 processes" in told and "0.50" in told
    assert "waiting for the devices takes 900 ms per step more" in told and "500 ms" in told and "along fsdp" in told
    assert STRONG.warnings() == []


def test_a_study_is_shown():
    text = as_text(STUDY)
    header = next(line for line in text.splitlines() if "processes" in line)
    assert header.split()[:4] == ["processes", "devices", "rows", "step"]
    assert "device" in header.split() and "data" not in header.split()  # which takes no time
    assert "device: waiting for the devices" in text
    four = next(line for line in text.splitlines() if line.split()[:3] == ["4", "4", "32"])
    assert "0.50 to 0.50" in four and "600 ms" in four
    assert text.splitlines()[-1].startswith("warning weak scaling to 4 processes")
    picture = ElementTree.fromstring(draw(STUDY))
    texts = [one.text for one in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert "dashed: predicted" in texts and {"weak", "strong", "4"} <= {*texts}


def test_a_study_is_read_again(tmp_path):
    assert read_study(tmp_path) == (None, None)
    file = tmp_path / FOLDER / FILE
    file.parent.mkdir()
    file.write_text(STUDY.model_dump_json())
    assert read_study(tmp_path) == (STUDY, None)
    file.write_text("{}")
    found, note = read_study(tmp_path)
    assert found is None and str(file) in note


def test_rows_follow_the_processes(tiny_file):
    config = load_config(tiny_file, [])
    request = ScalingRequest(tiny_file, config, (), (2, 4), ("weak", "strong"), 10, 1, Path("nowhere"))
    rows = config.data.global_batch_size
    assert [request.rows("weak", one) for one in (2, 4)] == [rows, 2 * rows]
    assert [request.rows("strong", one) for one in (2, 4)] == [rows, rows]


def test_a_study_keeps_away_from_the_checkpoints_of_the_run(tiny_file):
    config = load_config(
        tiny_file, [f"checkpoint.dir={tiny_file.parent / 'precious'}", "checkpoint.every_minutes=auto"]
    )
    request = ScalingRequest(tiny_file, config, (), (1, 2), ("weak",), 10, 1, Path("nowhere"))
    settings = [f"checkpoint.dir={tiny_file.parent / 'precious'}", *request.settings("weak", 2), "run.dir=nowhere"]
    of_a_run = load_config(tiny_file, settings).checkpoint
    assert (of_a_run.dir, of_a_run.every_minutes, of_a_run.every_steps) == (None, None, 0)


def test_processes_have_gpus_of_their_own(tiny_file, monkeypatch):
    """As many each, whatever their number: else one process would have all of them."""
    config, called = load_config(tiny_file, []), []
    request = ScalingRequest(tiny_file, config, (), (1, 4), ("weak",), 10, 1, Path("nowhere"), devices_per_process=2)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,6,7")
    with pytest.raises(ConfigError, match="--devices-per-process: processes would share the 6 GPUs"):
        check(replace(request, devices_per_process=None))
    with pytest.raises(ConfigError, match="4 processes with 2 GPUs each need more than the 6"):
        check(request)
    monkeypatch.setattr(
        scaling, "_run_launcher", lambda arguments, run_dir, environment: called.append((arguments, environment))
    )
    scaling._launch(request, 3, Path("nowhere"), ["--config", "x"])
    [(arguments, environment)] = called
    assert environment == {"CUDA_VISIBLE_DEVICES": "0,1,2,3,6,7"} and "--devices-per-process" not in arguments
    assert not scaling._should_calibrate(request)


@pytest.mark.parametrize("ran", [False, True])
def test_a_job_that_never_ran_is_not_an_earlier_one(tiny_file, tmp_path, monkeypatch, ran):
    """It ended before it could set aside what the one before had written."""
    write = lambda at: (event_file(tmp_path, 0)).write_text(
        "".join(json.dumps({"kind": kind, "time": at, "finished": True}) + "\n" for kind in ("begin", "end"))
    )
    event_file(tmp_path, 0).parent.mkdir()
    write(1.0)
    request = ScalingRequest(tiny_file, load_config(tiny_file, []), (), (1, 2), ("weak",), 10, 1, tmp_path, slurm=True)

    def call(arguments, run_dir, environment):
        if ran:
            write(2.0)
        return "job 7 submitted"

    monkeypatch.setattr(scaling, "_run_launcher", call)
    monkeypatch.setattr(scaling, "_is_queued", lambda job: False)
    with contextlib.nullcontext() if ran else pytest.raises(UserError, match="job 7"):
        scaling._submit(request, 1, tmp_path, [])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--processes", "1"], ["--processes", "two or more increasing"]),
        (["--processes", "2,1"], ["--processes", "2,1"]),
        (["--processes", "1,x"], ["--processes"]),
        (["--processes", "1,2", "--steps", "2"], ["--steps", "at least 6"]),
        (["--processes", "1,2", "--slurm", "--cores-per-process", "1"], ["--slurm", "leave them out"]),
        (["--processes", "1,3", "--devices-per-process", "1"], ["global_batch_size", "strong scaling to 3 processes"]),
        (["--processes", "1,2", "--devices-per-process", "1", "mesh.data=1"], ["mesh", "weak scaling to 2 processes"]),
        (["--processes", "1,2", "--calibration", "nowhere.json"], ["--calibration", "nowhere.json"]),
    ],
)
def test_a_study_that_cannot_be_made_is_refused(tiny_file, arguments, words):
    """Before anything is started."""
    with pytest.raises(ConfigError) as error:
        command.main(["scaling", "--config", str(tiny_file), *arguments])
    for word in words:
        assert word in str(error.value)


def test_each_round_has_one_run_of_each_case(tiny_file, monkeypatch):
    """So that what changes on the machine in the meantime touches all of them alike."""
    request = ScalingRequest(
        tiny_file, load_config(tiny_file, []), (), (1, 2), ("weak", "strong"), 9, 2, Path("nowhere"),
        devices_per_process=1, should_predict=False,
    )  # fmt: skip
    ran = []

    def run(request, mode, processes):
        ran.append((mode, processes))
        return scaling._RunMeasurement(float(len(ran)), {}, processes, {}, (None, {}))

    monkeypatch.setattr(scaling, "_run", run)
    study = scaling.measure(request, lambda line: None)
    assert ran == [("weak", 1), ("weak", 2), ("strong", 2)] * 2
    seconds = [[point.seconds for point in each.points] for each in study.scalings]
    assert seconds == [[(1.0, 4.0), (2.0, 5.0)], [(1.0, 4.0), (3.0, 6.0)]]


@pytest.mark.exhaustive
def test_a_study_on_one_and_two_processes(tiny_file, tmp_path):
    """It stands in the report of the run, too; no checkpoint of its runs is kept."""
    rates = tmp_path / "rates.json"
    rates.write_text(of_a_cpu())
    done = subprocess.run(
        [sys.executable, "-m", "jaxmnt.bench", "scaling", "--config", str(tiny_file), "--processes", "1,2",
         "--steps", "9", "--rounds", "1", "--devices-per-process", "1", "--cores-per-process", "1",
         "--calibration", str(rates)],
        capture_output=True, text=True, cwd=ROOT, env=os.environ | {"JAX_NUM_CPU_DEVICES": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "weak scaling" in done.stdout and "strong scaling" in done.stdout
    folder = tmp_path / "run" / FOLDER
    study = Study.model_validate_json((folder / FILE).read_bytes())
    assert [[one.processes for one in scaling.points] for scaling in study.scalings] == [[1, 2], [1, 2]]
    assert all(one.predicted for scaling in study.scalings for one in scaling.points)
    assert all(len(one.seconds) == 1 and one.phases for scaling in study.scalings for one in scaling.points)
    assert study.scalings[0].points[0] == study.scalings[1].points[0]  # run once
    assert not list(folder.glob("*/checkpoints"))
    assert "picture" in done.stdout and (folder / "scaling.svg").exists()


@pytest.mark.slow
def test_a_run_that_fails_ends_the_study(tiny_file):
    done = subprocess.run(
        [sys.executable, "-m", "jaxmnt.bench", "scaling", "--config", str(tiny_file), "--processes", "1,2",
         "--no-prediction", "--devices-per-process", "1", "train.loss=no.such.loss"],
        capture_output=True, text=True, cwd=ROOT, env=os.environ,
    )  # fmt: skip
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "no.such" in done.stderr.splitlines()[-1]


def test_the_report_has_the_study(tmp_path):
    from jaxmnt.report.contents import report_of

    run_dir = tmp_path / "run"
    (run_dir / FOLDER).mkdir(parents=True)
    (run_dir / FOLDER / FILE).write_text(STUDY.model_dump_json())
    line = {"kind": "train", "step": 1, "time": 1.0, "attempt": 0, "loss": 1.0, "grad_norm": 1.0, "tokens": 1}
    (run_dir / "metrics.jsonl").write_text(json.dumps(line | {"step_seconds": 1.0}) + "\n")
    (run,) = report_of([str(run_dir)])["runs"]
    assert [one["mode"] for one in run["scaling"]["scalings"]] == ["weak", "strong"]
    assert run["scaling"]["warnings"] == WEAK.warnings()
    assert run["scaling"]["scalings"][0]["points"][1]["efficiencies"] == WEAK.efficiencies(WEAK.points[1])
