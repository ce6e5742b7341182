"""Qwen 2 and 2.5 (Qwen Team 2024, arXiv:2412.15115): Llama's layers with biases on queries, keys and values.

Shapes: B batch, L length, D model, H query heads, G key/value heads, K head width.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmnt.config.model import Model
from jaxmnt.models.attention import Attention, KVHeads
from jaxmnt.models.huggingface import ENDS, LLAMA, SILU, HuggingFace, Tensor, common_settings
from jaxmnt.models.llama import Llama

BIASES = {
    "attention.query_bias": Tensor("model.layers.{}.self_attn.q_proj.bias"),
    "attention.key_bias": Tensor("model.layers.{}.self_attn.k_proj.bias"),
    "attention.value_bias": Tensor("model.layers.{}.self_attn.v_proj.bias"),
}

WINDOWLESS = {"use_sliding_window": (False,)}
UNUSED_WINDOW = frozenset({"sliding_window", "max_window_layers"})
"""What Qwen's configs say of windows although `use_sliding_window` is false."""


class BiasedAttention(Attention):
    """Attention whose three projections add a bias."""

    def __init__(self, config: Model, output_std: float, rngs: nnx.Rngs):
        super().__init__(config, output_std, rngs)
        assert config.num_kv_heads and config.head_dim
        zeros = lambda heads, axis: nnx.Param(jnp.zeros((heads, config.head_dim), jnp.float32), axes=(axis, "bias"))
        self.query_bias = zeros(config.num_heads, "heads")
        self.key_bias = zeros(config.num_kv_heads, "kv_heads")
        self.value_bias = zeros(config.num_kv_heads, "kv_heads")

    def adjusted(
        self, q_BLHK: jax.Array, k_BLGK: jax.Array, v_BLGK: jax.Array, shared: KVHeads
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        key_bias_GK, value_bias_GK = (shared.own(one[...], axis=0) for one in (self.key_bias, self.value_bias))
        return q_BLHK + self.query_bias[...], k_BLGK + key_bias_GK, v_BLGK + value_bias_GK


class Qwen2(Llama):
    """All layers are alike."""

    attention = BiasedAttention
    hugging_face = HuggingFace(
        "qwen2",
        "Qwen2ForCausalLM",
        LLAMA | BIASES,
        ENDS,
        common_settings(),
        only=SILU | WINDOWLESS,
        assumed={"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "num_key_value_heads": 32},
        meaningless=UNUSED_WINDOW,
    )
