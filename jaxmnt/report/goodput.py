"""Goodput: how the wall time of a run divides into parts, over all its attempts, and what the run cost.

Every second belongs to one part, so the parts add up to the wall time. `steps` is the productive time: ETTR, the
effective training time ratio, is its share (Wan et al. 2025, arXiv:2509.16293).
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxmnt.report.history import Attempt, Record, has_no_targets, number

PARTS = {
    "steps": "steps that count",
    "data": "steps held up by their input",
    "start": "starting: processes, hosts, data",
    "compile": "compiling, and the first step's share above the others",
    "restore": "restoring checkpoints, or making initial values",
    "checkpoint": "saving, as far as training waited for it",
    "evaluation": "evaluating",
    "bad_steps": "steps without a finite loss or gradient",
    "no_targets": "steps whose batch has no targets, which change nothing",
    "again": "steps that a later attempt repeated",
    "hang": "hanging until the watchdog ended it",
    "failure": "between the last step and the end of an attempt that broke off",
    "between": "between attempts: waiting for the scheduler or a manual restart",
    "other": "everything else",
}
"""The parts of the wall time of a run, each with its description."""

_START_LAPS = ("process", "environment", "import", "rendezvous", "preflight", "data")
_HOUR = 3600.0


@dataclass(frozen=True)
class Goodput:
    seconds: dict[str, float]
    """Seconds of each of `PARTS`."""
    wall_seconds: float
    ettr: float
    ettr_last_hour: float
    tokens: int
    gpu_hours: float
    """Device-hours of the attempts, without the time between them."""
    cost: float | None
    """None if no attempt has a price."""
    cost_per_billion_tokens: float | None
    productive_cost: float | None
    attempts: int


def goodput(attempts: Sequence[Attempt]) -> Goodput:
    """Returns the goodput of a run with these attempts, in order."""
    parts = dict.fromkeys(PARTS, 0.0)
    typical = typical_step(attempts)
    for before, attempt in zip([None, *attempts], attempts, strict=False):
        for part, seconds in attempt_parts(attempt, typical).items():
            parts[part] += seconds
        if before is not None:
            parts["between"] += max(0.0, attempt.began - before.ended)
    wall = attempts[-1].ended - attempts[0].began
    tokens = next((attempt.steps[-1]["tokens"] for attempt in reversed(attempts) if attempt.steps), 0)
    cost = cost_of(attempts)
    running = wall - parts["between"]
    return Goodput(
        seconds=parts,
        wall_seconds=wall,
        ettr=parts["steps"] / wall if wall else 0.0,
        ettr_last_hour=_ettr_since(attempts, attempts[-1].ended - _HOUR, typical),
        tokens=tokens,
        gpu_hours=sum(map(_device_hours, attempts)),
        cost=cost,
        cost_per_billion_tokens=cost / tokens * 1e9 if cost is not None and tokens else None,
        productive_cost=cost * parts["steps"] / running if cost is not None and running else None,
        attempts=len(attempts),
    )


def cost_of(attempts: Sequence[Attempt], price: float | None = None) -> float | None:
    """Returns the total cost of attempts; None if no price is known.

    An attempt without a price has the price of the attempt before it. The first has `price`, or else the first price
    that any attempt recorded.
    """
    if price is None:
        recorded = (attempt.cost_per_gpu_hour for attempt in attempts if attempt.cost_per_gpu_hour is not None)
        price = next(recorded, None)
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


def attempt_parts(attempt: Attempt, typical: float) -> dict[str, float]:
    """Returns the seconds of each part of one attempt; they add up to its duration.

    `typical` is the duration of a typical step in seconds.
    """
    parts = dict.fromkeys(PARTS, 0.0)
    parts["start"] = sum(attempt.laps.get(lap, 0.0) for lap in _START_LAPS)
    parts["compile"] = attempt.laps.get("compile", 0.0)
    parts["restore"] = attempt.laps.get("restore", 0.0)
    bad = _bad_steps(attempt)
    for line, productive, data in _split_steps(attempt, typical):
        whole = number(line, "step_seconds")
        if line["step"] in bad:
            parts["bad_steps"] += whole
        elif has_no_targets(line):
            parts["no_targets"] += whole
        else:
            parts["steps"] += productive
            parts["data"] += data
            parts["compile"] += whole - productive - data
    parts["evaluation"] = sum(number(line, "seconds") for line in attempt.evals)
    commits = [record for record in attempt.events if record["kind"] == "checkpoint_commit"]
    parts["checkpoint"] = sum(number(record, "blocked_seconds") for record in commits)
    parts["again"] = attempt.lost_seconds
    recorded = sum(parts.values())
    if recorded > attempt.seconds:  # a clock was set during the attempt: scale the parts down
        return {part: seconds * attempt.seconds / recorded for part, seconds in parts.items()}
    remaining = attempt.seconds - recorded
    tail = min(remaining, max(0.0, attempt.ended - _last_work(attempt)))
    parts[_TAIL_PART.get(attempt.end or "", "failure")] += tail
    parts["other"] += remaining - tail
    return parts


_TAIL_PART = {"end": "checkpoint", "hang": "hang"}
"""The part that the time after an attempt's last step counts as, by the kind of its end; `failure` for other kinds.

