"""Estimates how often a run fails, and from that how often it should save."""

import math
from typing import Literal

INTERRUPTIONS_PER_DEVICE_HOUR = 419 / (54 * 24 * 16384)
"""Rate of the 419 unexpected interruptions that Llama 3 had in 54 days on 16,384 GPUs (arXiv:2407.21783, section
3.3.4)."""


def best_interval(save_seconds: float, seconds_between_failures: float) -> float:
    """Returns the seconds of work between saves that minimise lost time.

    This is Daly's higher-order estimate (J. T. Daly, Future Generation Computer Systems 22, 2006, equation 37), which
    approaches Young's √(2·cost·M) for a small cost: √(2·cost·M)·(1 + ⅓·√(cost/2M) + ⅑·(cost/2M)) − cost.
    """
    cost, mean = save_seconds, seconds_between_failures
    if cost >= 2 * mean:
        return mean
    ratio = cost / (2 * mean)
    return math.sqrt(2 * cost * mean) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


def seconds_between_failures(
    stated_hours: float | None, failures: int, seconds_running: float, devices: int
) -> tuple[float, Literal["stated", "measured", "assumed"]]:
    """Returns the mean time between failures of a run, and where the number comes from.

    Once this run has failed, the time is measured from its own failures. Before that, the published failure rate of
    GPUs is assumed.
    """
    if stated_hours is not None:
        return stated_hours * 3600, "stated"
    if failures > 0 and seconds_running > 0:
        return seconds_running / failures, "measured"
    return 3600 / (INTERRUPTIONS_PER_DEVICE_HOUR * devices), "assumed"
