"""The attempts of a run, from its events and metrics: when each began and ended, and what is known of it.

Attempts follow each other by their numbers. Each has the seconds of its own process, which writes times of a clock that
nobody sets; between two attempts there are only the clocks of two hosts, either of which may be wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from jaxmnt.errors import ConfigError
from jaxmnt.telemetry.events import LAST, METRICS, event_file, read_lines

Record = dict[str, Any]

_MOST_DEVICES = 1 << 24
_MOST_AHEAD = 1e9
_LONGEST_PAUSE_SECONDS = 30 * 86400.0
"""Between two attempts. More is a clock that is wrong, or a run that nobody waited for."""
_MOST = 1e18
"""Of seconds, or of anything that is counted."""


@dataclass
class Attempt:
    """One start of a run, as process 0 tells it. Times are unix seconds."""

    number: int
    began: float
    """When its process was made."""
    ended: float
    """The last that is known of it."""
    devices: int
    cost_per_gpu_hour: float | None
    resumed_after: int
    """The step that it went on from."""
    end: str | None
    """The kind of its last event: end, failed, hang, …; None if it broke off without a word."""
    laps: dict[str, float]
    """Seconds of the phases of its start; empty if it did not get to a step."""
    start: Record = field(default_factory=dict)
    """The event of its start."""
    events: list[Record] = field(default_factory=list)
    steps: list[Record] = field(default_factory=list)
    """Lines of the steps that still count."""
    evals: list[Record] = field(default_factory=list)
    lost_steps: int = 0
    """Steps that a later attempt took again."""
    lost_seconds: float = 0.0
    lost_until: float = 0.0
    """When the last of them was done."""
    moved_seconds: float = 0.0
    """By which its times here are later than its clock said, so that attempts follow each other."""

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def read_attempts(run_dir: Path) -> list[Attempt]:
    """The attempts of a run, in order; see `read_run_records`."""
    return read_run_records(run_dir)[0]


def read_run_records(run_dir: Path) -> tuple[list[Attempt], list[str]]:
    """The attempts that got as far as to have lines of the run, in order, and notes on what is missing.

    Raises `ConfigError` if there are none.
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
            f"{run_dir}: no run has begun there: {events} has no event of a start, and {METRICS} no line; give a run "
            "directory"
        )
    note = f"{events} has no event of a start: only what {METRICS} has can be shown, and when attempts began is a guess"
    return _by_lines_alone(lines), [note]


def _by_lines_alone(lines: list[Record]) -> list[Attempt]:
    """Attempts as far as the lines of steps tell of them: each begins with its first step."""
    found: dict[int, Attempt] = {}
    for line in lines:
        known = line.get("attempt", 0)
        if known not in found:
            began = line["time"] - number(line, "step_seconds")
            found[known] = Attempt(known, began, line["time"], 1, None, max(0, line["step"] - 1), None, {})
    ordered = sorted(found.values(), key=lambda attempt: attempt.number)
    _share_out(lines, ordered)
    _put_after_each_other(ordered)
    return ordered


def attempts_so_far(run_dir: Path) -> list[Attempt]:
    """As `read_attempts`; of a run that is about to begin there may be none."""
    attempts: dict[int, Attempt] = {}
    for record in read_lines(event_file(run_dir, 0)):
        of_attempt = record.get("attempt")
        if record["kind"] == "start":
            attempts[record["attempt"]] = _begun(record)
        elif of_attempt in attempts:
            attempts[of_attempt].events.append(record)
    ordered = sorted(attempts.values(), key=lambda attempt: attempt.number)
    for attempt in ordered:
        _complete(attempt)
    for record in events_of(ordered, "steps_again"):
        if (earlier := attempts.get(record.get("of_attempt", -1))) is not None:
            _note_lost(earlier, record)
    if ordered:
        _share_out(read_lines(run_dir / METRICS), ordered)
    _put_after_each_other(ordered)
    return ordered


