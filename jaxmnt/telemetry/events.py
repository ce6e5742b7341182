"""The record of a run: JSON lines, one writer a file, each line whole."""

import json
import os
import resource
import socket
import sys
import time
from pathlib import Path
from typing import Any


class JsonLines:
    """Appends objects to a file, one a line, each flushed as soon as it is written."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, record: dict[str, Any]) -> None:
        """Floats keep all their digits; NaN and infinity are written as null, which JSON can hold."""
        self._file.write(json.dumps(_finite(record), allow_nan=False) + "\n")

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file; a last line that was cut off by a crash is left out."""
    if not path.exists():
        return []
    records = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        try:
            records.append(json.loads(line))
        except ValueError:
            if number < len(lines) - 1:
                raise
    return records


def peak_host_bytes() -> int:
    """The most resident memory that this process has taken so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


FAILED_START = "start_failed"
"""The event of a start that came to nothing before a run was open."""


class Events:
    """events/PROCESS.jsonl: what happened to this process, with the attempt (restarts so far)."""

    def __init__(self, run_dir: Path, process: int):
        path = run_dir / "events" / f"{process}.jsonl"
        self.attempt = sum(record.get("kind") == "start" for record in read_lines(path))
        _drop_torn_line(path)
        self._lines = JsonLines(path)
        self._process = process
        self._host = socket.gethostname()

    def write(self, kind: str, **details: Any) -> None:
        self._lines.write(
            {
                "kind": kind,
                "time": time.time(),
                "process": self._process,
                "host": self._host,
                "attempt": self.attempt,
                **details,
            }
        )


def history(path: Path) -> tuple[int, float]:
    """How often the run whose events are in `path` broke off without a word, and for how many seconds it ran in all."""
    attempts: dict[int, list[dict[str, Any]]] = {}
    for record in read_lines(path):
        if record["kind"] != "start" and record["attempt"] not in attempts:
            continue  # of a start that came to nothing
        attempts.setdefault(record["attempt"], []).append(record)
    failures = sum(all(record["kind"] != "end" for record in records) for records in attempts.values())
    # Between an attempt's own records, so that the clock may be set between attempts.
    seconds = sum(max(0.0, records[-1]["time"] - records[0]["time"]) for records in attempts.values())
    return failures, seconds


def rewind_metrics(path: Path, step: int) -> None:
    """Drops lines of steps after `step`: they are about to be taken again from an older checkpoint."""
    records = [record for record in read_lines(path) if record.get("step", 0) <= step]
    if path.exists():
        replacement = path.with_name(f".{path.name}.{os.getpid()}")
        replacement.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        replacement.replace(path)


def _drop_torn_line(path: Path) -> None:
    """Ends a file whose writer was killed in the middle of a line at its last whole line."""
    if path.exists():
        raw = path.read_bytes()
        if raw and not raw.endswith(b"\n"):
            with path.open("r+b") as file:
                file.truncate(raw.rfind(b"\n") + 1)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return value
