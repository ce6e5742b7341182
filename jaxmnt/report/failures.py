"""Failures of attempts: what failed first, in which process, the log lines that show it, and what it cost.

The sources are the events of all processes, the stacks of hangs, the output of processes, and the launcher's records. A
failure of one process ends all of them, so many events report the same failure: the first one that blames its own
process counts.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jaxmnt.errors import counted
from jaxmnt.report.goodput import cost_of
from jaxmnt.report.history import Attempt, Record, attempt_index_at, seconds_ahead
from jaxmnt.telemetry.events import FAILED_START, event_files, log_files, read_lines

_FAILURE_RANK = {"failed": 0, FAILED_START: 0, "hang": 1, "peer_lost": 2}
"""Kinds of events that report a failure, with their rank: the most informative have the lowest."""
_MAX_LINES = 10
_TAIL_BYTES = 65536
_SLACK_SECONDS = 60.0
"""Tolerance for differences between clocks, and between the ends of processes."""
_JOB_LOG_SECONDS = 600.0
"""Time after an attempt's end in which the script of its Slurm job may still write to its log."""
_ERROR_WORDS = re.compile(
    r"error|exception|traceback|fatal|abort|killed|out of memory|\boom\b|segfault|signal|xid", re.I
)

_HEADING = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d: ", re.M)
"""First line of the stacks of one hang."""


@dataclass(frozen=True)
class Failure:
    """The failure that ended an attempt."""

    attempt: int
    time: float
    """Unix seconds."""
    step: int
    """The last finished step."""
    kind: str
    """failed, hang, peer_lost, start_failed, or killed if the attempt recorded no end."""
    why: str
    process: int | None
    """The process at fault, if known."""
    host: str | None
    lines: list[str]
    """At most ten lines from the most informative log."""
    source: str | None
    """The log that `lines` are from, relative to the run directory."""
    told_by: int
    """Number of processes that reported the failure."""
    exit_code: int | None
    """Exit code of the attempt, if a launcher recorded it."""
    lost_steps: int
    lost_seconds: float
    """Seconds of repeated work, of hanging and of ending."""
    cost: float | None
    """Cost of the lost seconds."""
    then: str
    """The next attempt, in words."""


@dataclass
class _AttemptEvents:
    """The events of all processes in one attempt."""

    failures: list[Record] = field(default_factory=list)
    """Events that report a failure."""
    starts: dict[int, Record] = field(default_factory=dict)
    """The start event of each process."""


def failures(
    run_dir: Path, attempts: Sequence[Attempt], parts: Sequence[dict[str, float]], *, over: bool
) -> list[Failure]:
    """Returns the failures of these attempts, in order.

    `parts` has the seconds of each part of each attempt. `over` is True if the last attempt is no longer running, even
    though it recorded no end.
    """
    events, starts = _events_by_attempt(run_dir, attempts), _launcher_starts(run_dir)
    result = []
    for index, (attempt, seconds, following) in enumerate(zip(attempts, parts, [*attempts[1:], None], strict=True)):
        broke_off = attempt.end is None and (following is not None or over)
        if attempt.end not in _FAILURE_RANK and not broke_off:
            continue
        reports = events[index].failures
        first = _root_failure(reports)
        process, host = _at_fault(first)
        # The lines of this attempt lie between the log sizes at its own start and at the next one's.
        hang = first is not None and first["kind"] == "hang"
        sizes = [_log_sizes(records, process or 0) for records in events[index : index + 2]]
        source, lines = _failure_lines(run_dir, process or 0, hang, attempt, *sizes)
        lost = seconds["again"] + seconds["hang"] + seconds["failure"]
        attempt_cost = cost_of([attempt])
        last_step = attempt.steps[-1]["step"] if attempt.steps else attempt.resumed_after
        result.append(
            Failure(
                attempt=attempt.number,
                time=first["time"] if first else attempt.ended,
                step=last_step + attempt.lost_steps,
                kind=first["kind"] if first else "killed",
                why=str(first.get("why") or "no reason was recorded") if first else "it ended abruptly",
                process=process,
                host=host,
                lines=lines,
                source=source,
                told_by=len({record.get("process") for record in reports}),
                exit_code=_exit_code(starts, attempt),
                lost_steps=attempt.lost_steps,
                lost_seconds=lost,
                cost=None if attempt_cost is None or not attempt.seconds else attempt_cost * lost / attempt.seconds,
                then=_describe_next(attempt, following),
            )
        )
    return result


def _root_failure(reports: list[Record]) -> Record | None:
    """Returns the most informative event: a failure before a hang before a lost peer, own failures first, then the
    earliest; None if there is no event."""
    blames_itself = lambda record: record.get("at_fault") in (None, record.get("process"))
    rank = lambda record: (_FAILURE_RANK[record["kind"]], not blames_itself(record), record["time"])
    return min(reports, key=rank, default=None)


def _at_fault(first: Record | None) -> tuple[int | None, str | None]:
    """Returns the process and the host that an event blames.

    If it blames none, these are the process and the host that recorded it; for a lost peer the process is None.
    """
    if first is None:
        return None, None
    process, host = first.get("at_fault"), first.get("at_fault_host")
    if process is not None:
        return process, host
    return None if first["kind"] == "peer_lost" else first.get("process"), host or first.get("host")


