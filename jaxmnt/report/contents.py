"""Builds the whole report as one JSON value, which the page shows and `--json` prints."""

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
from jaxmnt.report.failures import find_failures
from jaxmnt.report.goodput import PARTS, attempt_parts, goodput, typical_step
from jaxmnt.report.history import Attempt, Record, events_of, has_no_targets, number, read_run_records
from jaxmnt.report.scaling import read_study
from jaxmnt.telemetry.events import FORMAT, PHASE_LINES, RESOURCES, event_files, read_lines
from jaxmnt.telemetry.phase_log import QUANTILES

VERSION = 1
"""Version of the output of `--json`. It changes when an existing field changes its meaning or is removed."""

_MAX_MARKS = 500
"""Maximum number of marks of each kind in a chart; more could not be told apart."""
_MAX_SAMPLED_STEPS = 20
"""Maximum number of steps whose generated texts are shown in addition to those of the newest step."""
_MAX_PROCESSES = 64
"""Maximum number of processes that are shown individually; these are the ones that work longest."""
_ACTIVE_AFTER_WRITE_SECONDS = 120.0
"""Time after its last write for which a run without a recorded end counts as active."""
_RECENT_STEPS = 100
"""Number of latest steps over which the speed of a run is averaged."""

_MARKED_KINDS = ("bad_step", "loss_spike", "straggler", "checkpoint_failed", "checkpoint_damaged", "replicas_differ",
                 "rows_skipped", "slow_device", "host_fault", "router_collapse")  # fmt: skip
"""Kinds of events that charts mark at the step of the event."""
_TIMELINE_KINDS = frozenset({
    *_MARKED_KINDS, "start", "started", "checkpoint_commit", "config_change", "straggler_over", "slow_device_over",
    "budget", "preempted", "profile", "failed", "peer_lost", "hang", "interrupted", "end",
})  # fmt: skip
"""Kinds of events that the timeline shows."""


