"""Detects loss spikes: losses far above those of the last steps."""

import statistics
from collections import deque
from typing import NamedTuple

_WINDOW = 64
"""Steps that a loss is compared with."""
_ENOUGH = 32
"""Steps that must have been seen first, and that must pass without a high loss before another spike is reported."""
_SPREADS = 8.0
"""Median absolute deviations by which a spike exceeds the median."""
_SHARE = 0.1
"""Fraction of the median by which a spike exceeds it at least."""


class LossSpike(NamedTuple):
    loss: float
    typical: float
    """Median loss of the steps before."""


class LossSpikeDetector:
    """Follows the losses of a run's steps in order: those that are finite, of batches with targets."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._quiet = _ENOUGH
        """Steps since the last high loss."""

    def see(self, loss: float) -> LossSpike | None:
        """Adds the loss of a step. Returns the spike that begins with it, or None."""
        if len(self._losses) < _ENOUGH:
            self._losses.append(loss)
            return None
        typical = statistics.median(self._losses)
        spread = statistics.median(abs(earlier - typical) for earlier in self._losses)
        high = loss - typical > max(_SPREADS * spread, _SHARE * abs(typical))
        begins = high and self._quiet >= _ENOUGH
        self._quiet = 0 if high else self._quiet + 1
        self._losses.append(loss)
        return LossSpike(loss, typical) if begins else None
