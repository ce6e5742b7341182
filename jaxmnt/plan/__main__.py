"""python -m jaxmnt.plan --config FILE --target CHIP --gpus N[,N…] [--for time|cost|tokens:2T] [key=value …]

Finds the best mesh for a run on GPUs that need not be there: estimates all that divide, compiles the best few for
real, and says what the run takes, what it costs, and why. With several numbers of GPUs it says how many to take.
"""

import argparse
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from jaxmnt.commands import HERE, Parser, run_command, write_file
from jaxmnt.config import Config, load_config
from jaxmnt.config.own_code import attributing_user_errors
from jaxmnt.errors import ConfigError, ExitCode, counted
from jaxmnt.plan.calibration import check_fits, read_calibration
from jaxmnt.plan.chips import find_target
from jaxmnt.plan.goal import RESTART_SECONDS
from jaxmnt.plan.targets import gpu_devices, keep_back_warnings_of_xla
from jaxmnt.strict_json import json_text
from jaxmnt.telemetry.progress import Work, working

if TYPE_CHECKING:
    from jaxmnt.plan.answer import Answer, PlanRequest, Priced
    from jaxmnt.plan.search import Search

COMPILED = 6
"""Default number of candidates to compile."""
_PRECISIONS = ("bfloat16", "float8")
_MOST_GPUS = 16384
"""Largest number of GPUs per run, and the limit of the search for the least number that fits."""


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    with working("starting") as work:
        return _plan(options, work)


def _plan(options: argparse.Namespace, work: Work) -> int:
    keep_back_warnings_of_xla(options.debug)
    chip, network = find_target(options.target)
    counts = _counts(options.gpus, network.devices_per_host)
    config = load_config(options.config, options.overrides)
    request, precisions = _wish(options, config), _precisions(options.precisions)
    calibration = None if options.calibration is None else read_calibration(options.calibration)
    if calibration is not None:
        check_fits(calibration, options.calibration, chip, 1, 1)

    from jaxmnt.plan.dry_run import with_vocabulary
    from jaxmnt.plan.rates import rates_of

    config, _ = with_vocabulary(config)
    gpu_devices(chip, 1, 1)  # before JAX starts its backends
    from jaxmnt.plan.search import Search

    rates = rates_of(chip, network)
    rates = rates if calibration is None else calibration.rates(rates)
    work.does("estimating")
    with attributing_user_errors(config):
        search = Search(config, chip, network, rates, precisions)
        if options.compile == 0:
            return _estimate(search, counts, request, options, work)
        answers = [_answer(search, count, request, options.compile, work) for count in counts]
        return _say(search, answers, request, options, work)


def _estimate(
    search: "Search", counts: list[int], request: "PlanRequest", options: argparse.Namespace, work: Work
) -> int:
    """Prints estimates without compiling anything, and returns the exit code."""
    from jaxmnt.plan.estimated import best_of, fastest, show_estimates

    ways = [one for gpus in counts for one in fastest(search, gpus, request)]
    if not ways:
        raise ConfigError("--gpus: by estimate the run fits on none of these; --compile 6 says what it needs")
    work.does("")
    best = best_of(ways, request)
    if options.json:
        told = {"target": search.chip.kind, "tokens": request.tokens, "winner": best.to_json()}
        print(json_text(told | {"estimates": [one.to_json() for one in ways]}, indent=2))
    else:
        print(show_estimates(ways, best, request))
    return ExitCode.FINISHED


def _say(
    search: "Search", answers: "list[Answer]", request: "PlanRequest", options: argparse.Namespace, work: Work
) -> int:
    from jaxmnt.plan.answer import advice, knee, reasons, winner
    from jaxmnt.plan.answer_text import show_answers

    best = winner(answers, request)
    if best is None:
        raise ConfigError(_does_not_fit(search, answers, work))
    work.does("")
    if options.json:
        told = {
            "target": search.chip.kind, "tokens": request.tokens, "knee": knee(answers), "winner": best.to_json(),
            "reasons": reasons(search, next(one for one in answers if one.gpus == best.gpus)),
            "advice": advice(search, best),
            "answers": [
                {"gpus": one.gpus, "estimated": len(one.guesses), "plans": [plan.to_json() for plan in one.priced]}
                for one in answers
            ],
        }  # fmt: skip
        print(json_text(told, indent=2))
    else:
        print(show_answers(search, answers, request, best))
    if options.picture is not None:
        from jaxmnt.plan.picture import draw

        write_file(options.picture, draw(answers, search.chip.kind))
        work.line(f"picture: {options.picture}")
    if options.write is not None:
        _write(options.write, options, best)
        work.line(f"config: {options.write}")
    return ExitCode.FINISHED


