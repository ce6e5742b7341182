"""Steps that are not finite or have no targets change nothing, and rows can be passed over."""

import functools
import itertools
import json
import math
import re
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import events, in_tiers, losses, metrics
from hypothesis import given
from hypothesis import strategies as st

from jaxmnt.config.load import parse_config
from jaxmnt.data import batches, feed
from jaxmnt.data.batches import TrainingData
from jaxmnt.data.feed import to_devices
from jaxmnt.data.order import MixturePhase, Order, SkippedRanges
from jaxmnt.data.preparation.inputs import ReadOptions, Selection, Settings
from jaxmnt.data.preparation.run import build
from jaxmnt.data.sources import open_sources
from jaxmnt.errors import ConfigError, ExitCode, UserError
from jaxmnt.plan.hlo import Program
from jaxmnt.plan.timeline import replay_program
from jaxmnt.report.contents import report_of
from jaxmnt.run.monitoring import BadStepMonitor
from jaxmnt.run.replay import replay
from jaxmnt.run.values import run_process
from jaxmnt.telemetry.metrics import EvaluationSums, Rates, TrainLog
from jaxmnt.telemetry.phases import StepTimer
from jaxmnt.telemetry.progress import StatusLine
from jaxmnt.telemetry.sinks import scalars
from jaxmnt.train import train
from jaxmnt.training.compile import compile_program, compile_step
from jaxmnt.training.spec import ControlFlags

ROWS, LENGTH, VOCAB, BAD = 8, 16, 60, 7

MESHES = [
    {"data": 1}, {"data": 2}, {"fsdp": 2}, {"model": 2}, {"pipeline": 2}, {"data": 2, "fsdp": 2, "model": 2},
]  # fmt: skip


@functools.cache
def program_on(*axes):
    tree = {
        "data": {"global_batch_size": ROWS, "sequence_length": LENGTH},
        "model": {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 64},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 3},
        "train": {"precision": "float32", "microbatch_size": 1, "steps": 20},
        "mesh": dict(axes),
    }
    devices = int(np.prod([size for _, size in axes]))
    return compile_program(parse_config(tree), VOCAB, jax.devices()[:devices])


def batch_of(program, step, *, bad=None, targets=True):
    rng = np.random.default_rng(step)
    tokens = rng.integers(0, VOCAB, (ROWS, LENGTH + 1), np.int32)
    rows = {
        "tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": np.ones((ROWS, LENGTH), np.float32),
        "segments": np.zeros((ROWS, LENGTH), np.int32),
        "positions": np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1)),
    }  # fmt: skip
    rows["weights"] *= targets
    if bad is not None:
        rows["weights"][5, 3] = bad
    placed = to_devices(rows, list(range(ROWS)), ROWS, program.batch_sharding)
    return placed | {"control": ControlFlags(program.control_sharding).array()}


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


@pytest.mark.parametrize(
    ("mesh", "bad"),
    in_tiers({0, 5, 7}, [*((mesh, np.nan) for mesh in MESHES), (MESHES[-1], np.inf), (MESHES[-1], 1e38)]),
    ids=str,
)
def test_a_bad_step_changes_nothing_on_any_mesh(mesh, bad):
    """After ten steps, of which number 7 is bad: what nine steps without that batch lead to, bit for bit."""
    program = program_on(*mesh.items())
    state, without, rates = program.init(), program.init(), []
    for step in range(1, 11):
        state, found = program.step(state, batch_of(program, step, bad=bad if step == BAD else None))
        assert int(found["bad_in_a_row"]) == (step == BAD) and int(found["bad_steps"]) == (step >= BAD)
        rates.append(float(found["learning_rate"]))
        if step != BAD:
            without, reference = program.step(without, batch_of(program, step))
            assert float(found["loss"]) == float(reference["loss"])
            assert rates[-1] == float(reference["learning_rate"])
    assert same(state["params"], without["params"]) and same(state["optimizer"], without["optimizer"])
    assert int(state["counters"]["step"]) == 10 and int(without["counters"]["step"]) == 9
    assert rates[BAD - 1] == rates[BAD], "the schedule goes by updates"


