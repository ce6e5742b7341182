"""The report as lines for a terminal."""

from jaxmnt.config.load import as_yaml
from jaxmnt.errors import counted, printable
from jaxmnt.report.history import Record
from jaxmnt.units import count, duration

_LEAST_SHARE = 0.0005
"""Of the wall time, for a part to have a line."""


def summary_text(report: Record) -> str:
    runs = [_of_run(run) for run in report["runs"]]
    return "\n\n".join([*runs, *(["\n".join(_compared(report))] if len(runs) > 1 else [])])


def failures_text(report: Record) -> str:
    return "\n\n".join(_failures(run) for run in report["runs"])


def _of_run(run: Record) -> str:
    goodput, attempts = run["goodput"], run["attempts"]
    restarts = f"{len(attempts)} attempt{'s' if len(attempts) > 1 else ''}"
    wall = goodput["wall_seconds"]
    told = f"{run['state']}, {duration(wall)} in {restarts}, {count(goodput['tokens'])} tokens"
    lines = [f"run     {printable(run['run'])}: {told}"]
    lines += [f"note    {note}" for note in run["notes"]]
    lines += _loss(run["summary"])
    lines.append(
        f"goodput {goodput['ettr']:.1%} of the time went into steps that count ({goodput['ettr_last_hour']:.1%} in the "
        "last hour)"
    )
    for part, seconds in sorted(goodput["seconds"].items(), key=lambda item: -item[1]):
        if seconds > _LEAST_SHARE * wall:
            lines.append(f"  {seconds / wall:6.1%} {duration(seconds):>9}  {goodput['parts'][part]}")
    cost = "" if goodput["cost"] is None else f", which cost {goodput['cost']:,.2f}"
    if goodput["cost_per_billion_tokens"] is not None:
        cost += (
            f" ({goodput['cost_per_billion_tokens']:,.2f} per billion tokens; {goodput['productive_cost']:,.2f} "
            "productive)"
        )
    lines.append(f"cost    {goodput['gpu_hours']:,.2f} device-hours{cost}")
    lines += [f"attempt {_attempt(attempt, 'broke off without a word')}" for attempt in attempts[:-1]]
    lines += [f"attempt {_attempt(attempt, run['state'])}" for attempt in attempts[-1:]]
    if run["summary"]["steps_without_targets"]:
        lines.append(f"note    {run['summary']['steps_without_targets']} steps had no targets and changed nothing")
    lines += [f"slow    {_straggler(one)}" for one in run["stragglers"]]
    if run["failures"]:
        lines.append("failed  --failures tells what ended attempts, and what that cost")
    return "\n".join(lines)


def _loss(summary: Record) -> list[str]:
    if summary["loss"] is None:
        return []
    bits = "" if summary["bits_per_byte"] is None else f" ({summary['bits_per_byte']:.4f} bits per byte)"
    held_out = "" if summary["held_out_loss"] is None else f", held out {summary['held_out_loss']:.4f}{bits}"
    return [f"loss    {summary['loss']:.4f} nats per token in the batch of step {summary['step']}{held_out}"]


def _attempt(attempt: Record, state: str) -> str:
    steps = "no step" if attempt["first_step"] is None else f"steps {attempt['first_step']} to {attempt['last_step']}"
    lost = f", {attempt['lost_steps']} more were taken again" if attempt["lost_steps"] else ""
    took = duration(attempt["ended"] - attempt["began"])
    return f"{attempt['attempt']}: {took}, {steps}{lost}; {_how_it_ended(attempt, state)}"


def _how_it_ended(attempt: Record, state: str) -> str:
    """Returns how an attempt ended; `state` if it has recorded no end."""
    if attempt["end"] is None:
        return state
    if attempt["end"] == "end":
        return "finished" if attempt["finished"] else "stopped early with a checkpoint"
    return printable(f"{attempt['end']}: {attempt['why'] or 'no reason is known'}")


def _straggler(one: Record) -> str:
    device = "" if one["device"] is None else f", device {one['device']}"
    until = "the end" if one["to_step"] is None else one["to_step"]
    more = f" by {1e3 * one['slower_seconds']:.0f} ms" if one["slower_seconds"] else ""
    who = f"process {one['process']} on {one['host']}{device}"
    return printable(f"{who}: {one['phase']}{more}, from step {one['from_step']} to {until}")


def _failures(run: Record) -> str:
    if not run["failures"]:
        return f"run     {printable(run['run'])}: no attempt ended badly"
    return "\n".join([f"run     {printable(run['run'])}", *(_failure(one) for one in run["failures"])])


def _failure(one: Record) -> str:
    who = (
        "" if one["process"] is None else f", process {one['process']}" + (f" on {one['host']}" if one["host"] else "")
    )
    code = "" if one["exit_code"] is None else f", exit code {one['exit_code']}"
    cost = "" if one["cost"] is None else f", which cost {one['cost']:,.2f}"
    steps = f", {counted(one['lost_steps'], 'step', 'steps')} taken again" if one["lost_steps"] else ""
    lines = [
        f"attempt {one['attempt']}: {one['kind'].replace('_', ' ')} after step {one['step']}{who}{code}",
        f"  why   {one['why']}",
    ]
    if one["lines"]:
        lines += [f"  {one['source']}", *(f"    | {line}" for line in one["lines"])]
    lines += [f"  then  {one['then']}", f"  lost  {duration(one['lost_seconds'])}{steps}{cost}"]
    return "\n".join(map(printable, lines))


def _compared(report: Record) -> list[str]:
    lines = [f"note    {note}" for note in report["notes"]]
    for one in report["config_differences"]:
        lines.append(printable(f"differs {one['key']}: {' | '.join(map(as_yaml, one['values']))}"))
    return lines
