"""python -m jaxmnt.launch.inside before|after …

Inside an allocation: which nodes to start a run on, and what to do when a start has ended. The job script asks this; it
prints a word and what belongs to it. What happened is read from the run's events, which outlive every start.
"""

import argparse
import time
from collections import Counter
from pathlib import Path

from jaxmnt.commands import HERE, Parser, path_argument, run_command
from jaxmnt.distributed.termination import is_device_error
from jaxmnt.errors import ExitCode
from jaxmnt.launch.ledger import ABANDONED, BLAMING, RAISED, Ledger, Record, waited_in_vain
from jaxmnt.telemetry.events import last_commit

_TRIES, _MOST_FAILURES = 3, 12
"""Starts of a job in a row that may fail without a new checkpoint: without a node to blame, and in all."""
_ASKED_BY_SLURM = ("SIGUSR1", "SIGTERM", "the allocation ends")
"""What asked a run to stop that shall go on in another allocation. A person's STOP, or train.stop_after, is no such."""


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
    ledger: Ledger, code: int, began: float, nodes: list[str], start: int, restarts: int, cancelled: bool, job: str,
    spare_nodes: int | None = None,
) -> tuple[str, str]:  # fmt: skip
    """`end`, `requeue` or `again`, and why, after a start on `nodes` has ended with srun's exit code.

    `spare_nodes` are those that the allocation has beyond them; None where the script does not say.
    """
    now, events = time.time(), _of_nodes(ledger.events(began), nodes)
    ended = next((event for event in reversed(events) if event["kind"] == "end"), None)
    newest = last_commit(ledger.run_dir)
    final = code in (ExitCode.FINISHED, ExitCode.CONFIG) or cancelled
    waited = not final and waited_in_vain(events)
    asked = any(event["kind"] == ABANDONED and event.get("asked_by") for event in events)
    stopped = code == ExitCode.STOPPED or asked or (ended is not None and ended.get("finished") is False)
    well = final or ended is not None or (stopped and not waited)
    blamed = None if well else _blamed(events, nodes)
    if blamed is not None:
        ledger.blame(blamed[0], blamed[1], now)
    earlier = [one for one in ledger.starts() if one["job"] == job and one.get("began") != began]
    this = {
        "time": now, "began": began, "job": job, "start": start, "nodes": nodes, "code": code, "newest": newest,
        "cancelled": cancelled, "waited": waited, "blamed": None if blamed is None else blamed[0],
    }  # fmt: skip
    ledger.note(this)
    if cancelled:
        return "end", "Slurm has ended this allocation"
    if final:
        return "end", ""
    if waited:
        return _after_waiting(earlier, this, restarts, spare_nodes)
    if stopped:
        return _after_a_stop(events, newest)
    return _after_a_failure(earlier, this, restarts, silent=not events)


def _after_a_stop(events: list[Record], newest: int) -> tuple[str, str]:
    """What follows a start that stopped early. Every process notes the stop, but only those that were asked note why;
    process 0's word counts first. Of train.stop_after there is only the end, since nobody asked. Where nobody could
    note anything, 75 alone says: run me again."""
    unfinished = [event for event in events if event["kind"] == "end" and not event["finished"]]
    stops = [event for event in events if event["kind"] in ("preempted", ABANDONED)]
    asked = [event for event in stops if event.get("asked_by")]
    stopped_by = min(asked, key=lambda event: int(event["process"]))["asked_by"] if asked else None
    if stopped_by in _ASKED_BY_SLURM:
        return "requeue", f"{stopped_by}: newest checkpoint at step {newest}"
    if not stops and not unfinished:
        return "requeue", f"stopped without a recorded reason: newest checkpoint at step {newest}"
    return "end", f"stopped by {stopped_by or 'train.stop_after'}"


