"""How long a run takes to its goal, and what it costs, with failures on the way.

Failures come at random, as often as published runs have them. After one the run starts again from its last committed
checkpoint. With M between failures, saves that block for C after W of work, and R to be back, W of work take
M · exp(R / M) · (exp((W + C) / M) − 1) on average (J. T. Daly, Future Generation Computer Systems 22, 2006, equation
20). A save is written while training goes on: until it is committed the one before counts, so that a failure costs the
time of writing more, which is added to R.
"""

import math
from dataclasses import dataclass

from jaxmnt.telemetry.reliability import INTERRUPTIONS_A_DEVICE_HOUR, best_interval

_LARGEST = 700.0
"""What exp takes."""


@dataclass(frozen=True)
class Faults:
    """What failures cost."""

    between_seconds: float
    """The mean time between failures of the whole run."""
    blocked_seconds: float
    """For how long a save holds training up."""
    written_seconds: float
    """From a save's begin to its commit."""
    restart_seconds: float
    """From a failure to the first step after it, without the steps that are taken again."""

    @property
    def interval_seconds(self) -> float:
        """Work between saves that loses the least time (Young–Daly). No shorter than a save takes."""
        return max(best_interval(self.blocked_seconds, self.between_seconds), self.written_seconds, 1.0)

    @property
    def goodput(self) -> float:
        """The share of time that goes into steps that count."""
        work, mean = self.interval_seconds, self.between_seconds
        again = (self.restart_seconds + self.written_seconds) / mean
        once = (work + self.blocked_seconds) / mean
        if again + once > _LARGEST:
            return 0.0
        return work / (mean * math.exp(again) * math.expm1(once))


BLOCKED_BYTES, WRITTEN_BYTES = 10e9, 1e9
"""A second: what a save copies to the host's memory while training waits, and what a host writes of it meanwhile."""
RESTART_SECONDS = 300.0


def faults_of(
    devices: int,
    state_bytes: float,
    devices_per_host: int,
    *,
    hours_between: float | None = None,
    restart_seconds: float = RESTART_SECONDS,
) -> Faults:
    """Of a run on so many devices with so much state on each. Without `hours_between`, those of the whole run,
    published failures of GPUs are assumed."""
    between = 3600 / (INTERRUPTIONS_A_DEVICE_HOUR * devices) if hours_between is None else 3600 * hours_between
    return Faults(
        between_seconds=between,
        blocked_seconds=1.0 + state_bytes / BLOCKED_BYTES,
        written_seconds=1.0 + state_bytes * devices_per_host / WRITTEN_BYTES,
        restart_seconds=restart_seconds,
    )


@dataclass(frozen=True)
class Goal:
    """What a run takes to so many tokens."""

    seconds: float
    cost: float | None
    """None without a price."""

    @property
    def days(self) -> float:
        return self.seconds / 86400

    def to_json(self) -> dict[str, float | None]:
        """Days and cost; None for what is never reached, and for a cost without a price."""
        cost = None if self.cost is None or not math.isfinite(self.cost) else round(self.cost)
        return {"days": round(self.days, 3) if math.isfinite(self.days) else None, "cost": cost}


def reach(tokens: float, tokens_per_second: float, faults: Faults, devices: int, price: float | None) -> Goal:
    """`price` is that of an hour of a device."""
    goodput = faults.goodput
    seconds = tokens / (tokens_per_second * goodput) if goodput else math.inf
    return Goal(seconds, None if price is None else price * devices * seconds / 3600)
