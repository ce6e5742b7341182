"""Mixtures of experts: the layer against float64, and the same losses, loads and gradients on any mesh."""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import in_tiers

from jaxmnt.config.load import parse_config
from jaxmnt.config.mesh import Mesh
from jaxmnt.data.feed import to_devices
from jaxmnt.errors import ConfigError
from jaxmnt.models import experts, grouped, mosaic, routing
from jaxmnt.models.contract import define
from jaxmnt.models.grouped import ProductMethod
from jaxmnt.models.registry import build_family
from jaxmnt.models.routing import choose_experts
from jaxmnt.parallel.layout import map_with_axes
from jaxmnt.parallel.sharding import Placement, build_mesh
from jaxmnt.training.build import build_spec
from jaxmnt.training.state import abstract_state
from jaxmnt.training.step import mean_gradients

ROWS, LENGTH, VOCAB = 16, 16, 60
EXPERTS, CHOICES = 8, 3

BASE = {
    "data": {"global_batch_size": ROWS, "sequence_length": LENGTH, "document_mask": True},
    "model": {
        "family": "qwen3_moe", "vocab_size": 64, "hidden_size": 32, "num_layers": 4, "num_heads": 8, "num_kv_heads": 2,
        "expert_size": 24, "num_experts": EXPERTS, "experts_per_token": CHOICES, "balance_loss": 0.3,
        "router_z_loss": 0.02,
    },
    "train": {"precision": "float32"},
}  # fmt: skip


def config(**sections):
    return parse_config({name: BASE.get(name, {}) | sections.get(name, {}) for name in BASE | sections})


# -- the layer


def run_layer(ids_TK, products, round_rows=None, widths=(20, 12), dtype=jnp.float32, seed=0):
    """Returns the output, the rounds and the gradients of a layer, and the arrays for its float64 reference."""
    tokens, choices = ids_TK.shape
    hidden, width = widths
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((1, tokens, hidden))
    shares = rng.random((tokens, choices)) * (ids_TK < EXPERTS)
    shapes = ((hidden, width), (hidden, width), (width, hidden))
    weights = [rng.standard_normal((EXPERTS, *shape)) / 4 for shape in shapes]
    target = rng.standard_normal(x.shape)
    placement = Placement(build_mesh(Mesh(data=1), jax.devices()[:1]))
    group = experts.ExpertGroup(placement, (), (), products, round_rows or tokens * choices)

    def loss(x, shares, *weights):
        y, rounds = experts.mix(group, x, jnp.asarray(ids_TK)[None], shares[None], *weights)
        return jnp.sum(y * target), (y, rounds)

    x, *weights = (jnp.asarray(array, dtype) for array in (x, *weights))
    compute = jax.jit(jax.value_and_grad(loss, argnums=range(5), has_aux=True))
    with jax.default_matmul_precision("highest"):
        (_, (y, rounds)), gradients = compute(x, jnp.asarray(shares, jnp.float32), *weights)
    return np.asarray(y), int(rounds), gradients, (x, shares, weights, target)


def make_layer(ids_TK, kind="loop", round_rows=None, tile=8):
    return run_layer(ids_TK, ProductMethod(kind, tile), round_rows)


def reference(ids_TK, x, shares, weights, target):
    """The output and the gradients of the layer, in float64."""

    def loss(x, shares, gate, up, down):
        is_chosen_TKE = ids_TK[..., None] == np.arange(EXPERTS)
        share_TE = jnp.sum(is_chosen_TKE * shares[..., None], 1)
        hidden_TEF = jax.nn.silu(jnp.einsum("td,edf->tef", x[0], gate)) * jnp.einsum("td,edf->tef", x[0], up)
        y = jnp.einsum("tef,efd,te->td", hidden_TEF, down, share_TE)[None]
        return jnp.sum(y * target), y

    with jax.enable_x64(True):
        arrays = [jnp.asarray(array, jnp.float64) for array in (x, shares, *weights)]
        (_, y), gradients = jax.value_and_grad(loss, argnums=range(5), has_aux=True)(*arrays)
        return np.asarray(y), [np.asarray(gradient) for gradient in gradients]


def random_ids(tokens=41, seed=1):
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(EXPERTS)[:CHOICES] for _ in range(tokens)]).astype(np.int32)


