"""When a run that failed is started again, and with how many processes."""

import json

import pytest

from jaxmnt.config.load import parse_config
from jaxmnt.errors import ConfigError
from jaxmnt.launch.restarts import Restarts, fitting_counts
from jaxmnt.telemetry.events import last_commit


def decisions(restarts, *ends, processes=4):
    """(processes, wait) after each of these ends: an exit code and the step of the newest checkpoint."""
    found = []
    for code, newest in ends:
        verdict = restarts.decide(code, processes, newest)
        found.append((verdict.processes, verdict.wait_seconds))
        processes = verdict.processes or processes
    return found


@pytest.mark.parametrize("code", [0, 2, 75])
def test_what_ended_well_or_cannot_end_well_is_not_repeated(code):
    assert decisions(Restarts(9), (code, 0)) == [(None, 0.0)]
    assert decisions(Restarts(0), (1, 0)) == [(None, 0.0)]


def test_waits_grow_until_a_step_is_gained():
    ends = [(1, 0), (4, 0), (1, 10), (1, 10), (1, 20)]
    assert decisions(Restarts(9), *ends) == [(4, 1.0), (4, 2.0), (4, 1.0), (4, 2.0), (4, 1.0)]


def test_three_starts_without_a_step_are_enough():
    restarts = Restarts(9)
    assert decisions(restarts, (1, 10), (1, 10)) == [(4, 1.0), (4, 2.0)]
    verdict = restarts.decide(1, 4, 10)
    assert verdict.processes is None
    assert verdict.why == "given up: 3 starts failed without a checkpoint after step 10"


def test_checkpoints_after_a_fall_back_are_a_gain(tmp_path):
    """500 was damaged: the steps from 200 on are written again, and each is progress."""
    restarts, file = Restarts(9), tmp_path / "events" / "0.jsonl"
    file.parent.mkdir()
    for step in (500, 200, 300, 400):
        with file.open("a") as lines:
            lines.write(json.dumps({"kind": "checkpoint_commit", "time": 1.0, "process": 0, "step": step}) + "\n")
        assert last_commit(tmp_path) == step
        assert restarts.decide(1, 4, last_commit(tmp_path)).processes == 4


def test_so_many_restarts_and_no_more():
    restarts = Restarts(2)
    assert decisions(restarts, (1, 1), (1, 2)) == [(4, 1.0), (4, 1.0)]
    assert restarts.decide(1, 4, 3).why == "given up after 2 restarts (--max-restarts)"


def test_fewer_processes_when_a_restart_gains_nothing():
    restarts = Restarts(9, [2, 4])
    assert decisions(restarts, (1, 8), (1, 8), (1, 12), (1, 16)) == [(4, 1.0), (2, 2.0), (2, 1.0), (2, 1.0)]


def config(**sections):
    return parse_config({"data": {"global_batch_size": 16}} | sections)


@pytest.mark.parametrize(
    ("sections", "elastic", "counts"),
    [
        ({}, None, []),
        ({}, "1:4", [1, 2, 4]),
        ({}, "2:4", [2, 4]),
        ({"train": {"microbatch_size": 2}}, "1:4", [1, 2, 4]),
        ({"mesh": {"model": 4}}, "1:4", [2, 4]),
        ({"mesh": {"data": 2, "fsdp": -1}}, "1:4", [1, 2, 4]),
        ({"mesh": {"data": 8}}, "1:4", [4]),
    ],
)
def test_counts_that_divide_the_batch_and_the_mesh(sections, elastic, counts):
    assert fitting_counts(elastic, 4, 2, config(**sections)) == counts


@pytest.mark.parametrize(
    ("elastic", "processes", "devices", "words"),
    [
        ("4", 4, 1, "is not MIN:MAX around --processes 4, such as 2:4"),
        ("5:8", 4, 1, "is not MIN:MAX"),
        ("1:3", 4, 1, "is not MIN:MAX"),
        ("1:3", 3, 1, "3 processes of 1 devices do not fit the mesh and a global batch of 16 rows"),
        ("1:4", 4, None, "--devices-per-process is missing"),
    ],
)
def test_ranges_that_make_no_sense(elastic, processes, devices, words):
    with pytest.raises(ConfigError, match=words):
        fitting_counts(elastic, processes, devices, config())
