"""Settings of the model: its family, its sizes, and settings that only some families have."""

import functools
from importlib.resources import files
from typing import Any, Literal, Self

import yaml
from pydantic import field_validator, model_validator

from jaxmnt.config.section import OwnValue, Section, breaking_key, key, maths_key
from jaxmnt.errors import printable, suggest


@functools.cache
def presets() -> dict[str, dict[str, Any]]:
    """Returns the settings of the published models, by model name."""
    text = files("jaxmnt.config").joinpath("presets.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)["models"]


EXPERT_SETTINGS = (
    "num_experts", "experts_per_token", "expert_size", "router_score", "router_renormalise", "balance_loss",
    "balance_over", "router_z_loss", "router_bias_rate", "expert_round",
)  # fmt: skip
"""Settings of mixtures of experts."""

BALANCE_SETTINGS = ("balance_loss", "balance_over", "router_z_loss", "expert_round")
"""Settings of mixtures of experts that have no effect on the function of the trained model."""


class RopeScaling(Section):
    """Scaling of rotary positions beyond the training length (`models/rotary.py`)."""

    type: Literal["none", "linear", "llama3", "yarn"] = maths_key(
        "none", "Scaling of rotary positions. linear: all frequencies are scaled; llama3 and yarn: only low ones.",
    )  # fmt: skip
    factor: float = maths_key(1.0, "Factor by which positions are stretched.", ge=1)
    original_max_positions: int = maths_key(
        8192, "For llama3 and yarn: the training length before positions were stretched.", ge=1
    )
    low_frequency_factor: float = maths_key(
        1.0, "For llama3: frequencies with fewer turns than this in original_max_positions are stretched.", gt=0
    )
    high_frequency_factor: float = maths_key(
        4.0, "For llama3: frequencies with more turns than this are not stretched.", gt=0
    )
    beta_fast: float = maths_key(32.0, "For yarn: frequencies with more turns than this are not stretched.", gt=0)
    beta_slow: float = maths_key(1.0, "For yarn: frequencies with fewer turns than this are stretched.", gt=0)
    truncate: bool = maths_key(True, "For yarn: round both ends of the transition to integer frequency indices.")
    attention_factor: float | None = maths_key(
        None, "For yarn: factor for queries and keys. Default: 0.1 · ln(factor) + 1.", gt=0
    )

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.low_frequency_factor >= self.high_frequency_factor:
            raise ValueError(
                f"model.rope_scaling.low_frequency_factor: {self.low_frequency_factor:g} must be below "
                f"model.rope_scaling.high_frequency_factor ({self.high_frequency_factor:g}); change one of them"
            )
        if self.beta_slow >= self.beta_fast:
            raise ValueError(
                f"model.rope_scaling.beta_slow: {self.beta_slow:g} must be below model.rope_scaling.beta_fast "
                f"({self.beta_fast:g}); change one of them"
            )
        return self


class Model(Section):
    family: str = breaking_key(
        "llama", "Architecture: a name that docs/models.md lists, or the dotted path of a class."
    )
    options: dict[str, OwnValue] = breaking_key({}, "Settings of a family of your own.")
    preset: str | None = key(None, "Published model whose settings become the defaults; docs/models.md lists them.")
    vocab_size: int | None = breaking_key(
        None, "Rows of the embedding. Default: the vocabulary of the data, rounded up to a multiple of 64.", ge=2
    )
    hidden_size: int = breaking_key(512, "Width of the residual stream.", ge=1)
    num_layers: int = breaking_key(8, "Decoder layers.", ge=1)
    num_heads: int = breaking_key(8, "Query heads.", ge=1)
    num_kv_heads: int | None = breaking_key(None, "Key and value heads. Default: num_heads.", ge=1)
    head_dim: int | None = breaking_key(None, "Width of a head. Default: hidden_size / num_heads.", ge=2)
    intermediate_size: int | None = breaking_key(
        None, "Width of the gated MLP. Default: 8/3 · hidden_size, rounded up to a multiple of 64.", ge=1
    )
    tie_embeddings: bool = breaking_key(False, "Use the embedding as the output head.")
    rope_theta: float = maths_key(10000.0, "Base of the rotary embedding's wavelengths.", gt=1)
    local_rope_theta: float | None = maths_key(
        None, "The rope_theta of layers with a window, which have no rope_scaling. Default: rope_theta.", gt=1
    )
    rope_scaling: RopeScaling = RopeScaling()
    max_positions: int | None = breaking_key(
        None, "Length of the longest sequence, for families with learned positions.", ge=2
    )
    norm_epsilon: float = maths_key(1e-5, "Constant that RMSNorm adds to the mean square.", gt=0)
    sliding_window: int | None = breaking_key(
        None, "Tokens to which a token attends in layers with a window, including itself. Default: all.", ge=1
    )
    sliding_window_pattern: int | None = breaking_key(
        None, "Number of layers in a repeating pattern, the last of which has no window. Default: the family's.", ge=1
    )
    attention_scale: float | None = breaking_key(
        None, "Factor for attention scores. Default: head_dim to the power of -1/2.", gt=0
    )
    attention_soft_cap: float | None = breaking_key(
        None, "Attention scores are squashed by a tanh to stay below this. Default: no cap.", gt=0
    )
    logit_soft_cap: float | None = breaking_key(
        None, "Logits are squashed by a tanh to stay below this. Default: no cap.", gt=0
    )
    num_experts: int | None = breaking_key(None, "Experts of each layer, in families with experts.", ge=2)
    experts_per_token: int | None = breaking_key(None, "Experts that each token uses.", ge=1)
    expert_size: int | None = breaking_key(
        None, "Width of the gated MLP of each expert. Default: intermediate_size.", ge=1
    )
    router_score: Literal["softmax", "sigmoid", "chosen_softmax"] | None = maths_key(
        None, "Scores of experts, of which the highest are chosen. softmax: over all experts; sigmoid: of each alone; "
        "chosen_softmax: the logits choose, and the softmax is over the chosen ones. Default: softmax.",
    )  # fmt: skip
    router_renormalise: bool | None = maths_key(
        None, "Divide the scores of the chosen experts by their sum. Default: the family's."
    )
    balance_loss: float | None = maths_key(
        None, "Factor of the loss that keeps the loads of experts even, the mean over layers. Even loads have the loss "
        "1. Default: 0.01.", ge=0,
    )  # fmt: skip
    balance_over: Literal["row", "batch"] | None = maths_key(
        None, "Tokens over which the balance loss compares loads. row: each row; batch: the global batch, with the "
        "loads of the step before. Default: batch.",
    )  # fmt: skip
    router_z_loss: float | None = maths_key(
        None, "Factor of the mean squared log-sum-exp of the router's logits. Default: 0.", ge=0
    )
    router_bias_rate: float | None = maths_key(
        None, "Step by which an expert's bias, which only takes part in the choice, moves towards an even load. "
        "Default: 0.", ge=0,
    )  # fmt: skip
    expert_round: float | None = key(
        None, "Rows that a device's experts compute at a time, relative to an even load. Further rows take further "
        "rounds. Changes time and memory only. Default: 1.25.", ge=1,
    )  # fmt: skip
    experts_kernel: Literal["auto", "xla", "mosaic"] = key(
        "auto", "Kernels of the experts' matrix products. auto: mosaic on Hopper GPUs in bfloat16, else xla."
    )
    dropout: float = maths_key(0.0, "Dropout rate of the outputs of attention and MLP.", ge=0, lt=1)
    attention: Literal["auto", "xla", "cudnn"] = key(
        "auto", "Attention kernel. auto: cudnn if the GPU, dtype and head width allow it, else xla."
    )
    overlap: Literal["auto", "off", "ring", "rows"] = key(
        "auto",
        "With mesh.model: what is computed while activations are sent. rows: the other half of a microbatch; ring: "
        "other pieces of the same rows; auto: on GPUs, rows if a microbatch has two, else ring for large products, "
        "unless train.overlap_microbatches overlaps them.",
    )

    @field_validator("overlap", mode="before")
    @classmethod
    def _restore_off(cls, value: Any) -> Any:
        """Restores the word `off`, which YAML reads as false."""
        return "off" if value is False else value

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, raw: Any) -> Any:
        """Fills in the preset's settings for keys that are not set."""
        if not isinstance(raw, dict) or not isinstance(raw.get("preset"), str):
            return raw
        name = raw["preset"]
        published = presets()
        if name not in published:
            raise ValueError(f"model.preset: {printable(name)} is not known; {suggest(name, sorted(published))}")
        settings = published[name]
        scaling = raw.get("rope_scaling")
        merged = settings | raw
        if isinstance(scaling, dict):
            merged["rope_scaling"] = settings.get("rope_scaling", {}) | scaling
        return merged


def complete_model(model: Model) -> Model:
    """Fills in the sizes that follow from others. Raises `ValueError` for contradictory sizes."""
    heads, head_dim = model.num_heads, model.head_dim
    if head_dim is None:
        if model.hidden_size % heads:
            raise ValueError(
                f"model.num_heads: model.hidden_size ({model.hidden_size}) cannot be split evenly among {heads} heads; "
                "change one of them or set model.head_dim"
            )
        head_dim = model.hidden_size // heads
    if head_dim % 2:
        raise ValueError("model.head_dim: rotary embeddings need an even width of heads; choose an even number")
    kv_heads = model.num_kv_heads or heads
    if heads % kv_heads:
        raise ValueError(
            f"model.num_kv_heads: {kv_heads} must divide model.num_heads {heads}; choose a divisor of {heads}"
        )
    width = model.intermediate_size or -(-model.hidden_size * 8 // 3 // 64) * 64
    return model.model_copy(update={"head_dim": head_dim, "num_kv_heads": kv_heads, "intermediate_size": width})
