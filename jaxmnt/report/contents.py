"""The whole report of a run as one JSON value: the page shows it, `--json` prints it."""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import jaxmnt
from jaxmnt.config.load import flatten_tree
from jaxmnt.errors import printable
from jaxmnt.report.advice import advise
from jaxmnt.report.charts import charts_of
from jaxmnt.report.failures import failures
from jaxmnt.report.goodput import PARTS, attempt_parts, goodput, typical_step
from jaxmnt.report.history import Attempt, Record, events_of, has_no_targets, number, read_run_records
from jaxmnt.report.scaling import read_study
from jaxmnt.telemetry.events import FORMAT, PHASE_LINES, RESOURCES, event_files, read_lines
from jaxmnt.telemetry.phase_log import QUANTILES

VERSION = 1
"""Version of the output of `--json`. It changes when an existing field changes its meaning or is removed."""

_MAX_MARKS = 500
"""Marks of each kind in a chart; more cannot be told apart."""
_MAX_SAMPLES = 20
_MAX_PROCESSES = 64
"""Processes that are shown individually: those that work longest."""
_ACTIVE_SECONDS = 120.0
"""A run without a recorded end counts as active for this long after its last write."""
_RECENT_STEPS = 100
"""Steps over which the rate of a run is averaged."""

_MARKED_KINDS = ("bad_step", "loss_spike", "straggler", "checkpoint_failed", "checkpoint_damaged", "replicas_differ",
                 "rows_skipped", "slow_device", "host_fault")  # fmt: skip
"""Kinds of events that charts mark at their step."""
_TIMELINE_KINDS = frozenset({
    *_MARKED_KINDS, "start", "started", "checkpoint_commit", "config_change", "straggler_over", "slow_device_over",
    "budget", "preempted", "profile", "failed", "peer_lost", "hang", "interrupted", "end",
})  # fmt: skip


def report_of(runs: Sequence[str], price: float | None = None) -> Record:
    """Returns the report of these run directories. `price` is the cost of a device-hour; None uses the recorded price.

    Raises `ConfigError` for a directory without records of a run.
    """
    reports = [_run_report(run, price) | {"label": label} for run, label in zip(runs, _labels(runs), strict=True)]
    differences = _differences([report["config"] for report in reports])
    return {
        "version": VERSION,
        "jaxmnt": jaxmnt.__version__,
        "made": time.time(),
        "runs": reports,
        "config_differences": differences,
        "notes": _difference_notes(differences),
    }


def _labels(runs: Sequence[str]) -> list[str]:
    """Returns short names that distinguish the runs: their paths without the common leading and trailing parts."""
    if len(set(runs)) < len(runs):
        return [f"{index} {run}" for index, run in enumerate(runs, 1)]
    if len(runs) == 1:
        return [printable(runs[0])]
    parts = [Path(run).absolute().parts for run in runs]
    while min(map(len, parts)) > 1 and len({path[0] for path in parts}) == 1:
        parts = [path[1:] for path in parts]
    while min(map(len, parts)) > 1 and len({path[-1] for path in parts}) == 1:
        parts = [path[:-1] for path in parts]
    return [printable("/".join(path)) for path in parts]


