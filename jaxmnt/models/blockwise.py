"""Attention of blocks of queries to blocks of keys, forward and backward.

A short row is split into two halves, each of which attends to all its keys at once, which is quickest on a CPU. A long
row needs a loop over blocks of queries and, inside it, a loop over the blocks of keys that some of these queries see.
Attention is causal, or all keys precede all queries (`ScoreOptions.causal`).

The forward pass keeps a running maximum and sum of each query's softmax (Milakov and Gimelshein 2018, arXiv:1805.02867;
Rabe and Staats 2021, arXiv:2112.05682), so that only the scores of one block exist at a time. The backward pass
recomputes the softmax from the logarithm of the sum (Dao et al. 2022, arXiv:2205.14135).

Shapes: B batch, L length, H query heads, G key/value heads, K head width, N = B · G, R = H / G query heads that share a
key/value head, Q queries and J keys of a block. If all keys precede all queries, L stands for either number.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxmnt.parallel.collectives import with_backward

ATTENTION = "attention"
"""Checkpoint name of the results of attention. If they are saved, the backward pass does not recompute attention."""

BLOCK = 512
"""Number of queries, and of keys, in a block of a long row."""

_HIDDEN_SCORE = -1e30
"""Score of a key that a query must not see. It is finite, so that the difference of two such scores is a number."""


class ScoreOptions(NamedTuple):
    """Options that change the scores. All are static. cuDNN supports no soft cap."""

    scale: float
    window: int | None = None
    """Maximum number of keys that a query sees: its own and those before it. None: all of these."""
    soft_cap: float | None = None
    """Scores s become cap · tanh(s / cap) (Gemma 2, arXiv:2408.00118)."""
    causal: bool = True
    """True if queries and keys are those of the same tokens, and a query sees no later key. False if all keys precede
    all queries, so that a query sees every key of its segment. There is no window then."""


class Queries(NamedTuple):
    """Queries, and the facts about their outputs that the backward pass needs."""

    q_NRLK: Array
    gradient_NRLK: Array
    log_sum_NRL: Array
    """Logarithm of the sum of the exponentials of a query's scores, in float32."""
    dot_NRL: Array
    """Dot product of the output and its gradient."""


class Keys(NamedTuple):
    """Keys and values, the segments of queries and keys, and the bias of their distances."""

    k_NLK: Array
    v_NLK: Array
    query_segments_BL: Array | None
    segments_BL: Array | None
    num_keys: int
    """The number of keys without padding."""
    bias: "DistanceBias | None" = None


class DistanceBias(NamedTuple):
    """A number for each head and each distance from a query back to a key, which is added to the score."""

    table_GRD: Array
    """Float32. Keys at least D - 1 tokens before the query have the last entry."""
    first_query: int | Array
    """Index in the row of the first query, minus that of the first key."""

    def distances(self, block: "BlockRange") -> Array:
        """Returns the entry of the table for each query and key of a block, int32 [Q, J]."""
        query_Q1 = (self.first_query + block.first_query + jnp.arange(block.num_queries))[:, None]
        key_J = block.first_key + jnp.arange(block.num_keys)
        return jnp.clip(query_Q1 - key_J, 0, self.table_GRD.shape[-1] - 1)

    def add_to(self, block: "BlockRange", scores_NRQJ: Array) -> Array:
        """Returns the scores of a block with the bias added."""
        bias_GRQJ = jnp.take(self.table_GRD, self.distances(block), axis=-1)
        return (_by_batch(scores_NRQJ, len(bias_GRQJ)) + bias_GRQJ).reshape(scores_NRQJ.shape)

    def gradient(self, block: "BlockRange", gradient_NRQJ: Array) -> Array:
        """Returns the gradient of the table, from that of the scores of a block."""
        sum_GRQJ = jnp.sum(_by_batch(gradient_NRQJ, len(self.table_GRD)), axis=0)
        # All pairs of a diagonal have the same distance. In rows that are one number longer than those that the numbers
        # were written in, each row begins one number later, so a diagonal becomes a column, and a sum over rows leaves
        # one number for each distance.
        queries, keys = block.num_queries, block.num_keys
        padded = jnp.pad(sum_GRQJ, ((0, 0), (0, 0), (0, 0), (queries, 0)))
        flat = jnp.pad(padded.reshape(*padded.shape[:2], -1), ((0, 0), (0, 0), (0, queries)))
        diagonals_GRI = jnp.sum(flat.reshape(*padded.shape[:2], queries, queries + keys + 1), axis=2)
        first_distance = self.first_query + block.first_query - block.first_key + queries
        distance_I = first_distance - jnp.arange(queries + keys + 1)
        entries = jnp.clip(distance_I, 0, self.table_GRD.shape[-1] - 1)
        return jnp.zeros_like(self.table_GRD).at[..., entries].add(diagonals_GRI)


