"""Attention to a part of the keys, with the statistics by which the results for several parts are merged.

The softmax over all keys is a mean of those over the parts, weighted by their sums of exponentials (Milakov and
Gimelshein 2018, arXiv:1805.02867). The gradients of a part follow from the output and the statistics of all keys.

Shapes: B batch, L queries, J keys, H query heads, G key/value heads, K head width.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxmnt.models import blockwise, cudnn
from jaxmnt.models.blockwise import Inputs, ScoreOptions
from jaxmnt.models.cudnn import RowLengths

_UNSEEN = -1e30
"""The statistic of a query that sees no key of a part. It is finite, so that the difference of two is a number."""


class SharedDocument(NamedTuple):
    """The document to which the first queries and the last keys belong, if all keys precede all queries in one row. No
    other document has both queries and keys."""

    queries_B: Array
    """int32: the number of queries in the document; 0 if no document has both queries and keys."""
    first_key_B: Array
    """int32: the index of the document's first key; the number of keys if no document has both."""


class PartInputs(NamedTuple):
    """Queries, and a part of their keys and values."""

    q_BLHK: Array
    k_BJGK: Array
    v_BJGK: Array
    segments_BL: Array | None = None
    """The segments of queries and keys if attention is causal; None if each row is one document."""
    shared: SharedDocument | None = None
    """The shared document if attention is not causal; None if all queries see all keys."""
    sinks_H: Array | None = None
    """See `kernels.attend`. Only one of the parts may have them."""
    bias_HD: Array | None = None
    """See `kernels.attend`."""
    first_query: int | Array = 0
    """Index in the row of the first query, minus that of the first key."""


class Part(NamedTuple):
    """The result of attention to a part of the keys, or to several parts."""

    a_BLHK: Array
    log_sum_BLH: Array
    """The logarithm of the sum of the exponentials of a query's scores, in float32."""

    def merged_with(self, part: "Part") -> "Part":
        """Returns the result for the keys of both parts, with the output in float32."""
        log_sum_BLH = jnp.logaddexp(self.log_sum_BLH, part.log_sum_BLH)
        weighted = lambda part: part.a_BLHK * jnp.exp(part.log_sum_BLH - log_sum_BLH)[..., None]
        return Part(weighted(self) + weighted(part), log_sum_BLH)


class PartGradients(NamedTuple):
    """The gradients of the queries, and of a part of the keys and values, in the compute dtype."""

    q_BLHK: Array
    k_BJGK: Array
    v_BJGK: Array
    sinks_H: Array | None = None
    bias_HD: Array | None = None


def attend_to_part(kernel: str, options: ScoreOptions, inputs: PartInputs) -> Part:
    """Returns attention to these keys. `kernel` is as in `kernels.attend`. It has no gradient: see
    `differentiate_part`."""
    if kernel == "cudnn":
        return _attend_with_cudnn(options, inputs)
    block_inputs = _block_inputs(inputs)
    a_BLHK, log_sum_NRL = blockwise.attend_to_blocks(options, block_inputs)
    length, groups = inputs.q_BLHK.shape[1], inputs.k_BJGK.shape[2]
    return Part(a_BLHK, blockwise.log_sums_by_token(log_sum_NRL, groups, length))


def differentiate_part(
    kernel: str, options: ScoreOptions, inputs: PartInputs, total: Part, gradient_BLHK: Array
) -> PartGradients:
    """Returns the gradients of the inputs. `total` is the result for the keys of all parts, in the compute dtype."""
    if kernel == "cudnn":
        return _differentiate_with_cudnn(options, inputs, total, gradient_BLHK)
    block_inputs = _block_inputs(inputs)
    log_sum_NRL = blockwise.log_sums_by_group(total.log_sum_BLH, block_inputs)
    gradients = blockwise.differentiate_blocks(options, block_inputs, total.a_BLHK, log_sum_NRL, gradient_BLHK)
    return PartGradients(gradients.q_BLHK, gradients.k_BLGK, gradients.v_BLGK, gradients.sinks_H, gradients.bias_HD)


def _block_inputs(inputs: PartInputs) -> Inputs:
    """Returns the inputs for the blockwise kernel, for which a shared document is a segment."""
    q_BLHK, k_BJGK, v_BJGK, segments_BL, shared, sinks_H, bias_HD, first_query = inputs
    if shared is None:
        return Inputs(q_BLHK, k_BJGK, v_BJGK, segments_BL, segments_BL, sinks_H, bias_HD, first_query)
    in_document_BL = jnp.arange(q_BLHK.shape[1]) < shared.queries_B[:, None]
    in_document_BJ = jnp.arange(k_BJGK.shape[1]) >= shared.first_key_B[:, None]
    # The document is segment 1. The other queries and keys have different segments, so that they do not see each other.
    query_segments_BL = jnp.where(in_document_BL, 1, 2)
    key_segments_BJ = jnp.where(in_document_BJ, 1, 3)
    return Inputs(q_BLHK, k_BJGK, v_BJGK, query_segments_BL, key_segments_BJ, sinks_H, bias_HD, first_query)


