"""Qwen 3 (Qwen Team 2025, arXiv:2505.09388): Llama's layers with an RMSNorm on each head's query and key.

The width of a head need not be hidden_size / num_heads.

Shapes: B batch, L length, D model, H query heads, G key/value heads, K head width.
"""

import jax
from flax import nnx

from jaxmnt.config.model import Model
from jaxmnt.models.attention import Attention, KVHeads
from jaxmnt.models.huggingface import ENDS, LLAMA, NORMED_HEADS, SILU, UNBIASED, HuggingFace, common_settings
from jaxmnt.models.layers import RMSNorm
from jaxmnt.models.llama import Llama
from jaxmnt.models.qwen2 import UNUSED_WINDOW, WINDOWLESS


class NormedAttention(Attention):
    """Attention that normalises queries and keys before it rotates them. All heads share the scales."""

    def __init__(self, config: Model, output_std: float, rngs: nnx.Rngs):
        super().__init__(config, output_std, rngs)
        assert config.head_dim
        self.query_norm = RMSNorm(config.head_dim, config.norm_epsilon)
        self.key_norm = RMSNorm(config.head_dim, config.norm_epsilon)

    def adjusted(
        self, q_BLHK: jax.Array, k_BLGK: jax.Array, v_BLGK: jax.Array, shared: KVHeads
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        return self.query_norm(q_BLHK), self.key_norm(k_BLGK), v_BLGK


class Qwen3(Llama):
    """All layers are alike."""

    attention = NormedAttention
    hugging_face = HuggingFace(
        "qwen3",
        "Qwen3ForCausalLM",
        LLAMA | NORMED_HEADS,
        ENDS,
        common_settings(),
        only=SILU | UNBIASED | WINDOWLESS,
        assumed={"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "head_dim": 128, "num_key_value_heads": 32},
        meaningless=UNUSED_WINDOW,
    )
