"""The attempts of a run, read from its events and metrics: when each began and ended, and what it recorded.

Attempts are ordered by number. Within an attempt, times come from a clock of process 0 that is never set, so durations
are reliable. The time between two attempts can only be taken from the wall clocks of two hosts, and either may be
wrong.
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
"""Longest plausible pause between two attempts. A longer one indicates a wrong clock or an abandoned run."""
_MAX_NUMBER = 1e18
"""Upper bound for seconds and counts; larger values are ignored."""


@dataclass
class Attempt:
    """One start of a run, as process 0 recorded it. Times are unix seconds."""

    number: int
    begin_time: float
    """The time at which process 0 was created."""
    end_time: float
    """The time of the last record of the attempt."""
    devices: int
    cost_per_gpu_hour: float | None
    resumed_after: int
    """The step of the checkpoint from which the attempt resumed; 0 if it did not resume."""
    end_kind: str | None
    """The kind of the event that ended the attempt, such as end, failed or hang; None if it recorded no end."""
    start_phase_seconds: dict[str, float]
    """Seconds of each phase before the first step; empty if the attempt did not reach a step."""
    start: Record = field(default_factory=dict)
    """The start event of the attempt."""
    events: list[Record] = field(default_factory=list)
    steps: list[Record] = field(default_factory=list)
    """The lines of the attempt's steps, without the steps that a later attempt repeated."""
    evals: list[Record] = field(default_factory=list)
    """The lines of the attempt's evaluations."""
    lost_steps: int = 0
    """Number of the attempt's steps that a later attempt repeated."""
    lost_seconds: float = 0.0
    """Time that the attempt spent on these repeated steps."""
    lost_until: float = 0.0
    """The time at which the attempt finished the last of the steps that were repeated; 0 if there are none."""
    shifted_seconds: float = 0.0
    """Seconds that were added to the recorded times of the attempt, so that attempts do not overlap."""

    @property
    def seconds(self) -> float:
        """The duration of the attempt."""
        return self.end_time - self.begin_time


def read_attempts(run_dir: Path) -> list[Attempt]:
    """Returns the attempts of a run, in order. Raises `ConfigError` if there are none."""
    return read_run_records(run_dir)[0]


