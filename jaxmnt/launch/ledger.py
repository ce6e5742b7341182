"""What is known of a run's starts and nodes, in `run.dir/launch/`, and what its events say.

None of it may keep a run from being started again: what is damaged is set aside or passed over, and said.
"""

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from jaxmnt.distributed.termination import ABANDONED, PEERS
from jaxmnt.errors import UserError, printable, remark
from jaxmnt.storage import NO_FILE, first_free, move, publish, read
from jaxmnt.strict_json import json_text
from jaxmnt.telemetry.events import (
    FAILED_START,
    IsRight,
    event_files,
    is_count,
    is_number,
    is_text,
    is_truth,
    or_null,
    read_lines,
)

RAISED, TRAINED = "failed", "started"
BLAMING = ("peer_lost", "hang", FAILED_START, ABANDONED)
"""Events that tell of a host."""

_BAD_FOR_SECONDS = 24 * 3600.0
_CLOCKS_DIFFER_SECONDS = 600.0
"""Between the hosts of a run, where nobody has set one wrong."""

Record = dict[str, Any]
"""An event, or an entry of a file here."""

_Fields = dict[str, IsRight]
_BAD_NODE: _Fields = {"node": is_text, "why": is_text, "since": is_number, "until": is_number}
_START: _Fields = {"job": is_text, "start": is_count, "code": is_count, "newest": is_count, "blamed": or_null(is_text)}
_START_MAY_HAVE: _Fields = {"began": or_null(is_number), "cancelled": is_truth, "waited": is_truth}
"""Fields of the entries, and what they hold."""


@dataclass(frozen=True)
class BadNode:
    """A node that is left out for a while."""

    node: str
    why: str
    since: float
    until: float
    """Unix seconds."""


class Ledger:
    """Starts and nodes of the run in `run_dir`."""

    def __init__(self, run_dir: Path):
        self.run_dir, self._folder = run_dir, run_dir / "launch"

    def bad_nodes(self, now: float) -> list[BadNode]:
        """Those that are still to be left out, the oldest first."""
        entries = self._read("bad_nodes.json", _BAD_NODE, {})
        known = [BadNode(**{name: entry[name] for name in _BAD_NODE}) for entry in entries]
        # Nobody writes a date that far ahead, so a clock or a bit was wrong.
        kept = [one for one in known if now < one.until <= now + 2 * _BAD_FOR_SECONDS]
        return sorted(kept, key=lambda one: one.since)

    def blame(self, node: str, why: str, now: float) -> None:
        others = [one for one in self.bad_nodes(now) if one.node != node]
        bad = [*others, BadNode(node, why, now, now + _BAD_FOR_SECONDS)]
        self._write("bad_nodes.json", [asdict(one) for one in bad])

    def starts(self) -> list[Record]:
        return self._read("starts.json", _START, _START_MAY_HAVE)

    def note(self, start: Record) -> None:
        """Once, however often it is told."""
        others = [one for one in self.starts() if (one["job"], one.get("began")) != (start["job"], start["began"])]
        self._write("starts.json", [*others, start])

    def events(self, began: float) -> list[Record]:
        """Those of all processes since then, in order of time. What lies in the future is of a clock that was ahead."""
        events = _in_order(event for _, event in _events_of(self.run_dir))
        until = time.time() + _CLOCKS_DIFFER_SECONDS
        return [event for event in events if began <= event["time"] <= until]

    def _read(self, name: str, needed: _Fields, optional: _Fields) -> list[Record]:
        """The sound entries of a file. One with anything else in it is set aside."""
        path = self._folder / name
        try:
            content = json.loads(read(path).decode())
        except FileNotFoundError:
            return []
        except (ValueError, RecursionError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in NO_FILE:
                raise UserError(
                    f"{printable(str(path))}: cannot be read: {error.strerror}; see to its file system"
                ) from error
            content = None
        entries = content if isinstance(content, list) else []
        sound = [one for one in entries if _fits(one, needed, optional)]
        if content is None or content != sound:
            self._set_aside(path, len(sound))
            if sound:
                self._write(name, sound)
        return sound

    def _set_aside(self, path: Path, kept: int) -> None:
        aside = first_free(path, (f".damaged-{number}" for number in count()))
        try:
            move(path, aside)
            told = f"it is set aside as {aside.name}"
        except OSError as error:
            told = f"it could not be set aside ({error.strerror})"
        remark(
            f"note: {printable(str(path))} is damaged: {told}; the run goes on with what can be read, {kept} entries"
        )

    def _write(self, name: str, content: Any) -> None:
        """Raises `UserError` where that is not possible."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            publish(self._folder / name, json_text(content, indent=1) + "\n")
        except OSError as error:
            path = printable(str(self._folder / name))
            raise UserError(f"{path}: cannot be written: {error.strerror}; see to its file system") from error


Mark = tuple[str, str, float]
"""What tells an event of a run from others: its file, its kind, its time."""


def event_marks(run_dir: Path) -> set[Mark]:
    """The events that there are so far."""
    return {_mark(name, event) for name, event in _events_of(run_dir)}


def events_since(run_dir: Path, earlier: set[Mark]) -> list[Record]:
    """The events of all processes that are not among the `earlier` ones, in order of time."""
    return _in_order(event for name, event in _events_of(run_dir) if _mark(name, event) not in earlier)


def _events_of(run_dir: Path) -> Iterator[tuple[str, Record]]:
    """The events of all processes, each with the name of its file."""
    return ((path.name, event) for path in event_files(run_dir) for event in read_lines(path) if "process" in event)


def _mark(name: str, event: Record) -> Mark:
    return name, event["kind"], float(event["time"])


def _in_order(events: Iterable[Record]) -> list[Record]:
    return sorted(events, key=lambda event: float(event["time"]))


def waited_in_vain(events: Iterable[Record]) -> bool:
    """Whether a start came to nothing because processes never appeared. The first such event decides: later ones come
    from its end."""
    for event in events:
        if event["kind"] == ABANDONED and event.get("reason") == PEERS:
            return True
        if event["kind"] in (RAISED, TRAINED, *BLAMING):
            return False
    return False


def _fits(record: object, needed: _Fields, optional: _Fields) -> bool:
    """Whether a record has all that is needed, and nothing of a wrong type."""
    return (
        isinstance(record, dict)
        and needed.keys() <= record.keys()
        and all(is_right(record[name]) for name, is_right in (needed | optional).items() if name in record)
    )
