"""Writes JSON that every parser accepts: NaN and infinity, which JSON does not have, become null."""

import json
import math
from typing import Any


def json_text(value: Any, **options: Any) -> str:
    """Returns `value` as JSON. All JSON that this package writes for other programs comes from here. `options` are
    passed to `json.dumps`."""
    return json.dumps(finite(value), allow_nan=False, **options)


def finite(value: Any) -> Any:
    """Returns the value with None for NaN and infinity, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(member) for key, member in value.items()}
    return [finite(member) for member in value] if isinstance(value, list | tuple) else value
