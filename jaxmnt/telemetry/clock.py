"""The time that a process writes into its records."""

import time

_SYSTEM, _MONOTONIC = time.time(), time.monotonic()


def now() -> float:
    """Unix seconds: the system's time when this process began, and from then on by a clock that nobody can set.

    So the seconds between two records of a process are right, whatever becomes of the system's clock meanwhile.
    """
    return _SYSTEM + time.monotonic() - _MONOTONIC
