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

_STEPS, _PHASES, _EVENTS = 1, 2, 3
"""Tracks of a process."""
_ALL_PROCESSES = 1_000_000
"""Pseudo-process for spans that concern all processes."""
_MAX_STEPS = 5000
"""Number of newest steps in the trace; with more, the file would be too large for a browser."""
_OMITTED_FIELDS = ("kind", "time", "process", "host", "attempt")
"""Fields of an event that its arguments leave out, since the trace shows them elsewhere."""


def trace_of(runs: Sequence[str]) -> str:
    """Returns the trace of these run directories as JSON; each has its own range of process ids."""
    spans = []
    for index, run in enumerate(runs):
        first = 10 * _ALL_PROCESSES * index
        spans += [span | {"pid": span["pid"] + first} for span in _run_spans(Path(run))]
    return as_json({"traceEvents": spans, "displayTimeUnit": "ms"})


def _run_spans(run_dir: Path) -> Iterator[Span]:
    attempts = read_attempts(run_dir)
    yield from _track_names(
        _ALL_PROCESSES, f"{run_dir}: all processes", {_STEPS: "steps", _PHASES: "phases, mean", _EVENTS: "attempts"}
    )
    ends = {line["step"]: line["time"] for attempt in attempts for line in attempt.steps}
    first = sorted(ends)[-_MAX_STEPS:][0] if ends else 0
    for attempt in attempts:
        yield from _attempt_spans(attempt, first)
    yield from _phase_spans([line for line in records(run_dir / PHASE_LINES) if line.get("step", 0) >= first], ends)
    for path in event_files(run_dir):
        yield from _process_spans(int(path.stem), run_dir, read_lines(path), attempts)


def _attempt_spans(attempt: Attempt, first: int) -> Iterator[Span]:
    """Yields an attempt, its steps from `first` on, and its evaluations."""
    yield _span(
        _ALL_PROCESSES, _EVENTS, f"attempt {attempt.number}", attempt.began, attempt.seconds, {"end": attempt.end}
    )
    for line in attempt.steps:
        if line["step"] < first:
            continue
        seconds = number(line, "step_seconds")
        metrics = {name: line.get(name) for name in ("loss", "grad_norm", "tokens_per_second", "mfu")}
        yield _span(_ALL_PROCESSES, _STEPS, f"step {line['step']}", line["time"] - seconds, seconds, metrics)
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
        yield _span(_ALL_PROCESSES, _STEPS, name, line["time"] - seconds, seconds, {"loss": line["loss"]})


def _phase_spans(lines: Sequence[Record], ends: dict[int, float]) -> Iterator[Span]:
    """Yields the phases of each step, one after the other up to the end of the step: their true order is not recorded.

    The mean over processes is always shown; single processes are, where the lines have them.
    """
    for line in lines:
        mean, by_process = line.get("mean"), line.get("each")
        if line["kind"] != "phases" or not isinstance(mean, dict):
            continue
        line = line | {
            "time": ends.get(line["step"], line["time"])
        }  # the line's own time is when process 0 received it
        yield from _consecutive_phases(_ALL_PROCESSES, line, mean)
        for process, seconds in enumerate(by_process if isinstance(by_process, list) else []):
            if isinstance(seconds, list) and len(seconds) == len(PHASES):
                yield from _consecutive_phases(process, line, dict(zip(PHASES, seconds, strict=True)))


def _consecutive_phases(process: int, line: Record, seconds: Record) -> Iterator[Span]:
    """Yields the phases of one process in the step of a line; `seconds` maps each phase to its duration."""
    times = {phase: number(seconds, phase) for phase in PHASES}
    time = line["time"] - sum(times.values())
    for phase, took in times.items():
        if took:
            yield _span(
                process, _PHASES, phase, time, took, {"step": line.get("step"), "what": PHASE_ACTIVITIES[phase]}
            )
        time += took


def _process_spans(
    process: int, run_dir: Path, records: Sequence[Record], attempts: Sequence[Attempt]
) -> Iterator[Span]:
    """Yields the events of one process."""
    host = next((record["host"] for record in records if "host" in record), "an unknown host")
    yield from _track_names(process, f"{run_dir}: process {process} on {host}", {_PHASES: "phases", _EVENTS: "events"})
    ahead = began = 0.0
    for record in records:
        if record["kind"] == "start":
            began = number(record, "began") or record["time"]
            ahead = seconds_ahead(record.get("clock_ahead"))
            index = attempt_index_at(record["time"] - ahead, attempts, 0.0)
            ahead -= 0.0 if index is None else attempts[index].shifted_seconds
        time = record["time"] - ahead
        fields = {name: value for name, value in record.items() if name not in _OMITTED_FIELDS}
        if record["kind"] == "started" and isinstance(record.get("seconds"), dict):
            lap_began = began - ahead
            for lap in record["seconds"]:
                took = number(record["seconds"], lap)
                yield _span(process, _EVENTS, f"start: {lap}", lap_began, took)
                lap_began += took
        elif record["kind"] == "checkpoint_commit":
            took = number(record, "blocked_seconds")
            yield _span(process, _EVENTS, "save, blocking", time - took, took, fields)
        else:
            yield {
                "ph": "i",
                "s": "p",
                "pid": process,
                "tid": _EVENTS,
                "name": record["kind"],
                "ts": _microseconds(time),
                "args": fields,
            }


def _track_names(process: int, name: str, tracks: dict[int, str]) -> Iterator[Span]:
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
    for track, what in tracks.items():
        yield {"ph": "M", "pid": process, "tid": track, "name": "thread_name", "args": {"name": what}}


def _span(
    process: int, track: int, name: str, began: float, seconds: float, arguments: dict[str, Any] | None = None
) -> Span:
    return {
        "ph": "X", "pid": process, "tid": track, "name": name, "ts": _microseconds(began), "dur": round(1e6 * seconds),
        "args": arguments or {},
    }  # fmt: skip


def _microseconds(seconds: float) -> int:
    return round(1e6 * seconds)
