"""Every way to split the model computes the same: loss and each gradient of a step, on eight devices as on one."""

import functools
import itertools
import json
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import in_tiers

from jaxmnt.checkpoint.commit import newest_valid
from jaxmnt.checkpoint.manifest import Manifest
from jaxmnt.checkpoint.restore import restore
from jaxmnt.checkpoint.retention import space_needed
from jaxmnt.checkpoint.saver import Saver
from jaxmnt.config.load import parse_config
from jaxmnt.config.schema import Checkpoint
from jaxmnt.data.feed import to_devices
from jaxmnt.distributed.identity import Identity
from jaxmnt.errors import ConfigError
from jaxmnt.models.contract import define
from jaxmnt.models.registry import build_family
from jaxmnt.parallel.layout import map_with_axes
from jaxmnt.parallel.sharding import build_mesh
from jaxmnt.plan.report import notes
from jaxmnt.training import engine
from jaxmnt.training.build import build_spec, inference_spec
from jaxmnt.training.compile import Program, compile_program, compile_step
from jaxmnt.training.spec import ControlFlags
from jaxmnt.training.state import abstract_state
from jaxmnt.training.step import mean_gradients

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


def gradients(devices, start=None, float32=False, **sections):
    """Loss and canonical gradients of the first step, from parameters that are given or the initial ones. `float32`:
    all but products in float8."""
    chosen = config(**sections)
    spec = build_spec(chosen, VOCAB, jax.devices()[:devices])
    if float32:
        spec = replace(spec, dtype=jnp.dtype(jnp.float32))
    placement, axes = spec.placement, spec.definition.axes
    batch_sharding = placement.sharding(("batch", "length"))
    count = chosen.data.global_batch_size
    batch = to_devices(rows(chosen), list(range(count)), count, batch_sharding)

    def compute(params, batch):
        found = mean_gradients(spec, params, {}, batch, jnp.int32(0))
        return found.sums.loss * found.scale, found.gradients

    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(spec)["params"])
    params = initial(chosen.model) if start is None else start
    if spec.layout.dimensions:
        place = lambda params: map_with_axes(spec.layout.to_device_layout, params, axes)
        params = jax.jit(place, out_shardings=shardings)(params)
    loss, found = jax.jit(compute)(jax.device_put(params, shardings), batch)
    if spec.layout.dimensions:
        found = jax.jit(lambda tree: map_with_axes(spec.layout.to_checkpoint_layout, tree, axes))(found)
    return float(loss), jax.device_get(found)


@functools.cache
def initial(model):
    definition = define(build_family(model, model.vocab_size))
    return jax.device_get(jax.jit(definition.init)(jax.random.key(0))[0])


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
SCHEDULES = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "interleaved": {"schedule": "interleaved", "chunks": 2},
    "uneven": {"schedule": "1f1b", "layers": "uneven"},
}


