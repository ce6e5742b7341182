"""Gemma 2 (Gemma Team 2024, arXiv:2408.00118): layers with a window and layers without alternate.

Each layer has a norm before and after its attention and its MLP; norms multiply by 1 + w. Embeddings are multiplied by
the root of the width, and attention's scores and the logits are bent by soft caps. It has tied embeddings
(`model.tie_embeddings`).

Shapes: B batch, L length, S a device's piece of the length, D model, V a device's part of the vocabulary, C tokens.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmnt.config.schema import Model
from jaxmnt.errors import ConfigError
from jaxmnt.models.attention import Attention
from jaxmnt.models.contract import AttentionShape, Family, LayerContext, LayerGroup, LayerOutput
from jaxmnt.models.layers import INIT_STD, GatedMLP, RMSNorm, dropout
from jaxmnt.parallel.sharding import Placement

PATTERN = ("local", "global")

_gelu = functools.partial(jax.nn.gelu, approximate=True)


def _window(config: Model, kind: str) -> int | None:
    return config.sliding_window if kind == "local" else None


class GemmaAttention(Attention):
    """Attention with a soft cap, a scale of its own, and in local layers a window."""

    def __init__(self, config: Model, kind: str, output_std: float, rngs: nnx.Rngs):
        super().__init__(config, output_std, rngs)
        self.window = _window(config, kind)
        self.soft_cap, self.scale = config.attention_soft_cap, config.attention_scale

    def options(self) -> dict[str, Any]:
        return {"window": self.window, "soft_cap": self.soft_cap, "scale": self.scale}


class Block(nnx.Module):
    """One layer with norms on both sides."""

    def __init__(self, config: Model, kind: str, rngs: nnx.Rngs):
        assert config.intermediate_size
        output_std = INIT_STD / (2 * config.num_layers) ** 0.5
        norm = functools.partial(RMSNorm, config.hidden_size, config.norm_epsilon, offset=1.0)
        self.attention_norm, self.after_attention_norm = norm(), norm()
        self.attention = GemmaAttention(config, kind, output_std, rngs)
        self.mlp_norm, self.after_mlp_norm = norm(), norm()
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, output_std, rngs, _gelu)
        self.dropout = config.dropout

    def __call__(self, x_BSD: jax.Array, context: LayerContext) -> LayerOutput:
        attention_keys, mlp_keys = context.keys(2)
        a_BSD = self.after_attention_norm(self.attention(self.attention_norm(x_BSD), context))
        x_BSD = x_BSD + dropout(a_BSD, self.dropout, attention_keys, context.placement)
        m_BSD = self.after_mlp_norm(self.mlp(self.mlp_norm(x_BSD), context.placement))
        return LayerOutput(x_BSD + dropout(m_BSD, self.dropout, mlp_keys, context.placement))


class Gemma2(Family):
    """Layers in pairs: the first of each has a window (`model.sliding_window`)."""

    settings = ("sliding_window", "attention_scale", "attention_soft_cap", "logit_soft_cap")

    def groups(self) -> list[LayerGroup]:
        layers = self.config.num_layers
        if layers % len(PATTERN):
            raise ConfigError(
                f"model.num_layers: {layers} layers do not divide into the pattern {', '.join(PATTERN)}; "
                f"use a multiple of {len(PATTERN)}"
            )
        return [LayerGroup("layers", PATTERN, layers // len(PATTERN))]

    def layer(self, kind: str, rngs: nnx.Rngs) -> nnx.Module:
        return Block(self.config, kind, rngs)

    def attention_shape(self, kind: str) -> AttentionShape:
        return super().attention_shape(kind)._replace(window=_window(self.config, kind))

    def after(self, rngs: nnx.Rngs) -> dict[str, nnx.Module]:
        return super().after(rngs) | {"norm": RMSNorm(self.config.hidden_size, self.config.norm_epsilon, offset=1.0)}

    def embed(self, ends: dict[str, Any], tokens_BL: jax.Array, dtype: jnp.dtype, placement: Placement) -> jax.Array:
        scale = jnp.asarray(self.config.hidden_size**0.5, dtype)
        return super().embed(ends, tokens_BL, dtype, placement) * scale

    def finish_logits(self, ends: dict[str, Any], logits_CV: jax.Array) -> jax.Array:
        cap = self.config.logit_soft_cap
        return logits_CV if cap is None else cap * jnp.tanh(logits_CV / cap)