def routings():
    """Ids of tokens by name: the loads of experts from none to all."""
    ids = random_ids()
    one_expert = np.where(np.arange(CHOICES) == 0, 5, EXPERTS) + np.zeros_like(ids)
    padding = np.where((np.arange(len(ids)) % 3 == 0)[:, None], EXPERTS, ids)
    return {"random": ids, "one expert": one_expert, "few experts": ids % 3, "a third is padding": padding,
            "only padding": np.full_like(ids, EXPERTS)}  # fmt: skip


def distinct(ids_TK):
    """Replaces repeated experts of a token with padding, because a token uses an expert once."""
    first = [[list(row).index(expert) == place for place, expert in enumerate(row)] for row in ids_TK.tolist()]
    return np.where(first, ids_TK, EXPERTS).astype(np.int32)


def check_layer(ids, layer):
    y, _, gradients, arrays = layer
    wanted_y, wanted = reference(ids, *arrays)
    np.testing.assert_allclose(y, wanted_y, atol=2e-6 * max(1, np.abs(wanted_y).max()))
    for gradient, value in zip(gradients[:2], wanted[:2], strict=True):
        real = np.where(ids < EXPERTS, value, 0) if value.shape == ids.shape else value
        np.testing.assert_allclose(gradient, real, atol=1e-5 * max(1e-9, np.abs(value).max()))
    for gradient, value in zip(gradients[2:], wanted[2:], strict=True):
        for expert in range(EXPERTS):  # relative to each expert's own largest
            largest = np.abs(value[expert]).max()
            assert np.abs(gradient[expert] - value[expert]).max() <= 1e-5 * largest, expert


@pytest.mark.parametrize("kind", ["loop", "chunks"])
@pytest.mark.parametrize("name", sorted(routings()))
def test_output_and_gradients_are_exact(kind, name):
    ids = distinct(routings()[name])
    check_layer(ids, make_layer(ids, kind))


def test_several_chunks_of_tiles_are_exact():
    """Of more tiles than a chunk has, also over further rounds."""
    ids = distinct(routings()["random"])
    assert len(grouped.tiles_of(jnp.zeros(EXPERTS, jnp.int32), 2, ids.size).expert_N) > 2 * grouped._CHUNK_TILES
    for round_rows in (None, 70):
        check_layer(ids, make_layer(ids, "chunks", round_rows, tile=2))