EVERY = [
    (shape, accumulate, schedule, kind)
    for shape in MESHES
    for accumulate, schedule, kind in itertools.product(
        (False, True), SCHEDULES if shape[1] > 1 else [None], ("packed", "tied")
    )
]
PAIRS = [(shape, schedule) for shape in MESHES for schedule in (SCHEDULES if shape[1] > 1 else [None])]
# Each mesh with each schedule once; accumulation and the kinds in turn.
IN_TURN = [
    (shape, number % 3 == 0, schedule, list(PLAIN)[(number + number // 4) % len(PLAIN)])
    for number, (shape, schedule) in enumerate(PAIRS)
]
# Of those, in the quick tests each mesh once, and each schedule, each kind, with and without accumulation.
QUICK = {1, 2, 3, 5, 11, 12, 18}


def compare(shape, accumulate, schedule, kind):
    stages, layers = shape[1], 16 if shape[1] == 8 else 8  # at least two a stage
    plain = PLAIN[kind] | {"model": PLAIN[kind].get("model", {}) | {"num_layers": layers}}
    sections = {"mesh": dict(zip(("data", "pipeline", "fsdp", "model"), shape, strict=True))}
    if accumulate:
        sections["train"] = {"microbatch_size": 1}
    if schedule:
        chosen = dict(SCHEDULES[schedule])
        if "layers" in chosen:
            chosen["layers"] = [layers // stages + 1, *[layers // stages] * (stages - 2), layers // stages - 1]
        sections["pipeline"] = chosen
    check(8, plain, **sections)


@pytest.mark.parametrize(("shape", "accumulate", "schedule", "kind"), in_tiers(QUICK, IN_TURN))
def test_gradients_are_those_of_one_device(shape, accumulate, schedule, kind):
    compare(shape, accumulate, schedule, kind)


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_gradients_are_those_of_one_device_in_every_combination(shape):
    for case in EVERY:
        if case[0] == shape and case not in IN_TURN:
            compare(*case)


@pytest.mark.parametrize(
    ("key", "value"), [("telemetry.noise_scale", True), ("train.remat_offload", ["layer_input"])], ids=str
)
def test_settings_that_need_one_microbatch_after_another(key, value):
    chosen = config(train={"remat": "full", "microbatch_size": 1, "overlap_microbatches": True}).changed({key: value})
    with pytest.raises(ConfigError, match=f"overlap_microbatches: {key} needs one microbatch after another"):
        build_spec(chosen, VOCAB, jax.devices()[:1])


STEADY = {
    "1f1b": {"mesh": {"pipeline": 2, "model": 2, "fsdp": 2}, "train": {"remat": "dots"}},
    "interleaved and uneven": {
        "mesh": {"pipeline": 2, "fsdp": 2},
        "pipeline": {"schedule": "interleaved", "chunks": 2, "layers": [3, 1, 2, 2]},
    },
    "two groups": {"mesh": {"pipeline": 2, "model": 2}, "model": {"family": "routed_families.TwoGroups"}},
    "three stages": {"mesh": {"pipeline": 3, "data": 2}, "train": {"remat": "full"}},
    "no pipeline": {
        "mesh": {"fsdp": 2, "model": 2, "data": 2, "prefetch": True},
        "train": {"remat": "dots"},
    },
    "two groups without a pipeline": {
        "mesh": {"fsdp": 2, "context": 2, "zero": 1},
        "model": {"family": "routed_families.TwoGroups"},
    },
}


@pytest.mark.parametrize("name", in_tiers({0}, list(STEADY)))
def test_steady_ticks_change_nothing(name):
    """With many microbatches, most ticks run a forward beside a backward."""
    sections = STEADY[name]
    side_by_side = {"microbatch_size": 1, "overlap_microbatches": True}
    sections = sections | {"train": side_by_side | sections.get("train", {})}
    plain = {"data": {"global_batch_size": 32, "document_mask": True}}
    if "model" in sections:
        plain["model"] = sections["model"]
    devices = math.prod(sections["mesh"].values())
    spec = build_spec(config(**sections | plain), VOCAB, jax.devices()[:devices])
    assert len(spec.schedule.steady_ticks) > 6
    check(devices, plain, **sections)


@pytest.mark.parametrize(
    "schedule", in_tiers(set(), [{"schedule": "1f1b"}, {"schedule": "interleaved", "chunks": 2}]), ids=str
)
def test_what_does_not_divide(schedule):
    """Six devices as 3 stages of 7 layers, 1 key/value head on 2 devices, 257 token ids, dropout, 5 microbatches."""
    plain = {
        "data": {"global_batch_size": 5},
        "model": {
            "num_layers": 7, "num_kv_heads": 1, "vocab_size": 257, "dropout": 0.1, "num_heads": 4,
            "intermediate_size": 65,
        },
    }  # fmt: skip
    check(6, plain, mesh={"pipeline": 3, "model": 2}, train={"microbatch_size": 1}, pipeline=schedule)


@pytest.mark.parametrize(("heads", "kv_heads", "ways"), in_tiers(set(), [(8, 1, 8), (12, 4, 6), (6, 3, 2)]))
def test_shared_heads_that_do_not_divide(heads, kv_heads, ways):
    """Also where a device's queries need two key/value heads of which each has another number of queries."""
    model = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": 4, "num_layers": 1, "hidden_size": 24}
    plain = {"model": model, "data": {"sequence_length": 24}}
    check(ways, plain, mesh={"model": ways})


@pytest.mark.parametrize(
    "sections",
    in_tiers({3, 6, 11}, [
        {"mesh": {"fsdp": 4, "model": 2, "zero": 2}, "train": {"microbatch_size": 1}},
        {"mesh": {"fsdp": 2, "data": 2, "model": 2, "zero": 1}, "train": {"microbatch_size": 1}},
        {"mesh": {"fsdp": 2, "pipeline": 2, "data": 2, "zero": 1}, "train": {"microbatch_size": 1}},
        {"mesh": {"fsdp": 2, "data": 2, "model": 2, "rules": {"embed": ["data", "fsdp"]}}},
        {"mesh": {"data": 4, "model": 2, "rules": {"heads": []}}, "model": {"vocab_size": 16384}},
        {"mesh": {"data": 4, "model": 2, "rules": {"kv_heads": []}}},
        {"mesh": {"fsdp": 2, "pipeline": 2, "model": 2}, "train": {"microbatch_size": 2, "remat": "full"}},
        {"mesh": {"fsdp": 2, "pipeline": 2, "model": 2}, "train": {"microbatch_size": 2, "remat": "dots"}},
        {"mesh": {"fsdp": 2, "model": 4}, "train": {"remat": "attention", "layer_unroll": 2}},
        {"mesh": {"pipeline": 2, "fsdp": 2, "model": 2, "zero": 1}, "train": {"microbatch_size": 2}},
        {"mesh": {"data": 4, "model": 2}, "train": {"remat": "names", "remat_save": ["attention", "mlp_gate"]}},
        {"mesh": {"fsdp": 4, "model": 2}, "train": {"remat": "full", "remat_offload": ["layer_input"]}},
        {"mesh": {"data": 8}, "train": {"remat": "dots", "remat_offload": ["attention", "mlp_up"]}},
        {"mesh": {"fsdp": 8, "prefetch": True}, "train": {"remat": "names", "remat_offload": ["layer_input", "query"]}},
    ]),
    ids=str,
)  # fmt: skip
def test_memory_levers_change_nothing(sections):
    check(8, {"model": {"num_kv_heads": 2, "dropout": 0.1} | sections.pop("model", {})}, **sections)


RING, SPLIT = {"overlap": "ring"}, {"overlap": "rows"}
GPT2 = {"family": "gpt2", "max_positions": LENGTH, "vocab_size": 4096}
FEW_HEADS = {"vocab_size": 16384, "num_kv_heads": 2}
ALTERNATING = {"family": "gemma3", "sliding_window": 5, "sliding_window_pattern": 2, "num_layers": 4}


@pytest.mark.parametrize(
    "sections",
    in_tiers({0}, [
        {"mesh": {"fsdp": 8}, "train": {"microbatch_size": 1}},
        {"mesh": {"fsdp": 4, "model": 2}, "train": {"remat": "dots", "microbatch_size": 2}, "model": ALTERNATING},
        {"mesh": {"fsdp": 2, "data": 4}, "train": {"remat": "full", "layer_unroll": 2, "reduce_dtype": "bfloat16"}},
        {"mesh": {"fsdp": 4, "data": 2}, "optimizer": {"frozen": ["layers.mlp.*", "embedding.*"]}},
        {"mesh": {"fsdp": 2, "data": 2, "model": 2}, "train": {"microbatch_size": 2}},
        {"mesh": {"data": 8}, "train": {"microbatch_size": 1}, "model": ALTERNATING},
        {"mesh": {"fsdp": 4, "data": 2}, "optimizer": {"frozen": ["layers.*"]}},
        {"mesh": {"fsdp": 8}, "model": {"num_layers": 1}},
    ]),
    ids=str,
)  # fmt: skip
def test_weights_that_are_gathered_ahead_change_nothing(sections):
    """Not a bit: what is added to what, and in which order, stays."""
    sections["model"] = {"num_kv_heads": 2, "dropout": 0.1} | sections.get("model", {})
    ahead, plain = ({**sections, "mesh": sections["mesh"] | {"prefetch": prefetch}} for prefetch in (True, False))
    (loss, found), (plain_loss, wanted) = (gradients(8, **one) for one in (ahead, plain))
    assert loss == plain_loss and jax.tree.structure(found) == jax.tree.structure(wanted)
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b, jax.tree_util.keystr(path))


@pytest.mark.parametrize(
    "sections",
    in_tiers({0}, [
        {"mesh": {"fsdp": 2, "model": 4}, "model": RING | {"num_kv_heads": 2}, "train": {"remat": "dots"}},
        {"mesh": {"pipeline": 2, "model": 2, "data": 2}, "model": SPLIT, "train": {"microbatch_size": 3}},
        {"mesh": {"model": 8}, "model": RING | {"num_kv_heads": 2}, "train": {"remat": "full", "microbatch_size": 2}},
        {"mesh": {"fsdp": 2, "model": 2, "data": 2}, "model": RING, "train": {"remat": "none", "microbatch_size": 2}},
        {"mesh": {"fsdp": 2, "model": 2, "data": 2, "prefetch": True}, "model": RING | {"family": "olmo2"}},
        {"mesh": {"data": 4, "model": 2}, "model": RING | {"family": "qwen2"}, "train": {"remat": "dots"}},
        {"mesh": {"data": 2, "model": 4, "rules": {"heads": []}}, "model": RING | FEW_HEADS},
        {"mesh": {"fsdp": 2, "model": 4, "prefetch": True}, "model": SPLIT, "train": {"remat": "dots"}},
    ]),
    ids=str,
)  # fmt: skip
def test_what_is_multiplied_while_activations_travel_changes_nothing(sections):
    plain = {
        "model": {"dropout": 0.1} | sections.pop("model"),
        "data": {"global_batch_size": 24, "document_mask": True},
    }
    overlap = plain["model"].pop("overlap")
    check(8, plain, **sections | {"model": {"overlap": overlap}})


def test_what_only_training_has_is_off_elsewhere():
    """A model that was trained by halves of rows is called row by row; without `model` there is nothing to overlap."""
    assert inference_spec(config(model=SPLIT, mesh={"fsdp": 8}), VOCAB).placement.overlap == "off"
    alone = build_spec(config(model=RING, mesh={"fsdp": 4, "pipeline": 2}, train={"microbatch_size": 2}), VOCAB)
    assert alone.placement.overlap == "off"
    ahead = build_spec(config(mesh={"data": 8, "prefetch": True}), VOCAB)
    assert ahead.prefetch and not ahead.is_reduced_early(()), "a parameter that is one number"
    assert ahead.is_reduced_early(("layers", "embed", "mlp")) and not ahead.is_reduced_early(("vocab", "embed"))


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("remat", ["none", "attention", "dots", "full"])
def test_no_stage_keeps_weights(remat, kv_heads):
    """Neither whole over fsdp nor the taken key/value heads: what is kept has the batch and the length in its shape."""
    chosen = config(
        model={"num_kv_heads": kv_heads, "num_layers": 2, "hidden_size": 48, "intermediate_size": 80},
        mesh={"pipeline": 2, "model": 2, "fsdp": 2},
        train={"microbatch_size": 2, "remat": remat, "precision": "bfloat16"},
    )  # fmt: skip
    spec = build_spec(chosen, VOCAB, jax.devices())
    kept = jax.tree.leaves(engine.trace_step(spec).residuals)
    # [slots, layers, …], where products have the batch and the length in one dimension; no weight has such a size.
    lengths = {size * rows for size in (LENGTH, LENGTH // 2) for rows in (1, spec.microbatch_rows)}
    assert kept and all(lengths & set(one.shape[2:]) for one in kept if one.size > 64), kept


@pytest.mark.parametrize("remat", ["none", "dots"])
def test_norms_over_all_heads_keep_what_they_norm_once(remat):
    """In bfloat16, with the ring as without."""
    kept = {}
    for overlap in ("off", "ring"):
        chosen = config(
            model={"family": "olmo2", "overlap": overlap}, mesh={"model": 2, "fsdp": 4},
            train={"remat": remat, "precision": "bfloat16"},
        )  # fmt: skip
        spec = build_spec(chosen, VOCAB, jax.devices())
        arrays = jax.tree.leaves(engine.trace_step(spec).residuals)
        kept[overlap] = sum(one.size * one.dtype.itemsize for one in arrays)
        of_heads = (spec.microbatch_rows, LENGTH, chosen.model.num_heads // 2, chosen.model.head_dim)
        assert not [one for one in arrays if one.shape[2:] == of_heads and one.dtype == jnp.float32]
    assert kept["off"] == kept["ring"]


@pytest.mark.slow
def test_one_stage_remembers_a_part_of_the_microbatches():
    """Eight stages: for 96 microbatches no more than for 48, and less than half of gpipe's temporary memory."""

    def temporary(schedule, microbatches):
        chosen = config(
            data={"global_batch_size": microbatches, "sequence_length": 256},
            model={"num_heads": 4},
            train={"microbatch_size": 1},
            mesh={"pipeline": 8},
            pipeline={"schedule": schedule},
        )
        spec = build_spec(chosen, VOCAB, jax.devices())
        return compile_step(spec, abstract_state(spec)).memory_analysis().temp_size_in_bytes

    few, many = temporary("1f1b", 48), temporary("1f1b", 96)
    assert many < 0.5 * temporary("gpipe", 96)
    # The batch itself grows: its rows are cut into microbatches on the device.
    assert many - few < 0.02 * few + 5 * 4 * 48 * 256


WAYS = {
    "one": (1, {}),
    "fsdp": (8, {"mesh": {"fsdp": 8}}),
    "model": (8, {"mesh": {"model": 4, "data": 2}}),
    "mixed": (8, {"mesh": {"fsdp": 2, "model": 2, "data": 2}}),
    "uneven": (6, {"mesh": {"pipeline": 3, "model": 2}}),
    "interleaved": (8, {"mesh": {"pipeline": 2, "fsdp": 4}, "pipeline": {"schedule": "interleaved", "chunks": 3}}),
    "data": (8, {"mesh": {"data": 8}}),
    "tensor": (8, {"mesh": {"model": 8}}),
    "four stages": (8, {"mesh": {"pipeline": 4, "model": 2}}),
    "all axes": (8, {"mesh": {"pipeline": 2, "fsdp": 2, "model": 2}}),
    "stages": (4, {"mesh": {"pipeline": 2, "model": 2}, "train": {"microbatch_size": 1}}),
    "offloaded": (6, {"mesh": {"pipeline": 3, "fsdp": 2}, "optimizer": {"offload": True}}),
}


@pytest.mark.long
@pytest.mark.exhaustive
def test_a_checkpoint_moves_between_meshes(tmp_path):
    """What any mesh saves any other restores, bit for bit: parameters and optimizer state."""
    model = {"num_layers": 7, "vocab_size": 257, "intermediate_size": 65, "num_kv_heads": 2}
    programs = {}
    for name, (devices, sections) in WAYS.items():
        whole = config(model=model, data={"global_batch_size": 24}, **sections)
        spec = build_spec(whole, 257, jax.devices()[:devices])
        programs[name] = Program(spec, None, abstract_state(spec), None, 0.0)  # what moves a state needs no step
    rng = np.random.default_rng(0)
    numbers = lambda leaf: rng.integers(-(2**30), 2**30, leaf.shape).astype(leaf.dtype)
    expected = jax.tree.map(numbers, programs["one"].canonical_abstract_state)
    identity = Identity()
    for name, program in programs.items():
        shardings = jax.tree.map(lambda leaf: leaf.sharding, program.canonical_abstract_state)
        state = program.from_canonical(jax.device_put(expected, shardings))
        saver = Saver(tmp_path / name, Checkpoint(), space_needed(1 << 20, 1), identity)
        saver.save(1, program.to_canonical(state), lambda arrays: Manifest("run", 1, arrays, {}, 0, {}, None, []))
        assert saver.result(wait=True).failure is None
    for source, target in itertools.product(programs, programs):
        program = programs[target]
        restored = restore(newest_valid(tmp_path / source), program.canonical_abstract_state, identity)
        placed = program.from_canonical(restored.state)
        same = lambda a, b: a.sharding == b.sharding or pytest.fail(f"{a.sharding} is not {b.sharding}")
        jax.tree.map(same, placed, program.abstract_state)
        found = jax.device_get(program.to_canonical(placed))
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_padded_table_moves_without_a_whole_copy():
    """Between how it lies and how it is stored: a device holds pieces of it, in and out and under way."""
    spec = build_spec(config(model={"vocab_size": 5003, "hidden_size": 256}, mesh={"fsdp": 2, "model": 4}), 5003)
    placed = abstract_state(spec)["params"]["embedding"]["table"]
    axes = spec.definition.axes["embedding"]["table"]
    stored = spec.layout.canonical_sharding((5003, 256), axes)
    move = lambda table: spec.layout.to_checkpoint_layout(table, axes)
    memory = jax.jit(move, out_shardings=stored).lower(placed).compile().memory_analysis()
    piece = placed.size * 4 / 8
    assert placed.shape == (5004, 256) and memory.argument_size_in_bytes == pytest.approx(piece, rel=0.01)
    assert memory.output_size_in_bytes == pytest.approx(piece, rel=0.01) and memory.temp_size_in_bytes < 2.5 * piece


@pytest.mark.slow
def test_state_in_host_memory_changes_nothing():
    """The same parameters after three steps, with the moments resting in host memory between them."""
    results = []
    for offload in (False, True):
        chosen = config(mesh={"fsdp": 2}, optimizer={"offload": offload}, model={"num_layers": 2})
        program = compile_program(chosen, VOCAB, jax.devices()[:2])
        state, flag = program.init(), ControlFlags(program.control_sharding)
        for step in range(3):
            batch = to_devices(rows(chosen, step), list(range(ROWS)), ROWS, program.batch_sharding)
            state, _ = program.step(state, batch | {"control": flag.array()})
        kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state["optimizer"]) if leaf.ndim}
        assert kinds == {"pinned_host" if offload else "device"}
        results.append(jax.device_get(state["params"]))
    jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.slow
def test_dtypes_of_the_state():
    chosen = config(
        mesh={"fsdp": 4}, optimizer={"state_dtype": "bfloat16"}, model={"num_layers": 2},
        train={"params_dtype": "bfloat16", "reduce_dtype": "bfloat16"},
    )  # fmt: skip
    program = compile_program(chosen, VOCAB, jax.devices()[:4])
    plain = compile_program(config(mesh={"fsdp": 4}, model={"num_layers": 2}), VOCAB, jax.devices()[:4])
    assert program.memory.params + program.memory.optimizer <= (plain.memory.params + plain.memory.optimizer) / 2 + 8
    results = []
    for one in (program, plain):
        batch = to_devices(rows(chosen), list(range(ROWS)), ROWS, one.batch_sharding)
        state, metrics = one.step(one.init(), batch | {"control": ControlFlags(one.control_sharding).array()})
        results.append((float(metrics["loss"]), float(metrics["grad_norm"])))
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(state["params"])} == {one.spec.params_dtype.name}
    np.testing.assert_allclose(*results, rtol=0.02)
    assert results[0] != results[1]


@pytest.mark.parametrize(
    ("sections", "devices", "words"),
    [
        ({"mesh": {"pipeline": 8}, "model": {"num_layers": 7}}, 8, ["mesh.pipeline", "8 stages", "num_layers is 7"]),
        ({"mesh": {"pipeline": -1}, "model": {"num_layers": 7}}, 8, ["mesh.pipeline", "8 stages", "num_layers is 7"]),
        ({"mesh": {"pipeline": 2}, "pipeline": {"layers": [3, 4]}}, 2, ["pipeline.layers", "8 layers", "2 pieces"]),
        ({"mesh": {"pipeline": 2}, "pipeline": {"schedule": "interleaved"}}, 2, ["pipeline.chunks", "at least 2"]),
        ({"mesh": {"pipeline": 2}, "pipeline": {"chunks": 2}}, 2, ["pipeline.chunks", "1f1b", "one chunk"]),
        ({"mesh": {"model": 8}, "model": {"num_heads": 4}}, 8, ["model.num_heads", "4", "mesh.model 8"]),
        ({"mesh": {"pipeline": 2, "model": 2}, "model": RING}, 4, ["model.overlap", "ring", "with a pipeline"]),
        (
            {"mesh": {"fsdp": 2, "model": 2}, "model": SPLIT, "train": {"microbatch_size": 1}},
            4,
            ["model.overlap", "two rows"],
        ),
        ({"mesh": {"model": 8}, "data": {"sequence_length": 12}}, 8, ["data.sequence_length", "12", "mesh.model 8"]),
        ({"mesh": {"fsdp": 2, "rules": {"embed": ["fdsp"]}}}, 2, ["mesh.rules.embed", "'fdsp'", "not a mesh axis"]),
        ({"mesh": {"fsdp": 2, "rules": {"embed": ["model"]}}}, 2, ["mesh.rules.embed", "cannot be split over model"]),
        ({"mesh": {"fsdp": 2, "rules": {"embd": ["fsdp"]}}}, 2, ["mesh.rules", "'embd'", "embed"]),
        ({"mesh": {"fsdp": 2, "rules": {"embed": []}}}, 2, ["mesh.fsdp", "100%", "stay whole", "layers.mlp"]),
        ({"mesh": {"model": 2, "rules": {"mlp": []}}}, 2, ["mesh.model", "stay whole", "layers.mlp"]),
        ({"train": {"remat": "names"}}, 1, ["train.remat_save", "attention"]),
        ({"train": {"remat": "full", "remat_offload": ["layr_input"]}}, 1, ["train.remat_offload", "mean layer_input"]),
        ({"train": {"remat_offload": ["layer_input"]}}, 1, ["train.remat_offload", "names or full"]),
        (
            {"mesh": {"pipeline": 2}, "train": {"remat": "full", "remat_offload": ["layer_input"]}},
            2,
            ["train.remat_offload", "pipeline"],
        ),
        ({"train": {"remat": "names", "remat_save": ["atention"]}}, 1, ["train.remat_save", "did you mean attention"]),
    ],
    ids=str,
)
def test_what_cannot_be_split_is_named(sections, devices, words):
    with pytest.raises(ConfigError) as caught:
        build_spec(config(**sections), VOCAB, jax.devices()[:devices])
    for word in words:
        assert word in str(caught.value)


def test_few_microbatches_are_a_warning():
    spec = build_spec(config(mesh={"pipeline": 4}, train={"microbatch_size": 8}), VOCAB, jax.devices()[:4])
    [note] = notes(spec)
    assert "2 microbatches for 4 stages" in note and "60.0 % of the time" in note


def test_what_is_padded_is_said():
    model = {"vocab_size": 257, "intermediate_size": 65, "num_kv_heads": 1, "num_layers": 7}
    spec = build_spec(
        config(model=model, mesh={"model": 2, "pipeline": 2}, train={"microbatch_size": 4}), 257, jax.devices()[:4]
    )
    said = "\n".join(notes(spec))
    for words in (
        "257 is padded with zeros to 260",
        "65 is padded with zeros to 66",
        "num_kv_heads: 1",
        "1 of 8 slots",
    ):
        assert words in said


def test_the_model_axis_stays_inside_a_host():
    """Two hosts of four devices: of two processes each, or of devices that come in any order."""
    host = lambda device: f"node{device.id % 2}"
    placed = build_mesh(config(mesh={"model": 4, "data": 2}).mesh, jax.devices(), host)
    for row in placed.devices.reshape(2, 4):
        assert len({host(device) for device in row}) == 1
    with pytest.raises(ConfigError, match=r"mesh.model: 8 devices would span the hosts node0, node1"):
        build_mesh(config(mesh={"model": 8}).mesh, jax.devices(), host)
    allowed = config(mesh={"model": 8, "allow_split_hosts": True}).mesh
    assert build_mesh(allowed, jax.devices(), host).shape["model"] == 8


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"mesh": {"data": 2}, "telemetry": {"noise_scale": True}}, None),
        ({"mesh": {"data": 1, "prefetch": True}}, "mesh.prefetch has no effect: no weights of layers are gathered"),
        ({"mesh": {"data": 2}, "model": {"overlap": "ring"}}, "model.overlap has no effect: mesh.model is 1"),
        ({"train": {"overlap_microbatches": True}}, "train.overlap_microbatches has no effect: the step has too few"),
        (
            {"train": {"overlap_microbatches": True, "microbatch_size": 1, "layer_unroll": 2}},
            "train.layer_unroll has no effect: it does not apply where two microbatches",
        ),
        ({"telemetry": {"noise_scale": True}}, "telemetry.noise_scale has no effect: no device has the gradient of"),
        ({"train": {"remat_save": ["mlp_up"]}}, "train.remat_save has no effect: it applies only to train.remat names"),
        ({"pipeline": {"layers": [3, 5]}}, "pipeline.layers has no effect: there is no pipeline"),
        ({"pipeline": {"schedule": "gpipe"}}, "pipeline.schedule has no effect: there is no pipeline"),
        ({"mesh": {"data": 2}, "run": {"compile_cache": "c"}}, "run.compile_cache has no effect: programs of several"),
    ],
    ids=str,
)
def test_settings_without_effect_are_named(sections, words):
    asked = {"mesh": {"data": 1}} | sections
    spec = build_spec(config(**asked), VOCAB, jax.devices()[: asked["mesh"]["data"]])
    said = [note for note in notes(spec) if "has no effect" in note]
    assert said == [] if words is None else len(said) == 1 and said[0].startswith(words)
