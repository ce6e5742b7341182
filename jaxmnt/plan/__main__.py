"""python -m jaxmnt.plan --config FILE --target CHIP --gpus N[,N…] [--for time|cost|tokens:2T] [key=value …]

Finds the best mesh for a run on GPUs that need not be present. It estimates the meshes that split the model evenly,
compiles the best few, and prints how long the run takes, what it costs, and why. Given several numbers of GPUs, it says
which one to use.
"""

import argparse
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from jaxmnt.commands import LOCAL_EXIT_CODES, Parser, run_command, write_file
from jaxmnt.config import Config, load_config
from jaxmnt.config.own_code import attributing_user_errors
from jaxmnt.errors import ConfigError, ExitCode, counted
from jaxmnt.plan.calibration import check_calibration, read_calibration
from jaxmnt.plan.chips import find_target
from jaxmnt.plan.goal import RESTART_SECONDS
from jaxmnt.plan.targets import gpu_devices, silence_xla_warnings
from jaxmnt.strict_json import json_text
from jaxmnt.telemetry.progress import Work, working

if TYPE_CHECKING:
    from jaxmnt.plan.answer import Answer, PlanRequest, PricedPlan
    from jaxmnt.plan.search import Search

DEFAULT_COMPILATIONS = 6
"""Default number of candidates that are compiled for each number of GPUs."""
_PRECISIONS = ("bfloat16", "float8")
_MAX_GPUS = 16384
"""Maximum number of GPUs of a run, also in the search for the smallest number on which it fits."""


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    with working("starting") as work:
        return _plan(options, work)


def _plan(options: argparse.Namespace, work: Work) -> int:
    """Searches for plans, prints them and returns the exit code."""
    silence_xla_warnings(options.debug)
    chip, network = find_target(options.target)
    counts = _read_gpu_counts(options.gpus, network.devices_per_host)
    config = load_config(options.config, options.overrides)
    request = _read_request(options, config)
    precisions = _read_precisions(options.precisions)
    calibration = None if options.calibration is None else read_calibration(options.calibration)
    if calibration is not None:
        check_calibration(calibration, options.calibration, chip, 1, 1)

    from jaxmnt.plan.dry_run import with_vocabulary
    from jaxmnt.plan.rates import rates_of

    config, _ = with_vocabulary(config)
    gpu_devices(chip, 1, 1)  # must run before JAX starts its backends
    from jaxmnt.plan.search import Search

    rates = rates_of(chip, network)
    if calibration is not None:
        rates = calibration.rates(rates)
    work.does("estimating")
    with attributing_user_errors(config):
        search = Search(config, chip, network, rates, precisions)
        if options.compile == 0:
            return _print_estimates(search, counts, request, options, work)
        answers = [_find_plans(search, count, request, options.compile, work) for count in counts]
        return _print_answers(search, answers, request, options, work)


def _print_estimates(
    search: "Search", counts: list[int], request: "PlanRequest", options: argparse.Namespace, work: Work
) -> int:
    """Makes estimates without compiling anything, prints them and returns the exit code."""
    from jaxmnt.plan.estimated import best_of, fastest_estimates, show_estimates

    estimates = [estimate for gpus in counts for estimate in fastest_estimates(search, gpus, request)]
    if not estimates:
        raise ConfigError(
            "--gpus: by estimate the run fits on none of these numbers of GPUs; set --compile "
            f"{DEFAULT_COMPILATIONS} to see what it needs"
        )
    work.does("")
    best = best_of(estimates, request)
    if options.json:
        summary = {"target": search.chip.kind, "tokens": request.tokens, "winner": best.to_json()}
        print(json_text(summary | {"estimates": [estimate.to_json() for estimate in estimates]}, indent=2))
    else:
        print(show_estimates(estimates, best, request))
    return ExitCode.FINISHED


def _print_answers(
    search: "Search", answers: "list[Answer]", request: "PlanRequest", options: argparse.Namespace, work: Work
) -> int:
    """Prints the answer, writes the requested files, and returns the exit code."""
    from jaxmnt.plan.answer import advice, knee, reasons, winner
    from jaxmnt.plan.answer_text import show_answers

    best = winner(answers, request)
    if best is None:
        raise ConfigError(_no_fit_message(search, answers, work))
    work.does("")
    if options.json:
        best_answer = next(answer for answer in answers if answer.gpus == best.gpus)
        summary = {
            "target": search.chip.kind, "tokens": request.tokens, "knee": knee(answers), "winner": best.to_json(),
            "reasons": reasons(search, best_answer),
            "advice": advice(search, best),
            "answers": [
                {
                    "gpus": answer.gpus, "estimated": len(answer.guesses),
                    "plans": [plan.to_json() for plan in answer.priced],
                }
                for answer in answers
            ],
        }  # fmt: skip
        print(json_text(summary, indent=2))
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


