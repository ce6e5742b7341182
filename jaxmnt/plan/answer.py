"""The result of a search: for each number of GPUs the plans that fit, what they cost to the goal, and why."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxmnt.config.mesh import AVAILABLE_AXES, STAGE_AXIS
from jaxmnt.plan.candidates import Candidate
from jaxmnt.plan.goal import RESTART_SECONDS, Faults, Goal, faults_of, reach
from jaxmnt.plan.predict import HIGH, LOW
from jaxmnt.plan.search import Guess, Plan, Search, describe
from jaxmnt.report.advice import EXPOSED, IDLE, MEMORY
from jaxmnt.units import size, span


@dataclass(frozen=True)
class PlanRequest:
    """The goal of the run."""

    tokens: float
    by: str
    """How to rank plans and numbers of GPUs: `time` or `cost`."""
    price: float | None
    """Price of one GPU-hour."""
    hours_between_failures: float | None = None
    restart_seconds: float = RESTART_SECONDS


@dataclass(frozen=True)
class Priced:
    """A plan with the time and money that it takes to the goal."""

    plan: Plan
    gpus: int
    tokens_per_second: float
    """Tokens per second of each GPU."""
    mfu: float | None
    faults: Faults
    goal: Goal

    def to_json(self) -> dict[str, Any]:
        plan, seconds = self.plan, self.plan.seconds
        return {
            "gpus": self.gpus,
            "settings": plan.candidate.settings,
            "step_seconds": round(seconds, 4),
            "step_seconds_range": [round(LOW * seconds, 4), round(HIGH * seconds, 4)],
            "estimated_seconds": round(plan.guess.seconds, 4),
            "prediction": {name: round(value, 4) for name, value in vars(plan.prediction).items()},
            "exposed_percent": round(100 * plan.prediction.exposed / seconds, 2),
            "memory": {"peak": plan.peak, "limit": plan.limit, "estimated_peak": round(plan.guess.memory.peak)},
            "tokens_per_second_per_gpu": round(self.tokens_per_second, 1),
            "mfu": None if self.mfu is None else round(self.mfu, 4),
            "goodput": round(self.faults.goodput, 4),
            "save_every_seconds": round(self.faults.interval_seconds, 1),
            "hours_between_failures": round(self.faults.between_seconds / 3600, 2),
            **self.goal.to_json(),
        }


@dataclass(frozen=True)
class Answer:
    """The candidates and plans for one number of GPUs."""

    gpus: int
    guesses: list[Guess]
    priced: list[Priced]
    """Plans that fit, sorted by their time to the goal; empty if nothing fits."""


def priced(search: Search, plan: Plan, request: PlanRequest, flops_per_token: float, peak: float | None) -> Priced:
    """Computes what a plan takes to the goal. `peak` is the FLOP/s of a GPU on which the MFU is based."""
    memory, gpus = plan.report["memory"], plan.candidate.gpus
    faults, goal = to_goal(search, plan.candidate, plan.seconds, memory["params"] + memory["optimizer"], request)
    data = search.config.data
    rate = data.global_batch_size * data.sequence_length / plan.seconds / gpus
    mfu = None if peak is None else rate * flops_per_token / peak
    return Priced(plan, gpus, rate, mfu, faults, goal)


def to_goal(
    search: Search, one: Candidate, step_seconds: float, state: float, request: PlanRequest
) -> tuple[Faults, Goal]:
    """Returns the failures to expect and the time and cost to the goal, with steps of `step_seconds` and `state` bytes
    on each device."""
    data = search.config.data
    faults = faults_of(
        # Replicas hold the same: each host writes its share of one copy.
        one.gpus, state / one.data, search.network.devices_per_host,
        hours_between=request.hours_between_failures, restart_seconds=request.restart_seconds,
    )  # fmt: skip
    rate = data.global_batch_size * data.sequence_length / step_seconds
    return faults, reach(request.tokens, rate, faults, one.gpus, request.price)


def winner(answers: Sequence[Answer], request: PlanRequest) -> Priced | None:
    """Returns the plan that reaches the goal first or at the least cost; on a tie, the one with fewer GPUs."""
    found = [one for answer in answers for one in answer.priced]
    cost = lambda goal: math.inf if goal.cost is None else goal.cost
    value = cost if request.by == "cost" else lambda goal: goal.seconds
    return min(found, key=lambda one: (value(one.goal), one.gpus), default=None)


_WORTH = 0.8
"""Scaling exponent below which adding GPUs stops paying off: the share of a proportional speed-up that must remain."""


def knee(answers: Sequence[Answer]) -> int | None:
    """Returns the number of GPUs beyond which more of them attain less than 80 % of a proportional speed-up; None if
    all attain it."""
    found = [(answer.gpus, answer.priced[0].goal.seconds) for answer in answers if answer.priced]
    found = [(gpus, seconds) for gpus, seconds in found if math.isfinite(seconds)]
    for (fewer, before), (gpus, seconds) in itertools.pairwise(found):
        if math.log(before / seconds) / math.log(gpus / fewer) < _WORTH:
            return fewer
    return None


def reasons(search: Search, answer: Answer) -> list[str]:
    """Explains in numbers why the winner wins."""
    best = answer.priced[0].plan
    if answer.gpus == 1:
        return ["there is one GPU: nothing is split"]
    found = [
        _data_parallel(search, answer, best), *_axes(search, answer, best), _zero(search, answer, best),
        _too_large(search, answer, best),
    ]  # fmt: skip
    return [one for one in found if one]


def _data_parallel(search: Search, answer: Answer, best: Plan) -> str:
    """States whether data parallelism alone fits."""
    if best.candidate.data == answer.gpus:
        return "data parallelism alone fits, and nothing is faster"
    alone = [guess for guess in answer.guesses if guess.candidate.data == answer.gpus]
    if not alone:
        return "data parallelism alone: the batch does not divide among so many replicas"
    least = min(alone, key=search.peak)
    if not search.fits(least):
        return (
            f"data parallelism alone needs {size(search.peak(least))} of a GPU at least, {size(least.memory.state)} of "
            f"them for parameters and moments: {size(search.peak(least) - search.limit)} more than the "
            f"{size(search.limit)} that there are, so the state is split"
        )
    fastest = min(filter(search.fits, alone), key=lambda guess: guess.seconds)
    return f"data parallelism alone may fit, and is estimated at {_times(fastest, best)} of the winner's step"


def _axes(search: Search, answer: Answer, best: Plan) -> list[str]:
    """States what tensor and pipeline parallelism would cost or save."""
    found, fit = [], [guess for guess in answer.guesses if search.fits(guess)]
    for axis, name in ((axis.name, axis.parallelism) for axis in reversed(AVAILABLE_AXES) if axis.parallelism):
        size = lambda guess, axis=axis: getattr(guess.candidate, axis)
        if getattr(best.candidate, axis) > 1:
            without = [guess for guess in fit if size(guess) == 1]
            if not without:
                found.append(f"without {name} nothing fits")
                continue
            one = min(without, key=lambda guess: guess.seconds)
            found.append(f"without {name} the best is {describe(one.candidate)}: {_estimated(one, best)}")
            continue
        with_it = [guess for guess in fit if size(guess) > 1]
        if not with_it:
            found.append(f"{name}: no mesh with it divides and fits")
            continue
        one = min(with_it, key=lambda guess: guess.seconds)
        waits = (
            f", in which a GPU waits {one.estimate.links[axis].exposed:.2g} s for communication along it"
            if axis in one.estimate.links
            else ""
        )
        idle = f", and is idle for {one.estimate.bubble:.2g} s" if axis == STAGE_AXIS else ""
        found.append(f"with {name} the best is {describe(one.candidate)}: {_estimated(one, best)}{waits}{idle}")
    return found


def _zero(search: Search, answer: Answer, best: Plan) -> str | None:
    """States the time and memory of the winner's mesh with the other ZeRO stages; None if none was estimated."""
    zero = best.candidate.zero
    others = [
        f"{guess.candidate.zero} is {_estimated(guess, best)} and needs {size(search.peak(guess))}"
        + ("" if search.fits(guess) else ", which does not fit")
        for guess in sorted(answer.guesses, key=lambda guess: guess.candidate.zero)
        if guess.candidate.zero != zero and replace(guess.candidate, zero=zero) == best.candidate
    ]
    return f"ZeRO {zero} needs {size(search.peak(best.guess))}; {', '.join(others)}" if others else None