def read_run_records(run_dir: Path) -> tuple[list[Attempt], list[str]]:
    """Returns the attempts that a run recorded, in order, and notes on missing records.

    Raises `ConfigError` if there are no records of an attempt.
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
            f"{run_dir}: it is not the directory of a run, because {events} has no start event and {METRICS} has no "
            "lines; give a run directory"
        )
    note = (
        f"{events} has no start event: only the lines of {METRICS} are shown, and the starts of attempts are estimated"
    )
    return _attempts_from_metrics(lines), [note]


def _attempts_from_metrics(lines: list[Record]) -> list[Attempt]:
    """Reconstructs the attempts of a run from its metrics alone. Each attempt begins with its first line."""
    attempts: dict[int, Attempt] = {}
    for line in lines:
        attempt_number = line.get("attempt", 0)
        if attempt_number not in attempts:
            attempts[attempt_number] = Attempt(
                number=attempt_number,
                begin_time=line["time"] - number(line, "step_seconds"),
                end_time=line["time"],
                devices=1,
                cost_per_gpu_hour=None,
                resumed_after=max(0, line["step"] - 1),
                end_kind=None,
                start_phase_seconds={},
            )
    ordered_attempts = sorted(attempts.values(), key=lambda attempt: attempt.number)
    _assign_lines(lines, ordered_attempts)
    _remove_overlaps(ordered_attempts)
    return ordered_attempts


def attempts_so_far(run_dir: Path) -> list[Attempt]:
    """Returns the attempts recorded so far, in order; an empty list if the run has not begun."""
    attempts: dict[int, Attempt] = {}
    for record in read_lines(event_file(run_dir, 0)):
        attempt_number = record.get("attempt")
        if record["kind"] == "start":
            attempts[record["attempt"]] = _new_attempt(record)
        elif attempt_number in attempts:
            attempts[attempt_number].events.append(record)
    ordered_attempts = sorted(attempts.values(), key=lambda attempt: attempt.number)
    for attempt in ordered_attempts:
        _apply_events(attempt)
    for record in events_of(ordered_attempts, "steps_again"):
        earlier_attempt = attempts.get(record.get("of_attempt", -1))
        if earlier_attempt is not None:
            _add_lost_steps(earlier_attempt, record)
    if ordered_attempts:
        _assign_lines(read_lines(run_dir / METRICS), ordered_attempts)
    _remove_overlaps(ordered_attempts)
    return ordered_attempts


def _remove_overlaps(ordered_attempts: list[Attempt]) -> None:
    """Shifts the times of attempts so that each ends before the next begins, and pauses are not implausibly long.

    The clock of the last attempt is assumed to be correct.
    """
    for attempt, next_attempt in reversed(list(pairwise(ordered_attempts))):
        overlap = attempt.end_time - next_attempt.begin_time
        excess_pause = next_attempt.begin_time - _MAX_PAUSE_SECONDS - attempt.end_time
        shift = -overlap if overlap > 0 else max(0.0, excess_pause)
        if shift:
            _shift(attempt, shift)
    # If the last clock was near 1970, the shifts can make earlier times negative. Then move all attempts forward.
    seconds_below_zero = -min(0.0, ordered_attempts[0].begin_time) if ordered_attempts else 0.0
    for attempt in ordered_attempts if seconds_below_zero else []:
        _shift(attempt, seconds_below_zero)


def _shift(attempt: Attempt, seconds: float) -> None:
    """Adds seconds to all times of an attempt."""
    attempt.shifted_seconds += seconds
    attempt.begin_time += seconds
    attempt.end_time += seconds
    attempt.lost_until += seconds if attempt.lost_until else 0.0
    for record in (attempt.start, *attempt.events, *attempt.steps, *attempt.evals):
        if "time" in record:
            record["time"] += seconds


def attempt_index_at(time: float, attempts: Sequence[Attempt], tolerance: float) -> int | None:
    """Returns the index of the last attempt that was running at `time`, or ended at most `tolerance` seconds before.

    `time` was measured with the clock of process 0 of that attempt. Returns None if there is no such attempt.
    """
    for index in reversed(range(len(attempts))):
        attempt = attempts[index]
        if attempt.begin_time <= time + attempt.shifted_seconds <= attempt.end_time + tolerance:
            return index
    return None


def seconds_ahead(bounds: Any) -> float:
    """Returns the number of seconds by which the clock of a process is ahead of the clock of process 0.

    This is the midpoint of the bounds in the start event of the process. Returns 0 for bounds that are missing,
    malformed or implausible.
    """
    is_pair = isinstance(bounds, list) and len(bounds) == 2 and all(isinstance(bound, int | float) for bound in bounds)
    if is_pair and all(abs(bound) < _MAX_CLOCK_OFFSET_SECONDS for bound in bounds):
        return float(sum(bounds) / 2)
    return 0.0


def _new_attempt(start: Record) -> Attempt:
    """Returns the attempt that begins with a start event."""
    devices = int(number(start, "devices"))
    begin_time = start["time"] if start.get("began") is None else number(start, "began")
    price = start.get("cost_per_gpu_hour")
    return Attempt(
        number=start["attempt"],
        begin_time=min(begin_time, start["time"]),
        end_time=start["time"],
        devices=devices if 0 < devices < _MAX_DEVICES else 1,
        cost_per_gpu_hour=price if type(price) in (int, float) else None,
        resumed_after=start.get("step", 0),
        end_kind=None,
        start_phase_seconds={},
        start=start,
    )


def _apply_events(attempt: Attempt) -> None:
    """Sets the kind and time of an attempt's end, and the durations of its start phases, from its events."""
    for record in attempt.events:
        attempt.end_time = max(attempt.end_time, record["time"])
        if record["kind"] in FINAL_EVENTS:
            attempt.end_kind = record["kind"]
        elif record["kind"] == "started" and isinstance(record.get("seconds"), dict):
            phases = record["seconds"]
            attempt.start_phase_seconds = {name: number(phases, name) for name in phases}


def _add_lost_steps(attempt: Attempt, repetition: Record) -> None:
    """Adds the steps of an attempt that a later one repeated, according to the later one's `steps_again` event."""
    attempt.lost_steps += int(number(repetition, "steps"))
    attempt.lost_seconds += number(repetition, "seconds")
    attempt.lost_until = max(attempt.lost_until, number(repetition, "until"))
    attempt.end_time = max(attempt.end_time, attempt.lost_until)


def _assign_lines(lines: list[Record], attempts: list[Attempt]) -> None:
    """Appends each line to the attempt whose number it contains, or else to the last attempt that began before it."""
    attempt_of_number = {attempt.number: attempt for attempt in attempts}
    for line in lines:
        if line["kind"] not in ("train", "eval"):
            continue
        attempt = attempt_of_number.get(line.get("attempt", -1))
        if attempt is None:
            earlier_attempts = (candidate for candidate in reversed(attempts) if candidate.begin_time <= line["time"])
            attempt = next(earlier_attempts, attempts[0])
        lines_of_kind = attempt.steps if line["kind"] == "train" else attempt.evals
        lines_of_kind.append(line)
        attempt.end_time = max(attempt.end_time, line["time"])


def events_of(attempts: Sequence[Attempt], kind: str) -> list[Record]:
    """Returns the events of one kind from all given attempts, in order."""
    return [record for attempt in attempts for record in attempt.events if record["kind"] == kind]


def has_no_targets(line: Record) -> bool:
    """Returns True if, according to its line, the batch of a step had no targets.

    A bad step has no loss either, but its batch does have targets.
    """
    return line["loss"] is None and line.get("tokens_per_second") == 0


def number(record: Record, name: str) -> float:
    """Returns a field that holds seconds or a count; 0 if it is missing or not a valid number."""
    value = record.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return 0.0
    return float(value) if 0 <= value < _MAX_NUMBER else 0.0
