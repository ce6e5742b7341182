"""Peak FLOP/s of devices, from their data sheets. This module does not import JAX."""

import re
import tomllib
from pathlib import Path

PEAKS: dict[str, dict[str, float]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
"""Peak FLOP/s by a name that a device kind contains, and by dtype."""


def peaks_of(device_kind: str) -> dict[str, float]:
    """Returns the peak FLOP/s of one device for each dtype, or an empty dict if they are not known. The most specific
    name wins."""
    names = [name for name in PEAKS if re.search(rf"\b{name}\b", device_kind)]
    return PEAKS[max(names, key=len)] if names else {}
