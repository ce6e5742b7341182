"""The findings of a drill: whether each fault was noticed, attributed correctly, and recovered from."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxmnt.checkpoint.commit import newest_valid
from jaxmnt.drill.course import Attempt, Drill
from jaxmnt.drill.faults import Fault
from jaxmnt.errors import ExitCode
from jaxmnt.strict_json import json_text
from jaxmnt.telemetry.events import METRICS, read_lines

_EVENT_CODES = {"preempted": (ExitCode.STOPPED,), "hang": (ExitCode.PEER,)}
"""Allowed exit codes of a start that a fault ended, by the event that reports the fault."""
_OTHER_CODES = (ExitCode.FAILURE, ExitCode.PEER)
"""Allowed exit codes for other events: of the process that failed, or of one that lost it."""
_SIGNAL_CODE_OFFSET = 128
"""Other launchers report the number of a signal that ended a process plus this."""


@dataclass(frozen=True)
class Finding:
    """One row of the table."""

    fault: str
    processes: int
    noticed_seconds: float | None
    """From the fault until the last process that should notice it did."""
    named: bool
    """True if all these processes named the right process, and the start had the right exit code."""
    gone_seconds: float | None
    """From the fault until the last process ended; None if the fault ends no process."""
    steps_lost: int
    """Steps since the last checkpoint, which are repeated."""
    committed_lost: int
    """Steps of valid checkpoints that the next start did not resume from."""
    back_seconds: float | None
    """From the fault to the first new step."""
    identical: bool
    """True if all steps up to the next fault, and the final state, equal those of the run without faults."""
    otherwise: str = ""
    """Last events of the processes that did not notice the fault or misattributed it; empty if there are none."""

    @property
    def passed(self) -> bool:
        return self.noticed_seconds is not None and self.named and self.committed_lost == 0 and self.identical


def findings(drill: Drill, baseline: Path) -> list[Finding]:
    """Returns a finding for each fault of a finished drill. `baseline` is the directory of the run without faults."""
    expected = {line["step"]: line["loss"] for line in read_lines(baseline / METRICS) if line["kind"] == "train"}
    results = []
    for attempt, following in zip(drill.attempts, [*drill.attempts[1:], None], strict=True):
        for fault in attempt.faults:
            after = following if fault.ends and following is not None else attempt
            identical = all((step, loss) in expected.items() for step, loss in after.losses.items())
            results.append(_finding(drill, fault, attempt, following, identical=identical))
    last = drill.attempts[-1]
    finished_equal = last.code == ExitCode.FINISHED and last.losses == expected
    if finished_equal and _final_state(drill.run_dir) == _final_state(baseline):
        return results
    return [replace(finding, identical=False) for finding in results]


def _finding(drill: Drill, fault: Fault, attempt: Attempt, following: Attempt | None, *, identical: bool) -> Finding:
    """Returns the finding for one fault of a start. `following` is the next start, if there is one."""
    injected = [entry["time"] for entry in attempt.journal if entry.get("fault") == fault.name]
    if not injected:
        return Finding(fault.name, drill.processes, None, False, None, 0, 0, None, False)
    when = min(injected)
    noticed = _notice_times(drill, fault, attempt)
    times = [time for time in noticed.values() if time is not None]
    again, lost, back = 0, 0, None
    if fault.act == "damage":
        again = _last_step(attempt.before) - attempt.resumed
        lost = max(0, _last_step(attempt.before[:-1]) - attempt.resumed)
    elif fault.ends and following is not None:
        again = attempt.reached - _last_step(attempt.committed)
        back = None if following.first_step is None else following.first_step - when
        if not any(next_fault.act == "damage" for next_fault in following.faults):
            lost = max(0, _last_step(attempt.committed) - following.resumed)
    return Finding(
        fault=fault.name,
        processes=drill.processes,
        noticed_seconds=max(times) - when if times else None,
        named=None not in noticed.values() and _exit_code_is_right(drill, fault, attempt),
        gone_seconds=attempt.ended - when if fault.ends else None,
        steps_lost=again,
        committed_lost=lost,
        back_seconds=back,
        identical=identical,
        otherwise=_last_events(attempt, [process for process, time in noticed.items() if time is None]),
    )


def _last_step(steps: list[int]) -> int:
    return steps[-1] if steps else 0


def _exit_code_is_right(drill: Drill, fault: Fault, attempt: Attempt) -> bool:
    if not fault.ends or attempt.code in _EVENT_CODES.get(fault.expected_event, _OTHER_CODES):
        return True
    return bool(drill.prefix) and fault.expected_event != "preempted" and attempt.code > _SIGNAL_CODE_OFFSET


def _notice_times(drill: Drill, fault: Fault, attempt: Attempt) -> dict[int, float | None]:
    """Returns, for each process that should notice a fault, when it reported it correctly; None if it did not."""
    everyone = range(drill.processes)
    if fault.expected_event in ("bad_step", "checkpoint_damaged"):
        listeners = [0]
    elif fault.expected_event == "peer_lost":
        listeners = [process for process in everyone if process != fault.victim]
    else:
        listeners = list(everyone)
    return {process: _notice_time(fault, attempt, process) for process in listeners}


def _notice_time(fault: Fault, attempt: Attempt, process: int) -> float | None:
    for event in attempt.events.get(process, []):
        if event["kind"] == fault.expected_event and _attributes_fault(fault, attempt, process, event):
            return float(event["time"])
    return None


def _last_events(attempt: Attempt, processes: list[int]) -> str:
    """Returns the last event of each of these processes, as text."""
    last = {process: (attempt.events.get(process) or [{"kind": "nothing"}])[-1] for process in processes}
    texts = (f"process {process}: {event['kind']} {event.get('why', '')}" for process, event in last.items())
    return "; ".join(text.strip() for text in texts)


def _attributes_fault(fault: Fault, attempt: Attempt, process: int, event: dict[str, Any]) -> bool:
    """Returns True if an event of the expected kind attributes the fault correctly."""
    if fault.act == "poison":
        return bool(event.get("step") == fault.offset)
    if fault.act == "damage":
        newest = _last_step(attempt.before)
        return f"checkpoint {newest} " in str(event.get("why")) or event.get("step") == newest
    if fault.act == "terminate":
        return fault.victim not in (None, process) or event["asked_by"] == "SIGTERM"
    if fault.act == "fill":
        later = [later_event for later_event in attempt.events[process] if later_event["time"] > event["time"]]
        recovered = any(later_event["kind"] == "checkpoint_commit" for later_event in later)
        return recovered and f"process {fault.victim} of" in str(event.get("why"))
    if fault.act == "cut":  # the faulty end of a link cannot be determined
        return event.get("at_fault") in (None, fault.victim)
    return bool(event.get("at_fault") == fault.victim)


def _final_state(run_dir: Path) -> object:
    """Returns the step and the array digests of the last checkpoint; None if there is none."""
    checkpoint = newest_valid(run_dir / "checkpoints")
    return None if checkpoint is None else (checkpoint.step, checkpoint.manifest.arrays)


HEADINGS = (
    "fault", "processes", "noticed after", "named rightly", "all gone after", "steps again", "committed lost",
    "back after", "identical",
)  # fmt: skip


def table(results: list[Finding]) -> str:
    """Returns the findings as an aligned Markdown table."""
    rows = [list(HEADINGS), *map(_row, results)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    lines = (" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(f"| {line} |" for line in lines)


def _row(finding: Finding) -> list[str]:
    return [
        finding.fault,
        str(finding.processes),
        _seconds(finding.noticed_seconds),
        _yes_no(finding.named),
        _seconds(finding.gone_seconds),
        str(finding.steps_lost),
        str(finding.committed_lost),
        _seconds(finding.back_seconds),
        _yes_no(finding.identical),
    ]


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} s"


def _yes_no(value: bool) -> str:
    return "yes" if value else "NO"


def to_json(results: list[Finding]) -> str:
    """Returns the findings as JSON."""
    return json_text([vars(finding) | {"well": finding.passed} for finding in results], indent=1)
