"""Records a run's starts and bad nodes in `run.dir/launch/`, and reads its events.

Damaged records must not keep a run from being restarted, so they are set aside or skipped, with a note.
"""

import json
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from jaxmnt.distributed.termination import ABANDONED, PEERS
from jaxmnt.errors import UserError, counted, printable, remark
from jaxmnt.storage import UNUSABLE_FILE_ERRNOS, first_free, move, publish, read
from jaxmnt.strict_json import json_text
from jaxmnt.telemetry.events import (
    FAILED_START,
    FieldCheck,
    event_files,
    is_bool,
    is_count,
    is_number,
    is_text,
    last_logged_step,
    or_null,
    read_lines,
)

EXCEPTION_EVENT, TRAINING_EVENT = "failed", "started"
"""Kinds of the events that say that a process has raised an exception, and that the first step is finished."""
BLAMING_EVENTS = ("peer_lost", "hang", FAILED_START, ABANDONED)
"""Kinds of events that name a host at fault."""

_STEP_EVENTS = (EXCEPTION_EVENT, TRAINING_EVENT, "end", "peer_lost", "hang", FAILED_START, ABANDONED)
"""Kinds of events that say how far a start has come."""
_MAX_REASON = 300
"""Maximum number of characters of a reason that are shown."""

_EXCLUSION_SECONDS = 24 * 3600.0
"""Time for which a node is left out after it was blamed."""
_MAX_CLOCK_DIFFERENCE_SECONDS = 600.0
"""Maximum difference that is tolerated between the clocks of a run's hosts."""

Record = dict[str, Any]
"""An event, or an entry of a file in `run.dir/launch/`."""

_Fields = dict[str, FieldCheck]
_BAD_NODE_FIELDS: _Fields = {"node": is_text, "why": is_text, "since": is_number, "until": is_number}
_START_FIELDS: _Fields = {
    "job": is_text,
    "start": is_count,
    "code": is_count,
    "newest": is_count,
    "blamed": or_null(is_text),
}
_OPTIONAL_START_FIELDS: _Fields = {
    "began": or_null(is_number), "cancelled": is_bool, "waited": is_bool, "time": is_number,
    "step": or_null(is_count), "cause": is_text,
}  # fmt: skip
"""Fields of the entries in bad_nodes.json and starts.json, with their checks."""


@dataclass(frozen=True)
class BadNode:
    """A node that is left out for some time."""

    node: str
    why: str
    since: float
    until: float
    """Time until which the node is left out, in Unix seconds."""


