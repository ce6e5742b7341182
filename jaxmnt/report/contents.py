"""Everything that the report says of a run, as one value that JSON can hold: the page shows it, `--json` prints it."""

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
"""Of what `--json` prints. It changes when a field that was there means something else or is gone."""

_MOST_MARKS = 500
_MOST_SAMPLES = 20
"""Of a kind; more cannot be told apart."""
_MOST_PROCESSES = 64
"""That are shown one by one: those that work longest."""
_UNDER_WAY_SECONDS = 120.0
"""Since a run has written for the last time; then it is over."""
_RECENT = 100
"""Steps over which the rate of a run is told."""

_MARKED = ("bad_step", "loss_spike", "straggler", "checkpoint_failed", "checkpoint_damaged", "replicas_differ",
           "rows_skipped", "slow_device", "host_fault")  # fmt: skip
"""Events that are marked at their step."""
_ON_TIMELINE = frozenset({
    *_MARKED, "start", "started", "checkpoint_commit", "config_change", "straggler_over", "slow_device_over", "budget",
    "preempted", "profile", "failed", "peer_lost", "hang", "interrupted", "end",
})  # fmt: skip


def report_of(runs: Sequence[str], price: float | None = None) -> Record:
    """The report of these run directories. With a `price`, an hour of a device cost that.

    Raises `ConfigError` for one that has no lines of a run.
    """
    reports = [_of_run(run, price) | {"label": label} for run, label in zip(runs, _labels(runs), strict=True)]
    differences = _differences([one["config"] for one in reports])
    return {
        "version": VERSION,
        "jaxmnt": jaxmnt.__version__,
        "made": time.time(),
        "runs": reports,
        "config_differences": differences,
        "notes": _about_differences(differences),
    }


def _labels(runs: Sequence[str]) -> list[str]:
    """Short names by which runs can be told apart: their paths without what all have in common."""
    if len(set(runs)) < len(runs):
        return [f"{place} {run}" for place, run in enumerate(runs, 1)]
    if len(runs) == 1:
        return [printable(runs[0])]
    parts = [Path(run).absolute().parts for run in runs]
    while min(map(len, parts)) > 1 and len({one[0] for one in parts}) == 1:
        parts = [one[1:] for one in parts]
    while min(map(len, parts)) > 1 and len({one[-1] for one in parts}) == 1:
        parts = [one[:-1] for one in parts]
    return [printable("/".join(one)) for one in parts]


def _of_run(run: str, price: float | None) -> Record:
    run_dir = Path(run)
    attempts, notes = read_run_records(run_dir)
    for attempt in attempts if price is not None else []:
        attempt.cost_per_gpu_hour = price
    typical = typical_step(attempts)
    parts = [attempt_parts(attempt, typical) for attempt in attempts]
    config, trouble = _config(run_dir)
    over = not _is_under_way(run_dir, attempts)
    phase_lines = read_lines(run_dir / PHASE_LINES)
    newest = attempts[-1].start
    study, unread = read_study(run_dir)
    notes += [one for one in (trouble, unread) if one]
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
        "attempts": [_attempt(*one) for one in zip(attempts, parts, strict=True)],
        "failures": [asdict(one) for one in failures(run_dir, attempts, parts, over=over)],
        "stragglers": _stragglers(attempts),
        "advice": [asdict(one) for one in advise(attempts, config, typical, phase_lines)],
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
    """The numbers that a person asks for first."""
    lines = [line for attempt in attempts for line in attempt.steps]
    evals = [line for attempt in attempts for line in attempt.evals]
    last = lines[-1] if lines else {}
    recent = [line for line in lines[-_RECENT:] if line["step"] != lines[0]["step"]]
    seconds = sum(number(line, "step_seconds") for line in recent)
    rate = sum(number(line, "tokens_per_second") * number(line, "step_seconds") for line in recent)
    steps = config.get("train.steps")
    left = steps - last.get("step", 0) if type(steps) is int else 0
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
        "seconds_left": left * typical if left > 0 and math.isfinite(typical) else None,
        "bad_steps": len(events_of(attempts, "bad_step")),
        "steps_without_targets": sum(map(has_no_targets, lines)),
        "restarts": len(attempts) - 1,
    }