class KeyGradients(NamedTuple):
    """Float32 gradients of all keys and values, and of the table of biases. K comes before L, which saves a transposed
    copy on a CPU."""

    k_NKL: Array
    v_NKL: Array
    bias_GRD: Array | None = None


class BlockRange(NamedTuple):
    """A block of scores: its first query and key, and its numbers of queries and keys."""

    first_query: int | Array
    num_queries: int
    first_key: int | Array
    num_keys: int

    def slice_queries(self, array: Array, axis: int = 2) -> Array:
        return _slice(array, self.first_query, self.num_queries, axis)

    def slice_keys(self, array: Array) -> Array:
        return _slice(array, self.first_key, self.num_keys, 1)


class Softmax(NamedTuple):
    """The softmax over the keys that a block of queries has seen so far, in float32."""

    largest_NRQ: Array
    sum_NRQ: Array
    """Sum of exponentials, relative to the largest score."""
    values_NRQK: Array
    """Sum of values, weighted by these exponentials."""

    @staticmethod
    def initial(q_NRQK: Array, sinks_H: Array | None) -> "Softmax":
        """Returns the softmax over no keys. If there are sinks, it includes the head's sink, which has no value."""
        shape = q_NRQK.shape[:-1]
        values_NRQK = jnp.zeros(q_NRQK.shape, jnp.float32)
        if sinks_H is None:
            return Softmax(jnp.full(shape, _HIDDEN_SCORE, jnp.float32), jnp.zeros(shape, jnp.float32), values_NRQK)
        largest_NRQ = jnp.broadcast_to(_sinks_by_group(sinks_H, q_NRQK), shape)
        return Softmax(largest_NRQ, jnp.ones(shape, jnp.float32), values_NRQK)

    def add(self, options: ScoreOptions, block: BlockRange, q_NRQK: Array, keys: Keys) -> "Softmax":
        """Returns the softmax with the keys of a block added."""
        scores_NRQJ, _ = _scores(options, block, q_NRQK, keys)
        largest_NRQ = jnp.maximum(self.largest_NRQ, jnp.max(scores_NRQJ, axis=-1))
        # `factor_NRQ` corrects the previous sums, which are relative to the previous largest score.
        p_NRQJ = jnp.exp(scores_NRQJ - largest_NRQ[..., None])
        factor_NRQ = jnp.exp(self.largest_NRQ - largest_NRQ)
        return Softmax(
            largest_NRQ,
            self.sum_NRQ * factor_NRQ + jnp.sum(p_NRQJ, axis=-1),
            self.values_NRQK * factor_NRQ[..., None] + _product(p_NRQJ, block.slice_keys(keys.v_NLK), 1),
        )

    def output(self, dtype: jnp.dtype) -> tuple[Array, Array]:
        """Returns the outputs [N, R, Q, K] of the queries and the logarithms of their sums of exponentials."""
        a_NRQK = (self.values_NRQK / self.sum_NRQ[..., None]).astype(dtype)
        return a_NRQK, self.largest_NRQ + jnp.log(self.sum_NRQ)


