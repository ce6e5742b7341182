"""Holds the result of a search, which is the plans that fit on each number of GPUs, with time, cost and reasons."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxmnt.config.mesh import MESH_AXES, STAGE_AXIS
from jaxmnt.plan.candidates import Candidate
from jaxmnt.plan.goal import RESTART_SECONDS, Faults, Goal, faults_of, time_and_cost
from jaxmnt.plan.predict import HIGH, LOW
from jaxmnt.plan.search import Guess, Plan, Search, describe
from jaxmnt.report.advice import MAX_EXPOSED_SHARE, MAX_IDLE_SHARE, MIN_MEMORY_SHARE
from jaxmnt.units import size, span


@dataclass(frozen=True)
class PlanRequest:
    """The goal of the run."""

    tokens: float
    rank_by: str
    """Criterion for ranking plans and numbers of GPUs: `time` or `cost`."""
    price: float | None
    """Price of one GPU-hour."""
    hours_between_failures: float | None = None
    """Mean hours between failures of the whole run; None to derive them from published failures of GPUs."""
    restart_seconds: float = RESTART_SECONDS


@dataclass(frozen=True)
class PricedPlan:
    """A plan with the time and money that it takes to reach the goal."""

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
    """The estimated candidates and the plans for one number of GPUs."""

    gpus: int
    guesses: list[Guess]
    priced: list[PricedPlan]
    """Plans that fit, sorted by their time to reach the goal; empty if nothing fits."""


def price_plan(
    search: Search, plan: Plan, request: PlanRequest, flops_per_token: float, peak: float | None
) -> PricedPlan:
    """Computes the time and money that a plan takes to reach the goal. `peak` are the FLOP/s of a GPU that count as an
    MFU of 1."""
    memory = plan.report["memory"]
    gpus = plan.candidate.gpus
    faults, goal = faults_and_goal(
        search, plan.candidate, plan.seconds, memory["params"] + memory["optimizer"], request
    )
    data = search.config.data
    tokens_per_second = data.global_batch_size * data.sequence_length / plan.seconds / gpus
    mfu = None if peak is None else tokens_per_second * flops_per_token / peak
    return PricedPlan(plan, gpus, tokens_per_second, mfu, faults, goal)


def faults_and_goal(
    search: Search, candidate: Candidate, step_seconds: float, state: float, request: PlanRequest
) -> tuple[Faults, Goal]:
    """Returns the expected failures, and the time and cost to reach the goal. Steps take `step_seconds`, and each
    device has `state` bytes of parameters and moments."""
    data = search.config.data
    faults = faults_of(
        # Replicas hold the same state, of which each host writes its share of one copy.
        candidate.gpus, state / candidate.data, search.network.devices_per_host,
        hours_between=request.hours_between_failures, restart_seconds=request.restart_seconds,
    )  # fmt: skip
    tokens_per_second = data.global_batch_size * data.sequence_length / step_seconds
    return faults, time_and_cost(request.tokens, tokens_per_second, faults, candidate.gpus, request.price)


def winner(answers: Sequence[Answer], request: PlanRequest) -> PricedPlan | None:
    """Returns the plan that reaches the goal first or at the lowest cost and, on a tie, the one with fewer GPUs."""
    plans = [plan for answer in answers for plan in answer.priced]
    cost = lambda goal: math.inf if goal.cost is None else goal.cost
    rank = cost if request.rank_by == "cost" else lambda goal: goal.seconds
    return min(plans, key=lambda plan: (rank(plan.goal), plan.gpus), default=None)


MIN_SCALING = 0.8
"""Minimum slope of the speed over the number of GPUs, on logarithmic axes, at which more GPUs still pay off: with
twice the GPUs, a run must be at least 2^0.8 = 1.74 times as fast."""


def knee(answers: Sequence[Answer]) -> int | None:
    """Returns the number of GPUs after which the next number scales with a slope below `MIN_SCALING`, or None."""
    points = [(answer.gpus, answer.priced[0].goal.seconds) for answer in answers if answer.priced]
    points = [(gpus, seconds) for gpus, seconds in points if math.isfinite(seconds)]
    for (fewer_gpus, fewer_gpus_seconds), (gpus, seconds) in itertools.pairwise(points):
        # The slope of the curve on logarithmic axes: 1 if twice the GPUs take half the time.
        if math.log(fewer_gpus_seconds / seconds) / math.log(gpus / fewer_gpus) < MIN_SCALING:
            return fewer_gpus
    return None


def reasons(search: Search, answer: Answer) -> list[str]:
    """Returns lines that explain with numbers why the winner wins."""
    best = answer.priced[0].plan
    if answer.gpus == 1:
        return ["there is only one GPU, so nothing is split"]
    lines = [
        _data_parallel_reason(search, answer, best),
        *_axis_reasons(search, answer, best),
        _zero_reason(search, answer, best),
        _too_large_reason(search, answer, best),
    ]
    return [line for line in lines if line]


def _data_parallel_reason(search: Search, answer: Answer, best: Plan) -> str:
    """Says whether the run fits with data parallelism alone."""
    if best.candidate.data == answer.gpus:
        return "data parallelism alone fits, and nothing is faster"
    data_parallel_only = [guess for guess in answer.guesses if guess.candidate.data == answer.gpus]
    if not data_parallel_only:
        return "data parallelism alone: the batch cannot be split evenly among that many replicas"
    smallest = min(data_parallel_only, key=search.peak)
    peak = search.peak(smallest)
    if not search.fits(smallest):
        return (
            f"data parallelism alone needs at least {size(peak)} per GPU, {size(smallest.memory.state)} of it for "
            f"parameters and moments. That is {size(peak - search.limit)} more than the {size(search.limit)} that a "
            "GPU has, so the state is split"
        )
    fastest = min(filter(search.fits, data_parallel_only), key=lambda guess: guess.seconds)
    return f"data parallelism alone may fit, and is estimated at {_ratio_to_winner(fastest, best)} of the winner's step"


def _axis_reasons(search: Search, answer: Answer, best: Plan) -> list[str]:
    """Says what each form of parallelism saves, or what it would cost."""
    lines = []
    fitting = [guess for guess in answer.guesses if search.fits(guess)]
    for axis, name in ((axis.name, axis.parallelism) for axis in reversed(MESH_AXES) if axis.parallelism):
        axis_size = lambda guess, axis=axis: getattr(guess.candidate, axis)
        # If the winner uses the axis, compare it with the best mesh without it.
        if getattr(best.candidate, axis) > 1:
            without_axis = [guess for guess in fitting if axis_size(guess) == 1]
            if not without_axis:
                lines.append(f"without {name} nothing fits")
                continue
            rival = min(without_axis, key=lambda guess: guess.seconds)
            lines.append(f"without {name} the best is {describe(rival.candidate)}: {_estimated_ratio(rival, best)}")
            continue

        # Otherwise compare it with the best mesh that uses the axis.
        with_axis = [guess for guess in fitting if axis_size(guess) > 1]
        if not with_axis:
            lines.append(f"{name}: no mesh that was tried uses it and fits")
            continue
        rival = min(with_axis, key=lambda guess: guess.seconds)
        links = rival.estimate.links
        waits = (
            f", in which a GPU waits {links[axis].exposed:.2g} s for communication along it" if axis in links else ""
        )
        idle = f", and is idle for {rival.estimate.bubble:.2g} s" if axis == STAGE_AXIS else ""
        ratio = _estimated_ratio(rival, best)
        lines.append(f"with {name} the best is {describe(rival.candidate)}: {ratio}{waits}{idle}")
    return lines


def _zero_reason(search: Search, answer: Answer, best: Plan) -> str | None:
    """Says what time and memory the winner's mesh needs with the other ZeRO stages. Returns None if none was
    estimated."""
    zero = best.candidate.zero
    others = [
        f"{guess.candidate.zero} is {_estimated_ratio(guess, best)} and needs {size(search.peak(guess))}"
        + ("" if search.fits(guess) else ", which does not fit")
        for guess in sorted(answer.guesses, key=lambda guess: guess.candidate.zero)
        if guess.candidate.zero != zero and replace(guess.candidate, zero=zero) == best.candidate
    ]
    return f"ZeRO {zero} needs {size(search.peak(best.guess))}; {', '.join(others)}" if others else None


def _too_large_reason(search: Search, answer: Answer, best: Plan) -> str | None:
    """Names a mesh that would be faster but does not fit, and says how much memory it lacks. Of several, it is the one
    that needs the least memory. Returns None if there is no such mesh."""
    faster = [guess for guess in answer.guesses if guess.seconds < 0.99 * best.guess.seconds and not search.fits(guess)]
    if not faster:
        return None
    closest = min(faster, key=lambda guess: (search.peak(guess), guess.seconds))
    peak = search.peak(closest)
    return (
        f"{describe(closest.candidate)} would be faster, {_estimated_ratio(closest, best)}: it needs {size(peak)}, "
        f"{size(peak - search.limit)} more than a GPU has"
    )


def advice(search: Search, best: PricedPlan) -> list[str]:
    """Returns lines with possible improvements over the winner. The rules are those of `report --advise`, as far as a
    plan can apply them."""
    plan = best.plan
    config = search.config
    seconds = plan.seconds
    lines = []
    if plan.prediction.exposed > MAX_EXPOSED_SHARE * seconds:
        waits: dict[str, float] = {}
        for collective in plan.report["collectives"]:
            waits[collective["axis"]] = waits.get(collective["axis"], 0.0) + collective["exposed_seconds"]
        axis = max(sorted(waits), key=lambda name: waits[name])
        lines.append(
            f"communication-bound: a GPU waits for {plan.prediction.exposed / seconds:.0%} of a step, most of it along "
            f"{axis} ({waits[axis]:.2g} s); more rows per step, fewer GPUs or a faster network would change that"
        )
    if plan.prediction.bubble > MAX_IDLE_SHARE * seconds:
        lines.append(
            f"bubble: stages are idle for {plan.prediction.bubble / seconds:.0%} of a step; a larger batch has more "
            "microbatches"
        )
    if plan.peak < MIN_MEMORY_SHARE * plan.limit:
        lines.append(
            f"memory unused: a step uses {plan.peak / plan.limit:.0%} of it; the run also fits on fewer GPUs, so "
            "give --gpus several numbers"
        )
    best_interval = best.faults.interval_seconds
    config_interval = config.checkpoint.every_steps * seconds
    if config.checkpoint.every_minutes is None and not best_interval / 3 < config_interval < 3 * best_interval:
        configured = f"every {span(config_interval)}" if config_interval else "only at the end"
        frequency = "often" if 0 < config_interval < best_interval else "rarely"
        lines.append(
            f"checkpoints too {frequency}: the config saves {configured}, but every {span(best_interval)} loses the "
            "least time; set checkpoint.every_minutes: auto and checkpoint.every_steps: 0"
        )
    float8_is_untried = not search.precisions and search.dtype(None) == "bfloat16"
    if float8_is_untried and "float8" in search.rates.products:
        lines.append("float8 was not tried: set --precisions bfloat16,float8 to try it")
    return lines


def _estimated_ratio(guess: Guess, best: Plan) -> str:
    return f"estimated at {_ratio_to_winner(guess, best)} of the winner's step"


def _ratio_to_winner(guess: Guess, best: Plan) -> str:
    """Returns the ratio of a candidate's estimated step time to the winner's."""
    return f"{guess.seconds / best.guess.seconds:.2f} ×"