class Ledger:
    """The record of the starts and bad nodes of the run in `run_dir`."""

    def __init__(self, run_dir: Path):
        self.run_dir, self._folder = run_dir, run_dir / "launch"

    def bad_nodes(self, now: float) -> list[BadNode]:
        """Returns the nodes that are currently excluded, the longest-excluded first."""
        entries = self._read("bad_nodes.json", _BAD_NODE_FIELDS, {})
        nodes = [BadNode(**{name: entry[name] for name in _BAD_NODE_FIELDS}) for entry in entries]
        # A time that is too far ahead comes from a wrong clock or a flipped bit.
        current = [node for node in nodes if now < node.until <= now + 2 * _EXCLUSION_SECONDS]
        return sorted(current, key=lambda node: node.since)

    def blame(self, node: str, why: str, now: float) -> None:
        """Records that a node is to be left out from now on."""
        others = [bad for bad in self.bad_nodes(now) if bad.node != node]
        nodes = [*others, BadNode(node, why, now, now + _EXCLUSION_SECONDS)]
        self._write("bad_nodes.json", [asdict(bad) for bad in nodes])

    def starts(self) -> list[Record]:
        """Returns the recorded starts, the oldest first."""
        return self._read("starts.json", _START_FIELDS, _OPTIONAL_START_FIELDS)

    def record_start(self, start: Record) -> None:
        """Records a start. A second record for the same start replaces the first."""
        identity = (start["job"], start["began"])
        others = [earlier for earlier in self.starts() if (earlier["job"], earlier.get("began")) != identity]
        self._write("starts.json", [*others, start])

    def events(self, began: float) -> list[Record]:
        """Returns the events of all processes since `began`, in order of time. Events too far in the future are left
        out, because they come from a clock that was ahead."""
        events = _sorted_by_time(event for _, event in _events_of(self.run_dir))
        until = time.time() + _MAX_CLOCK_DIFFERENCE_SECONDS
        return [event for event in events if began <= event["time"] <= until]

    def _read(self, name: str, required: _Fields, optional: _Fields) -> list[Record]:
        """Returns the valid entries of a file. If the file contains anything else, it is set aside, and replaced
        with a file that has only the valid entries."""
        path = self._folder / name
        try:
            content = json.loads(read(path).decode())
        except FileNotFoundError:
            return []
        except (ValueError, RecursionError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in UNUSABLE_FILE_ERRNOS:
                raise UserError(
                    f"{printable(str(path))}: cannot be read: {error.strerror}; check the file system"
                ) from error
            content = None
        entries = content if isinstance(content, list) else []
        valid = [entry for entry in entries if _is_valid(entry, required, optional)]
        if content is None or content != valid:
            self._set_aside(path, len(valid))
            if valid:
                self._write(name, valid)
        return valid

    def _set_aside(self, path: Path, valid_entries: int) -> None:
        """Renames a damaged file, and says so in a note."""
        aside = first_free(path, (f".damaged-{number}" for number in count()))
        try:
            move(path, aside)
            outcome = f"it is set aside as {aside.name}"
        except OSError as error:
            outcome = f"it could not be set aside ({error.strerror})"
        remark(
            f"note: {printable(str(path))} is damaged: {outcome}; the run continues with the "
            f"{counted(valid_entries, 'entry', 'entries')} that can be read"
        )

    def _write(self, name: str, content: Any) -> None:
        """Writes a JSON file. Raises `UserError` if that is not possible."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            publish(self._folder / name, json_text(content, indent=1) + "\n")
        except OSError as error:
            path = printable(str(self._folder / name))
            raise UserError(f"{path}: cannot be written: {error.strerror}; check the file system") from error


Mark = tuple[str, str, float]
"""Identity of an event within a run: the name of its file, its kind and its time."""


def event_marks(run_dir: Path) -> set[Mark]:
    """Returns the marks of all events that were recorded so far."""
    return {_mark(name, event) for name, event in _events_of(run_dir)}


def events_since(run_dir: Path, earlier: set[Mark]) -> list[Record]:
    """Returns the events of all processes that are not among the `earlier` ones, in order of time."""
    return _sorted_by_time(event for name, event in _events_of(run_dir) if _mark(name, event) not in earlier)


def _events_of(run_dir: Path) -> Iterator[tuple[str, Record]]:
    """Yields the events of all processes, each with the name of its file."""
    return ((path.name, event) for path in event_files(run_dir) for event in read_lines(path) if "process" in event)


def _mark(name: str, event: Record) -> Mark:
    return name, event["kind"], float(event["time"])


def _sorted_by_time(events: Iterable[Record]) -> list[Record]:
    return sorted(events, key=lambda event: float(event["time"]))


class Outcome(NamedTuple):
    """The progress and the end of a start."""

    step: int | None
    """The step that the run was taking; None if the start ended before its first step."""
    cause: str
    """The first reason that a process gives, with # instead of each number; empty if no process gives any."""
    details: str
    """The reason, and the rows of the step, as the processes report them."""


def outcome_of(run_dir: Path, events: Iterable[Record]) -> Outcome:
    """Returns the outcome of a start that has left these events, in order of time."""
    events = list(events)
    steps = [int(event["step"]) for event in events if event["kind"] in _STEP_EVENTS and "step" in event]
    if any(event["kind"] == TRAINING_EVENT for event in events):
        steps.append(last_logged_step(run_dir))  # if no process could report the end
    # An exception of a process comes before what others say about its end.
    reasons = [event for event in events if event.get("why") and event["kind"] in _STEP_EVENTS]
    reasons.sort(key=lambda event: event["kind"] != EXCEPTION_EVENT)
    why = str(reasons[0]["why"]) if reasons else ""
    rows = next((event["rows"] for event in reasons if is_row_range(event.get("rows"))), None)
    details = printable(why[:_MAX_REASON])
    if rows is not None:
        details += f"; the rows of that step are {rows[0]} to {rows[1]}"
    return Outcome(max(steps, default=None), re.sub(r"\d+", "#", why), details)


def is_row_range(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(is_count, value))


def peers_never_appeared(events: Iterable[Record]) -> bool:
    """Returns True if a start was abandoned because some processes never appeared. Only the first decisive event
    counts, because later ones are consequences of it."""
    for event in events:
        if event["kind"] == ABANDONED and event.get("reason") == PEERS:
            return True
        if event["kind"] in (EXCEPTION_EVENT, TRAINING_EVENT, *BLAMING_EVENTS):
            return False
    return False


def _is_valid(record: object, required: _Fields, optional: _Fields) -> bool:
    """Returns True if a record has all required fields, and no field has a value of the wrong type."""
    return (
        isinstance(record, dict)
        and required.keys() <= record.keys()
        and all(check(record[name]) for name, check in (required | optional).items() if name in record)
    )