def _differentiate(
    options: ScoreOptions,
    block: BlockRange,
    block_queries: Queries,
    keys: Keys,
    q_gradient_NRQK: Array,
    key_gradients: KeyGradients,
) -> tuple[Array, KeyGradients]:
    """Returns the gradients of the block's queries and of all keys and values, with the block's contribution added."""
    dtype = block_queries.gradient_NRLK.dtype
    k_NJK, v_NJK = block.slice_keys(keys.k_NLK), block.slice_keys(keys.v_NLK)
    scores_NRQJ, slope_NRQJ = _scores(options, block, block_queries.q_NRLK, keys)
    # The gradient of softmax, as in FlashAttention (arXiv:2205.14135, appendix B.2): p · (dp - dot), times the slope.
    p_NRQJ = jnp.exp(scores_NRQJ - block_queries.log_sum_NRL[..., None])
    p_gradient_NRQJ = _product(block_queries.gradient_NRLK, v_NJK, 2)
    biased_gradient_NRQJ = p_NRQJ * (p_gradient_NRQJ - block_queries.dot_NRL[..., None])
    bias_GRD = key_gradients.bias_GRD
    if keys.bias is not None:
        assert bias_GRD is not None
        bias_GRD += keys.bias.gradient(block, biased_gradient_NRQJ)
    s_gradient_NRQJ = biased_gradient_NRQJ * slope_NRQJ
    p_NRQJ, s_gradient_NRQJ = p_NRQJ.astype(dtype), s_gradient_NRQJ.astype(dtype)
    q_gradient_NRQK += _product(s_gradient_NRQJ, k_NJK, 1)
    k_gradient_NKJ = _sum_over_queries(block_queries.q_NRLK, s_gradient_NRQJ)
    k_NKL = _add_at(key_gradients.k_NKL, block.first_key, k_gradient_NKJ)
    v_gradient_NKJ = _sum_over_queries(block_queries.gradient_NRLK, p_NRQJ)
    v_NKL = _add_at(key_gradients.v_NKL, block.first_key, v_gradient_NKJ)
    return q_gradient_NRQK, KeyGradients(k_NKL, v_NKL, bias_GRD)


