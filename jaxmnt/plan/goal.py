"""Computes how long a run takes to reach its goal and what it costs, including failures.

Failures occur at random, at the rate of published runs. After a failure the run resumes from its last committed
checkpoint. Let M be the mean time between failures, C the time for which a save blocks training, W the work between
saves, and R the time to recover. The work W then takes M · exp(R / M) · (exp((W + C) / M) − 1) on average (J. T. Daly,
Future Generation Computer Systems 22, 2006, equation 20). A save is written while training continues, and until it is
committed, a failure falls back to the previous one. So the time to write a save is added to R.
"""

import math
from dataclasses import dataclass

from jaxmnt.telemetry.reliability import INTERRUPTIONS_PER_DEVICE_HOUR, best_interval

_MAX_EXPONENT = 700.0
"""Maximum exponent that `math.exp` accepts, rounded down."""


@dataclass(frozen=True)
class Faults:
    """The rate of a run's failures, and the time that failures and saves cost."""

    between_seconds: float
    """Mean time between failures of the whole run."""
    blocked_seconds: float
    """Time for which a save blocks training."""
    written_seconds: float
    """Time from the beginning of a save to its commit."""
    restart_seconds: float
    """Time from a failure to the next step, without the time of repeated steps."""

    @property
    def interval_seconds(self) -> float:
        """Time between saves that loses the least time (Young–Daly), but no shorter than a save takes."""
        return max(best_interval(self.blocked_seconds, self.between_seconds), self.written_seconds, 1.0)

    @property
    def goodput(self) -> float:
        """Share of the time that is spent on steps that no failure undoes."""
        work, mean = self.interval_seconds, self.between_seconds
        recovery_exponent = (self.restart_seconds + self.written_seconds) / mean
        interval_exponent = (work + self.blocked_seconds) / mean
        if recovery_exponent + interval_exponent > _MAX_EXPONENT:
            return 0.0
        return work / (mean * math.exp(recovery_exponent) * math.expm1(interval_exponent))


COPY_RATE = 10e9
"""Bytes per second at which a save copies the state of a device to the host's memory, while training waits."""
WRITE_RATE = 1e9
"""Bytes per second at which a host then writes the copy."""
RESTART_SECONDS = 300.0
"""Default time from a failure to the next step."""


def faults_of(
    devices: int,
    state_bytes: float,
    devices_per_host: int,
    *,
    hours_between: float | None = None,
    restart_seconds: float = RESTART_SECONDS,
) -> Faults:
    """Returns the cost of failures for a run on a number of devices, each of which has `state_bytes`. `hours_between`
    are the mean hours between failures of the whole run. Its default comes from published failures of GPUs."""
    if hours_between is None:
        between_seconds = 3600 / (INTERRUPTIONS_PER_DEVICE_HOUR * devices)
    else:
        between_seconds = 3600 * hours_between
    return Faults(
        between_seconds=between_seconds,
        blocked_seconds=1.0 + state_bytes / COPY_RATE,
        written_seconds=1.0 + state_bytes * devices_per_host / WRITE_RATE,
        restart_seconds=restart_seconds,
    )


@dataclass(frozen=True)
class Goal:
    """Time and cost of a run until it has trained on its number of tokens."""

    seconds: float
    cost: float | None
    """Cost in the unit of the price; None if there is no price."""

    @property
    def days(self) -> float:
        return self.seconds / 86400

    def to_json(self) -> dict[str, float | None]:
        """Returns days and cost. Both are None if the goal is never reached, and the cost also if there is no price."""
        cost = None if self.cost is None or not math.isfinite(self.cost) else round(self.cost)
        return {"days": round(self.days, 3) if math.isfinite(self.days) else None, "cost": cost}


def time_and_cost(tokens: float, tokens_per_second: float, faults: Faults, devices: int, price: float | None) -> Goal:
    """Returns the time and cost to train on a number of tokens. `price` is that of a device-hour."""
    goodput = faults.goodput
    seconds = tokens / (tokens_per_second * goodput) if goodput else math.inf
    return Goal(seconds, None if price is None else price * devices * seconds / 3600)