@pytest.mark.parametrize("rounds", [1, 2, 7])
def test_further_rounds_drop_nothing(rounds):
    ids = distinct(routings()["a third is padding"])
    assignments = int(np.sum(ids < EXPERTS))
    round_rows = ids.size if rounds == 1 else -(-assignments // rounds)
    layer = make_layer(ids, round_rows=round_rows)
    assert layer[1] == rounds
    check_layer(ids, layer)


def test_a_lost_round_is_seen(monkeypatch):
    first_round_only = lambda group, assignments, add_round, start: (add_round(0, start), jnp.int32(1))
    monkeypatch.setattr(experts, "_over_rounds", first_round_only)
    ids = distinct(routings()["random"])
    with pytest.raises(AssertionError):
        check_layer(ids, make_layer(ids, round_rows=100))


def test_a_row_at_the_wrong_expert_is_seen(monkeypatch):
    wrong_tiles = lambda *arguments: (tiles := right(*arguments))._replace(first_E=tiles.first_E.at[3].add(1))
    right = experts.tiles_of
    monkeypatch.setattr(experts, "tiles_of", wrong_tiles)
    ids = distinct(routings()["random"])
    with pytest.raises(AssertionError):
        check_layer(ids, make_layer(ids))


def test_an_unmasked_tile_is_seen(monkeypatch):
    clipped = lambda rows, indices: rows.at[indices].get(mode="clip")
    monkeypatch.setattr(experts, "_take", clipped)
    ids = distinct(routings()["random"])
    with pytest.raises(AssertionError):
        check_layer(ids, make_layer(ids))


@pytest.mark.parametrize(
    ("capability", "dtype", "experts_of_device", "sizes", "reason"),
    [
        (9.0, "bfloat16", 16, (2048, 768), None),
        (10.0, "bfloat16", 16, (2048, 768), "on this device"),
        (9.0, "float32", 16, (2048, 768), "in float32"),
        (9.0, "bfloat16", 16, (2048, 96), "with weights of 2048 × 96"),
        (9.0, "bfloat16", 256, (2048, 768), "with 256 experts on a device"),
    ],
)
def test_where_mosaic_kernels_are_used(capability, dtype, experts_of_device, sizes, reason):
    obstacle = mosaic.obstacle(capability, jnp.dtype(dtype), experts_of_device, sizes)
    assert obstacle is None if reason is None else obstacle.startswith(reason)


# -- routing


def routes(logits, bias=None, is_real=None, **model):
    chosen = config(model={"num_experts": logits.shape[-1], **model})
    family = build_family(chosen.model, 64)
    bias = jnp.zeros(logits.shape[-1]) if bias is None else bias
    is_real = jnp.ones(logits.shape[:-1], bool) if is_real is None else is_real
    return choose_experts(family.config, jnp.asarray(logits, jnp.float32), bias, is_real)


def test_of_equal_scores_the_lower_expert_wins():
    assert routes(np.zeros((1, 2, EXPERTS))).ids_BSK.tolist() == [[[0, 1, 2]] * 2]


@pytest.mark.parametrize("rule", ["softmax", "sigmoid", "chosen_softmax"])
def test_rules_of_scores(rule):
    logits = np.random.default_rng(0).standard_normal((2, 5, EXPERTS))
    found = routes(logits, router_score=rule)
    order = np.argsort(-logits, axis=-1, kind="stable")[..., :CHOICES]
    assert np.array_equal(found.ids_BSK, order)
    scores = 1 / (1 + np.exp(-logits)) if rule == "sigmoid" else np.exp(logits)
    shares = np.take_along_axis(scores, order, -1)
    np.testing.assert_allclose(found.shares_BSK, shares / shares.sum(-1, keepdims=True), rtol=1e-6)
    np.testing.assert_allclose(found.scores_BSE, scores / scores.sum(-1, keepdims=True), rtol=1e-6)


def test_a_bias_takes_part_in_the_choice_alone():
    logits = np.random.default_rng(0).standard_normal((1, 6, EXPERTS))
    found = routes(logits, jnp.zeros(EXPERTS).at[7].set(9.0), router_renormalise=False)
    assert (found.ids_BSK[..., 0] == 7).all()
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose(found.shares_BSK[..., 0], probabilities[..., 7], rtol=1e-6)


def test_a_bias_moves_towards_even_loads():
    family = build_family(config(model={"router_bias_rate": 0.25}).model, 64)
    loads = jnp.array([[6.0, 0, 3, 3, 3, 3, 3, 3]])
    old = {"load": jnp.ones((1, EXPERTS)), "bias": jnp.ones((1, EXPERTS))}
    new = family.update_buffers({"layers": {"experts": old}}, {"layers": {"loads": loads}})["layers"]["experts"]
    assert new["bias"].tolist() == [[0.75, 1.25, *[1.0] * 6]]
    np.testing.assert_allclose(new["load"], loads / (24 / CHOICES))


# -- what else knows of experts


@pytest.mark.parametrize(
    ("preset", "used"),
    [
        ("mixtral-8x7b", 12.9),
        ("mixtral-8x22b", 39),
        ("qwen3-30b-a3b", 3.3),
        ("qwen3-235b-a22b", 22),
        ("olmoe-1b-7b", 1.3),
    ],
)
def test_tokens_use_the_published_number_of_parameters(preset, used):
    model = parse_config({"model": {"preset": preset}}).model
    definition = define(build_family(model, model.vocab_size))
    layers = sum(count * costs.used_parameters for count, costs in definition.layer_costs())
    ((_, costs),) = definition.layer_costs()
    assert [product.expert_size for product in costs.expert_products] == [definition.family.config.expert_size] * 3
    assert (layers + 2 * model.vocab_size * model.hidden_size) / 1e9 == pytest.approx(used, rel=0.02)


# -- a step on any mesh


def batch_of(chosen):
    """Rows with several documents, a third of which is padding, and targets of very different weights."""
    rng = np.random.default_rng(0)
    shape = (ROWS, LENGTH)
    tokens = rng.integers(0, VOCAB, (ROWS, LENGTH + 1), np.int32)
    segments = 1 + np.cumsum(rng.random(shape) < 0.2, axis=1, dtype=np.int32)
    segments[np.arange(LENGTH) >= rng.integers(4, LENGTH + 1, ROWS)[:, None]] = 0
    starts = np.diff(segments, axis=1, prepend=-1) != 0
    places = np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))
    positions = places - np.maximum.accumulate(np.where(starts, places, 0), axis=1).astype(np.int32)
    weights = (rng.random(shape) < rng.random((ROWS, 1))) * rng.random(shape) * (segments > 0)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights.astype(np.float32),
            "segments": segments, "positions": positions}  # fmt: skip


