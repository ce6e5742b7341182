"""The simulation of a fleet: the launcher's own policy, time that adds up, published rates, and wrong input."""

import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from jaxmnt.errors import ConfigError
from jaxmnt.fleet import restart_policy, simulation
from jaxmnt.fleet.fault_rates import FAULT_KINDS, published_rates, rate_of_all, read_rates
from jaxmnt.fleet.simulation import Fleet, simulate
from jaxmnt.fleet.start_time import start_terms
from jaxmnt.launch import inside
from jaxmnt.plan.goal import faults_of
from jaxmnt.simulate import main
from jaxmnt.telemetry.reliability import INTERRUPTIONS_PER_DEVICE_HOUR

SAVES = faults_of(10_000, 405e9 * 12 / 10_000, 8)
FLEET = Fleet(
    gpus=10_000, rates=published_rates(), start=300.0, blocked=SAVES.blocked_seconds, written=SAVES.written_seconds,
    spare_nodes=32,
)  # fmt: skip


def mean(fleet: Fleet, runs: int = 10) -> float:
    return sum(simulate(fleet, 60, seed).effective for seed in range(runs)) / runs


def test_the_rates_are_those_by_which_runs_save():
    assert rate_of_all(published_rates()) == pytest.approx(INTERRUPTIONS_PER_DEVICE_HOUR)
    assert {rate.kind for rate in published_rates()} == set(FAULT_KINDS)


def test_a_run_is_the_same_again_and_its_parts_add_up():
    first, again = simulate(FLEET, 10, 3), simulate(FLEET, 10, 3)
    assert first == again != simulate(FLEET, 10, 4)
    assert first.total == pytest.approx(10 * 86400) and min(first.seconds.values()) >= 0
    assert not first.given_up and first.faults > 20


def test_time_is_lost_where_the_policy_and_the_start_lose_it():
    """10,000 GPUs for 60 days: the policy by rate gains 0.6 % over ten restarts in an allocation, a quick start 1 %."""
    now, by_count, quick = mean(FLEET), mean(replace(FLEET, restarts=10)), mean(replace(FLEET, start=120.0))
    assert now >= 0.966 and quick >= 0.975 and 0.955 <= by_count <= 0.962
    assert mean(replace(FLEET, spare_nodes=0), 3) < 0.91 < mean(replace(FLEET, save_minutes=60.0), 3) + 0.05


def test_small_and_careless_fleets(capsys):
    """Fewer GPUs than a node has; and saves so rare that a fault must not bring back what was never saved."""
    assert main(["--gpus", "4", "--days", "900", "--runs", "1"]) == 0
    capsys.readouterr()
    wrong = [rate._replace(kind="wrong") for rate in published_rates()]
    rare = replace(FLEET, rates=wrong, save_minutes=600.0)
    often = replace(FLEET, rates=wrong, save_minutes=60.0)
    assert mean(rare, 3) < mean(often, 3)


def test_a_fleet_that_fails_all_the_time_is_given_up_with_words():
    outcome = simulate(replace(FLEET, fault_factor=50.0), 60, 0)
    assert outcome.given_up.startswith("it failed 11 times within an hour") and outcome.total < 86400


def test_the_simulation_decides_as_launchers_do(monkeypatch):
    """What it asks is what a job script asks, with the same answer. So neither can change without the other."""
    asked = []

    def decide(starts, in_allocation, devices, **more):
        decision = restart_policy.decide(starts, in_allocation, devices, **more)
        asked.append((list(starts), in_allocation, devices, more, decision))
        return decision

    assert simulation.decide is restart_policy.decide is inside.decide
    monkeypatch.setattr(simulation, "decide", decide)
    simulate(replace(FLEET, fault_factor=8.0, spare_nodes=3), 10, 1)
    simulate(replace(FLEET, fault_factor=50.0), 10, 1)
    assert {decision.action for *_, decision in asked} == {"again", "requeue", "end"}
    for starts, in_allocation, devices, more, decision in asked:
        records = [
            {"time": start.time, "code": 4, "newest": 0, "step": start.step, "cause": start.cause, "blamed": start.node,
             "start": 0}
            for start in starts
        ]  # fmt: skip
        current = records[-1] | {"start": in_allocation - 1}
        action, why = inside._decide_after_failure(
            records[:-1], current, more["restarts"], more["spare_nodes"], devices, ""
        )
        assert action == decision.action and (action == "again" or why == decision.reason)


def test_a_start_is_composed_of_terms_with_sources():
    small, large = start_terms(64, 8, 1e12), start_terms(10_000, 1250, 5e12)
    assert all(term.seconds >= 0 and term.source.startswith(("measured: ", "assumed: ")) for term in large)
    assert sum(term.seconds for term in small) < sum(term.seconds for term in large) < 300
    assert {"NCCL", "autotuning", "restore"} <= {term.name for term in large}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("node,-1,10,1,x", "line 2: interruptions is '-1'; give a number, 0 or more"),
        ("node,1,0,1,x", "line 2: gpus is '0'; give a number, more than 0"),
        ("node,1,10,nan,x", "line 2: days is 'nan'"),
        ("node,1,10", "line 2: days is ''"),
        ("nodes,1,10,1,x", r"line 2: 'nodes' is not a kind of fault.*kinds are node, software"),
        ("node,0,10,1,x", "has no interruptions"),
        ("", "has no interruptions"),
    ],
)
def test_a_file_of_rates_that_is_wrong(tmp_path, line, problem):
    path = tmp_path / "faults.csv"
    path.write_text(f"kind,interruptions,gpus,days,source\n{line}\n")
    with pytest.raises(ConfigError, match=f"--faults: .*{problem}"):
        read_rates(path)


def test_a_file_that_holds_no_rates(tmp_path):
    path = tmp_path / "faults.csv"
    for content in (b"", b"kind,rate\n", b"\xff\xfe\0"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"--faults: .*(must be kind,interruptions|cannot be read)"):
            read_rates(path)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_rates(tmp_path / "none.csv")


def test_the_command_in_text_json_and_as_a_picture(tmp_path, capsys):
    faults = tmp_path / "faults.csv"
    faults.write_text("kind,interruptions,gpus,days,source\nnode,10,1000,10,our own cluster\n")
    asked = ["--gpus", "256", "--days", "5", "--runs", "2", "--faults", str(faults)]
    assert main([*asked, "--picture", str(tmp_path / "p.svg")]) == 0
    out = capsys.readouterr().out
    assert "256 GPUs for 5 days" in out and "our own cluster" in out and "0 spare nodes" in out
    assert len(list(ElementTree.parse(tmp_path / "p.svg").iter())) > 100
    assert main([*asked, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["cases"][0]["case"] == "as given" and answer["faults"][0]["kind"] == "node"
    assert sum(answer["cases"][0]["shares"].values()) == pytest.approx(1)
    for wrong, problem in (("--runs=0", "--runs: 0 is out of range"), ("--spare-nodes=-1", "--spare-nodes: -1 is out")):
        with pytest.raises(ConfigError, match=problem):
            main(["--gpus", "256", "--days", "5", wrong])
    with pytest.raises(ConfigError, match="faults are expected in 3650 days, more than the 20,000"):
        main(["--gpus", "1000000", "--days", "3650"])
