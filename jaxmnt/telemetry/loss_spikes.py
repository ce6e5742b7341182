"""A loss that jumps: far above what the last steps had."""

import statistics
from collections import deque
from typing import NamedTuple

_WINDOW = 64
"""Steps that a loss is compared with."""
_ENOUGH = 32
"""Steps that must have been seen, and that must pass without a high loss before another spike is told."""
_SPREADS = 8.0
"""Median absolute deviations above the median."""
_SHARE = 0.1
"""Of the median: what a spike is above it at least."""


class LossSpike(NamedTuple):
    loss: float
    typical: float
    """The median of the steps before."""


class LossSpikeDetector:
    """Sees the losses of a run's steps in order: those that are finite, of batches with targets."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._quiet = _ENOUGH
        """Steps since the loss was high last."""

    def see(self, loss: float) -> LossSpike | None:
        """The spike that begins with this step, if one does."""
        if len(self._losses) < _ENOUGH:
            self._losses.append(loss)
            return None
        typical = statistics.median(self._losses)
        spread = statistics.median(abs(one - typical) for one in self._losses)
        high = loss - typical > max(_SPREADS * spread, _SHARE * abs(typical))
        begins = high and self._quiet >= _ENOUGH
        self._quiet = 0 if high else self._quiet + 1
        self._losses.append(loss)
        return LossSpike(loss, typical) if begins else None
