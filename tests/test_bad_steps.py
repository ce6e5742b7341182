"""Steps that are not finite change nothing, and rows can be passed over."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import events, losses, metrics, mostly_slow
from hypothesis import given
from hypothesis import strategies as st

from jaxmnt.config.load import parse_config
from jaxmnt.data import feed
from jaxmnt.data.batches import TrainingData
from jaxmnt.data.feed import to_devices
from jaxmnt.data.order import MixturePhase, Order, Skipped
from jaxmnt.data.sources import open_sources
from jaxmnt.errors import ConfigError, UserError
from jaxmnt.plan.hlo import Program
from jaxmnt.plan.timeline import play
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


def batch_of(program, step, *, bad=None):
    rng = np.random.default_rng(step)
    tokens = rng.integers(0, VOCAB, (ROWS, LENGTH + 1), np.int32)
    rows = {
        "tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": np.ones((ROWS, LENGTH), np.float32),
        "segments": np.zeros((ROWS, LENGTH), np.int32),
        "positions": np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1)),
    }  # fmt: skip
    if bad is not None:
        rows["weights"][5, 3] = bad
    placed = to_devices(rows, list(range(ROWS)), ROWS, program.batch_sharding)
    return placed | {"control": ControlFlags(program.control_sharding).array()}


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


@pytest.mark.parametrize(
    ("mesh", "bad"),
    mostly_slow({0, 5, 7}, [*((mesh, np.nan) for mesh in MESHES), (MESHES[-1], np.inf), (MESHES[-1], 1e38)]),
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


@pytest.mark.parametrize("mesh", mostly_slow({0, 5}, MESHES), ids=str)
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
            (played.one.kind, played.one.payload, played.times, played.one.groups)
            for played in play(Program(each), devices).collectives
        )
        for each in (text, careless)
    )
    assert sent == sent_anyway and text != careless
    assert not any(word in text for word in ("infeed", "outfeed", "callback", "send(", "recv("))


def poisoned(monkeypatch, *steps):
    """Lets the batches of these steps of a new run hold weights that are no numbers."""
    original, staged = feed.Feed.stage, itertools.count(1)

    def stage(self):
        original(self)
        batch, digest = self._staged
        if next(staged) in steps:
            self._staged = batch | {"weights": batch["weights"] * np.float32(np.nan)}, digest

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


# Passing over rows.

ranges = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 60)), max_size=5)


@given(ranges)
def test_skipping_leaves_the_others_in_order(found):
    skipped = Skipped([(first, first + count) for first, count in found])
    passed = {row for first, count in found for row in range(first, first + count)}
    kept = [row for row in range(1000) if row not in passed]
    assert skipped.nth(np.arange(len(kept))).tolist() == kept
    for number in (0, 17, 150, 400):
        below = {row for first, after in skipped.below(number) for row in range(first, after)}
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
        assert order.passed_over(step) == numbers[-1] - ((step + 1) * size - 1)


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
