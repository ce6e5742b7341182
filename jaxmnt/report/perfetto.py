"""A run as a trace for https://ui.perfetto.dev: attempts, steps, phases and events of all processes on one clock.

Trace Event Format (Chrome's JSON): complete spans (`X`), instants (`i`) and counters (`C`), in microseconds. Clocks of
hosts differ; at each start the processes learn between which bounds their clock is ahead of process 0's, and the middle
of these is taken off.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxmnt.report.history import Attempt, Record, attempt_at, number, read_attempts, seconds_ahead
from jaxmnt.report.page import as_json
from jaxmnt.telemetry.events import PHASE_LINES, event_files, read_lines, records
from jaxmnt.telemetry.phases import DOING, PHASES

Span = dict[str, Any]

_STEPS, _PHASES, _EVENTS = 1, 2, 3
"""Tracks of a process."""
_ALL = 1_000_000
"""In place of a process: what is told of all together."""
_MOST_STEPS = 5000
"""The newest; more would make a file that no browser opens."""
_BESIDE = ("kind", "time", "process", "host", "attempt")


def trace_of(runs: Sequence[str]) -> str:
    """The trace of these run directories; each has processes of its own there."""
    spans = []
    for place, run in enumerate(runs):
        first = 10 * _ALL * place
        spans += [one | {"pid": one["pid"] + first} for one in _of_run(Path(run))]
    return as_json({"traceEvents": spans, "displayTimeUnit": "ms"})


def _of_run(run_dir: Path) -> Iterator[Span]:
    attempts = read_attempts(run_dir)
    yield from _named(
        _ALL, f"{run_dir}: all processes", {_STEPS: "steps", _PHASES: "phases, mean", _EVENTS: "attempts"}
    )
    ends = {line["step"]: line["time"] for attempt in attempts for line in attempt.steps}
    first = sorted(ends)[-_MOST_STEPS:][0] if ends else 0
    for attempt in attempts:
        yield from _of_attempt(attempt, first)
    yield from _phases([line for line in records(run_dir / PHASE_LINES) if line.get("step", 0) >= first], ends)
    for path in event_files(run_dir):
        yield from _of_process(int(path.stem), run_dir, read_lines(path), attempts)


def _of_attempt(attempt: Attempt, first: int) -> Iterator[Span]:
    """With its steps from `first` on."""
    yield _span(_ALL, _EVENTS, f"attempt {attempt.number}", attempt.began, attempt.seconds, {"end": attempt.end})
    for line in attempt.steps:
        if line["step"] < first:
            continue
        seconds = number(line, "step_seconds")
        told = {name: line.get(name) for name in ("loss", "grad_norm", "tokens_per_second", "mfu")}
        yield _span(_ALL, _STEPS, f"step {line['step']}", line["time"] - seconds, seconds, told)
        if line["loss"] is not None:
            yield {"ph": "C", "pid": _ALL, "name": "loss", "ts": _micro(line["time"]), "args": {"loss": line["loss"]}}
    for line in attempt.evals:
        seconds = number(line, "seconds")
        yield _span(
            _ALL,
            _STEPS,
            f"evaluation after step {line['step']}",
            line["time"] - seconds,
            seconds,
            {"loss": line["loss"]},
        )


def _phases(lines: Sequence[Record], ends: dict[int, float]) -> Iterator[Span]:
    """The phases of a step one after the other up to its end: in which order they were is not known. Of each process
    where the lines have all; the mean of all in any case."""
    for line in lines:
        mean, each = line.get("mean"), line.get("each")
        if line["kind"] != "phases" or not isinstance(mean, dict):
            continue
        line = line | {"time": ends.get(line["step"], line["time"])}  # its own is when process 0 heard of it
        yield from _one_after_the_other(_ALL, line, mean)
        for process, seconds in enumerate(each if isinstance(each, list) else []):
            if isinstance(seconds, list) and len(seconds) == len(PHASES):
                yield from _one_after_the_other(process, line, dict(zip(PHASES, seconds, strict=True)))


def _one_after_the_other(process: int, line: Record, seconds: Record) -> Iterator[Span]:
    """Yields the phases of one process in the step of a line, which took these `seconds`."""
    times = {phase: number(seconds, phase) for phase in PHASES}
    time = line["time"] - sum(times.values())
    for phase, took in times.items():
        if took:
            yield _span(process, _PHASES, phase, time, took, {"step": line.get("step"), "what": DOING[phase]})
        time += took


def _of_process(process: int, run_dir: Path, records: Sequence[Record], attempts: Sequence[Attempt]) -> Iterator[Span]:
    host = next((record["host"] for record in records if "host" in record), "an unknown host")
    yield from _named(process, f"{run_dir}: process {process} on {host}", {_PHASES: "phases", _EVENTS: "events"})
    ahead = began = 0.0
    for record in records:
        if record["kind"] == "start":
            began = number(record, "began") or record["time"]
            ahead = seconds_ahead(record.get("clock_ahead"))
            place = attempt_at(record["time"] - ahead, attempts, 0.0)
            ahead -= 0.0 if place is None else attempts[place].moved_seconds
        time = record["time"] - ahead
        told = {name: value for name, value in record.items() if name not in _BESIDE}
        if record["kind"] == "started" and isinstance(record.get("seconds"), dict):
            at = began - ahead
            for lap in record["seconds"]:
                took = number(record["seconds"], lap)
                yield _span(process, _EVENTS, f"start: {lap}", at, took)
                at += took
        elif record["kind"] == "checkpoint_commit":
            took = number(record, "blocked_seconds")
            yield _span(process, _EVENTS, "save, blocking", time - took, took, told)
        else:
            yield {
                "ph": "i",
                "s": "p",
                "pid": process,
                "tid": _EVENTS,
                "name": record["kind"],
                "ts": _micro(time),
                "args": told,
            }


def _named(process: int, name: str, tracks: dict[int, str]) -> Iterator[Span]:
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
    for track, what in tracks.items():
        yield {"ph": "M", "pid": process, "tid": track, "name": "thread_name", "args": {"name": what}}


def _span(
    process: int, track: int, name: str, began: float, seconds: float, told: dict[str, Any] | None = None
) -> Span:
    return {
        "ph": "X", "pid": process, "tid": track, "name": name, "ts": _micro(began), "dur": round(1e6 * seconds),
        "args": told or {},
    }  # fmt: skip


def _micro(seconds: float) -> int:
    return round(1e6 * seconds)
