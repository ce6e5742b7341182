"""Whole runs of a mixture of experts: resumed, moved over meshes and processes, and balanced."""

import balance
import jax
import numpy as np
import pytest
from conftest import command, events, launch, losses, metrics

from jaxmnt.checkpoint.arrays import Reader
from jaxmnt.checkpoint.commit import newest_valid
from jaxmnt.train import train

MIXTURE = (
    "model.family=qwen3_moe", "model.num_experts=8", "model.experts_per_token=2", "model.expert_size=32",
    "model.intermediate_size=null", "model.balance_loss=0.1", "model.router_bias_rate=0.001",
)  # fmt: skip


def arrays_of(run):
    """The parameters and buffers of the newest checkpoint, by name."""
    checkpoint = newest_valid(run / "checkpoints")
    reader = Reader(checkpoint)
    names = [name for name in checkpoint.manifest.arrays if name.startswith(("params/", "buffers/"))]
    return {name: np.asarray(reader.read(name)) for name in sorted(names)}


def test_a_mixture_resumes_bit_for_bit(tiny, tmp_path):
    """With the loads of the last step and the biases."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    steps = (*MIXTURE, "train.steps=6")
    train(tiny(*steps, f"run.dir={whole}"), devices=jax.devices()[:1])
    train(tiny(*steps, f"run.dir={parts}", "train.stop_after=3"), devices=jax.devices()[:1])
    train(tiny(*steps, f"run.dir={parts}"), devices=jax.devices()[:1])
    assert losses(whole) == losses(parts)
    one, other = arrays_of(whole), arrays_of(parts)
    assert one.keys() == other.keys() and any("bias" in name and np.any(array) for name, array in one.items())
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name], err_msg=name)


@pytest.mark.slow
def test_a_mixture_moves_over_meshes_and_numbers_of_processes(tiny_file, tmp_path):
    """Each leg restores what another mesh, with or without `expert`, saved. All 20 steps are those of one device."""
    plain = command("jaxmnt.train", "--config", str(tiny_file), *MIXTURE, f"run.dir={tmp_path / 'plain'}")
    assert plain.returncode == 0, plain.stderr
    run = tmp_path / "run"
    legs = [
        (2, "mesh.expert=4 mesh.fsdp=2", 7),
        (1, "mesh.fsdp=8 train.microbatch_size=1", 13),
        (4, "mesh.expert=2 mesh.model=2 mesh.data=2", None),
    ]
    for processes, overrides, stop in legs:
        stops = [] if stop is None else [f"train.stop_after={stop}"]
        result = launch(tiny_file, *MIXTURE, *overrides.split(), *stops, processes=processes, devices=8 // processes)
        assert result.returncode == (0 if stop is None else 75), result.stderr
    assert len(events(run, "restore")) == 2
    np.testing.assert_allclose(losses(run), losses(tmp_path / "plain"), rtol=1e-5)
    assert [line["batch_digest"] for line in metrics(run)] == [
        line["batch_digest"] for line in metrics(tmp_path / "plain")
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "steps"),
    [("bias", 400), ("batch, step before", 1000), pytest.param("row", 1000, marks=pytest.mark.exhaustive)],
)
def test_loads_become_even(way, steps):
    """From all tokens at two of eight experts. `benchmarks/balance.py` has more seeds."""
    result = balance.measure(way, steps, seeds=1)
    assert result["load_at"][20] > 3 and result["even_from_step"] <= 0.8 * steps
