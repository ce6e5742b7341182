"""How attention is computed: which kernel a device has, and the one for all others, blockwise over keys.

The blockwise kernel is exact. It keeps a running maximum and sum of each query's softmax (Milakov and Gimelshein 2018,
arXiv:1805.02867; Rabe and Staats 2021, arXiv:2112.05682), so that the scores of one block of queries and keys exist at
a time, and the backward pass computes them again from the logarithm of the sum (Dao et al. 2022, arXiv:2205.14135).

Shapes: B batch, L length, H query heads, G key/value heads, K head width, N = B · G, R = H / G queries that share a
key, Q queries and J keys of a block.
"""

import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxmnt.errors import ConfigError
from jaxmnt.models.cudnn import ATTENTION, attend_packed, attend_whole, has_packed_form

Kernel = Literal["blockwise", "cudnn"]

BLOCK = 512
"""Queries, and keys, of a block. Rows of up to two blocks are cut into two halves instead."""

_HIDDEN = -1e30
"""The score of a key that a query may not see. Finite: the difference of two of them must be a number."""


class Scores(NamedTuple):
    """What is done to the scores besides the causal mask. All static."""

    scale: float
    window: int | None = None
    """A query sees itself and the keys before it, so many in all."""
    soft_cap: float | None = None
    """Scores s become cap · tanh(s / cap) (Gemma 2, arXiv:2408.00118)."""


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


class _Grouped(NamedTuple):
    """The same by the group of heads that shares keys; lengths are multiples of a block's where they loop."""

    q_NRLK: jax.Array
    k_NLK: jax.Array
    v_NLK: jax.Array
    segments_BL: jax.Array | None


