"""Families with a mistake each, which `jaxmnt.check` must find."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmnt.models.layers import Embedding
from jaxmnt.models.llama import BiasedAttention, Block, Llama
from jaxmnt.models.rotary import rotary_angles
from jaxmnt.parallel.collectives import index_along


class WithoutShare(Llama):
    """Adds a vector to each embedding on every device that shares the vocabulary, without `share_of`."""

    def before(self, rngs):
        return super().before(rngs) | {"extra": Embedding(8, self.config.hidden_size, rngs, axis=None)}

    def embed(self, ends, tokens_BL, positions_BL, dtype, placement):
        x_BLD = super().embed(ends, tokens_BL, positions_BL, dtype, placement)
        return x_BLD + ends["extra"].table[...][positions_BL % 8].astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gain(placement, gain_D):
    return gain_D


def _gain_gradient(placement, _, gradient_D):
    return (jnp.where(index_along("sequence", placement) == 0, gradient_D, 0),)


_gain.defvjp(lambda placement, gain_D: (gain_D, None), _gain_gradient)


class PartialBlock(Block):
    """A layer whose gain has the gradient of the first piece of the length only."""

    def __init__(self, config, attention, rngs):
        super().__init__(config, attention, rngs)
        self.gain = nnx.Param(jnp.ones(config.hidden_size), axes=("norm",))

    def __call__(self, x_BSD, context):
        gain_D = _gain(context.placement, self.gain[...]).astype(x_BSD.dtype)
        return super().__call__(x_BSD * gain_D, context)


class PartialGradient(Llama):
    block = PartialBlock


class WholeBias(BiasedAttention):
    """Biases of queries that every device has as a whole, but of which it uses the first, not its own."""

    def __init__(self, config, output_std, rngs):
        super().__init__(config, output_std, rngs)
        self.query_bias = nnx.Param(jnp.zeros((config.num_heads, config.head_dim)), axes=("bias", None))

    def adjust(self, q_BLHK, k_BLGK, v_BLGK, device_heads):
        key_bias_GK = device_heads.select(self.key_bias[...], axis=0)
        value_bias_GK = device_heads.select(self.value_bias[...], axis=0)
        return q_BLHK + self.query_bias[...][: q_BLHK.shape[2]], k_BLGK + key_bias_GK, v_BLGK + value_bias_GK


class WrongAxis(Llama):
    attention = WholeBias


class ForgetfulDecode(Llama):
    """Positions count from 0 in each call, so that a token after a prompt has position 0."""

    def rotary(self, positions_BL):
        positions_BL = jnp.broadcast_to(jnp.arange(positions_BL.shape[1]), positions_BL.shape)
        angles = rotary_angles(positions_BL, self.config.head_dim, self.config.rope_theta, self.config.rope_scaling)
        return dict.fromkeys(super().rotary(positions_BL), angles)