def _find_plans(search: "Search", gpus: int, request: "PlanRequest", count: int, work: Work) -> "Answer":
    """Estimates all candidates for a number of GPUs, and compiles and prices the best `count`."""
    from jaxmnt.plan.answer import Answer, price_plan
    from jaxmnt.telemetry.flops import CONVENTIONS, token_flops
    from jaxmnt.telemetry.peaks import peaks_of

    start_seconds = time.perf_counter()
    work.does(f"estimating for {counted(gpus, 'GPU', 'GPUs')}")
    guesses = search.guesses(gpus)
    num_fitting = sum(map(search.may_fit, guesses))
    seconds = time.perf_counter() - start_seconds
    gpus_text = counted(gpus, "GPU", "GPUs")
    work.line(f"{gpus_text}: {len(guesses)} candidates estimated in {seconds:.0f} s, {num_fitting} may fit")
    plans = search.best(
        guesses, count, lambda text: work.line(f"  compiled {text}"), lambda text: work.does(f"compiling {text}")
    )
    config = search.config
    flops_per_token = CONVENTIONS[config.telemetry.flops](token_flops(search.definition, config.data.sequence_length))
    peak_dtype = search.dtype(None).replace("float8", "bfloat16")  # the dtype by whose peak a run computes its MFU
    peak = peaks_of(search.chip.kind).get(peak_dtype)
    priced = [price_plan(search, plan, request, flops_per_token, peak) for plan in plans]
    return Answer(gpus, guesses, sorted(priced, key=lambda plan: plan.goal.seconds))


def _no_fit_message(search: "Search", answers: "list[Answer]", work: Work) -> str:
    """Returns the error message. To name the smallest number of GPUs on which the run fits, it compiles the run."""
    from jaxmnt.plan.candidates import gpu_counts
    from jaxmnt.plan.search import describe
    from jaxmnt.units import size

    requested = [answer.gpus for answer in answers]
    guesses = [guess for answer in answers for guess in answer.guesses]
    guesses = guesses or [guess for gpus in requested for guess in search.guesses(gpus, pruned=False)]
    if not guesses:
        needs = "no mesh splits the batch, the heads and the layers evenly"
    else:
        smallest = min(guesses, key=lambda guess: guess.memory.peak)
        needs = (
            f"{describe(smallest.candidate)} needs the least memory, about {size(smallest.memory.peak)}, but a GPU has "
            f"{size(search.limit)}"
        )
    work.does("searching for the smallest number of GPUs on which it fits")
    message = f"--gpus: the run does not fit on {', '.join(map(str, requested))} × {search.chip.kind}: {needs}"
    for gpus in gpu_counts(search.network.devices_per_host, _MAX_GPUS):
        if gpus not in requested and (plans := search.best(search.guesses(gpus), 1)):
            plan = plans[0]
            return (
                f"{message}; the smallest number that fits is {gpus} ({describe(plan.candidate)}: "
                f"{size(plan.peak)}, compiled)"
            )
    return f"{message}; it does not fit on any number up to {_MAX_GPUS}"


def _write(path: Path, options: argparse.Namespace, best: "PricedPlan") -> None:
    """Writes the run's config, with the overrides and then the winner's settings applied to it."""
    from jaxmnt.config.load import with_settings

    write_file(path, with_settings(options.config, options.overrides, best.plan.candidate.settings))
    load_config(path)  # raises if the file is not a valid config


def _read_request(options: argparse.Namespace, config: Config) -> "PlanRequest":
    """Reads the goal from the options. Raises `ConfigError` if the goal is unknown, or is `cost` without a price."""
    from jaxmnt.plan.answer import PlanRequest

    rank_by, tokens = "time", None
    for part in options.goal.split(","):
        name, _, number = part.partition(":")
        if name in ("time", "cost") and not number:
            rank_by = name
        elif name == "tokens":
            tokens = _read_tokens(number)
        else:
            raise ConfigError(f"--for: {part!r} is not a goal; give time, cost, tokens:2T, or several with commas")
    price = config.launch.cost_per_gpu_hour if options.price is None else options.price
    if rank_by == "cost" and price is None:
        raise ConfigError("--for: cost needs a price per GPU-hour; set --price or launch.cost_per_gpu_hour")
    batch = config.data.global_batch_size * config.data.sequence_length
    if tokens is None:
        tokens = float(config.train.steps * batch)
    return PlanRequest(tokens, rank_by, price, options.hours_between_failures, options.restart_seconds)


