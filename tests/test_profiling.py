"""Profiles of a step on request."""

import json
import os
import signal
from types import SimpleNamespace

import pytest
from conftest import launch, losses, metrics, until

from jaxmnt.errors import ExitCode
from jaxmnt.run import profiling
from jaxmnt.telemetry import device_profile
from jaxmnt.telemetry.device_profile import read_profile
from jaxmnt.telemetry.events import event_file, read_lines
from jaxmnt.train import train


def told(run, kind):
    return [one for one in read_lines(event_file(run, 0)) if one["kind"] == kind]


@pytest.mark.slow
def test_a_step_is_profiled_after_a_checkpoint(tiny, tmp_path, capsys):
    at = ("train.steps=12", "checkpoint.every_steps=100", "mesh.fsdp=2")
    assert train(tiny(*at, "telemetry.profile_at=4", "train.stop_after=10")) == ExitCode.STOPPED
    run = tmp_path / "run"
    (one,) = told(run, "profile")
    saved = [record["step"] for record in told(run, "checkpoint_commit")]
    assert saved == [one["step"] - 1, 10] and 5 <= one["step"] <= 7, "the step after the save"
    assert one["computation"] > 0 and one["communication"] > 0 and one["overlap"] >= 0 and one["idle"] >= 0
    summed = one["computation"] + one["communication"] - one["overlap"] + one["idle"]
    assert summed == pytest.approx(one["seconds"])
    folder = run / "profiles" / str(one["step"])
    summary = json.loads((folder / "summary.json").read_text())
    assert any("all-" in name or "reduce" in name for name in summary["operations"]), summary
    assert list(folder.rglob("*.xplane.pb")), "for XProf"
    assert "profile step" in capsys.readouterr().out
    line = next(line for line in metrics(run) if line["step"] == one["step"])
    assert line["step_seconds"] < one["took_seconds"] + 1


@pytest.mark.slow
def test_a_profile_is_made_once_and_changes_nothing(tiny, tmp_path):
    at = ("train.steps=12", "checkpoint.every_steps=100", "mesh.fsdp=2")
    run = tmp_path / "run"
    assert train(tiny(*at, "telemetry.profile_at=4", "train.stop_after=10")) == ExitCode.STOPPED
    assert train(tiny(*at, "telemetry.profile_at=4")) == ExitCode.FINISHED
    assert len(told(run, "profile")) == 1, "once in a run"
    alone = tmp_path / "alone"
    assert train(tiny(*at, f"run.dir={alone}")) == ExitCode.FINISHED
    assert losses(run) == losses(alone)


@pytest.mark.slow
def test_a_file_and_a_signal_ask_for_profiles(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(profiling, "_POLL_SECONDS", 0.02)
    run, asked = tmp_path / "run", []
    wants = profiling.Profiler.wants_profile

    def ask(self, step):
        if step == 3:
            (run / "PROFILE").write_text("99\n")  # no such process: 0 does it
            until(lambda: self._signalled)
        if step == 12:
            os.kill(os.getpid(), signal.SIGUSR2)
        asked.append(step)
        return wants(self, step)

    monkeypatch.setattr(profiling.Profiler, "wants_profile", ask)
    before = signal.getsignal(signal.SIGUSR2)
    assert train(tiny("train.steps=20", "checkpoint.every_steps=100")) == 0
    first, second = [one["step"] for one in told(run, "profile")]
    assert 4 <= first <= 7 and 13 <= second <= 16
    assert not (run / "PROFILE").exists() and signal.getsignal(signal.SIGUSR2) == before


def test_a_trace_that_cannot_be_begun_ends_no_run(tiny, tmp_path, monkeypatch, capsys):
    def refuse(*arguments, **options):
        raise RuntimeError("Only one profile may be run at a time.")

    monkeypatch.setattr("jax.profiler.start_trace", refuse)
    assert train(tiny("train.steps=8", "telemetry.profile_at=2")) == 0
    assert "no profile was made: RuntimeError: Only one profile" in capsys.readouterr().out
    assert told(tmp_path / "run", "profile")[0]["why"]


def test_what_a_gpu_did_by_its_own_plane(monkeypatch):
    """Kernels of two streams, as XLA tells of them."""

    def event(name, began, ended, **stats):
        return SimpleNamespace(name=name, start_ns=began * 1e9, duration_ns=(ended - began) * 1e9, stats=stats.items())

    streams = [
        SimpleNamespace(name="Stream #1(Compute)", events=[
            event("gemm", 0, 4, hlo_op="dot.1"), event("gemm", 6, 7, hlo_op="dot.2"), event("memset", 0, 50),
        ]),
        SimpleNamespace(name="Stream #2(Comm)", events=[event("ncclDevKernel_AllGather", 3, 5, hlo_op="fusion.3")]),
    ]  # fmt: skip
    host = SimpleNamespace(name="/host:CPU", lines=[SimpleNamespace(name="x", events=[event("python", 0, 99)])])
    planes = [host, SimpleNamespace(name="/device:GPU:0", lines=streams)]
    monkeypatch.setattr(
        device_profile, "ProfileData", SimpleNamespace(from_file=lambda path: SimpleNamespace(planes=planes))
    )
    found = read_profile("x")
    assert (found.seconds, found.computation, found.communication) == (7, 5, 2)
    assert (found.overlap, found.idle) == (1, 1)
    assert found.operations == {"dot": 5.0, "ncclDevKernel_AllGather": 2.0}
    monkeypatch.setattr(
        device_profile, "ProfileData", SimpleNamespace(from_file=lambda path: SimpleNamespace(planes=[host]))
    )
    assert read_profile("x") is None


@pytest.mark.slow
def test_the_process_that_the_file_names_makes_the_profile(tiny_file, tmp_path):
    """The others wait for it, however long it takes."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "PROFILE").write_text("1")
    done = launch(
        tiny_file, "train.steps=12", "checkpoint.every_steps=100", "watchdog.step_seconds=5", processes=2, devices=1
    )
    assert done.returncode == 0, done.stderr
    mine = [one for one in read_lines(event_file(tmp_path / "run", 1)) if one["kind"] == "profile"]
    assert len(mine) == 1 and not told(tmp_path / "run", "profile")
    assert mine[0]["communication"] > 0
