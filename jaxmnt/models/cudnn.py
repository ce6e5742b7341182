"""cuDNN's flash attention: of whole rows, and of rows whose documents are kept apart.

Rows with documents are given to cuDNN in its packed form: the tokens of all rows are one line, and for each document
there is where it begins and how long it is. So no mask of L · L exists. JAX has no public function for that form. The
primitives under its public one are called here, because what stands between them multiplies the offsets of keys by the
number of query heads (jax#39521: with fewer key heads, keys of other documents are read).

A call takes a fixed number of documents; rows that hold more take more calls, each of which fills in its documents'
tokens. Softmax statistics are kept by token, not as cuDNN has them, [documents, H, L].

Shapes: B batch, L length, H query heads, G key/value heads, K head width, T = B · L tokens, C documents of a call.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxmnt.errors import ConfigError
from jaxmnt.models.blockwise import ATTENTION, Scores
from jaxmnt.parallel.collectives import with_backward

DOCUMENT = 512
"""A call of cuDNN takes as many documents as fit in the rows if they have this many tokens on average."""

MOST_DOCUMENTS = 64
"""Of a row, in a call."""

_LARGEST = 2**31 - 1
"""Offsets are int32, and count numbers of queries."""


def is_cudnn_attention(primitive: Any, *_: Any, **__: Any) -> bool:
    """A checkpoint policy that keeps what cuDNN gives for whole rows: output and statistics, which have no name."""
    return bool(primitive.name == "dot_product_attention_fwd_wrapper")


def attend_whole(options: Scores, q_BLHK: Array, k_BLGK: Array, v_BLGK: Array) -> Array:
    """Causal attention [B, L, H, K], in which a query sees its whole row up to itself, or a window of it."""
    return jax.nn.dot_product_attention(  # without the checkpoint name, which would be a second array to keep
        q_BLHK, k_BLGK, v_BLGK, is_causal=True, scale=options.scale, implementation="cudnn",
        local_window_size=None if options.window is None else (options.window - 1, 0),
    )  # fmt: skip


def attend_packed(options: Scores, q_BLHK: Array, k_BLGK: Array, v_BLGK: Array, segments_BL: Array) -> Array:
    """Causal attention [B, L, H, K], in which a query sees the keys of its own document alone. Output and statistics
    have the checkpoint name `attention`. Raises `ConfigError` for more numbers than cuDNN's offsets can count."""
    if q_BLHK.size > _LARGEST:
        raise ConfigError(
            f"model.attention: cudnn cannot count the {q_BLHK.size:,} numbers of the queries that a device has of a "
            "microbatch with documents kept apart; set train.microbatch_size lower, or model.attention=xla"
        )
    return _packed(options, q_BLHK, k_BLGK, v_BLGK, segments_BL)


