"""Detects loss spikes, which are losses far above those of the last steps."""

import statistics
from collections import deque
from typing import NamedTuple

_WINDOW_STEPS = 64
"""Number of earlier steps with which a loss is compared."""
_MIN_STEPS = 32
"""Number of steps that must come first, and that must pass without a high loss before another spike is reported."""
_MIN_DEVIATIONS = 8.0
"""Minimum number of median absolute deviations by which a spike exceeds the median."""
_MIN_EXCESS = 0.1
"""Minimum fraction of the median by which a spike exceeds it."""


class LossSpike(NamedTuple):
    loss: float
    median: float
    """Median loss of the earlier steps."""


class LossSpikeDetector:
    """Follows the losses of a run's steps, in order. It gets only finite losses of batches with targets."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_WINDOW_STEPS)
        self._quiet = _MIN_STEPS
        """Number of steps since the last high loss."""

    def see(self, loss: float) -> LossSpike | None:
        """Adds the loss of a step. Returns the spike that begins with it, or None."""
        if len(self._losses) < _MIN_STEPS:
            self._losses.append(loss)
            return None
        median = statistics.median(self._losses)
        spread = statistics.median(abs(earlier - median) for earlier in self._losses)
        high = loss - median > max(_MIN_DEVIATIONS * spread, _MIN_EXCESS * abs(median))
        begins = high and self._quiet >= _MIN_STEPS
        self._quiet = 0 if high else self._quiet + 1
        self._losses.append(loss)
        return LossSpike(loss, median) if begins else None
