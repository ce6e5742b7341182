"""Divides the wall time of a run into parts, such as productive time, and computes what the run cost.

The wall time covers all attempts. Every second belongs to exactly one part, so the parts add up to the wall time. The
part `steps` is the productive time, and its share is the effective training time ratio (ETTR; Wan et al. 2025,
arXiv:2509.16293).
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxmnt.report.history import Attempt, Record, has_no_targets, number

PARTS = {
    "steps": "steps that count",
    "data": "steps delayed by their input",
    "start": "starting processes, connecting hosts, opening data",
    "compile": "compiling, and the extra time of each attempt's first step",
    "restore": "restoring checkpoints, or making initial values",
    "checkpoint": "saving, while training waited",
    "evaluation": "evaluating",
    "bad_steps": "steps without a finite loss or gradient",
    "no_targets": "steps whose batch has no targets, which change nothing",
    "again": "steps that a later attempt repeated",
    "hang": "hanging until the watchdog ended the attempt",
    "failure": "between the last step and the end of an attempt that failed",
    "between": "between attempts, waiting for the scheduler or a manual restart",
    "other": "everything else",
}
"""The parts of the wall time of a run, each with its description."""

_START_PHASES = ("process", "environment", "import", "rendezvous", "preflight", "data")
_HOUR = 3600.0


@dataclass(frozen=True)
class Goodput:
    """The wall time of a run by part, and its cost."""

    seconds: dict[str, float]
    """Seconds of each of `PARTS`."""
    wall_seconds: float
    ettr: float
    """Productive share of the wall time."""
    ettr_last_hour: float
    """Productive share of the last hour of the run."""
    tokens: int
    """Number of tokens that the run was trained on."""
    gpu_hours: float
    """Device-hours of all attempts, without the time between them."""
    cost: float | None
    """Cost of all attempts; None if no attempt has a price."""
    cost_per_billion_tokens: float | None
    productive_cost: float | None
    """Share of the cost that went into steps that count; None if the cost is unknown."""
    attempts: int


def goodput(attempts: Sequence[Attempt]) -> Goodput:
    """Returns the goodput of a run from all its attempts, which must be in order."""
    parts = dict.fromkeys(PARTS, 0.0)
    typical_seconds = typical_step(attempts)
    for previous, attempt in zip([None, *attempts], attempts, strict=False):
        for part, seconds in attempt_parts(attempt, typical_seconds).items():
            parts[part] += seconds
        if previous is not None:
            parts["between"] += max(0.0, attempt.begin_time - previous.end_time)
    wall_seconds = attempts[-1].end_time - attempts[0].begin_time
    tokens = next((attempt.steps[-1]["tokens"] for attempt in reversed(attempts) if attempt.steps), 0)
    cost = cost_of(attempts)
    running_seconds = wall_seconds - parts["between"]
    return Goodput(
        seconds=parts,
        wall_seconds=wall_seconds,
        ettr=parts["steps"] / wall_seconds if wall_seconds else 0.0,
        ettr_last_hour=_ettr_since(attempts, attempts[-1].end_time - _HOUR, typical_seconds),
        tokens=tokens,
        gpu_hours=sum(map(_device_hours, attempts)),
        cost=cost,
        cost_per_billion_tokens=cost / tokens * 1e9 if cost is not None and tokens else None,
        productive_cost=cost * parts["steps"] / running_seconds if cost is not None and running_seconds else None,
        attempts=len(attempts),
    )


def cost_of(attempts: Sequence[Attempt], price: float | None = None) -> float | None:
    """Returns the total cost of attempts; None if no price is known.

    `price` is the price of a device-hour. An attempt without a recorded price costs as much per device-hour as the
    attempt before it. If the first attempt has no recorded price, it costs `price`, or else the first price that any
    attempt recorded.
    """
    if price is None:
        recorded_prices = (attempt.cost_per_gpu_hour for attempt in attempts if attempt.cost_per_gpu_hour is not None)
        price = next(recorded_prices, None)
    if price is None:
        return None
    cost = 0.0
    for attempt in attempts:
        if attempt.cost_per_gpu_hour is not None:
            price = attempt.cost_per_gpu_hour
        cost += price * _device_hours(attempt)
    return cost


def _device_hours(attempt: Attempt) -> float:
    return attempt.devices * attempt.seconds / _HOUR


def attempt_parts(attempt: Attempt, typical_seconds: float) -> dict[str, float]:
    """Returns the seconds of each part of one attempt. The parts add up to the duration of the attempt.

    `typical_seconds` is the duration of a typical step.
    """
    parts = dict.fromkeys(PARTS, 0.0)
    parts["start"] = sum(attempt.start_phase_seconds.get(phase, 0.0) for phase in _START_PHASES)
    parts["compile"] = attempt.start_phase_seconds.get("compile", 0.0)
    parts["restore"] = attempt.start_phase_seconds.get("restore", 0.0)
    bad_steps = _bad_steps(attempt)
    for line, productive_seconds, data_seconds in _split_steps(attempt, typical_seconds):
        step_seconds = number(line, "step_seconds")
        if line["step"] in bad_steps:
            parts["bad_steps"] += step_seconds
        elif has_no_targets(line):
            parts["no_targets"] += step_seconds
        else:
            parts["steps"] += productive_seconds
            parts["data"] += data_seconds
            parts["compile"] += step_seconds - productive_seconds - data_seconds
    parts["evaluation"] = sum(number(line, "seconds") for line in attempt.evals)
    commits = [record for record in attempt.events if record["kind"] == "checkpoint_commit"]
    parts["checkpoint"] = sum(number(record, "blocked_seconds") for record in commits)
    parts["again"] = attempt.lost_seconds
    recorded_seconds = sum(parts.values())
    if recorded_seconds > attempt.seconds:  # a clock was set during the attempt, so scale the parts down
        return {part: seconds * attempt.seconds / recorded_seconds for part, seconds in parts.items()}
    remaining_seconds = attempt.seconds - recorded_seconds
    tail_seconds = min(remaining_seconds, max(0.0, attempt.end_time - _last_work_time(attempt)))
    parts[_TAIL_PART.get(attempt.end_kind or "", "failure")] += tail_seconds
    parts["other"] += remaining_seconds - tail_seconds
    return parts


_TAIL_PART = {"end": "checkpoint", "hang": "hang"}
"""The part to which the time after an attempt's last step belongs, by the kind of event that ended the attempt.

