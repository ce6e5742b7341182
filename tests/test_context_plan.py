"""The programs of long rows for 128 GPUs, compiled without a GPU: what they send and keep, and how long they take."""

from pathlib import Path

import pytest
from conftest import in_tiers
from test_plan import hold_to_budget, report_for_128_gpus

from jaxmnt.config.load import load_config
from jaxmnt.plan.chips import CHIPS
from jaxmnt.plan.estimate import estimate
from jaxmnt.plan.hlo import shapes_in
from jaxmnt.plan.rates import rates_of
from jaxmnt.plan.report import make_report
from jaxmnt.plan.targets import gpu_devices
from jaxmnt.plan.workload import model_shape, scheme_of
from jaxmnt.plan.zero import resolve_zero
from jaxmnt.training.build import build_spec

RECIPE = Path(__file__).resolve().parents[1] / "configs" / "llama-8b-128k.yaml"
H100 = CHIPS["h100"]

MESHES = [
    "",  # the recipe's own
    "mesh.context=8 mesh.model=1 train.remat=names train.remat_save=[attention]",
    "mesh.pipeline=4 mesh.fsdp=4 mesh.context=8 mesh.model=1 train.remat=full",
    "mesh.data=2 mesh.fsdp=16 mesh.model=1 data.sequence_length=32768 data.global_batch_size=64 "
    "data.document_mask=true",
    "mesh.context=8 mesh.model=1 model.family=mistral model.preset=llama3-8b model.sliding_window=4096",
    "mesh.context=8 mesh.model=1 model.family=mistral model.preset=llama3-8b model.sliding_window=4096 "
    "model.num_layers=24 train.remat=none",
]


@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")  # such programs cannot be loaded
@pytest.mark.parametrize("overrides", in_tiers(set(), MESHES))
def test_the_program_of_128_gpus(overrides, monkeypatch):
    spec, report, text = report_for_128_gpus(RECIPE, overrides, monkeypatch)
    config = spec.config
    hold_to_budget(spec, report)
    assert report["kernels"] == {"attention": "cudnn"} and not [note for note in report["notes"] if "context" in note]

    part = config.data.sequence_length // spec.placement.sizes["context"]
    is_length = lambda size: size >= part and size % (part // 2) == 0  # of whole chunks
    shapes = {shape for _, shape in shapes_in(text)}
    assert not [shape for shape in shapes if sum(map(is_length, shape)) > 1], "length × length"

    planned = next(stage.peak for stage in resolve_zero(spec)[1].stages if stage.zero == 3)
    assert 0.9 * planned < report["memory"]["peak"] <= 1.1 * planned
    seconds = estimate(model_shape(spec.definition), scheme_of(spec), rates_of(H100), H100.domain).seconds
    assert seconds == pytest.approx(report["prediction"]["step_seconds"], rel=0.1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")
def test_a_plan_warns_if_keys_take_longer_than_attention():
    """Rows of 8,192 tokens among eight hosts."""
    overrides = (
        "mesh.fsdp=16 mesh.context=8 mesh.model=1 mesh.allow_split_hosts=true data.sequence_length=8192 "
        "model.num_layers=1 data.global_batch_size=16"
    )
    config = load_config(RECIPE, overrides.split())
    spec = build_spec(config, config.model.vocab_size, gpu_devices(H100, 128, 1), lambda d: str(d.process_index))
    report = make_report(spec, lambda device: device.process_index, H100)
    [note] = [note for note in report["notes"] if "context" in note]
    assert "8 devices exchange keys and values" in note and "or keep these devices inside a host" in note
