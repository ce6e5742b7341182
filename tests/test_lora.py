"""Adapters compute on every mesh what merged weights compute in float64, and nothing but them trains."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import in_tiers
from families import logits_of_row, mean_loss, value_and_gradients
from test_parallel import VOCAB, config, rows

from jaxmnt.config.lora import Lora
from jaxmnt.data.feed import to_devices
from jaxmnt.errors import ConfigError
from jaxmnt.models.adapters import A_SUFFIX, B_SUFFIX, AdaptedWeight, describe_left_out, refusing_other_products
from jaxmnt.models.registry import define_model
from jaxmnt.parallel import collectives
from jaxmnt.parallel.layout import map_with_axes
from jaxmnt.plan import hlo
from jaxmnt.plan.chips import CHIPS
from jaxmnt.plan.rates import rates_of
from jaxmnt.plan.targets import gpu_devices
from jaxmnt.plan.timeline import replay_program
from jaxmnt.telemetry.flops import token_flops
from jaxmnt.training.build import build_spec
from jaxmnt.training.compile import compile_step
from jaxmnt.training.state import abstract_state
from jaxmnt.training.step import mean_gradients

LORA = {"rank": 4, "alpha": 8.0}
BASE = {
    "model": {"num_layers": 4, "num_kv_heads": 2},
    "data": {"document_mask": True, "global_batch_size": 8},
    "lora": LORA,
}


def chosen_config(**sections):
    return config(**{name: BASE.get(name, {}) | sections.get(name, {}) for name in BASE | sections})


@functools.cache
def start(context):
    """Parameters with adapters that change the result. `context` is the length of rows."""
    definition = build_spec(chosen_config(data={"sequence_length": context}), VOCAB, jax.devices()[:1]).definition
    params = jax.device_get(definition.init(jax.random.key(0))[0])
    rng = np.random.default_rng(1)

    def with_second_matrix(path, leaf):
        is_zero = path[-1].key.endswith(B_SUFFIX)
        return leaf + 0.1 * rng.standard_normal(leaf.shape).astype(np.float32) if is_zero else leaf

    return jax.tree.map_with_path(with_second_matrix, params)


def merged(tree, scale=LORA["alpha"] / LORA["rank"]):
    """The weights plus scale · a · b."""
    result = {}
    for key, leaf in tree.items():
        if isinstance(leaf, dict):
            result[key] = merged(leaf, scale)
        elif key + A_SUFFIX in tree:
            a, b = tree[key + A_SUFFIX], tree[key + B_SUFFIX]
            product = jnp.einsum("uir,uro->uio", a.reshape(len(a), -1, a.shape[-1]), b.reshape(*b.shape[:2], -1))
            result[key] = leaf + scale * product.reshape(leaf.shape)
        elif not key.endswith((A_SUFFIX, B_SUFFIX)):
            result[key] = leaf
    return result


@functools.cache
def reference(length):
    """Loss and gradients in float64, by JAX's own differentiation of merged weights."""
    chosen = chosen_config(data={"sequence_length": length})
    data = rows(chosen)

    def loss(params):
        weights = merged(params)
        logits = [
            logits_of_row(weights, data["tokens"][i], data["positions"][i], data["segments"][i], chosen.model)
            for i in range(len(data["tokens"]))
        ]
        return mean_loss(jnp.stack(logits), data, VOCAB)

    return value_and_gradients(loss, start(length))


def spec_and_gradients(devices, **sections):
    """The spec, and the loss and the gradients in the checkpoint layout, None for parameters that do not train."""
    chosen = chosen_config(**sections)
    spec = build_spec(chosen, VOCAB, jax.devices()[:devices])
    batch = to_devices(rows(chosen), list(range(8)), 8, spec.placement.sharding(("batch", "length")))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(spec)["params"])
    place = lambda params: map_with_axes(spec.layout.to_device_layout, params, spec.definition.axes)
    params = jax.jit(place, out_shardings=shardings)(start(chosen.data.sequence_length))

    def compute(params, batch):
        means = mean_gradients(spec, params, {}, batch, jnp.int32(0))
        gradients = map_with_axes(spec.layout.to_checkpoint_layout, means.gradients, spec.trained_axes)
        return means.sums.loss * means.scale, gradients

    loss, gradients = jax.jit(compute)(params, batch)
    return spec, float(loss), jax.device_get(gradients)


def worst_error(gradients, expected):
    """The largest error of a gradient, relative to the gradient's largest number, and the array's name."""
    wanted = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(expected)}
    errors = []
    for path, leaf in jax.tree.leaves_with_path(gradients):
        name = jax.tree_util.keystr(path)
        errors.append((float(np.abs(leaf - wanted[name]).max() / np.abs(wanted[name]).max()), name))
    return max(errors)


MESHES = {
    "one device": (1, {}),
    "fsdp and model": (8, {"mesh": {"fsdp": 4, "model": 2}}),
    "stages": (8, {"mesh": {"pipeline": 2, "fsdp": 2, "model": 2}, "train": {"microbatch_size": 1}}),
    "fsdp": (8, {"mesh": {"fsdp": 8}}),
    "model": (8, {"mesh": {"model": 8}}),
    "ZeRO 1": (8, {"mesh": {"data": 2, "fsdp": 2, "model": 2, "zero": 1}}),
    "context": (8, {"mesh": {"context": 2, "model": 2, "fsdp": 2}}),
    "prefetch": (8, {"mesh": {"data": 2, "fsdp": 2, "model": 2, "prefetch": True}, "train": {"remat": "full"}}),
    "halves of rows": (8, {"mesh": {"fsdp": 4, "model": 2}, "model": {"overlap": "rows"}, "train": {"remat": "dots"}}),
    "ring": (8, {"mesh": {"fsdp": 2, "model": 4}, "model": {"overlap": "ring"}}),
    "ring and dots": (8, {"mesh": {"fsdp": 4, "model": 2}, "model": {"overlap": "ring"}, "train": {"remat": "dots"}}),
    "chunks and ZeRO 2": (
        8,
        {
            "mesh": {"pipeline": 2, "fsdp": 2, "model": 2, "zero": 2},
            "pipeline": {"schedule": "interleaved", "chunks": 2},
            "train": {"microbatch_size": 1},
        },
    ),
    "unequal stages": (6, {"mesh": {"pipeline": 3, "model": 2}, "pipeline": {"layers": [2, 1, 1]}}),
}


