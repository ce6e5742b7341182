"""Decides whether a run that has failed is started again, from the records of its starts alone.

Launchers and the simulation call these functions. A run goes on as long as it gains steps. It is given up if it fails
in the same way in the same step again and again, if it gains no step, or if it fails far more often than its devices
are expected to.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from jaxmnt.errors import counted
from jaxmnt.telemetry.reliability import INTERRUPTIONS_PER_DEVICE_HOUR

MAX_SAME_STEP = 3
"""Number of consecutive failures of one cause in one step after which a run is given up."""
MAX_SAME_CAUSE, MAX_WITHOUT_GAIN = 5, 12
"""Numbers of consecutive failed starts without a step gained after which a run is given up: those of one cause, and
those of any cause."""
_WINDOWS = ((3600.0, 10, "an hour"), (86400.0, 50, "a day"))
"""For each window of time: its seconds, the number of failures that it may always have, and its name."""
_FAULT_FACTOR = 4.0
"""Factor by which the failures in a window may exceed those that are expected."""
_JOBSET_SECONDS = 60 * 86400.0
"""Time for which a JobSet's restarts suffice."""
_MIN_JOBSET_RESTARTS = 20


class Start(NamedTuple):
    """A start of a run that has ended, other than by waiting in vain for a process."""

    time: float
    """Unix seconds at which the start ended."""
    failed: bool
    """False for a start that stopped because it was asked to."""
    step: int | None = None
    """Step that the run was taking when the start ended; None if it ended before its first step."""
    cause: str = ""
    """Description of the failure, in which two failures of one cause are equal."""
    node: str | None = None
    """Node that is blamed for the failure; None if no node is."""
    checkpoint: int = 0
    """Step of the checkpoint that the run wrote last; 0 if it has none."""


class Decision(NamedTuple):
    """The action after a failed start: again in this allocation, again in another, or none."""

    action: Literal["again", "requeue", "end"]
    reason: str = ""


def decide(
    starts: Sequence[Start],
    in_allocation: int,
    devices: int,
    *,
    restarts: int | None = None,
    spare_nodes: int | None = None,
    restarts_done: int | None = None,
) -> Decision:
    """Decides what happens after the last of `starts`, which has failed.

    The last `in_allocation` starts were in the current allocation. `restarts` is the maximum number of restarts in an
    allocation, None for no maximum, and `spare_nodes` the number of its spare nodes, None if it is not known.
    `restarts_done` is the number of restarts in the allocation, if other starts than these count as well.
    """
    restarts_done = in_allocation - 1 if restarts_done is None else restarts_done
    if reason := reason_to_give_up(starts, devices):
        return Decision("end", reason)
    if restarts is not None and restarts_done >= restarts:
        return Decision("requeue", f"{restarts_done} of {restarts} restarts used in this allocation")
    if reason := reason_to_give_back(starts[-in_allocation:], spare_nodes):
        return Decision("requeue", reason)
    return Decision("again")


def reason_to_give_back(starts: Sequence[Start], spare_nodes: int | None) -> str:
    """Returns why an allocation in which these starts failed is given back; empty if it is kept."""
    if not starts or (node := starts[-1].node) is None:
        return ""
    blamed = [start.node for start in starts if start.node is not None]
    if blamed.count(node) > 1:
        return f"{node} was tried twice here"
    if spare_nodes and len(set(blamed)) > spare_nodes:
        return f"{counted(spare_nodes, 'spare node is', 'spare nodes are')} used up"
    return ""


def reason_to_give_up(starts: Sequence[Start], devices: int) -> str:
    """Returns why a run with these starts, the last of which has failed, is given up; empty if it goes on."""
    failed = [start for start in starts if start.failed]
    last = failed[-1]
    same_step = [start for start in failed[-MAX_SAME_STEP:] if start.step == last.step and _have_one_cause(start, last)]
    if last.step is not None and len(same_step) == MAX_SAME_STEP:
        return f"it failed {MAX_SAME_STEP} times in step {last.step}, in the same way"
    streak = failures_without_gain(starts)
    if len(streak) >= MAX_SAME_CAUSE and all(_have_one_cause(start, last) for start in streak[-MAX_SAME_CAUSE:]):
        return f"{MAX_SAME_CAUSE} starts failed in the same way, and no step was gained"
    if len(streak) >= MAX_WITHOUT_GAIN:
        return f"{len(streak)} starts failed, and no step was gained"
    return _too_many_failures(failed, devices)


def _have_one_cause(first: Start, second: Start) -> bool:
    """Returns True if two failures have the same known cause."""
    is_known = bool(first.cause or first.node)
    return is_known and (first.cause, first.node) == (second.cause, second.node)


def failures_without_gain(starts: Sequence[Start]) -> list[Start]:
    """Returns the last failed starts that did not reach a step beyond those of all earlier starts.

    Steps that are taken again are no gain, unless a checkpoint of a later step than at the start before is behind them:
    after a damaged checkpoint, a run has a long way to go again. A start that gained steps before it failed ends the
    series.
    """
    furthest, checkpoint = 0, math.inf
    streak: list[Start] = []
    for start in starts:
        if (start.step is not None and start.step > furthest) or start.checkpoint > checkpoint:
            furthest, streak = max(furthest, start.step or 0), []
        elif start.failed:
            streak.append(start)
        checkpoint = start.checkpoint
    return streak


def expected_failures(devices: int, seconds: float) -> float:
    """Returns the expected number of failures of a run, at the rate of published runs."""
    return INTERRUPTIONS_PER_DEVICE_HOUR * devices * seconds / 3600


def max_failures(devices: int, seconds: float, always: int) -> int:
    """Returns the number of failures in a time that is not far more than expected, but at least `always`."""
    return max(always, math.ceil(_FAULT_FACTOR * expected_failures(devices, seconds)))


def max_jobset_restarts(devices: int) -> int:
    """Returns the maximum number of restarts of a JobSet: twice the failures that are expected in 60 days.

    A JobSet has no time limit, and cannot judge gains.
    """
    return max(_MIN_JOBSET_RESTARTS, math.ceil(2 * expected_failures(devices, _JOBSET_SECONDS)))


def _too_many_failures(failed: Sequence[Start], devices: int) -> str:
    """Returns why a run with these failures fails too often; empty if it does not."""
    now = failed[-1].time
    for seconds, always, name in _WINDOWS:
        count = sum(now - seconds < start.time <= now for start in failed)
        if count > max_failures(devices, seconds, always):
            expected = expected_failures(devices, seconds)
            return f"it failed {count} times within {name}, but {expected:.2g} times are expected of its devices"
    return ""
