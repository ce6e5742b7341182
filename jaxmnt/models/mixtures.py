"""Mixtures of experts whose other parts are those of a dense family.

Mixtral (Jiang et al. 2024, arXiv:2401.04088) is Mistral with experts, Qwen 3's mixtures (Qwen Team 2025,
arXiv:2505.09388) are Qwen 3 with experts, and OLMoE (Muennighoff et al. 2024, arXiv:2409.02060) has Llama's layers with
OLMo 2's norms of queries and keys. Every layer has experts, see `models.experts`.

Shapes: B batch, S a device's piece of the length, D model, N layers, E experts.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxmnt.config.model import EXPERT_SETTINGS, Model
from jaxmnt.errors import ConfigError
from jaxmnt.models.contract import LayerContext, LayerCosts, Sums
from jaxmnt.models.experts import CALLS, EXPERT_ROUND, ROUNDS, Experts
from jaxmnt.models.huggingface import (
    ATTENTION,
    ENDS,
    NO_ATTENTION_BIAS,
    NORMED_HEADS,
    PRE_NORMS,
    SILU_ACTIVATION,
    HuggingFace,
    Setting,
    common_settings,
    experts,
    joined_experts,
)
from jaxmnt.models.llama import NO_WINDOW, UNUSED_WINDOW_KEYS, Block, Llama, Mistral, NormedAttention
from jaxmnt.models.olmo import OlmoAttention


class ExpertBlock(Block):
    """A layer whose second branch is a layer of experts."""

    experts: Experts

    def add_mlp(self, config: Model, output_std: float, rngs: nnx.Rngs) -> None:
        self.experts = Experts(config, output_std, rngs)

    def run_mlp(self, x_BSD: Array, context: LayerContext) -> tuple[Array, Array | None, Sums]:
        return self.experts(x_BSD, context)


class Mixture(Llama):
    """A family whose layers all have experts."""

    settings: Sequence[str] = EXPERT_SETTINGS
    block = ExpertBlock
    uses_targets_per_token = True
    expert_defaults: Mapping[str, Any] = {
        "router_score": "softmax",
        "router_renormalise": True,
        "balance_loss": 0.01,
        "balance_over": "batch",
        "router_z_loss": 0.0,
        "router_bias_rate": 0.0,
        "expert_round": EXPERT_ROUND,
    }
    """The settings of experts that the config leaves out."""

    def __init__(self, config: Model, vocab_size: int):
        """Raises `ConfigError` for settings of experts that are missing or contradict each other."""
        for name in ("num_experts", "experts_per_token"):
            if getattr(config, name) is None:
                raise ConfigError(f"model.{name}: the family {config.family} has experts; set it, or choose a preset")
        assert config.num_experts and config.experts_per_token
        if config.experts_per_token > config.num_experts:
            raise ConfigError(
                f"model.experts_per_token: {config.experts_per_token} is more than model.num_experts "
                f"({config.num_experts}); lower it"
            )
        super().__init__(self.with_defaults(config), vocab_size)

    @classmethod
    def with_defaults(cls, config: Model) -> Model:
        defaults = {"expert_size": config.intermediate_size, **cls.expert_defaults}
        missing = {name: value for name, value in defaults.items() if getattr(config, name) is None}
        return config.model_copy(update=missing)

    def costs(self, kind: str) -> LayerCosts:
        costs = super().costs(kind)
        assert self.config.num_experts and self.config.experts_per_token
        share = self.config.experts_per_token / self.config.num_experts
        products = (product._replace(share=share) if product.experts > 1 else product for product in costs.products)
        return costs._replace(products=tuple(products))

    def metrics(self, sums: dict[str, Any], tokens: Array) -> Sums:
        """Returns how even the loads are: in the worst layer, the largest load relative to the mean, the evenness, and
        the balance loss of the global batch; the layer of the least evenness, which counts from 0; and the share of
        experts, of all layers, with less than 1 % of the mean load.

        Evenness is the entropy of the loads, scaled so that it is 1 for even loads, and 0 if all tokens use the same
        experts.
        """
        layers = sums["layers"]
        loads_NE, scores_NE = layers["loads"], layers["scores"]
        experts = loads_NE.shape[-1]
        total_N1 = jnp.maximum(jnp.sum(loads_NE, axis=-1, keepdims=True), 1)
        load_NE = loads_NE / total_N1
        score_NE = scores_NE / jnp.maximum(jnp.sum(scores_NE, axis=-1, keepdims=True), 1e-9)
        entropy_N = -jnp.sum(load_NE * jnp.log(jnp.maximum(load_NE, 1e-9)), axis=-1)
        assert self.config.experts_per_token
        least, most = math.log(self.config.experts_per_token), math.log(experts)
        evenness_N = (entropy_N - least) / (most - least) if most > least else jnp.ones_like(entropy_N)
        return {
            "expert_load_max": jnp.max(load_NE) * experts,
            "expert_evenness_min": jnp.min(evenness_N),
            "expert_evenness_min_layer": jnp.argmin(evenness_N).astype(jnp.float32),
            "expert_balance_max": jnp.max(experts * jnp.sum(load_NE * score_NE, axis=-1)),
            "experts_unused": jnp.mean(load_NE * experts < 0.01),
            "expert_rounds": jnp.max(layers[ROUNDS] / jnp.maximum(layers[CALLS], 1)),
        }

    def update_buffers(self, buffers: dict[str, Any], sums: dict[str, Any]) -> dict[str, Any]:
        """Returns the loads of this step, and the biases moved towards even loads (Wang et al. 2024,
        arXiv:2408.15664)."""
        assert self.config.experts_per_token and self.config.router_bias_rate is not None
        loads_NE = sums["layers"]["loads"]
        total_N1 = jnp.maximum(jnp.sum(loads_NE, axis=-1, keepdims=True), 1)
        direction_NE = jnp.sign(jnp.mean(loads_NE, axis=-1, keepdims=True) - loads_NE)
        bias_NE = buffers["layers"]["experts"]["bias"] + self.config.router_bias_rate * direction_NE
        load_NE = loads_NE / total_N1 * self.config.experts_per_token
        return {"layers": {"experts": {"load": load_NE, "bias": bias_NE}}}


_EXPERT_MODULES = experts(
    "model.layers.{}.mlp.gate",
    "model.layers.{}.mlp.experts.{expert}.gate_proj",
    "model.layers.{}.mlp.experts.{expert}.up_proj",
    "model.layers.{}.mlp.experts.{expert}.down_proj",
)
_BALANCE_SETTING = Setting("balance_loss", times="experts_per_token")
"""Hugging Face does not divide loads by the number of experts of a token, so its loss is that many times larger."""
_NOT_SUPPORTED = {"router_jitter_noise": (0.0, None), "output_router_logits": (False, True)}


_MIXTRAL_EXPERTS = experts(
    "model.layers.{}.block_sparse_moe.gate",
    "model.layers.{}.block_sparse_moe.experts.{expert}.w1",
    "model.layers.{}.block_sparse_moe.experts.{expert}.w3",
    "model.layers.{}.block_sparse_moe.experts.{expert}.w2",
)


class Mixtral(Mixture, Mistral):
    """Mixtral, with one kind of layer."""

    settings = (*Mixture.settings, *Mistral.settings)
    hugging_face = HuggingFace(
        "mixtral",
        "MixtralForCausalLM",
        ATTENTION | PRE_NORMS | _MIXTRAL_EXPERTS,
        ENDS,
        common_settings(
            sliding_window=Setting("sliding_window"),
            num_experts_per_tok=Setting("experts_per_token"),
            num_local_experts=Setting("num_experts"),
            router_aux_loss_coef=_BALANCE_SETTING,
        ),
        only=SILU_ACTIVATION | _NOT_SUPPORTED,
        assumed={
            "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "num_key_value_heads": 8, "num_local_experts": 8,
            "num_experts_per_tok": 2, "rope_theta": 1000000.0,
        },
        joined=joined_experts(_MIXTRAL_EXPERTS),
    )  # fmt: skip


class Qwen3Moe(Mixture):
    """Qwen 3's mixtures of experts, with one kind of layer."""

    attention = NormedAttention
    hugging_face = HuggingFace(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        ATTENTION | PRE_NORMS | NORMED_HEADS | _EXPERT_MODULES,
        ENDS,
        common_settings(
            num_local_experts=Setting("num_experts"),
            num_experts=Setting("num_experts"),
            num_experts_per_tok=Setting("experts_per_token"),
            moe_intermediate_size=Setting("expert_size"),
            norm_topk_prob=Setting("router_renormalise"),
            router_aux_loss_coef=_BALANCE_SETTING,
        ),
        only=SILU_ACTIVATION
        | NO_ATTENTION_BIAS
        | NO_WINDOW
        | {"mlp_only_layers": ([], None), "decoder_sparse_step": (1,), "output_router_logits": (False, True)},
        assumed={
            "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "head_dim": 128, "num_key_value_heads": 4,
            "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False,
        },
        meaningless=UNUSED_WINDOW_KEYS,
        joined=joined_experts(_EXPERT_MODULES),
    )  # fmt: skip


class Olmoe(Mixture):
    """OLMoE, with one kind of layer."""

    attention = OlmoAttention
    expert_defaults: Mapping[str, Any] = {**Mixture.expert_defaults, "router_renormalise": False}
    hugging_face = HuggingFace(
        "olmoe",
        "OlmoeForCausalLM",
        ATTENTION | PRE_NORMS | NORMED_HEADS | _EXPERT_MODULES,
        ENDS,
        common_settings(
            num_experts=Setting("num_experts"),
            num_experts_per_tok=Setting("experts_per_token"),
            norm_topk_prob=Setting("router_renormalise"),
            router_aux_loss_coef=_BALANCE_SETTING,
        ),
        only=SILU_ACTIVATION
        | NO_ATTENTION_BIAS
        | {"clip_qkv": (None,), "output_router_logits": (False, True)},
        assumed={
            "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "num_experts": 64, "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
        joined=joined_experts(_EXPERT_MODULES),
    )  # fmt: skip
