"""python -m jaxmnt.launch.inside before|after …

Inside an allocation: which nodes to start a run on, and what to do when a start has ended. The job script asks this; it
prints a word and what belongs to it. What happened is read from the run's events, which outlive every start.
"""

import argparse
import json
import os
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxmnt.cluster.signs import tells_of_a_broken_device
from jaxmnt.commands import HERE, Parser
from jaxmnt.errors import ExitCode, run_command
from jaxmnt.launch.restarts import last_commit
from jaxmnt.telemetry.events import FAILED_START, read_lines

_TRIES, _MOST_FAILURES = 3, 12
"""Starts of a job in a row that may fail without a new checkpoint: without a node to blame, and in all."""
_BAD_FOR_SECONDS = 24 * 3600.0
_BLAMING = ("peer_lost", "hang", FAILED_START)
"""Events that tell of a host."""
_RAISED, _TRAINED = "failed", "started"
_ASKED_BY_SLURM = ("SIGUSR1", "SIGTERM", "the allocation ends")
"""What asked a run to stop that shall go on in another allocation. A person's STOP, or train.stop_after, is no such."""


@dataclass(frozen=True)
class BadNode:
    """A node that is left out for a while."""

    node: str
    why: str
    since: float
    until: float
    """Unix seconds."""


class Ledger:
    """What is known of a run's starts and nodes, in `run.dir/launch/`."""

    def __init__(self, run_dir: Path):
        self.run_dir, self._folder = run_dir, run_dir / "launch"

    def bad_nodes(self, now: float) -> list[BadNode]:
        """Those that are still to be left out, the oldest first."""
        path = self._folder / "bad_nodes.json"
        known = [BadNode(**one) for one in json.loads(path.read_text())] if path.exists() else []
        return sorted((one for one in known if one.until > now), key=lambda one: one.since)

    def blame(self, node: str, why: str, now: float) -> None:
        others = [one for one in self.bad_nodes(now) if one.node != node]
        bad = [*others, BadNode(node, why, now, now + _BAD_FOR_SECONDS)]
        self._write("bad_nodes.json", [asdict(one) for one in bad])

    def starts(self) -> list[dict[str, Any]]:
        path = self._folder / "starts.json"
        return list(json.loads(path.read_text())) if path.exists() else []

    def note(self, start: dict[str, Any]) -> None:
        """Once, however often it is told."""
        others = [one for one in self.starts() if (one["job"], one.get("began")) != (start["job"], start["began"])]
        self._write("starts.json", [*others, start])

    def events(self, began: float) -> list[dict[str, Any]]:
        """Those of all processes since then, in order of time."""
        paths = sorted((self.run_dir / "events").glob("*.jsonl"))
        found = [event for path in paths for event in read_lines(path) if event["time"] >= began]
        return sorted(found, key=lambda event: float(event["time"]))

    def _write(self, name: str, content: Any) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        temporary = self._folder / f".{name}.{os.getpid()}"
        temporary.write_text(json.dumps(content, indent=1) + "\n")
        temporary.replace(self._folder / name)


def before(ledger: Ledger, wanted: int, usable: list[str], drained: list[str], now: float) -> tuple[str, str]:
    """`start` and nodes. With too few that nobody blames or drains, drained ones are taken, then those blamed longest
    ago are tried again; with too few at all, the nodes go back: `requeue`."""
    bad = [one.node for one in ledger.bad_nodes(now)]
    good = [node for node in usable if node not in bad]
    again = [node for node in bad if node in usable]
    chosen = (sorted(good, key=drained.__contains__) + again)[:wanted]
    if len(chosen) < wanted:
        return "requeue", f"{len(chosen)} of {wanted} nodes answer"
    return "start", ",".join(node for node in usable if node in chosen)


def after(
    ledger: Ledger, code: int, began: float, nodes: list[str], start: int, restarts: int, cancelled: bool, job: str
) -> tuple[str, str]:
    """`end`, `requeue` or `again`, and why, after a start on `nodes` has ended with srun's exit code."""
    now, events = time.time(), _of_nodes(ledger.events(began), nodes)
    ended = next((event for event in reversed(events) if event["kind"] == "end"), None)
    newest = last_commit(ledger.run_dir)
    trained = any(event["kind"] == _TRAINED for event in events)
    earlier = [one for one in ledger.starts() if one["job"] == job and one.get("began") != began]
    if code == ExitCode.CONFIG and not trained and any(one.get("trained") for one in earlier):
        code = ExitCode.FAILURE  # what this job has trained with cannot be wrong: a file system or a host is
    well = code in (ExitCode.FINISHED, ExitCode.CONFIG, ExitCode.STOPPED) or cancelled or ended is not None
    blamed = None if well else _blamed(events, nodes)
    if blamed is not None:
        ledger.blame(blamed[0], blamed[1], now)
    this = {
        "time": now, "began": began, "job": job, "start": start, "nodes": nodes, "code": code, "newest": newest,
        "trained": trained, "cancelled": cancelled, "blamed": None if blamed is None else blamed[0],
    }  # fmt: skip
    ledger.note(this)
    if cancelled:
        return "end", "Slurm has ended this allocation"
    if code in (ExitCode.FINISHED, ExitCode.CONFIG):
        return "end", ""
    if code == ExitCode.STOPPED or (ended and not ended["finished"]):
        stopped_by = _stopped_by(events)
        if stopped_by in _ASKED_BY_SLURM:
            return "requeue", f"{stopped_by}: saved at step {newest}"
        return "end", f"stopped by {stopped_by or 'train.stop_after'}"
    return _after_a_failure(earlier, this, restarts, silent=not events)