def _run_report(run: str, price: float | None) -> Record:
    run_dir = Path(run)
    attempts, notes = read_run_records(run_dir)
    for attempt in attempts if price is not None else []:
        attempt.cost_per_gpu_hour = price
    typical = typical_step(attempts)
    parts = [attempt_parts(attempt, typical) for attempt in attempts]
    config, config_note = _config(run_dir)
    over = not _is_active(run_dir, attempts)
    phase_lines = read_lines(run_dir / PHASE_LINES)
    newest = attempts[-1].start
    study, study_note = read_study(run_dir)
    notes += [note for note in (config_note, study_note) if note]
    if newest.get("format", FORMAT) > FORMAT:
        notes.append(
            f"{run} was written by a later version of jaxmnt (format {newest['format']}; this one knows {FORMAT}): "
            "update jaxmnt; what could be read is shown"
        )
    return {
        "run": run,
        "id": newest.get("run"),
        "state": _state(attempts[-1], over),
        "summary": _summary(attempts, config, typical),
        "goodput": asdict(goodput(attempts)) | {"parts": PARTS},
        "attempts": [_attempt_record(attempt, seconds) for attempt, seconds in zip(attempts, parts, strict=True)],
        "failures": [asdict(failure) for failure in failures(run_dir, attempts, parts, over=over)],
        "stragglers": _stragglers(attempts),
        "advice": [asdict(advice) for advice in advise(attempts, config, typical, phase_lines)],
        "scaling": None if study is None else study.to_json(),
        "marks": _marks(attempts),
        "timeline": _timeline(attempts),
        "charts": [asdict(chart) for chart in charts_of(
            attempts, [line for line in phase_lines if line["kind"] == "phases"], read_lines(run_dir / RESOURCES)
        )],
        "processes": _processes(run_dir, phase_lines),
        "samples": _samples(attempts),
        "config": config,
        "changes": [
            {"attempt": attempt.number, **{name: record.get(name) for name in ("key", "before", "now", "resume")}}
            for attempt in attempts for record in attempt.events if record["kind"] == "config_change"
        ],
        "environment": newest["environment"] if isinstance(newest.get("environment"), dict) else {},
        "notes": [printable(note) for note in notes],
    }  # fmt: skip


def _summary(attempts: Sequence[Attempt], config: Record, typical: float) -> Record:
    """Returns the key figures of a run."""
    lines = [line for attempt in attempts for line in attempt.steps]
    evals = [line for attempt in attempts for line in attempt.evals]
    last = lines[-1] if lines else {}
    recent = [line for line in lines[-_RECENT_STEPS:] if line["step"] != lines[0]["step"]]
    seconds = sum(number(line, "step_seconds") for line in recent)
    rate = sum(number(line, "tokens_per_second") * number(line, "step_seconds") for line in recent)
    steps = config.get("train.steps")
    steps_left = steps - last.get("step", 0) if type(steps) is int else 0
    return {
        "step": last.get("step", attempts[-1].resumed_after),
        "steps": steps,
        "loss": last.get("loss"),
        "held_out_loss": evals[-1]["loss"] if evals else None,
        "bits_per_byte": evals[-1].get("bits_per_byte") if evals else None,
        "tokens": last.get("tokens", 0),
        "tokens_per_second": rate / seconds if seconds else None,
        "step_seconds": typical if math.isfinite(typical) else None,
        "mfu": _mean(line.get("mfu") for line in recent),
        "hfu": _mean(line.get("hfu") for line in recent),
        "seconds_left": steps_left * typical if steps_left > 0 and math.isfinite(typical) else None,
        "bad_steps": len(events_of(attempts, "bad_step")),
        "steps_without_targets": sum(map(has_no_targets, lines)),
        "restarts": len(attempts) - 1,
    }


def _mean(values: Iterable[Any]) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None


def _state(last: Attempt, over: bool) -> str:
    if last.end == "end":
        ended = next(record for record in reversed(last.events) if record["kind"] == "end")
        return "finished" if ended["finished"] else "stopped with a checkpoint"
    if last.end is not None:
        return {"failed": "failed", "hang": "hung", "peer_lost": "lost a process"}.get(last.end, last.end)
    return "ended abruptly" if over else "under way"


def _is_active(run_dir: Path, attempts: Sequence[Attempt]) -> bool:
    """Returns True if the run seems to be running: it recorded no end, and wrote recently."""
    if attempts[-1].end is not None:
        return False
    write_times = [attempts[-1].ended]
    for name in ("lock.beat", "metrics.jsonl", "events/0.jsonl"):
        path = run_dir / name
        write_times += [path.stat().st_mtime] if path.is_file() else []
    now = time.time()
    # The absolute difference, because a clock that was ahead has written times in the future.
    return any(abs(now - written) < _ACTIVE_SECONDS for written in write_times)


