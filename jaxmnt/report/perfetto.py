"""A run as a trace for https://ui.perfetto.dev: attempts, steps, phases and events of all processes on one clock.

The format is the Trace Event Format (Chrome's JSON): complete spans (`X`), instants (`i`) and counters (`C`), in
microseconds. The clocks of hosts differ: at each start, a process measures bounds for how far its clock is ahead of
process 0's, and the midpoint of these bounds is subtracted from its times.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxmnt.report.history import Attempt, Record, attempt_index_at, number, read_attempts, seconds_ahead
from jaxmnt.report.page import as_json
from jaxmnt.telemetry.events import PHASE_LINES, event_files, read_lines, records
from jaxmnt.telemetry.phases import PHASE_ACTIVITIES, PHASES

Span = dict[str, Any]

_STEP_TRACK, _PHASE_TRACK, _EVENT_TRACK = 1, 2, 3
"""Ids of the tracks that a process has in the trace."""
_ALL_PROCESSES = 1_000_000
"""Id of the pseudo-process whose spans concern all processes."""
_MAX_STEPS = 5000
"""Maximum number of steps in the trace. Only the newest are kept, because a larger file would be too much for a
browser."""
_OMITTED_FIELDS = ("kind", "time", "process", "host", "attempt")
"""Fields of an event that are left out of its arguments, because the trace shows them elsewhere."""


def trace_of(runs: Sequence[str]) -> str:
    """Returns the trace of the given run directories as JSON. Each run has its own range of process ids."""
    spans = []
    for index, run in enumerate(runs):
        first_id = 10 * _ALL_PROCESSES * index
        spans += [span | {"pid": span["pid"] + first_id} for span in _run_spans(Path(run))]
    return as_json({"traceEvents": spans, "displayTimeUnit": "ms"})


def _run_spans(run_dir: Path) -> Iterator[Span]:
    attempts = read_attempts(run_dir)
    yield from _track_names(
        _ALL_PROCESSES,
        f"{run_dir}: all processes",
        {_STEP_TRACK: "steps", _PHASE_TRACK: "phases, mean", _EVENT_TRACK: "attempts"},
    )
    end_times = {line["step"]: line["time"] for attempt in attempts for line in attempt.steps}
    first_step = sorted(end_times)[-_MAX_STEPS:][0] if end_times else 0
    for attempt in attempts:
        yield from _attempt_spans(attempt, first_step)
    phase_lines = [line for line in records(run_dir / PHASE_LINES) if line.get("step", 0) >= first_step]
    yield from _phase_spans(phase_lines, end_times)
    for path in event_files(run_dir):
        yield from _process_spans(int(path.stem), run_dir, read_lines(path), attempts)


def _attempt_spans(attempt: Attempt, first_step: int) -> Iterator[Span]:
    """Yields spans for an attempt, for its steps from `first_step` on (with the loss as a counter), and for its
    evaluations."""
    yield _span(
        _ALL_PROCESSES, _EVENT_TRACK, f"attempt {attempt.number}", attempt.begin_time, attempt.seconds,
        {"end": attempt.end_kind},
    )  # fmt: skip
    for line in attempt.steps:
        if line["step"] < first_step:
            continue
        seconds = number(line, "step_seconds")
        metrics = {name: line.get(name) for name in ("loss", "grad_norm", "tokens_per_second", "mfu")}
        yield _span(_ALL_PROCESSES, _STEP_TRACK, f"step {line['step']}", line["time"] - seconds, seconds, metrics)
        if line["loss"] is not None:
            yield {
                "ph": "C",
                "pid": _ALL_PROCESSES,
                "name": "loss",
                "ts": _microseconds(line["time"]),
                "args": {"loss": line["loss"]},
            }
    for line in attempt.evals:
        seconds = number(line, "seconds")
        name = f"evaluation after step {line['step']}"
        yield _span(_ALL_PROCESSES, _STEP_TRACK, name, line["time"] - seconds, seconds, {"loss": line["loss"]})


def _phase_spans(lines: Sequence[Record], end_times: dict[int, float]) -> Iterator[Span]:
    """Yields the spans of the phases of each step.

    The phases follow one another up to the end of the step, because their true order is not recorded. `end_times` has
    the time at which each step ended. The mean over processes is always shown; the phases of single processes are shown
    for lines that have them.
    """
    for line in lines:
        mean, by_process = line.get("mean"), line.get("each")
        if line["kind"] != "phases" or not isinstance(mean, dict):
            continue
        # The time in the line itself is the time at which process 0 received it.
        line = line | {"time": end_times.get(line["step"], line["time"])}
        yield from _consecutive_phases(_ALL_PROCESSES, line, mean)
        for process, seconds in enumerate(by_process if isinstance(by_process, list) else []):
            if isinstance(seconds, list) and len(seconds) == len(PHASES):
                yield from _consecutive_phases(process, line, dict(zip(PHASES, seconds, strict=True)))


def _consecutive_phases(process: int, line: Record, seconds: Record) -> Iterator[Span]:
    """Yields the spans of the phases of one process in the step of a line.

    `seconds` maps each phase to its duration. The last phase ends at the time of the line.
    """
    durations = {phase: number(seconds, phase) for phase in PHASES}
    time = line["time"] - sum(durations.values())
    for phase, duration in durations.items():
        if duration:
            yield _span(
                process,
                _PHASE_TRACK,
                phase,
                time,
                duration,
                {"step": line.get("step"), "what": PHASE_ACTIVITIES[phase]},
            )
        time += duration


def _process_spans(
    process: int, run_dir: Path, records: Sequence[Record], attempts: Sequence[Attempt]
) -> Iterator[Span]:
    """Yields the events of one process, with its start phases and saves as spans."""
    host = next((record["host"] for record in records if "host" in record), "an unknown host")
    yield from _track_names(
        process, f"{run_dir}: process {process} on {host}", {_PHASE_TRACK: "phases", _EVENT_TRACK: "events"}
    )
    clock_ahead = began = 0.0
    for record in records:
        if record["kind"] == "start":
            began = number(record, "began") or record["time"]
            clock_ahead = seconds_ahead(record.get("clock_ahead"))
            index = attempt_index_at(record["time"] - clock_ahead, attempts, 0.0)
            clock_ahead -= 0.0 if index is None else attempts[index].shifted_seconds
        time = record["time"] - clock_ahead
        fields = {name: value for name, value in record.items() if name not in _OMITTED_FIELDS}
        if record["kind"] == "started" and isinstance(record.get("seconds"), dict):
            lap_began = began - clock_ahead
            for lap in record["seconds"]:
                lap_seconds = number(record["seconds"], lap)
                yield _span(process, _EVENT_TRACK, f"start: {lap}", lap_began, lap_seconds)
                lap_began += lap_seconds
        elif record["kind"] == "checkpoint_commit":
            blocked_seconds = number(record, "blocked_seconds")
            yield _span(process, _EVENT_TRACK, "save, blocking", time - blocked_seconds, blocked_seconds, fields)
        else:
            yield {
                "ph": "i",
                "s": "p",
                "pid": process,
                "tid": _EVENT_TRACK,
                "name": record["kind"],
                "ts": _microseconds(time),
                "args": fields,
            }


def _track_names(process: int, name: str, tracks: dict[int, str]) -> Iterator[Span]:
    """Yields the metadata that names a process and its tracks in the trace."""
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
    for track, track_name in tracks.items():
        yield {"ph": "M", "pid": process, "tid": track, "name": "thread_name", "args": {"name": track_name}}


def _span(
    process: int, track: int, name: str, began: float, seconds: float, arguments: dict[str, Any] | None = None
) -> Span:
    return {
        "ph": "X", "pid": process, "tid": track, "name": name, "ts": _microseconds(began), "dur": round(1e6 * seconds),
        "args": arguments or {},
    }  # fmt: skip


def _microseconds(seconds: float) -> int:
    return round(1e6 * seconds)
