"""cuDNN's flash attention, for whole rows and for rows whose documents are kept apart.

Rows with several documents use cuDNN's packed form: the tokens of all rows form one sequence, and cuDNN is given the
offset and length of each document, so no L · L mask exists. JAX has no public function for this form. This module calls
the internal primitives directly, because the code between them and the public function multiplies the offsets of keys
by the number of query heads. With fewer key heads, cuDNN would then read keys of other documents (jax#39521).

A call takes a fixed number of documents. Rows with more documents need several calls, each of which fills in the tokens
of its documents. Softmax statistics are stored by token, not in cuDNN's form [documents, H, L].

Rows that are divided among devices need attention to parts of the keys, with statistics (`models.attention_parts`).
JAX's public function does not return these, so this module calls the primitives for it, too.

Shapes: B batch, L length, H query heads, G key/value heads, K head width, T = B · L tokens, C documents in a call.
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

MEAN_DOCUMENT_TOKENS = 512
"""If documents have at least this many tokens on average, one call of cuDNN takes all documents of the rows, unless
`MAX_DOCUMENTS_PER_ROW` limits it."""

MAX_DOCUMENTS_PER_ROW = 64
"""Maximum number of documents per row in one call, on average over the rows."""

_MAX_OFFSET = 2**31 - 1
"""Largest offset of a document. Offsets are int32 and count elements of the query array, not tokens."""


def is_cudnn_attention(primitive: Any, *_: Any, **__: Any) -> bool:
    """Returns True for the primitive that computes attention in whole rows. As a checkpoint policy, this saves its
    output and statistics, which have no checkpoint name."""
    return bool(primitive.name == "dot_product_attention_fwd_wrapper")


def attend_whole_rows(options: ScoreOptions, q_BLHK: Array, k_BLGK: Array, v_BLGK: Array) -> Array:
    """Returns causal attention [B, L, H, K]. A query sees its row up to itself, or at most `options.window` tokens."""
    return jax.nn.dot_product_attention(  # no checkpoint name, because it would save a second array
        q_BLHK, k_BLGK, v_BLGK, is_causal=True, scale=options.scale, implementation="cudnn",
        local_window_size=None if options.window is None else (options.window - 1, 0),
    )  # fmt: skip


def _check_offsets(q_BLHK: Array) -> None:
    """Raises `ConfigError` if the queries have more numbers than offsets can count."""
    if q_BLHK.size > _MAX_OFFSET:
        raise ConfigError(
            "model.attention: cudnn cannot keep documents apart if a device's queries in a microbatch have "
            f"{q_BLHK.size:,} numbers (at most {_MAX_OFFSET:,}); set train.microbatch_size lower, or "
            "model.attention=xla"
        )


class _Documents(NamedTuple):
    """The documents of all rows in order, followed by empty documents that complete the last possible call."""

    first_tokens: Array
    """int32: the index of each document's first token (T for an empty document), and finally T."""
    document_of_token_T: Array
    """int32: the index of each token's document."""
    total: Array
    """int32: the number of documents that are not empty."""

    @staticmethod
    def from_segments(segments_BL: Array) -> "_Documents":
        """Returns the documents of rows whose tokens belong to these segments."""
        # A document begins at each row's first token, and wherever the segment changes.
        begins_BL = jnp.ones(segments_BL.shape, bool).at[:, 1:].set(segments_BL[:, 1:] != segments_BL[:, :-1])
        begins_T = begins_BL.reshape(-1)
        tokens = begins_T.size
        per_call = documents_per_call(*segments_BL.shape)
        # There may be as many documents as tokens.
        max_calls = -(-tokens // per_call)
        size = max_calls * per_call + 1
        first_tokens = jnp.nonzero(begins_T, size=size, fill_value=tokens)[0].astype(jnp.int32)
        document_of_token_T = jnp.cumsum(begins_T, dtype=jnp.int32) - 1
        return _Documents(first_tokens, document_of_token_T, document_of_token_T[-1] + 1)


def documents_per_call(batch: int, length: int) -> int:
    """Returns the number of documents that one call of cuDNN takes, for `batch` rows of `length` tokens. It is limited,
    because cuDNN's statistics of any document take as much memory as those of a whole row. Very long rows may therefore
    need more calls."""
    return batch * min(max(2, length // MEAN_DOCUMENT_TOKENS), MAX_DOCUMENTS_PER_ROW)


class _CallDocuments(NamedTuple):
    """The documents that one call of cuDNN takes."""

    lengths_C: Array
    """int32: the number of tokens in each document."""
    first_C1: Array
    """int32: the index of each document's first token, and the end of the last document."""
    inside_T: Array
    """bool: True for tokens of these documents."""
    document_T: Array
    """int32: the index of each token's document among these; arbitrary where `inside_T` is False."""
    position_T: Array
    """int32: the position of each token in its document; 0 where `inside_T` is False."""

    @property
    def spans(self) -> "DocumentSpans":
        """The documents as cuDNN is given them."""
        return DocumentSpans(self.lengths_C, self.first_C1)


class DocumentSpans(NamedTuple):
    """The documents of a call, each of which has consecutive tokens of all rows."""

    lengths_C: Array
    """int32: the number of tokens in each document."""
    first_C1: Array
    """int32: the index of each document's first token, and the end of the last document."""


class RowLengths(NamedTuple):
    """The numbers of queries and of keys at the start of each row that cuDNN uses; each is at least 1."""

    queries_B: Array
    keys_B: Array


Used = DocumentSpans | RowLengths | None
"""The tokens that a call uses. None: all, and each row is a document."""


def _documents_of_call(documents: _Documents, call_index: Array, per_call: int) -> _CallDocuments:
    """Returns the documents of one of the calls, each of which takes `per_call` documents."""
    first_C1 = jax.lax.dynamic_slice_in_dim(documents.first_tokens, call_index * per_call, per_call + 1)
    document_T = documents.document_of_token_T - call_index * per_call
    inside_T = (document_T >= 0) & (document_T < per_call)
    document_T = jnp.clip(document_T, 0, per_call - 1)
    position_T = jnp.where(inside_T, jnp.arange(len(document_T)) - first_C1[document_T], 0)
    return _CallDocuments(jnp.diff(first_C1), first_C1, inside_T, document_T, position_T)


def _for_each_call(
    segments_BL: Array, fill: Callable[[_CallDocuments, tuple[Array, ...]], tuple[Array, ...]], like: Any
) -> tuple[Array, ...]:
    """Returns arrays with the shapes and dtypes of `like`. They begin as zeros, and for each call of cuDNN
    `fill(call, arrays)` returns the arrays with the tokens of that call filled in."""
    documents = _Documents.from_segments(segments_BL)
    per_call = documents_per_call(*segments_BL.shape)
    num_calls = -(-documents.total // per_call)
    fill_call = lambda index, arrays: fill(_documents_of_call(documents, index, per_call), arrays)
    zeros = tuple(jnp.zeros(array.shape, array.dtype) for array in like)
    with jax.named_scope("about_1_rounds"):  # the planner reads the number of iterations from this name
        return jax.lax.fori_loop(0, num_calls, fill_call, zeros)


def differentiate_packed(
    options: ScoreOptions,
    q_BLHK: Array,
    k_BLGK: Array,
    v_BLGK: Array,
    segments_BL: Array,
    a_BLHK: Array,
    statistics_BLH: Array,
    gradient_BLHK: Array,
) -> tuple[Array, Array, Array]:
    """Returns the gradients of queries, keys and values. If other devices have further keys, the output and the
    statistics must be those of all keys."""
    _, length, heads, _ = q_BLHK.shape
    statistics_TH = statistics_BLH.reshape(-1, heads)

    def fill(call: _CallDocuments, filled: tuple[Array, ...]) -> tuple[Array, ...]:
        token_CL = call.first_C1[:-1, None] + jnp.arange(length)
        inside_CL = jnp.arange(length) < call.lengths_C[:, None]
        # Positions beyond the end of a document must have exponentials of 0.
        statistics_CLH = jnp.where(inside_CL[..., None], statistics_TH.at[token_CL].get(mode="clip"), MASKED_STATISTIC)
        gradients = cudnn_backward(
            options, q_BLHK, k_BLGK, v_BLGK, statistics_CLH.swapaxes(1, 2), gradient_BLHK, a_BLHK, call.spans
        )
        return _merge_documents(call, gradients, filled)

    q_gradient_BLHK, k_gradient_BLGK, v_gradient_BLGK = _for_each_call(segments_BL, fill, (q_BLHK, k_BLGK, v_BLGK))
    return q_gradient_BLHK, k_gradient_BLGK, v_gradient_BLGK


def attend_packed_with_statistics(
    options: ScoreOptions, q_BLHK: Array, k_BLGK: Array, v_BLGK: Array, segments_BL: Array
) -> tuple[Array, Array]:
    """Returns causal attention within documents, and the statistics as float32 [B, L, H]. This function has no
    gradient: see `differentiate_packed`. Raises `ConfigError` as `attend_packed`."""
    _check_offsets(q_BLHK)
    batch, length, heads, _ = q_BLHK.shape

    def fill(call: _CallDocuments, filled: tuple[Array, ...]) -> tuple[Array, ...]:
        a_BLHK, statistics_CHL = cudnn_forward(options, q_BLHK, k_BLGK, v_BLGK, call.spans)
        statistics_TH = statistics_CHL[call.document_T, :, call.position_T]
        return _merge_documents(call, (a_BLHK, statistics_TH.reshape(batch, length, heads)), filled)

    like = (q_BLHK, jax.ShapeDtypeStruct((batch, length, heads), jnp.float32))
    a_BLHK, statistics_BLH = _for_each_call(segments_BL, fill, like)
    return a_BLHK, statistics_BLH


def _backward(options: ScoreOptions, saved: tuple[Array, ...], gradient_BLHK: Array) -> tuple[Array | None, ...]:
    """Returns the gradients of queries, keys and values. Segments have none."""
    q_BLHK, k_BLGK, v_BLGK, segments_BL, a_BLHK, statistics_BLH = saved
    return (
        *differentiate_packed(options, q_BLHK, k_BLGK, v_BLGK, segments_BL, a_BLHK, statistics_BLH, gradient_BLHK),
        None,
    )


@with_backward(_backward, static=1)
def attend_packed(
    options: ScoreOptions, q_BLHK: Array, k_BLGK: Array, v_BLGK: Array, segments_BL: Array
) -> tuple[Array, tuple[Array, ...]]:
    """Returns causal attention [B, L, H, K], in which a query sees only keys of its own document. Output and statistics
    have the checkpoint name `attention`. Raises `ConfigError` if the queries have more numbers than offsets can
    count."""
    results = attend_packed_with_statistics(options, q_BLHK, k_BLGK, v_BLGK, segments_BL)
    a_BLHK, statistics_BLH = (checkpoint_name(array, ATTENTION) for array in results)
    return a_BLHK, (q_BLHK, k_BLGK, v_BLGK, segments_BL, a_BLHK, statistics_BLH)


MASKED_STATISTIC = 1e30
"""Softmax statistic, the logarithm of a sum of exponentials, that makes all exponentials relative to it 0."""


def _merge_documents(call: _CallDocuments, new: tuple[Array, ...], old: tuple[Array, ...]) -> tuple[Array, ...]:
    """Returns `new` at the tokens of this call's documents and `old` at all others, where cuDNN leaves `new`
    uninitialised."""
    inside_like = lambda array: call.inside_T.reshape(*array.shape[:2], *[1] * (array.ndim - 2))
    return tuple(
        jnp.where(inside_like(new_array), new_array, old_array) for new_array, old_array in zip(new, old, strict=True)
    )


# -- cuDNN itself


def has_packed_form() -> bool:
    """Returns True if this version of JAX has the internal primitives of the packed form and of divided rows, with no
    parameters that this module does not know."""
    try:
        _primitives()
    except (ImportError, AttributeError):
        return False
    return True


class _Primitives(NamedTuple):
    """JAX's primitives of the packed form."""

    forward: Any
    backward: Any
    settings: dict[str, Any]
    """Static parameters of both primitives. Those that only newer versions have are None, which disables them."""
    mask_types: dict[tuple[bool, bool], Any]
    """The mask by two facts: whether attention is causal, and whether lengths are given."""


_OPERANDS_AND_OPTIONS = {
    "ctx", "query", "key", "value", "bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "page_table_k",
    "page_table_v", "score_mod_args", "scale", "sliding_window_length", "is_training", "mask_type",
}  # fmt: skip
"""Parameters of JAX's lowering that are arrays, or that this module passes with each call."""


@functools.cache
def _primitives() -> _Primitives:
    """Returns the primitives of the packed form. Raises `ImportError` or `AttributeError` if JAX has none, or if they
    have parameters that this module does not know."""
    from jax._src.cudnn import fused_attention_stablehlo as jax_cudnn  # here, because it loads a GPU's libraries

    settings = {
        "seed": 42, "dropout_rate": 0.0, "variadic_args": (False, False),
        "layout": jax_cudnn.AttentionLayout.BTNH.value,
    }  # fmt: skip
    lowering = inspect.signature(jax_cudnn._dot_product_attention_fwd_cuda_lowering)
    newer_parameters = set(lowering.parameters) - _OPERANDS_AND_OPTIONS - set(settings)
    masks = jax_cudnn.MaskType
    mask_types = {
        (True, False): masks.CAUSAL, (True, True): masks.PADDING_CAUSAL,
        (False, False): masks.NO_MASK, (False, True): masks.PADDING,
    }  # fmt: skip
    if unknown := newer_parameters - {"score_mod_name", "score_mod_jaxpr"}:
        raise AttributeError(f"cuDNN's attention has unknown parameters: {', '.join(sorted(unknown))}")
    settings |= dict.fromkeys(sorted(newer_parameters))
    return _Primitives(
        jax_cudnn._dot_product_attention_fwd_p, jax_cudnn._dot_product_attention_bwd_p, settings, mask_types
    )


def cudnn_forward(
    options: ScoreOptions, q_BLHK: Array, k_BLGK: Array, v_BLGK: Array, used: Used
) -> tuple[Array, Array]:
    """Returns the output [B, L, H, K] and the float32 statistics [C, H, L] for the queries that the call uses. Other
    queries are left uninitialised. Without documents, C is B."""
    empty = jnp.zeros(0, q_BLHK.dtype)
    # The empty operands are the bias and the page tables, which are not used.
    a_BLHK, statistics_CHL = _primitives().forward.bind(
        q_BLHK, k_BLGK, v_BLGK, empty, *_length_operands(q_BLHK, k_BLGK, used), empty, empty, is_training=True,
        **_settings(options, used),
    )  # fmt: skip
    return a_BLHK, statistics_CHL


def cudnn_backward(
    options: ScoreOptions,
    q_BLHK: Array,
    k_BLGK: Array,
    v_BLGK: Array,
    statistics_CHL: Array,
    gradient_BLHK: Array,
    a_BLHK: Array,
    used: Used,
) -> tuple[Array, Array, Array]:
    """Returns the gradients of queries, keys and values for the tokens that the call uses. Other tokens are left
    uninitialised."""
    empty = jnp.zeros(0, q_BLHK.dtype)
    q_gradient_BLHK, k_gradient_BLGK, v_gradient_BLGK = _primitives().backward.bind(
        q_BLHK, k_BLGK, v_BLGK, empty, *_length_operands(q_BLHK, k_BLGK, used), empty, empty, statistics_CHL, a_BLHK,
        gradient_BLHK, **_settings(options, used),
    )  # fmt: skip
    return q_gradient_BLHK, k_gradient_BLGK, v_gradient_BLGK


def _settings(options: ScoreOptions, used: Used) -> dict[str, Any]:
    """Returns the static parameters of both primitives."""
    primitives = _primitives()
    mask_type = primitives.mask_types[options.causal, used is not None]
    return {
        "scale": options.scale, "sliding_window_length": options.window, "mask_type": mask_type, **primitives.settings,
    }  # fmt: skip


def _length_operands(q_BLHK: Array, k_BLGK: Array, used: Used) -> list[Array]:
    """Returns the lengths in queries and in keys, and the offsets in queries and in keys. All are empty if the call
    uses whole rows. Without documents, the lengths are [B] and the offsets are empty.

    For documents, the lengths are [B, C / B] and the offsets [B, C / B + 1]. JAX derives the number of documents from
    these shapes, whereas cuDNN reads flat arrays. Offsets count numbers, not tokens.
    """
    empty = jnp.zeros(0, q_BLHK.dtype)
    if used is None:
        return [empty] * 4
    if isinstance(used, RowLengths):
        return [used.queries_B, used.keys_B, empty, empty]
    batch, documents = q_BLHK.shape[0], len(used.lengths_C)
    assert documents > batch, "JAX does not pass on the offsets if there is one document for each row"
    lengths = used.lengths_C.reshape(batch, documents // batch)
    offsets = jnp.pad(used.first_C1, (0, batch - 1), mode="edge").reshape(batch, documents // batch + 1)
    numbers_per_token = lambda x: x.shape[2] * x.shape[3]
    return [lengths, lengths, offsets * numbers_per_token(q_BLHK), offsets * numbers_per_token(k_BLGK)]