@functools.cache
def initial(model):
    definition = define(build_family(model, model.vocab_size))
    params, buffers = jax.device_get(jax.jit(definition.init)(jax.random.key(0)))
    layer = params["layers"]["experts"]
    layer["router"] = 40 * layer["router"]  # so that loads differ
    rng = np.random.default_rng(2)
    share = rng.dirichlet(np.full(model.num_experts, 3.0), model.num_layers).astype(np.float32)
    buffers["layers"]["experts"] = {"load": CHOICES * share, "bias": 0.2 * share}
    return params, buffers


def step(devices, **sections):
    """The losses, the sums of layers and the gradients of a step."""
    chosen = config(**sections)
    spec = build_spec(chosen, VOCAB, jax.devices()[:devices])
    placement, definition = spec.placement, spec.definition
    batch = to_devices(batch_of(chosen), list(range(ROWS)), ROWS, placement.sharding(("batch", "length")))

    def compute(params, buffers, batch):
        found = mean_gradients(spec, params, buffers, batch, jnp.int32(0))
        sums = {name: found.layers["layers"][name] for name in ("loads", "scores", "loss", "rounds", "calls")}
        return (found.sums.cross_entropy * found.scale, found.sums.loss * found.scale), sums, found.gradients

    state = abstract_state(spec)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, (state["params"], state["buffers"]))
    params, buffers = initial(chosen.model.model_copy(update={"expert_round": None}))
    axes = (definition.axes, definition.buffer_axes)
    place = lambda trees: map_with_axes(spec.layout.to_device_layout, trees, axes)
    weights = jax.jit(place, out_shardings=shardings)((params, buffers))
    losses, sums, found = jax.jit(compute)(*weights, batch)
    if spec.layout.dimensions:
        found = jax.jit(lambda tree: map_with_axes(spec.layout.to_checkpoint_layout, tree, axes[0]))(found)
    return losses, jax.device_get(sums), jax.device_get(found)


@functools.cache
def on_one_device(key):
    return step(1, **json.loads(key))


def check_step(devices, plain, **sections):
    merged = {name: plain.get(name, {}) | sections.get(name, {}) for name in plain | sections}
    losses, sums, found = step(devices, **merged)
    wanted_losses, wanted_sums, wanted = on_one_device(json.dumps(plain, sort_keys=True))
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)
    real_tokens = int(np.sum(batch_of(None)["segments"] > 0))
    assert (np.sum(sums["loads"], axis=-1) == CHOICES * real_tokens).all()
    np.testing.assert_array_equal(sums["loads"], wanted_sums["loads"])
    np.testing.assert_allclose(sums["loss"], wanted_sums["loss"], rtol=1e-5)
    np.testing.assert_allclose(sums["scores"], wanted_sums["scores"], rtol=1e-5)
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        error = np.abs(a - b).max() / np.abs(b).max()
        assert error <= 1e-5, f"{jax.tree_util.keystr(path)}: {error:.2e}"
    return sums


MESHES = [
    {"expert": 2, "fsdp": 2, "model": 2},
    {"pipeline": 2, "expert": 2, "model": 2},
    {"expert": 8},
    {"expert": 4, "data": 2},
    {"expert": 2, "fsdp": 4},
    {"expert": 4, "model": 2},
    {"expert": 2, "data": 2, "model": 2},
    {"pipeline": 2, "expert": 4},
    {"fsdp": 4, "model": 2},
    {"pipeline": 4, "model": 2},
    {"model": 8},
    {"pipeline": 2, "fsdp": 4},
    {"data": 2, "fsdp": 4},
    {"data": 4, "model": 2},
    {"data": 4, "pipeline": 2},
]
VARIANTS = [
    {"model": {"balance_over": "row"}},
    {"model": {"balance_over": "batch", "router_bias_rate": 0.01}},
    {"model": {"balance_over": "row", "router_score": "sigmoid"}, "train": {"remat": "full"}},
]
CASES = [(mesh, VARIANTS[number % 3]) for number, mesh in enumerate(MESHES)]


@pytest.mark.parametrize(("mesh", "variant"), in_tiers({0}, CASES))
def test_a_step_is_the_same_on_any_mesh(mesh, variant):
    check_step(8, variant, mesh=mesh, train={"microbatch_size": 1})


@pytest.mark.slow
def test_counts_of_a_piece_of_a_row_are_seen(monkeypatch):
    monkeypatch.setattr(routing, "sum_over", lambda axis, array, placement: array)
    with pytest.raises(AssertionError):
        check_step(2, VARIANTS[0], mesh={"model": 2})


