"""FLOPs of a training step, and the peak rate of known devices.

Convention, named in every report: *model FLOPs, matmuls only, causal attention*. A token costs 6 FLOPs for each
parameter of a matrix product (the embedding is a look-up and does not count, the output head does), and
6 · layers · heads · head_dim · length for attention, which is half of the full square because a query sees on
average half of the keys. Recomputation does not count. After PaLM (arXiv:2204.02311, appendix B), which counts
the full square.
"""

import re

import jax.numpy as jnp

from jaxmnt.config.schema import Model

CONVENTION = "model FLOPs, matmuls only, causal attention"

PEAKS: dict[str, dict[str, float]] = {
    "V100": {"float32": 15.7e12},
    "A100": {"bfloat16": 312e12, "float32": 19.5e12},
    "L4": {"bfloat16": 121e12, "float32": 30.3e12},
    "L40S": {"bfloat16": 362e12, "float32": 91.6e12},
    "H100 PCIe": {"bfloat16": 756e12, "float32": 51e12},
    "H100": {"bfloat16": 989e12, "float32": 67e12},
    "H200": {"bfloat16": 989e12, "float32": 67e12},
    "GH200": {"bfloat16": 989e12, "float32": 67e12},
    "B200": {"bfloat16": 2250e12, "float32": 75e12},
}
"""Dense peak FLOP/s by a part of the device kind, after the vendors' datasheets. float32 is without TF32."""


def flops_per_token(model: Model, vocab_size: int, length: int) -> int:
    """Forward and backward FLOPs of one token in a row of `length`."""
    assert model.head_dim and model.num_kv_heads and model.intermediate_size
    attention_width = model.num_heads * model.head_dim
    kv_width = model.num_kv_heads * model.head_dim
    layer = model.hidden_size * (2 * attention_width + 2 * kv_width + 3 * model.intermediate_size)
    products = model.num_layers * layer + model.hidden_size * vocab_size
    return 6 * products + 6 * model.num_layers * attention_width * length


def peak_flops(device_kind: str, dtype: jnp.dtype) -> float | None:
    """Peak FLOP/s of one device, or None where it is not known. The most specific name wins."""
    names = [name for name in PEAKS if re.search(rf"\b{name}\b", device_kind)]
    if not names:
        return None
    return PEAKS[max(names, key=len)].get(jnp.dtype(dtype).name)