def _scores(options: ScoreOptions, block: BlockRange, q_NRQK: Array, keys: Keys) -> tuple[Array, Array | float]:
    """Returns float32 scores [N, R, Q, J] and their slope, which is their derivative with respect to the dot product of
    query and key."""
    scores_NRQJ = _product(q_NRQK, block.slice_keys(keys.k_NLK), 2) * options.scale
    slope: Array | float = options.scale
    if options.soft_cap is not None:
        tanh_NRQJ = jnp.tanh(scores_NRQJ / options.soft_cap)
        scores_NRQJ, slope = options.soft_cap * tanh_NRQJ, slope * (1 - jnp.square(tanh_NRQJ))
    if keys.bias is not None:
        scores_NRQJ = keys.bias.add_to(block, scores_NRQJ)

    visible = _visible(options, block, keys)
    if keys.segments_BL is not None:
        assert keys.query_segments_BL is not None
        query_segments_BQ = block.slice_queries(keys.query_segments_BL, 1)
        key_segments_BJ = block.slice_keys(keys.segments_BL)
        visible_BQJ = visible & (query_segments_BQ[:, :, None] == key_segments_BJ[:, None, :])
        visible = jnp.repeat(visible_BQJ, scores_NRQJ.shape[0] // len(keys.segments_BL), axis=0)[:, None]
    return jnp.where(visible, scores_NRQJ, _HIDDEN_SCORE), slope


def _visible(options: ScoreOptions, block: BlockRange, keys: Keys) -> Array:
    """Returns a bool array [Q, J], or [1, J], that is True where a query may see a key, whatever their segments."""
    key_positions_J = block.first_key + jnp.arange(block.num_keys)
    if not options.causal:
        return (key_positions_J < keys.num_keys)[None]  # hides the padding after the last key
    # A query sees keys at or before its own position, and within the window.
    query_positions_Q1 = (block.first_query + jnp.arange(block.num_queries))[:, None]
    distance_QJ = query_positions_Q1 - key_positions_J
    return distance_QJ >= 0 if options.window is None else (distance_QJ >= 0) & (distance_QJ < options.window)


def _sinks_by_group(sinks_H: Array, like_NRLK: Array) -> Array:
    """Returns the sink of each head as [N, R, 1], in float32."""
    rows, group_size = like_NRLK.shape[:2]
    groups = sinks_H.shape[0] // group_size
    return jnp.tile(sinks_H.astype(jnp.float32).reshape(groups, group_size), (rows // groups, 1))[..., None]


def _by_batch(x_NRQJ: Array, groups: int) -> Array:
    """Returns an array [N, R, Q, J] as [B, G, R, Q, J]."""
    return x_NRQJ.reshape(-1, groups, *x_NRQJ.shape[1:])


def _product(x_NRQA: Array, y_NJK: Array, contracted_dimension: int) -> Array:
    """Returns the float32 product of x and y for each N. The last dimension of x, A, is contracted with y's dimension
    `contracted_dimension`: 1, if A is J, or 2, if A is K."""
    rows, group_size, queries, size = x_NRQA.shape
    x = x_NRQA.astype(y_NJK.dtype).reshape(rows, group_size * queries, size)
    dimensions = (((2,), (contracted_dimension,)), ((0,), (0,)))
    product = jax.lax.dot_general(x, y_NJK, dimensions, preferred_element_type=jnp.float32)
    return product.reshape(rows, group_size, queries, -1)


def _sum_over_queries(x_NRQK: Array, y_NRQJ: Array) -> Array:
    """Returns the float32 product [N, K, J] of x and y, summed over R and Q. K comes before J, which saves a transposed
    copy on a CPU."""
    flat = lambda x: x.reshape(x.shape[0], -1, x.shape[-1])
    return jax.lax.dot_general(
        flat(x_NRQK), flat(y_NRQJ), (((1,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32
    )


def _add_at(sums_NKL: Array, first_key: Any, new_NKJ: Array) -> Array:
    """Returns the per-key sums, with those of the block of keys that begins at `first_key` added."""
    size = new_NKJ.shape[-1]
    if size == sums_NKL.shape[-1]:
        return sums_NKL + new_NKJ
    old_NKJ = jax.lax.dynamic_slice_in_dim(sums_NKL, first_key, size, axis=2)
    return jax.lax.dynamic_update_slice_in_dim(sums_NKL, old_NKJ + new_NKJ, first_key, axis=2)


def _slice(array: Array, start: Any, size: int, axis: int) -> Array:
    """Returns a slice of the array, which is static if `start` is an int."""
    if isinstance(start, int):
        return jax.lax.slice_in_dim(array, start, start + size, axis=axis)
    return jax.lax.dynamic_slice_in_dim(array, start, size, axis=axis)


# -- rows


class Inputs(NamedTuple):
    """The inputs of attention. Only queries, keys, values, sinks and biases have gradients."""

    q_BLHK: Array
    k_BLGK: Array
    v_BLGK: Array
    query_segments_BL: Array | None
    """A query sees only keys of its own segment; None if there are no segments."""
    key_segments_BL: Array | None
    sinks_H: Array | None = None
    bias_HD: Array | None = None
    """A number that is added to the score of a head's query and key, by their distance (see `kernels.attend`)."""
    first_query: int | Array = 0
    """Index in the row of the first query, minus that of the first key. Only biases need it."""

    @property
    def are_long(self) -> bool:
        """True if attention needs loops over blocks."""
        return max(self.q_BLHK.shape[1], self.k_BLGK.shape[1]) > 2 * BLOCK


def attend_to_blocks(options: ScoreOptions, inputs: Inputs) -> tuple[Array, Array]:
    """Returns attention [B, L, H, K], and the logarithms of the sums of exponentials as float32 [N, R, L], where L is
    padded if the rows are long. This function has no gradient: see `differentiate_blocks`."""
    length, groups = inputs.q_BLHK.shape[1], inputs.k_BLGK.shape[2]
    q_NRLK = _by_group(inputs.q_BLHK, groups, padded=inputs.are_long)
    forward = _long_forward if inputs.are_long else _short_forward
    a_NRLK, log_sum_NRL = forward(options, q_NRLK, _keys_by_group(inputs), inputs.sinks_H, length)
    return _by_head(a_NRLK, groups, length), log_sum_NRL


def differentiate_blocks(
    options: ScoreOptions, inputs: Inputs, a_BLHK: Array, log_sum_NRL: Array, gradient_BLHK: Array
) -> Inputs:
    """Returns the gradients of the inputs. If other devices have further keys, the output `a_BLHK` and the logarithms
    of the sums must be those of all keys."""
    batch, length, heads, _ = gradient_BLHK.shape
    keys, groups = inputs.k_BLGK.shape[1], inputs.k_BLGK.shape[2]
    dtype = gradient_BLHK.dtype

    # The dot product of output and gradient is the same for all keys of a query, so it is computed once.
    dot_BLH1 = jnp.sum(gradient_BLHK.astype(jnp.float32) * a_BLHK, axis=-1, keepdims=True)
    by_group = lambda x: _by_group(x, groups, padded=inputs.are_long)
    dot_NRL = by_group(dot_BLH1)[..., 0]
    queries = Queries(by_group(inputs.q_BLHK), by_group(gradient_BLHK), log_sum_NRL, dot_NRL)
    backward = _long_backward if inputs.are_long else _short_backward
    q_gradient_NRLK, key_gradients = backward(options, queries, _keys_by_group(inputs), length)

    by_kv_head = lambda x_NKL: _by_head(x_NKL.swapaxes(1, 2)[:, None].astype(dtype), groups, keys)
    sinks_gradient_H = None
    if inputs.sinks_H is not None:
        # A sink is a key whose value is zero.
        p_NRL = jnp.exp(_sinks_by_group(inputs.sinks_H, queries.q_NRLK) - log_sum_NRL)
        per_head_BH = -jnp.sum(p_NRL * dot_NRL, axis=-1).reshape(batch, heads)
        sinks_gradient_H = jnp.sum(per_head_BH, axis=0).astype(inputs.sinks_H.dtype)
    gradients = (
        _by_head(q_gradient_NRLK, groups, length),
        by_kv_head(key_gradients.k_NKL),
        by_kv_head(key_gradients.v_NKL),
    )
    bias_gradient_HD = None
    if inputs.bias_HD is not None:
        assert key_gradients.bias_GRD is not None
        bias_gradient_HD = key_gradients.bias_GRD.reshape(inputs.bias_HD.shape).astype(inputs.bias_HD.dtype)
    # JAX takes None as the gradient of an integer, which the type of `first_query` does not allow.
    return Inputs(*gradients, None, None, sinks_gradient_H, bias_gradient_HD, None)  # type: ignore[arg-type]


def _backward(options: ScoreOptions, saved: tuple[Inputs, Array, Array], gradient_BLHK: Array) -> tuple[Inputs]:
    """Returns the gradients of the inputs."""
    return (differentiate_blocks(options, *saved, gradient_BLHK),)


@with_backward(_backward, static=1)
def attend_blockwise(options: ScoreOptions, inputs: Inputs) -> tuple[Array, tuple[Inputs, Array, Array]]:
    """Returns causal attention [B, L, H, K]. The output and the logarithms of the sums have the checkpoint name
    `attention`. If they are saved, the backward pass does not recompute attention."""
    # The name is for the caller's layout, so that later layers and this backward pass save the same array.
    a_BLHK, log_sum_NRL = (checkpoint_name(array, ATTENTION) for array in attend_to_blocks(options, inputs))
    return a_BLHK, (inputs, a_BLHK, log_sum_NRL)


def log_sums_by_token(log_sum_NRL: Array, groups: int, length: int) -> Array:
    """Returns the logarithms of the sums as [B, L, H], without padding."""
    return _by_head(log_sum_NRL[..., None], groups, length)[..., 0]


def log_sums_by_group(log_sum_BLH: Array, inputs: Inputs) -> Array:
    """Returns the logarithms of the sums in the form that `differentiate_blocks` takes with these inputs."""
    return _by_group(log_sum_BLH[..., None], inputs.k_BLGK.shape[2], padded=inputs.are_long)[..., 0]


def _keys_by_group(inputs: Inputs) -> Keys:
    """Returns keys and values by group, and the segments, all padded with zeros if the rows are long."""
    groups, padded = inputs.k_BLGK.shape[2], inputs.are_long
    k_NLK = _by_group(inputs.k_BLGK, groups, padded=padded)[:, 0]
    v_NLK = _by_group(inputs.v_BLGK, groups, padded=padded)[:, 0]
    pad = lambda segments_BL: None if segments_BL is None else _pad(segments_BL, padded=padded)
    bias = None
    if inputs.bias_HD is not None:
        table_GRD = inputs.bias_HD.astype(jnp.float32).reshape(groups, -1, inputs.bias_HD.shape[-1])
        bias = DistanceBias(table_GRD, inputs.first_query)
    segments = pad(inputs.query_segments_BL), pad(inputs.key_segments_BL)
    return Keys(k_NLK, v_NLK, *segments, inputs.k_BLGK.shape[1], bias)


def _by_group(x_BLHK: Array, groups: int, *, padded: bool) -> Array:
    """Returns x as [N, R, L, K]. If `padded`, zeros complete the last block."""
    x_BLHK = _pad(x_BLHK, padded=padded)
    batch, length, heads, width = x_BLHK.shape
    x_BLGRK = x_BLHK.reshape(batch, length, groups, heads // groups, width)
    return x_BLGRK.transpose(0, 2, 3, 1, 4).reshape(batch * groups, heads // groups, length, width)


def _by_head(x_NRLK: Array, groups: int, length: int) -> Array:
    """Returns x as [B, L, H, K], without padding."""
    rows, group_size, padded, width = x_NRLK.shape
    x_BGRLK = x_NRLK.reshape(rows // groups, groups, group_size, padded, width)
    return x_BGRLK.transpose(0, 3, 1, 2, 4).reshape(rows // groups, padded, -1, width)[:, :length]


def _pad(x_BL: Array, *, padded: bool) -> Array:
    """Returns rows with zeros up to a whole number of blocks if `padded`. No query sees the padding (`_visible`)."""
    length = x_BL.shape[1]
    if not padded or length % BLOCK == 0:
        return x_BL
    return jnp.pad(x_BL, [(0, 0), (0, -length % BLOCK), *[(0, 0)] * (x_BL.ndim - 2)])


# -- short rows


def _short_forward(options: ScoreOptions, q_NRLK: Array, keys: Keys, sinks_H: Array | None, length: int) -> list[Array]:
    """Returns the outputs of the queries and the logarithms of their sums of exponentials."""
    outputs = []
    for block in _short_blocks(options, length, keys.num_keys):
        q_NRQK = block.slice_queries(q_NRLK)
        softmax = Softmax.initial(q_NRQK, sinks_H).add(options, block, q_NRQK, keys)
        outputs.append(softmax.output(q_NRQK.dtype))
    return [jnp.concatenate(halves, axis=2) for halves in zip(*outputs, strict=True)]


def _short_backward(options: ScoreOptions, queries: Queries, keys: Keys, length: int) -> tuple[Array, KeyGradients]:
    """Returns the gradients of the queries in the dtype of their outputs, and of keys and values in float32."""
    key_gradients = _zero_key_gradients(keys)
    q_gradients = []
    for block in _short_blocks(options, length, keys.num_keys):
        block_queries = Queries(*map(block.slice_queries, queries))
        zeros_NRQK = jnp.zeros(block_queries.q_NRLK.shape, jnp.float32)
        q_gradient_NRQK, key_gradients = _differentiate(options, block, block_queries, keys, zeros_NRQK, key_gradients)
        q_gradients.append(q_gradient_NRQK.astype(block_queries.gradient_NRLK.dtype))
    return jnp.concatenate(q_gradients, axis=2), key_gradients


def _short_blocks(options: ScoreOptions, length: int, keys: int) -> list[BlockRange]:
    """Returns the blocks of a short row, each with the keys that its queries may see. They are two halves if attention
    is causal and the row has at least 64 tokens."""
    if not options.causal:
        return [BlockRange(0, length, 0, keys)]
    middle = -(-length // 2)
    ranges = [(0, middle), (middle, length)] if length >= 64 else [(0, length)]
    blocks = []
    for first_query, end in ranges:
        first_key = 0 if options.window is None else max(0, first_query - options.window + 1)
        blocks.append(BlockRange(first_query, end - first_query, first_key, end - first_key))
    return blocks


# -- long rows


def _long_forward(options: ScoreOptions, q_NRLK: Array, keys: Keys, sinks_H: Array | None, length: int) -> list[Array]:
    """Does the same as `_short_forward` for arrays that are padded to whole blocks. `length` is without padding."""

    def attend_queries(_: None, index: Array) -> tuple[None, tuple[Array, Array]]:
        block = BlockRange(index * BLOCK, BLOCK, 0, BLOCK)
        q_NRQK = block.slice_queries(q_NRLK)
        add = lambda number, softmax: softmax.add(options, block._replace(first_key=number * BLOCK), q_NRQK, keys)
        initial = Softmax.initial(q_NRQK, sinks_H)
        softmax = _fold_over_keys(options, keys.num_keys, index, add, initial)
        return None, softmax.output(q_NRQK.dtype)

    _, outputs = jax.lax.scan(attend_queries, None, jnp.arange(-(-length // BLOCK)))
    return [_join_blocks(x) for x in outputs]


def _long_backward(options: ScoreOptions, queries: Queries, keys: Keys, length: int) -> tuple[Array, KeyGradients]:
    """Does the same as `_short_backward` for arrays that are padded to whole blocks. `length` is without padding."""

    def differentiate_queries(key_gradients: KeyGradients, index: Array) -> tuple[KeyGradients, Array]:
        block = BlockRange(index * BLOCK, BLOCK, 0, BLOCK)
        block_queries = Queries(*map(block.slice_queries, queries))

        def add(number: Array, gradients: tuple[Array, KeyGradients]) -> tuple[Array, KeyGradients]:
            return _differentiate(options, block._replace(first_key=number * BLOCK), block_queries, keys, *gradients)

        initial = jnp.zeros(block_queries.q_NRLK.shape, jnp.float32), key_gradients
        q_gradient_NRQK, key_gradients = _fold_over_keys(options, keys.num_keys, index, add, initial)
        return key_gradients, q_gradient_NRQK.astype(block_queries.gradient_NRLK.dtype)

    key_gradients, q_gradients = jax.lax.scan(
        differentiate_queries, _zero_key_gradients(keys), jnp.arange(-(-length // BLOCK))
    )
    return _join_blocks(q_gradients), key_gradients


def _zero_key_gradients(keys: Keys) -> KeyGradients:
    """Returns gradients of zero for all keys and values."""
    rows, length, width = keys.k_NLK.shape
    zeros_NKL = jnp.zeros((rows, width, length), jnp.float32)
    return KeyGradients(zeros_NKL, zeros_NKL, None if keys.bias is None else jnp.zeros_like(keys.bias.table_GRD))


def _fold_over_keys(
    options: ScoreOptions, keys: int, index: Array, add: Callable[[Array, Any], Any], initial: Any
) -> Any:
    """Calls `add(number, result)` for the number of each block of keys that some query of block `index` sees, with the
    result of the previous call, or at first with `initial`. Returns the last result."""
    first, stop, mean = _key_blocks(options, keys, index)
    with jax.named_scope(f"about_{mean:.1f}_rounds"):  # the planner reads the mean number of iterations from this name
        return jax.lax.fori_loop(first, stop, add, initial)


def _key_blocks(options: ScoreOptions, keys: int, index: Array) -> tuple[int | Array, int | Array, float]:
    """Returns the first block of keys that some query of block `index` sees, the block after the last such block, and
    the mean number of such blocks over all blocks of queries."""
    if not options.causal:
        blocks = -(-keys // BLOCK)
        return 0, blocks, blocks
    window = options.window
    first = 0 if window is None else jnp.maximum(0, index * BLOCK - window + 1) // BLOCK
    reach = keys if window is None else min(keys, window + BLOCK)
    return first, index + 1, (reach - reach**2 / (2 * keys)) / BLOCK + 0.5


def _join_blocks(x: Array) -> Array:
    """Concatenates the outputs of blocks into [N, R, L, …]."""
    return jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1, *x.shape[4:])