class _Documents(NamedTuple):
    """The documents of all rows, one after the other. What is after the last row's end counts as empty ones."""

    begin: Array  # int32 [documents + 1], up to a whole number of calls: each one's first token, or T
    of_token_T: Array  # int32
    total: Array  # int32

    @staticmethod
    def of(segments_BL: Array) -> "_Documents":
        opens_BL = jnp.ones(segments_BL.shape, bool).at[:, 1:].set(segments_BL[:, 1:] != segments_BL[:, :-1])
        opens_T = opens_BL.reshape(-1)
        tokens, per_call = opens_T.size, documents_of_a_call(*segments_BL.shape)
        size = -(-tokens // per_call) * per_call + 1
        begin = jnp.nonzero(opens_T, size=size, fill_value=tokens)[0].astype(jnp.int32)
        of_token_T = jnp.cumsum(opens_T, dtype=jnp.int32) - 1
        return _Documents(begin, of_token_T, of_token_T[-1] + 1)


def documents_of_a_call(batch: int, length: int) -> int:
    """How many documents of so many rows cuDNN is given at a time. Statistics take memory for all of them, as long as a
    row each: so very long rows take more calls."""
    return batch * min(max(2, length // DOCUMENT), MOST_DOCUMENTS)


class _Call(NamedTuple):
    """The documents of one call."""

    lengths_C: Array
    first_C1: Array  # each one's first token, and where the last one ends
    mine_T: Array  # bool: the tokens of these documents
    document_T: Array  # which one of these a token belongs to; of the tokens of others any
    place_T: Array  # and where in it


def _call(documents: _Documents, number: Array, per_call: int) -> _Call:
    first_C1 = jax.lax.dynamic_slice_in_dim(documents.begin, number * per_call, per_call + 1)
    document_T = documents.of_token_T - number * per_call
    mine_T = (document_T >= 0) & (document_T < per_call)
    document_T = jnp.clip(document_T, 0, per_call - 1)
    place_T = jnp.where(mine_T, jnp.arange(len(document_T)) - first_C1[document_T], 0)
    return _Call(jnp.diff(first_C1), first_C1, mine_T, document_T, place_T)


def _for_each_call(
    segments_BL: Array, fill: Callable[[_Call, tuple[Array, ...]], tuple[Array, ...]], like: Any
) -> tuple[Array, ...]:
    """`fill(call, arrays)` for one call after the other; the arrays are made like these."""
    documents, per_call = _Documents.of(segments_BL), documents_of_a_call(*segments_BL.shape)
    calls = -(-documents.total // per_call)
    step = lambda number, arrays: fill(_call(documents, number, per_call), arrays)
    empty = tuple(jnp.zeros(one.shape, one.dtype) for one in like)
    with jax.named_scope("about_1_rounds"):  # for the plan
        return jax.lax.fori_loop(0, calls, step, empty)


def _backward(options: Scores, saved: tuple[Array, ...], gradient_BLHK: Array) -> tuple[Array | None, ...]:
    q_BLHK, k_BLGK, v_BLGK, segments_BL, a_BLHK, statistics_BLH = saved
    _, length, heads, _ = q_BLHK.shape
    statistics_TH = statistics_BLH.reshape(-1, heads)

    def fill(call: _Call, filled: tuple[Array, ...]) -> tuple[Array, ...]:
        token_CL = call.first_C1[:-1, None] + jnp.arange(length)
        inside_CL = jnp.arange(length) < call.lengths_C[:, None]
        # Where a document has no token any more, its exponentials are to be 0.
        statistics_CLH = jnp.where(inside_CL[..., None], statistics_TH.at[token_CL].get(mode="clip"), _NOTHING)
        found = cudnn_backward(
            options, q_BLHK, k_BLGK, v_BLGK, statistics_CLH.swapaxes(1, 2), gradient_BLHK, a_BLHK,
            call.lengths_C, call.first_C1,
        )  # fmt: skip
        return _chosen(call, found, filled)

    return (*_for_each_call(segments_BL, fill, (q_BLHK, k_BLGK, v_BLGK)), None)


@with_backward(_backward, static=1)
def _packed(
    options: Scores, q_BLHK: Array, k_BLGK: Array, v_BLGK: Array, segments_BL: Array
) -> tuple[Array, tuple[Array, ...]]:
    """The output, and what backward needs."""
    batch, length, heads, _ = q_BLHK.shape

    def fill(call: _Call, filled: tuple[Array, ...]) -> tuple[Array, ...]:
        a_BLHK, statistics_CHL = cudnn_forward(options, q_BLHK, k_BLGK, v_BLGK, call.lengths_C, call.first_C1)
        statistics_TH = statistics_CHL[call.document_T, :, call.place_T]
        return _chosen(call, (a_BLHK, statistics_TH.reshape(batch, length, heads)), filled)

    like = (q_BLHK, jax.ShapeDtypeStruct((batch, length, heads), jnp.float32))
    a_BLHK, statistics_BLH = (checkpoint_name(one, ATTENTION) for one in _for_each_call(segments_BL, fill, like))
    return a_BLHK, (q_BLHK, k_BLGK, v_BLGK, segments_BL, a_BLHK, statistics_BLH)


_NOTHING = 1e30


def _chosen(call: _Call, new: tuple[Array, ...], old: tuple[Array, ...]) -> tuple[Array, ...]:
    """The tokens of this call's documents from what it has given, where the rest is whatever memory held."""
    own = lambda one: call.mine_T.reshape(*one.shape[:2], *[1] * (one.ndim - 2))
    return tuple(jnp.where(own(one), one, other) for one, other in zip(new, old, strict=True))


# -- cuDNN itself


def has_packed_form() -> bool:
    """Whether this version of JAX has the primitives for it, as they are known here: they are not public."""
    try:
        _jax()
    except (ImportError, AttributeError):
        return False
    return True


class _Jax(NamedTuple):
    forward: Any
    backward: Any
    settings: dict[str, Any]
    """Those that newer versions alone have are as they are without what they are for."""


_OPERANDS = {
    "ctx", "query", "key", "value", "bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "page_table_k",
    "page_table_v", "score_mod_args", "scale", "sliding_window_length", "is_training",
}  # fmt: skip


@functools.cache
def _jax() -> _Jax:
    """Raises `ImportError` or `AttributeError` if there is no such form, or if it has settings unknown here."""
    from jax._src.cudnn import fused_attention_stablehlo as jax_cudnn  # looks for a GPU's libraries, so not before

    settings = {
        "seed": 42, "dropout_rate": 0.0, "variadic_args": (False, False),
        "mask_type": jax_cudnn.MaskType.PADDING_CAUSAL, "layout": jax_cudnn.AttentionLayout.BTNH.value,
    }  # fmt: skip
    lowering = inspect.signature(jax_cudnn._dot_product_attention_fwd_cuda_lowering)
    newer = set(lowering.parameters) - _OPERANDS - set(settings)
    if unknown := newer - {"score_mod_name", "score_mod_jaxpr"}:
        raise AttributeError(f"cuDNN's attention has settings that are not known here: {', '.join(sorted(unknown))}")
    settings |= dict.fromkeys(sorted(newer))
    return _Jax(jax_cudnn._dot_product_attention_fwd_p, jax_cudnn._dot_product_attention_bwd_p, settings)


def cudnn_forward(
    options: Scores,
    q_BLHK: Array,
    k_BLGK: Array,
    v_BLGK: Array,
    lengths_C: Array,
    first_C1: Array,
) -> tuple[Array, Array]:
    """The output [B, L, H, K] and the statistics, float32 [C, H, L], of these documents' tokens; elsewhere anything."""
    nothing, documents = jnp.zeros(0, q_BLHK.dtype), _operands(q_BLHK, k_BLGK, lengths_C, first_C1)
    a_BLHK, statistics_CHL = _jax().forward.bind(
        q_BLHK, k_BLGK, v_BLGK, nothing, *documents, nothing, nothing, is_training=True, **_settings(options)
    )
    return a_BLHK, statistics_CHL


def cudnn_backward(
    options: Scores,
    q_BLHK: Array,
    k_BLGK: Array,
    v_BLGK: Array,
    statistics_CHL: Array,
    gradient_BLHK: Array,
    a_BLHK: Array,
    lengths_C: Array,
    first_C1: Array,
) -> tuple[Array, Array, Array]:
    """The gradients of queries, keys and values, for these documents' tokens; elsewhere anything."""
    nothing, documents = jnp.zeros(0, q_BLHK.dtype), _operands(q_BLHK, k_BLGK, lengths_C, first_C1)
    q_gradient_BLHK, k_gradient_BLGK, v_gradient_BLGK = _jax().backward.bind(
        q_BLHK, k_BLGK, v_BLGK, nothing, *documents, nothing, nothing, statistics_CHL, a_BLHK, gradient_BLHK,
        **_settings(options),
    )  # fmt: skip
    return q_gradient_BLHK, k_gradient_BLGK, v_gradient_BLGK


def _settings(options: Scores) -> dict[str, Any]:
    return {"scale": options.scale, "sliding_window_length": options.window, **_jax().settings}


def _operands(q_BLHK: Array, k_BLGK: Array, lengths_C: Array, first_C1: Array) -> list[Array]:
    """Lengths [B, C / B] and offsets [B, C / B + 1], of queries and of keys: JAX reads the number of documents off
    their shapes, cuDNN reads them as a line. An offset counts numbers, not tokens."""
    batch, documents = q_BLHK.shape[0], len(lengths_C)
    lengths = lengths_C.reshape(batch, documents // batch)
    offsets = jnp.pad(first_C1, (0, batch - 1), mode="edge").reshape(batch, documents // batch + 1)
    wide = lambda x: x.shape[2] * x.shape[3]
    return [lengths, lengths, offsets * wide(q_BLHK), offsets * wide(k_BLGK)]
