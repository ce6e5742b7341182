"""The drill, as a user runs it."""

import json
import re

import jax
import pytest
from conftest import ROOT, command

from jaxmnt.config.load import load_config, parse_config
from jaxmnt.drill.__main__ import _can_cut_links, main
from jaxmnt.drill.course import shrink_config
from jaxmnt.drill.faults import CORE_FAULTS, FAULTS, plan_starts, select_faults
from jaxmnt.errors import ConfigError
from jaxmnt.training.build import build_spec


def drill(config, tmp_path, *arguments, timeout):
    result = command(
        "jaxmnt.drill", "--config", str(config), "--dir", str(tmp_path / "drill"), *arguments, timeout=timeout
    )
    return result, result.stdout + result.stderr


@pytest.mark.long
@pytest.mark.slow
def test_a_short_drill(tiny_file, tmp_path):
    """One fault of each kind: in the numbers, on disk, killed, asked to stop, raised, hanging."""
    faults = [
        "NaN in a batch", "full disk in a save", "kill in a step", "kill in a save", "kill the coordinator",
        "damaged checkpoint", "preempt one", "exception in prefetch", "hang in reading data",
    ]  # fmt: skip
    result, out = drill(tiny_file, tmp_path, "--faults", ",".join(faults), timeout=500)
    assert result.returncode == 0, out
    rows = [line for line in out.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == len(faults) and all(row.count(" yes ") == 2 for row in rows), out
    assert not (tmp_path / "drill").exists(), "nothing is left of a drill that went well"


@pytest.mark.alone
@pytest.mark.exhaustive
def test_every_fault_with_two_processes_and_some_with_four(tiny_file, tmp_path):
    """Each is noticed, named rightly and made good, and no committed step is lost."""
    result, _ = drill(tiny_file, tmp_path, "--processes", "2,4", "--json", timeout=1200)
    assert result.returncode == 0, result.stderr[-5000:]
    found = json.loads(result.stdout)
    kinds = {count: {row["fault"] for row in found if row["processes"] == count} for count in (2, 4)}
    assert len(kinds[2]) >= 14 and len(kinds[4]) >= 5
    assert _can_cut_links([]) == any(row["fault"] == "cut link" for row in found)
    assert all(row["well"] and row["named"] and row["identical"] and row["committed_lost"] == 0 for row in found)
    limits = {"cut link": 60, "stopped process": 60, "hang in reading data": 60}
    for row in found:
        assert row["gone_seconds"] is None or row["gone_seconds"] < limits.get(row["fault"], 10), row


def test_a_config_made_small_keeps_its_kinds_of_parallelism(tiny):
    config = tiny("mesh.data=1", "mesh.pipeline=4", "mesh.model=8", "mesh.fsdp=16", "model.num_layers=4")
    mesh = shrink_config(config, 8, 100).mesh.sizes()
    assert mesh == {"data": 1, "pipeline": 2, "fsdp": 2, "context": 1, "expert": 1, "model": 2}
    mesh = shrink_config(config, 2, 100).mesh.sizes()
    assert mesh["pipeline"] == 2 and mesh["fsdp"] == mesh["model"] == mesh["data"] == 1
    for name in ("quickstart", "llama-8b", "qwen-72b"):
        small = shrink_config(load_config(ROOT / "configs" / f"{name}.yaml"), 4, 100)
        assert small.model.hidden_size == 64 and small.train.steps == 100
    for preset in ("gemma2-2b", "gemma3-1b", "olmo3-7b", "gpt2"):  # whose stages end with a whole pattern
        split = {"pipeline": 2, "data": 1}
        small = shrink_config(parse_config({"model": {"preset": preset}, "mesh": split, "run": {"dir": "x"}}), 2, 100)
        build_spec(small, small.model.vocab_size, jax.devices()[:2])


def test_each_start_has_one_fault_that_ends_it():
    planned = plan_starts(list(FAULTS))
    assert [fault for start in planned for fault in start] == list(FAULTS)
    assert all(
        [fault.ends_processes for fault in start] == [False] * (len(start) - 1) + [True] for start in planned[:-1]
    )
    alone = plan_starts(select_faults("damaged checkpoint"))
    assert [len(start) for start in alone] == [1, 1, 1], "there must be checkpoints to damage"
    assert planned[-1] == [] and all(len({fault.namespace for fault in start}) <= 1 for start in planned)
    assert {fault.name for fault in FAULTS} >= set(CORE_FAULTS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--faults", "kill in a stp"], "--faults: unknown fault 'kill in a stp'; did you mean kill in a step?"),
        (["--processes", "1"], "--processes: '1' is not a list of different numbers, each at least 2, such as 2,4"),
        (["--processes", "two"], "--processes: 'two' is not a list"),
        (["--processes", "2,2"], "is not a list of different numbers"),
        (["--start", "srun 'x"], '--start: "srun \'x" cannot be split into arguments: No closing quotation'),
        (["--start", "srun", "--faults", "cut link"], "--faults: 'cut link' cannot be injected here"),
        (["--devices-per-process", "0"], "--devices-per-process: must be at least 1, not 0"),
        (["data.path=nowhere"], "data.path"),
        (["data.global_batch_sise=3"], "global_batch_size"),
    ],
)
def test_wrong_arguments(tiny_file, tmp_path, arguments, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        main(["--config", str(tiny_file), "--dir", str(tmp_path / "drill"), *arguments])


def test_a_folder_that_is_no_drills_is_not_touched(tiny_file, tmp_path):
    (tmp_path / "drill").mkdir()
    (tmp_path / "drill" / "thesis.txt").write_text("all of it")
    result, out = drill(tiny_file, tmp_path, timeout=60)
    assert result.returncode == 2 and "was not made by a drill; choose another" in out
    assert (tmp_path / "drill" / "thesis.txt").exists()


def test_faults_by_name():
    assert len(select_faults(None)) == len(FAULTS)
    assert [fault.name for fault in select_faults("exit 0, kill in a step")] == ["kill in a step", "exit 0"]
    with pytest.raises(ConfigError, match="unknown fault"):
        select_faults("rain")
