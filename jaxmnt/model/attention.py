"""Causal grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245) with rotary positions.

Shapes: B batch, L length, D model, H query heads, G key/value heads, K head width.
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmnt.config.schema import Model
from jaxmnt.model.layers import rotate, weight
from jaxmnt.placement.rules import Placement

Kernel = Literal["xla", "cudnn"]


class Attention(nnx.Module):
    """Queries, keys and values from x, causal softmax attention, and the output projection."""

    def __init__(self, config: Model, output_std: float, rngs: nnx.Rngs):
        hidden, heads, kv_heads, width = (
            config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim,
        )  # fmt: skip
        assert kv_heads and width
        self.query = weight(rngs, (hidden, heads, width), ("embed", "heads", "head_dim"))
        self.key = weight(rngs, (hidden, kv_heads, width), ("embed", "kv_heads", "head_dim"))
        self.value = weight(rngs, (hidden, kv_heads, width), ("embed", "kv_heads", "head_dim"))
        self.output = weight(rngs, (heads, width, hidden), ("heads", "head_dim", "embed"), output_std)

    def __call__(
        self,
        x_BLD: jax.Array,
        angles: tuple[jax.Array, jax.Array],
        mask_B1LL: jax.Array | None,
        kernel: Kernel,
        placement: Placement,
    ) -> jax.Array:
        """`mask_B1LL` is True where a query may see a key, besides causality; None allows all."""
        q_BLHK = rotate(_project(x_BLD, self.query[...]), angles)
        k_BLGK = rotate(_project(x_BLD, self.key[...]), angles)
        v_BLGK = _project(x_BLD, self.value[...])
        q_BLHK = placement.constrain(q_BLHK, None, "length", "heads", "head_dim")
        k_BLGK = placement.constrain(k_BLGK, None, "length", "kv_heads", "head_dim")
        v_BLGK = placement.constrain(v_BLGK, None, "length", "kv_heads", "head_dim")
        a_BLHK = jax.nn.dot_product_attention(
            q_BLHK, k_BLGK, v_BLGK, mask=mask_B1LL, is_causal=True, implementation=kernel
        )
        a_BLHK = placement.constrain(a_BLHK, None, "length", "heads", "head_dim")
        return jnp.einsum("BLHK,HKD->BLD", a_BLHK, self.output[...])


def _project(x_BLD: jax.Array, w_DHK: jax.Array) -> jax.Array:
    return jnp.einsum("BLD,DHK->BLHK", x_BLD, w_DHK)


def choose_kernel(
    wanted: Literal["auto", "xla", "cudnn"], platform: str, dtype: jnp.dtype, head_dim: int, capability: float
) -> Kernel:
    """The attention kernel for a device; `capability` is the CUDA compute capability, 0 elsewhere.

    cuDNN's flash attention takes bfloat16 or float16, and heads whose width is a multiple of 8, up to 128, or
    256 on Hopper and newer.
    """
    if wanted != "auto":
        return wanted
    widest = 256 if capability >= 9 else 128
    fits = (
        platform in ("gpu", "cuda")
        and capability >= 8
        and dtype in (jnp.bfloat16, jnp.float16)
        and head_dim % 8 == 0
        and head_dim <= widest
    )
    return "cudnn" if fits else "xla"


def device_capability(device: jax.Device) -> float:
    """A GPU's CUDA compute capability, such as 9.0; 0 where there is none."""
    text = str(getattr(device, "compute_capability", "") or "0")
    number = float(text)
    return number if math.isfinite(number) else 0.0
