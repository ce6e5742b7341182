"""The programs of runs with adapters on GPUs: what they send, need and compute, and what the plan says of it."""

from pathlib import Path

import pytest
from conftest import in_tiers
from test_plan import hold_to_budget, report_for_128_gpus

from jaxmnt.plan.chips import CHIPS
from jaxmnt.plan.estimate import estimate
from jaxmnt.plan.rates import rates_of
from jaxmnt.plan.workload import model_shape, scheme_of
from jaxmnt.plan.zero import resolve_zero
from jaxmnt.telemetry.flops import token_flops

RECIPE = Path(__file__).resolve().parents[1] / "configs" / "llama-8b-lora.yaml"
BIG = (
    "model.preset=llama3.3-70b model.vocab_size=128256 data.global_batch_size=256 lora.rank=64 lora.alpha=128 "
    "train.remat=full"
)
CASES = [
    "model.vocab_size=128256 data.global_batch_size=256",
    f"{BIG} mesh.fsdp=128",
    f"{BIG} mesh.fsdp=16 mesh.model=8",
]


@pytest.mark.parametrize("overrides", in_tiers(set(), CASES))
def test_the_program_of_128_gpus(overrides, monkeypatch):
    spec, report, text = report_for_128_gpus(RECIPE, overrides, monkeypatch)
    hold_to_budget(spec, report)
    memory, placement = report["memory"], spec.placement
    base, whole = spec.definition.base.parameter_count, spec.definition.parameter_count
    shards = placement.sizes["fsdp"] * placement.sizes["model"]
    assert memory["base"] == pytest.approx(2 * base / shards, rel=0.01)
    adapters = memory["params"] - memory["base"]
    assert memory["optimizer"] == pytest.approx(2 * adapters, rel=1e-6)
    assert 4 * (whole - base) / shards < adapters < 4 * (whole - base)
    # No float32 array has the shape of a stack of weights: neither gradients nor copies.
    model, layers = spec.config.model, spec.config.model.num_layers
    split = placement.sizes["model"]
    hidden, mlp = model.hidden_size // placement.sizes["fsdp"], model.intermediate_size // split
    widths = {hidden, model.hidden_size} - {spec.config.lora.rank}  # an adapter has the shape with its rank
    for shape in [f"{layers},{width},{mlp}" for width in widths] + [f"{layers},{mlp},{width}" for width in widths]:
        assert f"f32[{shape}]" not in text

    tokens = spec.config.data.global_batch_size * spec.config.data.sequence_length / placement.mesh.size
    flops = token_flops(spec.definition, spec.config.data.sequence_length)
    full = token_flops(spec.definition.base, spec.config.data.sequence_length)
    assert flops.layers + flops.head == pytest.approx(2 / 3 * (full.layers + full.head) + 6 * (whole - base))
    recomputed = flops.recomputed(spec.config.train.remat)
    computed = report["timeline"]["flops"] / tokens
    assert computed <= 1.1 * (flops.layers + flops.attention + flops.head + recomputed)
    planned = next(stage.peak for stage in resolve_zero(spec)[1].stages if stage.zero == 3)
    assert 0.85 * planned < memory["peak"] <= 1.1 * planned, (planned, memory["peak"])
    shape, scheme = model_shape(spec.definition, spec.config), scheme_of(spec)
    seconds = estimate(shape, scheme, rates_of(CHIPS["h100"]), CHIPS["h100"].domain).seconds
    assert seconds == pytest.approx(report["prediction"]["step_seconds"], rel=0.2)
