"""python -m jaxmnt.launch.inside before|after …

Decides inside an allocation on which nodes to start a run, and what to do when a start has ended. The job script calls
this command, which prints an action and its details. It learns what has happened from the events of the run, which are
kept from start to start.
"""

import argparse
import time
from collections import Counter
from pathlib import Path

from jaxmnt.commands import LOCAL_EXIT_CODES, Parser, path_argument, run_command
from jaxmnt.distributed.termination import is_device_error
from jaxmnt.errors import ExitCode
from jaxmnt.fleet.restart_policy import Start, decide, reason_to_give_back, reason_to_give_up
from jaxmnt.launch.ledger import (
    ABANDONED,
    BLAMING_EVENTS,
    EXCEPTION_EVENT,
    Ledger,
    Record,
    outcome_of,
    peers_never_appeared,
)
from jaxmnt.telemetry.events import is_count, last_commit

_DEVICES_PER_NODE = 8
"""Number of devices of a node, if no process has reported it."""
_SLURM_STOPS = ("SIGUSR1", "SIGTERM", "the allocation ends")
"""Reasons for a stop after which a run continues in another allocation. A user's STOP and train.stop_after are not
among them."""


def decide_before_start(
    ledger: Ledger, needed: int, usable: list[str], drained: list[str], now: float
) -> tuple[str, str]:
    """Returns `start` and the nodes to start on, or `requeue` and the reason if fewer nodes than `needed` are usable.

    Nodes that are neither blamed nor drained are preferred. Drained nodes come next, and then blamed ones, of which
    those blamed longest ago come first.
    """
    bad = [bad_node.node for bad_node in ledger.bad_nodes(now)]
    good = [node for node in usable if node not in bad]
    blamed = [node for node in bad if node in usable]
    selected = (sorted(good, key=drained.__contains__) + blamed)[:needed]
    if len(selected) < needed:
        return "requeue", f"{len(selected)} of {needed} nodes answer"
    return "start", ",".join(node for node in usable if node in selected)


def decide_after_start(
    ledger: Ledger, code: int, began: float, nodes: list[str], start: int, restarts: int | None, cancelled: bool,
    job: str, spare_nodes: int | None = None,
) -> tuple[str, str]:  # fmt: skip
    """Returns `end`, `requeue` or `again`, and the reason, after a start on `nodes` has ended. `code` is srun's exit
    code.

    `restarts` is the maximum number of restarts in an allocation, None for no maximum, and `spare_nodes` the number of
    additional nodes in the allocation, None if the script does not say.
    """
    now = time.time()
    events = _events_on(nodes, ledger.events(began))
    end = next((event for event in reversed(events) if event["kind"] == "end"), None)
    newest = last_commit(ledger.run_dir)

    # Classify the end of the start.
    final = code in (ExitCode.FINISHED, ExitCode.CONFIG) or cancelled
    waited = not final and peers_never_appeared(events)
    stop_requested = any(event["kind"] == ABANDONED and event.get("asked_by") for event in events)
    stopped = code == ExitCode.STOPPED or stop_requested or (end is not None and end.get("finished") is False)

    # A node is blamed for a failure, or if its process never appeared.
    needs_no_blame = final or end is not None or (stopped and not waited)
    blamed = None if needs_no_blame else _node_at_fault(events, nodes)
    if blamed is not None:
        ledger.blame(blamed[0], blamed[1], now)

    outcome = outcome_of(ledger.run_dir, events)
    earlier = [record for record in ledger.starts() if record["job"] == job and record.get("began") != began]
    current = {
        "time": now, "began": began, "job": job, "start": start, "nodes": nodes, "code": code, "newest": newest,
        "cancelled": cancelled, "waited": waited, "blamed": None if blamed is None else blamed[0],
        "step": outcome.step, "cause": outcome.cause,
    }  # fmt: skip
    ledger.record_start(current)
    if cancelled:
        return "end", "Slurm has ended this allocation"
    if final:
        return "end", ""
    if waited:
        return _decide_after_waiting(earlier, current, restarts, spare_nodes)
    if stopped:
        return _decide_after_stop(events, newest)
    if not events and not reason_to_give_up(_policy_starts([*earlier, current]), _devices(events, nodes)):
        return "requeue", "nothing was started"
    return _decide_after_failure(earlier, current, restarts, spare_nodes, _devices(events, nodes), outcome.details)


