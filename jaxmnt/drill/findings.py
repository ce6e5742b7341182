"""What a drill found: for each fault whether it was heard of, named rightly, and made good."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxmnt.checkpoint.commit import newest_valid
from jaxmnt.drill.course import Attempt, Drill
from jaxmnt.drill.faults import Fault
from jaxmnt.errors import ExitCode
from jaxmnt.strict_json import json_text
from jaxmnt.telemetry.events import METRICS, read_lines

_CODES = {"preempted": (ExitCode.STOPPED,), "hang": (ExitCode.PEER,)}
"""With which exit codes a start may end over a fault; others by the process that failed, or for another."""
_OTHER_CODES = (ExitCode.FAILURE, ExitCode.PEER)
_SIGNALLED = 128
"""What other launchers add to the number of a signal that ended a process."""


@dataclass(frozen=True)
class Finding:
    """One row of the table."""

    fault: str
    processes: int
    noticed_seconds: float | None
    """From the fault until the last of those who should hear of it did."""
    named: bool
    """Whether all of them named the right process, and the start ended with the right exit code."""
    gone_seconds: float | None
    """From the fault until the last process had ended, where it ends them."""
    steps_lost: int
    """Steps to be taken again: none that was committed."""
    committed_lost: int
    """Steps of whole checkpoints that the next start did not go on from."""
    back_seconds: float | None
    """From the fault to the first new step."""
    identical: bool
    """Whether all steps up to the next fault, and the final state, are those of the undisturbed run."""
    otherwise: str = ""
    """What those said last that should have heard of it and did not, or not rightly; empty if all did."""

    @property
    def well(self) -> bool:
        return self.noticed_seconds is not None and self.named and self.committed_lost == 0 and self.identical


def findings(drill: Drill, undisturbed: Path) -> list[Finding]:
    """One for each fault of a drill that is over."""
    expected = {line["step"]: line["loss"] for line in read_lines(undisturbed / METRICS) if line["kind"] == "train"}
    found = []
    for attempt, following in zip(drill.attempts, [*drill.attempts[1:], None], strict=True):
        for fault in attempt.faults:
            after = following if fault.ends and following is not None else attempt
            same = all((step, loss) in expected.items() for step, loss in after.losses.items())
            found.append(_finding(drill, fault, attempt, following, identical=same))
    ending = drill.attempts[-1].code == ExitCode.FINISHED and drill.attempts[-1].losses == expected
    if ending and _final(drill.run_dir) == _final(undisturbed):
        return found
    return [replace(one, identical=False) for one in found]


def _finding(drill: Drill, fault: Fault, attempt: Attempt, following: Attempt | None, *, identical: bool) -> Finding:
    caused = [entry["time"] for entry in attempt.journal if entry.get("fault") == fault.name]
    if not caused:
        return Finding(fault.name, drill.processes, None, False, None, 0, 0, None, False)
    when, again, lost, back = min(caused), 0, 0, None
    heard = _heard(drill, fault, attempt)
    times = [time for time in heard.values() if time is not None]
    if fault.act == "damage":
        again = _newest(attempt.before) - attempt.resumed
        lost = max(0, _newest(attempt.before[:-1]) - attempt.resumed)
    elif fault.ends and following is not None:
        again = attempt.reached - _newest(attempt.committed)
        back = None if following.first_step is None else following.first_step - when
        if not any(other.act == "damage" for other in following.faults):
            lost = max(0, _newest(attempt.committed) - following.resumed)
    return Finding(
        fault.name,
        drill.processes,
        max(times) - when if times else None,
        None not in heard.values() and _ended_rightly(drill, fault, attempt),
        attempt.ended - when if fault.ends else None,
        again,
        lost,
        back,
        identical,
        _otherwise(attempt, [process for process, time in heard.items() if time is None]),
    )


def _newest(steps: list[int]) -> int:
    return steps[-1] if steps else 0


def _ended_rightly(drill: Drill, fault: Fault, attempt: Attempt) -> bool:
    if not fault.ends or attempt.code in _CODES.get(fault.heard, _OTHER_CODES):
        return True
    return bool(drill.prefix) and fault.heard != "preempted" and attempt.code > _SIGNALLED


def _heard(drill: Drill, fault: Fault, attempt: Attempt) -> dict[int, float | None]:
    """When each process that should hear of a fault did, and named it rightly; None if it did not."""
    everyone = range(drill.processes)
    if fault.heard in ("bad_step", "checkpoint_damaged"):
        listeners = [0]
    elif fault.heard == "peer_lost":
        listeners = [process for process in everyone if process != fault.victim]
    else:
        listeners = list(everyone)
    return {process: _when(fault, attempt, process) for process in listeners}


def _when(fault: Fault, attempt: Attempt, process: int) -> float | None:
    for event in attempt.events.get(process, []):
        if event["kind"] == fault.heard and _names(fault, attempt, process, event):
            return float(event["time"])
    return None


def _otherwise(attempt: Attempt, processes: list[int]) -> str:
    """The last of each one's events, in words."""
    last = {process: (attempt.events.get(process) or [{"kind": "nothing"}])[-1] for process in processes}
    return "; ".join(f"process {number}: {one['kind']} {one.get('why', '')}".strip() for number, one in last.items())


def _names(fault: Fault, attempt: Attempt, process: int, event: dict[str, Any]) -> bool:
    """Whether an event of the right kind says what happened."""
    if fault.act == "poison":
        return bool(event.get("step") == fault.offset)
    if fault.act == "damage":
        newest = _newest(attempt.before)
        return f"checkpoint {newest} " in str(event.get("why")) or event.get("step") == newest
    if fault.act == "terminate":
        return fault.victim not in (None, process) or event["asked_by"] == "SIGTERM"
    if fault.act == "fill":
        later = [one for one in attempt.events[process] if one["time"] > event["time"]]
        made_good = any(one["kind"] == "checkpoint_commit" for one in later)
        return made_good and f"process {fault.victim} of" in str(event.get("why"))
    if fault.act == "cut":  # nobody can tell which end of a link it was
        return event.get("at_fault") in (None, fault.victim)
    return bool(event.get("at_fault") == fault.victim)


def _final(run_dir: Path) -> object:
    """What the last checkpoint holds, by digest; None if there is none."""
    checkpoint = newest_valid(run_dir / "checkpoints")
    return None if checkpoint is None else (checkpoint.step, checkpoint.manifest.arrays)


HEADINGS = (
    "fault", "processes", "noticed after", "named rightly", "all gone after", "steps again", "committed lost",
    "back after", "identical",
)  # fmt: skip


def table(found: list[Finding]) -> str:
    """As Markdown, aligned."""
    rows = [list(HEADINGS), *map(_row, found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    lines = (" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(f"| {line} |" for line in lines)


def _row(one: Finding) -> list[str]:
    return [
        one.fault, str(one.processes), _seconds(one.noticed_seconds), _yes(one.named), _seconds(one.gone_seconds),
        str(one.steps_lost), str(one.committed_lost), _seconds(one.back_seconds), _yes(one.identical),
    ]  # fmt: skip


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} s"


def _yes(value: bool) -> str:
    return "yes" if value else "NO"


def to_json(found: list[Finding]) -> str:
    return json_text([vars(one) | {"well": one.well} for one in found], indent=1)
