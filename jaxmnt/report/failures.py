"""Finds out for each failed attempt what failed first, in which process, which log lines show it, and what it cost.

The sources are the events of all processes, the stacks of hangs, the output of processes, and the launcher's records. A
failure of one process ends all of them, so many events report the same failure. The first event that blames its own
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
"""Kinds of events that report a failure, each with a rank. The most informative kinds have the lowest rank."""
_MAX_LOG_LINES = 10
"""Maximum number of log lines shown for a failure."""
_MAX_TAIL_BYTES = 65536
"""Maximum number of bytes at the end of a log that are searched for these lines."""
_CLOCK_TOLERANCE_SECONDS = 60.0
"""Tolerance for differences between the clocks of processes, and between the times at which they end."""
_START_TOLERANCE_SECONDS = 5.0
"""Tolerance for a difference between the clocks of a launcher and of the attempt that it started."""
_JOB_LOG_GRACE_SECONDS = 600.0
"""Time after the end of an attempt during which the script of its Slurm job may still write to the job's log."""
_MAX_START_AGE_SECONDS = 600.0
"""Maximum time between a launcher's recorded start and the beginning of its attempt."""
_ERROR_WORDS = re.compile(
    r"error|exception|traceback|fatal|abort|killed|out of memory|\boom\b|segfault|signal|xid", re.I
)

_STACKS_HEADING = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d: ", re.M)
"""First line of the stacks that were written for one hang."""


@dataclass(frozen=True)
class Failure:
    """The failure that ended an attempt."""

    attempt: int
    time: float
    """Unix seconds."""
    step: int
    """The last step that finished before the failure."""
    kind: str
    """The kind of failure: failed, hang, peer_lost, start_failed, or killed if the attempt recorded no end."""
    why: str
    """The recorded reason for the failure."""
    process: int | None
    """The process at fault; None if it is unknown."""
    host: str | None
    """The host of the process at fault; None if it is unknown."""
    lines: list[str]
    """At most ten lines from the most informative log."""
    source: str | None
    """Path of the log that contains `lines`, relative to the run directory."""
    told_by: int
    """Number of processes that reported the failure."""
    exit_code: int | None
    """Exit code of the attempt; None if no launcher recorded it."""
    lost_steps: int
    """Number of steps that a later attempt repeated."""
    lost_seconds: float
    """Time spent on steps that were repeated later, on hanging, and on ending the attempt."""
    cost: float | None
    """Cost of the lost time; None if no price is known."""
    then: str
    """A description of the next attempt."""


@dataclass
class _AttemptEvents:
    """The events of all processes in one attempt."""

    failures: list[Record] = field(default_factory=list)
    """Events that report a failure."""
    starts: dict[int, Record] = field(default_factory=dict)
    """The start event of each process."""


def find_failures(
    run_dir: Path, attempts: Sequence[Attempt], parts: Sequence[dict[str, float]], *, is_over: bool
) -> list[Failure]:
    """Returns the failures that ended the given attempts, in order.

    `parts` has the seconds of each part of each attempt. `is_over` is True if the last attempt is no longer running,
    even though it recorded no end.
    """
    events = _events_by_attempt(run_dir, attempts)
    starts = _launcher_starts(run_dir)
    failures = []
    for index, (attempt, seconds, next_attempt) in enumerate(zip(attempts, parts, [*attempts[1:], None], strict=True)):
        ended_abruptly = attempt.end_kind is None and (next_attempt is not None or is_over)
        if attempt.end_kind not in _FAILURE_RANK and not ended_abruptly:
            continue
        failure_events = events[index].failures
        root_event = _root_failure(failure_events)
        process, host = _at_fault(root_event)
        is_hang = root_event is not None and root_event["kind"] == "hang"
        # This attempt wrote the part of each log between its size at the start of the attempt and at the next start.
        log_sizes = [_log_sizes(records, process or 0) for records in events[index : index + 2]]
        source, lines = _failure_lines(run_dir, process or 0, is_hang, attempt, *log_sizes)
        lost_seconds = seconds["again"] + seconds["hang"] + seconds["failure"]
        attempt_cost = cost_of([attempt])
        last_step = attempt.steps[-1]["step"] if attempt.steps else attempt.resumed_after
        failures.append(
            Failure(
                attempt=attempt.number,
                time=root_event["time"] if root_event else attempt.end_time,
                step=last_step + attempt.lost_steps,
                kind=root_event["kind"] if root_event else "killed",
                why=str(root_event.get("why") or "no reason was recorded") if root_event else "it ended abruptly",
                process=process,
                host=host,
                lines=lines,
                source=source,
                told_by=len({record.get("process") for record in failure_events}),
                exit_code=_exit_code(starts, attempt),
                lost_steps=attempt.lost_steps,
                lost_seconds=lost_seconds,
                cost=(
                    None
                    if attempt_cost is None or not attempt.seconds
                    else attempt_cost * lost_seconds / attempt.seconds
                ),
                then=_describe_next(attempt, next_attempt),
            )
        )
    return failures


