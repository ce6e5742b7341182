"""OLMo 2 (OLMo Team 2024, arXiv:2501.00656): norms after attention and MLP, and an RMSNorm over all heads of the
queries, and over all of the keys.

Shapes: B batch, L length, S a device's piece of the length, D model, H query heads, G key/value heads, K head width.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmnt.config.model import Model
from jaxmnt.models.attention import Attention, KVHeads
from jaxmnt.models.contract import LayerContext, LayerOutput
from jaxmnt.models.huggingface import (
    ATTENTION,
    ENDS,
    MLP,
    NORMED_HEADS,
    SILU,
    UNBIASED,
    HuggingFace,
    Tensor,
    common_settings,
)
from jaxmnt.models.layers import GatedMLP, RMSNorm, dropout, output_std
from jaxmnt.models.llama import Llama
from jaxmnt.parallel.collectives import sum_over
from jaxmnt.parallel.sharding import Placement

LAYER = {
    **(ATTENTION | NORMED_HEADS | MLP),
    "after_attention_norm.scale": Tensor("model.layers.{}.post_attention_layernorm.weight"),
    "after_mlp_norm.scale": Tensor("model.layers.{}.post_feedforward_layernorm.weight"),
}


class ProjectionNorm(nnx.Module):
    """RMSNorm over the heads of all devices and their width."""

    def __init__(self, heads: int, width: int, axis: str, epsilon: float):
        self.scale = nnx.Param(jnp.ones((heads, width), jnp.float32), axes=(axis, "norm"))
        self.axis, self.size, self.epsilon = axis, heads * width, epsilon

    def __call__(self, x_BLHK: jax.Array, placement: Placement) -> jax.Array:
        return _normalise(self.axis, self.size, self.epsilon, placement, x_BLHK, self.scale[...])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _normalise(
    axis: str, size: int, epsilon: float, placement: Placement, x_BLHK: jax.Array, scale_HK: jax.Array
) -> jax.Array:
    return _normalise_forward(axis, size, epsilon, placement, x_BLHK, scale_HK)[0]


_Saved = tuple[jax.Array, jax.Array, jax.Array]
"""x, one over its root mean square, and the scale: backward keeps x once, without float32 copies, under every remat
policy."""


def _normalise_forward(
    axis: str, size: int, epsilon: float, placement: Placement, x_BLHK: jax.Array, scale_HK: jax.Array
) -> tuple[jax.Array, _Saved]:
    squares_BL11 = jnp.sum(jnp.square(x_BLHK.astype(jnp.float32)), axis=(-2, -1), keepdims=True)
    inverse_BL11 = jax.lax.rsqrt(sum_over(axis, squares_BL11, placement) / size + epsilon)
    return _scaled(x_BLHK, inverse_BL11, scale_HK), (x_BLHK, inverse_BL11, scale_HK)


def _normalise_backward(
    axis: str, size: int, epsilon: float, placement: Placement, saved: _Saved, gradient_BLHK: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Through the scale, and through the squares: of i = (s / size + epsilon)^-1/2 the derivative is -i^3 / (2 size),
    and that of s is 2 x."""
    x_BLHK, inverse_BL11, scale_HK = saved
    x32_BLHK = x_BLHK.astype(jnp.float32)
    backward = jax.vjp(_scaled, x32_BLHK, inverse_BL11, scale_HK)[1]
    x_gradient_BLHK, inverse_gradient_BL11, scale_gradient_HK = backward(gradient_BLHK.astype(jnp.float32))
    squares_gradient_BL11 = sum_over(axis, inverse_gradient_BL11 * inverse_BL11**3, placement) / (-2 * size)
    return (x_gradient_BLHK + 2 * x32_BLHK * squares_gradient_BL11).astype(x_BLHK.dtype), scale_gradient_HK


_normalise.defvjp(_normalise_forward, _normalise_backward)


def _scaled(x_BLHK: jax.Array, inverse_BL11: jax.Array, scale_HK: jax.Array) -> jax.Array:
    return (x_BLHK.astype(jnp.float32) * inverse_BL11 * scale_HK).astype(x_BLHK.dtype)


class OlmoAttention(Attention):
    """Attention that normalises queries and keys before it rotates them."""

    def __init__(self, config: Model, output_std: float, rngs: nnx.Rngs):
        super().__init__(config, output_std, rngs)
        assert config.num_kv_heads and config.head_dim
        self.query_norm = ProjectionNorm(config.num_heads, config.head_dim, "heads", config.norm_epsilon)
        self.key_norm = ProjectionNorm(config.num_kv_heads, config.head_dim, "kv_heads", config.norm_epsilon)

    all_keys = True  # the norm is over all heads, which are then chosen from

    def adjusted(
        self, q_BLHK: jax.Array, k_BLGK: jax.Array, v_BLGK: jax.Array, shared: KVHeads
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        q_BLHK = self.query_norm(q_BLHK, shared.placement)
        return q_BLHK, shared.own(self.key_norm(k_BLGK, shared.placement), axis=2), v_BLGK


class Block(nnx.Module):
    """One layer, with norms after attention and MLP and none before."""

    def __init__(self, config: Model, attention: Attention, output_std: float, rngs: nnx.Rngs):
        assert config.intermediate_size
        self.attention = attention
        self.after_attention_norm = RMSNorm(config.hidden_size, config.norm_epsilon)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, output_std, rngs)
        self.after_mlp_norm = RMSNorm(config.hidden_size, config.norm_epsilon)
        self.dropout = config.dropout

    def __call__(self, x_BSD: jax.Array, context: LayerContext) -> LayerOutput:
        attention_keys, mlp_keys = context.keys(2)
        a_BSD = self.after_attention_norm(self.attention(x_BSD, context))
        x_BSD = x_BSD + dropout(a_BSD, self.dropout, attention_keys, context.placement)
        m_BSD = self.after_mlp_norm(self.mlp(x_BSD, context.placement))
        return LayerOutput(x_BSD + dropout(m_BSD, self.dropout, mlp_keys, context.placement))


class Olmo2(Llama):
    """All layers are alike."""

    hugging_face = HuggingFace(
        "olmo2",
        "Olmo2ForCausalLM",
        LAYER,
        ENDS,
        common_settings(),
        only=SILU | UNBIASED,
        assumed={"rms_norm_eps": 1e-5, "tie_word_embeddings": False},
    )

    def layer(self, kind: str, rngs: nnx.Rngs) -> nnx.Module:
        std = output_std(self.config.num_layers)
        return Block(self.config, OlmoAttention(self.config, std, rngs), std, rngs)
