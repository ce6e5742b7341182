"""Causal grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245) with rotary positions.

Shapes: B batch, L length, S a device's piece of the length, D model, H query heads, G key/value heads, K head width; H
and G are a device's own where the `model` axis splits them.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxmnt.config.model import Model
from jaxmnt.models.contract import LayerContext
from jaxmnt.models.layers import RMSNorm, weight
from jaxmnt.models.projections import project_gathered, project_scattered
from jaxmnt.models.rotary import Angles, rotate
from jaxmnt.parallel.collectives import index_along
from jaxmnt.parallel.sharding import Placement


class Attention(nnx.Module):
    """Queries, keys and values from x, causal softmax attention, and the output projection."""

    query_norm: Any
    key_norm: Any

    def __init__(self, config: Model, output_std: float, rngs: nnx.Rngs):
        hidden, heads, kv_heads, width = (
            config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim,
        )  # fmt: skip
        assert kv_heads and width
        self.heads, self.kv_heads = heads, kv_heads
        self.query = weight(rngs, (hidden, heads, width), ("embed", "heads", "head_dim"))
        self.key = weight(rngs, (hidden, kv_heads, width), ("kv_embed", "kv_heads", "head_dim"))
        self.value = weight(rngs, (hidden, kv_heads, width), ("kv_embed", "kv_heads", "head_dim"))
        self.output = weight(rngs, (heads, width, hidden), ("heads", "head_dim", "embed"), output_std)
        if self.head_norm_offset is not None:
            norm = functools.partial(RMSNorm, width, config.norm_epsilon, offset=self.head_norm_offset)
            self.query_norm, self.key_norm = norm(), norm()

    def __call__(self, x_BSD: Array, context: LayerContext) -> Array:
        placement = context.placement
        shared = KVHeads(self.heads, self.kv_heads, placement)
        weights = (self.query[...], self.key[...], self.value[...])
        own = (None, None if self.all_keys else shared.taken, shared.taken)
        q_BLHK, k_BLGK, v_BLGK = project_gathered(x_BSD, weights, placement, own)
        q_BLHK, k_BLGK, v_BLGK = self.adjusted(q_BLHK, k_BLGK, v_BLGK, shared)
        angles = self.angles(context)
        if angles is not None:
            q_BLHK, k_BLGK = rotate(q_BLHK, angles), rotate(k_BLGK, angles)
        q_BLHK, k_BLGK = checkpoint_name(q_BLHK, "query"), checkpoint_name(k_BLGK, "key")
        v_BLGK = checkpoint_name(v_BLGK, "value")
        k_BLGK, v_BLGK = shared.for_queries(k_BLGK), shared.for_queries(v_BLGK)
        a_BLHK = context.attend(q_BLHK, k_BLGK, v_BLGK, **self.options())
        return checkpoint_name(project_scattered(a_BLHK, self.output[...], placement, "heads"), "attention_output")

    # What families vary.

    head_norm_offset: float | None = None
    """That of an RMSNorm on each head's query and key, whose scales all heads share; None: there is none."""
    window: int | None = None
    """How many tokens a query sees, itself among them; None: all before it."""
    all_keys = False
    """Whether `adjusted` is given the keys of all heads whose weights are at hand."""

    def adjusted(self, q_BLHK: Array, k_BLGK: Array, v_BLGK: Array, shared: "KVHeads") -> tuple[Array, Array, Array]:
        """Queries, keys and values of this device's heads, before they are rotated, from the projections of x."""
        if self.head_norm_offset is None:
            return q_BLHK, k_BLGK, v_BLGK
        return self.query_norm(q_BLHK), self.key_norm(k_BLGK), v_BLGK

    def angles(self, context: LayerContext) -> Angles | None:
        """The rotary tables for queries and keys; None: they are not rotated."""
        return context.rotary[""]

    def options(self) -> dict[str, Any]:
        """Returns options of `kernels.attend`."""
        return {"window": self.window}


class KVHeads:
    """Which key/value heads a device computes, where they do not divide among the devices of `model`.

    Then the weights of all are at hand (see `parallel.sharding.build_placement`), and each device takes those that its
    query heads need: as few as it can.
    """

    def __init__(self, heads: int, kv_heads: int, placement: Placement):
        self.placement = placement
        num_shards = placement.num_shards("heads")
        self._split = num_shards > 1 and placement.num_shards("kv_heads") == 1
        if not self._split:
            return
        local = heads // num_shards
        needed = np.arange(heads).reshape(num_shards, local) // (heads // kv_heads)
        first, last = needed[:, :1], needed[:, -1:]
        most = int(np.max(last - first)) + 1
        self._own = np.minimum(first + np.arange(most), last)
        self._of_query = needed - first
        even = np.arange(local) // max(1, local // most)
        self._grouped = local % most == 0 and bool((self._of_query == even).all())

    @property
    def taken(self) -> Array | None:
        """Which heads this device computes, of those whose weights are at hand; None: all."""
        return jnp.asarray(self._own)[index_along("heads", self.placement)] if self._split else None

    def own(self, array: Array, axis: int) -> Array:
        """What belongs to the heads that this device computes, from those at hand along `axis`."""
        return array if self.taken is None else jnp.take(array, self.taken, axis=axis)

    def for_queries(self, k_BLGK: Array) -> Array:
        """Keys or values so that the heads are shared by equal groups of queries, or else one for each query."""
        if not self._split or self._grouped:
            return k_BLGK
        return jnp.take(k_BLGK, jnp.asarray(self._of_query)[index_along("heads", self.placement)], axis=2)
