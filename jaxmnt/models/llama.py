"""Llama (Touvron et al. 2023, arXiv:2302.13971) and families whose layers differ from it only in attention.

Mistral (Jiang et al. 2023, arXiv:2310.06825) may have a window (`model.sliding_window`). Qwen 2 and 2.5 (Qwen Team
2024, arXiv:2412.15115) have biases on queries, keys and values. Qwen 3 (Qwen Team 2025, arXiv:2505.09388) has an
RMSNorm on each head's query and key, and heads whose width need not be hidden_size / num_heads.

Shapes: B batch, L length, S a device's piece of the length, D model, H query heads, G key/value heads, K head width.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxmnt.config.model import Model
from jaxmnt.models.attention import Attention, KVHeads
from jaxmnt.models.contract import AttentionShape, Family, LayerContext, LayerOutput, Sums
from jaxmnt.models.huggingface import (
    ENDS,
    LLAMA,
    NO_ATTENTION_BIAS,
    NORMED_HEADS,
    SILU_ACTIVATION,
    HuggingFace,
    Setting,
    Tensor,
    common_settings,
)
from jaxmnt.models.layers import GatedMLP, RMSNorm, dropout, output_std


def _identity(x_BSD: Array) -> Array:
    """Returns its argument. It takes the place of a norm that a layer does not have."""
    return x_BSD


class Block(nnx.Module):
    """A layer with two residual branches: attention, then an MLP."""

    norms: Sequence[str] = ("attention_norm", "mlp_norm")
    """Names of the norms that this layer has, of the four possible ones. The others are identities."""
    norm: Callable[[int, float], nnx.Module] = RMSNorm
    """Makes a norm from its size and its epsilon, `model.norm_epsilon`."""
    make_mlp: Callable[[int, int, float, nnx.Rngs], nnx.Module] = GatedMLP
    attention_norm: Any = staticmethod(_identity)
    after_attention_norm: Any = staticmethod(_identity)
    mlp_norm: Any = staticmethod(_identity)
    after_mlp_norm: Any = staticmethod(_identity)
    attention: Any
    mlp: Any
    dropout: float

    def __init__(self, config: Model, attention: Callable[[Model, float, nnx.Rngs], Attention], rngs: nnx.Rngs):
        std = output_std(config.num_layers)
        for name in self.norms:
            setattr(self, name, self.norm(config.hidden_size, config.norm_epsilon))
        self.attention = attention(config, std, rngs)
        self.add_mlp(config, std, rngs)
        self.dropout = config.dropout

    def add_mlp(self, config: Model, output_std: float, rngs: nnx.Rngs) -> None:
        """Adds the module of the second branch."""
        assert config.intermediate_size
        self.mlp = self.make_mlp(config.hidden_size, config.intermediate_size, output_std, rngs)

    def __call__(self, x_BSD: Array, context: LayerContext) -> LayerOutput:
        attention_keys, mlp_keys = context.keys(2)
        placement = context.placement
        a_BSD = self.after_attention_norm(self.attention(self.attention_norm(x_BSD), context))
        x_BSD = x_BSD + dropout(a_BSD, self.dropout, attention_keys, placement)
        m_BSD, loss, sums = self.run_mlp(self.mlp_norm(x_BSD), context)
        m_BSD = self.after_mlp_norm(m_BSD)
        return LayerOutput(x_BSD + dropout(m_BSD, self.dropout, mlp_keys, placement), loss, sums)

    def run_mlp(self, x_BSD: Array, context: LayerContext) -> tuple[Array, Array | None, Sums]:
        """Returns the output of the second branch, and its loss and sums as in `LayerOutput`."""
        return self.mlp(x_BSD, context.placement), None, {}


class Llama(Family):
    """Llama, with one kind of layer."""

    block: type[Block] = Block
    attention: type[Attention] = Attention
    hugging_face = HuggingFace(
        "llama",
        "LlamaForCausalLM",
        LLAMA,
        ENDS,
        common_settings(),
        only=SILU_ACTIVATION | NO_ATTENTION_BIAS | {"mlp_bias": (False,)},
        assumed={"rms_norm_eps": 1e-6, "tie_word_embeddings": False},
        meaningless=frozenset({"pretraining_tp", "is_llama_config"}),
        left_out=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
    )

    def layer(self, kind: str, rngs: nnx.Rngs) -> nnx.Module:
        return self.block(self.config, self.attention, rngs)


class WindowedAttention(Attention):
    """Attention in which each query sees at most the newest `model.sliding_window` tokens."""

    def __init__(self, config: Model, output_std: float, rngs: nnx.Rngs):
        super().__init__(config, output_std, rngs)
        self.window = config.sliding_window


class Mistral(Llama):
    """Mistral, with one kind of layer."""

    settings: Sequence[str] = ("sliding_window",)
    attention = WindowedAttention
    hugging_face = HuggingFace(
        "mistral",
        "MistralForCausalLM",
        LLAMA,
        ENDS,
        common_settings(sliding_window=Setting("sliding_window")),
        only=SILU_ACTIVATION,
        assumed={"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "num_key_value_heads": 8, "sliding_window": 4096},
    )

    def attention_shape(self, kind: str) -> AttentionShape:
        return super().attention_shape(kind)._replace(window=self.config.sliding_window)


BIASES = {
    "attention.query_bias": Tensor("model.layers.{}.self_attn.q_proj.bias"),
    "attention.key_bias": Tensor("model.layers.{}.self_attn.k_proj.bias"),
    "attention.value_bias": Tensor("model.layers.{}.self_attn.v_proj.bias"),
}

NO_WINDOW = {"use_sliding_window": (False,)}
UNUSED_WINDOW_KEYS = frozenset({"sliding_window", "max_window_layers"})
"""Keys about windows that Qwen's configs have even though `use_sliding_window` is false."""


