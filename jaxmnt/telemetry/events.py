"""Writes the events of a process, and validates recorded lines when they are read back."""

import contextlib
import json
import math
import os
import re
import resource
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from jaxmnt.distributed.termination import ABANDONED
from jaxmnt.errors import counted, printable, remark_once
from jaxmnt.telemetry import clock
from jaxmnt.telemetry.writer import LineWriter

METRICS = "metrics.jsonl"
"""Metrics file in a run directory; see `metrics.py`."""

FORMAT = 1
"""Version of the line format in a run directory, which each start event records. In another version, a field of the
same name may have another meaning."""

PHASE_LINES = "phases.jsonl"
"""File of phase times in a run directory; see `phase_log.py`."""

RESOURCES = "resources.jsonl"
"""File of resource readings in a run directory; see `resources.py`."""

_PADDING = b" \t\r\n\0"
"""Bytes that may surround a record. A host that crashes may leave blocks of NUL bytes."""

_REQUIRED_FIELDS: dict[str, tuple[str, ...]] = {
    "train": ("step", "loss", "grad_norm", "tokens"),
    "eval": ("step", "loss"),
    "phases": ("step",),
    "processes": ("step",),
    "start": ("attempt",),
    "checkpoint_commit": ("step",),
    "preempted": ("process", "asked_by"),
    "end": ("finished",),
    **dict.fromkeys(("failed", "peer_lost", "hang", "start_failed", "start_abandoned"), ("process",)),
}
"""Fields that every record of a kind must have, in addition to its kind and time."""


_MAX_TIME_SECONDS = 1e11
"""Maximum of a time in Unix seconds, which excludes times in milliseconds."""


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def is_number(value: Any) -> bool:
    return (type(value) is int and abs(value) < 1 << 63) or (type(value) is float and math.isfinite(value))


def is_bool(value: Any) -> bool:
    return isinstance(value, bool)


FieldCheck = Callable[[Any], bool]
"""Function that returns True if the value of a field is valid."""


def or_null(is_valid: FieldCheck) -> FieldCheck:
    return lambda value: value is None or is_valid(value)


_NUMBER_FIELDS = (
    "loss", "grad_norm", "step_seconds", "data_wait_seconds", "blocked_seconds", "began", "slower_seconds", "until",
    "cost_per_gpu_hour", "tokens_per_second", "mfu", "hfu", "bits_per_byte", "exact_match",
)  # fmt: skip
_FIELD_CHECKS: dict[str, FieldCheck] = {
    "kind": is_text,
    "time": lambda value: is_number(value) and 0 <= value < _MAX_TIME_SECONDS,
    "host": is_text,
    "why": is_text,
    "asked_by": or_null(is_text),
    "reason": or_null(is_text),
    "at_fault": or_null(is_count),
    "at_fault_host": or_null(is_text),
    "phase": is_text,
    "device": or_null(is_count),
    "found_by": is_text,
    "finished": is_bool,
    **dict.fromkeys(("process", "attempt", "of_attempt", "step", "steps", "tokens", "format"), is_count),
    **dict.fromkeys(_NUMBER_FIELDS, or_null(is_number)),
}
"""Check of each field, which applies to records of every kind."""


