"""Mistral (Jiang et al. 2023, arXiv:2310.06825): Llama's layers with a window (`model.sliding_window`), or without."""

from typing import Any

from flax import nnx

from jaxmnt.config.model import Model
from jaxmnt.models.attention import Attention
from jaxmnt.models.contract import AttentionShape
from jaxmnt.models.huggingface import ENDS, LLAMA, SILU, HuggingFace, Setting, common_settings
from jaxmnt.models.llama import Llama


class WindowedAttention(Attention):
    """Attention to the newest tokens alone."""

    def __init__(self, config: Model, output_std: float, rngs: nnx.Rngs):
        super().__init__(config, output_std, rngs)
        self.window = config.sliding_window

    def options(self) -> dict[str, Any]:
        return {"window": self.window}


class Mistral(Llama):
    """All layers are alike."""

    settings = ("sliding_window",)
    attention = WindowedAttention
    hugging_face = HuggingFace(
        "mistral",
        "MistralForCausalLM",
        LLAMA,
        ENDS,
        common_settings(sliding_window=Setting("sliding_window")),
        only=SILU,
        assumed={"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "num_key_value_heads": 8, "sliding_window": 4096},
    )

    def attention_shape(self, kind: str) -> AttentionShape:
        return super().attention_shape(kind)._replace(window=self.config.sliding_window)