def _attempt_record(attempt: Attempt, parts: dict[str, float]) -> Record:
    return {
        "attempt": attempt.number,
        "began": attempt.began,
        "ended": attempt.ended,
        "end": attempt.end,
        "why": next((event.get("why") for event in reversed(attempt.events) if event["kind"] == attempt.end), None),
        "finished": any(event["kind"] == "end" and event["finished"] for event in attempt.events),
        "devices": attempt.devices,
        "resumed_after": attempt.resumed_after,
        "first_step": attempt.steps[0]["step"] if attempt.steps else None,
        "last_step": attempt.steps[-1]["step"] if attempt.steps else None,
        "steps": len(attempt.steps),
        "lost_steps": attempt.lost_steps,
        "start_seconds": attempt.laps,
        "seconds": parts,
    }


def _stragglers(attempts: Sequence[Attempt]) -> list[Record]:
    """Returns the processes and devices that slowed the others down, with their phase and their first and last step."""
    stragglers = []
    for attempt in attempts:
        ongoing = {}
        for record in attempt.events:
            kind = record["kind"]
            key = tuple(record.get(name) for name in ("at_fault", "phase", "device", "found_by"))
            if kind in ("straggler", "slow_device"):
                straggler = {
                    "attempt": attempt.number,
                    "process": record.get("at_fault"),
                    "host": record.get("at_fault_host"),
                    "phase": record.get("phase", "device"),
                    "device": record.get("device"),
                    "why": record.get("why"),
                    "from_step": record.get("step"),
                    "to_step": None,
                    "slower_seconds": record.get("slower_seconds"),
                    "step_seconds": record.get("step_seconds"),
                }
                ongoing[key] = straggler
                stragglers.append(straggler)
            elif kind in ("straggler_over", "slow_device_over") and key in ongoing:
                ongoing.pop(key)["to_step"] = record.get("step")
    return stragglers


def _samples(attempts: Sequence[Attempt]) -> list[Record]:
    """Returns the texts that the model generated after evaluations, the newest first."""
    by_step: dict[int, list[dict[str, str]]] = {}
    for record in events_of(attempts, "samples"):
        samples = record.get("samples")
        if "step" in record and isinstance(samples, list):
            by_step[record["step"]] = [
                {"prompt": sample["prompt"], "text": sample["text"]} for sample in samples if _is_sample(sample)
            ]
    steps = sorted(by_step, reverse=True)
    return [{"step": step, "samples": by_step[step]} for step in steps[:1] + _thin(steps[1:], _MAX_SAMPLES)]


def _is_sample(sample: Any) -> bool:
    return isinstance(sample, dict) and all(isinstance(sample.get(name), str) for name in ("prompt", "text"))


def _marks(attempts: Sequence[Attempt]) -> list[Record]:
    """Returns the marks of the charts, in order of their steps."""
    marks = [
        {"step": attempt.resumed_after, "kind": "restart", "text": f"attempt {attempt.number} resumes"}
        for attempt in attempts[1:]
    ]
    for kind in _MARKED_KINDS:
        marks += [
            {"step": record["step"], "kind": kind, "text": _event_text(record)}
            for record in _thin(events_of(attempts, kind))
            if "step" in record
        ]
    return sorted(marks, key=lambda mark: mark["step"])


def _timeline(attempts: Sequence[Attempt]) -> list[Record]:
    """Returns the events on the timeline, in order of their times."""
    by_kind: dict[str, list[Record]] = {}
    for attempt in attempts:
        start = {"kind": "start", "time": attempt.began, "step": attempt.resumed_after}
        for record in [start, *attempt.events]:
            if record["kind"] in _TIMELINE_KINDS:
                entry = {"time": record["time"], "attempt": attempt.number, "text": _event_text(record)}
                by_kind.setdefault(record["kind"], []).append(entry | {"kind": record["kind"]})
    # Each kind is thinned by itself, so that a frequent one does not displace the others.
    thinned = [entry for entries in by_kind.values() for entry in _thin(entries)]
    return sorted(thinned, key=lambda entry: (entry["time"], entry["attempt"]))


