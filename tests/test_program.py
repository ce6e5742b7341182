"""The step: the right maths, the same on every mesh, and reduced once.

Shapes as in the modules: B batch, L length, D model, V vocabulary.
"""

import functools
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import in_tiers
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmnt.config.load import parse_config
from jaxmnt.config.schema import Train
from jaxmnt.data.feed import process_rows, to_devices
from jaxmnt.errors import ConfigError
from jaxmnt.parallel.axes import resolve_sizes
from jaxmnt.parallel.sharding import Placement, build_mesh
from jaxmnt.training.compile import compile_program
from jaxmnt.training.loss import HeadWeights, LossChunks, chunk_count, chunked_loss, cross_entropy
from jaxmnt.training.optimizer import build_lr_schedule
from jaxmnt.training.spec import ControlFlags

ROWS, LENGTH, VOCAB = 16, 16, 60


def config(**sections):
    tree = {
        "data": {"global_batch_size": ROWS, "sequence_length": LENGTH},
        "model": {
            "vocab_size": 64,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "intermediate_size": 64,
        },
        "optimizer": {"learning_rate": 1e-2},
        "train": {"precision": "float32"},
    }
    return parse_config({name: tree.get(name, {}) | sections.get(name, {}) for name in tree | sections})


def rows(seed=0):
    """Rows with very different numbers of targets; a quarter of the rows have none."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, (ROWS, LENGTH + 1), np.int32)
    weights = (rng.random((ROWS, LENGTH)) < rng.random((ROWS, 1))).astype(np.float32)
    weights[4:8] = 0
    segments = np.cumsum(rng.random((ROWS, LENGTH)) < 0.2, axis=1, dtype=np.int32)
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))
    return {
        "tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights,
        "segments": segments, "positions": positions,
    }  # fmt: skip


@functools.cache
def _program(key):
    sections, count = key
    chosen = {name: dict(items) for name, items in sections}
    return compile_program(config(**chosen), VOCAB, jax.devices()[:count])


def run(devices=1, steps=3, **sections):
    """Losses and gradient norms of a few steps, and the parameters after them."""
    key = (tuple((name, tuple(items.items())) for name, items in sorted(sections.items())), devices)
    program = _program(key)
    state, history = program.init(), []
    flag = ControlFlags(program.control_sharding)
    for step in range(steps):
        batch = to_devices(rows(step), list(range(ROWS)), ROWS, program.batch_sharding)
        state, metrics = program.step(state, batch | {"control": flag.array(stop=step == 1)})
        history.append([float(metrics["loss"]), float(metrics["grad_norm"])])
        assert int(metrics["tokens"]) == int((rows(step)["weights"] > 0).sum())
        assert (int(metrics["stop"]) > 0) == (step == 1)
    return np.array(history), jax.device_get(state["params"])


def test_first_loss_is_what_a_plain_model_computes():
    """An independent forward pass in NumPy over the same weights."""
    program = _program(((), 1))
    history, _ = run(steps=1)
    params = jax.device_get(program.init()["params"])
    batch = rows(0)
    logits = numpy_decoder(params, batch["tokens"])[..., :VOCAB]
    log_z = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    losses = log_z - np.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
    expected = (losses * batch["weights"]).sum() / batch["weights"].sum()
    assert history[0, 0] == pytest.approx(expected, rel=1e-5)


def numpy_decoder(params, tokens_BL, heads=4):
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale

    def rotate(x):
        half = x.shape[-1] // 2
        angles = np.arange(x.shape[1])[:, None] * 10000.0 ** (-np.arange(half) / half)
        turn = np.exp(1j * angles)[:, None, :]
        z = (x[..., :half] + 1j * x[..., half:]) * turn
        return np.concatenate([z.real, z.imag], -1)

    x = params["embedding"]["table"][tokens_BL]
    for i in range(2):
        w = jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"])
        h = norm(x, w["attention_norm"]["scale"])
        q, k, v = (np.einsum("bld,dhk->blhk", h, w["attention"][n]) for n in ("query", "key", "value"))
        scores = np.einsum("blhk,bmhk->bhlm", rotate(q), rotate(k)) / np.sqrt(q.shape[-1])
        scores = np.where(np.tri(scores.shape[-1]), scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        a = np.einsum("bhlm,bmhk->blhk", p / p.sum(-1, keepdims=True), v)
        x = x + np.einsum("blhk,hkd->bld", a, w["attention"]["output"])
        h = norm(x, w["mlp_norm"]["scale"])
        gate = h @ w["mlp"]["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["mlp"]["up"])) @ w["mlp"]["down"]
    return norm(x, params["norm"]["scale"]) @ params["head"]["kernel"]


MESHES = [
    ({"data": 8}, 8, {}),
    ({"fsdp": 8}, 8, {}),
    ({"model": 4, "data": 2}, 8, {}),
    ({"fsdp": 2, "model": 2, "data": 2}, 8, {"train": {"microbatch_size": 2}}),
    ({}, 1, {"train": {"microbatch_size": 4}}),
    ({"data": 4}, 4, {"train": {"microbatch_size": 1, "remat": "full"}}),
    ({"fsdp": 4}, 4, {"train": {"remat": "none", "layer_unroll": 2}}),
    ({"fsdp": 2, "model": 2}, 4, {"train": {"remat": "dots", "z_loss": 0.01}}),
    ({"fsdp": 2, "model": 2}, 4, {"model": {"tie_embeddings": True, "num_kv_heads": 2}}),
    ({"fsdp": 2, "data": 2}, 4, {"model": {"dropout": 0.2}, "train": {"microbatch_size": 2}}),
    ({"model": 2, "data": 2}, 4, {"data": {"document_mask": True}}),
]


@pytest.mark.parametrize(("mesh", "devices", "sections"), in_tiers({3, 5}, MESHES))
def test_every_split_computes_the_same(mesh, devices, sections):
    """Losses, gradient norms and parameters agree with one device and one pass."""
    plain = {name: {k: v for k, v in items.items() if k not in ("microbatch_size", "remat", "layer_unroll")}
             for name, items in sections.items()}  # fmt: skip
    reference, reference_params = run(**plain)
    found, params = run(devices, mesh=mesh, **sections)
    np.testing.assert_allclose(found, reference, rtol=2e-5)
    # Adam divides by the gradient's size, so where that is near 0 rounding shows in the third decimal of a step.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), params, reference_params)


def test_settings_that_change_the_maths_do():
    """The comparisons above would notice if these settings were ignored."""
    base, _ = run()
    for sections in (
        {"model": {"dropout": 0.2}},
        {"data": {"document_mask": True}},
        {"model": {"tie_embeddings": True}},
    ):
        assert not np.allclose(run(**sections)[0], base, rtol=1e-3), sections


def test_bfloat16_is_near_float32_on_a_sharded_mesh():
    reference, _ = run()
    found, _ = run(8, mesh={"fsdp": 2, "model": 2, "data": 2}, train={"precision": "bfloat16"})
    np.testing.assert_allclose(found[:, 0], reference[:, 0], rtol=0.01)
    assert not np.array_equal(found, reference)


def test_data_axis_is_reduced_once_a_step_and_the_head_is_gathered_once_a_pass():
    """Read off the program: no sum over data inside a loop, and no gather inside the loss's loop."""
    chosen = config(
        mesh={"data": 2, "fsdp": 2},
        train={"microbatch_size": 1, "loss_chunk_mib": 1},
        model={"vocab_size": 65536},
    )
    program = compile_program(chosen, VOCAB, jax.devices()[:4])
    from jaxmnt.training.step import train_step

    batch = to_devices(rows(), list(range(ROWS)), ROWS, program.batch_sharding)
    flag = ControlFlags(program.control_sharding)
    jaxpr = jax.make_jaxpr(lambda s, b: train_step(program.spec, s, b))(
        program.abstract_state, batch | {"control": flag.array()}
    )
    found = list(communications(jaxpr.jaxpr))
    sums_of_data = [(axes, depth) for name, axes, depth, _ in found if name == "psum" and "data" in axes]
    assert sums_of_data and all(depth == 0 for _, depth in sums_of_data)
    # Depth 1 is the loop over passes, 2 the loop over layers or over chunks of the loss.
    heads = [(name, depth) for name, _, depth, shape in found if 65536 in shape and name != "psum"]
    assert heads and all(depth == 1 for _, depth in heads)
    assert any(depth == 2 and name == "all_gather" for name, _, depth, _ in found)


