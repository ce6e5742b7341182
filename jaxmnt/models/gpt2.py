"""GPT-2 (Radford et al. 2019): learned positions, LayerNorms, biases, and an MLP with GELU that has no gate.

It has tied embeddings (`model.tie_embeddings`), and `model.max_positions` rows of positions.

Shapes: B batch, L length, S a device's piece of the length, D model, F MLP (intermediate size), H query heads, G
key/value heads, K head width.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxmnt.config.model import Model
from jaxmnt.errors import ConfigError
from jaxmnt.models.contract import Family, LayerContext
from jaxmnt.models.huggingface import HuggingFace, Setting, Tensor
from jaxmnt.models.layers import Embedding, LayerNorm, weight
from jaxmnt.models.llama import BiasedAttention, Block
from jaxmnt.models.projections import project_gathered, project_scattered
from jaxmnt.models.rotary import Angles
from jaxmnt.parallel.sharding import Placement


def _fused_tensor(kind: str, inputs: int, part: int) -> Tensor:
    """Returns a tensor of the fused projection to queries, keys and values. `kind` is weight or bias, and `part` is 0
    for queries, 1 for keys and 2 for values."""
    return Tensor(f"transformer.h.{{}}.attn.c_attn.{kind}", inputs, False, part, 3)


LAYER = {
    "attention_norm.scale": Tensor("transformer.h.{}.ln_1.weight"),
    "attention_norm.bias": Tensor("transformer.h.{}.ln_1.bias"),
    "attention.query": _fused_tensor("weight", 1, 0),
    "attention.key": _fused_tensor("weight", 1, 1),
    "attention.value": _fused_tensor("weight", 1, 2),
    "attention.query_bias": _fused_tensor("bias", 0, 0),
    "attention.key_bias": _fused_tensor("bias", 0, 1),
    "attention.value_bias": _fused_tensor("bias", 0, 2),
    "attention.output": Tensor("transformer.h.{}.attn.c_proj.weight", 2, transposed=False),
    "attention.output_bias": Tensor("transformer.h.{}.attn.c_proj.bias"),
    "mlp_norm.scale": Tensor("transformer.h.{}.ln_2.weight"),
    "mlp_norm.bias": Tensor("transformer.h.{}.ln_2.bias"),
    "mlp.up": Tensor("transformer.h.{}.mlp.c_fc.weight", 1, transposed=False),
    "mlp.up_bias": Tensor("transformer.h.{}.mlp.c_fc.bias"),
    "mlp.down": Tensor("transformer.h.{}.mlp.c_proj.weight", 1, transposed=False),
    "mlp.down_bias": Tensor("transformer.h.{}.mlp.c_proj.bias"),
}
ENDS = {
    "embedding.table": Tensor("transformer.wte.weight", 1, transposed=False),
    "positions.table": Tensor("transformer.wpe.weight", 1, transposed=False),
    "norm.scale": Tensor("transformer.ln_f.weight"),
    "norm.bias": Tensor("transformer.ln_f.bias"),
    "head.kernel": Tensor("lm_head.weight", 1),
}
UNUSED_KEYS = frozenset(
    {"n_ctx", "reorder_and_upcast_attn", "n_special", "predict_special_tokens", "output_past", "_num_labels"}
)
"""Keys that transformers no longer reads, or that only affect rounding."""


def _bias(size: int, axis: str | None = None) -> nnx.Param:
    """Returns a bias [1, size], whose last dimension has the logical axis `axis`. The first dimension has the axis
    `bias`, which excludes the parameter from weight decay."""
    return nnx.Param(jnp.zeros((1, size), jnp.float32), axes=("bias", axis))


class GPT2Attention(BiasedAttention):
    """Attention with biases on all four projections, and without rotation."""

    def __init__(self, config: Model, output_std: float, rngs: nnx.Rngs):
        super().__init__(config, output_std, rngs)
        self.output_bias = _bias(config.hidden_size)

    def __call__(self, x_BSD: Array, context: LayerContext) -> Array:
        return super().__call__(x_BSD, context) + self.output_bias[...]

    def angles(self, context: LayerContext) -> Angles | None:
        return None


class MLP(nnx.Module):
    """Two linear layers with biases, and between them GELU in its tanh approximation (Hendrycks and Gimpel 2016,
    arXiv:1606.08415)."""

    def __init__(self, hidden_size: int, intermediate_size: int, output_std: float, rngs: nnx.Rngs):
        self.up = weight(rngs, (hidden_size, intermediate_size), ("embed", "mlp"))
        self.up_bias = _bias(intermediate_size, "mlp")
        self.down = weight(rngs, (intermediate_size, hidden_size), ("mlp", "embed"), output_std)
        self.down_bias = _bias(hidden_size)

    def __call__(self, x_BSD: Array, placement: Placement) -> Array:
        [up_BLF] = project_gathered(x_BSD, (self.up[...],), placement)
        h_BLF = _gelu(checkpoint_name(up_BLF + self.up_bias[...], "mlp_up"))
        m_BSD = checkpoint_name(project_scattered(h_BLF, self.down[...], placement, "mlp"), "mlp_output")
        return m_BSD + self.down_bias[...]


@functools.partial(jax.checkpoint, prevent_cse=False)
def _gelu(up_BLF: Array) -> Array:
    """Returns GELU of the argument. Only the argument is saved for the backward pass."""
    return jax.nn.gelu(up_BLF, approximate=True)


class GPT2Block(Block):
    """A layer of GPT-2."""

    norm = LayerNorm
    make_mlp = MLP


class GPT2(Family):
    """GPT-2, with one kind of layer."""

    settings = ("max_positions",)
    hugging_face = HuggingFace(
        "gpt2",
        "GPT2LMHeadModel",
        LAYER,
        ENDS,
        {
            "vocab_size": Setting("vocab_size"),
            "n_positions": Setting("max_positions"),
            "n_embd": Setting("hidden_size"),
            "n_layer": Setting("num_layers"),
            "n_head": Setting("num_heads"),
            "n_inner": Setting("intermediate_size"),
            "layer_norm_epsilon": Setting("norm_epsilon"),
            "tie_word_embeddings": Setting("tie_embeddings"),
        },
        only={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        assumed={"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "n_positions": 1024},
        meaningless=UNUSED_KEYS,
        renamed={name: f"transformer.{name}" for name in ("wte.", "wpe.", "h.", "ln_f.")},
        left_out=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
    )

    def __init__(self, config: Model, vocab_size: int):
        super().__init__(config, vocab_size)
        if config.max_positions is None:
            raise ConfigError(
                f"model.max_positions: {config.family} uses learned positions; set model.max_positions to the longest "
                "sequence, e.g. data.sequence_length"
            )
        if config.rope_scaling.type != "none":
            raise ConfigError(f"model.rope_scaling: family {config.family} has no rotary positions; remove it")
        self.max_positions = config.max_positions

    def layer(self, kind: str, rngs: nnx.Rngs) -> nnx.Module:
        return GPT2Block(self.config, GPT2Attention, rngs)

    def before(self, rngs: nnx.Rngs) -> dict[str, nnx.Module]:
        positions = Embedding(self.max_positions, self.config.hidden_size, rngs, axis="positions")
        return super().before(rngs) | {"positions": positions}

    def after(self, rngs: nnx.Rngs) -> dict[str, nnx.Module]:
        return super().after(rngs) | {"norm": LayerNorm(self.config.hidden_size, self.config.norm_epsilon)}

    def rotary(self, positions_BL: Array) -> dict[str, Angles]:
        return {}

    def embed(
        self,
        ends: dict[str, Any],
        tokens_BL: Array,
        positions_BL: Array,
        dtype: jnp.dtype,
        placement: Placement,
    ) -> Array:
        x_BLD = super().embed(ends, tokens_BL, positions_BL, dtype, placement)
        return x_BLD + ends["positions"](positions_BL, dtype, placement)
