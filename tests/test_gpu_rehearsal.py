"""The benchmark of a GPU, rehearsed on a CPU: its first real run must not fail on a typing mistake."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT

SCRIPT = ROOT / "benchmarks" / "gpu.py"
PARTS = (
    "versions", "tests", "bfloat16", "float8", "packed", "experts", "context", "control_flow", "microbatches",
    "lora", "muon", "determinism", "convergence", "long", "remat", "ceilings", "checkpoint",
)  # fmt: skip


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, cwd=ROOT)


@pytest.mark.long
@pytest.mark.exhaustive
def test_every_part_runs(tmp_path):
    told = run("--rehearse", "--seconds", "3000", "--output", str(tmp_path / "results.jsonl"))
    assert told.returncode == 0, told.stdout[-3000:] + told.stderr[-3000:]
    found = {line["part"]: line for line in map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())}
    assert tuple(found) == PARTS and all(line["ok"] for line in found.values())
    same = found["determinism"]
    assert same["losses_of_two_runs_equal"] and same["losses_after_resume_equal"]
    assert same["arrays_of_two_runs_that_differ"] == same["arrays_after_resume_that_differ"] == []
    assert found["bfloat16"]["tokens_per_second"] > 0 and found["bfloat16"]["planned_gib"] is not None
    assert found["experts"]["losses_apart"] == 0 and found["experts"]["layers"][0]["times_the_mlp"]["chunks"] > 0
    assert max(found["context"]["cases"][1]["errors_divided"].values()) < 1e-6
    assert found["control_flow"]["pieces_over_whole"]["2"] > 0
    assert found["microbatches"]["losses_apart"] < 1e-3
    assert found["lora"]["losses_of_two_runs_equal"] and found["lora"]["all_planned_gib"] is not None
    assert found["muon"]["jordan"]["loss"] != found["muon"]["adamw"]["loss"] > 0
    assert found["convergence"]["float8_apart"] < 0.05 and len(found["checkpoint"]["blocked_seconds"]) >= 2
    assert "query_float8_tflops" in found["ceilings"] and "left:" not in told.stdout


@pytest.mark.slow
def test_what_does_not_fit_the_time_is_left_for_the_next_command(tmp_path):
    output = tmp_path / "results.jsonl"
    told = run("--rehearse", "--only", "versions", "tests", "ceilings", "--seconds", "70", "--output", str(output))
    assert told.returncode == 0 and "left: tests, ceilings; run the same command again" in told.stdout, told.stderr
    assert [json.loads(line)["part"] for line in output.read_text().splitlines()] == ["versions"]


def test_a_machine_without_a_gpu_is_told(monkeypatch):
    monkeypatch.setenv("PATH", "")
    told = run()
    assert told.returncode == 1
    assert told.stderr.strip() == "nvidia-smi finds no GPU here; --rehearse runs all parts on the CPU"
