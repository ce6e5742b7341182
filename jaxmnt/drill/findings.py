"""Evaluates a drill: finds out whether each fault was noticed and attributed correctly, and the run recovered."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxmnt.checkpoint.commit import newest_valid
from jaxmnt.drill.course import Attempt, Drill
from jaxmnt.drill.faults import Fault
from jaxmnt.errors import ExitCode
from jaxmnt.strict_json import json_text
from jaxmnt.telemetry.events import METRICS, read_lines

_EXIT_CODES_BY_EVENT = {"preempted": (ExitCode.STOPPED,), "hang": (ExitCode.PEER,)}
"""The exit codes that a start may have if a fault ended it, by the kind of event that reports the fault."""
_DEFAULT_EXIT_CODES = (ExitCode.FAILURE, ExitCode.PEER)
"""The exit codes that a start may have for other kinds of events.

The code is that of the process that failed, or of a process that lost its connection to it.
"""
_SIGNAL_EXIT_CODE_OFFSET = 128
"""Other launchers add this number to the number of the signal that ended a process, and exit with the sum."""


@dataclass(frozen=True)
class Finding:
    """The way in which a run handled one fault; one row of the table."""

    fault: str
    processes: int
    noticed_seconds: float | None = None
    """Seconds from the fault until the last process that noticed it did so; None if no process noticed it."""
    is_attributed: bool = False
    """True if all processes that should notice the fault attributed it correctly, and the exit code fits the fault."""
    gone_seconds: float | None = None
    """Seconds from the fault until the last process had ended; None if the fault does not end the processes."""
    steps_lost: int = 0
    """Number of steps since the last checkpoint, which were repeated."""
    committed_lost: int = 0
    """Number of steps that were repeated although a valid checkpoint contained them."""
    back_seconds: float | None = None
    """Seconds from the fault until the first step of the next attempt.

    None if there is no such step, or if the fault does not end the processes.
    """
    is_identical: bool = False
    """True if all steps up to the next fault, and the final state, are equal to those of the run without faults."""
    last_events: str = ""
    """The last event of each process that either missed the fault or misattributed it; empty if there is no such
    process."""

    @property
    def passed(self) -> bool:
        """True if the run handled the fault correctly."""
        return (
            self.noticed_seconds is not None and self.is_attributed and self.committed_lost == 0 and self.is_identical
        )


def evaluate_drill(drill: Drill, baseline: Path) -> list[Finding]:
    """Returns a finding for each fault of a finished drill.

    `baseline` is the directory of the run without faults.
    """
    expected = {line["step"]: line["loss"] for line in read_lines(baseline / METRICS) if line["kind"] == "train"}
    findings = []
    for attempt, following in zip(drill.attempts, [*drill.attempts[1:], None], strict=True):
        for fault in attempt.faults:
            later_attempt = following if fault.ends_processes and following is not None else attempt
            identical = all((step, loss) in expected.items() for step, loss in later_attempt.losses.items())
            findings.append(_finding(drill, fault, attempt, following, identical=identical))
    last = drill.attempts[-1]
    has_expected_losses = last.exit_code == ExitCode.FINISHED and last.losses == expected
    if has_expected_losses and _read_final_state(drill.run_dir) == _read_final_state(baseline):
        return findings
    return [replace(finding, is_identical=False) for finding in findings]


def _finding(drill: Drill, fault: Fault, attempt: Attempt, following: Attempt | None, *, identical: bool) -> Finding:
    """Returns the finding for one fault of an attempt. `following` is the next attempt; None if there is none."""
    injection_times = [entry["time"] for entry in attempt.journal if entry.get("fault") == fault.name]
    if not injection_times:
        return Finding(fault.name, drill.processes)
    fault_time = min(injection_times)
    notice_times = _notice_times(drill, fault, attempt)
    known_times = [time for time in notice_times.values() if time is not None]
    steps_lost = 0
    committed_lost = 0
    back_seconds = None
    if fault.act == "damage":
        steps_lost = _last_step(attempt.checkpoints_before) - attempt.resumed_step
        committed_lost = max(0, _last_step(attempt.checkpoints_before[:-1]) - attempt.resumed_step)
    elif fault.ends_processes and following is not None:
        steps_lost = attempt.reached_step - _last_step(attempt.checkpoints_after)
        if following.first_step_time is not None:
            back_seconds = following.first_step_time - fault_time
        if not any(next_fault.act == "damage" for next_fault in following.faults):
            committed_lost = max(0, _last_step(attempt.checkpoints_after) - following.resumed_step)
    return Finding(
        fault=fault.name,
        processes=drill.processes,
        noticed_seconds=max(known_times) - fault_time if known_times else None,
        is_attributed=None not in notice_times.values() and _has_expected_exit_code(drill, fault, attempt),
        gone_seconds=attempt.end_time - fault_time if fault.ends_processes else None,
        steps_lost=steps_lost,
        committed_lost=committed_lost,
        back_seconds=back_seconds,
        is_identical=identical,
        last_events=_last_events(attempt, [process for process, time in notice_times.items() if time is None]),
    )


def _last_step(steps: list[int]) -> int:
    """Returns the last of some steps; 0 if there are none."""
    return steps[-1] if steps else 0


def _has_expected_exit_code(drill: Drill, fault: Fault, attempt: Attempt) -> bool:
    """Returns True if the exit code of an attempt fits a fault.

    Any code fits a fault that does not end the processes.
    """
    expected_codes = _EXIT_CODES_BY_EVENT.get(fault.expected_event, _DEFAULT_EXIT_CODES)
    if not fault.ends_processes or attempt.exit_code in expected_codes:
        return True
    return (
        bool(drill.start_command)
        and fault.expected_event != "preempted"
        and attempt.exit_code > _SIGNAL_EXIT_CODE_OFFSET
    )


def _notice_times(drill: Drill, fault: Fault, attempt: Attempt) -> dict[int, float | None]:
    """Returns, for each process that should notice a fault, the time at which the process reported it correctly.

    The time is None for a process that did not report the fault, or misattributed it.
    """
    all_processes = range(drill.processes)
    if fault.expected_event in ("bad_step", "checkpoint_damaged"):
        witnesses = [0]
    elif fault.expected_event == "peer_lost":
        witnesses = [process for process in all_processes if process != fault.victim]
    else:
        witnesses = list(all_processes)
    return {process: _notice_time(fault, attempt, process) for process in witnesses}


def _notice_time(fault: Fault, attempt: Attempt, process: int) -> float | None:
    """Returns the time at which a process reported a fault correctly; None if it did not."""
    for event in attempt.events.get(process, []):
        if event["kind"] == fault.expected_event and _attributes_fault(fault, attempt, process, event):
            return float(event["time"])
    return None


def _last_events(attempt: Attempt, processes: list[int]) -> str:
    """Describes the last event of each of the given processes."""
    last_events = {process: (attempt.events.get(process) or [{"kind": "nothing"}])[-1] for process in processes}
    texts = (f"process {process}: {event['kind']} {event.get('why', '')}" for process, event in last_events.items())
    return "; ".join(text.strip() for text in texts)


def _attributes_fault(fault: Fault, attempt: Attempt, process: int, event: dict[str, Any]) -> bool:
    """Returns True if an event of the expected kind attributes the fault correctly."""
    if fault.act == "poison":
        return bool(event.get("step") == fault.offset)
    if fault.act == "damage":
        newest = _last_step(attempt.checkpoints_before)
        return f"checkpoint {newest} " in str(event.get("why")) or event.get("step") == newest
    if fault.act == "terminate":
        return fault.victim not in (None, process) or event["asked_by"] == "SIGTERM"
    if fault.act == "fill":
        later_events = [later_event for later_event in attempt.events[process] if later_event["time"] > event["time"]]
        recovered = any(later_event["kind"] == "checkpoint_commit" for later_event in later_events)
        return recovered and f"process {fault.victim} of" in str(event.get("why"))
    if fault.act == "cut":  # it cannot be determined which end of a link is faulty
        return event.get("at_fault") in (None, fault.victim)
    return bool(event.get("at_fault") == fault.victim)


def _read_final_state(run_dir: Path) -> object:
    """Returns the step of the last valid checkpoint and the digests of its arrays; None if there is no checkpoint."""
    checkpoint = newest_valid(run_dir / "checkpoints")
    return None if checkpoint is None else (checkpoint.step, checkpoint.manifest.arrays)


HEADINGS = (
    "fault", "processes", "noticed after", "named rightly", "all gone after", "steps again", "committed lost",
    "back after", "identical",
)  # fmt: skip


def as_table(findings: list[Finding]) -> str:
    """Returns the findings as an aligned Markdown table."""
    rows = [list(HEADINGS), *map(_table_row, findings)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    lines = (" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(f"| {line} |" for line in lines)


def _table_row(finding: Finding) -> list[str]:
    return [
        finding.fault,
        str(finding.processes),
        _format_seconds(finding.noticed_seconds),
        _format_bool(finding.is_attributed),
        _format_seconds(finding.gone_seconds),
        str(finding.steps_lost),
        str(finding.committed_lost),
        _format_seconds(finding.back_seconds),
        _format_bool(finding.is_identical),
    ]


def _format_seconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds:.1f} s"


def _format_bool(is_true: bool) -> str:
    return "yes" if is_true else "NO"


_JSON_NAMES = {"is_attributed": "named", "is_identical": "identical", "last_events": "otherwise"}
"""The JSON names of fields of a finding that have another name here."""


def as_json(findings: list[Finding]) -> str:
    """Returns the findings as JSON."""
    records = []
    for finding in findings:
        fields = {_JSON_NAMES.get(name, name): field for name, field in vars(finding).items()}
        records.append(fields | {"well": finding.passed})
    return json_text(records, indent=1)
