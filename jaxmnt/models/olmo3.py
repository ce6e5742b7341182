"""OLMo 3 (OLMo Team 2025): OLMo 2's layers, three with a window to one without, whose rotary positions alone are
stretched.

Shapes: B batch, L length.
"""

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from jaxmnt.config.model import Model
from jaxmnt.models.contract import LayerContext
from jaxmnt.models.huggingface import ENDS, SILU, UNBIASED, HuggingFace, Setting, common_settings
from jaxmnt.models.layers import output_std
from jaxmnt.models.olmo2 import LAYER, Block, OlmoAttention
from jaxmnt.models.rotary import Angles
from jaxmnt.models.windows import Alternating, two_rotaries, window


class WindowedAttention(OlmoAttention):
    """OLMo 2's attention, in local layers with a window."""

    def __init__(self, config: Model, kind: str, output_std: float, rngs: nnx.Rngs):
        super().__init__(config, output_std, rngs)
        self.kind, self.window = kind, window(config, kind)

    def angles(self, context: LayerContext) -> Angles:
        return context.rotary[self.kind]

    def options(self) -> dict[str, Any]:
        return {"window": self.window}


class Olmo3(Alternating):
    """Three layers with a window, then one without."""

    settings: Sequence[str] = (*Alternating.settings, "local_rope_theta")
    pattern_length = 4
    hugging_face = HuggingFace(
        "olmo3",
        "Olmo3ForCausalLM",
        LAYER,
        ENDS,
        common_settings(sliding_window=Setting("sliding_window")),
        only=SILU | UNBIASED,
        assumed={"rms_norm_eps": 1e-5, "tie_word_embeddings": False, "sliding_window": 4096, "rope_theta": 500000.0},
    )

    def layer(self, kind: str, rngs: nnx.Rngs) -> nnx.Module:
        std = output_std(self.config.num_layers)
        return Block(self.config, WindowedAttention(self.config, kind, std, rngs), std, rngs)

    def rotary(self, positions_BL: jax.Array) -> dict[str, Angles]:
        return two_rotaries(self.config, positions_BL)
