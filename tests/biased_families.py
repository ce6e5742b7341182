"""Families whose attention adds a bias for the distance of query and key."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmnt.models.attention import Attention
from jaxmnt.models.llama import Llama

REACH = 24


class DistanceAttention(Attention):
    """ALiBi's slopes, which depend on the number of the head, and a learned bias of each head and distance."""

    def __init__(self, config, output_std, rngs):
        super().__init__(config, output_std, rngs)
        bias_HD = 0.5 * jax.random.normal(rngs.params(), (config.num_heads, REACH), jnp.float32)
        self.distance_bias = nnx.Param(bias_HD, axes=("heads", "bias"))

    def angles(self, context):
        return None

    def options(self, context):
        slopes_H = 2.0 ** (-8 * (context.head_numbers(self.heads) + 1) / self.heads)
        return {"bias_HD": self.distance_bias[...] - slopes_H[:, None] * jnp.arange(REACH)}


class Alibi(Llama):
    attention = DistanceAttention
