"""Where the numbers of a run go besides metrics.jsonl; and what becomes of the run when a sink fails or hangs."""

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from conftest import losses

from jaxmnt.distributed.heartbeat import disconnected_heartbeat, ending_on_exceptions_in_threads
from jaxmnt.distributed.identity import Identity
from jaxmnt.errors import ConfigError, ExitCode
from jaxmnt.telemetry.sinks import SinkRun, Sinks, packages_of, resolve_sinks, scalars
from jaxmnt.train import train

RECORD = {
    "kind": "train", "step": 3, "time": 5.0, "attempt": 0, "loss": 2.5, "grad_norm": None, "tokens": 7, "mfu": None,
    "tokens_per_second": 9.0, "epochs": {"a b": 0.5}, "model": {"router": 1.0, "loads": {"0": 2.0}},
    "batch_digest": "x",
}  # fmt: skip


class Kept:
    """A sink of a user's own."""

    runs: ClassVar[list[SinkRun]] = []
    told: ClassVar[list[tuple]] = []
    closed = 0

    def __init__(self, run):
        self.runs.append(run)

    def write(self, step, time, values):
        self.told.append((step, time, values))

    def close(self):
        type(self).closed += 1


class Breaks(Kept):
    def write(self, step, time, values):
        if step > 4:
            raise RuntimeError("the server said no")


class Hangs(Kept):
    end = threading.Event()

    def write(self, step, time, values):
        self.end.wait(120)


@pytest.fixture(autouse=True)
def fresh():
    Kept.runs, Kept.told, Kept.closed = [], [], 0
    yield
    Hangs.end.set()
    Hangs.end = threading.Event()


def by_step(run: Path) -> dict[int, float]:
    return dict(enumerate(losses(run), 1))


def run_of(folder: Path) -> SinkRun:
    return SinkRun("id", folder, {}, "project", 0, 0)


def test_the_numbers_of_a_line_by_name():
    assert scalars(RECORD) == {
        "train/loss": 2.5, "train/tokens": 7.0, "performance/tokens_per_second": 9.0, "epochs/a b": 0.5,
        "model/router": 1.0, "model/loads/0": 2.0,
    }  # fmt: skip
    evaluation = {
        "kind": "eval",
        "step": 3,
        "time": 1.0,
        "loss": 2.0,
        "seconds": 4.0,
        "sources": {"web": {"loss": 1.5}},
    }
    assert scalars(evaluation) == {"eval/loss": 2.0, "eval/seconds": 4.0, "eval/web/loss": 1.5}


@pytest.mark.slow
def test_a_sink_of_ones_own_hears_of_a_run_and_of_its_restart(tiny):
    settings = ("telemetry.sinks=[test_sinks.Kept]", "train.steps=10", "train.eval_every=5", "telemetry.project=mine")
    assert train(tiny(*settings, "train.stop_after=6")) == ExitCode.STOPPED
    assert train(tiny(*settings)) == ExitCode.FINISHED
    one, two = Kept.runs
    assert one.id == two.id and (one.step, two.step, one.attempt, two.attempt) == (0, 6, 0, 1)
    assert one.project == "mine" and one.config["model"]["hidden_size"] == 64
    steps = [step for step, _, values in Kept.told if "train/loss" in values]
    assert steps == list(range(1, 11)) and Kept.closed == 2
    assert [step for step, _, values in Kept.told if "eval/loss" in values] == [5, 10]


@pytest.mark.slow
def test_a_sink_that_fails_or_hangs_changes_nothing(tiny, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("jaxmnt.telemetry.sinks._CLOSE_TIMEOUT_SECONDS", 0.5)
    assert train(tiny("train.steps=8", "run.dir=" + str(tmp_path / "alone"))) == 0
    sinks = "telemetry.sinks=[test_sinks.Breaks,test_sinks.Hangs,test_sinks.Kept]"
    assert train(tiny("train.steps=8", sinks)) == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "alone")
    said = capfd.readouterr().err
    assert "WARNING test_sinks.Breaks gets no more numbers from this run: RuntimeError: the server said no" in said
    assert "note: test_sinks.Hangs lacks up to 9 lines" in said
    assert len(Kept.told) == 9, "who works is not kept from it"