def _decide_after_stop(events: list[Record], newest: int) -> tuple[str, str]:
    """Decides what to do after a start that stopped early.

    Every process records the stop, but only processes that received the request record its source. The source in
    process 0's record takes precedence. A stop because of train.stop_after leaves only an end event, since there was no
    request. If no process could record anything, exit code 75 alone means that the run must be started again.
    """
    unfinished = [event for event in events if event["kind"] == "end" and not event["finished"]]
    stops = [event for event in events if event["kind"] in ("preempted", ABANDONED)]
    requests = [event for event in stops if event.get("asked_by")]
    stopped_by = min(requests, key=lambda event: int(event["process"]))["asked_by"] if requests else None
    if stopped_by in _SLURM_STOPS:
        return "requeue", f"{stopped_by}: newest checkpoint at step {newest}"
    if not stops and not unfinished:
        return "requeue", f"stopped without a recorded reason: newest checkpoint at step {newest}"
    return "end", f"stopped by {stopped_by or 'train.stop_after'}"


def _decide_after_waiting(
    earlier: list[Record], current: Record, restarts: int | None, spare_nodes: int | None
) -> tuple[str, str]:
    """Decides, after a start in which processes never appeared, whether to start without their node or in another
    allocation. The processes limit the retries themselves, because they end with exit code 2 after a day."""
    blamed = current["blamed"]
    may_restart = restarts is None or current["start"] < restarts
    here = [_policy_start(record) for record in _in_allocation(earlier, current)]
    if blamed and spare_nodes != 0 and may_restart and not reason_to_give_back(here, spare_nodes):
        return "again", f"{blamed} did not connect; without it if there is another"
    return "requeue", f"{blamed or 'a node'} did not connect"


def _decide_after_failure(
    earlier: list[Record], current: Record, restarts: int | None, spare_nodes: int | None, devices: int, details: str
) -> tuple[str, str]:
    """Decides what to do after a failed start."""
    decision = decide(
        _policy_starts([*earlier, current]),
        len(_policy_starts(_in_allocation(earlier, current))),
        devices,
        restarts=restarts,
        spare_nodes=spare_nodes,
        restarts_done=current["start"],
    )
    if decision.action == "end":
        return "end", f"{decision.reason}{': ' if details else ''}{details}"
    if decision.action == "requeue":
        return "requeue", decision.reason
    blamed = current["blamed"]
    who = f"without {blamed} if there is another" if blamed else "on the same nodes"
    return "again", f"from step {current['newest']}, {who}"


def _policy_starts(records: list[Record]) -> list[Start]:
    """Returns the starts by which a restart is decided. Starts that were cancelled, or in which processes never
    appeared, do not count."""
    return [_policy_start(record) for record in records if not record.get("cancelled") and not record.get("waited")]


def _policy_start(record: Record) -> Start:
    """Returns a recorded start. Records of earlier versions have the newest checkpoint instead of the step."""
    failed = record["code"] not in (ExitCode.FINISHED, ExitCode.STOPPED)
    step = record.get("step", record["newest"] or None)
    cause = record.get("cause", "")
    return Start(record.get("time", 0.0), failed, step, cause, record["blamed"], record["newest"])


def _in_allocation(earlier: list[Record], current: Record) -> list[Record]:
    """Returns the starts in the current allocation, of which `current` is the last."""
    return [*earlier[max(0, len(earlier) - current["start"]) :], current]


def _devices(events: list[Record], nodes: list[str]) -> int:
    """Returns the number of devices of a run, as its start events say."""
    reported = [event["devices"] for event in events if event["kind"] == "start" and is_count(event.get("devices"))]
    return reported[0] if reported else _DEVICES_PER_NODE * len(nodes)