For other kinds it is `failure`. A run that finishes waits for its last checkpoint.
"""


def _last_work_time(attempt: Attempt) -> float:
    """Returns the time at which an attempt finished its last step, evaluation or phase of its start."""
    lines = [*attempt.steps[-1:], *attempt.evals[-1:]]
    end_of_start = attempt.begin_time + sum(attempt.start_phase_seconds.values())
    return max([end_of_start, attempt.lost_until, *(line["time"] for line in lines)])


def typical_step(attempts: Sequence[Attempt]) -> float:
    """Returns the median duration of a step in seconds, without the first step of each attempt.

    Returns infinity if there are no other steps.
    """
    seconds = [number(line, "step_seconds") for attempt in attempts for line in attempt.steps[1:]]
    return statistics.median(seconds) if seconds else float("inf")


def _split_steps(attempt: Attempt, typical_seconds: float) -> Iterator[tuple[Record, float, float]]:
    """Yields the line of each step, the step's productive seconds, and the seconds by which its input delayed it.

    The host reads input while the devices are busy, so waiting for input only counts as a delay if the step took longer
    than a typical step, and only for the excess. The first step also loads programs, so at most the duration of a
    typical step counts as productive.
    """
    for index, line in enumerate(attempt.steps):
        step_seconds = number(line, "step_seconds")
        if index == 0:
            yield line, min(step_seconds, typical_seconds), 0.0
        else:
            excess = max(0.0, step_seconds - typical_seconds)
            delay = min(number(line, "data_wait_seconds"), excess)
            yield line, step_seconds - delay, delay


def _productive_seconds(attempts: Sequence[Attempt], typical_seconds: float) -> Iterator[tuple[float, float]]:
    """Yields the time at which each step finished, and the productive seconds of the step.

    A bad step and a step without targets have none.
    """
    for attempt in attempts:
        bad_steps = _bad_steps(attempt)
        for line, seconds, _ in _split_steps(attempt, typical_seconds):
            yield line["time"], 0.0 if line["step"] in bad_steps or has_no_targets(line) else seconds


def _ettr_since(attempts: Sequence[Attempt], begin: float, typical_seconds: float) -> float:
    """Returns the productive share of the time from `begin`, in unix seconds, to the end of the run."""
    begin = max(begin, attempts[0].begin_time)
    recent_steps = [(time, seconds) for time, seconds in _productive_seconds(attempts, typical_seconds) if time > begin]
    productive_seconds = sum(min(seconds, time - begin) for time, seconds in recent_steps)
    wall_seconds = attempts[-1].end_time - begin
    return min(1.0, productive_seconds / wall_seconds) if wall_seconds > 0 else 0.0


def sliding_ettr(attempts: Sequence[Attempt]) -> list[float]:
    """Returns, for each step, the productive share of the hour before the step finished.

    For a step in the first hour of the run, this is the productive share of the run so far.
    """
    steps = list(_productive_seconds(attempts, typical_step(attempts)))
    if not steps:
        return []
    times, productive = np.array(steps).T
    ordered_times = np.maximum.accumulate(times)  # a clock may have been set back
    cumulative = np.concatenate([[0.0], np.cumsum(productive)])
    cumulative_an_hour_earlier = cumulative[np.searchsorted(ordered_times, ordered_times - _HOUR, side="right")]
    wall_seconds = np.minimum(_HOUR, ordered_times - attempts[0].begin_time)
    shares = (cumulative[1:] - cumulative_an_hour_earlier) / np.maximum(wall_seconds, 1e-9)
    return np.clip(shares, 0.0, 1.0).tolist()


def _bad_steps(attempt: Attempt) -> set[int]:
    return {record["step"] for record in attempt.events if record["kind"] == "bad_step" and "step" in record}
