"""Computes how long a run takes to its goal and what it costs, including failures.

Failures come at random, at the rate of published runs. After a failure the run resumes from its last committed
checkpoint. Let M be the mean time between failures, C the time that a save blocks training, W the work between saves,
and R the time to recover. W of work then takes M · exp(R / M) · (exp((W + C) / M) − 1) on average (J. T. Daly, Future
Generation Computer Systems 22, 2006, equation 20). A save is written while training goes on. Until it is committed, the
previous one counts, so a failure also costs the time of writing, which is added to R.
"""

import math
from dataclasses import dataclass

from jaxmnt.telemetry.reliability import INTERRUPTIONS_PER_DEVICE_HOUR, best_interval

_LARGEST = 700.0
"""Largest exponent that `math.exp` accepts, rounded down."""


@dataclass(frozen=True)
class Faults:
    """The cost of failures."""

    between_seconds: float
    """Mean time between failures of the whole run."""
    blocked_seconds: float
    """Time that a save blocks training."""
    written_seconds: float
    """Time from the begin of a save to its commit."""
    restart_seconds: float
    """Time from a failure to the first step after it, without the repeated steps."""

    @property
    def interval_seconds(self) -> float:
        """Work between saves that loses the least time (Young–Daly), at least as long as a save takes."""
        return max(best_interval(self.blocked_seconds, self.between_seconds), self.written_seconds, 1.0)

    @property
    def goodput(self) -> float:
        """Share of the time that goes into steps that count."""
        work, mean = self.interval_seconds, self.between_seconds
        again = (self.restart_seconds + self.written_seconds) / mean
        once = (work + self.blocked_seconds) / mean
        if again + once > _LARGEST:
            return 0.0
        return work / (mean * math.exp(again) * math.expm1(once))


BLOCKED_BYTES, WRITTEN_BYTES = 10e9, 1e9
"""Bytes per second at which a save copies to the host's memory while training waits, and at which a host then writes.
"""
RESTART_SECONDS = 300.0


def faults_of(
    devices: int,
    state_bytes: float,
    devices_per_host: int,
    *,
    hours_between: float | None = None,
    restart_seconds: float = RESTART_SECONDS,
) -> Faults:
    """Returns the failures of a run on this many devices with `state_bytes` on each. The default of `hours_between`,
    the mean hours between failures of the whole run, comes from published failures of GPUs."""
    between = 3600 / (INTERRUPTIONS_PER_DEVICE_HOUR * devices) if hours_between is None else 3600 * hours_between
    return Faults(
        between_seconds=between,
        blocked_seconds=1.0 + state_bytes / BLOCKED_BYTES,
        written_seconds=1.0 + state_bytes * devices_per_host / WRITTEN_BYTES,
        restart_seconds=restart_seconds,
    )


@dataclass(frozen=True)
class Goal:
    """Time and cost of a run up to its number of tokens."""

    seconds: float
    cost: float | None
    """None without a price."""

    @property
    def days(self) -> float:
        return self.seconds / 86400

    def to_json(self) -> dict[str, float | None]:
        """Returns days and cost; None for a goal that is never reached, and for a cost without a price."""
        cost = None if self.cost is None or not math.isfinite(self.cost) else round(self.cost)
        return {"days": round(self.days, 3) if math.isfinite(self.days) else None, "cost": cost}


def time_and_cost(tokens: float, tokens_per_second: float, faults: Faults, devices: int, price: float | None) -> Goal:
    """Returns the time and cost to a number of tokens. `price` is per device-hour."""
    goodput = faults.goodput
    seconds = tokens / (tokens_per_second * goodput) if goodput else math.inf
    return Goal(seconds, None if price is None else price * devices * seconds / 3600)
