"""Detects a router that collapses: one that keeps sending most tokens to few of a layer's experts."""

from collections import Counter
from collections.abc import Mapping

_STEPS = 100
"""Number of successive steps after which a router counts as collapsed."""
_MIN_EVENNESS = 0.5
"""Minimum evenness of a layer's loads (`mixtures.metrics`)."""


class RouterCollapseDetector:
    """Follows the metrics of a run's layers, in order. It reports a collapse once."""

    def __init__(self) -> None:
        self._steps_of_layers = Counter[int]()
        """The latest steps in a row in which a layer's loads were too uneven, counted for the least even layer of
        each."""
        self._reported = False

    def see(self, metrics: Mapping[str, float]) -> int | None:
        """Adds the metrics of a step. Returns the layer whose router has collapsed if this step shows it, or None."""
        if self._reported or "expert_evenness_min" not in metrics:
            return None
        if metrics["expert_evenness_min"] >= _MIN_EVENNESS:
            self._steps_of_layers.clear()
            return None
        self._steps_of_layers[int(metrics["expert_evenness_min_layer"])] += 1
        if self._steps_of_layers.total() < _STEPS:
            return None
        self._reported = True
        [(layer, _)] = self._steps_of_layers.most_common(1)
        return layer