@pytest.mark.parametrize("mesh", in_tiers({0, 5}, MESHES), ids=str)
def test_a_step_without_targets_changes_nothing_on_any_mesh(mesh):
    """Steps 2, 4 and 5 have no targets, among bad steps 3 and 6: what steps 1 and 7 alone lead to, bit for bit."""
    program, flags = program_on(*mesh.items()), []
    state, without = program.init(), program.init()
    for step in range(1, 8):
        batch = batch_of(program, step, bad=np.nan if step in (3, 6) else None, targets=step not in (2, 4, 5))
        state, found = program.step(state, batch)
        flags.append((int(found["bad_in_a_row"]), int(found["bad_steps"])))
        if step in (1, 7):
            without, reference = program.step(without, batch)
            assert float(found["loss"]) == float(reference["loss"])
            assert float(found["learning_rate"]) == float(reference["learning_rate"])
        elif step in (2, 4, 5):
            assert int(found["tokens"]) == 0 and np.isnan(found["loss"]) and np.isnan(found["grad_norm"])
    assert flags == [(0, 0), (0, 0), (1, 1), (1, 1), (1, 1), (2, 2), (0, 2)]
    assert same(state["params"], without["params"]) and same(state["optimizer"], without["optimizer"])
    assert int(state["counters"]["step"]) == 7 and int(without["counters"]["step"]) == 2


@pytest.mark.parametrize("mesh", in_tiers({0, 5}, MESHES), ids=str)
def test_deciding_costs_no_word_with_the_host_and_no_message(mesh, monkeypatch):
    """The program sends what one sends in which every step counts as good, and nothing to the host."""
    program = program_on(*mesh.items())
    devices = int(np.prod(list(mesh.values())))
    text = program.step.as_text()
    with monkeypatch.context() as patch:
        patch.setattr(jnp, "isfinite", lambda value: jnp.array(True))
        careless = compile_step(program.spec, program.abstract_state).as_text()
    sent, sent_anyway = (
        sorted(
            (played.collective.kind, played.collective.payload, played.times, played.collective.groups)
            for played in replay_program(Program(each), devices).collectives
        )
        for each in (text, careless)
    )
    assert sent == sent_anyway and text != careless
    assert not any(word in text for word in ("infeed", "outfeed", "callback", "send(", "recv("))


def poisoned(monkeypatch, *steps, factor=np.nan):
    """Lets the batches of these steps of a new run hold weights that are no numbers, or multiplied by `factor`."""
    original, staged = feed.Feed.stage, itertools.count(1)

    def stage(self):
        original(self)
        batch, digest = self._staged
        if next(staged) in steps:
            self._staged = batch | {"weights": batch["weights"] * np.float32(factor)}, digest

    monkeypatch.setattr(feed.Feed, "stage", stage)


def test_a_bad_step_is_told_with_its_rows(tiny, monkeypatch, capsys):
    poisoned(monkeypatch, 4, 9)
    config = tiny("train.steps=12", "checkpoint.every_steps=0", "train.max_bad_steps=1")
    assert train(config, devices=jax.devices()[:1]) == 0
    told = events(config.run.dir, "bad_step")
    assert [(event["step"], event["rows"], event["bad"]) for event in told] == [
        (4, [48, 63], "the loss"), (9, [128, 143], "the loss"),
    ]  # fmt: skip
    assert "step 9: the loss is not finite (rows 128 to 143)" in capsys.readouterr().out
    assert [loss is None for loss in losses(config.run.dir)] == [step in (4, 9) for step in range(1, 13)]
    assert metrics(config.run.dir)[-1]["bad_steps"] == 2


def test_too_many_bad_steps_in_a_row_end_the_run_with_a_diagnosis(tiny, monkeypatch):
    poisoned(monkeypatch, 3, 5, 6, 7, 8)
    config = tiny("train.steps=12", "train.max_bad_steps=2")
    words = (
        r"3 steps in a row, up to step 7: the loss was infinite or NaN \(the last good step was 4, its loss [\d.]+; "
        r"the rows of these steps are 64 to 111\); .* add \{from_row: 64, rows: 48\} to data.skip; if there is "
        r"a checkpoint of step 5 or later"
    )
    with pytest.raises(UserError, match=words):
        train(config, devices=jax.devices()[:1])


def test_bad_steps_with_steps_without_targets_between_them_are_in_a_row(tiny):
    config = tiny("train.max_bad_steps=2")
    data = TrainingData(config, open_sources(config.data))
    monitor = BadStepMonitor(SimpleNamespace(config=config, training_data=data, events=None, status=None, writes=False))
    bad, empty = {"loss": np.nan, "tokens": 9}, {"loss": None, "tokens": 0}
    steps = [{"loss": 1.0, "tokens": 9, "bad_in_a_row": 0}, bad | {"bad_in_a_row": 1}, empty | {"bad_in_a_row": 1},
             empty | {"bad_in_a_row": 1}, bad | {"bad_in_a_row": 2}]  # fmt: skip
    for step, values in enumerate(steps, 2):
        monitor.see(step, values)
    words = r"3 steps in a row, up to step 7: .*the last good step was 2, .*rows of these steps are 32 to 111\)"
    with pytest.raises(UserError, match=words):
        monitor.see(7, bad | {"bad_in_a_row": 3})


