"""cuDNN's flash attention, for whole rows and for rows whose documents are kept apart.

Rows with documents use cuDNN's packed form: the tokens of all rows are one sequence, with the offset and length of each
document. So no mask of L · L exists. JAX has no public function for that form. This module calls the primitives below
the public one, because the code between them multiplies the offsets of keys by the number of query heads (jax#39521:
with fewer key heads, it reads keys of other documents).

A call takes a fixed number of documents. Rows with more documents need more calls, each of which fills in the tokens of
its documents. Softmax statistics are stored by token, not in cuDNN's form [documents, H, L].

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
from jaxmnt.models.blockwise import ATTENTION, ScoreOptions
from jaxmnt.parallel.collectives import with_backward

DOCUMENT = 512
"""Mean length of a document, in tokens, for which one call of cuDNN takes all documents of the rows."""

MAX_DOCUMENTS_PER_ROW = 64
"""Most documents of a row in one call."""

_LARGEST = 2**31 - 1
"""Largest offset: offsets are int32 and count the numbers of queries."""


def is_cudnn_attention(primitive: Any, *_: Any, **__: Any) -> bool:
    """Checkpoint policy that saves cuDNN's results for whole rows: output and statistics, which have no name."""
    return bool(primitive.name == "dot_product_attention_fwd_wrapper")


def attend_whole(options: ScoreOptions, q_BLHK: Array, k_BLGK: Array, v_BLGK: Array) -> Array:
    """Returns causal attention [B, L, H, K]: a query sees its whole row up to itself, or a window of it."""
    return jax.nn.dot_product_attention(  # without the checkpoint name, which would save a second array
        q_BLHK, k_BLGK, v_BLGK, is_causal=True, scale=options.scale, implementation="cudnn",
        local_window_size=None if options.window is None else (options.window - 1, 0),
    )  # fmt: skip


def attend_packed(options: ScoreOptions, q_BLHK: Array, k_BLGK: Array, v_BLGK: Array, segments_BL: Array) -> Array:
    """Returns causal attention [B, L, H, K]: a query sees only keys of its own document. Output and statistics have the
    checkpoint name `attention`. Raises `ConfigError` if the queries exceed cuDNN's offsets."""
    if q_BLHK.size > _LARGEST:
        raise ConfigError(
            "model.attention: cudnn cannot keep documents apart if a device's queries of a microbatch have "
            f"{q_BLHK.size:,} numbers (at most {_LARGEST:,}); set train.microbatch_size lower, or model.attention=xla"
        )
    return _packed(options, q_BLHK, k_BLGK, v_BLGK, segments_BL)


