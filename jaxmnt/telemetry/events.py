"""Events of a process, and which recorded lines are believed when they are read back."""

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
from jaxmnt.errors import printable, remark
from jaxmnt.telemetry import clock
from jaxmnt.telemetry.writer import LineWriter

METRICS = "metrics.jsonl"
"""In a run directory; see `metrics.py`."""

FORMAT = 1
"""Of the lines in a run directory, which each event of a start names. A later one may mean something else by a field
that is known here."""

PHASE_LINES = "phases.jsonl"
"""In a run directory; see `phase_log.py`."""

RESOURCES = "resources.jsonl"
"""In a run directory; see `resources.py`."""

_PADDING = b" \t\r\n\0"
"""What may stand around a record. A host that crashes leaves blocks of NULs."""

_NEEDED: dict[str, tuple[str, ...]] = {
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
"""What a record of this kind is never without, besides its kind and time."""


_LATEST = 1e11
"""Unix seconds; a time in milliseconds is none."""


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def is_number(value: Any) -> bool:
    return (type(value) is int and abs(value) < 1 << 63) or (type(value) is float and math.isfinite(value))


def is_truth(value: Any) -> bool:
    return isinstance(value, bool)


IsRight = Callable[[Any], bool]
"""Says whether a field holds what it should."""


def or_null(is_right: IsRight) -> IsRight:
    return lambda value: value is None or is_right(value)


_NUMBERS = (
    "loss", "grad_norm", "step_seconds", "data_wait_seconds", "blocked_seconds", "began", "slower_seconds", "until",
    "cost_per_gpu_hour", "tokens_per_second", "mfu", "hfu", "bits_per_byte",
)  # fmt: skip
_RIGHT: dict[str, IsRight] = {
    "kind": is_text,
    "time": lambda value: is_number(value) and 0 <= value < _LATEST,
    "host": is_text,
    "why": is_text,
    "asked_by": or_null(is_text),
    "reason": or_null(is_text),
    "at_fault": or_null(is_count),
    "at_fault_host": or_null(is_text),
    "phase": is_text,
    "device": or_null(is_count),
    "found_by": is_text,
    "finished": is_truth,
    **dict.fromkeys(("process", "attempt", "of_attempt", "step", "steps", "tokens", "format"), is_count),
    **dict.fromkeys(_NUMBERS, or_null(is_number)),
}
"""What these fields hold, in whatever record they are."""


def parse(line: bytes) -> dict[str, Any] | None:
    """The record in a line; None if there is none that can be relied on."""
    try:
        record = json.loads(line.strip(_PADDING).decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not is_text(record.get("kind")):
        return None
    if any(name not in record for name in ("time", *_NEEDED.get(record["kind"], ()))):
        return None
    return record if all(is_right(record[name]) for name, is_right in _RIGHT.items() if name in record) else None


def records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file, one after the other. Lines that cannot be read are passed over, and said once; a last one
    that is not complete may be in the making."""
    damaged = 0
    for line in _lines(path):
        if line.isspace():
            continue
        if (record := parse(line)) is not None:
            yield record
        else:
            damaged += _is_damaged(line)
    if damaged:
        _say(f"{path}: {_lines_of(damaged)} cannot be read and {'is' if damaged == 1 else 'are'} skipped")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All records of a file; none if it is not there. See `records`."""
    return list(records(path))


def repair(path: Path, last_step: int | None = None) -> list[dict[str, Any]]:
    """For the one who will write to a file, before it does: keeps the records, of steps up to `last_step` if given.
    Returns those of later steps.

    Lines that cannot be read go to PATH.damaged. The file is replaced at once or not at all; where the file system does
    not permit it, that is said, and the file stays as it is.
    """
    try:
        with contextlib.suppress(FileNotFoundError):
            return _rewrite(path.resolve(strict=True), last_step)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        after = "" if last_step is None else f", and has lines of steps after {last_step}, which are taken again"
        _say(f"{path} cannot be cleaned up{after}: {getattr(error, 'strerror', None) or error}")
    return []


def _rewrite(path: Path, last_step: int | None) -> list[dict[str, Any]]:
    later: list[dict[str, Any]] = []
    if not path.is_file():
        return later
    temporary, aside = path.with_name(f".{path.name}.tmp"), path.with_name(f"{path.name}.damaged")
    changed, damaged = False, 0
    try:
        with path.open("rb") as lines, _as_private_as(path, temporary) as kept:
            for line in lines:
                record = None if line == b"\n" else parse(line)  # there may be a million empty ones
                whole = line.strip(_PADDING) + b"\n"
                if record is not None and (last_step is None or record.get("step", 0) <= last_step):
                    kept.write(whole)
                    changed |= whole != line
                    continue
                changed = True
                if record is not None:
                    later.append(record)
                elif _is_damaged(line):
                    damaged += 1
                    with aside.open("ab") as file:
                        file.write(line)
            kept.flush()
            os.fsync(kept.fileno())
        if changed:
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    if damaged:
        _say(f"{path}: {_lines_of(damaged)} could not be read and {'is' if damaged == 1 else 'are'} kept in {aside}")
    return later


@contextmanager
def _as_private_as(path: Path, temporary: Path) -> Iterator[IO[bytes]]:
    """A new file that nobody can write to who cannot write to `path`."""
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        yield file
        os.fchmod(descriptor, path.stat().st_mode & 0o777)


def _lines(path: Path) -> Iterator[bytes]:
    """With their ends. Of what is no regular file nothing: reading a pipe or a device may not end."""
    try:
        if path.is_file():
            with path.open("rb") as file:
                yield from file
        elif path.exists():
            _say(f"{path} cannot be read: it is not a regular file")
    except OSError as error:
        _say(f"{path} cannot be read: {error.strerror}")


def _is_damaged(line: bytes) -> bool:
    """Of a line without a record. One without an end was cut off, or is being written."""
    return line.endswith(b"\n") and bool(line.strip(b" \t\r\n"))


def _lines_of(number: int) -> str:
    return f"{number} line{'' if number == 1 else 's'}"


_said: set[str] = set()


def _say(text: str) -> None:
    """Once: the same files are read over and over."""
    if text not in _said:
        _said.add(text)
        remark(f"note: {printable(text)}")


def peak_host_bytes() -> int:
    """The most resident memory that this process has taken so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


FAILED_START = "start_failed"
"""The event of a start that came to nothing before a run was open."""

LAST = frozenset({"failed", "peer_lost", "hang", "interrupted", FAILED_START, ABANDONED, "end"})
"""Events after which a process ends: writing one waits until it is written, but no longer than 5 seconds."""
DECISIVE = LAST | {"start", "started", "checkpoint_commit", "preempted"}
"""Events that decide about restarts: they are never dropped, and written first where writing takes long."""


class Events:
    """events/PROCESS.jsonl: what happened to this process, with the attempt (restarts so far)."""

    def __init__(self, run_dir: Path, process: int):
        path = event_file(run_dir, process)
        starts = [record["attempt"] for record in read_lines(path) if record["kind"] == "start"]
        self.attempt = 1 + max(starts, default=-1)
        self._common = {"process": process, "host": socket.gethostname(), "attempt": self.attempt}
        self._lines = LineWriter(path, **self._common)
        self.written: Callable[[dict[str, Any]], None] = lambda record: None
        """Is told of each event."""

    def write(self, kind: str, **details: Any) -> None:
        record = {"kind": kind, "time": clock.now(), **self._common, **details}
        self._lines.write(record, decisive=kind in DECISIVE)
        self.written(record)
        if kind in LAST:
            self._lines.settle()

    def close(self) -> None:
        """See `LineWriter`: what happens afterwards can be written, too."""
        self._lines.close()


def event_file(run_dir: Path, process: int) -> Path:
    return run_dir / "events" / f"{process}.jsonl"


def event_files(run_dir: Path) -> list[Path]:
    """Those of all processes that there are, in the order of their names. Copies that people have made are none."""
    paths = (run_dir / "events").glob("*.jsonl")
    return sorted(path for path in paths if re.fullmatch("[0-9]+", path.stem))


def log_files(process: int) -> tuple[str, str, str]:
    """In a run directory, to which each attempt appends: stacks of hangs, what a launcher on this machine takes down of
    the process, and what libraries print below Python."""
    return f"hangs/{process}.txt", f"logs/process-{process}.log", f"native/{process}.log"


def log_sizes(run_dir: Path, process: int) -> dict[str, int]:
    """Bytes of those of a process's files that are not empty."""
    sizes = {name: path.stat().st_size for name in log_files(process) if (path := run_dir / name).is_file()}
    return {name: size for name, size in sizes.items() if size}


def last_commit(run_dir: Path) -> int:
    """The step of the checkpoint that was written last; 0 if the events tell of none. A later step may have been
    written before it, and have been damaged."""
    steps = [int(event["step"]) for event in records(event_file(run_dir, 0)) if event["kind"] == "checkpoint_commit"]
    return steps[-1] if steps else 0


def history(path: Path) -> tuple[int, float]:
    """How often the run whose events are in `path` broke off without a word, and for how many seconds it ran in all."""
    attempts: dict[int, list[dict[str, Any]]] = {}
    for record in read_lines(path):
        attempt = record.get("attempt")
        if attempt is None or (record["kind"] != "start" and attempt not in attempts):
            continue  # of a start that came to nothing
        attempts.setdefault(attempt, []).append(record)
    failures = sum(all(record["kind"] != "end" for record in records) for records in attempts.values())
    # Between an attempt's own records, so that the clock may be set between attempts.
    seconds = sum(max(0.0, records[-1]["time"] - records[0]["time"]) for records in attempts.values())
    return failures, seconds