def _after_a_failure(
    earlier: list[dict[str, Any]], this: dict[str, Any], restarts: int, *, silent: bool
) -> tuple[str, str]:
    """The same, when something went wrong. `silent` is a start of which there is no event."""
    start, blamed = this["start"], this["blamed"]
    unexplained, failures = _in_vain([*earlier, this])
    if unexplained >= _TRIES or failures >= _MOST_FAILURES:
        return "end", f"{failures} starts failed without a checkpoint after step {this['newest']}"
    if silent:
        return "requeue", "nothing was started"
    if start >= restarts:
        return "requeue", f"after {start} restarts in this allocation"
    here = earlier[len(earlier) - start :] if start else []
    if blamed and blamed in [one["blamed"] for one in here]:
        return "requeue", f"{blamed} was tried twice here"
    who = f"without {blamed} if there is another" if blamed else "on the same nodes"
    return "again", f"from step {this['newest']}, {who}"


def _stopped_by(events: list[dict[str, Any]]) -> str | None:
    """Every process notes that it stops, but why only those know that were asked; process 0's word counts first."""
    stops = [event for event in events if event["kind"] == "preempted" and event["asked_by"]]
    return min(stops, key=lambda event: int(event["process"]))["asked_by"] if stops else None


def _in_vain(starts: list[dict[str, Any]]) -> tuple[int, int]:
    """How many of the last starts failed with the same newest checkpoint: without a node to blame, and in all. Those
    that were cut off from outside do not count."""
    unexplained = failures = 0
    for one in reversed([one for one in starts if not one.get("cancelled")]):
        failed = one["code"] not in (ExitCode.FINISHED, ExitCode.STOPPED)
        if not failed or one["newest"] != starts[-1]["newest"]:
            break
        failures += 1
        unexplained += one["blamed"] is None
    return unexplained, failures


def _of_nodes(events: list[dict[str, Any]], nodes: list[str]) -> list[dict[str, Any]]:
    """Without those of a process that somebody started in the same run directory elsewhere, where names tell."""
    own = [event for event in events if _node(event.get("host"), None, nodes)]
    return own or events


def _blamed(events: list[dict[str, Any]], nodes: list[str]) -> tuple[str, str] | None:
    """The node at fault, and the words of one who says so.

    What a process raises is its program's fault, unless it tells of a broken device. All speak to process 0, so its
    word counts, unless all others blame its node; if it says nothing, most voices do.
    """
    raised = {event["process"] for event in events if event["kind"] == _RAISED}
    votes: dict[int, tuple[str, str]] = {}
    for event in events:
        why = str(event.get("why"))
        its_program = event.get("at_fault") in raised or f" {_RAISED}: " in why
        node = _node(event.get("at_fault_host"), event.get("at_fault"), nodes)
        if event["kind"] not in (*_BLAMING, _RAISED) or (its_program and not tells_of_a_broken_device(why)):
            continue
        if node is not None:
            votes.setdefault(event["process"], (node, why))
    others = [vote for process, vote in sorted(votes.items()) if process != 0]
    against_first = len(nodes) > 2 and len(others) == len(nodes) - 1 and {node for node, _ in others} == {nodes[0]}
    if 0 in votes and not against_first:
        return votes[0]
    counts = Counter(node for node, _ in others)
    return max(others, key=lambda vote: counts[vote[0]], default=None)


def _node(host: str | None, process: int | None, nodes: list[str]) -> str | None:
    """Host names may have a domain that Slurm's have not."""
    if host is not None:
        same = [node for node in nodes if node == host or node.partition(".")[0] == host.partition(".")[0]]
        if same:
            return same[0]
    return nodes[process] if process is not None and process < len(nodes) else None


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    ledger = Ledger(Path(options.run_dir))
    if options.when == "before":
        answer = before(ledger, options.wanted, options.usable.split(), options.drained.split(), time.time())
    else:
        answer = after(
            ledger, options.code, options.began, options.nodes.split(","), options.start, options.restarts,
            options.cancelled == "yes", options.job,
        )  # fmt: skip
    print(*answer)
    return ExitCode.FINISHED


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("python -m jaxmnt.launch.inside", description=__doc__, codes=HERE)
    when = parser.add_subparsers(dest="when", required=True)
    first, later = when.add_parser("before", codes=HERE), when.add_parser("after", codes=HERE)
    for one in (first, later):
        one.add_argument("--run-dir", required=True)
    first.add_argument("--wanted", type=int, required=True)
    first.add_argument("--usable", required=True, help="nodes that answer")
    first.add_argument("--drained", default="", help="those of them that Slurm would give to no new job")
    later.add_argument("--code", type=int, required=True, help="srun's exit code")
    later.add_argument("--began", type=float, required=True, help="Unix seconds")
    later.add_argument("--nodes", required=True, help="those of the start, in order of processes")
    later.add_argument("--start", type=int, required=True, help="number of the start in this allocation")
    later.add_argument("--restarts", type=int, required=True)
    later.add_argument("--cancelled", choices=("yes", "no"), required=True)
    later.add_argument("--job", required=True)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_command(main)