A run that finishes waits for its last checkpoint."""


def _last_work(attempt: Attempt) -> float:
    """Returns the time when the last step, evaluation or phase of the start finished."""
    lines = [*attempt.steps[-1:], *attempt.evals[-1:]]
    return max([attempt.began + sum(attempt.laps.values()), attempt.lost_until, *(line["time"] for line in lines)])


def typical_step(attempts: Sequence[Attempt]) -> float:
    """Returns the median seconds of a step, without the first step of each attempt; infinity if there is none."""
    seconds = [number(line, "step_seconds") for attempt in attempts for line in attempt.steps[1:]]
    return statistics.median(seconds) if seconds else float("inf")


def _split_steps(attempt: Attempt, typical: float) -> Iterator[tuple[Record, float, float]]:
    """Yields each step with its productive seconds and the seconds that it was held up by its input.

    The host reads while the devices are busy, so waiting for input counts only as far as the step took longer than a
    typical one. The first step also loads programs: it counts as at most a typical one.
    """
    for index, line in enumerate(attempt.steps):
        whole = number(line, "step_seconds")
        if index == 0:
            yield line, min(whole, typical), 0.0
        else:
            data = min(number(line, "data_wait_seconds"), max(0.0, whole - typical))
            yield line, whole - data, data


def _productive(attempts: Sequence[Attempt], typical: float) -> Iterator[tuple[float, float]]:
    """Yields the time when each step finished and its productive seconds: 0 for a bad step or one without targets."""
    for attempt in attempts:
        bad = _bad_steps(attempt)
        for line, seconds, _ in _split_steps(attempt, typical):
            yield line["time"], 0.0 if line["step"] in bad or has_no_targets(line) else seconds


def _ettr_since(attempts: Sequence[Attempt], since: float, typical: float) -> float:
    """Returns the productive share of the time from `since` to the end of the run."""
    since = max(since, attempts[0].began)
    recent = [(time, seconds) for time, seconds in _productive(attempts, typical) if time > since]
    productive = sum(min(seconds, time - since) for time, seconds in recent)
    span = attempts[-1].ended - since
    return min(1.0, productive / span) if span > 0 else 0.0


def sliding_ettr(attempts: Sequence[Attempt]) -> list[float]:
    """Returns, after each step that counts, the productive share of the last hour, or of the run if that is shorter."""
    steps = list(_productive(attempts, typical_step(attempts)))
    if not steps:
        return []
    times, productive = np.array(steps).T
    ordered = np.maximum.accumulate(times)  # a clock may have been set back
    total = np.concatenate([[0.0], np.cumsum(productive)])
    before = total[np.searchsorted(ordered, ordered - _HOUR, side="right")]
    span = np.minimum(_HOUR, ordered - attempts[0].began)
    return np.clip((total[1:] - before) / np.maximum(span, 1e-9), 0.0, 1.0).tolist()


def _bad_steps(attempt: Attempt) -> set[int]:
    return {record["step"] for record in attempt.events if record["kind"] == "bad_step" and "step" in record}
