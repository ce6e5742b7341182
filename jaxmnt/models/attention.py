"""Causal grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245) with rotary positions.

Shapes: B batch, L length, S a device's piece of the length, D model, H query heads, G key/value heads, K head width. If
the `model` axis splits the heads, H and G count those of one device.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxmnt.config.model import Model
from jaxmnt.models.contract import SHARED_ROTARY, LayerContext
from jaxmnt.models.layers import RMSNorm, weight
from jaxmnt.models.projections import project_gathered, project_scattered
from jaxmnt.models.rotary import Angles, rotate
from jaxmnt.parallel.collectives import index_along
from jaxmnt.parallel.sharding import Placement


class Attention(nnx.Module):
    """Causal softmax attention, with the projections of x to queries, keys and values and the output projection."""

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
        device_heads = KVHeads(self.heads, self.kv_heads, placement)
        weights = (self.query[...], self.key[...], self.value[...])
        key_heads = None if self.projects_all_keys else device_heads.indices
        selected_heads = (None, key_heads, device_heads.indices)
        q_BLHK, k_BLGK, v_BLGK = project_gathered(x_BSD, weights, placement, selected_heads)
        q_BLHK, k_BLGK, v_BLGK = self.adjust(q_BLHK, k_BLGK, v_BLGK, device_heads)

        angles = self.angles(context)
        if angles is not None:
            q_BLHK, k_BLGK = rotate(q_BLHK, angles), rotate(k_BLGK, angles)

        # Remat policies save these before any keys and values are repeated.
        q_BLHK, k_BLGK = checkpoint_name(q_BLHK, "query"), checkpoint_name(k_BLGK, "key")
        v_BLGK = checkpoint_name(v_BLGK, "value")
        k_BLGK, v_BLGK = device_heads.align_to_queries(k_BLGK), device_heads.align_to_queries(v_BLGK)

        a_BLHK = context.attend(q_BLHK, k_BLGK, v_BLGK, **self.options(context))
        return checkpoint_name(project_scattered(a_BLHK, self.output[...], placement, "heads"), "attention_output")

    # Families override the following attributes and methods.

    head_norm_offset: float | None = None
    """Offset of the RMSNorm that is applied to each head's query and key; all heads share its scales. None if there is
    no such norm."""
    window: int | None = None
    """Maximum number of tokens that a query sees, including its own; None: its own and all before it."""
    projects_all_keys = False
    """If True, `adjust` receives the keys of all heads whose weights this device holds, and not only of the heads that
    this device computes."""

    def adjust(
        self, q_BLHK: Array, k_BLGK: Array, v_BLGK: Array, device_heads: "KVHeads"
    ) -> tuple[Array, Array, Array]:
        """Returns the queries, keys and values of this device's heads, before rotation, from the projections of x."""
        if self.head_norm_offset is None:
            return q_BLHK, k_BLGK, v_BLGK
        return self.query_norm(q_BLHK), self.key_norm(k_BLGK), v_BLGK

    def angles(self, context: LayerContext) -> Angles | None:
        """Returns the rotary tables for queries and keys; None if they are not rotated."""
        return context.rotary[SHARED_ROTARY]

    def options(self, context: LayerContext) -> dict[str, Any]:
        """Returns the keyword arguments for `kernels.attend`."""
        return {"window": self.window}


class KVHeads:
    """The key/value heads that a device computes.

    If the key/value heads cannot be split evenly among the devices of the `model` axis, each device has the weights of
    all of them (see `parallel.choices.build_placement`) and computes only those that its query heads need.
    """

    def __init__(self, heads: int, kv_heads: int, placement: Placement):
        self.placement = placement
        num_shards = placement.num_shards("heads")
        self._is_subset = num_shards > 1 and placement.num_shards("kv_heads") == 1
        self.attended_heads = kv_heads // placement.num_shards("kv_heads")
        """The number of heads of keys and values to which a device's queries attend, after `align_to_queries`."""
        if not self._is_subset:
            return
        # The key/value head of each query head, by device.
        queries_per_shard = heads // num_shards
        kv_head_of_query = np.arange(heads).reshape(num_shards, queries_per_shard) // (heads // kv_heads)
        first, last = kv_head_of_query[:, :1], kv_head_of_query[:, -1:]
        # All devices compute the same number of heads. A device that needs fewer repeats its last one.
        keys_per_shard = int(np.max(last - first)) + 1
        self._indices_by_shard = np.minimum(first + np.arange(keys_per_shard), last)
        self._key_of_query = kv_head_of_query - first
        key_in_equal_groups = np.arange(queries_per_shard) // max(1, queries_per_shard // keys_per_shard)
        self._has_equal_groups = queries_per_shard % keys_per_shard == 0 and bool(
            (self._key_of_query == key_in_equal_groups).all()
        )
        self.attended_heads = keys_per_shard if self._has_equal_groups else queries_per_shard

    @property
    def indices(self) -> Array | None:
        """Indices of the heads that this device computes, among those whose weights it has; None if it computes all."""
        return jnp.asarray(self._indices_by_shard)[index_along("heads", self.placement)] if self._is_subset else None

    def select(self, array: Array, axis: int) -> Array:
        """Returns the part of an array for the heads that this device computes, from the heads whose weights it has,
        along `axis`."""
        return array if self.indices is None else jnp.take(array, self.indices, axis=axis)

    def align_to_queries(self, k_BLGK: Array) -> Array:
        """Returns keys or values whose heads are shared by equally large groups of query heads. If the groups are not
        equally large, heads are repeated, so that each query head has its own."""
        if not self._is_subset or self._has_equal_groups:
            return k_BLGK
        return jnp.take(k_BLGK, jnp.asarray(self._key_of_query)[index_along("heads", self.placement)], axis=2)