# -- with cuDNN


def _attend_with_cudnn(options: ScoreOptions, inputs: PartInputs) -> Part:
    q_BLHK, k_BJGK, v_BJGK, segments_BL, shared, sinks_H, bias_HD, _ = inputs
    assert sinks_H is None and bias_HD is None and options.soft_cap is None
    if segments_BL is not None:
        return Part(*cudnn.attend_packed_with_statistics(options, q_BLHK, k_BJGK, v_BJGK, segments_BL))
    if shared is None:
        a_BLHK, statistics_BHL = cudnn.cudnn_forward(options, q_BLHK, k_BJGK, v_BJGK, None)
        return Part(a_BLHK, statistics_BHL.swapaxes(1, 2))
    ends = _EndOfRows(shared, q_BLHK, k_BJGK)
    a_BLHK, statistics_BHL = cudnn.cudnn_forward(
        options, q_BLHK, ends.to_front(k_BJGK), ends.to_front(v_BJGK), ends.lengths
    )
    in_document_BL = ends.has_queries_BL
    return Part(
        jnp.where(in_document_BL[..., None, None], a_BLHK, 0),
        jnp.where(in_document_BL[..., None], statistics_BHL.swapaxes(1, 2), _UNSEEN),
    )


def _differentiate_with_cudnn(
    options: ScoreOptions, inputs: PartInputs, total: Part, gradient_BLHK: Array
) -> PartGradients:
    q_BLHK, k_BJGK, v_BJGK, segments_BL, shared, *_ = inputs
    a_BLHK, log_sum_BLH = total
    if segments_BL is not None:
        return PartGradients(
            *cudnn.differentiate_packed(
                options, q_BLHK, k_BJGK, v_BJGK, segments_BL, a_BLHK, log_sum_BLH, gradient_BLHK
            )
        )
    if shared is None:
        statistics_BHL = log_sum_BLH.swapaxes(1, 2)
        return PartGradients(
            *cudnn.cudnn_backward(options, q_BLHK, k_BJGK, v_BJGK, statistics_BHL, gradient_BLHK, a_BLHK, None)
        )
    ends = _EndOfRows(shared, q_BLHK, k_BJGK)
    # Queries outside of the document must have exponentials of 0.
    in_document_BL = ends.has_queries_BL
    statistics_BLH = jnp.where(in_document_BL[..., None], log_sum_BLH, cudnn.MASKED_STATISTIC)
    q_gradient_BLHK, k_gradient_BJGK, v_gradient_BJGK = cudnn.cudnn_backward(
        options, q_BLHK, ends.to_front(k_BJGK), ends.to_front(v_BJGK), statistics_BLH.swapaxes(1, 2), gradient_BLHK,
        a_BLHK, ends.lengths,
    )  # fmt: skip
    return PartGradients(
        jnp.where(in_document_BL[..., None, None], q_gradient_BLHK, 0),
        ends.back_from_front(k_gradient_BJGK),
        ends.back_from_front(v_gradient_BJGK),
    )


class _EndOfRows:
    """The shared document of each row, as cuDNN takes it: its queries are the first of the row, and its keys, which are
    the last, are moved to the front. Without a causal mask, the order of keys does not matter.

    cuDNN could also be given the offset of the keys. But JAX does not pass on the offsets of a single document.
    """

    def __init__(self, shared: SharedDocument, q_BLHK: Array, k_BJGK: Array):
        self._first_key_B, self._num_keys = shared.first_key_B, k_BJGK.shape[1]
        keys_B = self._num_keys - shared.first_key_B
        # No row may be empty. Where there is no document, the results for one query and one key are not used.
        self.lengths = RowLengths(jnp.maximum(shared.queries_B, 1), jnp.maximum(keys_B, 1))
        self.has_queries_BL = jnp.arange(q_BLHK.shape[1]) < shared.queries_B[:, None]

    def to_front(self, x_BJGK: Array) -> Array:
        """Returns keys or values with those of the document first."""
        return self._rolled(x_BJGK, -self._first_key_B)

    def back_from_front(self, x_BJGK: Array) -> Array:
        """Returns gradients of keys or values in the order of the row. They are zero outside of the document, where
        cuDNN leaves them uninitialised."""
        in_document_BJ = jnp.arange(self._num_keys) >= self._first_key_B[:, None]
        return jnp.where(in_document_BJ[..., None, None], self._rolled(x_BJGK, self._first_key_B), 0)

    def _rolled(self, x_BJGK: Array, shift_B: Array) -> Array:
        return jax.vmap(lambda x_JGK, shift: jnp.roll(x_JGK, shift, axis=0))(x_BJGK, shift_B)
