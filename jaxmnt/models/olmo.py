"""OLMo 2 and 3.

OLMo 2 (OLMo Team 2024, arXiv:2501.00656) has norms after attention and MLP, an RMSNorm over all heads of the queries,
and another over all heads of the keys. OLMo 3 (OLMo Team 2025) has the same layers, but of every four, three have a
window, and only the rotary positions of the fourth are scaled.

Shapes: B batch, L length, H query heads, G key/value heads, K head width.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxmnt.config.model import Model
from jaxmnt.models.attention import Attention, KVHeads
from jaxmnt.models.contract import LayerContext
from jaxmnt.models.huggingface import (
    ATTENTION,
    ENDS,
    MLP,
    NO_ATTENTION_BIAS,
    NORMED_HEADS,
    SILU_ACTIVATION,
    HuggingFace,
    Setting,
    Tensor,
    common_settings,
)
from jaxmnt.models.llama import Block, Llama
from jaxmnt.models.rotary import Angles
from jaxmnt.models.windows import AlternatingAttention, AlternatingFamily, rotary_tables_by_kind
from jaxmnt.parallel.collectives import sum_over, with_backward
from jaxmnt.parallel.sharding import Placement

LAYER = {
    **(ATTENTION | NORMED_HEADS | MLP),
    "after_attention_norm.scale": Tensor("model.layers.{}.post_attention_layernorm.weight"),
    "after_mlp_norm.scale": Tensor("model.layers.{}.post_feedforward_layernorm.weight"),
}


class ProjectionNorm(nnx.Module):
    """RMSNorm over the width of all heads, including those of other devices."""

    def __init__(self, heads: int, width: int, axis: str, epsilon: float):
        self.scale = nnx.Param(jnp.ones((heads, width), jnp.float32), axes=(axis, "norm"))
        self.axis, self.size, self.epsilon = axis, heads * width, epsilon

    def __call__(self, x_BLHK: Array, placement: Placement) -> Array:
        return _normalise(self.axis, self.size, self.epsilon, placement, x_BLHK, self.scale[...])


_SavedArrays = tuple[Array, Array, Array]
"""The arrays saved for the backward pass: x, one over its root mean square, and the scale. With every remat policy, x
is saved once, without float32 copies."""


def _normalise_backward(
    axis: str, size: int, epsilon: float, placement: Placement, saved: _SavedArrays, gradient_BLHK: Array
) -> tuple[Array, Array]:
    """Returns the gradients of x and the scale. The gradient of x has one path through the product and another through
    the sum of squares s. For i = (s / size + epsilon)^-1/2, di/ds = -i^3 / (2 size) and ds/dx = 2 x."""
    x_BLHK, inverse_BL11, scale_HK = saved
    x32_BLHK = x_BLHK.astype(jnp.float32)
    backward = jax.vjp(_apply_scale, x32_BLHK, inverse_BL11, scale_HK)[1]
    x_gradient_BLHK, inverse_gradient_BL11, scale_gradient_HK = backward(gradient_BLHK.astype(jnp.float32))
    squares_gradient_BL11 = sum_over(axis, inverse_gradient_BL11 * inverse_BL11**3, placement) / (-2 * size)
    return (x_gradient_BLHK + 2 * x32_BLHK * squares_gradient_BL11).astype(x_BLHK.dtype), scale_gradient_HK


@with_backward(_normalise_backward, static=4)
def _normalise(
    axis: str, size: int, epsilon: float, placement: Placement, x_BLHK: Array, scale_HK: Array
) -> tuple[Array, _SavedArrays]:
    """Returns x normalised, and the arrays to save for the backward pass."""
    squares_BL11 = jnp.sum(jnp.square(x_BLHK.astype(jnp.float32)), axis=(-2, -1), keepdims=True)
    inverse_BL11 = jax.lax.rsqrt(sum_over(axis, squares_BL11, placement) / size + epsilon)
    return _apply_scale(x_BLHK, inverse_BL11, scale_HK), (x_BLHK, inverse_BL11, scale_HK)


def _apply_scale(x_BLHK: Array, inverse_BL11: Array, scale_HK: Array) -> Array:
    return (x_BLHK.astype(jnp.float32) * inverse_BL11 * scale_HK).astype(x_BLHK.dtype)


class OlmoAttention(Attention):
    """Attention that normalises queries and keys before rotating them."""

    def __init__(self, config: Model, output_std: float, rngs: nnx.Rngs):
        super().__init__(config, output_std, rngs)
        assert config.num_kv_heads and config.head_dim
        self.query_norm = ProjectionNorm(config.num_heads, config.head_dim, "heads", config.norm_epsilon)
        self.key_norm = ProjectionNorm(config.num_kv_heads, config.head_dim, "kv_heads", config.norm_epsilon)

    projects_all_keys = True  # the norm needs all heads; afterwards `adjust` selects those of this device

    def adjust(self, q_BLHK: Array, k_BLGK: Array, v_BLGK: Array, device_heads: KVHeads) -> tuple[Array, Array, Array]:
        q_BLHK = self.query_norm(q_BLHK, device_heads.placement)
        k_BLGK = self.key_norm(k_BLGK, device_heads.placement)
        return q_BLHK, device_heads.select(k_BLGK, axis=2), v_BLGK


class OlmoBlock(Block):
    """A layer with norms after attention and MLP, and none before them."""

    norms = ("after_attention_norm", "after_mlp_norm")


class Olmo2(Llama):
    """OLMo 2, with one kind of layer."""

    block = OlmoBlock
    attention = OlmoAttention
    hugging_face = HuggingFace(
        "olmo2",
        "Olmo2ForCausalLM",
        LAYER,
        ENDS,
        common_settings(),
        only=SILU_ACTIVATION | NO_ATTENTION_BIAS,
        assumed={"rms_norm_eps": 1e-5, "tie_word_embeddings": False},
    )


class Olmo3Attention(AlternatingAttention, OlmoAttention):
    """OLMo 2's attention, with a window in local layers and the rotary tables of the layer's kind."""

    def angles(self, context: LayerContext) -> Angles:
        return context.rotary[self.kind]


class Olmo3(AlternatingFamily):
    """OLMo 3: three layers with a window, then one without."""

    settings: Sequence[str] = (*AlternatingFamily.settings, "local_rope_theta")
    pattern_length = 4
    block = OlmoBlock
    attention = Olmo3Attention
    hugging_face = HuggingFace(
        "olmo3",
        "Olmo3ForCausalLM",
        LAYER,
        ENDS,
        common_settings(sliding_window=Setting("sliding_window")),
        only=SILU_ACTIVATION | NO_ATTENTION_BIAS,
        assumed={"rms_norm_eps": 1e-5, "tie_word_embeddings": False, "sliding_window": 4096, "rope_theta": 500000.0},
    )

    def rotary(self, positions_BL: Array) -> dict[str, Angles]:
        return rotary_tables_by_kind(self.config, positions_BL)
