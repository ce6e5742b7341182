"""Llama (Touvron et al. 2023, arXiv:2302.13971): pre-norm layers of grouped-query attention and a SwiGLU MLP.

Shapes: B batch, S a device's piece of the length, D model.
"""

from typing import Any

import jax
from flax import nnx

from jaxmnt.config.model import Model
from jaxmnt.models.attention import Attention
from jaxmnt.models.contract import Family, LayerContext, LayerOutput
from jaxmnt.models.huggingface import ENDS, LLAMA, SILU, UNBIASED, HuggingFace, common_settings
from jaxmnt.models.layers import GatedMLP, RMSNorm, dropout, output_std


class PreNormBlock(nnx.Module):
    """A layer with a norm before its attention, and one before its MLP."""

    attention_norm: Any
    attention: Any
    mlp_norm: Any
    mlp: Any
    dropout: float

    def __call__(self, x_BSD: jax.Array, context: LayerContext) -> LayerOutput:
        attention_keys, mlp_keys = context.keys(2)
        placement = context.placement
        a_BSD = self.attention(self.attention_norm(x_BSD), context)
        x_BSD = x_BSD + dropout(a_BSD, self.dropout, attention_keys, placement)
        m_BSD = self.mlp(self.mlp_norm(x_BSD), placement)
        return LayerOutput(x_BSD + dropout(m_BSD, self.dropout, mlp_keys, placement))


class Block(PreNormBlock):
    """One of Llama's, with RMSNorm and SwiGLU."""

    def __init__(self, config: Model, attention: type[Attention], rngs: nnx.Rngs):
        assert config.intermediate_size
        std = output_std(config.num_layers)
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_epsilon)
        self.attention = attention(config, std, rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_epsilon)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, std, rngs)
        self.dropout = config.dropout


class Llama(Family):
    """All layers are alike."""

    attention = Attention
    hugging_face = HuggingFace(
        "llama",
        "LlamaForCausalLM",
        LLAMA,
        ENDS,
        common_settings(),
        only=SILU | UNBIASED | {"mlp_bias": (False,)},
        assumed={"rms_norm_eps": 1e-6, "tie_word_embeddings": False},
        meaningless=frozenset({"pretraining_tp", "is_llama_config"}),
        left_out=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
    )

    def layer(self, kind: str, rngs: nnx.Rngs) -> nnx.Module:
        return Block(self.config, self.attention, rngs)