def test_handing_over_takes_no_time_while_a_sink_hangs(tmp_path):
    sinks = Sinks(["test_sinks.Hangs"], run_of(tmp_path))
    took = []
    for number in range(20_000):
        started = time.perf_counter()
        sinks.put(RECORD | {"step": number})
        took.append(time.perf_counter() - started)
    assert np.quantile(took, 0.99) < 1e-3
    sinks.close(patient=False)


@pytest.mark.slow
def test_a_full_disk_leaves_losses_and_checkpoints_as_they_are(tiny, tmp_path, capfd):
    """Under all that telemetry writes; the checkpoints are on another."""
    files = ("metrics.jsonl", "phases.jsonl", "resources.jsonl")
    settings = ("train.steps=8", "checkpoint.every_steps=4", "telemetry.sinks=[test_sinks.Kept]")
    settings += ("telemetry.resources_every_seconds=0.1",)
    run, alone = tmp_path / "run", tmp_path / "alone"
    run.mkdir()
    for name in files:
        (run / name).symlink_to("/dev/full")
    assert train(tiny(*settings)) == ExitCode.FINISHED
    told = {step: values["train/loss"] for step, _, values in Kept.told if "train/loss" in values}
    err = capfd.readouterr().err
    assert all(err.count(f"WARNING {run}/{name} cannot be written: No space left on device") == 1 for name in files)
    assert train(tiny(*settings, f"run.dir={alone}")) == ExitCode.FINISHED
    assert told == by_step(alone)
    for step in "48":
        one, other = (
            json.loads((where / "checkpoints" / step / "jaxmnt.json").read_text())["manifest"]["arrays"]
            for where in (run, alone)
        )
        assert {name: array["content"] for name, array in one.items()} == {
            name: array["content"] for name, array in other.items()
        }


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_exception_in_a_thread_of_a_sinks_library_ends_no_run(monkeypatch, capsys):
    heartbeat, ended = disconnected_heartbeat(Identity()), []
    monkeypatch.setattr(heartbeat, "end", lambda *reason: ended.append(reason))

    def fail():
        raise OSError("no space left")

    for may_fail, times in ((frozenset(), 1), (packages_of(["test_sinks.Kept"]), 1), (packages_of(["wandb"]), 2)):
        heartbeat.may_fail = may_fail
        with ending_on_exceptions_in_threads(heartbeat):
            thread = threading.Thread(target=fail)
            thread.start()
            thread.join()
        assert len(ended) == times
    assert "no space left" in capsys.readouterr().err, "it is printed in any case"


def test_what_is_no_sink_is_refused(tiny, tmp_path):
    for names, words in (
        (["tensorbord"], "unknown sink 'tensorbord'; .*tensorboard"),
        (["no.such.Sink"], "no.such.Sink cannot be imported"),
        (["test_sinks.Nothing"], "test_sinks has no Nothing"),
        (["json.dumps"], "must be a class with the methods write and close"),
    ):
        with pytest.raises(ConfigError, match=words):
            resolve_sinks(names)
    with pytest.raises(ConfigError, match="cannot be imported"):
        train(tiny("telemetry.sinks=[no.such.Sink]"))
    assert not (tmp_path / "run" / "events").exists()


def test_a_folder_of_a_packages_name_is_not_the_package(tmp_path, monkeypatch):
    """Such as wandb, in which that keeps runs: the working directory is where Python looks first."""
    (tmp_path / "wandb" / "run-1").mkdir(parents=True)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert importlib.util.find_spec("wandb") is not None
    with pytest.raises(ConfigError, match=r'wandb needs a package; install .*"\.\[wandb\]"$'):
        resolve_sinks(["wandb"])