def _events_on(nodes: list[str], events: list[Record]) -> list[Record]:
    """Returns the events from the given nodes. Leaves out those of a process that was started elsewhere with the same
    run directory. If no host name matches, returns all events."""
    matching = [event for event in events if _node_of(event.get("host"), None, nodes)]
    return matching or events


def _node_at_fault(events: list[Record], nodes: list[str]) -> tuple[str, str] | None:
    """Returns the node at fault, and the reason that a process reports. Returns None if no node is at fault.

    An exception in a process is the fault of its program, unless it reports a broken device. All processes talk to
    process 0, so its verdict counts, unless all others blame process 0's node. If process 0 reports nothing, the
    majority decides.
    """
    raised = {event["process"] for event in events if event["kind"] == EXCEPTION_EVENT}
    votes: dict[int, tuple[str, str]] = {}
    for event in events:
        why = str(event.get("why"))
        program_failed = event.get("at_fault") in raised or f" {EXCEPTION_EVENT}: " in why
        node = _node_of(event.get("at_fault_host"), event.get("at_fault"), nodes)
        if event["kind"] not in (*BLAMING_EVENTS, EXCEPTION_EVENT) or (program_failed and not is_device_error(why)):
            continue
        if node is not None:
            votes.setdefault(event["process"], (node, why))
    others = [vote for process, vote in sorted(votes.items()) if process != 0]
    against_first = len(nodes) > 2 and len(others) == len(nodes) - 1 and {node for node, _ in others} == {nodes[0]}
    if 0 in votes and not against_first:
        return votes[0]
    counts = Counter(node for node, _ in others)
    return max(others, key=lambda vote: counts[vote[0]], default=None)


def _node_of(host: str | None, process: int | None, nodes: list[str]) -> str | None:
    """Returns the node of a host, or else the node of a process. Returns None if it is not one of `nodes`. Host names
    may have a domain that Slurm's node names lack."""
    if host is not None:
        same = [node for node in nodes if node == host or node.partition(".")[0] == host.partition(".")[0]]
        if same:
            return same[0]
    return nodes[process] if process is not None and 0 <= process < len(nodes) else None


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    ledger = Ledger(Path(options.run_dir))
    if options.when == "before":
        answer = decide_before_start(
            ledger, options.wanted, options.usable.split(), options.drained.split(), time.time()
        )
    else:
        answer = decide_after_start(
            ledger, options.code, options.began, options.nodes.split(","), options.start, options.restarts,
            options.cancelled == "yes", options.job, options.spare_nodes,
        )  # fmt: skip
    print(*answer)
    return ExitCode.FINISHED


def _restarts(text: str) -> int | None:
    """Returns the maximum number of restarts in an allocation; None if there is none."""
    return None if text == "none" else int(text)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("python -m jaxmnt.launch.inside", description=__doc__, codes=LOCAL_EXIT_CODES)
    when = parser.add_subparsers(dest="when", required=True)
    before = when.add_parser("before", codes=LOCAL_EXIT_CODES)
    after = when.add_parser("after", codes=LOCAL_EXIT_CODES)
    for command in (before, after):
        command.add_argument("--run-dir", type=path_argument, required=True)
    before.add_argument("--wanted", type=int, required=True, help="number of nodes for a start")
    before.add_argument("--usable", required=True, help="nodes that answer")
    before.add_argument("--drained", default="", help="usable nodes that Slurm has drained")
    after.add_argument("--code", type=int, required=True, help="srun's exit code")
    after.add_argument("--began", type=float, required=True, help="time at which the start began, in Unix seconds")
    after.add_argument("--nodes", required=True, help="nodes of the start, in the order of the processes")
    after.add_argument("--start", type=int, required=True, help="number of the start in this allocation")
    after.add_argument("--restarts", type=_restarts, required=True, help="maximum number of restarts, or none")
    after.add_argument("--cancelled", choices=("yes", "no"), required=True)
    after.add_argument("--job", required=True)
    after.add_argument("--spare-nodes", type=int, help="spare nodes of the allocation; older scripts do not say")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_command(main)
