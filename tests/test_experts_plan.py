"""The programs of a mixture of experts for 128 GPUs, compiled without a GPU: what they send, multiply and keep."""

from pathlib import Path

import pytest
from conftest import in_tiers
from test_plan import hold_to_budget, report_for_128_gpus

from jaxmnt.plan.chips import CHIPS
from jaxmnt.plan.estimate import estimate
from jaxmnt.plan.hlo import shapes_in
from jaxmnt.plan.rates import rates_of
from jaxmnt.plan.workload import model_shape, scheme_of
from jaxmnt.plan.zero import resolve_zero
from jaxmnt.telemetry.flops import token_flops

RECIPE = Path(__file__).resolve().parents[1] / "configs" / "qwen3-30b-a3b.yaml"
H100 = CHIPS["h100"]

MESHES = [
    "",  # the recipe's own, without `expert`
    "mesh.fsdp=16 mesh.expert=8 train.microbatch_size=2",
    "mesh.fsdp=4 mesh.expert=8 mesh.model=4 mesh.allow_split_hosts=true train.microbatch_size=2",
    "mesh.data=2 mesh.fsdp=8 mesh.expert=8 model.num_experts=64 train.remat=none train.microbatch_size=1",
    "mesh.pipeline=4 mesh.fsdp=4 mesh.expert=8 train.microbatch_size=2",
]


@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")  # such programs cannot be loaded
@pytest.mark.parametrize("overrides", in_tiers(set(), MESHES))
def test_the_program_of_128_gpus(overrides, monkeypatch):
    spec, report, text = report_for_128_gpus(RECIPE, overrides, monkeypatch)
    config = spec.config
    hold_to_budget(spec, report)

    model, sizes = config.model, spec.placement.sizes
    experts = model.num_experts // (sizes["expert"] * sizes["model"])
    sides = {model.hidden_size, model.expert_size}
    stacks = {shape[-3] for _, shape in shapes_in(text) if len(shape) > 2 and {*shape[-2:]} == sides}
    assert experts in stacks and max(stacks) == experts, "weights of experts are never gathered over expert or model"

    assert report["kernels"] == {"attention": "cudnn", "experts": "mosaic"}
    if sizes["pipeline"] == 1:  # with several devices, one condition forward and one backward, for further rounds
        halves = 2 if spec.placement.overlap == "rows" else 1 if sizes["expert"] > 1 else 0
        assert report["timeline"]["conditions"] == 2 * halves * model.num_layers * spec.num_microbatches

    # A round bounds the memory, so the plan holds for any routing.
    planned = next(stage.peak for stage in resolve_zero(spec)[1].stages if stage.zero == 3)
    assert 0.9 * planned < report["memory"]["peak"] <= 1.1 * planned
    tokens = config.data.global_batch_size * config.data.sequence_length / spec.placement.mesh.size
    active = token_flops(spec.definition, config.data.sequence_length)
    recomputed = {"none": 0, "full": (active.layers + active.attention) / 3}[config.train.remat]
    assert report["timeline"]["flops"] / tokens <= 1.3 * (active.layers + active.attention + active.head + recomputed)
    seconds = estimate(model_shape(spec.definition), scheme_of(spec), rates_of(H100), H100.domain).seconds
    assert seconds == pytest.approx(report["prediction"]["step_seconds"], rel=0.2)