_FACTORS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
"""Factors by the suffix of a number."""


def _read_tokens(text: str) -> float:
    """Parses a number of tokens such as 2T. Raises `ConfigError` if it is not a positive number."""
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)([KMBT]?)", text.strip(), re.IGNORECASE)
    if match is None or not float(match[1]):
        raise ConfigError(f"--for: tokens:{text} is not a number of tokens; give one such as tokens:2T or tokens:300B")
    return float(match[1]) * _FACTORS[match[2].upper()]


def _read_precisions(text: str | None) -> list[str]:
    """Parses the precisions to try; empty if the option is not set. Raises `ConfigError` for an unknown one."""
    if text is None:
        return []
    precisions = [part.strip() for part in text.split(",")]
    for precision in precisions:
        if precision not in _PRECISIONS:
            raise ConfigError(
                f"--precisions: unknown precision {precision!r}; give one or more of {', '.join(_PRECISIONS)}"
            )
    return list(dict.fromkeys(precisions))


def _read_gpu_counts(text: str, per_host: int) -> list[int]:
    """Returns the numbers of GPUs in ascending order. Raises `ConfigError` for a number that does not fill its
    hosts."""
    counts = sorted({int(part) if part.strip().isdecimal() else 0 for part in text.split(",")})
    if counts[0] < 1 or counts[-1] > _MAX_GPUS:
        raise ConfigError(f"--gpus: must be numbers from 1 to {_MAX_GPUS}, separated by commas, not {text!r}")
    for count in counts:
        if count > per_host and count % per_host:
            below = count - count % per_host
            raise ConfigError(f"--gpus: {count} do not fill hosts of {per_host}; give {below} or {below + per_host}")
    return counts


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("python -m jaxmnt.plan", description=__doc__, codes=LOCAL_EXIT_CODES)
    parser.add_argument("--config", required=True, type=Path, metavar="FILE", help="the config of the run")
    parser.add_argument("--target", required=True, metavar="CHIP", help="a GPU such as h100, or an instance type")
    parser.add_argument(
        "--gpus", required=True, metavar="N[,N…]", help="number of GPUs, or several numbers to choose from"
    )
    parser.add_argument(
        "--for", dest="goal", default="time", metavar="GOAL",
        help="time, cost, tokens:2T (default: the tokens of the config's steps), or several, separated by commas",
    )  # fmt: skip
    parser.add_argument(
        "--price", type=float, metavar="P", help="price of a GPU-hour; default launch.cost_per_gpu_hour"
    )
    parser.add_argument(
        "--compile",
        type=int,
        default=DEFAULT_COMPILATIONS,
        metavar="K",
        help=f"number of candidates to compile; default {DEFAULT_COMPILATIONS}; 0 prints only estimates, which takes "
        "seconds",
    )
    parser.add_argument(
        "--precisions", metavar="P[,P]",
        help="precisions to try, bfloat16 or float8 or both; default: the config's",
    )  # fmt: skip
    parser.add_argument(
        "--hours-between-failures", type=float, metavar="H",
        help="mean hours between failures of the whole run; default: from published failures of GPUs",
    )  # fmt: skip
    parser.add_argument(
        "--restart-seconds",
        type=float,
        default=RESTART_SECONDS,
        metavar="S",
        help=f"time from a failure to the next step; default {RESTART_SECONDS:g}",
    )
    parser.add_argument(
        "--calibration", type=Path, metavar="FILE", help="rates that preflight --calibrate has measured on such GPUs"
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the winner's config")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write an SVG of time and cost by number of GPUs")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    parser.add_settings()
    options = parser.parse_intermixed_args(arguments)
    for name, minimum in (("price", 0.0), ("restart_seconds", 0.0), ("hours_between_failures", 0.01), ("compile", 0)):
        number = getattr(options, name)
        if number is not None and not (minimum <= number < 1e9):
            raise ConfigError(f"--{name.replace('_', '-')}: must be at least {minimum:g} and below 1e9, not {number:g}")
    if options.compile == 0 and (options.write or options.picture):
        raise ConfigError(
            "--compile: 0 compiles nothing, but --write and --picture need a compiled plan; set --compile "
            f"{DEFAULT_COMPILATIONS}"
        )
    return options


if __name__ == "__main__":
    run_command(main)