class _Softmax(NamedTuple):
    """Of the keys that a block of queries has seen so far, in float32."""

    largest_NRQ: jax.Array
    sum_NRQ: jax.Array
    """Of exponentials, relative to the largest score."""
    values_NRQK: jax.Array
    """The sum of values weighted by them."""

    def add(self, scores_NRQJ: jax.Array, v_NJK: jax.Array) -> "_Softmax":
        """With these keys."""
        largest_NRQ = jnp.maximum(self.largest_NRQ, jnp.max(scores_NRQJ, axis=-1))
        p_NRQJ = jnp.exp(scores_NRQJ - largest_NRQ[..., None])
        factor_NRQ = jnp.exp(self.largest_NRQ - largest_NRQ)
        return _Softmax(
            largest_NRQ,
            self.sum_NRQ * factor_NRQ + jnp.sum(p_NRQJ, axis=-1),
            self.values_NRQK * factor_NRQ[..., None] + _product(p_NRQJ, v_NJK, 1),
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blockwise(options: Scores, inputs: _Inputs) -> jax.Array:
    return _forward(options, inputs)[0]


def _forward(options: Scores, inputs: _Inputs) -> tuple[jax.Array, tuple[_Inputs, jax.Array, jax.Array]]:
    """The output, and what backward needs. Output and logarithms have the checkpoint name `attention`: with them kept,
    backward does not attend a second time."""
    length, groups, grouped = inputs.q_BLHK.shape[1], inputs.k_BLGK.shape[2], _grouped(inputs)

    def attend_queries(carry: None, query: Any, size: int, over_keys: Any) -> Any:
        q_NRQK = _cut(grouped.q_NRLK, query, size, 2)

        def add(seen: _Softmax, key: Any, size: int) -> _Softmax:
            k_NJK, v_NJK = _cut(grouped.k_NLK, key, size, 1), _cut(grouped.v_NLK, key, size, 1)
            return seen.add(_scores(options, q_NRQK, k_NJK, query, key, grouped.segments_BL)[0], v_NJK)

        end = over_keys(add, _nothing_seen(q_NRQK, inputs.sinks_H))
        a_NRQK = (end.values_NRQK / end.sum_NRQ[..., None]).astype(q_NRQK.dtype)
        return carry, (a_NRQK, end.largest_NRQ + jnp.log(end.sum_NRQ))

    _, (a_NRLK, log_sum_NRL) = _over_queries(length, options.window, attend_queries, None)
    # As the caller has it, so that what follows and backward keep the same array.
    a_BLHK = checkpoint_name(_by_head(a_NRLK, groups, length), ATTENTION)
    log_sum_NRL = checkpoint_name(log_sum_NRL, ATTENTION)
    return a_BLHK, (inputs, a_BLHK, log_sum_NRL)


def _backward(options: Scores, saved: tuple[_Inputs, jax.Array, jax.Array], gradient_BLHK: jax.Array) -> tuple[_Inputs]:
    inputs, a_BLHK, log_sum_NRL = saved
    batch, length, heads, _ = gradient_BLHK.shape
    groups, dtype, grouped = inputs.k_BLGK.shape[2], gradient_BLHK.dtype, _grouped(inputs)
    g_NRLK = _by_group(gradient_BLHK, groups)
    dot_BLH1 = jnp.sum(gradient_BLHK.astype(jnp.float32) * a_BLHK, axis=-1, keepdims=True)
    dot_NRL = _by_group(dot_BLH1, groups)[..., 0]

    def differentiate_queries(carry: Any, query: Any, size: int, over_keys: Any) -> Any:
        cut = lambda array: _cut(array, query, size, 2)
        q_NRQK, g_NRQK, log_sum_NRQ1 = cut(grouped.q_NRLK), cut(g_NRLK), cut(log_sum_NRL)[..., None]
        dot_NRQ1 = cut(dot_NRL)[..., None]

        def add(sums: Any, key: Any, size: int) -> Any:
            q_gradient_NRQK, k_gradient_NKL, v_gradient_NKL = sums
            k_NJK, v_NJK = _cut(grouped.k_NLK, key, size, 1), _cut(grouped.v_NLK, key, size, 1)
            scores_NRQJ, slope_NRQJ = _scores(options, q_NRQK, k_NJK, query, key, grouped.segments_BL)
            p_NRQJ = jnp.exp(scores_NRQJ - log_sum_NRQ1)
            s_gradient_NRQJ = p_NRQJ * (_product(g_NRQK, v_NJK, 2) - dot_NRQ1) * slope_NRQJ
            p_NRQJ, s_gradient_NRQJ = p_NRQJ.astype(dtype), s_gradient_NRQJ.astype(dtype)
            return (
                q_gradient_NRQK + _product(s_gradient_NRQJ, k_NJK, 1),
                _added_at(k_gradient_NKL, key, _summed_over_queries(q_NRQK, s_gradient_NRQJ)),
                _added_at(v_gradient_NKL, key, _summed_over_queries(g_NRQK, p_NRQJ)),
            )

        q_gradient_NRQK, *carry = over_keys(add, (jnp.zeros(q_NRQK.shape, jnp.float32), *carry))
        return tuple(carry), q_gradient_NRQK.astype(dtype)

    rows, padded, width = grouped.k_NLK.shape
    nothing_NKL = jnp.zeros((rows, width, padded), jnp.float32)
    (k_gradient_NKL, v_gradient_NKL), q_gradient_NRLK = _over_queries(
        length, options.window, differentiate_queries, (nothing_NKL, nothing_NKL)
    )
    over_heads = lambda x_NKL: _by_head(x_NKL.swapaxes(1, 2)[:, None].astype(dtype), groups, length)
    sinks_gradient_H = None
    if inputs.sinks_H is not None:
        p_NRL = jnp.exp(_of_heads(inputs.sinks_H, g_NRLK) - log_sum_NRL)
        per_head_BH = -jnp.sum(p_NRL * dot_NRL, axis=-1).reshape(batch, heads)
        sinks_gradient_H = jnp.sum(per_head_BH, axis=0).astype(inputs.sinks_H.dtype)
    q_gradient_BLHK = _by_head(q_gradient_NRLK, groups, length)
    gradients = (q_gradient_BLHK, over_heads(k_gradient_NKL), over_heads(v_gradient_NKL))
    return (_Inputs(*gradients, None, sinks_gradient_H),)


_blockwise.defvjp(_forward, _backward)


def _grouped(inputs: _Inputs) -> _Grouped:
    groups = inputs.k_BLGK.shape[2]
    k_NLK, v_NLK = (_by_group(x, groups)[:, 0] for x in (inputs.k_BLGK, inputs.v_BLGK))
    return _Grouped(_by_group(inputs.q_BLHK, groups), k_NLK, v_NLK, _padded(inputs.segments_BL, 1))


def _over_queries(length: int, window: int | None, rows: Any, carry: Any) -> tuple[Any, Any]:
    """`rows(carry, query, size, over_keys)` for each block of `size` queries from `query` on, and its outputs
    [N, R, Q, …] put together. `over_keys(add, start)` folds `add(sums, key, size)` over the keys that these queries may
    see; the last ones are those of the block itself.

    A short row is written out as two halves, each against all its keys at once: on a CPU that is quickest. Else blocks
    are looped over, and skipped where no query sees a key.
    """
    if length <= 2 * BLOCK:
        outputs = []
        middle = -(-length // 2) if length >= 64 else length
        for query, end in ((0, middle), (middle, length))[: 1 + (length > middle)]:
            key = 0 if window is None else max(0, query - window + 1)
            at_once = lambda add, start, key=key, size=end - key: add(start, key, size)
            carry, output = rows(carry, query, end - query, at_once)
            outputs.append(output)
        return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=2), *outputs)

    reach = length if window is None else min(length, window + BLOCK)
    mean = (reach - reach**2 / (2 * length)) / BLOCK + 0.5  # of the blocks of keys, for the plan

    def block(carry: Any, index: jax.Array) -> tuple[Any, Any]:
        query = index * BLOCK
        first = 0 if window is None else jnp.maximum(0, query - window + 1) // BLOCK

        def over_keys(add: Any, start: Any) -> Any:
            step = lambda number, sums: add(sums, number * BLOCK, BLOCK)
            with jax.named_scope(f"about_{mean:.1f}_rounds"):
                return jax.lax.fori_loop(first, index + 1, step, start)

        return rows(carry, query, BLOCK, over_keys)

    carry, outputs = jax.lax.scan(block, carry, jnp.arange(-(-length // BLOCK)))
    join = lambda x: jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1, *x.shape[4:])
    return carry, jax.tree.map(join, outputs)


def _scores(
    options: Scores, q_NRQK: jax.Array, k_NJK: jax.Array, query: Any, key: Any, segments_BL: jax.Array | None
) -> tuple[jax.Array, jax.Array | float]:
    """Float32 scores [N, R, Q, J] of queries from `query` on and keys from `key` on, and their slope: the derivative
    by the product of query and key."""
    scores_NRQJ = _product(q_NRQK, k_NJK, 2) * options.scale
    slope: jax.Array | float = options.scale
    if options.soft_cap is not None:
        bent_NRQJ = jnp.tanh(scores_NRQJ / options.soft_cap)
        scores_NRQJ, slope = options.soft_cap * bent_NRQJ, slope * (1 - jnp.square(bent_NRQJ))
    num_queries, num_keys = scores_NRQJ.shape[2:]
    ahead_QJ = (query + jnp.arange(num_queries))[:, None] - (key + jnp.arange(num_keys))
    visible_QJ = ahead_QJ >= 0 if options.window is None else (ahead_QJ >= 0) & (ahead_QJ < options.window)
    visible = visible_QJ
    if segments_BL is not None:
        own_BQ, other_BJ = _cut(segments_BL, query, num_queries, 1), _cut(segments_BL, key, num_keys, 1)
        visible_BQJ = visible_QJ & (own_BQ[:, :, None] == other_BJ[:, None, :])
        visible = jnp.repeat(visible_BQJ, scores_NRQJ.shape[0] // segments_BL.shape[0], axis=0)[:, None]
    return jnp.where(visible, scores_NRQJ, _HIDDEN), slope


def _nothing_seen(q_NRQK: jax.Array, sinks_H: jax.Array | None) -> _Softmax:
    """Before the first key; a sink has been seen, and has no value."""
    shape, values_NRQK = q_NRQK.shape[:-1], jnp.zeros(q_NRQK.shape, jnp.float32)
    if sinks_H is None:
        return _Softmax(jnp.full(shape, _HIDDEN, jnp.float32), jnp.zeros(shape, jnp.float32), values_NRQK)
    largest_NRQ = jnp.broadcast_to(_of_heads(sinks_H, q_NRQK), shape)
    return _Softmax(largest_NRQ, jnp.ones(shape, jnp.float32), values_NRQK)


def _of_heads(sinks_H: jax.Array, like_NRLK: jax.Array) -> jax.Array:
    """Numbers of heads as [N, R, 1], in float32."""
    rows, shared = like_NRLK.shape[:2]
    groups = sinks_H.shape[0] // shared
    return jnp.tile(sinks_H.astype(jnp.float32).reshape(groups, shared), (rows // groups, 1))[..., None]


def _product(x_NRQA: jax.Array, y: jax.Array, contracted: int) -> jax.Array:
    """x @ y in float32 for each N: over y's first dimension after N (`contracted` 1) or over its last (2)."""
    rows, shared, queries, size = x_NRQA.shape
    product = jax.lax.dot_general(
        x_NRQA.astype(y.dtype).reshape(rows, shared * queries, size), y, (((2,), (contracted,)), ((0,), (0,))),
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    return product.reshape(rows, shared, queries, -1)


def _summed_over_queries(x_NRQK: jax.Array, y_NRQJ: jax.Array) -> jax.Array:
    """[N, K, J] in float32. K before J: so a CPU needs no transposed copy."""
    flat = lambda x: x.reshape(x.shape[0], -1, x.shape[-1])
    return jax.lax.dot_general(
        flat(x_NRQK), flat(y_NRQJ), (((1,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32
    )


def _added_at(sums_NKL: jax.Array, key: Any, new_NKJ: jax.Array) -> jax.Array:
    size = new_NKJ.shape[-1]
    if size == sums_NKL.shape[-1]:
        return sums_NKL + new_NKJ
    old_NKJ = jax.lax.dynamic_slice_in_dim(sums_NKL, key, size, axis=2)
    return jax.lax.dynamic_update_slice_in_dim(sums_NKL, old_NKJ + new_NKJ, key, axis=2)


def _cut(array: jax.Array, start: Any, size: int, axis: int) -> jax.Array:
    if isinstance(start, int):
        return jax.lax.slice_in_dim(array, start, start + size, axis=axis)
    return jax.lax.dynamic_slice_in_dim(array, start, size, axis=axis)


def _by_group(x_BLHK: jax.Array, groups: int) -> jax.Array:
    """[N, R, L, K], with zeros after a row that is looped over."""
    padded_BLHK = _padded(x_BLHK, 1)
    assert padded_BLHK is not None
    batch, length, heads, width = padded_BLHK.shape
    x_BLGRK = padded_BLHK.reshape(batch, length, groups, heads // groups, width)
    return x_BLGRK.transpose(0, 2, 3, 1, 4).reshape(batch * groups, heads // groups, length, width)


def _by_head(x_NRLK: jax.Array, groups: int, length: int) -> jax.Array:
    """[B, L, H, K] of a row's own length."""
    rows, shared, padded, width = x_NRLK.shape
    x_BGRLK = x_NRLK.reshape(rows // groups, groups, shared, padded, width)
    return x_BGRLK.transpose(0, 3, 1, 2, 4).reshape(rows // groups, padded, -1, width)[:, :length]


def _padded(array: jax.Array | None, axis: int) -> jax.Array | None:
    """With zeros up to a whole number of blocks. Nobody sees the keys there: they come after every query."""
    if array is None or array.shape[axis] <= 2 * BLOCK or array.shape[axis] % BLOCK == 0:
        return array
    widths = [(0, -array.shape[axis] % BLOCK if number == axis else 0) for number in range(array.ndim)]
    return jnp.pad(array, widths)
