"""Attention of one block of queries to one block of keys, forward and backward.

Forward keeps a running maximum and sum of each query's softmax (Milakov and Gimelshein 2018, arXiv:1805.02867; Rabe and
Staats 2021, arXiv:2112.05682), so that the scores of one block exist at a time. Backward computes them again from the
logarithm of the sum (Dao et al. 2022, arXiv:2205.14135).

Shapes: B batch, L length, H query heads, G key/value heads, K head width, N = B · G, R = H / G queries that share a
key, Q queries and J keys of a block.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

_HIDDEN = -1e30
"""The score of a key that a query may not see. Finite: the difference of two of them must be a number."""


class Scores(NamedTuple):
    """What is done to the scores besides the causal mask. All static."""

    scale: float
    window: int | None = None
    """A query sees itself and the keys before it, so many in all."""
    soft_cap: float | None = None
    """Scores s become cap · tanh(s / cap) (Gemma 2, arXiv:2408.00118)."""


class Queries(NamedTuple):
    """Queries, and what backward knows of their outputs."""

    q_NRLK: jax.Array
    gradient_NRLK: jax.Array
    log_sum_NRL: jax.Array
    """The logarithm of the sum of the exponentials of a query's scores, in float32."""
    dot_NRL: jax.Array
    """The product of the output and its gradient."""


class Keys(NamedTuple):
    """Keys and values, and the segments of their rows."""

    k_NLK: jax.Array
    v_NLK: jax.Array
    segments_BL: jax.Array | None


class Sums(NamedTuple):
    """Gradients in float32: of a block's queries, and of all keys and values. K before L: so a CPU needs no transposed
    copy."""

    q_NRQK: jax.Array
    k_NKL: jax.Array
    v_NKL: jax.Array


class BlockRange(NamedTuple):
    """Which scores a block has: its first query and key, and how many there are of each."""

    query: int | jax.Array
    queries: int
    key: int | jax.Array
    keys: int

    def of_queries(self, array: jax.Array, axis: int = 2) -> jax.Array:
        return _cut(array, self.query, self.queries, axis)

    def of_keys(self, array: jax.Array, axis: int = 1) -> jax.Array:
        return _cut(array, self.key, self.keys, axis)


class Softmax(NamedTuple):
    """Of the keys that a block of queries has seen so far, in float32."""

    largest_NRQ: jax.Array
    sum_NRQ: jax.Array
    """Of exponentials, relative to the largest score."""
    values_NRQK: jax.Array
    """The sum of values weighted by them."""

    @staticmethod
    def before(q_NRQK: jax.Array, sinks_H: jax.Array | None) -> "Softmax":
        """Returns that before the first key; a sink has been seen, and has no value."""
        shape, values_NRQK = q_NRQK.shape[:-1], jnp.zeros(q_NRQK.shape, jnp.float32)
        if sinks_H is None:
            return Softmax(jnp.full(shape, _HIDDEN, jnp.float32), jnp.zeros(shape, jnp.float32), values_NRQK)
        largest_NRQ = jnp.broadcast_to(of_heads(sinks_H, q_NRQK), shape)
        return Softmax(largest_NRQ, jnp.ones(shape, jnp.float32), values_NRQK)

    def add(self, scores_NRQJ: jax.Array, v_NJK: jax.Array) -> "Softmax":
        """With these keys."""
        largest_NRQ = jnp.maximum(self.largest_NRQ, jnp.max(scores_NRQJ, axis=-1))
        p_NRQJ = jnp.exp(scores_NRQJ - largest_NRQ[..., None])
        factor_NRQ = jnp.exp(self.largest_NRQ - largest_NRQ)
        return Softmax(
            largest_NRQ,
            self.sum_NRQ * factor_NRQ + jnp.sum(p_NRQJ, axis=-1),
            self.values_NRQK * factor_NRQ[..., None] + _product(p_NRQJ, v_NJK, 1),
        )

    def output(self, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
        """Returns the outputs [N, R, Q, K] of the queries, and the logarithms of their sums."""
        a_NRQK = (self.values_NRQK / self.sum_NRQ[..., None]).astype(dtype)
        return a_NRQK, self.largest_NRQ + jnp.log(self.sum_NRQ)


def attend_block(options: Scores, block: BlockRange, q_NRQK: jax.Array, keys: Keys, seen: Softmax) -> Softmax:
    """Adds the block's keys to what its queries have seen."""
    scores_NRQJ, _ = _scores(options, block, q_NRQK, keys)
    return seen.add(scores_NRQJ, block.of_keys(keys.v_NLK))


def differentiate_block(options: Scores, block: BlockRange, own: Queries, keys: Keys, sums: Sums) -> Sums:
    """Adds the block's share to the gradients; `own` are its queries."""
    dtype = own.gradient_NRLK.dtype
    k_NJK, v_NJK = block.of_keys(keys.k_NLK), block.of_keys(keys.v_NLK)
    scores_NRQJ, slope_NRQJ = _scores(options, block, own.q_NRLK, keys)
    p_NRQJ = jnp.exp(scores_NRQJ - own.log_sum_NRL[..., None])
    s_gradient_NRQJ = p_NRQJ * (_product(own.gradient_NRLK, v_NJK, 2) - own.dot_NRL[..., None]) * slope_NRQJ
    p_NRQJ, s_gradient_NRQJ = p_NRQJ.astype(dtype), s_gradient_NRQJ.astype(dtype)
    return Sums(
        sums.q_NRQK + _product(s_gradient_NRQJ, k_NJK, 1),
        _added_at(sums.k_NKL, block.key, _summed_over_queries(own.q_NRLK, s_gradient_NRQJ)),
        _added_at(sums.v_NKL, block.key, _summed_over_queries(own.gradient_NRLK, p_NRQJ)),
    )


def no_gradients(q_NRQK: jax.Array, keys: Keys) -> Sums:
    """Returns sums of nothing."""
    rows, length, width = keys.k_NLK.shape
    nothing_NKL = jnp.zeros((rows, width, length), jnp.float32)
    return Sums(jnp.zeros(q_NRQK.shape, jnp.float32), nothing_NKL, nothing_NKL)


def _scores(options: Scores, block: BlockRange, q_NRQK: jax.Array, keys: Keys) -> tuple[jax.Array, jax.Array | float]:
    """Returns float32 scores [N, R, Q, J] and their slope: the derivative by the product of query and key."""
    scores_NRQJ = _product(q_NRQK, block.of_keys(keys.k_NLK), 2) * options.scale
    slope: jax.Array | float = options.scale
    if options.soft_cap is not None:
        bent_NRQJ = jnp.tanh(scores_NRQJ / options.soft_cap)
        scores_NRQJ, slope = options.soft_cap * bent_NRQJ, slope * (1 - jnp.square(bent_NRQJ))
    ahead_QJ = (block.query + jnp.arange(block.queries))[:, None] - (block.key + jnp.arange(block.keys))
    visible = ahead_QJ >= 0 if options.window is None else (ahead_QJ >= 0) & (ahead_QJ < options.window)
    if keys.segments_BL is not None:
        own_BQ, other_BJ = block.of_queries(keys.segments_BL, 1), block.of_keys(keys.segments_BL)
        visible_BQJ = visible & (own_BQ[:, :, None] == other_BJ[:, None, :])
        visible = jnp.repeat(visible_BQJ, scores_NRQJ.shape[0] // len(keys.segments_BL), axis=0)[:, None]
    return jnp.where(visible, scores_NRQJ, _HIDDEN), slope


def of_heads(sinks_H: jax.Array, like_NRLK: jax.Array) -> jax.Array:
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
