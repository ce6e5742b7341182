"""How attention is computed: which kernel a device has.

Shapes: B batch, L length, H query heads, G key/value heads, K head width.
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from jaxmnt.errors import ConfigError
from jaxmnt.models.blockwise import Inputs, Scores, attend_blockwise
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
    """Causal attention [B, L, H, K], in the dtype of q; G divides H, and heads share keys in equal groups.

    A query sees keys of its own segment alone. `scale` multiplies scores (default K^-½); `sinks_H` are scores of a key
    without a value, which a head may look at instead (gpt-oss). cuDNN's kernel is used where it can do all that is
    asked for.
    """
    options = Scores(q_BLHK.shape[-1] ** -0.5 if scale is None else scale, window, soft_cap)
    if kernel == "cudnn" and soft_cap is None and sinks_H is None:
        if segments_BL is None:
            return attend_whole(options, q_BLHK, k_BLGK, v_BLGK)
        return attend_packed(options, q_BLHK, k_BLGK, v_BLGK, segments_BL)
    return attend_blockwise(options, Inputs(q_BLHK, k_BLGK, v_BLGK, segments_BL, sinks_H))


def choose_kernel(
    wanted: Literal["auto", "xla", "cudnn"],
    platform: str,
    dtype: jnp.dtype,
    head_dim: int,
    capability: float,
    *,
    packed: bool = False,
    soft_cap: bool = False,
) -> Kernel:
    """The attention kernel for a device; `capability` is the CUDA compute capability, 0 elsewhere.

    cuDNN's flash attention takes bfloat16 or float16, and heads whose width is a multiple of 8, up to 128, or
    256 on Hopper and newer. Documents are kept apart (`packed`) on Hopper and newer, with heads up to 128. It has no
    soft cap. Raises `ConfigError` if it is wanted where it cannot be.
    """
    if wanted == "xla":
        return "blockwise"
    widest = 256 if capability >= 9 else 128
    fits = (
        platform in ("gpu", "cuda")
        and capability >= 8
        and dtype in (jnp.bfloat16, jnp.float16)
        and head_dim % 8 == 0
        and head_dim <= widest
    )
    if wanted == "cudnn" and not fits:
        raise ConfigError(
            f"model.attention: cudnn does not take heads of width {head_dim} in {dtype.name} on this device; "
            "set auto or xla"
        )
    if wanted == "cudnn" and soft_cap:
        raise ConfigError("model.attention: cudnn has no soft cap (model.attention_soft_cap); set auto or xla")
    reason = _against_packed(head_dim, capability) if fits and packed else None
    if wanted == "cudnn" and reason:
        raise ConfigError(
            "model.attention: cudnn cannot keep documents of a row apart (data.rows: packed, data.document_mask) "
            f"{reason}; set auto or xla"
        )
    return "cudnn" if fits and not soft_cap and reason is None else "blockwise"


def _against_packed(head_dim: int, capability: float) -> str | None:
    """Why cuDNN's packed form cannot be used; None: it can."""
    if capability < 9:
        return f"on a GPU of compute capability {capability}, only from 9.0 (Hopper) on"
    if head_dim > 128:
        return f"with heads of width {head_dim}, only up to 128"
    if not has_packed_form():
        return f"with JAX {jax.__version__}, whose functions for it are not known here"
    return None


def device_capability(device: jax.Device) -> float:
    """A GPU's CUDA compute capability, such as 9.0; 0 where there is none."""
    text = str(getattr(device, "compute_capability", "") or "0")
    number = float(text)
    return number if math.isfinite(number) else 0.0