def _answer(search: "Search", gpus: int, request: "PlanRequest", count: int, work: Work) -> "Answer":
    from jaxmnt.plan.answer import Answer, priced
    from jaxmnt.telemetry.flops import CONVENTIONS, token_flops
    from jaxmnt.telemetry.peaks import peaks_of

    began = time.perf_counter()
    work.does(f"estimating for {counted(gpus, 'GPU', 'GPUs')}")
    guesses = search.guesses(gpus)
    fit = sum(map(search.may_fit, guesses))
    took = f"{time.perf_counter() - began:.0f} s"
    work.line(f"{counted(gpus, 'GPU', 'GPUs')}: {len(guesses)} ways estimated in {took}, {fit} may fit")
    plans = search.best(
        guesses, count, lambda text: work.line(f"  compiled {text}"), lambda text: work.does(f"compiling {text}")
    )
    config = search.config
    per_token = CONVENTIONS[config.telemetry.flops](token_flops(search.definition, config.data.sequence_length))
    peak = peaks_of(search.chip.kind).get(search.dtype(None).replace("float8", "bfloat16"))  # as a run counts it
    found = [priced(search, plan, request, per_token, peak) for plan in plans]
    return Answer(gpus, guesses, sorted(found, key=lambda one: one.goal.seconds))


def _does_not_fit(search: "Search", answers: "list[Answer]", work: Work) -> str:
    """Returns the error message, with the least number of GPUs for which the run was compiled and fits."""
    from jaxmnt.plan.candidates import numbers_of_gpus
    from jaxmnt.plan.search import describe
    from jaxmnt.units import size

    asked = [answer.gpus for answer in answers]
    guesses = [guess for answer in answers for guess in answer.guesses]
    guesses = guesses or [guess for gpus in asked for guess in search.guesses(gpus, pruned=False)]
    if not guesses:
        needs = "no mesh divides the batch, the heads and the layers"
    else:
        least = min(guesses, key=lambda guess: guess.memory.peak)
        needs = (
            f"the least is {describe(least.candidate)}, which needs about {size(least.memory.peak)} of the "
            f"{size(search.limit)} that a GPU has"
        )
    work.does("looking for the least number of GPUs that it fits on")
    told = f"--gpus: the run does not fit on {', '.join(map(str, asked))} × {search.chip.kind}: {needs}"
    for gpus in numbers_of_gpus(search.network.devices_per_host, _MOST_GPUS):
        if gpus not in asked and (plans := search.best(search.guesses(gpus), 1)):
            plan = plans[0]
            return (
                f"{told}; the least number that it fits on is {gpus} ({describe(plan.candidate)}: "
                f"{size(plan.peak)}, compiled)"
            )
    return f"{told}; nor does it on any number up to {_MOST_GPUS}"


def _write(path: Path, options: argparse.Namespace, best: "Priced") -> None:
    """Writes the config with the winner's settings: the file's keys, then the overrides, then these."""
    from jaxmnt.config.load import with_settings

    write_file(path, with_settings(options.config, options.overrides, best.plan.candidate.settings))
    load_config(path)  # or it is not what was planned


