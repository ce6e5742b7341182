"""The attempts of a run, read from its events and metrics: when each began and ended, and what it recorded.

Attempts are ordered by number. Within an attempt, times come from a clock of its process that is never set, so
durations are reliable; between two attempts there are only the wall clocks of two hosts, either of which may be wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from jaxmnt.errors import ConfigError
from jaxmnt.telemetry.events import FINAL_EVENTS, METRICS, event_file, read_lines

Record = dict[str, Any]

_MAX_DEVICES = 1 << 24
_MAX_CLOCK_OFFSET_SECONDS = 1e9
_MAX_PAUSE_SECONDS = 30 * 86400.0
"""Longest believable pause between two attempts; a longer one means a wrong clock or an abandoned run."""
_MAX_NUMBER = 1e18
"""Upper bound for seconds and counts; larger values are ignored."""


@dataclass
class Attempt:
    """One start of a run, as process 0 recorded it. Times are unix seconds."""

    number: int
    began: float
    """When its process was created."""
    ended: float
    """The time of its last record."""
    devices: int
    cost_per_gpu_hour: float | None
    resumed_after: int
    """The step that it resumed from."""
    end: str | None
    """The kind of its final event: end, failed, hang, …; None if it recorded no end."""
    laps: dict[str, float]
    """Seconds of each phase of its start; empty if it did not reach a step."""
    start: Record = field(default_factory=dict)
    """Its start event."""
    events: list[Record] = field(default_factory=list)
    steps: list[Record] = field(default_factory=list)
    """Lines of its steps, without those that a later attempt repeated."""
    evals: list[Record] = field(default_factory=list)
    lost_steps: int = 0
    """Number of its steps that a later attempt repeated."""
    lost_seconds: float = 0.0
    lost_until: float = 0.0
    """When the last repeated step finished."""
    shifted_seconds: float = 0.0
    """Seconds added to the times that its clock recorded, so that attempts do not overlap."""

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def read_attempts(run_dir: Path) -> list[Attempt]:
    """Returns the attempts of a run, in order; see `read_run_records`."""
    return read_run_records(run_dir)[0]


def read_run_records(run_dir: Path) -> tuple[list[Attempt], list[str]]:
    """Returns the attempts that left records of the run, in order, and notes on missing records.

    Raises `ConfigError` if there are no attempts.
    """
    if not run_dir.is_dir():
        run = str(run_dir).rpartition("@")[0]
        advice = f"give the run without a step, {run}" if run and Path(run).is_dir() else "give a run directory"
        raise ConfigError(f"{run_dir}: there is no such folder; {advice}")
    attempts = attempts_so_far(run_dir)
    if attempts:
        return attempts, []
    events = event_file(run_dir, 0)
    lines = [line for line in read_lines(run_dir / METRICS) if line["kind"] in ("train", "eval")]
    if not lines:
        raise ConfigError(
            f"{run_dir}: it is not the directory of a run: {events} has no start event and {METRICS} no lines; give a "
            "run directory"
        )
    note = (
        f"{events} has no start event: only the lines of {METRICS} are shown, and the starts of attempts are estimates"
    )
    return _attempts_from_metrics(lines), [note]


def _attempts_from_metrics(lines: list[Record]) -> list[Attempt]:
    """Reconstructs attempts from the lines of steps alone: each begins with its first step."""
    attempts: dict[int, Attempt] = {}
    for line in lines:
        attempt_number = line.get("attempt", 0)
        if attempt_number not in attempts:
            attempts[attempt_number] = Attempt(
                number=attempt_number,
                began=line["time"] - number(line, "step_seconds"),
                ended=line["time"],
                devices=1,
                cost_per_gpu_hour=None,
                resumed_after=max(0, line["step"] - 1),
                end=None,
                laps={},
            )
    ordered = sorted(attempts.values(), key=lambda attempt: attempt.number)
    _assign_lines(lines, ordered)
    _remove_overlaps(ordered)
    return ordered


def attempts_so_far(run_dir: Path) -> list[Attempt]:
    """Returns the attempts recorded so far, in order; an empty list if the run has not begun."""
    attempts: dict[int, Attempt] = {}
    for record in read_lines(event_file(run_dir, 0)):
        attempt_number = record.get("attempt")
        if record["kind"] == "start":
            attempts[record["attempt"]] = _new_attempt(record)
        elif attempt_number in attempts:
            attempts[attempt_number].events.append(record)
    ordered = sorted(attempts.values(), key=lambda attempt: attempt.number)
    for attempt in ordered:
        _apply_events(attempt)
    for record in events_of(ordered, "steps_again"):
        if (earlier := attempts.get(record.get("of_attempt", -1))) is not None:
            _add_lost_steps(earlier, record)
    if ordered:
        _assign_lines(read_lines(run_dir / METRICS), ordered)
    _remove_overlaps(ordered)
    return ordered


def _remove_overlaps(ordered: list[Attempt]) -> None:
    """Shifts attempts in time so that each ends before the next begins, but not implausibly long before.

    The clock of the last attempt is taken as correct.
    """
    for attempt, following in reversed(list(pairwise(ordered))):
        too_late = attempt.ended - following.began
        too_early = following.began - _MAX_PAUSE_SECONDS - attempt.ended
        seconds = -too_late if too_late > 0 else max(0.0, too_early)
        if seconds:
            _shift(attempt, seconds)
    # If the last clock was near 1970, the shift can make earlier times negative: move all attempts up again.
    negative = -min(0.0, ordered[0].began) if ordered else 0.0
    for attempt in ordered if negative else []:
        _shift(attempt, negative)


def _shift(attempt: Attempt, seconds: float) -> None:
    attempt.shifted_seconds += seconds
    attempt.began += seconds
    attempt.ended += seconds
    attempt.lost_until += seconds if attempt.lost_until else 0.0
    for record in (attempt.start, *attempt.events, *attempt.steps, *attempt.evals):
        if "time" in record:
            record["time"] += seconds


def attempt_index_at(time: float, attempts: Sequence[Attempt], slack: float) -> int | None:
    """Returns the index of the last attempt that was running at `time`, or ended at most `slack` seconds before it.

    `time` is by the clock of process 0 of that attempt. Returns None if there is no such attempt.
    """
    during = lambda attempt: attempt.began <= time + attempt.shifted_seconds <= attempt.ended + slack
    return next((index for index in reversed(range(len(attempts))) if during(attempts[index])), None)


def seconds_ahead(bounds: Any) -> float:
    """Returns how far a process's clock is ahead of process 0's: the midpoint of the bounds in its start event.

    Returns 0 for bounds that are missing, malformed or implausible.
    """
    is_pair = isinstance(bounds, list) and len(bounds) == 2 and all(isinstance(bound, int | float) for bound in bounds)
    if is_pair and all(abs(bound) < _MAX_CLOCK_OFFSET_SECONDS for bound in bounds):
        return float(sum(bounds) / 2)
    return 0.0


def _new_attempt(start: Record) -> Attempt:
    """Returns the attempt that a start event opens."""
    devices = int(number(start, "devices"))
    began = start["time"] if start.get("began") is None else number(start, "began")
    price = start.get("cost_per_gpu_hour")
    return Attempt(
        number=start["attempt"],
        began=min(began, start["time"]),
        ended=start["time"],
        devices=devices if 0 < devices < _MAX_DEVICES else 1,
        cost_per_gpu_hour=price if type(price) in (int, float) else None,
        resumed_after=start.get("step", 0),
        end=None,
        laps={},
        start=start,
    )


def _apply_events(attempt: Attempt) -> None:
    """Sets the end, the end time and the start phases of an attempt from its events."""
    for record in attempt.events:
        attempt.ended = max(attempt.ended, record["time"])
        if record["kind"] in FINAL_EVENTS:
            attempt.end = record["kind"]
        elif record["kind"] == "started" and isinstance(record.get("seconds"), dict):
            laps = record["seconds"]
            attempt.laps = {name: number(laps, name) for name in laps}


def _add_lost_steps(attempt: Attempt, again: Record) -> None:
    """Adds the steps of this attempt that a later one repeated, by the `steps_again` event of the later one."""
    attempt.lost_steps += int(number(again, "steps"))
    attempt.lost_seconds += number(again, "seconds")
    attempt.lost_until = max(attempt.lost_until, number(again, "until"))
    attempt.ended = max(attempt.ended, attempt.lost_until)


def _assign_lines(lines: list[Record], attempts: list[Attempt]) -> None:
    """Appends each line to the attempt that it names; if it names none, to the last attempt begun before it."""
    by_number = {attempt.number: attempt for attempt in attempts}
    for line in lines:
        if line["kind"] not in ("train", "eval"):
            continue
        attempt = by_number.get(line.get("attempt", -1))
        if attempt is None:
            begun_before = (candidate for candidate in reversed(attempts) if candidate.began <= line["time"])
            attempt = next(begun_before, attempts[0])
        (attempt.steps if line["kind"] == "train" else attempt.evals).append(line)
        attempt.ended = max(attempt.ended, line["time"])


def events_of(attempts: Sequence[Attempt], kind: str) -> list[Record]:
    """Returns the events of one kind of all attempts, in order."""
    return [record for attempt in attempts for record in attempt.events if record["kind"] == kind]


def has_no_targets(line: Record) -> bool:
    """Returns True if the batch of a step had no targets, by the step's line.

    A bad step has no loss either, but its batch has targets.
    """
    return line["loss"] is None and line.get("tokens_per_second") == 0


def number(record: Record, name: str) -> float:
    """Returns a field that holds seconds or a count; 0 if it is missing or not a valid number."""
    value = record.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return 0.0
    return float(value) if 0 <= value < _MAX_NUMBER else 0.0
