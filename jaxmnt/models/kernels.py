"""Causal attention, and the choice of the kernel that computes it on a device.

Shapes: B batch, L length, H query heads, G key/value heads, K head width.
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from jaxmnt.errors import ConfigError
from jaxmnt.models.blockwise import Inputs, ScoreOptions, attend_blockwise
from jaxmnt.models.cudnn import attend_packed, attend_whole_rows, has_packed_form

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
    bias_HD: Array | None = None,
) -> Array:
    """Returns causal attention [B, L, H, K] in the dtype of q. H must be a multiple of G, and equally large groups of
    query heads share a key/value head.

    A query sees only keys of its own segment. `scale` multiplies the scores (default K^-½). `sinks_H` has, for each
    head, the score of an additional key without a value (gpt-oss). `bias_HD` has, for each head, a number for each
    distance from a query back to a key, which is added to the score: 0 for the query's own key, and the last of the D
    numbers for all keys that are at least D - 1 tokens before the query. So ALiBi (Press et al. 2022,
    arXiv:2108.12409) has `-slopes_H[:, None] * jnp.arange(length)`, and learned biases are looked up by distance first.
    Even if `kernel` is "cudnn", the blockwise kernel handles soft caps, sinks and biases.
    """
    options = ScoreOptions(q_BLHK.shape[-1] ** -0.5 if scale is None else scale, window, soft_cap)
    if kernel == "cudnn" and soft_cap is None and sinks_H is None and bias_HD is None:
        if segments_BL is None:
            return attend_whole_rows(options, q_BLHK, k_BLGK, v_BLGK)
        return attend_packed(options, q_BLHK, k_BLGK, v_BLGK, segments_BL)
    return attend_blockwise(options, Inputs(q_BLHK, k_BLGK, v_BLGK, segments_BL, segments_BL, sinks_H, bias_HD))


def choose_kernel(
    requested: Literal["auto", "xla", "cudnn"],
    platform: str,
    dtype: jnp.dtype,
    head_dim: int,
    capability: float,
    *,
    packed: bool = False,
    divided: bool = False,
    soft_cap: bool = False,
) -> Kernel:
    """Returns the attention kernel for a device. `capability` is its CUDA compute capability, or 0 for other devices.

    cuDNN's flash attention supports bfloat16 and float16, and heads whose width is a multiple of 8 and at most 128, or
    256 on Hopper and newer GPUs. It can keep documents apart (`packed`) on Hopper and newer, with heads of at most 128.
    For that, and for rows that are divided among devices (`divided`), internal functions of JAX are needed. It has no
    soft cap. Raises `ConfigError` if cuDNN is requested where it cannot be used.
    """
    if requested == "xla":
        return "blockwise"
    max_head_dim = 256 if capability >= 9 else 128
    is_supported = (
        platform in ("gpu", "cuda")
        and capability >= 8
        and dtype in (jnp.bfloat16, jnp.float16)
        and head_dim % 8 == 0
        and head_dim <= max_head_dim
    )
    if requested == "cudnn" and not is_supported:
        raise ConfigError(
            f"model.attention: cudnn does not support heads of width {head_dim} in {dtype.name} on this device; "
            "set auto or xla"
        )
    if requested == "cudnn" and soft_cap:
        raise ConfigError("model.attention: cudnn has no soft cap (model.attention_soft_cap); set auto or xla")
    obstacle = _obstacle(head_dim, capability, packed=packed, divided=divided) if is_supported else None
    if requested == "cudnn" and obstacle:
        raise ConfigError(f"model.attention: cudnn cannot {obstacle}; set auto or xla")
    return "cudnn" if is_supported and not soft_cap and obstacle is None else "blockwise"


def _obstacle(head_dim: int, capability: float, *, packed: bool, divided: bool) -> str | None:
    """Returns what cuDNN cannot do and the reason, as the end of a sentence, or None if it can do all that is
    needed."""
    unknown = f"with JAX {jax.__version__}, because jaxmnt does not know its internal functions for this"
    if packed:
        task = "keep documents of a row apart (data.rows: packed, data.document_mask)"
        if capability < 9:
            return f"{task} on a GPU of compute capability {capability}, only on 9.0 (Hopper) or newer"
        if head_dim > 128:
            return f"{task} with heads of width {head_dim}, only with heads of at most 128"
        if not has_packed_form():
            return f"{task} {unknown}"
    if divided and not has_packed_form():
        return f"divide rows (mesh.context) {unknown}"
    return None


def device_capability(device: jax.Device) -> float:
    """Returns a GPU's CUDA compute capability, such as 9.0; 0 for other devices."""
    text = str(getattr(device, "compute_capability", "") or "0")
    number = float(text)
    return number if math.isfinite(number) else 0.0
