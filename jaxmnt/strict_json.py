"""JSON that every parser reads: NaN and infinity, which JSON does not have, become null."""

import json
import math
from typing import Any


def json_text(value: Any, **options: Any) -> str:
    """Returns `value` as JSON. Whatever this package writes for others goes through here; `options` are those of
    `json.dumps`."""
    return json.dumps(finite(value), allow_nan=False, **options)


def finite(value: Any) -> Any:
    """Returns the same value with None for NaN and infinity, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value
