"""Attempts that ended badly: what failed first, where, the lines that tell of it, and what it cost.

From the events of all processes, the stacks of hangs, what processes printed, and what a launcher has noted. A failure
of one process ends all, so many events tell of one: the first that blames its own process counts.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jaxmnt.errors import counted
from jaxmnt.report.goodput import cost_of
from jaxmnt.report.history import Attempt, Record, attempt_at, seconds_ahead
from jaxmnt.telemetry.events import FAILED_START, event_files, log_files, read_lines

_BAD = {"failed": 0, FAILED_START: 0, "hang": 1, "peer_lost": 2}
"""Events that tell of a failure; those that tell more first."""
_MOST_LINES = 10
_TAIL_BYTES = 65536
_SLACK_SECONDS = 60.0
"""By which clocks and ends of processes may differ."""
_A_JOB_SECONDS = 600.0
"""After an attempt's end, for the job's script to write its last line."""
_TELLING = re.compile(r"error|exception|traceback|fatal|abort|killed|out of memory|\boom\b|segfault|signal|xid", re.I)

_HEADING = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d: ", re.M)
"""Of the stacks of one hang."""


@dataclass(frozen=True)
class Failure:
    """What is known of the end of an attempt."""

    attempt: int
    time: float
    """Unix seconds."""
    step: int
    """The last that was finished."""
    kind: str
    """failed, hang, peer_lost, start_failed, or killed if it broke off without a word."""
    why: str
    process: int | None
    """At fault, if known."""
    host: str | None
    lines: list[str]
    """At most ten, of what tells most of it."""
    source: str | None
    """The file that they are from, in the run directory."""
    told_by: int
    """Processes that tell of it."""
    exit_code: int | None
    """That a launcher has noted of the start."""
    lost_steps: int
    lost_seconds: float
    """Of work that was taken again, and of hanging or ending."""
    cost: float | None
    """Of the lost seconds."""
    then: str
    """What was tried next."""


@dataclass
class _AttemptRecords:
    """What the processes say of one attempt."""

    bad: list[Record] = field(default_factory=list)
    """Events that tell of a failure."""
    starts: dict[int, Record] = field(default_factory=dict)
    """Each process's event of its start."""


def failures(
    run_dir: Path, attempts: Sequence[Attempt], parts: Sequence[dict[str, float]], *, over: bool
) -> list[Failure]:
    """Of these attempts, with the seconds of each one's parts. `over` is whether the last one is known to be no longer
    under way, though nothing says how it ended."""
    told, noted, found = _by_attempt(run_dir, attempts), _noted_starts(run_dir), []
    for place, (attempt, seconds, following) in enumerate(zip(attempts, parts, [*attempts[1:], None], strict=True)):
        if attempt.end not in _BAD and (attempt.end is not None or (following is None and not over)):
            continue
        bad = told[place].bad
        first = _first(bad)
        process, host = _at_fault(first)
        hang = first is not None and first["kind"] == "hang"
        written = [_sizes(one, process or 0) for one in told[place : place + 2]]
        source, lines = _telling_lines(run_dir, process or 0, hang, attempt, *written)
        lost, whole = seconds["again"] + seconds["hang"] + seconds["failure"], cost_of([attempt])
        done = attempt.steps[-1]["step"] if attempt.steps else attempt.resumed_after
        found.append(
            Failure(
                attempt=attempt.number,
                time=first["time"] if first else attempt.ended,
                step=done + attempt.lost_steps,
                kind=first["kind"] if first else "killed",
                why=str(first.get("why") or "no reason is known") if first else "it broke off without a word",
                process=process,
                host=host,
                lines=lines,
                source=source,
                told_by=len({record.get("process") for record in bad}),
                exit_code=_noted_code(noted, attempt),
                lost_steps=attempt.lost_steps,
                lost_seconds=lost,
                cost=None if whole is None or not attempt.seconds else whole * lost / attempt.seconds,
                then=_then(attempt, following),
            )
        )
    return found


def _first(bad: list[Record]) -> Record | None:
    """The one that tells most: of a process that blames itself, then of a hang, then of a lost peer; the earliest."""
    own = lambda record: record.get("at_fault") in (None, record.get("process"))
    return min(bad, key=lambda record: (_BAD[record["kind"]], not own(record), record["time"]), default=None)


def _at_fault(first: Record | None) -> tuple[int | None, str | None]:
    """The process and the host that an event blames: its own if it blames none, but no process for a lost peer."""
    if first is None:
        return None, None
    process, host = first.get("at_fault"), first.get("at_fault_host")
    if process is not None:
        return process, host
    return None if first["kind"] == "peer_lost" else first.get("process"), host or first.get("host")


