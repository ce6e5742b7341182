"""Formats a report as text for a terminal."""

from jaxmnt.config.load import as_yaml
from jaxmnt.errors import counted, printable
from jaxmnt.report.history import Record
from jaxmnt.units import count, duration

_MIN_SHARE = 0.0005
"""Share of the wall time that a part must exceed to have a line."""


def summary_text(report: Record) -> str:
    """Returns a summary of each run and, if there are several runs, a comparison."""
    blocks = [_run_text(run) for run in report["runs"]]
    if len(blocks) > 1:
        blocks.append("\n".join(_comparison_lines(report)))
    return "\n\n".join(blocks)


def failures_text(report: Record) -> str:
    """Returns the failures of each run."""
    return "\n\n".join(_run_failures_text(run) for run in report["runs"])


def _run_text(run: Record) -> str:
    """Returns the summary of one run."""
    goodput, attempts = run["goodput"], run["attempts"]
    attempts_text = counted(len(attempts), "attempt", "attempts")
    wall_seconds = goodput["wall_seconds"]
    state = f"{run['state']}, {duration(wall_seconds)} in {attempts_text}, {count(goodput['tokens'])} tokens"
    lines = [f"run     {printable(run['run'])}: {state}"]
    lines += [f"note    {note}" for note in run["notes"]]
    lines += _loss_lines(run["summary"])
    lines.append(
        f"goodput {goodput['ettr']:.1%} of the time went into steps that count ({goodput['ettr_last_hour']:.1%} in the "
        "last hour)"
    )
    for part, seconds in sorted(goodput["seconds"].items(), key=lambda entry: -entry[1]):
        if seconds > _MIN_SHARE * wall_seconds:
            lines.append(f"  {seconds / wall_seconds:6.1%} {duration(seconds):>9}  {goodput['parts'][part]}")
    cost = "" if goodput["cost"] is None else f", which cost {goodput['cost']:,.2f}"
    if goodput["cost_per_billion_tokens"] is not None:
        cost += (
            f" ({goodput['cost_per_billion_tokens']:,.2f} per billion tokens; {goodput['productive_cost']:,.2f} "
            "productive)"
        )
    lines.append(f"cost    {goodput['gpu_hours']:,.2f} device-hours{cost}")
    lines += [f"attempt {_attempt_line(attempt, 'ended abruptly')}" for attempt in attempts[:-1]]
    lines += [f"attempt {_attempt_line(attempt, run['state'])}" for attempt in attempts[-1:]]
    if run["summary"]["steps_without_targets"]:
        lines.append(f"note    {run['summary']['steps_without_targets']} steps had no targets and changed nothing")
    lines += [f"slow    {_straggler_line(straggler)}" for straggler in run["stragglers"]]
    if run["failures"]:
        lines.append("failed  --failures shows what ended attempts, and what it cost")
    return "\n".join(lines)


def _loss_lines(summary: Record) -> list[str]:
    if summary["loss"] is None:
        return []
    bits_text = "" if summary["bits_per_byte"] is None else f" ({summary['bits_per_byte']:.4f} bits per byte)"
    held_out = "" if summary["held_out_loss"] is None else f", held out {summary['held_out_loss']:.4f}{bits_text}"
    exact = "" if summary["exact_match"] is None else f", exact match {summary['exact_match']:.1%}"
    return [f"loss    {summary['loss']:.4f} nats per token in the batch of step {summary['step']}{held_out}{exact}"]


def _attempt_line(attempt: Record, state: str) -> str:
    steps = "no step" if attempt["first_step"] is None else f"steps {attempt['first_step']} to {attempt['last_step']}"
    lost = f", {attempt['lost_steps']} more were repeated later" if attempt["lost_steps"] else ""
    duration_text = duration(attempt["ended"] - attempt["began"])
    return f"{attempt['attempt']}: {duration_text}, {steps}{lost}; {_attempt_end(attempt, state)}"


def _attempt_end(attempt: Record, state: str) -> str:
    """Describes how an attempt ended; returns `state` if the attempt recorded no end."""
    if attempt["end"] is None:
        return state
    if attempt["end"] == "end":
        return "finished" if attempt["finished"] else "stopped early with a checkpoint"
    return printable(f"{attempt['end']}: {attempt['why'] or 'no reason was recorded'}")


def _straggler_line(straggler: Record) -> str:
    device = "" if straggler["device"] is None else f", device {straggler['device']}"
    last_step = "the end" if straggler["to_step"] is None else straggler["to_step"]
    excess = f" by {1e3 * straggler['slower_seconds']:.0f} ms" if straggler["slower_seconds"] else ""
    culprit = f"process {straggler['process']} on {straggler['host']}{device}"
    return printable(f"{culprit}: {straggler['phase']}{excess}, from step {straggler['from_step']} to {last_step}")


def _run_failures_text(run: Record) -> str:
    if not run["failures"]:
        return f"run     {printable(run['run'])}: no attempt failed"
    return "\n".join([f"run     {printable(run['run'])}", *map(_failure_text, run["failures"])])


def _failure_text(failure: Record) -> str:
    host = f" on {failure['host']}" if failure["host"] else ""
    culprit = "" if failure["process"] is None else f", process {failure['process']}{host}"
    code = "" if failure["exit_code"] is None else f", exit code {failure['exit_code']}"
    cost = "" if failure["cost"] is None else f", which cost {failure['cost']:,.2f}"
    steps = f", {counted(failure['lost_steps'], 'step', 'steps')} repeated" if failure["lost_steps"] else ""
    kind = failure["kind"].replace("_", " ")
    lines = [
        f"attempt {failure['attempt']}: {kind} after step {failure['step']}{culprit}{code}",
        f"  why   {failure['why']}",
    ]
    if failure["lines"]:
        lines += [f"  {failure['source']}", *(f"    | {line}" for line in failure["lines"])]
    lines += [f"  then  {failure['then']}", f"  lost  {duration(failure['lost_seconds'])}{steps}{cost}"]
    return "\n".join(map(printable, lines))


def _comparison_lines(report: Record) -> list[str]:
    lines = [f"note    {note}" for note in report["notes"]]
    for difference in report["config_differences"]:
        lines.append(printable(f"differs {difference['key']}: {' | '.join(map(as_yaml, difference['values']))}"))
    return lines
