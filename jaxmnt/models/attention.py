"""Causal grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245) with rotary positions.

Shapes: B batch, L length, S a device's piece of the length, D model, H query heads, G key/value heads, K head width; H
and G are a device's own where the `model` axis splits them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxmnt.config.model import Model
from jaxmnt.models.contract import LayerContext
from jaxmnt.models.layers import project, weight
from jaxmnt.models.rotary import Angles, rotate
from jaxmnt.parallel.collectives import gather_sequence, index_along, scatter_sequence
from jaxmnt.parallel.sharding import Placement


class Attention(nnx.Module):
    """Queries, keys and values from x, causal softmax attention, and the output projection."""

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

    def __call__(self, x_BSD: jax.Array, context: LayerContext) -> jax.Array:
        placement = context.placement
        x_BLD = gather_sequence(x_BSD, placement)
        shared = KVHeads(self.heads, self.kv_heads, placement)
        q_BLHK, k_BLGK, v_BLGK = self.projections(x_BLD, shared)
        angles = self.angles(context)
        if angles is not None:
            q_BLHK, k_BLGK = rotate(q_BLHK, angles), rotate(k_BLGK, angles)
        q_BLHK, k_BLGK = checkpoint_name(q_BLHK, "query"), checkpoint_name(k_BLGK, "key")
        v_BLGK = checkpoint_name(v_BLGK, "value")
        k_BLGK, v_BLGK = shared.for_queries(k_BLGK), shared.for_queries(v_BLGK)
        a_BLHK = context.attend(q_BLHK, k_BLGK, v_BLGK, **self.options())
        o_BLD = project(a_BLHK, self.output[...])
        return checkpoint_name(scatter_sequence(o_BLD, placement, "heads"), "attention_output")

    # What families vary.

    def projections(self, x_BLD: jax.Array, shared: "KVHeads") -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values of this device's heads, before they are rotated."""
        return (
            project(x_BLD, self.query[...]),
            shared.project(x_BLD, self.key[...]),
            shared.project(x_BLD, self.value[...]),
        )

    def angles(self, context: LayerContext) -> Angles | None:
        """The rotary tables for queries and keys; None: they are not rotated."""
        return context.rotary[""]

    def options(self) -> dict[str, Any]:
        """Of `kernels.attend`."""
        return {}


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
        local, group = heads // num_shards, heads // kv_heads
        needed = [[(shard * local + query) // group for query in range(local)] for shard in range(num_shards)]
        own = [sorted(set(row)) for row in needed]
        most = max(map(len, own))
        self._own = np.array([row + row[-1:] * (most - len(row)) for row in own])
        self._of_query = np.array(
            [[row.index(head) for head in row_needed] for row, row_needed in zip(own, needed, strict=True)]
        )
        even = np.arange(local) // max(1, local // most)
        self._grouped = local % most == 0 and bool((self._of_query == even).all())

    def project(self, x_BLD: jax.Array, w_DGK: jax.Array) -> jax.Array:
        """Keys or values of the heads that this device computes, from the weights at hand."""
        if not self._split:
            return project(x_BLD, w_DGK)
        own = jnp.asarray(self._own)[index_along("heads", self.placement)]

        @functools.partial(jax.checkpoint, prevent_cse=False)  # backward is not to keep weights
        def project_own(x_BLD: jax.Array, w_DGK: jax.Array) -> jax.Array:
            return project(x_BLD, jnp.take(w_DGK, own, axis=1))

        return project_own(x_BLD, w_DGK)

    def own(self, array: jax.Array, axis: int) -> jax.Array:
        """What belongs to the heads that this device computes, from those at hand along `axis`."""
        if not self._split:
            return array
        return jnp.take(array, jnp.asarray(self._own)[index_along("heads", self.placement)], axis=axis)

    def for_queries(self, k_BLGK: jax.Array) -> jax.Array:
        """Keys or values so that the heads are shared by equal groups of queries, or else one for each query."""
        if not self._split or self._grouped:
            return k_BLGK
        return jnp.take(k_BLGK, jnp.asarray(self._of_query)[index_along("heads", self.placement)], axis=2)
