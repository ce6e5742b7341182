"""What a family says that its layers multiply, and what counts by it: FLOPs, utilisation, time and memory of a plan."""

from types import SimpleNamespace

import jax
import pytest

from jaxmnt.config.load import parse_config
from jaxmnt.models.contract import AttentionShape, Product, define
from jaxmnt.models.registry import build_family
from jaxmnt.plan.chips import CHIPS
from jaxmnt.plan.estimate import estimate
from jaxmnt.plan.memory import estimate_memory
from jaxmnt.plan.rates import rates_of
from jaxmnt.plan.workload import Scheme, model_shape
from jaxmnt.run.running import rates
from jaxmnt.telemetry.flops import token_flops
from jaxmnt.training.build import build_spec

LAYERS, HIDDEN, MLP, LENGTH = 4, 256, 512, 512
MODEL = {
    "num_layers": LAYERS, "hidden_size": HIDDEN, "num_heads": 8, "num_kv_heads": 2, "intermediate_size": MLP,
    "vocab_size": 1024,
}  # fmt: skip
SECOND = 3 * LAYERS * HIDDEN * MLP
"""Parameters of the second MLPs."""


def config(family):
    data = {"synthetic": 1024, "sequence_length": LENGTH, "global_batch_size": 8}
    return parse_config({"model": MODEL | {"family": family}, "data": data, "mesh": {"data": 1}})


def definition(family):
    model = config(family).model
    return define(build_family(model, model.vocab_size))


@pytest.mark.parametrize("family", ["llama", "olmo2", "routed_scales.RoutedLlama", "routed_families.Alternating"])
def test_a_family_without_costs_multiplies_all_but_scales_and_biases(family):
    """Each number of a parameter with another axis than these takes 6 FLOPs of a token."""
    one = definition(family)
    multiplying = 0
    for group in one.groups:
        for leaf, axes in zip(
            jax.tree.leaves(one.abstract[group.name]),
            jax.tree.leaves(one.axes[group.name], is_leaf=lambda node: isinstance(node, tuple)),
            strict=True,
        ):
            multiplying += leaf.size * (not {"norm", "bias"} & {*axes})
    assert token_flops(one, LENGTH).layers == 6 * multiplying > 0
    assert model_shape(one).layer_parameters == multiplying and model_shape(one).parameters == one.parameter_count


def test_the_products_of_a_layer():
    """By their names, as tensor parallelism splits them."""
    ((count, costs),) = definition("llama").layer_costs()
    width = HIDDEN // 8
    assert count == LAYERS and costs.attention == AttentionShape(8, width, kv_heads=2)
    assert {product.name: product[:4] for product in costs.products} == {
        "attention.query": (HIDDEN, HIDDEN, "outputs", 1),
        "attention.key": (HIDDEN, 2 * width, "outputs", 1),
        "attention.value": (HIDDEN, 2 * width, "outputs", 1),
        "attention.output": (HIDDEN, HIDDEN, "inputs", 1),
        "mlp.gate": (HIDDEN, MLP, "outputs", 1),
        "mlp.up": (HIDDEN, MLP, "outputs", 1),
        "mlp.down": (MLP, HIDDEN, "inputs", 1),
    }


def test_each_kind_of_layer_is_counted():
    (first, first_costs), (rest, rest_costs) = definition("routed_scales.RoutedLlama").layer_costs()
    assert (first, rest) == (1, LAYERS - 1)
    assert len(first_costs.products) == 7
    assert rest_costs.products == (
        Product(HIDDEN, 4, name="router"), Product(4, HIDDEN, name="scales"),
    )  # fmt: skip


def test_flops_and_utilisation_follow_what_a_family_says():
    """Of a second MLP that half of the tokens use, half of the FLOPs count, and none of the parameters less."""
    of = lambda family: token_flops(definition(f"routed_families.{family}"), LENGTH)
    every, half = of("AllUsed"), of("HalfUsed")
    assert every.layers - half.layers == 6 * SECOND / 2
    assert (every.all_parameters, every.attention) == (half.all_parameters, half.attention)
    assert every.recomputed("full") - half.recomputed("full") == pytest.approx(2 * SECOND / 2)
    flops = {}
    for family in ("AllUsed", "HalfUsed"):
        spec = build_spec(config(f"routed_families.{family}"), 1024, jax.devices()[:1], lambda device: "host")
        flops[family] = rates(SimpleNamespace(spec=spec, placement=spec.placement)).flops_per_token
    assert flops["AllUsed"] - flops["HalfUsed"] == 6 * SECOND / 2


def test_a_plan_follows_what_a_family_says():
    """Time falls by the products that are made for half of the tokens; the state stays."""
    chip = CHIPS["h100"]
    shapes = [model_shape(definition(f"routed_families.{family}")) for family in ("AllUsed", "HalfUsed")]
    assert shapes[0].parameters == shapes[1].parameters
    scheme = Scheme(length=8192, rows=8, microbatches=1, fsdp=8)
    every, half = (estimate(shape, scheme, rates_of(chip)) for shape in shapes)
    assert 0 < half.products < every.products and half.elementwise < every.elementwise
    assert half.seconds < every.seconds and half.optimizer == every.optimizer
    second = 6 * SECOND * 8192 * 8 / rates_of(chip).products["bfloat16"]
    assert every.products - half.products > 0.9 * second / 2
    every, half = (estimate_memory(shape, scheme, 1e6, 1e6) for shape in shapes)
    assert every.state == half.state and half.peak <= every.peak