def _describe_next(attempt: Attempt, following: Attempt | None) -> str:
    """Describes the attempt after a failed one."""
    if following is None:
        return "nothing yet"
    waited = max(0.0, following.began - attempt.ended)
    repeated = f", and repeated {counted(attempt.lost_steps, 'step', 'steps')}" if attempt.lost_steps else ""
    return f"attempt {following.number} resumed after step {following.resumed_after}, {waited:.0f} s later{repeated}"


def _events_by_attempt(run_dir: Path, attempts: Sequence[Attempt]) -> list[_AttemptEvents]:
    """Returns the events of all processes, for each attempt.

    Process 0 records the attempt of its events. Other processes count attempts by themselves, so their events are
    assigned by time. Events of a start that failed early belong to no attempt.
    """
    events = [_AttemptEvents() for _ in attempts]
    index_of_number = {attempt.number: index for index, attempt in enumerate(attempts)}
    for path in event_files(run_dir):
        ahead = 0.0
        for record in read_lines(path):
            if record["kind"] == "start":
                ahead = seconds_ahead(record.get("clock_ahead"))
            time = record["time"] - ahead
            if path.stem == "0" and "attempt" in record:
                index = index_of_number.get(record["attempt"])
            else:
                index = attempt_index_at(time, attempts, _SLACK_SECONDS)
            if index is not None and record["kind"] in _FAILURE_RANK:
                events[index].failures.append(record | {"time": time + attempts[index].shifted_seconds})
            elif index is not None and record["kind"] == "start" and "process" in record:
                events[index].starts[record["process"]] = record
    return events


def _launcher_starts(run_dir: Path) -> list[Record]:
    """Returns the starts that a launcher inside an allocation recorded.

    An unreadable file counts as missing: it only adds the exit code to what the events report.
    """
    try:
        starts = json.loads((run_dir / "launch" / "starts.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return []
    return [start for start in starts if isinstance(start, dict)] if isinstance(starts, list) else []


def _exit_code(starts: list[Record], attempt: Attempt) -> int | None:
    """Returns the exit code of the last start recorded before the attempt began, if it is recent enough."""
    codes = [
        (start["began"], start["code"])
        for start in starts
        if isinstance(start.get("began"), int | float) and type(start.get("code")) is int
    ]
    began = attempt.began - attempt.shifted_seconds
    last = max((entry for entry in codes if entry[0] <= began + _SLACK_SECONDS / 12), default=None)
    return last[1] if last is not None and last[0] >= began - _JOB_LOG_SECONDS else None


def _log_sizes(events: _AttemptEvents, process: int) -> dict[str, int]:
    """Returns the size in bytes of each log of a process when it started this attempt."""
    sizes = events.starts.get(process, {}).get("log_bytes")
    return {name: size for name, size in sizes.items() if type(size) is int} if isinstance(sizes, dict) else {}


def _failure_lines(
    run_dir: Path,
    process: int,
    hang: bool,
    attempt: Attempt,
    before: dict[str, int],
    after: dict[str, int] | None = None,
) -> tuple[str | None, list[str]]:
    """Returns a log and up to ten lines that the process wrote to it in this attempt; None and no lines if none help.

    Every attempt appends to the same files: `before` and `after` are their sizes at the start of this attempt and at
    the start of the next.
    """
    stacks, printed, native = log_files(process)
    jobs = sorted(str(path.relative_to(run_dir)) for path in (run_dir / "logs").glob("slurm-*.log"))
    for name in [*([stacks] if hang else []), printed, *jobs, native]:
        text = _tail(run_dir / name, attempt, before.get(name, 0), (after or {}).get(name), is_job_log=name in jobs)
        lines = _main_thread_stack(text) if name == stacks else _lines_before_error(text)
        if lines:
            return name, lines
    return None, []


def _tail(path: Path, attempt: Attempt, first: int, last: int | None, *, is_job_log: bool) -> str:
    """Returns the text that an attempt wrote to a file, from byte `first` to `last` (None: to the end of the file).

    Returns at most the last `_TAIL_BYTES` bytes, and "" if there is no text of this attempt.
    """
    try:
        if not path.is_file():
            return ""
        written = path.stat().st_mtime + attempt.shifted_seconds
        if is_job_log and not attempt.began <= written <= attempt.ended + _JOB_LOG_SECONDS:
            return ""
        with path.open("rb") as file:
            last = path.stat().st_size if last is None else last
            first = max(first, last - _TAIL_BYTES)
            file.seek(first)
            return file.read(max(0, last - first)).decode(errors="replace")
    except OSError:  # the report does without the lines
        return ""


def _lines_before_error(text: str) -> list[str]:
    """Returns the lines up to the last one that mentions an error; an empty list if no line does."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    errors = [index for index, line in enumerate(lines) if _ERROR_WORDS.search(line)]
    return lines[max(0, errors[-1] - _MAX_LINES + 1) : errors[-1] + 1] if errors else []


def _main_thread_stack(text: str) -> list[str]:
    """Returns the heading and the innermost frames of the main thread in the last stacks of a file."""
    headings = list(_HEADING.finditer(text))
    if not headings:
        return []
    heading, *rest = text[headings[-1].start() :].splitlines()
    frames: list[str] = []
    for line in rest:
        if line.startswith(("Thread ", "Current thread ")):
            frames = []  # the main thread is the last one, so keep only the frames after its heading
        elif line.startswith("  "):
            frames.append(line.strip())
    return [heading, *frames[: _MAX_LINES - 1]]