def _mean(values: Iterable[Any]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _state(last: Attempt, over: bool) -> str:
    if last.end == "end":
        ended = next(record for record in reversed(last.events) if record["kind"] == "end")
        return "finished" if ended["finished"] else "stopped with a checkpoint"
    if last.end is not None:
        return {"failed": "failed", "hang": "hung", "peer_lost": "lost a process"}.get(last.end, last.end)
    return "broke off without a word" if over else "under way"


def _is_under_way(run_dir: Path, attempts: Sequence[Attempt]) -> bool:
    """Whether the run seems to go on: nothing says that it ended, and it has written a short while ago."""
    if attempts[-1].end is not None:
        return False
    written = [attempts[-1].ended]
    for name in ("lock.beat", "metrics.jsonl", "events/0.jsonl"):
        path = run_dir / name
        written += [path.stat().st_mtime] if path.is_file() else []
    now = time.time()  # a clock that was ahead has written times that are still to come
    return any(abs(now - at) < _UNDER_WAY_SECONDS for at in written)


def _attempt(attempt: Attempt, parts: dict[str, float]) -> Record:
    return {
        "attempt": attempt.number,
        "began": attempt.began,
        "ended": attempt.ended,
        "end": attempt.end,
        "why": next((r.get("why") for r in reversed(attempt.events) if r["kind"] == attempt.end), None),
        "finished": any(r["kind"] == "end" and r["finished"] for r in attempt.events),
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
    """Who held the others up, in which phase, and from which step to which; devices are told with their host."""
    found = []
    for attempt in attempts:
        open_ones = {}
        for record in attempt.events:
            kind = record["kind"]
            key = tuple(record.get(name) for name in ("at_fault", "phase", "device", "found_by"))
            if kind in ("straggler", "slow_device"):
                one = {
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
                open_ones[key] = one
                found.append(one)
            elif kind in ("straggler_over", "slow_device_over") and key in open_ones:
                open_ones.pop(key)["to_step"] = record.get("step")
    return found


def _samples(attempts: Sequence[Attempt]) -> list[Record]:
    """What the model wrote after evaluations, the newest first."""
    told: dict[int, list[dict[str, str]]] = {}
    for record in events_of(attempts, "samples"):
        samples = record.get("samples")
        if "step" in record and isinstance(samples, list):
            told[record["step"]] = [
                {"prompt": one["prompt"], "text": one["text"]}
                for one in samples
                if isinstance(one, dict) and isinstance(one.get("prompt"), str) and isinstance(one.get("text"), str)
            ]
    newest = sorted(told, reverse=True)
    return [{"step": step, "samples": told[step]} for step in newest[:1] + _thinned(newest[1:], _MOST_SAMPLES)]


def _marks(attempts: Sequence[Attempt]) -> list[Record]:
    """What is marked in charts, at its step."""
    marks = [
        {"step": attempt.resumed_after, "kind": "restart", "text": f"attempt {attempt.number} goes on"}
        for attempt in attempts[1:]
    ]
    for kind in _MARKED:
        marks += [
            {"step": record["step"], "kind": kind, "text": _in_words(record)}
            for record in _thinned(events_of(attempts, kind))
            if "step" in record
        ]
    return sorted(marks, key=lambda mark: mark["step"])


def _timeline(attempts: Sequence[Attempt]) -> list[Record]:
    kinds: dict[str, list[Record]] = {}
    for attempt in attempts:
        start = {"kind": "start", "time": attempt.began, "step": attempt.resumed_after}
        for record in [start, *attempt.events]:
            if record["kind"] in _ON_TIMELINE:
                one = {"time": record["time"], "attempt": attempt.number, "text": _in_words(record)}
                kinds.setdefault(record["kind"], []).append(one | {"kind": record["kind"]})
    return sorted(
        (one for told in kinds.values() for one in _thinned(told)), key=lambda one: (one["time"], one["attempt"])
    )


def _thinned(records: list[Any], most: int = _MOST_MARKS) -> list[Any]:
    if len(records) <= most:
        return records
    return [records[place * len(records) // most] for place in range(most)]


_SAID = ("why", "bad", "key", "before", "now", "phase", "loss", "typical", "at_fault", "at_fault_host", "asked_by",
         "file", "device")  # fmt: skip


def _in_words(record: Record) -> str:
    """Of an event: what it is, its step, and what it says."""
    step = f" at step {record['step']}" if "step" in record else ""
    told = [f"{name.replace('_', ' ')} {record[name]}" for name in _SAID if record.get(name) is not None]
    return printable(f"{record['kind'].replace('_', ' ')}{step}" + (": " + ", ".join(told) if told else ""))[:300]


def _processes(run_dir: Path, phase_lines: Sequence[Record]) -> Record:
    """How long processes work for themselves in a step, of those that work longest: quantiles Q of processes P, over
    sums S of some steps each."""
    rows = [line for line in phase_lines if line["kind"] == "processes" and _are_quantiles(line.get("own"))]
    if not rows:
        return {"quantiles": QUANTILES, "of": [], "processes": 0}
    processes = len(rows[-1]["own"])
    rows = [line for line in rows if len(line["own"]) == processes]
    weights = np.array([number(line, "steps") for line in rows]) + 1e-9
    own_SPQ = np.array([line["own"] for line in rows])
    seconds_PQ = np.average(own_SPQ, axis=0, weights=weights)
    seconds_PQ[:, -1] = own_SPQ[:, :, -1].max(axis=0)
    shown = np.argsort(-seconds_PQ[:, 1], kind="stable")[:_MOST_PROCESSES].tolist()
    hosts = _hosts(run_dir, set(shown))
    told = [{"process": one, "host": hosts.get(one), "seconds": seconds_PQ[one].tolist()} for one in shown]
    return {"quantiles": QUANTILES, "processes": processes, "of": told}


def _are_quantiles(own: Any) -> bool:
    sound = lambda value: isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9
    return isinstance(own, list) and bool(own) and all(
        isinstance(one, list) and len(one) == len(QUANTILES) and all(map(sound, one)) for one in own
    )  # fmt: skip


def _hosts(run_dir: Path, processes: set[int]) -> dict[int, str]:
    """The host on which each of these processes began last."""
    found: dict[int, str] = {}
    for path in event_files(run_dir):
        if int(path.stem) in processes:
            hosts = [record["host"] for record in read_lines(path) if record["kind"] == "start" and "host" in record]
            found |= {int(path.stem): hosts[-1]} if hosts else {}
    return found


def _config(run_dir: Path) -> tuple[Record, str | None]:
    """The resolved config by dotted keys, as it stands there, whatever version wrote it; and what is wrong with it."""
    path = run_dir / "config.yaml"
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, f"{path} is not there: the report has no config"
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        return {}, f"{path} cannot be read ({' '.join(str(error).split())[:120]}): the report has no config"
    if not isinstance(tree, dict):
        return {}, f"{path} holds no settings: the report has no config"
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
    """Keys whose values differ between runs, with the value in each."""
    keys = {key: None for config in configs for key in config}
    return [
        {"key": key, "values": [config.get(key) for config in configs]}
        for key in keys
        if key != "run.dir" and any(config.get(key) != configs[0].get(key) for config in configs)
    ]


def _about_differences(differences: Sequence[Record]) -> list[str]:
    """What to know when runs are compared whose configs have these differences."""
    notes = []
    different = {one["key"].partition(".")[0] for one in differences}
    if "model" in different:
        notes.append("these runs train different models: compare their losses with care")
    if "data" in different:
        notes.append("these runs read different data, or in another order: losses of a step are of other rows")
    return notes