def report_of(runs: Sequence[str], price: float | None = None) -> Record:
    """Returns the report on the given run directories.

    `price` is the cost of a device-hour; if it is None, the price that each run recorded is used. Raises `ConfigError`
    for a directory without records of a run.
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
    """Returns the part of the report that concerns one run."""
    run_dir = Path(run)
    attempts, notes = read_run_records(run_dir)
    for attempt in attempts if price is not None else []:
        attempt.cost_per_gpu_hour = price
    step_seconds = typical_step(attempts)
    parts = [attempt_parts(attempt, step_seconds) for attempt in attempts]
    config, config_note = _config(run_dir)
    is_over = not _is_active(run_dir, attempts)
    phase_lines = read_lines(run_dir / PHASE_LINES)
    newest_start = attempts[-1].start
    study, study_note = read_study(run_dir)
    notes += [note for note in (config_note, study_note) if note]
    if newest_start.get("format", FORMAT) > FORMAT:
        notes.append(
            f"{run} was written by a later version of jaxmnt (in format {newest_start['format']}, and this version "
            f"knows {FORMAT}), so the report shows only what could be read; update jaxmnt"
        )
    return {
        "run": run,
        "id": newest_start.get("run"),
        "state": _state(attempts[-1], is_over),
        "summary": _summary(attempts, config, step_seconds),
        "goodput": asdict(goodput(attempts)) | {"parts": PARTS},
        "attempts": [
            _attempt_record(attempt, part_seconds) for attempt, part_seconds in zip(attempts, parts, strict=True)
        ],
        "failures": [asdict(failure) for failure in find_failures(run_dir, attempts, parts, is_over=is_over)],
        "stragglers": _stragglers(attempts),
        "advice": [asdict(advice) for advice in advise(attempts, config, step_seconds, phase_lines)],
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
        "environment": newest_start["environment"] if isinstance(newest_start.get("environment"), dict) else {},
        "notes": [printable(note) for note in notes],
    }  # fmt: skip


def _summary(attempts: Sequence[Attempt], config: Record, step_seconds: float) -> Record:
    """Returns the key figures of a run, given the median duration of a step."""
    lines = [line for attempt in attempts for line in attempt.steps]
    evals = [line for attempt in attempts for line in attempt.evals]
    last_line = lines[-1] if lines else {}
    recent_lines = [line for line in lines[-_RECENT_STEPS:] if line["step"] != lines[0]["step"]]
    recent_seconds = sum(number(line, "step_seconds") for line in recent_lines)
    recent_tokens = sum(number(line, "tokens_per_second") * number(line, "step_seconds") for line in recent_lines)
    steps = config.get("train.steps")
    steps_left = steps - last_line.get("step", 0) if type(steps) is int else 0
    return {
        "step": last_line.get("step", attempts[-1].resumed_after),
        "steps": steps,
        "loss": last_line.get("loss"),
        "held_out_loss": evals[-1]["loss"] if evals else None,
        "bits_per_byte": evals[-1].get("bits_per_byte") if evals else None,
        "exact_match": evals[-1].get("exact_match") if evals else None,
        "tokens": last_line.get("tokens", 0),
        "tokens_per_second": recent_tokens / recent_seconds if recent_seconds else None,
        "step_seconds": step_seconds if math.isfinite(step_seconds) else None,
        "mfu": _mean(line.get("mfu") for line in recent_lines),
        "hfu": _mean(line.get("hfu") for line in recent_lines),
        "seconds_left": steps_left * step_seconds if steps_left > 0 and math.isfinite(step_seconds) else None,
        "bad_steps": len(events_of(attempts, "bad_step")),
        "steps_without_targets": sum(map(has_no_targets, lines)),
        "restarts": len(attempts) - 1,
    }


def _mean(values: Iterable[Any]) -> float | None:
    """Returns the mean of the values that are not None; None if there are none."""
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


def _state(last: Attempt, is_over: bool) -> str:
    """Returns the state of a run in words, from its last attempt."""
    if last.end_kind == "end":
        end_event = next(record for record in reversed(last.events) if record["kind"] == "end")
        return "finished" if end_event["finished"] else "stopped with a checkpoint"
    if last.end_kind is not None:
        return {"failed": "failed", "hang": "hung", "peer_lost": "lost a process"}.get(last.end_kind, last.end_kind)
    return "ended abruptly" if is_over else "under way"


def _is_active(run_dir: Path, attempts: Sequence[Attempt]) -> bool:
    """Returns True if the run seems to be running, because it recorded no end and wrote something recently."""
    if attempts[-1].end_kind is not None:
        return False
    write_times = [attempts[-1].end_time]
    for name in ("lock.beat", "metrics.jsonl", "events/0.jsonl"):
        path = run_dir / name
        write_times += [path.stat().st_mtime] if path.is_file() else []
    now = time.time()
    # Use the absolute difference, because a host whose clock is ahead writes times in the future.
    return any(abs(now - write_time) < _ACTIVE_AFTER_WRITE_SECONDS for write_time in write_times)


def _attempt_record(attempt: Attempt, parts: dict[str, float]) -> Record:
    """Returns the part of the report that concerns one attempt. `parts` has the seconds of each part of its time."""
    return {
        "attempt": attempt.number,
        "began": attempt.begin_time,
        "ended": attempt.end_time,
        "end": attempt.end_kind,
        "why": next((event.get("why") for event in attempt.events[::-1] if event["kind"] == attempt.end_kind), None),
        "finished": any(event["kind"] == "end" and event["finished"] for event in attempt.events),
        "devices": attempt.devices,
        "resumed_after": attempt.resumed_after,
        "first_step": attempt.steps[0]["step"] if attempt.steps else None,
        "last_step": attempt.steps[-1]["step"] if attempt.steps else None,
        "steps": len(attempt.steps),
        "lost_steps": attempt.lost_steps,
        "start_seconds": attempt.start_phase_seconds,
        "seconds": parts,
    }


def _stragglers(attempts: Sequence[Attempt]) -> list[Record]:
    """Returns the processes and devices that slowed others down, each with its phase and its first and last step."""
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
    samples_by_step: dict[int, list[dict[str, str]]] = {}
    for record in events_of(attempts, "samples"):
        samples = record.get("samples")
        if "step" in record and isinstance(samples, list):
            samples_by_step[record["step"]] = [
                {"prompt": sample["prompt"], "text": sample["text"]} for sample in samples if _is_sample(sample)
            ]
    steps = sorted(samples_by_step, reverse=True)
    shown_steps = steps[:1] + _thin(steps[1:], _MAX_SAMPLED_STEPS)
    return [{"step": step, "samples": samples_by_step[step]} for step in shown_steps]


def _is_sample(sample: Any) -> bool:
    return isinstance(sample, dict) and all(isinstance(sample.get(name), str) for name in ("prompt", "text"))


def _marks(attempts: Sequence[Attempt]) -> list[Record]:
    """Returns the marks that the charts show, ordered by step."""
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
    """Returns the events that the timeline shows, ordered by time."""
    entries_by_kind: dict[str, list[Record]] = {}
    for attempt in attempts:
        start = {"kind": "start", "time": attempt.begin_time, "step": attempt.resumed_after}
        for record in [start, *attempt.events]:
            if record["kind"] in _TIMELINE_KINDS:
                entry = {"time": record["time"], "attempt": attempt.number, "text": _event_text(record)}
                entries_by_kind.setdefault(record["kind"], []).append(entry | {"kind": record["kind"]})
    # Each kind is thinned separately, so that a frequent kind does not displace the others.
    thinned = [entry for entries in entries_by_kind.values() for entry in _thin(entries)]
    return sorted(thinned, key=lambda entry: (entry["time"], entry["attempt"]))


def _thin(records: list[Any], limit: int = _MAX_MARKS) -> list[Any]:
    """Returns at most `limit` records, evenly spaced."""
    if len(records) <= limit:
        return records
    return [records[index * len(records) // limit] for index in range(limit)]


_TEXT_FIELDS = ("why", "bad", "key", "before", "now", "phase", "loss", "typical", "at_fault", "at_fault_host",
                "asked_by", "file", "device")  # fmt: skip
"""Fields of an event that are included in its text."""


def _event_text(record: Record) -> str:
    """Returns the kind, the step and the main fields of an event as text, cut to 300 characters."""
    step = f" at step {record['step']}" if "step" in record else ""
    fields = [f"{name.replace('_', ' ')} {record[name]}" for name in _TEXT_FIELDS if record.get(name) is not None]
    details = ": " + ", ".join(fields) if fields else ""
    return printable(f"{record['kind'].replace('_', ' ')}{step}{details}")[:300]


def _processes(run_dir: Path, phase_lines: Sequence[Record]) -> Record:
    """Returns quantiles of the time that each process spends on its own work in a step.

    The result has only the processes that work longest. Axes: S lines, each of which covers several steps; P processes;
    Q quantiles.
    """
    lines = [line for line in phase_lines if line["kind"] == "processes" and _are_quantiles(line.get("own"))]
    if not lines:
        return {"quantiles": QUANTILES, "of": [], "processes": 0}
    processes = len(lines[-1]["own"])
    lines = [line for line in lines if len(line["own"]) == processes]
    # Each quantile is averaged over the steps, except for the last one, which is the maximum.
    weights = np.array([number(line, "steps") for line in lines]) + 1e-9
    own_SPQ = np.array([line["own"] for line in lines])
    seconds_PQ = np.average(own_SPQ, axis=0, weights=weights)
    seconds_PQ[:, -1] = own_SPQ[:, :, -1].max(axis=0)
    shown_processes = np.argsort(-seconds_PQ[:, 1], kind="stable")[:_MAX_PROCESSES].tolist()
    hosts = _hosts(run_dir, set(shown_processes))
    process_records = [
        {"process": process, "host": hosts.get(process), "seconds": seconds_PQ[process].tolist()}
        for process in shown_processes
    ]
    return {"quantiles": QUANTILES, "processes": processes, "of": process_records}


def _are_quantiles(own_work: Any) -> bool:
    """Returns True for a non-empty list that has valid quantiles for each process."""
    is_valid = lambda value: isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9
    return isinstance(own_work, list) and bool(own_work) and all(
        isinstance(row, list) and len(row) == len(QUANTILES) and all(map(is_valid, row)) for row in own_work
    )  # fmt: skip


def _hosts(run_dir: Path, processes: set[int]) -> dict[int, str]:
    """Returns the host on which each of these processes most recently started; a process may be missing."""
    host_of: dict[int, str] = {}
    for path in event_files(run_dir):
        if int(path.stem) in processes:
            hosts = [record["host"] for record in read_lines(path) if record["kind"] == "start" and "host" in record]
            host_of |= {int(path.stem): hosts[-1]} if hosts else {}
    return host_of


def _config(run_dir: Path) -> tuple[Record, str | None]:
    """Returns the resolved config by dotted key, and a note that says why there is no config; None if there is one.

    The config is not validated, because any version of jaxmnt may have written it.
    """
    path = run_dir / "config.yaml"
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, f"{path} does not exist, so the report has no config"
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())[:120]
        return {}, f"{path} cannot be read ({why}), so the report has no config"
    if not isinstance(tree, dict):
        return {}, f"{path} contains no settings, so the report has no config"
    try:
        return {key: _as_json_value(value) for key, value in flatten_tree(tree).items()}, None
    except RecursionError:
        return {}, f"{path} contains itself, so the report has no config"


def _as_json_value(value: Any) -> Any:
    """Returns a value of a config with everything that JSON cannot represent converted to text."""
    if isinstance(value, list):
        return [_as_json_value(entry) for entry in value]
    if isinstance(value, dict):
        return {str(name): _as_json_value(entry) for name, entry in value.items()}
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _differences(configs: Sequence[Record]) -> list[Record]:
    """Returns the keys of the config whose values differ between runs, with the value in each run."""
    keys = dict.fromkeys(key for config in configs for key in config)
    return [
        {"key": key, "values": [config.get(key) for config in configs]}
        for key in keys
        if key != "run.dir" and any(config.get(key) != configs[0].get(key) for config in configs)
    ]


def _difference_notes(differences: Sequence[Record]) -> list[str]:
    """Returns warnings for readers who compare runs whose configs have these differences."""
    notes = []
    sections = {difference["key"].partition(".")[0] for difference in differences}
    if "model" in sections:
        notes.append("these runs train different models, so compare their losses with care")
    if "data" in sections:
        notes.append(
            "these runs read different data, or the same data in another order, so their losses at a step are over "
            "different rows"
        )
    return notes