def parse(line: bytes) -> dict[str, Any] | None:
    """Returns the record in a line, or None if the line does not hold a valid record."""
    try:
        record = json.loads(line.strip(_PADDING).decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not is_text(record.get("kind")):
        return None
    if any(name not in record for name in ("time", *_REQUIRED_FIELDS.get(record["kind"], ()))):
        return None
    valid = all(is_valid(record[name]) for name, is_valid in _FIELD_CHECKS.items() if name in record)
    return record if valid else None


def records(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the records of a file. Unreadable lines are skipped and reported once. An incomplete last line is not
    reported, since another process may be writing it."""
    damaged = 0
    for line in _lines(path):
        if line.isspace():
            continue
        if (record := parse(line)) is not None:
            yield record
        else:
            damaged += _is_damaged(line)

    if damaged:
        _note(
            f"{path}: {counted(damaged, 'line', 'lines')} cannot be read and {'is' if damaged == 1 else 'are'} skipped"
        )


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns all records of a file; an empty list if it does not exist. See `records`."""
    return list(records(path))


def repair(path: Path, last_step: int | None = None) -> list[dict[str, Any]]:
    """Cleans up a file before its writer appends to it. Keeps valid records, but only up to `last_step` if that is
    given. Returns the records of later steps.

    Unreadable lines are moved to PATH.damaged. The file is replaced atomically or not at all. If the file system does
    not permit that, a note says so and the file stays unchanged.
    """
    try:
        with contextlib.suppress(FileNotFoundError):
            return _rewrite(path.resolve(strict=True), last_step)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        detail = "" if last_step is None else f", and has lines of steps after {last_step}, which will be repeated"
        _note(f"{path} cannot be cleaned up{detail}: {getattr(error, 'strerror', None) or error}")
    return []


def _rewrite(path: Path, last_step: int | None) -> list[dict[str, Any]]:
    later_records: list[dict[str, Any]] = []
    if not path.is_file():
        return later_records
    temporary, aside = path.with_name(f".{path.name}.tmp"), path.with_name(f"{path.name}.damaged")
    changed, damaged = False, 0
    try:
        with path.open("rb") as lines, _private_file(path, temporary) as output:
            for line in lines:
                record = None if line == b"\n" else parse(line)  # a file may have a million empty lines
                stripped = line.strip(_PADDING) + b"\n"
                if record is not None and (last_step is None or record.get("step", 0) <= last_step):
                    output.write(stripped)
                    changed |= stripped != line
                    continue
                # The line is dropped, because its record belongs to a later step or it has none.
                changed = True
                if record is not None:
                    later_records.append(record)
                elif _is_damaged(line):
                    damaged += 1
                    with aside.open("ab") as file:
                        file.write(line)
            output.flush()
            os.fsync(output.fileno())
        if changed:
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    if damaged:
        unread = f"{counted(damaged, 'line', 'lines')} could not be read"
        _note(f"{path}: {unread} and {'is' if damaged == 1 else 'are'} kept in {aside}")
    return later_records


@contextmanager
def _private_file(path: Path, temporary: Path) -> Iterator[IO[bytes]]:
    """Opens a new file that is private to this user at first, and gets the permissions of `path` at the end."""
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        yield file
        os.fchmod(descriptor, path.stat().st_mode & 0o777)


def _lines(path: Path) -> Iterator[bytes]:
    """Yields the lines of a regular file, with their line ends. Anything else is reported and not read, because
    reading a pipe or a device may block."""
    try:
        if path.is_file():
            with path.open("rb") as file:
                yield from file
        elif path.exists():
            _note(f"{path} cannot be read: it is not a regular file")
    except OSError as error:
        _note(f"{path} cannot be read: {error.strerror}")


def _is_damaged(line: bytes) -> bool:
    """Returns True if a line without a record is damaged. A line without a line end was cut off, or is being
    written."""
    return line.endswith(b"\n") and bool(line.strip(b" \t\r\n"))


def _note(text: str) -> None:
    remark_once(f"note: {printable(text)}")


def peak_host_bytes() -> int:
    """Returns the peak resident memory of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


_TAIL_BYTES = 1 << 16
"""Number of bytes at the end of metrics.jsonl in which the newest step is looked for."""

FAILED_START = "start_failed"
"""Kind of the event for a start that failed before the run was opened."""

FINAL_EVENTS = frozenset({"failed", "peer_lost", "hang", "interrupted", FAILED_START, ABANDONED, "end"})
"""Kinds of events after which a process ends. Writing one blocks until it is on disk, for up to 5 seconds."""
DECISIVE_EVENTS = FINAL_EVENTS | {"start", "started", "checkpoint_commit", "preempted"}
"""Kinds of events that decide about restarts. They are never dropped, and are written first if writing is slow."""


class Events:
    """Writes events/PROCESS.jsonl: what happened to this process, with the attempt (number of restarts so far)."""

    def __init__(self, run_dir: Path, process: int):
        path = event_file(run_dir, process)
        starts = [record["attempt"] for record in read_lines(path) if record["kind"] == "start"]
        self.attempt = 1 + max(starts, default=-1)
        self._common = {"process": process, "host": socket.gethostname(), "attempt": self.attempt}
        self._lines = LineWriter(path, **self._common)
        self.on_written: Callable[[dict[str, Any]], None] = lambda record: None
        """Function that is called with each event."""

    def write(self, kind: str, **details: Any) -> None:
        record = {"kind": kind, "time": clock.now(), **self._common, **details}
        self._lines.write(record, decisive=kind in DECISIVE_EVENTS)
        self.on_written(record)
        if kind in FINAL_EVENTS:
            self._lines.settle()

    def close(self) -> None:
        """Closes the writer. Later events can still be written; see `LineWriter.close`."""
        self._lines.close()


def event_file(run_dir: Path, process: int) -> Path:
    return run_dir / "events" / f"{process}.jsonl"


def event_files(run_dir: Path) -> list[Path]:
    """Returns the event files of all processes, sorted by path. Files with other names, such as copies, are ignored."""
    paths = (run_dir / "events").glob("*.jsonl")
    return sorted(path for path in paths if re.fullmatch("[0-9]+", path.stem))


def log_files(process: int) -> tuple[str, str, str]:
    """Returns the log files of a process in a run directory, to which each attempt appends: the stacks at hangs, the
    output that the local launcher captures, and the output of libraries that bypass Python."""
    return f"hangs/{process}.txt", f"logs/process-{process}.log", f"native/{process}.log"


def log_sizes(run_dir: Path, process: int) -> dict[str, int]:
    """Returns the size in bytes of each log file of a process that is not empty."""
    sizes = {name: path.stat().st_size for name in log_files(process) if (path := run_dir / name).is_file()}
    return {name: size for name, size in sizes.items() if size}


def last_logged_step(run_dir: Path) -> int:
    """Returns the highest step among the newest lines of metrics.jsonl; 0 if they name none."""
    path = run_dir / METRICS
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return 0
    return max((record["step"] for line in lines if (record := parse(line)) and record["kind"] == "train"), default=0)


def last_commit(run_dir: Path) -> int:
    """Returns the step of the checkpoint that was written last, or 0 if the events record none.

    It is not always the highest step, because a checkpoint of a later step may have been written before and may have
    turned out to be damaged.
    """
    steps = [int(event["step"]) for event in records(event_file(run_dir, 0)) if event["kind"] == "checkpoint_commit"]
    return steps[-1] if steps else 0


def history(path: Path) -> tuple[int, float]:
    """Returns how many attempts of a run ended without an end event, and for how many seconds the run was running in
    total. `path` is the run's event file."""
    attempts: dict[int, list[dict[str, Any]]] = {}
    for record in read_lines(path):
        attempt = record.get("attempt")
        if attempt is None or (record["kind"] != "start" and attempt not in attempts):
            continue  # the record belongs to a start that failed before the run was opened
        attempts.setdefault(attempt, []).append(record)
    failures = sum(all(record["kind"] != "end" for record in records) for records in attempts.values())
    # Each attempt is measured with its own records, since the clock may have been changed between attempts.
    seconds = sum(max(0.0, records[-1]["time"] - records[0]["time"]) for records in attempts.values())
    return failures, seconds