def _thin(records: list[Any], limit: int = _MAX_MARKS) -> list[Any]:
    """Returns at most `limit` records, evenly spaced."""
    if len(records) <= limit:
        return records
    return [records[index * len(records) // limit] for index in range(limit)]


_TEXT_FIELDS = ("why", "bad", "key", "before", "now", "phase", "loss", "typical", "at_fault", "at_fault_host",
                "asked_by", "file", "device")  # fmt: skip
"""Fields of an event that its text shows."""


def _event_text(record: Record) -> str:
    """Returns the kind, the step and the main fields of an event as text, cut to 300 characters."""
    step = f" at step {record['step']}" if "step" in record else ""
    fields = [f"{name.replace('_', ' ')} {record[name]}" for name in _TEXT_FIELDS if record.get(name) is not None]
    details = ": " + ", ".join(fields) if fields else ""
    return printable(f"{record['kind'].replace('_', ' ')}{step}{details}")[:300]


def _processes(run_dir: Path, phase_lines: Sequence[Record]) -> Record:
    """Returns quantiles of each process's own work in a step, for the processes that work longest.

    Axes: S lines, each summed over some steps; P processes; Q quantiles.
    """
    lines = [line for line in phase_lines if line["kind"] == "processes" and _are_quantiles(line.get("own"))]
    if not lines:
        return {"quantiles": QUANTILES, "of": [], "processes": 0}
    processes = len(lines[-1]["own"])
    lines = [line for line in lines if len(line["own"]) == processes]
    # Average over the steps, except for the last quantile, which is the maximum.
    weights = np.array([number(line, "steps") for line in lines]) + 1e-9
    own_SPQ = np.array([line["own"] for line in lines])
    seconds_PQ = np.average(own_SPQ, axis=0, weights=weights)
    seconds_PQ[:, -1] = own_SPQ[:, :, -1].max(axis=0)
    shown = np.argsort(-seconds_PQ[:, 1], kind="stable")[:_MAX_PROCESSES].tolist()
    hosts = _hosts(run_dir, set(shown))
    rows = [
        {"process": process, "host": hosts.get(process), "seconds": seconds_PQ[process].tolist()} for process in shown
    ]
    return {"quantiles": QUANTILES, "processes": processes, "of": rows}


def _are_quantiles(own_work: Any) -> bool:
    """Returns True for a non-empty list with the quantiles of each process."""
    is_valid = lambda value: isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9
    return isinstance(own_work, list) and bool(own_work) and all(
        isinstance(row, list) and len(row) == len(QUANTILES) and all(map(is_valid, row)) for row in own_work
    )  # fmt: skip


def _hosts(run_dir: Path, processes: set[int]) -> dict[int, str]:
    """Returns the host on which each of these processes started last."""
    host_of: dict[int, str] = {}
    for path in event_files(run_dir):
        if int(path.stem) in processes:
            hosts = [record["host"] for record in read_lines(path) if record["kind"] == "start" and "host" in record]
            host_of |= {int(path.stem): hosts[-1]} if hosts else {}
    return host_of


def _config(run_dir: Path) -> tuple[Record, str | None]:
    """Returns the resolved config by dotted key, unvalidated because any version may have written it, and a note.

    The note says why there is no config; it is None if there is one.
    """
    path = run_dir / "config.yaml"
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, f"{path} does not exist: the report has no config"
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        return {}, f"{path} cannot be read ({' '.join(str(error).split())[:120]}): the report has no config"
    if not isinstance(tree, dict):
        return {}, f"{path} contains no settings: the report has no config"
    try:
        return {key: _plain(value) for key, value in flatten_tree(tree).items()}, None
    except RecursionError:
        return {}, f"{path} contains itself: the report has no config"


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _differences(configs: Sequence[Record]) -> list[Record]:
    """Returns the keys whose values differ between runs, with the value in each run."""
    keys = {key: None for config in configs for key in config}
    return [
        {"key": key, "values": [config.get(key) for config in configs]}
        for key in keys
        if key != "run.dir" and any(config.get(key) != configs[0].get(key) for config in configs)
    ]


def _difference_notes(differences: Sequence[Record]) -> list[str]:
    """Returns warnings for the comparison of runs whose configs have these differences."""
    notes = []
    sections = {difference["key"].partition(".")[0] for difference in differences}
    if "model" in sections:
        notes.append("these runs train different models: compare their losses with care")
    if "data" in sections:
        notes.append("these runs read different data, or in another order: the loss of a step is over different rows")
    return notes
