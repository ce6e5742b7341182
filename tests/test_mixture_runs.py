"""Whole runs of a mixture of experts: resumed, moved over meshes and processes, and balanced."""

import balance
import jax
import numpy as np
import pytest
from conftest import check_legs, check_same_checkpoints, in_tiers, losses

from jaxmnt.train import train

MIXTURE = (
    "model.family=qwen3_moe", "model.num_experts=8", "model.experts_per_token=2", "model.expert_size=32",
    "model.intermediate_size=null", "model.balance_loss=0.1", "model.router_bias_rate=0.001",
)  # fmt: skip


@pytest.mark.slow
def test_a_mixture_resumes_bit_for_bit(tiny, tmp_path):
    """With the loads of the last step and the biases."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    steps = (*MIXTURE, "train.steps=6")
    train(tiny(*steps, f"run.dir={whole}"), devices=jax.devices()[:1])
    train(tiny(*steps, f"run.dir={parts}", "train.stop_after=3"), devices=jax.devices()[:1])
    train(tiny(*steps, f"run.dir={parts}"), devices=jax.devices()[:1])
    assert losses(whole) == losses(parts)
    arrays = check_same_checkpoints(whole, parts)
    assert any("bias" in name and np.any(array) for name, array in arrays.items())


@pytest.mark.exhaustive
def test_a_mixture_moves_over_meshes_and_numbers_of_processes(tiny_file, tmp_path):
    """Each leg restores what another mesh, with or without `expert`, saved. All 20 steps are those of one device."""
    legs = [
        (2, "mesh.expert=4 mesh.fsdp=2", 7),
        (1, "mesh.fsdp=8 train.microbatch_size=1", 13),
        (4, "mesh.expert=2 mesh.model=2 mesh.data=2", None),
    ]
    check_legs(tiny_file, tmp_path, MIXTURE, legs)


@pytest.mark.parametrize(
    ("way", "steps"),
    in_tiers(set(), [("bias", 400), ("batch, step before", 1000), ("row", 1000)]),
)
def test_loads_become_even(way, steps):
    """From all tokens at two of eight experts. `benchmarks/balance.py` has more seeds."""
    result = balance.measure(way, steps, seeds=1)
    assert result["load_at"][20] > 3 and result["even_from_step"] <= 0.8 * steps
