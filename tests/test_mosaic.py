"""The layer of experts with the Mosaic kernels for Hopper GPUs, which JAX interprets on a CPU. Run by the newest JAX
only, because older ones cannot interpret them (conftest.py)."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu
from test_experts import EXPERTS, distinct, reference, routings, run_layer

from jaxmnt.errors import ConfigError
from jaxmnt.models import mosaic
from jaxmnt.models.grouped import ProductMethod, check

MOSAIC = ProductMethod("mosaic", mosaic.BLOCK_ROWS, cores=2)


@pytest.mark.parametrize(
    ("name", "round_rows", "rounds"),
    [("random", 50, 3), ("one expert", None, 1), ("a third is padding", None, 1)],
)
def test_a_layer_agrees_with_float64(name, round_rows, rounds):
    """Errors are relative to each expert's own largest number. The gradient of an expert without tokens is zero."""
    ids = distinct(routings()[name])
    with mosaic_gpu.force_gpu_interpret_mode():
        layer = run_layer(ids, MOSAIC, round_rows, widths=(128, 64), dtype=jnp.bfloat16)
    y, taken, gradients, arrays = layer
    wanted_y, wanted = reference(ids, *arrays)
    assert taken == rounds
    np.testing.assert_allclose(y, wanted_y, atol=0.02 * np.abs(wanted_y).max())
    np.testing.assert_allclose(gradients[0].astype(jnp.float32), wanted[0], atol=0.03 * np.abs(wanted[0]).max())
    share_gradient = np.where(ids < EXPERTS, wanted[1], 0)
    np.testing.assert_allclose(gradients[1], share_gradient, atol=0.03 * np.abs(wanted[1]).max())
    for gradient, value in zip(gradients[2:], wanted[2:], strict=True):
        for expert in range(EXPERTS):
            error = np.abs(gradient[expert].astype(np.float64) - value[expert]).max()
            assert error <= 0.03 * np.abs(value[expert]).max(), expert


def test_a_wrong_kernel_is_refused_at_the_start(monkeypatch):
    with mosaic_gpu.force_gpu_interpret_mode():
        check(MOSAIC)
    monkeypatch.setattr(
        mosaic, "multiply", lambda x, w, rows, transposed=False: jnp.ones((len(x), w.shape[2 - transposed]), x.dtype)
    )
    with (
        mosaic_gpu.force_gpu_interpret_mode(),
        pytest.raises(ConfigError, match=r"the output by mosaic .*; set model.experts_kernel=xla$"),
    ):
        check(MOSAIC)
