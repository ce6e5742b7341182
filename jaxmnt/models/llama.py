"""Llama (Touvron et al. 2023, arXiv:2302.13971): pre-norm layers of grouped-query attention and a SwiGLU MLP.

Shapes: B batch, S a device's piece of the length, D model.
"""

import jax
from flax import nnx

from jaxmnt.config.model import Model
from jaxmnt.models.attention import Attention
from jaxmnt.models.contract import Family, LayerContext, LayerOutput
from jaxmnt.models.huggingface import ENDS, LLAMA, SILU, UNBIASED, HuggingFace, common_settings
from jaxmnt.models.layers import INIT_STD, GatedMLP, RMSNorm, dropout


class Block(nnx.Module):
    """One pre-norm decoder layer. GPT-2's scaling of the outputs' initial values keeps the variance of the residual
    stream independent of depth."""

    def __init__(self, config: Model, attention: type[Attention], rngs: nnx.Rngs):
        assert config.intermediate_size
        output_std = INIT_STD / (2 * config.num_layers) ** 0.5
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_epsilon)
        self.attention = attention(config, output_std, rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_epsilon)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, output_std, rngs)
        self.dropout = config.dropout

    def __call__(self, x_BSD: jax.Array, context: LayerContext) -> LayerOutput:
        attention_keys, mlp_keys = context.keys(2)
        placement = context.placement
        a_BSD = self.attention(self.attention_norm(x_BSD), context)
        x_BSD = x_BSD + dropout(a_BSD, self.dropout, attention_keys, placement)
        m_BSD = self.mlp(self.mlp_norm(x_BSD), placement)
        return LayerOutput(x_BSD + dropout(m_BSD, self.dropout, mlp_keys, placement))


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
