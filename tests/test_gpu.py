"""What only a GPU can show. Not part of scripts/test; on a machine with one: python -m pytest -m gpu

Each run is a process of its own on the first GPU, so that this process may stay on CPU devices.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, command, events, losses, metrics

pytestmark = pytest.mark.gpu


def train(config: Path, run: Path, *overrides: str, platform: str = "cuda", code: int = 0) -> Path:
    result = command(
        "jaxmnt.train", "--config", str(config), f"run.dir={run}", *overrides,
        JAX_PLATFORMS=platform, CUDA_VISIBLE_DEVICES="0",
    )  # fmt: skip
    assert result.returncode == code, result.stdout + result.stderr
    return run


@pytest.fixture(scope="module")
def config(prepared, tmp_path_factory) -> Path:
    from conftest import TINY

    tree = {name: dict(section) for name, section in TINY.items()}
    tree["data"] |= {"path": str(prepared), "sequence_length": 128}
    tree["model"]["num_kv_heads"] = 2
    path = tmp_path_factory.mktemp("gpu") / "tiny.yaml"
    path.write_text(json.dumps(tree))
    return path


@pytest.fixture(scope="module")
def float32(config, tmp_path_factory) -> Path:
    return train(config, tmp_path_factory.mktemp("float32") / "run")


def test_float32_is_what_a_cpu_computes(config, float32, tmp_path):
    on_cpu = train(config, tmp_path / "cpu", platform="cpu")
    np.testing.assert_allclose(losses(float32), losses(on_cpu), rtol=1e-4)
    digests = [[line["batch_digest"] for line in metrics(run)] for run in (float32, on_cpu)]
    assert digests[0] == digests[1]


def test_accumulation_changes_nothing(config, float32, tmp_path):
    in_four = train(config, tmp_path / "run", "train.microbatch_size=4")
    np.testing.assert_allclose(losses(in_four), losses(float32), rtol=1e-5)


@pytest.mark.parametrize("masked", ["false", "true"])
def test_bfloat16_with_cudnn_stays_near_float32(config, tmp_path, masked):
    mask = f"data.document_mask={masked}"
    exact = train(config, tmp_path / "exact", mask)
    low = train(config, tmp_path / "low", mask, "train.precision=auto", "model.attention=cudnn")
    np.testing.assert_allclose(losses(low), losses(exact), rtol=2e-2)
    assert metrics(low)[-1]["mfu"] > 0


ATTENTION = """
import jax, jax.numpy as jnp, numpy as np
from jaxmnt.models.kernels import attend

rng = np.random.default_rng(0)
array = lambda heads: jnp.asarray(rng.standard_normal((2, 2048, heads, 128)), jnp.float32)
q, k, v, gradient = array(8), array(2), array(2), array(8)
most = np.stack([np.arange(2048) // 40, np.sort(rng.integers(0, 3, 2048))])  # more documents than a call takes
for segments in (most, most // 20):
    for window in (None, 300):
        found = []
        for kernel, dtype in (("cudnn", jnp.bfloat16), ("blockwise", jnp.float32)):
            of = lambda q, k, v: attend(q, k, v, jnp.asarray(segments, jnp.int32), kernel, window=window)
            out, backward = jax.vjp(of, *(one.astype(dtype) for one in (q, k, v)))
            found.append((out, *backward(gradient.astype(dtype))))
        for low, exact in zip(*found):
            low, exact = np.asarray(low, np.float32), np.asarray(exact)
            assert np.isfinite(low).all()
            assert np.linalg.norm(low - exact) <= 1e-2 * np.linalg.norm(exact), (window, low.shape)
"""


def test_divided_rows_are_whole_rows_by_cudnn():
    """Each of four devices' parts, with and without documents, as near to float32 as whole rows are."""
    environment = os.environ | {"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": "0"}
    script = ROOT / "benchmarks" / "divided_rows.py"
    run = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    for case in map(json.loads, run.stdout.splitlines()):
        assert case["kernel"] == "cudnn"
        for part, error in case["errors_divided"].items():
            assert error <= 2 * case["errors_whole"][part] + 1e-3, case


def test_documents_are_kept_apart_by_cudnn():
    environment = os.environ | {"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": "0"}
    run = subprocess.run([sys.executable, "-c", ATTENTION], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_stopping_and_resuming_is_bit_identical(config, float32, tmp_path):
    run = train(config, tmp_path / "run", "train.stop_after=10", code=75)
    train(config, run)
    assert losses(run) == losses(float32)
    assert events(run, "restore")[-1]["step"] == 10


def test_a_step_that_does_not_fit_is_refused_before_it_starts(config, tmp_path):
    sizes = ("model.hidden_size=16384", "model.num_layers=48", "model.intermediate_size=65536", "model.num_heads=128")
    run = tmp_path / "run"
    result = command(
        "jaxmnt.train",
        "--config",
        str(config),
        f"run.dir={run}",
        *sizes,
        JAX_PLATFORMS="cuda",
        CUDA_VISIBLE_DEVICES="0",
    )
    assert result.returncode == 2 and "memory: a step needs" in result.stderr, result.stdout + result.stderr


@pytest.mark.parametrize("kernel", ["auto", "xla"])
def test_a_mixture_stays_near_float32(config, tmp_path, kernel):
    """On Hopper GPUs `auto` is Mosaic's kernels."""
    mixture = (
        "model.family=qwen3_moe", "model.intermediate_size=null", "model.expert_size=64", "model.num_experts=8",
        "model.experts_per_token=2",
    )  # fmt: skip
    exact = train(config, tmp_path / "exact", *mixture)
    near = train(config, tmp_path / "near", *mixture, "train.precision=bfloat16", f"model.experts_kernel={kernel}")
    np.testing.assert_allclose(losses(near), losses(exact), rtol=0.02)
