"""A checkpoint and a job script that were made at commit 8c7c812 still restore and run."""

import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from conftest import losses, metrics
from test_launch import faked

from jaxmnt.checkpoint.export import verify
from jaxmnt.checkpoint.refs import find
from jaxmnt.run.rundir import read_config
from jaxmnt.telemetry.events import Events
from jaxmnt.train import train

MADE = Path(__file__).with_name("made_at_8c7c812")


@pytest.fixture
def folder(tmp_path) -> Path:
    """Where the job was submitted: its config, its script, and its run after step 10 of 20."""
    with tarfile.open(MADE / "run.tar.gz") as archive:
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # newer than Python 3.11.2
        archive.extractall(tmp_path, **safely)
    (tmp_path / "config.yaml").write_text((MADE / "config.yaml").read_text())
    (tmp_path / "job.sh").write_text((MADE / "job.sh").read_text().replace("@folder@", str(tmp_path)))
    return tmp_path


def uninterrupted() -> list[float]:
    lines = map(json.loads, (MADE / "uninterrupted.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "train"]


@pytest.mark.slow
def test_the_script_goes_on_with_the_run(folder):
    """By its own words: it asks jaxmnt.launch.inside what to do, before and after."""
    environment = faked(folder / "bin", 'exec "$@"', f'exec {sys.executable} "$@"\n') | {"JAX_NUM_CPU_DEVICES": "1"}
    done = subprocess.run(["bash", folder / "job.sh"], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resuming after step 10" in done.stdout and "ended with exit code 0: end" in done.stdout
    assert losses(folder / "run") == pytest.approx(uninterrupted(), rel=1e-4)
    assert [line["step"] for line in metrics(folder / "run")] == list(range(1, 21))


def test_the_checkpoint_is_whole_and_goes_on_on_a_mesh(folder, monkeypatch):
    monkeypatch.chdir(folder)
    verify(find("run@10", "checkpoint").path, None)
    config = read_config(folder / "run")
    update = {"mesh": {"fsdp": 2, "model": 2, "data": 2}, "train": config.train.model_dump() | {"stop_after": 12}}
    assert train(type(config).model_validate(config.model_dump() | update)) == 75
    assert losses(folder / "run") == pytest.approx(uninterrupted()[:12], rel=1e-4)


@pytest.mark.parametrize(("host", "heard"), [("n2", True), ("n22", False)])
def test_the_script_reads_todays_events(folder, host, heard, monkeypatch):
    """It knows a task that has failed by the order of an event's keys."""
    monkeypatch.setattr("socket.gethostname", lambda: host)
    (folder / "run" / "launch").mkdir()
    (folder / "run" / "launch" / "began").touch()
    events = Events(folder / "run", 1)
    events.write("failed", why="x")
    events.close()
    function = re.search(r"^a_task_has_failed\(\) \{.*?^\}", (folder / "job.sh").read_text(), re.DOTALL | re.MULTILINE)
    assert function
    text = f'run_dir="{folder}/run"\nnodes=n1,n2\n{function[0]}\na_task_has_failed'
    assert (subprocess.run(["bash", "-c", text], capture_output=True).returncode == 0) == heard