@pytest.mark.parametrize(
    ("remat", "precision"), in_tiers({1, 2}, list(product(["none", "dots", "full"], ["float32", "bfloat16"])))
)
def test_whole_weights_are_never_kept_for_the_backward_pass(remat, precision):
    """No loop over layers hands out whole weights of all layers, which would cost what fsdp saves."""
    from jaxmnt.training.step import train_step

    chosen = config(mesh={"fsdp": 4}, train={"remat": remat, "precision": precision})
    program = compile_program(chosen, VOCAB, jax.devices()[:4])
    batch = to_devices(rows(), list(range(ROWS)), ROWS, program.batch_sharding)
    jaxpr = jax.make_jaxpr(lambda s, b: train_step(program.spec, s, b))(
        program.abstract_state, batch | {"control": ControlFlags(program.control_sharding).array()}
    )
    layers = program.abstract_state["params"]["layers"]
    whole = {leaf.shape for leaf in jax.tree.leaves(layers) if leaf.ndim > 2}
    handed_out = {
        variable.aval.shape
        for equation in equations(jaxpr.jaxpr)
        if equation.primitive.name == "scan"
        for variable in equation.outvars
    }
    assert (2, 32 // 4, 64) in handed_out, "gradients of the shards are"
    assert not handed_out & whole


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for item in value if isinstance(value, tuple | list) else (value,):
                item = getattr(item, "jaxpr", item)
                if hasattr(item, "eqns"):
                    yield from equations(item)


@pytest.mark.slow
def test_one_wish_to_stop_is_heard_by_all():
    """Also by processes that share a batch shard: each device has a flag of its own, and all are added up."""
    program = _program(((("mesh", (("data", 2), ("model", 4))),), 8))
    batch = to_devices(rows(), list(range(ROWS)), ROWS, program.batch_sharding)
    for device in range(8):
        flags = np.zeros((8, ControlFlags.COUNT), np.int32)
        flags[device, 0] = 1
        _, metrics = program.step(program.init(), batch | {"control": jax.device_put(flags, program.control_sharding)})
        assert [int(shard.data) for shard in metrics["stop"].addressable_shards] == [1] * 8


def communications(jaxpr, depth=0):
    """(primitive, axes, number of loops around it, shape) of each collective."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        family = next((f for f in ("psum", "all_gather", "reduce_scatter") if name.startswith(f)), None)
        if family:
            axes = equation.params.get("axes") or equation.params.get("axis_name")
            yield family, axes, depth, equation.outvars[0].aval.shape
        inner = depth + (name in ("scan", "while"))
        for value in equation.params.values():
            for item in value if isinstance(value, tuple | list) else (value,):
                item = getattr(item, "jaxpr", item)
                if hasattr(item, "eqns"):
                    yield from communications(item, inner)


def test_optimizer_state_is_sharded_like_its_parameter():
    program = _program(((("mesh", (("fsdp", 4), ("model", 2))),), 8))
    params, moments = program.abstract_state["params"], program.abstract_state["optimizer"]["adam"]
    for tree in (moments.mu, moments.nu):
        jax.tree.map(lambda p, m: (p.sharding.spec == m.sharding.spec) or pytest.fail(str(m)), params, tree)
    for leaf in jax.tree.leaves(params):
        if leaf.size > 64:  # all but norm scales
            assert leaf.sharding.shard_shape(leaf.shape) != leaf.shape
    one = _program(((), 1)).memory
    assert program.memory.params < one.params / 7 and program.memory.optimizer < one.optimizer / 7


@settings(max_examples=6, deadline=None)
@given(
    tokens=st.sampled_from([1, 7, 24]),
    chunks=st.integers(1, 9),
    real=st.sampled_from([3, 24]),
    z_loss=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 99),
)
def test_chunked_loss_is_exact(tokens, chunks, real, z_loss, seed):
    """Value and gradients equal those of the loss over all logits at once, for any chunking."""
    placement = Placement(build_mesh(config().mesh, jax.devices()[:1]))
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((1, tokens, 8)), jnp.float32)
    head = jnp.asarray(rng.standard_normal((8, 24)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, real, (1, tokens)))
    weights = jnp.asarray(rng.random((1, tokens)) < 0.7, jnp.float32)

    def plain(x, head):
        logits = (x @ head)[..., :real]
        ce = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return ((ce + z_loss * jax.nn.logsumexp(logits, -1) ** 2) * weights).sum()

    train = Train(z_loss=z_loss)
    shape = LossChunks(
        min(chunks, tokens), real, jnp.dtype("float32"), placement,
        finish=lambda _, logits: logits, loss=lambda logits, tokens: cross_entropy(logits, tokens, train),
    )  # fmt: skip
    rows = {"targets": targets, "weights": weights}
    chunked = lambda x, head: chunked_loss(shape, x, HeadWeights(head, {}), rows)
    with_gradients = jax.value_and_grad(lambda x, head: chunked(x, head).loss, (0, 1))
    (found, gradients), (value, expected), sums = jax.jit(
        lambda x, head: (with_gradients(x, head), jax.value_and_grad(plain, (0, 1))(x, head), chunked(x, head))
    )(x, head)
    for a, b in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert float(found) == pytest.approx(float(value), rel=1e-5, abs=1e-6)
    assert float(sums.loss) == float(found)


def test_chunks_follow_bytes():
    placement = Placement(build_mesh(config().mesh, jax.devices()[:1]))
    assert chunk_count(1024, 512, placement, 256) == 1
    assert chunk_count(8192, 131072, placement, 256) == 16
    assert chunk_count(1, 10**9, placement, 1) == 1


def test_schedules():
    def rates(steps=100, **settings):
        schedule = build_lr_schedule(config(optimizer={"learning_rate": 1.0, **settings}).optimizer, steps)
        return np.array([float(schedule(step)) for step in range(steps)])

    cosine = rates(warmup_steps=10)
    np.testing.assert_allclose(cosine[:11], np.arange(1, 12) / 11, rtol=1e-5)
    assert cosine[-1] == pytest.approx(0.1, abs=2e-3) and (np.diff(cosine[10:]) < 0).all()
    wsd = rates(warmup_steps=10, schedule="wsd", decay_fraction=0.2, final_fraction=0.0)
    assert (wsd[11:82] == 1).all() and wsd[-1] == pytest.approx(1 / 18, rel=1e-3)
    assert (rates(schedule="constant") == 1).all()


def test_norms_are_not_decayed():
    """With gradients of 0, decay alone moves the weights, and not the norms."""
    program = _program(((), 1))
    before, optimizer = program.init()["params"], program.spec.optimizer
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, before), optimizer.init(before), before)
    after = optax.apply_updates(before, updates)
    assert (after["norm"]["scale"] == before["norm"]["scale"]).all()
    np.testing.assert_allclose(after["head"]["kernel"], before["head"]["kernel"] * (1 - 1e-2 * 0.1), rtol=1e-5)


@pytest.mark.parametrize(
    ("sections", "devices", "words"),
    [
        ({"mesh": {"data": 3}}, 8, ["data=3", "multiply to 3, but the number of devices is 8"]),
        (
            {"mesh": {"fsdp": 3, "data": -1}},
            8,
            ["mesh.fsdp=3 needs a multiple of 3 devices, and 8 devices are available", "divides 8"],
        ),
        ({"mesh": {"model": 8}}, 8, ["model.num_heads", "4", "mesh.model 8"]),
        ({"mesh": {"model": 4}, "data": {"sequence_length": 18}}, 4, ["data.sequence_length", "18", "mesh.model 4"]),
        (
            {"mesh": {"fsdp": 8}, "model": {"hidden_size": 36, "head_dim": 8}},
            8,
            ["model.hidden_size", "36", "mesh.fsdp 8"],
        ),
        (
            {"mesh": {"data": 8}, "data": {"global_batch_size": 12}},
            8,
            ["data.global_batch_size", "12", "8 batch shards"],
        ),
        ({"train": {"microbatch_size": 3}}, 1, ["train.microbatch_size", "3", "16"]),
    ],
)
def test_sizes_that_do_not_fit_are_named(sections, devices, words):
    with pytest.raises(ConfigError) as caught:
        compile_program(config(**sections), VOCAB, jax.devices()[:devices])
    for word in words:
        assert word in str(caught.value)


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 8))
def test_mesh_sizes_multiply_to_the_devices(data, fsdp, model):
    total = data * fsdp * model
    sizes = resolve_sizes(config(mesh={"fsdp": fsdp, "model": model}).mesh, total)
    assert np.prod(list(sizes.values())) == total and sizes["data"] == data


def test_rows_follow_the_sharding():
    placement = Placement(build_mesh(config(mesh={"model": 4, "data": 2}).mesh))
    assert process_rows(placement.sharding(("batch", "length")), 6, 4) == list(range(6))