# Batches without targets.


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    """Prepared data of long questions with a short answer each: most rows have no target."""
    folder = tmp_path_factory.mktemp("masked")
    record = {"prompt": "please read all of this text " * 12, "completion": "ok"}
    settings = Settings(reading=ReadOptions(chat=True), eval_fraction=0.0)
    (folder / "long.jsonl").write_text("".join(json.dumps(record) + "\n" for _ in range(12)))
    build(Selection([folder / "long.jsonl"]), folder / "data", settings, lambda *progress: None)
    return folder / "data"


def test_a_run_with_steps_without_targets(tiny, masked, capsys):
    """The first 32 steps have no targets but for two, and then comes the real loss: no jump, no loss of 0."""
    rows = ("data.global_batch_size=1", "data.shuffle=false", "train.microbatch_size=1", f"data.path={masked}")
    config = tiny(*rows, "train.steps=40", "checkpoint.every_steps=20", "train.log_every=1")
    assert train(config, devices=jax.devices()[:1]) == 0
    lines, output = metrics(config.run.dir), capsys.readouterr().out
    known = [line for line in lines if line["loss"] is not None]
    assert 2 <= len(known) <= 4 and all(line["loss"] > 4 and line["grad_norm"] > 0 for line in known)
    assert all(line["grad_norm"] is None for line in lines if line["loss"] is None)
    assert [line["step"] for line in lines] == list(range(1, 41)) and lines[-1]["bad_steps"] == 0
    rates = [line["learning_rate"] for line in lines]
    assert len(set(rates[: known[0]["step"]])) == 1, "the schedule counts updates"
    assert not events(config.run.dir, "loss_spike") and not events(config.run.dir, "bad_step")
    assert re.search(r"rows    \d+ windows of 32 tokens, fill 1.000, 9\d\.\d% without targets", output)
    assert re.search(r"about 9\d% of the batches have no target", output)
    assert "step 1: its rows (0 to 0) have no targets" in output and output.count("its rows (") == 1
    assert f"{40 - len(known)} steps of this start had no targets and changed nothing" in output
    assert re.search(r"step 1/40  no targets  0 tokens/s", output)
    with run_process(config, devices=jax.devices()[:1]) as run:
        assert replay(run, 20, 40) == ExitCode.FINISHED
    output = capsys.readouterr().out
    assert output.count("no targets: the same") == sum(line["loss"] is None for line in lines[20:])
    assert "state of step 40: the same, bit for bit" in output
    summary = report_of([config.run.dir])["runs"][0]["summary"]
    assert (summary["steps_without_targets"], summary["bad_steps"]) == (40 - len(known), 0)


@pytest.mark.parametrize("known", ["all", "sample"])
def test_rows_without_targets_are_counted(masked, tiny, monkeypatch, known):
    """By hand: of each document of 351 tokens the last three are targets, so of rows of 32 one in eleven has some."""
    if known == "sample":
        monkeypatch.setattr(batches, "_SAMPLED_STORED_ROWS", 64)
    config = tiny("data.global_batch_size=2", f"data.path={masked}")
    data = TrainingData(config, open_sources(config.data))
    rows = data.readers["data"].rows
    some = sum(bool((data.readers["data"].read([row])["weights"] != 0).any()) for row in range(rows))
    found = data.without_targets()["data"]
    assert found.is_sample == (known == "sample") and (found.rows_read == rows or known == "sample")
    assert found.share == pytest.approx(1 - some / rows, abs=0.0 if known == "all" else 0.08)
    assert data.empty_batches({"data": found}) == pytest.approx(found.share**2)


def log_in(folder, written):
    """A log whose lines are also appended to a list."""
    return TrainLog(
        folder, writer=True, status=StatusLine(sys.stdout), steps=9, tokens=0, rates=Rates(1.0, None, None, 1),
        epochs=lambda step: {}, timer=StepTimer(), on_record_written=written.append,
    )  # fmt: skip