def _root_failure(failure_events: list[Record]) -> Record | None:
    """Returns the event that is most informative about the cause; None if there is no event.

    A failure is preferred to a hang, and a hang to a lost peer. Among events of the same kind, those that blame their
    own process are preferred, and among these the earliest.
    """

    def rank(event: Record) -> tuple[int, bool, float]:
        blames_itself = event.get("at_fault") in (None, event.get("process"))
        return _FAILURE_RANK[event["kind"]], not blames_itself, event["time"]

    return min(failure_events, key=rank, default=None)


def _at_fault(event: Record | None) -> tuple[int | None, str | None]:
    """Returns the process and the host that an event blames.

    If the event blames no process, these are the process and the host that recorded it, but for a lost peer the process
    is None.
    """
    if event is None:
        return None, None
    process = event.get("at_fault")
    host = event.get("at_fault_host")
    if process is None:
        process = None if event["kind"] == "peer_lost" else event.get("process")
        host = host or event.get("host")
    return process, host


def _describe_next(attempt: Attempt, next_attempt: Attempt | None) -> str:
    """Describes the attempt that follows a failed attempt."""
    if next_attempt is None:
        return "nothing yet"
    wait_seconds = max(0.0, next_attempt.begin_time - attempt.end_time)
    repeated = f", and repeated {counted(attempt.lost_steps, 'step', 'steps')}" if attempt.lost_steps else ""
    step = next_attempt.resumed_after
    return f"attempt {next_attempt.number} resumed after step {step}, {wait_seconds:.0f} s later{repeated}"


def _events_by_attempt(run_dir: Path, attempts: Sequence[Attempt]) -> list[_AttemptEvents]:
    """Returns the events of all processes, for each attempt.

    The events of process 0 contain the number of their attempt. Other processes count attempts by themselves, so their
    events are assigned by time. Events of a start that failed early belong to no attempt.
    """
    events = [_AttemptEvents() for _ in attempts]
    index_of_number = {attempt.number: index for index, attempt in enumerate(attempts)}
    for path in event_files(run_dir):
        clock_ahead = 0.0
        for record in read_lines(path):
            if record["kind"] == "start":
                clock_ahead = seconds_ahead(record.get("clock_ahead"))
            time = record["time"] - clock_ahead
            if path.stem == "0" and "attempt" in record:
                index = index_of_number.get(record["attempt"])
            else:
                index = attempt_index_at(time, attempts, _CLOCK_TOLERANCE_SECONDS)
            if index is not None and record["kind"] in _FAILURE_RANK:
                events[index].failures.append(record | {"time": time + attempts[index].shifted_seconds})
            elif index is not None and record["kind"] == "start" and "process" in record:
                events[index].starts[record["process"]] = record
    return events


