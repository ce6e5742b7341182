"""The gradient noise scale: the squares that steps measure, what is made of them, and that nothing more is sent."""

from collections import Counter

import jax
import numpy as np
import pytest
from conftest import TINY
from hypothesis import given
from hypothesis import strategies as st

from jaxmnt.config.load import parse_config
from jaxmnt.data.feed import to_devices
from jaxmnt.plan.hlo import Program, collective_of
from jaxmnt.report.noise import noise_scale
from jaxmnt.training.compile import compile_program
from jaxmnt.training.noise import small_batches, squared_norm
from jaxmnt.training.spec import ControlFlags
from jaxmnt.training.step import mean_gradients

ROWS, LENGTH, VOCAB = 16, 32, 64


def compiled(mesh, zero=3, micro=None, noise=True, **more):
    config = parse_config({
        "data": {"global_batch_size": ROWS, "sequence_length": LENGTH},
        "model": TINY["model"] | {"vocab_size": VOCAB},
        "mesh": {"data": 1, "zero": zero} | mesh,
        "train": {"precision": "float32", "microbatch_size": micro},
        "telemetry": {"noise_scale": noise},
    } | more)  # fmt: skip
    devices = jax.devices()[: int(np.prod(list(mesh.values())))]
    return compile_program(config, VOCAB, devices)


def batch_of(program, weights=None):
    tokens = np.random.default_rng(0).integers(0, VOCAB, (ROWS, LENGTH + 1), np.int32)
    ones = np.ones((ROWS, LENGTH), np.int32)
    local = {
        "tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segments": ones,
        "weights": np.ones((ROWS, LENGTH), np.float32) if weights is None else weights,
        "positions": np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1)),
    }  # fmt: skip
    batch = to_devices(local, list(range(ROWS)), ROWS, program.batch_sharding)
    return batch | {"control": ControlFlags(program.control_sharding).array()}


OTHERS = [
    ({"data": 4}, 3, None, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]),
    ({"fsdp": 2, "model": 2}, 3, 4, [[0, 1, 2, 3, 8, 9, 10, 11]]),
    ({"fsdp": 2}, 1, None, [list(range(8)), list(range(8, 16))]),
]
CASES = [  # mesh, zero, rows of a microbatch, the rows of each small batch
    ({"data": 2, "fsdp": 2}, 3, 2, [[0, 1, 4, 5], [8, 9, 12, 13]]),  # the first microbatches of two shards of fsdp
    ({"data": 2, "pipeline": 2}, 3, 4, [list(range(8)), list(range(8, 16))]),  # all microbatches of a replica
    ({"fsdp": 2, "pipeline": 2}, 1, 4, [list(range(8)), list(range(8, 16))]),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS),
]


@pytest.mark.parametrize(("mesh", "zero", "micro", "smalls"), CASES, ids=str)
def test_squares_are_those_of_the_small_batches(mesh, zero, micro, smalls):
    """Held against gradients in which all other rows weigh nothing."""
    program = compiled(mesh, zero, micro)
    spec, state = program.spec, program.init()
    small = small_batches(spec)
    assert small is not None and small.share * ROWS == len(smalls[0])

    @jax.jit
    def squared(params, batch):
        found = mean_gradients(spec, params, {}, batch, 0)
        return squared_norm(spec, small, found.gradients), found.squared_norms

    each = []
    for rows in smalls:
        weights = np.zeros((ROWS, LENGTH), np.float32)
        weights[rows] = 1
        each.append(float(squared(state["params"], batch_of(program, weights))[0]))
    whole, told = squared(state["params"], batch_of(program))
    assert float(told["small"]) == pytest.approx(np.mean(each), rel=1e-4)
    assert float(told["large"]) == pytest.approx(float(whole), rel=1e-6)
    assert 0 < told["large"] < told["small"]


def test_where_no_part_of_a_batch_has_a_gradient_nothing_is_measured():
    program = compiled({"fsdp": 2}, 3, None)
    assert small_batches(program.spec) is None
    _, metrics = program.step(program.init(), batch_of(program))
    assert "gradient_squares" not in metrics


def test_nothing_more_is_sent():
    """The squares of all devices are summed with what is summed anyway."""

    def sent(noise):
        program = compiled({"data": 2, "fsdp": 2}, 3, 2, noise)
        text = Program(program.step.as_text())
        found = [collective_of(one, 4) for instructions in text.computations.values() for one in instructions]
        return Counter(one.kind for one in found if one is not None)

    assert sent(True) == sent(False)


@given(st.floats(0.1, 10.0), st.floats(0.1, 1e4), st.integers(1, 64))
def test_the_scale_is_noise_over_signal(signal, scale, small):
    """Of gradients whose squares are what they are on average: |G|² + trace / rows."""
    rows, of = 128.0, lambda batch: signal * (1 + scale / batch)
    lines = [{"gradient_squares": {"small": of(small), "large": of(rows)}}] * 3
    assert noise_scale(lines, small, rows) == pytest.approx(scale, rel=1e-6)


@pytest.mark.parametrize("spike", [{"small": 3.0, "large": float("nan")}, {"small": 1e30, "large": 3.0}])
def test_a_step_that_is_not_finite_does_not_count(spike):
    line = {"gradient_squares": {"small": 1 + 20 / 4, "large": 1 + 20 / 64}}
    lines = [line] * 50 + [{"gradient_squares": spike}] + [line] * 60
    assert noise_scale(lines, 4, 64) == pytest.approx(20)


@pytest.mark.parametrize("line", [{}, {"gradient_squares": {}}, {"gradient_squares": {"small": 1.0, "large": 2.0}}])
def test_what_does_not_tell_is_left_out(line):
    """Among others, squares of too few steps, whose difference is chance."""
    assert noise_scale([line], 4, 16) is None
    assert noise_scale([line], 0, 0) is None