def _then(attempt: Attempt, following: Attempt | None) -> str:
    if following is None:
        return "nothing yet"
    waited = max(0.0, following.began - attempt.ended)
    again = f", which took {counted(attempt.lost_steps, 'step', 'steps')} again" if attempt.lost_steps else ""
    return f"attempt {following.number} went on after step {following.resumed_after}, {waited:.0f} s later{again}"


def _by_attempt(run_dir: Path, attempts: Sequence[Attempt]) -> list[_AttemptRecords]:
    """The events of all processes.

    Process 0 says of which attempt; others count their own, so theirs belong to the attempt in whose time they are. A
    start that came to nothing is no attempt's.
    """
    told = [_AttemptRecords() for _ in attempts]
    numbers = {attempt.number: place for place, attempt in enumerate(attempts)}
    for path in event_files(run_dir):
        ahead = 0.0
        for record in read_lines(path):
            if record["kind"] == "start":
                ahead = seconds_ahead(record.get("clock_ahead"))
            time = record["time"] - ahead
            if path.stem == "0" and "attempt" in record:
                place = numbers.get(record["attempt"])
            else:
                place = attempt_at(time, attempts, _SLACK_SECONDS)
            if place is not None and record["kind"] in _BAD:
                told[place].bad.append(record | {"time": time + attempts[place].moved_seconds})
            elif place is not None and record["kind"] == "start" and "process" in record:
                told[place].starts[record["process"]] = record
    return told


def _noted_starts(run_dir: Path) -> list[Record]:
    """What a launcher inside an allocation has noted of each start. What cannot be read is as if it were not there: it
    adds a number to what the events tell."""
    try:
        found = json.loads((run_dir / "launch" / "starts.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return []
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _noted_code(starts: list[Record], attempt: Attempt) -> int | None:
    """Of the last start that was noted before the attempt began, if that is not long ago."""
    known = [
        (start["began"], start["code"])
        for start in starts
        if isinstance(start.get("began"), int | float) and type(start.get("code")) is int
    ]
    began = attempt.began - attempt.moved_seconds
    last = max((one for one in known if one[0] <= began + _SLACK_SECONDS / 12), default=None)
    return last[1] if last is not None and last[0] >= began - _A_JOB_SECONDS else None


def _sizes(told: _AttemptRecords, process: int) -> dict[str, int]:
    """How many bytes the files of a process had when it began its attempt."""
    sizes = told.starts.get(process, {}).get("log_bytes")
    return {name: size for name, size in sizes.items() if type(size) is int} if isinstance(sizes, dict) else {}


def _telling_lines(
    run_dir: Path,
    process: int,
    hang: bool,
    attempt: Attempt,
    before: dict[str, int],
    after: dict[str, int] | None = None,
) -> tuple[str | None, list[str]]:
    """Up to ten lines of what the process wrote in this attempt, and the file that has them.

    Every attempt appends to the same files: `before` and `after` have their sizes when it began, and when the next did.
    """
    stacks, printed, native = log_files(process)
    jobs = sorted(str(path.relative_to(run_dir)) for path in (run_dir / "logs").glob("slurm-*.log"))
    for name in [*([stacks] if hang else []), printed, *jobs, native]:
        text = _tail(run_dir / name, attempt, before.get(name, 0), (after or {}).get(name), of_a_job=name in jobs)
        lines = _main_thread(text) if name == stacks else _around_the_error(text)
        if lines:
            return name, lines
    return None, []


def _tail(path: Path, attempt: Attempt, first: int, last: int | None, *, of_a_job: bool) -> str:
    """What an attempt wrote to a file from byte `first` to `last`, if that is known; empty if nothing is."""
    try:
        if not path.is_file():
            return ""
        written = path.stat().st_mtime + attempt.moved_seconds
        if of_a_job and not attempt.began <= written <= attempt.ended + _A_JOB_SECONDS:
            return ""
        with path.open("rb") as file:
            last = path.stat().st_size if last is None else last
            first = max(first, last - _TAIL_BYTES)
            file.seek(first)
            return file.read(max(0, last - first)).decode(errors="replace")
    except OSError:  # the report goes without
        return ""


def _around_the_error(text: str) -> list[str]:
    """The last lines up to the last one that sounds like an error; none if no line does."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    places = [place for place, line in enumerate(lines) if _TELLING.search(line)]
    return lines[max(0, places[-1] - _MOST_LINES + 1) : places[-1] + 1] if places else []


def _main_thread(text: str) -> list[str]:
    """Where the main thread was in the last stacks of a file: the heading and its innermost frames."""
    headings = list(_HEADING.finditer(text))
    if not headings:
        return []
    heading, *rest = text[headings[-1].start() :].splitlines()
    frames: list[str] = []
    for line in rest:
        if line.startswith(("Thread ", "Current thread ")):
            frames = []  # the main thread comes last
        elif line.startswith("  "):
            frames.append(line.strip())
    return [heading, *frames[: _MOST_LINES - 1]]