def _launcher_starts(run_dir: Path) -> list[Record]:
    """Returns the starts that a launcher inside an allocation recorded.

    An unreadable file counts as missing, because it would only add an exit code to what the events report.
    """
    try:
        starts = json.loads((run_dir / "launch" / "starts.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return []
    return [start for start in starts if isinstance(start, dict)] if isinstance(starts, list) else []


def _exit_code(starts: list[Record], attempt: Attempt) -> int | None:
    """Returns the exit code of the last recorded start before the attempt; None if there is no recent one."""
    codes = [
        (start["began"], start["code"])
        for start in starts
        if isinstance(start.get("began"), int | float) and type(start.get("code")) is int
    ]
    began = attempt.begin_time - attempt.shifted_seconds
    last_start = max((entry for entry in codes if entry[0] <= began + _START_TOLERANCE_SECONDS), default=None)
    return last_start[1] if last_start is not None and last_start[0] >= began - _MAX_START_AGE_SECONDS else None


def _log_sizes(events: _AttemptEvents, process: int) -> dict[str, int]:
    """Returns the size in bytes that each log of a process had when the process started an attempt.

    `events` are those of the attempt.
    """
    sizes = events.starts.get(process, {}).get("log_bytes")
    return {name: size for name, size in sizes.items() if type(size) is int} if isinstance(sizes, dict) else {}


def _failure_lines(
    run_dir: Path,
    process: int,
    is_hang: bool,
    attempt: Attempt,
    sizes_at_start: dict[str, int],
    sizes_at_next_start: dict[str, int] | None = None,
) -> tuple[str | None, list[str]]:
    """Returns the name of a log, and up to ten lines in it that show why the process failed in an attempt.

    Returns None and an empty list if no log shows it. Every attempt appends to the same files, so the sizes in bytes at
    the start of the attempt and at the start of the next one tell which part the attempt wrote.
    """
    stacks_log, output_log, native_log = log_files(process)
    job_logs = sorted(str(path.relative_to(run_dir)) for path in (run_dir / "logs").glob("slurm-*.log"))
    for name in [*([stacks_log] if is_hang else []), output_log, *job_logs, native_log]:
        begin = sizes_at_start.get(name, 0)
        end = (sizes_at_next_start or {}).get(name)
        text = _tail(run_dir / name, attempt, begin, end, is_job_log=name in job_logs)
        lines = _main_thread_stack(text) if name == stacks_log else _lines_before_error(text)
        if lines:
            return name, lines
    return None, []


def _tail(path: Path, attempt: Attempt, begin: int, end: int | None, *, is_job_log: bool) -> str:
    """Returns the text that an attempt wrote to a file, from byte `begin` up to byte `end`, or up to the end for None.

    Returns at most the last `_MAX_TAIL_BYTES` bytes, and "" if the attempt wrote nothing.
    """
    try:
        if not path.is_file():
            return ""
        write_time = path.stat().st_mtime + attempt.shifted_seconds
        if is_job_log and not attempt.begin_time <= write_time <= attempt.end_time + _JOB_LOG_GRACE_SECONDS:
            return ""
        with path.open("rb") as file:
            end = path.stat().st_size if end is None else end
            begin = max(begin, end - _MAX_TAIL_BYTES)
            file.seek(begin)
            return file.read(max(0, end - begin)).decode(errors="replace")
    except OSError:  # the report can do without these lines
        return ""


def _lines_before_error(text: str) -> list[str]:
    """Returns up to ten lines that end with the last mention of an error; an empty list if no line mentions one."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    error_indices = [index for index, line in enumerate(lines) if _ERROR_WORDS.search(line)]
    if not error_indices:
        return []
    end = error_indices[-1] + 1
    return lines[max(0, end - _MAX_LOG_LINES) : end]


def _main_thread_stack(text: str) -> list[str]:
    """Returns the heading and the innermost frames of the main thread from the last stacks in a file."""
    headings = list(_STACKS_HEADING.finditer(text))
    if not headings:
        return []
    heading, *rest = text[headings[-1].start() :].splitlines()
    frames: list[str] = []
    for line in rest:
        if line.startswith(("Thread ", "Current thread ")):
            frames = []  # the main thread is the last one, so keep only the frames after its heading
        elif line.startswith("  "):
            frames.append(line.strip())
    return [heading, *frames[: _MAX_LOG_LINES - 1]]