class BiasedAttention(Attention):
    """Attention with biases on queries, keys and values."""

    def __init__(self, config: Model, output_std: float, rngs: nnx.Rngs):
        super().__init__(config, output_std, rngs)
        assert config.num_kv_heads and config.head_dim
        zeros = lambda heads, axis: nnx.Param(jnp.zeros((heads, config.head_dim), jnp.float32), axes=(axis, "bias"))
        self.query_bias = zeros(config.num_heads, "heads")
        self.key_bias = zeros(config.num_kv_heads, "kv_heads")
        self.value_bias = zeros(config.num_kv_heads, "kv_heads")

    def adjust(self, q_BLHK: Array, k_BLGK: Array, v_BLGK: Array, device_heads: KVHeads) -> tuple[Array, Array, Array]:
        key_bias_GK = device_heads.select(self.key_bias[...], axis=0)
        value_bias_GK = device_heads.select(self.value_bias[...], axis=0)
        return q_BLHK + self.query_bias[...], k_BLGK + key_bias_GK, v_BLGK + value_bias_GK


class Qwen2(Llama):
    """Qwen 2 and 2.5, with one kind of layer."""

    attention = BiasedAttention
    hugging_face = HuggingFace(
        "qwen2",
        "Qwen2ForCausalLM",
        LLAMA | BIASES,
        ENDS,
        common_settings(),
        only=SILU_ACTIVATION | NO_WINDOW,
        assumed={"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "num_key_value_heads": 32},
        meaningless=UNUSED_WINDOW_KEYS,
    )


class NormedAttention(Attention):
    """Attention that normalises each head's query and key."""

    head_norm_offset = 0.0


class Qwen3(Llama):
    """Qwen 3, with one kind of layer."""

    attention = NormedAttention
    hugging_face = HuggingFace(
        "qwen3",
        "Qwen3ForCausalLM",
        LLAMA | NORMED_HEADS,
        ENDS,
        common_settings(),
        only=SILU_ACTIVATION | NO_ATTENTION_BIAS | NO_WINDOW,
        assumed={"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "head_dim": 128, "num_key_value_heads": 32},
        meaningless=UNUSED_WINDOW_KEYS,
    )
