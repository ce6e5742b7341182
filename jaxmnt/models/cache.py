"""Attention with the keys and values of earlier tokens kept, for generating one token after another.

A layer is called as in training; what it attends to goes through `LayerContext.attend`, which hands it to this cache.
Tokens of a row stand at the place that their position says, so rows of a batch may be of different lengths: what is
behind the newest token of a row is overwritten before it can be seen.

Shapes: B rows, P tokens of the prompt, Q new tokens, T places of the cache, H query heads, G key/value heads, K head
width, R = H / G.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxmnt.models.kernels import Kernel, attend


class KeysValues(NamedTuple):
    """Of one call of attention, by place."""

    k_BTGK: Array
    v_BTGK: Array


class Cache:
    """What one layer keeps, while it is traced: `kept` has it afterwards, a `KeysValues` for each call of attention."""

    def __init__(self, places: int, positions_BQ: Array, before: list[KeysValues] | None):
        """`before` is what the layer kept when it was called last; None: these are the prompts, from position 0."""
        self._places, self._positions_BQ, self._before = places, positions_BQ, before
        self.kept: list[KeysValues] = []

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
    ) -> Array:
        """As `kernels.attend`, to the tokens before as well. A row is one document."""
        if self._before is None:
            behind = ((0, 0), (0, self._places - k_BQGK.shape[1]), (0, 0), (0, 0))
            self.kept.append(KeysValues(jnp.pad(k_BQGK, behind), jnp.pad(v_BQGK, behind)))
            return attend(
                q_BQHK, k_BQGK, v_BQGK, None, kernel, window=window, soft_cap=soft_cap, scale=scale, sinks_H=sinks_H
            )
        rows_B1 = jnp.arange(q_BQHK.shape[0])[:, None]
        put = lambda kept, new: kept.at[rows_B1, self._positions_BQ].set(new, mode="drop")
        kept = KeysValues(*map(put, self._before[len(self.kept)], (k_BQGK, v_BQGK)))
        self.kept.append(kept)
        groups = kept.k_BTGK.shape[2]
        q_BQGRK = q_BQHK.reshape(*q_BQHK.shape[:2], groups, -1, q_BQHK.shape[-1])
        scores_BGRQT = jnp.einsum("bqgrk,btgk->bgrqt", q_BQGRK, kept.k_BTGK, preferred_element_type=jnp.float32)
        scores_BGRQT *= q_BQHK.shape[-1] ** -0.5 if scale is None else scale
        if soft_cap is not None:
            scores_BGRQT = soft_cap * jnp.tanh(scores_BGRQT / soft_cap)
        ahead_BQT = self._positions_BQ[:, :, None] - jnp.arange(self._places)
        seen_BQT = (ahead_BQT >= 0) & (ahead_BQT < (window or self._places))
        scores_BGRQT = jnp.where(seen_BQT[:, None, None], scores_BGRQT, -jnp.inf)
        sinks = None if sinks_H is None else sinks_H.astype(jnp.float32).reshape(groups, -1, 1, 1)
        shares_BGRQT = _softmax(scores_BGRQT, sinks).astype(q_BQHK.dtype)
        a_BQGRK = jnp.einsum("bgrqt,btgk->bqgrk", shares_BGRQT, kept.v_BTGK, preferred_element_type=jnp.float32)
        return a_BQGRK.reshape(q_BQHK.shape).astype(q_BQHK.dtype)


def _softmax(scores_BGRQT: Array, sinks_GR11: Array | None) -> Array:
    """Over the keys, and over a sink that has no value."""
    if sinks_GR11 is None:
        return jax.nn.softmax(scores_BGRQT, axis=-1)
    largest = jnp.maximum(jnp.max(scores_BGRQT, axis=-1, keepdims=True), sinks_GR11)
    exponentials = jnp.exp(scores_BGRQT - largest)
    return exponentials / (jnp.sum(exponentials, axis=-1, keepdims=True) + jnp.exp(sinks_GR11 - largest))
