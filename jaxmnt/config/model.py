"""Settings of the model: its family, its sizes, and settings that only some families have."""

import functools
from importlib.resources import files
from typing import Any, Literal, Self

import yaml
from pydantic import field_validator, model_validator

from jaxmnt.config.section import Section, breaking_key, key, maths_key
from jaxmnt.errors import printable, suggest


@functools.cache
def presets() -> dict[str, dict[str, Any]]:
    """Returns the settings of the published models, by model name."""
    text = files("jaxmnt.config").joinpath("presets.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)["models"]


class RopeScaling(Section):
    """Scaling of rotary positions beyond the training length (`models/rotary.py`)."""

    type: Literal["none", "linear", "llama3", "yarn"] = maths_key(
        "none", "Scaling of rotary positions: of all frequencies (linear), or only of low ones (llama3, yarn).",
    )  # fmt: skip
    factor: float = maths_key(1.0, "Factor by which positions are stretched.", ge=1)
    original_max_positions: int = maths_key(
        8192, "For llama3 and yarn: the length of training before it was stretched.", ge=1
    )
    low_frequency_factor: float = maths_key(
        1.0, "For llama3: frequencies with fewer turns than this in that length are stretched.", gt=0
    )
    high_frequency_factor: float = maths_key(4.0, "For llama3: frequencies with more turns than this are not.", gt=0)
    beta_fast: float = maths_key(32.0, "For yarn: frequencies with more turns than this are not stretched.", gt=0)
    beta_slow: float = maths_key(1.0, "For yarn: frequencies with fewer turns than this are stretched.", gt=0)
    truncate: bool = maths_key(True, "For yarn: round the transition's ends to whole frequencies.")
    attention_factor: float | None = maths_key(
        None, "For yarn: multiplies queries and keys; default 0.1 · ln(factor) + 1.", gt=0
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
    preset: str | None = key(None, "Published model, whose settings are the defaults; docs/models.md lists the models.")
    vocab_size: int | None = breaking_key(
        None, "Rows of the embedding; default the data's vocabulary rounded up to 64.", ge=2
    )
    hidden_size: int = breaking_key(512, "Width of the residual stream.", ge=1)
    num_layers: int = breaking_key(8, "Decoder layers.", ge=1)
    num_heads: int = breaking_key(8, "Query heads.", ge=1)
    num_kv_heads: int | None = breaking_key(None, "Key and value heads; default num_heads.", ge=1)
    head_dim: int | None = breaking_key(None, "Width of a head; default hidden_size / num_heads.", ge=2)
    intermediate_size: int | None = breaking_key(
        None, "Width of the gated MLP; default 8/3 hidden_size rounded up to 64.", ge=1
    )
    tie_embeddings: bool = breaking_key(False, "Use the embedding as the output head.")
    rope_theta: float = maths_key(10000.0, "Base of the rotary embedding's wavelengths.", gt=1)
    local_rope_theta: float | None = maths_key(
        None, "The same in layers with a window, which have no rope_scaling; default rope_theta.", gt=1
    )
    rope_scaling: RopeScaling = RopeScaling()
    max_positions: int | None = breaking_key(None, "The longest sequence, where positions are learned.", ge=2)
    norm_epsilon: float = maths_key(1e-5, "Added to the mean square in RMSNorm.", gt=0)
    sliding_window: int | None = breaking_key(
        None, "Tokens that a layer with a window sees, its own among them; default all.", ge=1
    )
    sliding_window_pattern: int | None = breaking_key(
        None, "One layer of so many has no window, the last; default the family's.", ge=1
    )
    attention_scale: float | None = breaking_key(
        None, "Multiplies the scores of attention; default head_dim to the power of -1/2.", gt=0
    )
    attention_soft_cap: float | None = breaking_key(
        None, "Bends the scores of attention to stay below it; default no cap.", gt=0
    )
    logit_soft_cap: float | None = breaking_key(None, "Bends the logits to stay below it; default no cap.", gt=0)
    dropout: float = maths_key(0.0, "Dropout on the output of attention and MLP.", ge=0, lt=1)
    attention: Literal["auto", "xla", "cudnn"] = key(
        "auto", "Attention kernel; auto is cudnn where the GPU, dtype and head width allow, else xla."
    )
    overlap: Literal["auto", "off", "ring", "rows"] = key(
        "auto",
        "With mesh.model, what is computed while activations are sent: rows, the other half of a microbatch; ring, "
        "other pieces of the same rows; auto, on GPUs, rows where there are two, else ring for large products.",
    )

    @field_validator("overlap", mode="before")
    @classmethod
    def _restore_off(cls, value: Any) -> Any:
        """Restores the word off, which YAML reads as false."""
        return "off" if value is False else value

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, raw: Any) -> Any:
        """Fills in the preset's settings where none are set."""
        if not isinstance(raw, dict) or not isinstance(raw.get("preset"), str):
            return raw
        name, published = raw["preset"], presets()
        if name not in published:
            raise ValueError(f"model.preset: {printable(name)} is not known; {suggest(name, sorted(published))}")
        settings = published[name]
        scaling = raw.get("rope_scaling")
        both = {"rope_scaling": settings.get("rope_scaling", {}) | scaling} if isinstance(scaling, dict) else {}
        return settings | raw | both


def complete_model(model: Model) -> Model:
    """Fills in the sizes that follow from others. Raises `ValueError` for contradictory sizes."""
    heads, head_dim = model.num_heads, model.head_dim
    if head_dim is None:
        if model.hidden_size % heads:
            raise ValueError(
                f"model.num_heads: {heads} heads do not divide model.hidden_size {model.hidden_size}; "
                "change one of them or set model.head_dim"
            )
        head_dim = model.hidden_size // heads
    if head_dim % 2:
        raise ValueError("model.head_dim: rotary embeddings need an even width; choose an even head_dim")
    kv_heads = model.num_kv_heads or heads
    if heads % kv_heads:
        raise ValueError(
            f"model.num_kv_heads: {kv_heads} must divide model.num_heads {heads}; choose a divisor of {heads}"
        )
    width = model.intermediate_size or -(-model.hidden_size * 8 // 3 // 64) * 64
    return model.model_copy(update={"head_dim": head_dim, "num_kv_heads": kv_heads, "intermediate_size": width})
