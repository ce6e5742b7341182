"""A cache of the keys and values of earlier tokens, for generating one token after another.

A layer is called as in training. Its attention goes through `LayerContext.attend`, which calls this cache. The cache
stores each token at its position, so rows of a batch may have different lengths. Entries beyond the newest token of a
row are overwritten before any query sees them.

Shapes: B rows, Q new tokens, T tokens that the cache has room for, H query heads, G key/value heads, K head width,
R = H / G.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxmnt.models.kernels import Kernel, attend


class KeysValues(NamedTuple):
    """The keys and values of one call of attention, by position."""

    k_BTGK: Array
    v_BTGK: Array


class Cache:
    """The cache of one layer while the layer is traced. Afterwards `entries` has a `KeysValues` for each call of
    attention."""

    def __init__(self, capacity: int, positions_BQ: Array, previous: list[KeysValues] | None):
        """`previous` has the `entries` of the layer's last call. If None, the tokens are the prompts, from position 0
        on."""
        self._capacity = capacity
        self._positions_BQ = positions_BQ
        self._previous = previous
        self.entries: list[KeysValues] = []

    def attend(
        self,
        q_BQHK: Array,
        k_BQGK: Array,
        v_BQGK: Array,
        kernel: Kernel,
        *,
        window: int | None = None,
        soft_cap: float | None = None,
        scale: float | None = None,
        sinks_H: Array | None = None,
        bias_HD: Array | None = None,
    ) -> Array:
        """Does the same as `kernels.attend`, but attends to earlier tokens as well. Each row is one document."""
        if self._previous is None:
            padding = ((0, 0), (0, self._capacity - k_BQGK.shape[1]), (0, 0), (0, 0))
            self.entries.append(KeysValues(jnp.pad(k_BQGK, padding), jnp.pad(v_BQGK, padding)))
            return attend(
                q_BQHK, k_BQGK, v_BQGK, None, kernel, window=window, soft_cap=soft_cap, scale=scale, sinks_H=sinks_H,
                bias_HD=bias_HD,
            )  # fmt: skip
        entry = self._write(self._previous[len(self.entries)], k_BQGK, v_BQGK)
        self.entries.append(entry)
        groups = entry.k_BTGK.shape[2]
        q_BQGRK = q_BQHK.reshape(*q_BQHK.shape[:2], groups, -1, q_BQHK.shape[-1])
        scores_BGRQT = jnp.einsum("bqgrk,btgk->bgrqt", q_BQGRK, entry.k_BTGK, preferred_element_type=jnp.float32)
        scores_BGRQT *= q_BQHK.shape[-1] ** -0.5 if scale is None else scale
        if soft_cap is not None:
            scores_BGRQT = soft_cap * jnp.tanh(scores_BGRQT / soft_cap)
        # The causal mask also hides positions that no token has been written to.
        distance_BQT = self._positions_BQ[:, :, None] - jnp.arange(self._capacity)
        if bias_HD is not None:
            entries_BQT = jnp.clip(distance_BQT, 0, bias_HD.shape[-1] - 1)
            bias_HBQT = jnp.take(bias_HD.astype(jnp.float32), entries_BQT, axis=-1)
            scores_BGRQT += jnp.moveaxis(bias_HBQT, 0, 1).reshape(scores_BGRQT.shape)
        visible_BQT = (distance_BQT >= 0) & (distance_BQT < (window or self._capacity))
        scores_BGRQT = jnp.where(visible_BQT[:, None, None], scores_BGRQT, -jnp.inf)
        sinks = None if sinks_H is None else sinks_H.astype(jnp.float32).reshape(groups, -1, 1, 1)
        weights_BGRQT = _softmax(scores_BGRQT, sinks).astype(q_BQHK.dtype)
        a_BQGRK = jnp.einsum("bgrqt,btgk->bqgrk", weights_BGRQT, entry.v_BTGK, preferred_element_type=jnp.float32)
        return a_BQGRK.reshape(q_BQHK.shape).astype(q_BQHK.dtype)

    def _write(self, previous: KeysValues, k_BQGK: Array, v_BQGK: Array) -> KeysValues:
        """Returns the previous keys and values with the new ones written at their positions."""
        rows_B1 = jnp.arange(k_BQGK.shape[0])[:, None]
        write = lambda old, new: old.at[rows_B1, self._positions_BQ].set(new, mode="drop")
        return KeysValues(write(previous.k_BTGK, k_BQGK), write(previous.v_BTGK, v_BQGK))


def _softmax(scores_BGRQT: Array, sinks_GR11: Array | None) -> Array:
    """Returns the softmax over the keys and, if there are sinks, over the head's sink, which has no value."""
    if sinks_GR11 is None:
        return jax.nn.softmax(scores_BGRQT, axis=-1)
    largest = jnp.maximum(jnp.max(scores_BGRQT, axis=-1, keepdims=True), sinks_GR11)
    exponentials = jnp.exp(scores_BGRQT - largest)
    return exponentials / (jnp.sum(exponentials, axis=-1, keepdims=True) + jnp.exp(sinks_GR11 - largest))
