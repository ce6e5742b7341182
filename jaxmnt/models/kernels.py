"""How attention is computed: which kernel a device has, and the one for all others, blockwise over keys.

Shapes: B batch, L length, H query heads, G key/value heads, K head width, N = B · G, R = H / G queries that share a
key.
"""

import functools
import math
from types import ModuleType
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxmnt.errors import ConfigError
from jaxmnt.models import long_rows, short_rows
from jaxmnt.models.blockwise import Keys, Queries, Scores, of_heads
from jaxmnt.models.cudnn import ATTENTION, attend_packed, attend_whole, has_packed_form

Kernel = Literal["blockwise", "cudnn"]


def attend(
    q_BLHK: jax.Array,
    k_BLGK: jax.Array,
    v_BLGK: jax.Array,
    segments_BL: jax.Array | None,
    kernel: Kernel,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """Causal attention [B, L, H, K], in the dtype of q; G divides H, and heads share keys in equal groups.

    A query sees keys of its own segment alone. `scale` multiplies scores (default K^-½); `sinks_H` are scores of a key
    without a value, which a head may look at instead (gpt-oss). cuDNN's kernel is used where it can do all that is
    asked for.
    """
    options = Scores(q_BLHK.shape[-1] ** -0.5 if scale is None else scale, window, soft_cap)
    if kernel == "cudnn" and soft_cap is None and sinks_H is None:
        if segments_BL is None:
            return attend_whole(q_BLHK, k_BLGK, v_BLGK, scale=options.scale, window=window)
        return attend_packed(q_BLHK, k_BLGK, v_BLGK, segments_BL, scale=options.scale, window=window)
    return _blockwise(options, _Inputs(q_BLHK, k_BLGK, v_BLGK, segments_BL, sinks_H))


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


# -- blockwise


class _Inputs(NamedTuple):
    """What is attended to, and by what. No gradient but those of queries, keys, values and sinks."""

    q_BLHK: jax.Array
    k_BLGK: jax.Array
    v_BLGK: jax.Array
    segments_BL: jax.Array | None
    sinks_H: jax.Array | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blockwise(options: Scores, inputs: _Inputs) -> jax.Array:
    return _forward(options, inputs)[0]


def _forward(options: Scores, inputs: _Inputs) -> tuple[jax.Array, tuple[_Inputs, jax.Array, jax.Array]]:
    """The output, and what backward needs. Output and logarithms have the checkpoint name `attention`: with them kept,
    backward does not attend a second time."""
    length, groups = inputs.q_BLHK.shape[1], inputs.k_BLGK.shape[2]
    q_NRLK = _by_group(inputs.q_BLHK, groups)
    a_NRLK, log_sum_NRL = _algorithm(length).forward(options, q_NRLK, _keys(inputs), inputs.sinks_H, length)
    # As the caller has it, so that what follows and backward keep the same array.
    a_BLHK = checkpoint_name(_by_head(a_NRLK, groups, length), ATTENTION)
    log_sum_NRL = checkpoint_name(log_sum_NRL, ATTENTION)
    return a_BLHK, (inputs, a_BLHK, log_sum_NRL)


def _backward(options: Scores, saved: tuple[_Inputs, jax.Array, jax.Array], gradient_BLHK: jax.Array) -> tuple[_Inputs]:
    inputs, a_BLHK, log_sum_NRL = saved
    batch, length, heads, _ = gradient_BLHK.shape
    groups, dtype = inputs.k_BLGK.shape[2], gradient_BLHK.dtype
    dot_BLH1 = jnp.sum(gradient_BLHK.astype(jnp.float32) * a_BLHK, axis=-1, keepdims=True)
    dot_NRL = _by_group(dot_BLH1, groups)[..., 0]
    queries = Queries(_by_group(inputs.q_BLHK, groups), _by_group(gradient_BLHK, groups), log_sum_NRL, dot_NRL)
    sums = _algorithm(length).backward(options, queries, _keys(inputs), length)
    over_heads = lambda x_NKL: _by_head(x_NKL.swapaxes(1, 2)[:, None].astype(dtype), groups, length)
    sinks_gradient_H = None
    if inputs.sinks_H is not None:
        p_NRL = jnp.exp(of_heads(inputs.sinks_H, queries.q_NRLK) - log_sum_NRL)
        per_head_BH = -jnp.sum(p_NRL * dot_NRL, axis=-1).reshape(batch, heads)
        sinks_gradient_H = jnp.sum(per_head_BH, axis=0).astype(inputs.sinks_H.dtype)
    gradients = (_by_head(sums.q_NRQK, groups, length), over_heads(sums.k_NKL), over_heads(sums.v_NKL))
    return (_Inputs(*gradients, None, sinks_gradient_H),)


_blockwise.defvjp(_forward, _backward)


def _algorithm(length: int) -> ModuleType:
    return short_rows if length <= 2 * long_rows.BLOCK else long_rows


def _keys(inputs: _Inputs) -> Keys:
    k_NLK, v_NLK = (_by_group(x, inputs.k_BLGK.shape[2])[:, 0] for x in (inputs.k_BLGK, inputs.v_BLGK))
    return Keys(k_NLK, v_NLK, None if inputs.segments_BL is None else _padded(inputs.segments_BL))


def _by_group(x_BLHK: jax.Array, groups: int) -> jax.Array:
    """[N, R, L, K], with zeros after a row that is looped over."""
    x_BLHK = _padded(x_BLHK)
    batch, length, heads, width = x_BLHK.shape
    x_BLGRK = x_BLHK.reshape(batch, length, groups, heads // groups, width)
    return x_BLGRK.transpose(0, 2, 3, 1, 4).reshape(batch * groups, heads // groups, length, width)


def _by_head(x_NRLK: jax.Array, groups: int, length: int) -> jax.Array:
    """[B, L, H, K] of a row's own length."""
    rows, shared, padded, width = x_NRLK.shape
    x_BGRLK = x_NRLK.reshape(rows // groups, groups, shared, padded, width)
    return x_BGRLK.transpose(0, 3, 1, 2, 4).reshape(rows // groups, padded, -1, width)[:, :length]


def _padded(x_BL: jax.Array) -> jax.Array:
    """With zeros up to a whole number of blocks in a long row. No query sees the keys there, which come after all."""
    length = x_BL.shape[1]
    if length <= 2 * long_rows.BLOCK or length % long_rows.BLOCK == 0:
        return x_BL
    return jnp.pad(x_BL, [(0, 0), (0, -length % long_rows.BLOCK), *[(0, 0)] * (x_BL.ndim - 2)])
