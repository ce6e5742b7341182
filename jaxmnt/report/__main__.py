"""python -m jaxmnt.report RUN [RUN …]: what the time of a run went into over all its attempts, and what it cost.

RUN is a run directory, of a run that is over or under way. Nothing but its JSON lines is read; no JAX is needed.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxmnt.commands import HERE, Parser, run_command
from jaxmnt.errors import ExitCode, printable
from jaxmnt.report.goodput import PARTS, Goodput, attempt_parts, goodput, typical_step
from jaxmnt.report.history import Attempt, read_attempts
from jaxmnt.telemetry.progress import count, duration


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    found = []
    for run in options.run:
        attempts = read_attempts(Path(run))
        if options.price is not None:
            for attempt in attempts:
                attempt.cost_per_gpu_hour = options.price
        found.append((run, attempts, goodput(attempts)))
    if options.json:
        print(json.dumps([as_json(*one) for one in found], indent=2))
    else:
        print("\n\n".join(_text(*one) for one in found))
    return ExitCode.FINISHED


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("python -m jaxmnt.report", description=__doc__, codes=HERE)
    parser.add_argument("run", nargs="+", metavar="RUN", help="run directory")
    parser.add_argument(
        "--price", type=_price, metavar="COST", help="what an hour of a GPU costs; default launch.cost_per_gpu_hour"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser.parse_args(arguments)


def _price(text: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = -1.0
    if not 0 <= price < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number, 0 or more")
    return price


def as_json(run: str, attempts: list[Attempt], whole: Goodput) -> dict[str, Any]:
    typical = typical_step(attempts)
    return {
        "run": run,
        "goodput": asdict(whole),
        "attempts": [
            {
                "attempt": attempt.number,
                "began": attempt.began,
                "ended": attempt.ended,
                "end": attempt.end,
                "devices": attempt.devices,
                "resumed_after": attempt.resumed_after,
                "steps": len(attempt.steps),
                "lost_steps": attempt.lost_steps,
                "seconds": attempt_parts(attempt, typical),
            }
            for attempt in attempts
        ],
    }


def _text(run: str, attempts: list[Attempt], whole: Goodput) -> str:
    restarts = f"{len(attempts)} attempt{'s' if len(attempts) > 1 else ''}"
    lines = [f"run     {printable(run)}: {duration(whole.wall_seconds)} in {restarts}, {count(whole.tokens)} tokens"]
    lines.append(
        f"goodput {whole.ettr:.1%} of the time went into steps that count ({whole.ettr_last_hour:.1%} in the last hour)"
    )
    for part, seconds in sorted(whole.seconds.items(), key=lambda item: -item[1]):
        if seconds > 0.0005 * whole.wall_seconds:
            lines.append(f"  {seconds / whole.wall_seconds:6.1%} {duration(seconds):>9}  {PARTS[part]}")
    cost = "" if whole.cost is None else f", which cost {whole.cost:,.2f}"
    if whole.cost_per_billion_tokens is not None:
        cost += f" ({whole.cost_per_billion_tokens:,.2f} per billion tokens; {whole.productive_cost:,.2f} productive)"
    lines.append(f"cost    {whole.gpu_hours:,.2f} device-hours{cost}")
    lines += [f"attempt {_attempt(attempt)}" for attempt in attempts]
    return "\n".join(lines)


def _attempt(attempt: Attempt) -> str:
    steps = f"steps {attempt.steps[0]['step']} to {attempt.steps[-1]['step']}" if attempt.steps else "no step"
    lost = f", {attempt.lost_steps} more were taken again" if attempt.lost_steps else ""
    return f"{attempt.number}: {duration(attempt.seconds)}, {steps}{lost}; {_how_it_ended(attempt)}"


def _how_it_ended(attempt: Attempt) -> str:
    last = next((record for record in reversed(attempt.events) if record["kind"] == attempt.end), None)
    if last is None:
        return "under way, or it broke off without a word"
    if attempt.end == "end":
        return "finished" if last.get("finished") else "stopped early with a checkpoint"
    return printable(f"{attempt.end}: {last.get('why') or 'no reason is known'}")


if __name__ == "__main__":
    run_command(main)