def _after_waiting(earlier: list[Record], this: Record, restarts: int, spare_nodes: int | None) -> tuple[str, str]:
    """The same, when processes never appeared: without their node, or in another allocation. The processes limit this
    themselves: after a day they end with 2."""
    blamed = this["blamed"]
    if blamed and spare_nodes != 0 and this["start"] < restarts and not _tried_twice(earlier, this):
        return "again", f"{blamed} did not connect; without it if there is another"
    return "requeue", f"{blamed or 'a node'} did not connect"


def _after_a_failure(earlier: list[Record], this: Record, restarts: int, *, silent: bool) -> tuple[str, str]:
    """The same, when something went wrong. `silent` is a start of which there is no event."""
    start, blamed = this["start"], this["blamed"]
    unexplained, failures = _in_vain([*earlier, this])
    if unexplained >= _TRIES or failures >= _MOST_FAILURES:
        return "end", f"{failures} starts failed without a checkpoint after step {this['newest']}"
    if silent:
        return "requeue", "nothing was started"
    if start >= restarts:
        return "requeue", f"{start} of {restarts} restarts used in this allocation"
    if _tried_twice(earlier, this):
        return "requeue", f"{blamed} was tried twice here"
    who = f"without {blamed} if there is another" if blamed else "on the same nodes"
    return "again", f"from step {this['newest']}, {who}"


def _tried_twice(earlier: list[Record], this: Record) -> bool:
    """Whether the node that is blamed was blamed before in this allocation."""
    start, blamed = this["start"], this["blamed"]
    here = earlier[max(0, len(earlier) - start) :] if start > 0 else []
    return blamed is not None and blamed in [one["blamed"] for one in here]


def _in_vain(starts: list[Record]) -> tuple[int, int]:
    """How many of the last starts failed with the same newest checkpoint: without a node to blame, and in all. Those
    that were cut off from outside, or waited in vain, do not count."""
    unexplained = failures = 0
    for one in reversed([one for one in starts if not one.get("cancelled") and not one.get("waited")]):
        failed = one["code"] not in (ExitCode.FINISHED, ExitCode.STOPPED)
        if not failed or one["newest"] != starts[-1]["newest"]:
            break
        failures += 1
        unexplained += one["blamed"] is None
    return unexplained, failures


def _of_nodes(events: list[Record], nodes: list[str]) -> list[Record]:
    """Without those of a process that somebody started in the same run directory elsewhere, where names tell."""
    own = [event for event in events if _node(event.get("host"), None, nodes)]
    return own or events


def _blamed(events: list[Record], nodes: list[str]) -> tuple[str, str] | None:
    """The node at fault, and the words of one who says so.

    What a process raises is its program's fault, unless it tells of a broken device. All speak to process 0, so its
    word counts, unless all others blame its node; if it says nothing, most voices do.
    """
    raised = {event["process"] for event in events if event["kind"] == RAISED}
    votes: dict[int, tuple[str, str]] = {}
    for event in events:
        why = str(event.get("why"))
        its_program = event.get("at_fault") in raised or f" {RAISED}: " in why
        node = _node(event.get("at_fault_host"), event.get("at_fault"), nodes)
        if event["kind"] not in (*BLAMING, RAISED) or (its_program and not is_device_error(why)):
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
    return nodes[process] if process is not None and 0 <= process < len(nodes) else None


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    ledger = Ledger(Path(options.run_dir))
    if options.when == "before":
        answer = before(ledger, options.wanted, options.usable.split(), options.drained.split(), time.time())
    else:
        answer = after(
            ledger, options.code, options.began, options.nodes.split(","), options.start, options.restarts,
            options.cancelled == "yes", options.job, options.spare_nodes,
        )  # fmt: skip
    print(*answer)
    return ExitCode.FINISHED


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("python -m jaxmnt.launch.inside", description=__doc__, codes=HERE)
    when = parser.add_subparsers(dest="when", required=True)
    first, later = when.add_parser("before", codes=HERE), when.add_parser("after", codes=HERE)
    for one in (first, later):
        one.add_argument("--run-dir", type=path_argument, required=True)
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
    later.add_argument("--spare-nodes", type=int, help="of the allocation; scripts of older versions do not say")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_command(main)
