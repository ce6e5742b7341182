"""Small versions of a model, with the same kinds of parts."""

from typing import Any

from jaxmnt.config.model import Model

HIDDEN_SIZE = 64


def small_model(model: Model, layers: int, *, has_patterns: bool) -> dict[str, Any]:
    """Returns settings for a small model of the same family, with `layers` layers. If the family repeats a pattern of
    layers, it has `layers` patterns of two layers each."""
    settings: dict[str, Any] = {
        "hidden_size": HIDDEN_SIZE,
        "num_layers": layers,
        "num_heads": 4,
        "num_kv_heads": 4 if model.num_kv_heads == model.num_heads else 2,
        "head_dim": HIDDEN_SIZE // 4,
        "intermediate_size": 2 * HIDDEN_SIZE,
        "attention": "auto",
    }
    if has_patterns:  # each stage of a pipeline has only complete patterns
        settings |= {"sliding_window_pattern": 2, "num_layers": 2 * layers}
    return settings
