"""Which settings of `model` decide what a model computes, and in which two models differ."""

import math
from typing import Any

from jaxmnt.config.load import flat
from jaxmnt.config.model import Model
from jaxmnt.models.registry import OPTIONAL, family_class

_NOT_COMPUTED = ("preset", "dropout", "attention", "overlap")
"""Settings that name a source, regularise training, or choose between programs for the same function."""

SIZES = (
    "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size",
    "tie_embeddings", "max_positions",
)  # fmt: skip
"""Settings on which the shapes of parameters depend."""

_OF_SCALING = {
    "none": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_positions", "low_frequency_factor", "high_frequency_factor"),
    "yarn": ("factor", "original_max_positions", "beta_fast", "beta_slow", "truncate", "attention_factor"),
}


def computed_settings(model: Model) -> dict[str, Any]:
    """Returns the settings that decide what a model computes, by dotted key, with defaults written out.

    The model must be complete (`complete_model`). Raises `ConfigError` for a family that is not known.
    """
    kind = family_class(model.family)
    settings = flat(model.model_dump(exclude={*_NOT_COMPUTED, "rope_scaling"}))
    settings = {key: value for key, value in settings.items() if key not in OPTIONAL or key in kind.settings}
    if "max_positions" in kind.settings:
        del settings["rope_theta"]
    else:
        scaling = model.rope_scaling
        settings["rope_scaling.type"] = scaling.type
        settings |= {f"rope_scaling.{key}": getattr(scaling, key) for key in _OF_SCALING[scaling.type]}
        if scaling.type == "yarn" and scaling.attention_factor is None:
            settings["rope_scaling.attention_factor"] = 0.1 * math.log(scaling.factor) + 1
    defaults = {
        "local_rope_theta": model.rope_theta,
        "sliding_window_pattern": getattr(kind, "pattern_length", None),
        "attention_scale": None if model.head_dim is None else model.head_dim**-0.5,
    }
    return settings | {key: default for key, default in defaults.items() if key in settings and settings[key] is None}


def different_settings(one: Model, other: Model) -> dict[str, tuple[Any, Any]]:
    """Returns both values of each setting in which two models compute something else, sorted by dotted key.

    Numbers count as equal within 10⁻⁶, since config.json holds some of them in another form.
    """
    first, second = computed_settings(one), computed_settings(other)
    pairs = {key: (first.get(key), second.get(key)) for key in sorted(first.keys() | second.keys())}
    return {key: pair for key, pair in pairs.items() if not _equal(*pair)}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) or isinstance(other, float):
        return one is not None and other is not None and math.isclose(one, other, rel_tol=1e-6)
    return bool(one == other)
