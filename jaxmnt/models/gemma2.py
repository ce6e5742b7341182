"""Gemma 2 (Gemma Team 2024, arXiv:2408.00118): layers with a window and layers without alternate.

Each layer has a norm before and after its attention and its MLP; norms multiply by 1 + w. Embeddings are multiplied by
the root of the width, and attention's scores and the logits are bent by soft caps. It has tied embeddings
(`model.tie_embeddings`).

Shapes: B batch, L length, S a device's piece of the length, D model, V a device's part of the vocabulary, C tokens.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmnt.config.model import Model
from jaxmnt.models.attention import Attention
from jaxmnt.models.contract import LayerContext, LayerOutput
from jaxmnt.models.huggingface import ATTENTION, ENDS, MLP, UNBIASED, HuggingFace, Setting, Tensor, common_settings
from jaxmnt.models.layers import GatedMLP, RMSNorm, dropout, output_std
from jaxmnt.models.windows import Alternating, window
from jaxmnt.parallel.sharding import Placement

NORMS = {
    "attention_norm.scale": Tensor("model.layers.{}.input_layernorm.weight"),
    "after_attention_norm.scale": Tensor("model.layers.{}.post_attention_layernorm.weight"),
    "mlp_norm.scale": Tensor("model.layers.{}.pre_feedforward_layernorm.weight"),
    "after_mlp_norm.scale": Tensor("model.layers.{}.post_feedforward_layernorm.weight"),
}


def _written_scale(scale: float) -> float:
    """`query_pre_attn_scalar`, an integer where it can be."""
    scalar = scale**-2
    return round(scalar) if abs(scalar - round(scalar)) < 1e-6 * scalar else scalar


SCALE = Setting("attention_scale", lambda scalar: scalar**-0.5, _written_scale)
SETTINGS = common_settings(
    sliding_window=Setting("sliding_window"),
    query_pre_attn_scalar=SCALE,
    attn_logit_softcapping=Setting("attention_soft_cap"),
    final_logit_softcapping=Setting("logit_soft_cap"),
)
ONLY = UNBIASED | {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "hidden_act": ("gelu_pytorch_tanh",),
    "use_bidirectional_attention": (False, None),
}
ASSUMED = {
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "head_dim": 256, "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}  # fmt: skip

gelu = functools.partial(jax.nn.gelu, approximate=True)


class GemmaAttention(Attention):
    """Attention with a soft cap, a scale of its own, and in local layers a window."""

    def __init__(self, config: Model, kind: str, output_std: float, rngs: nnx.Rngs):
        super().__init__(config, output_std, rngs)
        self.kind, self.window = kind, window(config, kind)
        self.soft_cap, self.scale = config.attention_soft_cap, config.attention_scale

    def options(self) -> dict[str, Any]:
        return {"window": self.window, "soft_cap": self.soft_cap, "scale": self.scale}


class Block(nnx.Module):
    """One layer with norms on both sides."""

    def __init__(self, config: Model, kind: str, attention: type[GemmaAttention], rngs: nnx.Rngs):
        assert config.intermediate_size
        std = output_std(config.num_layers)
        norm = functools.partial(RMSNorm, config.hidden_size, config.norm_epsilon, offset=1.0)
        self.attention_norm, self.after_attention_norm = norm(), norm()
        self.attention = attention(config, kind, std, rngs)
        self.mlp_norm, self.after_mlp_norm = norm(), norm()
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, std, rngs, gelu)
        self.dropout = config.dropout

    def __call__(self, x_BSD: jax.Array, context: LayerContext) -> LayerOutput:
        attention_keys, mlp_keys = context.keys(2)
        a_BSD = self.after_attention_norm(self.attention(self.attention_norm(x_BSD), context))
        x_BSD = x_BSD + dropout(a_BSD, self.dropout, attention_keys, context.placement)
        m_BSD = self.after_mlp_norm(self.mlp(self.mlp_norm(x_BSD), context.placement))
        return LayerOutput(x_BSD + dropout(m_BSD, self.dropout, mlp_keys, context.placement))


class Gemma2(Alternating):
    """Layers in pairs: the first of each has a window (`model.sliding_window`)."""

    settings: Sequence[str] = (*Alternating.settings, "attention_scale", "attention_soft_cap", "logit_soft_cap")
    pattern_length = 2
    attention: type[GemmaAttention] = GemmaAttention
    hugging_face = HuggingFace(
        "gemma2",
        "Gemma2ForCausalLM",
        ATTENTION | MLP | NORMS,
        ENDS,
        SETTINGS,
        only=ONLY,
        meaningless=frozenset({"sliding_window_size"}),  # beside sliding_window
        assumed=ASSUMED | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "num_key_value_heads": 4},
    )

    def layer(self, kind: str, rngs: nnx.Rngs) -> nnx.Module:
        return Block(self.config, kind, self.attention, rngs)

    def after(self, rngs: nnx.Rngs) -> dict[str, nnx.Module]:
        return super().after(rngs) | {"norm": RMSNorm(self.config.hidden_size, self.config.norm_epsilon, offset=1.0)}

    def embed(
        self,
        ends: dict[str, Any],
        tokens_BL: jax.Array,
        positions_BL: jax.Array,
        dtype: jnp.dtype,
        placement: Placement,
    ) -> jax.Array:
        scale = jnp.asarray(self.config.hidden_size**0.5, dtype)
        return super().embed(ends, tokens_BL, positions_BL, dtype, placement) * scale

    def finish_logits(self, ends: dict[str, Any], logits_CV: jax.Array) -> jax.Array:
        cap = self.config.logit_soft_cap
        return logits_CV if cap is None else cap * jnp.tanh(logits_CV / cap)
