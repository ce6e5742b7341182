"""Gemma 2 and the text model of Gemma 3.

Gemma 2 (Gemma Team 2024, arXiv:2408.00118) alternates between layers with and without a window. Each layer has norms
before and after its attention and its MLP, which multiply by 1 + w. Embeddings are multiplied by the square root of the
width, and soft caps limit the scores of attention and the logits. Embeddings are tied (`model.tie_embeddings`).

Gemma 3 (Gemma Team 2025, arXiv:2503.19786) adds an RMSNorm on each head's query and key and has no soft caps. Five
layers with a window are followed by one without, whose rotary positions have a larger base.

Shapes: B batch, L length, D model, V a device's part of the vocabulary, C tokens.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxmnt.config.model import Model
from jaxmnt.models.contract import LayerContext
from jaxmnt.models.huggingface import (
    ATTENTION,
    ENDS,
    MLP,
    NO_ATTENTION_BIAS,
    NORMED_HEADS,
    HuggingFace,
    Setting,
    Tensor,
    common_settings,
)
from jaxmnt.models.layers import GatedMLP, RMSNorm
from jaxmnt.models.llama import Block
from jaxmnt.models.rotary import Angles
from jaxmnt.models.windows import AlternatingAttention, AlternatingFamily, rotary_tables_by_kind
from jaxmnt.parallel.sharding import Placement

NORMS = {
    "attention_norm.scale": Tensor("model.layers.{}.input_layernorm.weight"),
    "after_attention_norm.scale": Tensor("model.layers.{}.post_attention_layernorm.weight"),
    "mlp_norm.scale": Tensor("model.layers.{}.pre_feedforward_layernorm.weight"),
    "after_mlp_norm.scale": Tensor("model.layers.{}.post_feedforward_layernorm.weight"),
}


def _query_pre_attn_scalar(scale: float) -> float:
    """Returns Hugging Face's `query_pre_attn_scalar` for a scale. It is an integer if it is one up to rounding."""
    scalar = scale**-2
    return round(scalar) if abs(scalar - round(scalar)) < 1e-6 * scalar else scalar


SCALE = Setting("attention_scale", lambda scalar: scalar**-0.5, _query_pre_attn_scalar)
SETTINGS = common_settings(
    sliding_window=Setting("sliding_window"),
    query_pre_attn_scalar=SCALE,
    attn_logit_softcapping=Setting("attention_soft_cap"),
    final_logit_softcapping=Setting("logit_soft_cap"),
)
SUPPORTED_VALUES = NO_ATTENTION_BIAS | {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "hidden_act": ("gelu_pytorch_tanh",),
    "use_bidirectional_attention": (False, None),
}
DEFAULTS = {
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "head_dim": 256, "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}  # fmt: skip


class GemmaAttention(AlternatingAttention):
    """Attention with a soft cap, a configurable scale, and a window in local layers."""

    def __init__(self, config: Model, output_std: float, rngs: nnx.Rngs, kind: str):
        super().__init__(config, output_std, rngs, kind)
        self.soft_cap, self.scale = config.attention_soft_cap, config.attention_scale

    def options(self, context: LayerContext) -> dict[str, Any]:
        return super().options(context) | {"soft_cap": self.soft_cap, "scale": self.scale}


class GemmaBlock(Block):
    """A layer with norms both before and after attention and MLP."""

    norms = ("attention_norm", "after_attention_norm", "mlp_norm", "after_mlp_norm")
    norm = staticmethod(functools.partial(RMSNorm, offset=1.0))
    make_mlp = staticmethod(functools.partial(GatedMLP, activation=functools.partial(jax.nn.gelu, approximate=True)))


class Gemma2(AlternatingFamily):
    """Gemma 2: pairs of layers, the first with a window (`model.sliding_window`), the second without."""

    settings: Sequence[str] = (*AlternatingFamily.settings, "attention_scale", "attention_soft_cap", "logit_soft_cap")
    pattern_length = 2
    block = GemmaBlock
    attention: type[AlternatingAttention] = GemmaAttention
    hugging_face = HuggingFace(
        "gemma2",
        "Gemma2ForCausalLM",
        ATTENTION | MLP | NORMS,
        ENDS,
        SETTINGS,
        only=SUPPORTED_VALUES,
        meaningless=frozenset({"sliding_window_size"}),  # which some files have in addition to sliding_window
        assumed=DEFAULTS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "num_key_value_heads": 4},
    )

    def after(self, rngs: nnx.Rngs) -> dict[str, nnx.Module]:
        return super().after(rngs) | {"norm": RMSNorm(self.config.hidden_size, self.config.norm_epsilon, offset=1.0)}

    def embed(
        self,
        ends: dict[str, Any],
        tokens_BL: Array,
        positions_BL: Array,
        dtype: jnp.dtype,
        placement: Placement,
    ) -> Array:
        scale = jnp.asarray(self.config.hidden_size**0.5, dtype)
        return super().embed(ends, tokens_BL, positions_BL, dtype, placement) * scale

    def finish_logits(self, ends: dict[str, Any], logits_CV: Array) -> Array:
        cap = self.config.logit_soft_cap
        return logits_CV if cap is None else cap * jnp.tanh(logits_CV / cap)


class Gemma3Attention(GemmaAttention):
    """Gemma 2's attention with a norm on each head's query and key, and the rotary tables of the layer's kind."""

    head_norm_offset = 1.0

    def angles(self, context: LayerContext) -> Angles:
        return context.rotary[self.kind]


class Gemma3(Gemma2):
    """Gemma 3: five layers with a window, then one without. If layers remain at the end, they have windows."""

    settings: Sequence[str] = (*Gemma2.settings, "local_rope_theta")
    pattern_length = 6
    attention = Gemma3Attention
    hugging_face = HuggingFace(
        "gemma3_text",
        "Gemma3ForCausalLM",
        ATTENTION | NORMED_HEADS | MLP | NORMS,
        ENDS,
        {key: setting for key, setting in SETTINGS.items() if key != "attn_logit_softcapping"},
        # transformers 5.23 preserves this key but computes without it.
        only=SUPPORTED_VALUES | {"attn_logit_softcapping": (None,)},
        assumed=DEFAULTS
        | {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131072}
        | {"rope_theta": 1000000.0, "rope_local_base_freq": 10000.0},
        renamed={
            "language_model.model.": "model.",
            "model.language_model.": "model.",
            "language_model.lm_head.": "lm_head.",
        },
        left_out=(r"(model\.)?vision_tower\..*", r"(model\.)?multi_modal_projector\..*"),
        reads_pattern=True,
        nested=("gemma3", "text_config"),
    )

    def rotary(self, positions_BL: Array) -> dict[str, Angles]:
        return rotary_tables_by_kind(self.config, positions_BL)
