"""Every way to split the model computes the same: loss and each gradient of a step, on eight devices as on one."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmnt.config.load import parse_config
from jaxmnt.data.feed import to_devices
from jaxmnt.placement.layout import map_with_axes
from jaxmnt.program.compiled import abstract_state, plan
from jaxmnt.program.step import mean_gradients

ROWS, LENGTH, VOCAB = 16, 16, 60

BASE = {
    "data": {"global_batch_size": ROWS, "sequence_length": LENGTH},
    "model": {"vocab_size": 64, "hidden_size": 32, "num_layers": 8, "num_heads": 8, "intermediate_size": 64},
    "train": {"precision": "float32"},
}


def config(**sections):
    return parse_config({name: BASE.get(name, {}) | sections.get(name, {}) for name in BASE | sections})


def rows(chosen, seed=0):
    """Rows with very different numbers of targets, some with none, and documents that end inside them."""
    rng = np.random.default_rng(seed)
    shape = (chosen.data.global_batch_size, chosen.data.sequence_length)
    tokens = rng.integers(0, VOCAB, (shape[0], shape[1] + 1), np.int32)
    weights = (rng.random(shape) < rng.random((shape[0], 1))).astype(np.float32)
    weights[shape[0] // 4 : shape[0] // 2] = 0
    segments = np.cumsum(rng.random(shape) < 0.2, axis=1, dtype=np.int32)
    starts = np.concatenate([np.ones((shape[0], 1), bool), np.diff(segments, axis=1) > 0], axis=1)
    at = np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1))
    positions = at - np.maximum.accumulate(np.where(starts, at, 0), axis=1).astype(np.int32)
    if not chosen.data.keeps_documents_apart:
        positions = at
    return {
        "tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights,
        "segments": segments, "positions": positions,
    }  # fmt: skip


def gradients(devices, **sections):
    """Loss and canonical gradients of the first step."""
    chosen = config(**sections)
    setting = plan(chosen, VOCAB, jax.devices()[:devices])
    placement, axes = setting.placement, setting.definition.axes
    batch_sharding = placement.sharding(("batch", "length"))
    count = chosen.data.global_batch_size
    batch = to_devices(rows(chosen), list(range(count)), count, batch_sharding)

    def compute(params, batch):
        sums, _, scale, found = mean_gradients(setting, params, batch, jnp.int32(0))
        return sums.loss * scale, found

    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(setting)["params"])
    place = lambda: map_with_axes(setting.layout.place, setting.definition.init(jax.random.key(0)), axes)
    params = jax.jit(place, out_shardings=shardings)()
    loss, found = jax.jit(compute)(params, batch)
    found = jax.jit(lambda tree: map_with_axes(setting.layout.canonical, tree, axes))(found)
    return float(loss), jax.device_get(found)


@functools.cache
def reference(key):
    return gradients(1, **json.loads(key))


def check(devices, plain, **sections):
    loss, found = gradients(
        devices, **{name: plain.get(name, {}) | sections.get(name, {}) for name in plain | sections}
    )
    expected_loss, expected = reference(json.dumps(plain, sort_keys=True))
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape, path
        error = np.abs(a - b).max() / np.abs(b).max()
        assert error <= 1e-5, f"{jax.tree_util.keystr(path)}: {error:.2e}"


MESHES = [
    (8, 1, 1, 1),
    (1, 1, 8, 1),
    (1, 1, 1, 8),
    (2, 1, 2, 2),
    (1, 2, 2, 2),
    (1, 4, 1, 2),
    (2, 2, 2, 1),
    (1, 8, 1, 1),
]
PLAIN = {
    "plain": {},
    "packed": {"data": {"document_mask": True}},
    "tied": {"model": {"tie_embeddings": True}},
    "grouped": {"model": {"num_kv_heads": 2, "dropout": 0.2}},
}
ACCUMULATED = {"microbatch_size": 1}
SCHEDULES = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "interleaved": {"schedule": "interleaved", "chunks": 2},
    "uneven": {"schedule": "1f1b", "layers": "uneven"},
}


def cases():
    """Each mesh with and without accumulation; with each of the other choices once or more."""
    for number, shape in enumerate(MESHES):
        names = list(PLAIN)
        for accumulate in (False, True):
            schedules = list(SCHEDULES) if shape[1] > 1 else [None]
            for index, schedule in enumerate(schedules):
                kind = names[(number + index + 2 * accumulate) % len(names)]
                if schedule in ("interleaved", "uneven") and shape[1] == 8:
                    continue  # eight layers are one a stage
                yield shape, accumulate, schedule, kind


@pytest.mark.parametrize(("shape", "accumulate", "schedule", "kind"), list(cases()))
def test_gradients_are_those_of_one_device(shape, accumulate, schedule, kind):
    sections = {"mesh": dict(zip(("data", "pipeline", "fsdp", "model"), shape, strict=True))}
    if accumulate:
        sections["train"] = {"microbatch_size": 1}
    if schedule:
        chosen = dict(SCHEDULES[schedule])
        if "layers" in chosen:
            stages = shape[1]
            chosen["layers"] = [8 // stages + 1, *[8 // stages] * (stages - 2), 8 // stages - 1]
        sections["pipeline"] = chosen
    check(8, PLAIN[kind], **sections)


def test_what_does_not_divide():
    """Six devices as 3 stages of 7 layers, 1 key/value head on 2 devices, 257 token ids, dropout, 5 microbatches."""
    plain = {
        "data": {"global_batch_size": 5},
        "model": {
            "num_layers": 7, "num_kv_heads": 1, "vocab_size": 257, "dropout": 0.1, "num_heads": 4,
            "intermediate_size": 65,
        },
    }  # fmt: skip
    check(6, plain, mesh={"pipeline": 3, "model": 2}, train={"microbatch_size": 1})
    check(6, plain, mesh={"pipeline": 3, "model": 2}, train={"microbatch_size": 1},
          pipeline={"schedule": "interleaved", "chunks": 2})  # fmt: skip