def _put_after_each_other(ordered: list[Attempt]) -> None:
    """Moves attempts in time so that each has ended when the next begins, and not too long before. The clock of the
    last one counts."""
    for attempt, following in reversed(list(pairwise(ordered))):
        too_late = attempt.ended - following.began
        too_early = following.began - _LONGEST_PAUSE_SECONDS - attempt.ended
        seconds = -too_late if too_late > 0 else max(0.0, too_early)
        if seconds:
            _move(attempt, seconds)
    # A last clock that showed a time soon after 1970 would move the others to before it.
    before = -min(0.0, ordered[0].began) if ordered else 0.0
    for attempt in ordered if before else []:
        _move(attempt, before)


def _move(attempt: Attempt, seconds: float) -> None:
    attempt.moved_seconds += seconds
    attempt.began += seconds
    attempt.ended += seconds
    attempt.lost_until += seconds if attempt.lost_until else 0.0
    for record in (attempt.start, *attempt.events, *attempt.steps, *attempt.evals):
        if "time" in record:
            record["time"] += seconds


def attempt_at(time: float, attempts: Sequence[Attempt], slack: float) -> int | None:
    """The place of the attempt during which a clock like that of its process 0 showed `time`, or within `slack` seconds
    after it; None if there is none. Of several the last counts."""
    during = lambda attempt: attempt.began <= time + attempt.moved_seconds <= attempt.ended + slack
    return next((place for place in reversed(range(len(attempts))) if during(attempts[place])), None)


def seconds_ahead(bounds: Any) -> float:
    """How far a process's clock is ahead of process 0's, by the bounds that its start tells: their middle."""
    known = isinstance(bounds, list) and len(bounds) == 2 and all(isinstance(one, int | float) for one in bounds)
    return float(sum(bounds) / 2) if known and all(abs(one) < _MOST_AHEAD for one in bounds) else 0.0


def _begun(start: Record) -> Attempt:
    devices = int(number(start, "devices"))
    began = start["time"] if start.get("began") is None else number(start, "began")
    price = start.get("cost_per_gpu_hour")
    return Attempt(
        number=start["attempt"],
        began=min(began, start["time"]),
        ended=start["time"],
        devices=devices if 0 < devices < _MOST_DEVICES else 1,
        cost_per_gpu_hour=price if type(price) in (int, float) else None,
        resumed_after=start.get("step", 0),
        end=None,
        laps={},
        start=start,
    )


def _complete(attempt: Attempt) -> None:
    """What its events say of an attempt."""
    for record in attempt.events:
        attempt.ended = max(attempt.ended, record["time"])
        if record["kind"] in LAST:
            attempt.end = record["kind"]
        elif record["kind"] == "started" and isinstance(record.get("seconds"), dict):
            laps = record["seconds"]
            attempt.laps = {name: number(laps, name) for name in laps}


def _note_lost(attempt: Attempt, again: Record) -> None:
    """Notes that a later attempt took steps of this one again."""
    attempt.lost_steps += int(number(again, "steps"))
    attempt.lost_seconds += number(again, "seconds")
    attempt.lost_until = max(attempt.lost_until, number(again, "until"))
    attempt.ended = max(attempt.ended, attempt.lost_until)


def _share_out(lines: list[Record], attempts: list[Attempt]) -> None:
    """Each line belongs to the attempt that it names; an older line to the last that had begun by then."""
    by_number = {attempt.number: attempt for attempt in attempts}
    for line in lines:
        if line["kind"] not in ("train", "eval"):
            continue
        attempt = by_number.get(line.get("attempt", -1))
        if attempt is None:
            attempt = next((one for one in reversed(attempts) if one.began <= line["time"]), attempts[0])
        (attempt.steps if line["kind"] == "train" else attempt.evals).append(line)
        attempt.ended = max(attempt.ended, line["time"])


def events_of(attempts: Sequence[Attempt], kind: str) -> list[Record]:
    """Returns the events of one kind of all attempts, in order."""
    return [record for attempt in attempts for record in attempt.events if record["kind"] == kind]


def has_no_targets(line: Record) -> bool:
    """Returns whether the batch of a step had no target, by the step's line. A bad step has no loss either, but has
    targets."""
    return line["loss"] is None and line.get("tokens_per_second") == 0


def number(record: Record, name: str) -> float:
    """A field that holds seconds or a count; 0 if it holds nothing of the kind."""
    value = record.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return 0.0
    return float(value) if 0 <= value < _MOST else 0.0
