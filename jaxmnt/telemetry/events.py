"""What happened to a process of a run: JSON lines, one writer a file."""

import re
import resource
import socket
import sys
import time
from pathlib import Path
from typing import Any

from jaxmnt.cluster.abandoned import ABANDONED
from jaxmnt.telemetry.records import read_lines, records
from jaxmnt.telemetry.writer import LineWriter


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

    def write(self, kind: str, **details: Any) -> None:
        record = {"kind": kind, "time": time.time(), **self._common, **details}
        self._lines.write(record, decisive=kind in DECISIVE)
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
