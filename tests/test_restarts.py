"""When a run that failed is started again, and with how many processes."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmnt.config.load import parse_config
from jaxmnt.errors import ConfigError
from jaxmnt.fleet.restart_policy import (
    Decision,
    Start,
    decide,
    failures_without_gain,
    max_jobset_restarts,
    reason_to_give_up,
)
from jaxmnt.launch.ledger import Outcome, outcome_of
from jaxmnt.launch.restarts import Restarts, fitting_counts


def outcome(step: int | None, cause: str = "killed") -> Outcome:
    return Outcome(step, cause, cause)


def decisions(restarts, *ends, processes=4):
    """(processes, wait) after each of these ends, half an hour apart: an exit code and the step that was reached."""
    found = []
    for number, (code, step) in enumerate(ends):
        verdict = restarts.decide(code, processes, 0, outcome(step, str(number)), devices=8, now=1800.0 * number)
        found.append((verdict.processes, verdict.wait_seconds))
        processes = verdict.processes or processes
    return found


@pytest.mark.parametrize("code", [0, 2, 75])
def test_what_ended_well_or_cannot_end_well_is_not_repeated(code):
    assert decisions(Restarts(9), (code, 0)) == [(None, 0.0)]
    assert decisions(Restarts(0), (1, 0)) == [(None, 0.0)]


def test_waits_grow_until_a_step_is_gained():
    """Steps taken again are no gain, and neither is a start that failed before its first step."""
    ends = [(1, None), (4, None), (1, 10), (1, 10), (1, 7), (1, 20)]
    assert decisions(Restarts(9), *ends) == [(4, 1.0), (4, 2.0), (4, 1.0), (4, 2.0), (4, 4.0), (4, 1.0)]


def test_so_many_restarts_and_no_more():
    restarts = Restarts(2)
    assert decisions(restarts, (1, 1), (1, 2)) == [(4, 1.0), (4, 1.0)]
    verdict = restarts.decide(1, 4, 3, outcome(3), devices=8, now=1e5)
    assert verdict.why == "given up after 2 restarts (--max-restarts)"


def test_fewer_processes_when_a_restart_gains_nothing():
    restarts = Restarts(9, [2, 4])
    assert decisions(restarts, (1, 8), (1, 8), (1, 12), (1, 16)) == [(4, 1.0), (2, 2.0), (2, 1.0), (2, 1.0)]


def test_a_launcher_gives_up_as_the_policy_says():
    restarts, verdicts = Restarts(99), []
    for number in range(3):
        end = Outcome(12, "boom in row #", "boom in row 9; the rows of that step are 96 to 103")
        verdicts.append(restarts.decide(1, 4, 10, end, devices=8, now=60.0 * number))
    assert [verdict.processes for verdict in verdicts] == [4, 4, None]
    assert verdicts[-1].why == (
        "given up: it failed 3 times in step 12, in the same way: boom in row 9; the rows of that step are 96 to 103"
    )


# -- the policy, of which launchers and the simulation ask the same functions


def failures(count: int, seconds: float, *, gain: bool = True, cause: str = "", node: str | None = None) -> list[Start]:
    """Failed starts at even times, each with a step more than the last, or all before their first step."""
    return [
        Start(seconds * number, True, number + 1 if gain else None, cause or str(number), node)
        for number in range(count)
    ]


def test_a_run_goes_on_as_long_as_it_gains_steps():
    starts = failures(200, 1800.0, cause="killed")
    assert all(decide(starts[: count + 1], count + 1, 8) == Decision("again") for count in range(200))


def test_a_run_without_gain_ends():
    reasons = [reason_to_give_up(failures(count, 1800.0, gain=False, cause="killed"), 8) for count in range(1, 6)]
    assert reasons == [""] * 4 + ["5 starts failed in the same way, and no step was gained"]
    reasons = [reason_to_give_up(failures(count, 1800.0, gain=False), 8) for count in range(1, 13)]
    assert reasons == [""] * 11 + ["12 starts failed, and no step was gained"]
    # Steps taken again count as no gain, even if a checkpoint is new.
    again = [*failures(9, 1800.0), *(Start(1e5 + number, True, 5 + number % 3, "killed") for number in range(5))]
    assert reason_to_give_up(again, 8) == "5 starts failed in the same way, and no step was gained"


def test_steps_taken_again_after_a_damaged_checkpoint_are_a_gain():
    """500 was damaged: each start leaves a later checkpoint than the one before, but none than the furthest."""
    fallen = [Start(0.0, True, 500, "killed", checkpoint=490)]
    fallen += [
        Start(1e4 * number, True, 200 + 10 * number, "killed", checkpoint=195 + 10 * number) for number in range(25)
    ]
    assert all(reason_to_give_up(fallen[:count], 8) == "" for count in range(1, len(fallen) + 1))
    back_and_forth = [start._replace(checkpoint=195) for start in fallen]
    assert reason_to_give_up(back_and_forth[:7], 8) == "5 starts failed in the same way, and no step was gained"


def test_failures_of_unknown_cause_are_not_one_cause():
    starts = [start._replace(cause="") for start in failures(11, 1800.0, gain=False)]
    assert reason_to_give_up(starts, 8) == ""


def test_the_same_failure_in_the_same_step_ends_a_run():
    starts = [*failures(5, 1800.0), *(Start(1e5 + number, True, 9, "NaN") for number in range(3))]
    assert [reason_to_give_up(starts[:count], 8) for count in (6, 7)] == ["", ""]
    assert reason_to_give_up(starts, 8) == "it failed 3 times in step 9, in the same way"
    others = [start._replace(cause=str(number)) for number, start in enumerate(starts)]
    assert reason_to_give_up(others, 8) == ""


def test_far_more_failures_than_expected_end_a_run():
    """Also with gains. A large fleet may have more."""
    burst = failures(11, 300.0)
    assert reason_to_give_up(burst[:10], 8) == ""
    assert (
        reason_to_give_up(burst, 8)
        == "it failed 11 times within an hour, but 0.00016 times are expected of its devices"
    )
    day = failures(51, 1600.0)
    assert "it failed 51 times within a day" in reason_to_give_up(day, 8)
    assert reason_to_give_up(day, 100_000) == ""
    assert reason_to_give_up([start._replace(time=1e9) for start in failures(20, 0.0)], 10**6) == ""


@settings(max_examples=50)
@given(st.lists(st.tuples(st.booleans(), st.none() | st.integers(1, 9), st.sampled_from("ab")), max_size=30))
def test_what_stops_is_no_failure(starts):
    """The policy answers for any history, and never gives up for starts that were asked to stop."""
    history = [Start(3600.0 * number, *start) for number, start in enumerate(starts)]
    assert len(failures_without_gain(history)) <= sum(start.failed for start in history)
    stopped = [start._replace(failed=False) for start in history]
    assert reason_to_give_up([*stopped, Start(1e9, True, 100, "c")], 8) == ""


def test_an_allocation_is_given_back_when_its_spare_nodes_are_used_up():
    starts = [start._replace(node=f"n{number}") for number, start in enumerate(failures(3, 1800.0))]
    assert decide(starts[:2], 2, 8, spare_nodes=2) == Decision("again")
    assert decide(starts, 3, 8, spare_nodes=2) == Decision("requeue", "2 spare nodes are used up")
    assert decide(starts, 2, 8, spare_nodes=2) == Decision("again"), "the first was in another allocation"
    assert decide(starts, 3, 8, spare_nodes=0) == Decision("again"), "there is nothing to use up"
    twice = [*starts[:1], starts[0]._replace(time=9e4, step=7)]
    assert decide(twice, 2, 8, spare_nodes=5) == Decision("requeue", "n0 was tried twice here")
    assert decide(starts, 3, 8, restarts=2) == Decision("requeue", "2 of 2 restarts used in this allocation")


def test_a_jobset_has_as_many_restarts_as_its_time_asks_for():
    assert max_jobset_restarts(8) == 20, "what any run may have"
    assert max_jobset_restarts(10_000) == math.ceil(2 * 419 / (54 * 24 * 16384) * 10_000 * 24 * 60)


def test_an_outcome_is_that_of_the_process_that_failed(tmp_path):
    event = lambda kind, **details: {"kind": kind, "time": 1.0, "process": 0, **details}
    events = [
        event("started", step=5),
        event("peer_lost", why="process 1 failed", step=7, rows=[56, 63]),
        event("failed", why="ValueError: row 61 is bad", step=7, rows=[56, 63]),
    ]
    assert outcome_of(tmp_path, events) == Outcome(
        7, "ValueError: row # is bad", "ValueError: row 61 is bad; the rows of that step are 56 to 63"
    )
    assert outcome_of(tmp_path, []) == Outcome(None, "", "")
    lines = [
        {"kind": "train", "time": 1.0, "step": step, "loss": 1.0, "grad_norm": 1.0, "tokens": 1} for step in (5, 6)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "tra')
    assert outcome_of(tmp_path, events[:1]).step == 6, "nobody could say how it ended"
    assert outcome_of(tmp_path, [event("start", step=0)]).step is None


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
