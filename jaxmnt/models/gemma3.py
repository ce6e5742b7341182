"""Gemma 3's text model (Gemma Team 2025, arXiv:2503.19786): Gemma 2's layers with an RMSNorm on each head's query and
key and without soft caps; five layers with a window to one without, whose rotary positions have a larger base.

Shapes: B batch, L length, D model, H query heads, G key/value heads, K head width.
"""

from collections.abc import Sequence

import jax
from flax import nnx

from jaxmnt.config.model import Model
from jaxmnt.models.attention import KVHeads
from jaxmnt.models.contract import LayerContext
from jaxmnt.models.gemma2 import ASSUMED, NORMS, ONLY, SETTINGS, Gemma2, GemmaAttention
from jaxmnt.models.huggingface import ATTENTION, ENDS, MLP, NORMED_HEADS, HuggingFace
from jaxmnt.models.layers import RMSNorm
from jaxmnt.models.rotary import Angles
from jaxmnt.models.windows import two_rotaries


class NormedAttention(GemmaAttention):
    """Attention that normalises queries and keys before it rotates them. All heads share the scales."""

    def __init__(self, config: Model, kind: str, output_std: float, rngs: nnx.Rngs):
        super().__init__(config, kind, output_std, rngs)
        assert config.head_dim
        self.query_norm = RMSNorm(config.head_dim, config.norm_epsilon, offset=1.0)
        self.key_norm = RMSNorm(config.head_dim, config.norm_epsilon, offset=1.0)

    def adjusted(
        self, q_BLHK: jax.Array, k_BLGK: jax.Array, v_BLGK: jax.Array, shared: KVHeads
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        return self.query_norm(q_BLHK), self.key_norm(k_BLGK), v_BLGK

    def angles(self, context: LayerContext) -> Angles:
        return context.rotary[self.kind]


class Gemma3(Gemma2):
    """Five layers with a window, then one without; what is left of six at the end has windows."""

    settings: Sequence[str] = (*Gemma2.settings, "local_rope_theta")
    pattern_length = 6
    attention = NormedAttention
    hugging_face = HuggingFace(
        "gemma3_text",
        "Gemma3ForCausalLM",
        ATTENTION | NORMED_HEADS | MLP | NORMS,
        ENDS,
        {key: setting for key, setting in SETTINGS.items() if key != "attn_logit_softcapping"},
        # transformers 5.23 keeps this key and computes without it.
        only=ONLY | {"attn_logit_softcapping": (None,)},
        assumed=ASSUMED
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

    def rotary(self, positions_BL: jax.Array) -> dict[str, Angles]:
        return two_rotaries(self.config, positions_BL)
