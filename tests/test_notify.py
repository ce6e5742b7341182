"""What a person should hear of: run.notify, and a loss that jumps."""

import json
import math
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import until

from jaxmnt.config.load import parse_config
from jaxmnt.distributed.identity import Identity
from jaxmnt.distributed.termination import ExitHandler
from jaxmnt.errors import ConfigError
from jaxmnt.models.registry import build_family
from jaxmnt.run.failed_start import FailedStartRecorder
from jaxmnt.telemetry.events import Events
from jaxmnt.telemetry.loss_spikes import LossSpikeDetector
from jaxmnt.telemetry.notify import Notifier
from jaxmnt.telemetry.router_collapse import RouterCollapseDetector


@pytest.fixture
def told(tmp_path):
    """A command that notes what it is told, and what it has noted."""
    script, notes = tmp_path / "told.py", tmp_path / "notes"
    script.write_text(
        "import json, os, sys\n"
        f"text = json.dumps([os.environ['JAXMNT_EVENT'], os.environ['JAXMNT_RUN'], json.load(sys.stdin)])\n"
        f"open({str(notes)!r}, 'a').write(text + chr(10))\n"
    )
    read = lambda: [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
    return [sys.executable, str(script)], read


def test_the_command_is_told_of_events_that_matter(told, tmp_path):
    command, notes = told
    events = Events(tmp_path / "run", 0)
    events.on_written = Notifier(command, 0, "/runs/a")
    events.write("start", step=0)
    events.write("straggler", at_fault=3, phase="data")
    events.write("checkpoint_commit", step=1)
    events.write("failed", why="boom")
    events.close()
    until(lambda: len(notes()) == 2)
    kinds = {kind: (run, event) for kind, run, event in notes()}
    assert set(kinds) == {"straggler", "failed"} and {run for run, _ in kinds.values()} == {"/runs/a"}
    assert kinds["straggler"][1]["at_fault"] == 3 and kinds["failed"][1]["why"] == "boom"


def test_a_start_that_fails_is_told_of(told, tiny):
    command, notes = told
    config = tiny(f"run.notify={json.dumps(command)}")
    with pytest.raises(RuntimeError), FailedStartRecorder(config, Identity(), ExitHandler()):
        raise RuntimeError("no memory")
    until(lambda: len(notes()) == 1)
    ((kind, _, event),) = notes()
    assert kind == "failed" and "no memory" in event["why"]


def test_one_process_tells(told):
    command, notes = told
    for process in (0, 1, 2):
        notifier = Notifier(command, process, "a")
        notifier({"kind": "peer_lost", "at_fault": 0, "why": "process 0 of 3 on a disconnected", "by": process})
        notifier({"kind": "peer_lost", "at_fault": 0, "why": "process 0 of 3 on a failed: it told", "by": process,
                  "by_itself": True})  # fmt: skip
        notifier({"kind": "peer_lost", "at_fault": 2, "by": process})
    until(lambda: len(notes()) == 2)
    assert sorted((event["at_fault"], event["by"]) for _, _, event in notes()) == [(0, 1), (2, 0)]


def test_a_command_that_hangs_or_fails_or_does_not_read_holds_nobody_up(capfd, tmp_path):
    event = {"kind": "hang", "why": "x" * 1_000_000}
    began = time.monotonic()
    for command in (["sleep", "5"], ["false"], ["true"]):
        Notifier(command, 0, "a")(event)
    assert time.monotonic() - began < 5, "what ends a process waits for 2 s"
    gone = tmp_path / "gone"
    gone.write_text("#!/bin/sh\n")
    gone.chmod(0o755)
    notifier = Notifier([str(gone)], 0, "a")
    gone.unlink()
    notifier(event)
    until(lambda: "run.notify" in capfd.readouterr().err)


def test_a_program_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"run\.notify: no-such-program was not found"):
        Notifier(["no-such-program"], 0, "a")


def spikes(losses) -> list[int]:
    detector = LossSpikeDetector()
    return [step for step, loss in enumerate(losses) if detector.see(float(loss)) is not None]


def test_a_loss_that_jumps_is_seen_once():
    random = np.random.default_rng(0)
    falling = 3 + 4 * np.exp(-np.arange(600) / 100) + 0.05 * random.standard_normal(600)
    assert spikes(falling) == [], "a run that learns has no spike"
    jumping = falling.copy()
    jumping[300:320] += 1.0
    jumping[500] *= 2
    assert spikes(jumping) == [300, 500]
    assert spikes(np.tile([2.0, 2.0, 2.0, 2.5], 100)) == [35], "what comes again and again is told once"
    assert spikes(np.full(200, math.log(257))) == []
    assert spikes(np.r_[np.full(100, 2.0), 2.1, 2.3]) == [101], "a constant loss has no spread, but 10 % is no spike"


@pytest.mark.parametrize(
    ("used", "layer"),
    [([1, 1, 0, 0, 0, 0, 0, 0], 1), ([1, 1, 1, 0, 0, 0, 0, 0.01], 1), ([1, 1, 1, 1, 1, 0.5, 0.5, 0.5], None)],
)
def test_a_router_that_collapses_is_named_once(used, layer):
    """Loads of layer 1 of two, whose tokens use two of eight experts. A good step between starts the count anew."""
    settings = {"family": "qwen3_moe", "num_experts": 8, "experts_per_token": 2, "expert_size": 8, "vocab_size": 64}
    family = build_family(parse_config({"model": settings}).model, 64)

    def metrics(loads):
        sums = {"loads": jnp.array([[1.0] * 8, loads]), "scores": jnp.ones((2, 8)), "rounds": jnp.ones(2), "calls": 1}
        return {name: float(value) for name, value in family.metrics({"layers": sums}, jnp.float32(8)).items()}

    detector, good, bad = RouterCollapseDetector(), metrics([1.0] * 8), metrics(used)
    assert good["expert_evenness_min"] == pytest.approx(1)
    steps = [bad] * 99 + [good] + [bad] * 300
    reported = [(step, named) for step, one in enumerate(steps) if (named := detector.see(one)) is not None]
    assert reported == ([] if layer is None else [(199, layer)])
    assert detector.see({}) is None