@pytest.mark.slow
def test_a_balance_loss_of_each_microbatch_is_seen(monkeypatch):
    def of_microbatch(config, routes, last_shares_E, is_real_BL, placement):
        counts_E = jax.lax.stop_gradient(routing.loads_of_rows(routes.ids_BSK, EXPERTS)).sum(0)
        factor = EXPERTS / CHOICES / jnp.maximum(is_real_BL.sum(), 1)
        return factor * jnp.sum(counts_E * routes.scores_BSE.sum((0, 1)))

    monkeypatch.setattr(experts, "balance_loss", of_microbatch)
    with pytest.raises(AssertionError):
        check_step(1, VARIANTS[1], train={"microbatch_size": 4})


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections",
    [
        {"mesh": {"expert": 2, "fsdp": 2, "data": 2, "zero": 1}},
        {"mesh": {"expert": 2, "fsdp": 4, "zero": 2}},
        {"mesh": {"expert": 2, "fsdp": 4, "prefetch": True}},
        {"mesh": {"expert": 2, "model": 4}, "model": {"overlap": "rows"}, "train": {"microbatch_size": 2}},
        {"mesh": {"expert": 4, "model": 2}, "model": {"expert_round": 1.0}},
    ],
)
def test_other_ways_to_share_weights_change_nothing(sections):
    sums = check_step(8, VARIANTS[0], **sections)
    takes_more = sections.get("model", {}).get("expert_round") == 1.0
    assert (sums["rounds"] > sums["calls"]).all() if takes_more else (sums["rounds"] >= sums["calls"]).all()


@pytest.mark.slow
def test_the_worst_routing_takes_further_rounds(monkeypatch):
    """All tokens use the same three of eight experts, each of which is on a device of its own. By default a device
    takes 1.25 times the rows of an even load at a time, which is 15/32 of the tokens, two thirds of which are real."""

    def skewed(model):
        params, buffers = unskewed(model)
        bias = np.where(np.arange(EXPERTS) < CHOICES, 9, 0).astype(np.float32)
        return params, {"layers": {"experts": buffers["layers"]["experts"] | {"bias": np.tile(bias, (4, 1))}}}

    unskewed = initial
    monkeypatch.setattr(sys.modules[__name__], "initial", skewed)
    on_one_device.cache_clear()
    try:
        sums = check_step(8, VARIANTS[0], mesh={"expert": 8})
    finally:
        on_one_device.cache_clear()
    assert (sums["loads"] > 0).sum(axis=-1).tolist() == [CHOICES] * 4
    assert sums["rounds"].tolist() == [2 * CHOICES + 5] * 4  # five devices have no tokens, and take one round


@pytest.mark.slow
def test_experts_that_model_does_not_divide_are_split_inside():
    variant = {"model": {"balance_over": "row", "num_experts": 6}}
    check_step(8, variant, mesh={"expert": 2, "model": 4})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"experts_per_token": 9}}, r"experts_per_token: 9 is more than model\.num_experts \(8\)"),
        ({"model": {"num_experts": None}}, r"model\.num_experts: the family qwen3_moe has experts; set it"),
        ({"model": {"family": "llama"}}, r"model\.num_experts: family llama does not support this setting"),
        ({"model": {"router_score": "top"}}, r"model\.router_score: must be softmax, .*, not 'top'"),
        ({"model": {"capacity_factor": 1.25}}, r"model\.capacity_factor: .*expert_round.*no token is dropped"),
        (
            {"model": {"experts_kernel": "mosaic"}},
            r"experts_kernel: mosaic cannot be used on this device, only on GPUs",
        ),
        ({"mesh": {"expert": 8}, "model": {"num_experts": 12}}, r"num_experts: 12 is not divisible by mesh\.expert 8"),
    ],
)
def test_wrong_sizes_are_refused(sections, message):
    with pytest.raises(ConfigError, match=message):
        build_spec(config(**sections), VOCAB, jax.devices()[: 8 if "mesh" in sections else 1])


def test_a_dense_model_needs_no_expert_axis():
    dense = dict.fromkeys(("num_experts", "experts_per_token", "expert_size", "balance_loss", "router_z_loss"))
    chosen = config(model=dense | {"family": "llama"}, mesh={"expert": 8})
    with pytest.raises(ConfigError, match=r"mesh\.expert: 8 needs a model with experts"):
        build_spec(chosen, VOCAB, jax.devices()[:8])