def test_tensorboard_is_taken_where_it_is_installed(monkeypatch):
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: SimpleNamespace(origin="x") if name == "tensorboard" else None
    )
    assert resolve_sinks(None) == ["tensorboard"] and resolve_sinks([]) == []
    with pytest.raises(ConfigError, match=r'pip install -c constraints\.txt -e "\.\[wandb\]"$'):
        resolve_sinks(["wandb"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert resolve_sinks(None) == []


def trained_twice(tiny_file: Path, sink: str, *, lost: bool = False, **environment: str) -> None:
    """A run that is stopped and gone on with, in processes of their own: libraries keep a state in theirs. With `lost`,
    the last two steps before the stop are taken again."""
    command = [
        sys.executable, "-m", "jaxmnt.train", "--config", str(tiny_file), f"telemetry.sinks=[{sink}]", "train.steps=8",
        "train.eval_every=4", "checkpoint.every_steps=3",
    ]  # fmt: skip
    environment = dict(os.environ, JAX_NUM_CPU_DEVICES="1", **environment)
    for more, code in ((["train.stop_after=5"], ExitCode.STOPPED), ([], ExitCode.FINISHED)):
        done = subprocess.run([*command, *more], env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == code, done.stderr
        assert "gets no more" not in done.stderr and "lacks up to" not in done.stderr, done.stderr
        newest = tiny_file.parent / "run" / "checkpoints" / "5"
        if lost and newest.exists():
            newest.rename(tiny_file.parent / "away")


@pytest.mark.slow
def test_tensorboards_own_reader(tiny_file, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trained_twice(tiny_file, "tensorboard", lost=True)
    read = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    read.Reload()
    found = [(one.step, one.value) for one in read.Scalars("train/loss")]
    assert [step for step, _ in found] == list(range(1, 9)), "steps that were taken again count once"
    assert dict(found) == pytest.approx(by_step(tmp_path / "run"), rel=1e-6)
    assert {"eval/loss", "performance/tokens_per_second", "train/learning_rate"} <= set(read.Tags()["scalars"])


@pytest.mark.slow
def test_weights_and_biases_offline_keeps_one_run(tiny_file, tmp_path):
    trained_twice(tiny_file, "wandb", WANDB_MODE="offline")
    written = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    ids = {path.stem.removeprefix("run-") for path in written}
    assert len(written) == 2 and ids == {json.loads((tmp_path / "run" / "run.json").read_text())["run"]}
    assert all(path.stat().st_size > 500 for path in written)


@pytest.mark.exhaustive
def test_trackio_keeps_one_run(tiny_file, tmp_path):
    import sqlite3

    trained_twice(tiny_file, "trackio", TRACKIO_DIR=str(tmp_path / "trackio"), HOME=str(tmp_path))
    (database,) = (tmp_path / "trackio").glob("jaxmnt*.db")
    rows = sqlite3.connect(database).execute("select run_name, step, metrics from metrics").fetchall()
    assert {name for name, _, _ in rows} == {json.loads((tmp_path / "run" / "run.json").read_text())["run"]}
    told = {step: json.loads(text) for _, step, text in rows if b"train/loss" in text}
    assert {step: one["train/loss"] for step, one in told.items()} == by_step(tmp_path / "run")


@pytest.mark.exhaustive
def test_mlflow_keeps_one_run(tiny_file, tmp_path, monkeypatch):
    from mlflow import MlflowClient

    address = (tmp_path / "mlruns").as_uri()
    trained_twice(tiny_file, "mlflow", MLFLOW_TRACKING_URI=address, MLFLOW_ALLOW_FILE_STORE="true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient(address)
    experiment = client.get_experiment_by_name("jaxmnt")
    (run,) = client.search_runs([experiment.experiment_id])
    found = {one.step: one.value for one in client.get_metric_history(run.info.run_id, "train/loss")}
    assert found == by_step(tmp_path / "run") and run.info.status == "FINISHED"
    assert run.data.params["model.hidden_size"] == "64"