def test_an_evaluation_of_nothing_has_no_value(tmp_path, capsys):
    log = log_in(tmp_path, told := [])
    some, nothing = EvaluationSums(6.0, 3), EvaluationSums(0.0, 0)
    assert log.write_eval(5, {"web": some, "chat": nothing}, 1.0) == 2.0
    assert log.write_eval(6, {"web": nothing, "set": some}, 1.0, ["set"]) is None, "a set is no held-out data"
    log.close()
    assert [line["loss"] for line in told] == [line["loss"] for line in metrics(tmp_path, "eval")] == [2.0, None]
    assert told[0]["sources"] == {"web": {"loss": 2.0, "tokens": 3}, "chat": {"loss": None, "tokens": 0}}
    assert scalars(told[1]) == {"eval/tokens": 0.0, "eval/seconds": 1.0, "eval/web/tokens": 0.0, "eval/set/loss": 2.0,
                                "eval/set/tokens": 3.0}  # fmt: skip
    assert "held-out loss none (no targets), web none (no targets), set 2.0000 over 0 tokens" in capsys.readouterr().out


def test_an_evaluation_says_bits_per_byte_where_bytes_are_known(tmp_path, capsys):
    """12 nats over 10 bytes in all; a source of which nothing is known makes the total unknown."""
    log = log_in(tmp_path, told := [])
    web, code, arrays = EvaluationSums(4.0, 2, 6.0), EvaluationSums(8.0, 2, 4.0), EvaluationSums(1.0, 1)
    log.write_eval(5, {"web": web, "code": code}, 1.0)
    log.write_eval(6, {"web": web, "arrays": arrays}, 1.0)
    log.close()
    assert told[0]["bits_per_byte"] == pytest.approx(12 / math.log(2) / 10)
    assert told[0]["sources"]["code"]["bits_per_byte"] == pytest.approx(2 / math.log(2))
    assert "bits_per_byte" not in told[1] and "bits_per_byte" in told[1]["sources"]["web"]
    assert "held-out loss 3.0000 (1.7312 bits per byte), web" in capsys.readouterr().out


# Passing over rows.

ranges = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 60)), max_size=5)


@given(ranges)
def test_skipping_leaves_the_others_in_order(found):
    skipped = SkippedRanges([(first, first + count) for first, count in found])
    passed = {row for first, count in found for row in range(first, first + count)}
    kept = [row for row in range(1000) if row not in passed]
    assert skipped.row_numbers(np.arange(len(kept))).tolist() == kept
    for number in (0, 17, 150, 400):
        below = {row for first, after in skipped.ranges_below(number) for row in range(first, after)}
        assert below == {row for row in passed if row < number}


@given(ranges, st.sampled_from([3, 8, 16]))
def test_a_batch_with_a_skip_list_is_rows_of_the_batches_without(found, size):
    """Over a mixture whose weights change, so that a batch can lie on both sides of the change."""
    phases = [MixturePhase(0, (3.0, 1.0)), MixturePhase(10, (1.0, 1.0))]
    make = lambda skip: Order({"a": 70, "b": 90}, phases, seed=3, shuffle=True, global_rows=size, skip=skip)
    order = make([(first, first + count) for first, count in found])
    plain = make([])
    every = np.concatenate([np.stack(plain.locate(step, range(size))) for step in range(800 // size)], axis=1)
    for step in (0, 1, 5, 11, 20):
        numbers = order.numbers(step, range(size))
        assert (np.stack(order.locate(step, range(size))) == every[:, numbers]).all()
        assert order.rows_skipped(step) == numbers[-1] - ((step + 1) * size - 1)


def test_a_run_passes_over_rows_and_says_so(tiny, capsys):
    config = tiny("data.skip=[{from_row: 48, rows: 16}, {from_row: 100, rows: 5}]", "train.steps=8")
    plain = tiny()
    assert train(config, devices=jax.devices()[:1]) == 0
    one, other = (TrainingData(each, open_sources(each.data)) for each in (config, plain))
    assert np.array_equal(one.batch(3, range(16))["tokens"], other.batch(4, range(16))["tokens"])
    told = [(event["step"], event["count"], event["rows"]) for event in events(config.run.dir, "rows_skipped")]
    assert told == [(4, 16, [64, 79]), (6, 5, [96, 116])]
    assert "rows skipped in step 4: 16" in capsys.readouterr().out
    for change in ("data.skip=[{from_row: 48, rows: 16}]", "data.skip=[]"):
        with pytest.raises(ConfigError, match=r"data\.skip: at step 8 of .* all rows before 149 have been trained on"):
            train(tiny(change, "train.steps=12"), devices=jax.devices()[:1])
    more = "data.skip=[{from_row: 48, rows: 16}, {from_row: 100, rows: 5}, {from_row: 149, rows: 3}]"
    assert train(tiny(more, "train.steps=12"), devices=jax.devices()[:1], accept_changes=True) == 0
    assert events(config.run.dir, "rows_skipped")[-1]["rows"] == [152, 167]