class _Documents(NamedTuple):
    """The documents of all rows in order, filled up with empty documents after the last row's end."""

    begin: Array  # int32 [documents + 1], filled up to a whole number of calls: the first token of each, or T
    of_token_T: Array  # int32: the document of each token
    total: Array  # int32: the number of documents

    @staticmethod
    def from_segments(segments_BL: Array) -> "_Documents":
        # A document begins at each row's first token, and wherever the segment changes.
        begins_BL = jnp.ones(segments_BL.shape, bool).at[:, 1:].set(segments_BL[:, 1:] != segments_BL[:, :-1])
        begins_T = begins_BL.reshape(-1)
        tokens = begins_T.size
        per_call = documents_per_call(*segments_BL.shape)
        # Each token may be a document.
        size = -(-tokens // per_call) * per_call + 1
        begin = jnp.nonzero(begins_T, size=size, fill_value=tokens)[0].astype(jnp.int32)
        of_token_T = jnp.cumsum(begins_T, dtype=jnp.int32) - 1
        return _Documents(begin, of_token_T, of_token_T[-1] + 1)


def documents_per_call(batch: int, length: int) -> int:
    """Returns the number of documents in one call of cuDNN for `batch` rows. Each document's statistics take as much
    memory as those of a whole row, so very long rows take more calls."""
    return batch * min(max(2, length // DOCUMENT), MAX_DOCUMENTS_PER_ROW)


class _Call(NamedTuple):
    """The documents of one call."""

    lengths_C: Array
    first_C1: Array  # the first token of each document, and the end of the last
    inside_T: Array  # bool: True for tokens of these documents
    document_T: Array  # index of a token's document among these; arbitrary for tokens of others
    position_T: Array  # position of a token in its document


def _call(documents: _Documents, number: Array, per_call: int) -> _Call:
    """Returns the documents of call `number`."""
    first_C1 = jax.lax.dynamic_slice_in_dim(documents.begin, number * per_call, per_call + 1)
    document_T = documents.of_token_T - number * per_call
    inside_T = (document_T >= 0) & (document_T < per_call)
    document_T = jnp.clip(document_T, 0, per_call - 1)
    position_T = jnp.where(inside_T, jnp.arange(len(document_T)) - first_C1[document_T], 0)
    return _Call(jnp.diff(first_C1), first_C1, inside_T, document_T, position_T)


def _for_each_call(
    segments_BL: Array, fill: Callable[[_Call, tuple[Array, ...]], tuple[Array, ...]], like: Any
) -> tuple[Array, ...]:
    """Folds `fill(call, arrays)` over the calls, from zeros with the shapes and dtypes of `like`."""
    documents = _Documents.from_segments(segments_BL)
    per_call = documents_per_call(*segments_BL.shape)
    calls = -(-documents.total // per_call)
    step = lambda number, arrays: fill(_call(documents, number, per_call), arrays)
    empty = tuple(jnp.zeros(array.shape, array.dtype) for array in like)
    with jax.named_scope("about_1_rounds"):  # the plan reads the number of iterations off this name
        return jax.lax.fori_loop(0, calls, step, empty)


def _backward(options: ScoreOptions, saved: tuple[Array, ...], gradient_BLHK: Array) -> tuple[Array | None, ...]:
    q_BLHK, k_BLGK, v_BLGK, segments_BL, a_BLHK, statistics_BLH = saved
    _, length, heads, _ = q_BLHK.shape
    statistics_TH = statistics_BLH.reshape(-1, heads)

    def fill(call: _Call, filled: tuple[Array, ...]) -> tuple[Array, ...]:
        token_CL = call.first_C1[:-1, None] + jnp.arange(length)
        inside_CL = jnp.arange(length) < call.lengths_C[:, None]
        # Beyond the end of a document its exponentials must be 0.
        statistics_CLH = jnp.where(inside_CL[..., None], statistics_TH.at[token_CL].get(mode="clip"), _MASKED_STATISTIC)
        gradients = cudnn_backward(
            options, q_BLHK, k_BLGK, v_BLGK, statistics_CLH.swapaxes(1, 2), gradient_BLHK, a_BLHK,
            call.lengths_C, call.first_C1,
        )  # fmt: skip
        return _merge_documents(call, gradients, filled)

    return (*_for_each_call(segments_BL, fill, (q_BLHK, k_BLGK, v_BLGK)), None)


@with_backward(_backward, static=1)
def _packed(
    options: ScoreOptions, q_BLHK: Array, k_BLGK: Array, v_BLGK: Array, segments_BL: Array
) -> tuple[Array, tuple[Array, ...]]:
    """Returns the output, and the arrays that backward needs."""
    batch, length, heads, _ = q_BLHK.shape

    def fill(call: _Call, filled: tuple[Array, ...]) -> tuple[Array, ...]:
        a_BLHK, statistics_CHL = cudnn_forward(options, q_BLHK, k_BLGK, v_BLGK, call.lengths_C, call.first_C1)
        statistics_TH = statistics_CHL[call.document_T, :, call.position_T]
        return _merge_documents(call, (a_BLHK, statistics_TH.reshape(batch, length, heads)), filled)

    like = (q_BLHK, jax.ShapeDtypeStruct((batch, length, heads), jnp.float32))
    filled = _for_each_call(segments_BL, fill, like)
    a_BLHK, statistics_BLH = (checkpoint_name(array, ATTENTION) for array in filled)
    return a_BLHK, (q_BLHK, k_BLGK, v_BLGK, segments_BL, a_BLHK, statistics_BLH)


_MASKED_STATISTIC = 1e30
"""Statistic, a logarithm of a sum, for which all exponentials are 0."""


def _merge_documents(call: _Call, new: tuple[Array, ...], old: tuple[Array, ...]) -> tuple[Array, ...]:
    """Returns `new` at the tokens of this call's documents and `old` at all others, where cuDNN leaves `new`
    uninitialised."""
    inside = lambda array: call.inside_T.reshape(*array.shape[:2], *[1] * (array.ndim - 2))
    return tuple(
        jnp.where(inside(new_array), new_array, old_array) for new_array, old_array in zip(new, old, strict=True)
    )


# -- cuDNN itself


def has_packed_form() -> bool:
    """Returns True if this version of JAX has the primitives of the packed form with the parameters that this module
    knows: they are not public."""
    try:
        _jax()
    except (ImportError, AttributeError):
        return False
    return True


class _Jax(NamedTuple):
    forward: Any
    backward: Any
    settings: dict[str, Any]
    """Static parameters of both primitives. Those that only newer versions have are None, which disables them."""


_OPERANDS = {
    "ctx", "query", "key", "value", "bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "page_table_k",
    "page_table_v", "score_mod_args", "scale", "sliding_window_length", "is_training",
}  # fmt: skip


@functools.cache
def _jax() -> _Jax:
    """Returns the primitives of the packed form. Raises `ImportError` or `AttributeError` if JAX has none, or if they
    have parameters that this module does not know."""
    from jax._src.cudnn import fused_attention_stablehlo as jax_cudnn  # imported late, as it loads a GPU's libraries

    settings = {
        "seed": 42, "dropout_rate": 0.0, "variadic_args": (False, False),
        "mask_type": jax_cudnn.MaskType.PADDING_CAUSAL, "layout": jax_cudnn.AttentionLayout.BTNH.value,
    }  # fmt: skip
    lowering = inspect.signature(jax_cudnn._dot_product_attention_fwd_cuda_lowering)
    newer = set(lowering.parameters) - _OPERANDS - set(settings)
    if unknown := newer - {"score_mod_name", "score_mod_jaxpr"}:
        raise AttributeError(f"cuDNN's attention has unknown parameters: {', '.join(sorted(unknown))}")
    settings |= dict.fromkeys(sorted(newer))
    return _Jax(jax_cudnn._dot_product_attention_fwd_p, jax_cudnn._dot_product_attention_bwd_p, settings)


def cudnn_forward(
    options: ScoreOptions,
    q_BLHK: Array,
    k_BLGK: Array,
    v_BLGK: Array,
    lengths_C: Array,
    first_C1: Array,
) -> tuple[Array, Array]:
    """Returns the output [B, L, H, K] and the statistics, float32 [C, H, L], of the tokens of these documents. Other
    tokens are left uninitialised."""
    empty = jnp.zeros(0, q_BLHK.dtype)
    documents = _operands(q_BLHK, k_BLGK, lengths_C, first_C1)
    # The empty operands are the bias and the page tables, which this form does not use.
    a_BLHK, statistics_CHL = _jax().forward.bind(
        q_BLHK, k_BLGK, v_BLGK, empty, *documents, empty, empty, is_training=True, **_settings(options)
    )
    return a_BLHK, statistics_CHL


def cudnn_backward(
    options: ScoreOptions,
    q_BLHK: Array,
    k_BLGK: Array,
    v_BLGK: Array,
    statistics_CHL: Array,
    gradient_BLHK: Array,
    a_BLHK: Array,
    lengths_C: Array,
    first_C1: Array,
) -> tuple[Array, Array, Array]:
    """Returns the gradients of queries, keys and values for the tokens of these documents. Other tokens are left
    uninitialised."""
    empty = jnp.zeros(0, q_BLHK.dtype)
    documents = _operands(q_BLHK, k_BLGK, lengths_C, first_C1)
    q_gradient_BLHK, k_gradient_BLGK, v_gradient_BLGK = _jax().backward.bind(
        q_BLHK, k_BLGK, v_BLGK, empty, *documents, empty, empty, statistics_CHL, a_BLHK, gradient_BLHK,
        **_settings(options),
    )  # fmt: skip
    return q_gradient_BLHK, k_gradient_BLGK, v_gradient_BLGK


def _settings(options: ScoreOptions) -> dict[str, Any]:
    """Returns the static parameters of both primitives."""
    return {"scale": options.scale, "sliding_window_length": options.window, **_jax().settings}


def _operands(q_BLHK: Array, k_BLGK: Array, lengths_C: Array, first_C1: Array) -> list[Array]:
    """Returns lengths [B, C / B] and offsets [B, C / B + 1], of queries and of keys. JAX derives the number of
    documents from their shapes; cuDNN reads them as flat arrays. An offset counts numbers, not tokens."""
    batch, documents = q_BLHK.shape[0], len(lengths_C)
    lengths = lengths_C.reshape(batch, documents // batch)
    offsets = jnp.pad(first_C1, (0, batch - 1), mode="edge").reshape(batch, documents // batch + 1)
    numbers_per_token = lambda x: x.shape[2] * x.shape[3]
    return [lengths, lengths, offsets * numbers_per_token(q_BLHK), offsets * numbers_per_token(k_BLGK)]
