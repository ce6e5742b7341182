"""The clock for the timestamps that a process writes into its records."""

import time

_SYSTEM, _MONOTONIC = time.time(), time.monotonic()


def now() -> float:
    """Returns Unix seconds: the system time when this process began, advanced by the monotonic clock.

    So the time between two records of a process is right even if the system clock is changed in between.
    """
    return _SYSTEM + time.monotonic() - _MONOTONIC