def _too_large(search: Search, answer: Answer, best: Plan) -> str | None:
    """Names what a faster mesh lacks: of the meshes estimated to be faster that do not fit, the one that needs least
    memory."""
    faster = [guess for guess in answer.guesses if guess.seconds < 0.99 * best.guess.seconds and not search.fits(guess)]
    if not faster:
        return None
    one = min(faster, key=lambda guess: (search.peak(guess), guess.seconds))
    return (
        f"{describe(one.candidate)} would be faster, {_estimated(one, best)}: it needs {size(search.peak(one))}, "
        f"{size(search.peak(one) - search.limit)} more than there are"
    )


def advice(search: Search, best: Priced) -> list[str]:
    """Lists possible improvements over the winner, by the rules of `report --advise` as far as a plan can apply
    them."""
    plan, config = best.plan, search.config
    seconds, found = plan.seconds, []
    if plan.prediction.exposed > EXPOSED * seconds:
        waits: dict[str, float] = {}
        for one in plan.report["collectives"]:
            waits[one["axis"]] = waits.get(one["axis"], 0.0) + one["exposed_seconds"]
        axis = max(sorted(waits), key=lambda name: waits[name])
        found.append(
            f"communication-bound: a GPU waits for {plan.prediction.exposed / seconds:.0%} of a step, most of it along "
            f"{axis} ({waits[axis]:.2g} s); more rows a step, fewer GPUs or a faster network would change that"
        )
    if plan.prediction.bubble > IDLE * seconds:
        found.append(
            f"bubble: stages are idle for {plan.prediction.bubble / seconds:.0%} of a step; a larger batch has more "
            "microbatches"
        )
    if plan.peak < MEMORY * plan.limit:
        found.append(
            f"memory unused: a step uses {plan.peak / plan.limit:.0%} of it; the run also fits on fewer GPUs, see "
            "--gpus with several numbers"
        )
    interval, every = best.faults.interval_seconds, config.checkpoint.every_steps * seconds
    if config.checkpoint.every_minutes is None and not interval / 3 < every < 3 * interval:
        told = f"every {span(every)}" if every else "only at the end"
        often = "often" if 0 < every < interval else "rarely"
        found.append(
            f"checkpoints too {often}: the config saves {told}, and every {span(interval)} loses least; set "
            "checkpoint.every_minutes: auto and checkpoint.every_steps: 0"
        )
    is_left = not search.precisions and search.dtype(None) == "bfloat16"
    if is_left and "float8" in search.rates.products:
        found.append("float8 was not tried: --precisions bfloat16,float8 does")
    return found


def _estimated(guess: Guess, best: Plan) -> str:
    return f"estimated at {_times(guess, best)} of the winner's step"


def _times(guess: Guess, best: Plan) -> str:
    return f"{guess.seconds / best.guess.seconds:.2f} ×"
