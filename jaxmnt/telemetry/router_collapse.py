"""Detects a router that collapses: one that keeps sending most tokens to few of a layer's experts."""

from collections.abc import Mapping
from typing import NamedTuple

_STEPS = 100
"""Number of successive steps after which a router counts as collapsed."""
_MIN_ENTROPY = 0.5
"""Minimum entropy of a layer's loads, relative to that of even loads."""
_MAX_LOAD = 20.0
"""Maximum load of an expert, relative to the mean."""


class RouterCollapse(NamedTuple):
    layer: int
    why: str
    """The limit that the layer has passed, as a clause."""


class RouterCollapseDetector:
    """Follows the metrics of a run's layers (`mixtures.metrics`), in order. It reports a collapse once."""

    def __init__(self) -> None:
        self._low_entropy = self._high_load = 0
        """Numbers of successive steps in which the worst layer passed a limit."""
        self._reported = False

    def see(self, metrics: Mapping[str, float]) -> RouterCollapse | None:
        """Adds the metrics of a step. Returns the collapse if this step shows it, or None."""
        if self._reported or "expert_entropy_min" not in metrics:
            return None
        entropy, load = metrics["expert_entropy_min"], metrics["expert_load_max"]
        self._low_entropy = self._low_entropy + 1 if entropy < _MIN_ENTROPY else 0
        self._high_load = self._high_load + 1 if load > _MAX_LOAD else 0
        if self._low_entropy < _STEPS and self._high_load < _STEPS:
            return None
        self._reported = True
        if self._low_entropy >= _STEPS:
            layer, why = (
                metrics["expert_entropy_min_layer"],
                f"the entropy of their loads is {entropy:.2f} of even loads'",
            )
        else:
            layer, why = metrics["expert_load_max_layer"], f"one of them has {load:.0f} times the mean load"
        return RouterCollapse(int(layer), why)