def _wish(options: argparse.Namespace, config: Config) -> "PlanRequest":
    """Reads the goal from the options. Raises `ConfigError` for an unknown goal, and for `cost` without a price."""
    from jaxmnt.plan.answer import PlanRequest

    by, tokens = "time", None
    for part in options.goal.split(","):
        name, _, number = part.partition(":")
        if name in ("time", "cost") and not number:
            by = name
        elif name == "tokens":
            tokens = _tokens(number)
        else:
            raise ConfigError(f"--for: {part!r} is not a goal; give time, cost, tokens:2T, or some with commas")
    price = config.launch.cost_per_gpu_hour if options.price is None else options.price
    if by == "cost" and price is None:
        raise ConfigError("--for: cost needs a price; give --price or launch.cost_per_gpu_hour, of an hour of a GPU")
    batch = config.data.global_batch_size * config.data.sequence_length
    if tokens is None:
        tokens = float(config.train.steps * batch)
    return PlanRequest(tokens, by, price, options.hours_between_failures, options.restart_seconds)


_FACTORS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def _tokens(text: str) -> float:
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)([KMBT]?)", text.strip(), re.IGNORECASE)
    if found is None or not float(found[1]):
        raise ConfigError(f"--for: tokens:{text} is not a number of tokens; give one such as tokens:2T or tokens:300B")
    return float(found[1]) * _FACTORS[found[2].upper()]


def _precisions(text: str | None) -> list[str]:
    if text is None:
        return []
    found = [part.strip() for part in text.split(",")]
    for one in found:
        if one not in _PRECISIONS:
            raise ConfigError(f"--precisions: {one!r} is no precision; give some of {', '.join(_PRECISIONS)}")
    return list(dict.fromkeys(found))


def _counts(text: str, per_host: int) -> list[int]:
    counts = sorted({int(part) if part.strip().isdecimal() else 0 for part in text.split(",")})
    if counts[0] < 1 or counts[-1] > _MOST_GPUS:
        raise ConfigError(f"--gpus: {text!r} must be numbers from 1 to {_MOST_GPUS}, with commas; correct it")
    for count in counts:
        if count > per_host and count % per_host:
            fitting = f"{count - count % per_host} or {count - count % per_host + per_host}"
            raise ConfigError(f"--gpus: {count} do not fill hosts of {per_host}; give {fitting}")
    return counts


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("python -m jaxmnt.plan", description=__doc__, codes=HERE)
    parser.add_argument("--config", required=True, type=Path, metavar="FILE", help="the config of the run")
    parser.add_argument("--target", required=True, metavar="CHIP", help="a GPU such as h100, or an instance type")
    parser.add_argument("--gpus", required=True, metavar="N[,N…]", help="how many; several to choose among them")
    parser.add_argument(
        "--for", dest="goal", default="time", metavar="GOAL",
        help="time, cost, tokens:2T (default: the config's steps), or some of them with commas",
    )  # fmt: skip
    parser.add_argument(
        "--price", type=float, metavar="P", help="of an hour of a GPU; default launch.cost_per_gpu_hour"
    )
    parser.add_argument(
        "--compile",
        type=int,
        default=COMPILED,
        metavar="K",
        help=f"ways that are compiled; default {COMPILED}; 0: an estimate of all, in seconds",
    )
    parser.add_argument(
        "--precisions", metavar="P[,P]",
        help="of bfloat16 and float8, those that are tried; default: that of the config",
    )  # fmt: skip
    parser.add_argument(
        "--hours-between-failures", type=float, metavar="H",
        help="mean hours between failures of the whole run; default by published failures of GPUs",
    )  # fmt: skip
    parser.add_argument(
        "--restart-seconds",
        type=float,
        default=RESTART_SECONDS,
        metavar="S",
        help=f"from a failure to the next step; default {RESTART_SECONDS:g}",
    )
    parser.add_argument(
        "--calibration", type=Path, metavar="FILE", help="rates that preflight --calibrate has measured on such GPUs"
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the winner's config")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw time and cost over the GPUs, as SVG")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    parser.add_settings()
    options = parser.parse_intermixed_args(arguments)
    for name, least in (("price", 0.0), ("restart_seconds", 0.0), ("hours_between_failures", 0.01), ("compile", 0)):
        value = getattr(options, name)
        if value is not None and not (least <= value < 1e9):
            raise ConfigError(f"--{name.replace('_', '-')}: {value:g} must be a number from {least:g} up; correct it")
    if options.compile == 0 and (options.write or options.picture):
        raise ConfigError("--compile: 0 compiles nothing, so there is no config to write and no picture; leave it out")
    return options


if __name__ == "__main__":
    run_command(main)
