"""Causal attention, and the choice of its kernel for a device.

Shapes: B batch, L length, H query heads, G key/value heads, K head width.
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from jaxmnt.errors import ConfigError
from jaxmnt.models.blockwise import Inputs, ScoreOptions, attend_blockwise
from jaxmnt.models.cudnn import attend_packed, attend_whole, has_packed_form

Kernel = Literal["blockwise", "cudnn"]


def attend(
    q_BLHK: Array,
    k_BLGK: Array,
    v_BLGK: Array,
    segments_BL: Array | None,
    kernel: Kernel,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    sinks_H: Array | None = None,
) -> Array:
    """Returns causal attention [B, L, H, K], in the dtype of q; G divides H, and heads share keys in equal groups.

    A query sees only keys of its own segment. `scale` multiplies scores (default K^-½); `sinks_H` are scores of a key
    without a value, to which each head may attend (gpt-oss). Even if `kernel` is "cudnn", the blockwise kernel handles
    soft caps and sinks, which cuDNN does not support.
    """
    options = ScoreOptions(q_BLHK.shape[-1] ** -0.5 if scale is None else scale, window, soft_cap)
    if kernel == "cudnn" and soft_cap is None and sinks_H is None:
        if segments_BL is None:
            return attend_whole(options, q_BLHK, k_BLGK, v_BLGK)
        return attend_packed(options, q_BLHK, k_BLGK, v_BLGK, segments_BL)
    return attend_blockwise(options, Inputs(q_BLHK, k_BLGK, v_BLGK, segments_BL, sinks_H))


def choose_kernel(
    requested: Literal["auto", "xla", "cudnn"],
    platform: str,
    dtype: jnp.dtype,
    head_dim: int,
    capability: float,
    *,
    packed: bool = False,
    soft_cap: bool = False,
) -> Kernel:
    """Returns the attention kernel for a device; `capability` is the CUDA compute capability, 0 for other devices.

    cuDNN's flash attention supports bfloat16 and float16, and heads whose width is a multiple of 8, up to 128, or
    256 on Hopper and newer. It keeps documents apart (`packed`) on Hopper and newer, with heads up to 128. It has no
    soft cap. Raises `ConfigError` if cuDNN is requested where it cannot be used.
    """
    if requested == "xla":
        return "blockwise"
    widest = 256 if capability >= 9 else 128
    fits = (
        platform in ("gpu", "cuda")
        and capability >= 8
        and dtype in (jnp.bfloat16, jnp.float16)
        and head_dim % 8 == 0
        and head_dim <= widest
    )
    if requested == "cudnn" and not fits:
        raise ConfigError(
            f"model.attention: cudnn does not support heads of width {head_dim} in {dtype.name} on this device; "
            "set auto or xla"
        )
    if requested == "cudnn" and soft_cap:
        raise ConfigError("model.attention: cudnn has no soft cap (model.attention_soft_cap); set auto or xla")
    reason = _why_not_packed(head_dim, capability) if fits and packed else None
    if requested == "cudnn" and reason:
        raise ConfigError(
            "model.attention: cudnn cannot keep documents of a row apart (data.rows: packed, data.document_mask) "
            f"{reason}; set auto or xla"
        )
    return "cudnn" if fits and not soft_cap and reason is None else "blockwise"


def _why_not_packed(head_dim: int, capability: float) -> str | None:
    """Returns the reason why cuDNN's packed form cannot be used, or None if it can."""
    if capability < 9:
        return f"on a GPU of compute capability {capability}, only from 9.0 (Hopper) on"
    if head_dim > 128:
        return f"with heads of width {head_dim}, only up to 128"
    if not has_packed_form():
        return f"with JAX {jax.__version__}, whose internal functions for it jaxmnt does not know"
    return None


def device_capability(device: jax.Device) -> float:
    """Returns a GPU's CUDA compute capability, such as 9.0; 0 for other devices."""
    text = str(getattr(device, "compute_capability", "") or "0")
    number = float(text)
    return number if math.isfinite(number) else 0.0