@pytest.mark.parametrize("name", in_tiers({2}, list(MESHES)))
def test_adapters_are_merged_weights(name):
    devices, sections = MESHES[name]
    spec, loss, gradients = spec_and_gradients(devices, **sections)
    expected_loss, expected = reference(spec.config.data.sequence_length)
    assert loss == pytest.approx(expected_loss, rel=2e-6)
    assert len(jax.tree.leaves(gradients)) == 2 * 7
    error, array = worst_error(gradients, expected)
    assert error <= 5e-6, f"{array}: {error:.1e}"


def test_a_sum_that_is_left_out_is_seen(monkeypatch):
    """The gradient of the first matrix is partial over `model`: each device has the part of its own outputs."""
    reduce_gradients = collectives.reduce_gradients

    def without_first_matrices(gradients, axes, placement, dtype, is_selected):
        is_first = lambda names: len(names) > 1 and names[1] in ("embed", "kv_embed") and names[-1] is None
        select = lambda names: is_selected(names) and not is_first(names)
        return reduce_gradients(gradients, axes, placement, dtype, select)

    monkeypatch.setattr(collectives, "reduce_gradients", without_first_matrices)
    spec, _, gradients = spec_and_gradients(2, mesh={"model": 2})
    error, array = worst_error(gradients, reference(spec.config.data.sequence_length)[1])
    assert error > 0.1 and array.endswith("_lora_a']")


WIDE = {
    "model": {"hidden_size": 256, "num_layers": 4, "num_heads": 8, "num_kv_heads": 4, "intermediate_size": 704},
    "data": {"global_batch_size": 8, "sequence_length": 128},
    "train": {"precision": "bfloat16"},
}


@pytest.mark.slow
def test_frozen_weights_cost_no_gradient():
    """Of the products of layers, at most three quarters of full training's are left, and no array of the program for a
    GPU has the shape of weights in float32."""
    spec = build_spec(config(**WIDE, lora={"rank": 8}), VOCAB, list(gpu_devices(CHIPS["h100"], 1, 1)))
    text = compile_step(spec, abstract_state(spec)).as_text()
    lora, full = token_flops(spec.definition, 128), token_flops(spec.definition.base, 128)
    flops = replay_program(hlo.Program(text), 1, rates_of(CHIPS["h100"])).flops / (8 * 128)
    assert lora.layers <= flops - lora.head - lora.attention <= 0.75 * full.layers
    assert lora.layers < 0.72 * full.layers and lora.head == 4 * 256 * 64 == 2 * full.head / 3
    assert lora.recomputed("full") == pytest.approx(
        2 * (full.layers / 6 + 4 * adapter_size(256, 704)) + full.attention / 3
    )
    for shape in ("4,256,704", "4,704,256", "4,256,8,32", "4,8,32,256", "256,64"):
        assert f"bf16[{shape}]" in text and f"f32[{shape}]" not in text, shape


def adapter_size(hidden, intermediate):
    """The number of parameters in the adapters of a layer, of rank 8."""
    sides = 2 * [(hidden, 256)] + 2 * [(hidden, 128)] + 3 * [(hidden, intermediate)]
    return sum(8 * sum(pair) for pair in sides)


def test_a_weight_that_a_layer_multiplies_by_hand_is_refused():
    adapted = AdaptedWeight("layers.mlp.up", jnp.ones((4, 8)), jnp.ones((4, 2)), jnp.ones((2, 8)), 1.0)
    words = r"lora\.targets: .* is not multiplied by a function of jaxmnt\.models\.projections"
    for use in (
        lambda: jnp.ones((3, 4)) @ adapted[...],
        lambda: jnp.dot(jnp.ones((3, 4)), adapted),
        lambda: adapted.astype(jnp.float32),
        lambda: adapted[0],
        lambda: 2 * adapted,
    ):
        with pytest.raises(ConfigError, match=words), refusing_other_products():
            use()


def test_targets_are_patterns_and_names_of_peft():
    model = config(model={"num_kv_heads": 2}).model
    targets = lambda *patterns: define_model(model, Lora(rank=2, targets=list(patterns))).adapters.names
    assert targets("q_proj", "v_proj") == ("layers.attention.query", "layers.attention.value")
    assert targets("mlp.up_proj", "layers.attention.o*") == ("layers.attention.output", "layers.mlp.up")
    assert len(targets("all-linear")) == len(targets("layers.*")) == 7
    mixture = config(
        model={"family": "qwen3_moe", "num_experts": 4, "experts_per_token": 2, "expert_size": 16}
    ).model  # fmt: skip
    adapters = define_model(mixture, Lora(rank=2)).adapters
    assert {name.split(".")[1] for name in adapters.names} == {"attention"}
    note = describe_left_out(adapters)
    assert "layers.experts.down" in note and "no adapters, because experts" in note
    with pytest.raises(ConfigError, match=r"layers\.experts\.down belongs to experts, so it cannot have an adapter"):
        define_model(mixture, Lora(rank=2, targets=["layers.experts.down"]))
