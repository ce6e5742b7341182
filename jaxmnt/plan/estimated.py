"""Computes time and cost of candidates from their estimates. As nothing is compiled, this takes seconds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxmnt.errors import counted
from jaxmnt.plan.answer import PlanRequest, faults_and_goal
from jaxmnt.plan.goal import Goal
from jaxmnt.plan.predict import with_range
from jaxmnt.plan.search import Guess, Search, describe
from jaxmnt.telemetry.progress import table
from jaxmnt.units import count, money, seconds_text, size, span

MAX_ESTIMATES = 6
"""Maximum number of candidates that are shown for each number of GPUs."""


@dataclass(frozen=True)
class Estimated:
    """A candidate with the estimated time and cost to reach the goal."""

    guess: Guess
    goal: Goal
    limit: int
    """Usable bytes of a GPU."""

    @property
    def fits(self) -> bool:
        """True if the candidate fits by estimate, without a tolerance for the errors of estimates."""
        return self.guess.memory.peak <= self.limit

    @property
    def gpus(self) -> int:
        return self.guess.candidate.gpus

    def to_json(self) -> dict[str, Any]:
        """Returns plain values for JSON, in seconds, bytes and days."""
        return {
            "gpus": self.gpus, "settings": self.guess.candidate.settings,
            "estimated_seconds": round(self.guess.seconds, 4), "estimated_peak": round(self.guess.memory.peak),
            "limit": self.limit,
            **self.goal.to_json(),
        }  # fmt: skip


def fastest_estimates(search: Search, gpus: int, request: PlanRequest) -> list[Estimated]:
    """Returns those candidates that may fit and would reach the goal fastest. Candidates that fit by estimate are
    preferred, and come first."""
    guesses = sorted(search.distinct(search.guesses(gpus)), key=lambda guess: not search.fits(guess))[:MAX_ESTIMATES]
    estimates = []
    for guess in guesses:
        _, goal = faults_and_goal(search, guess.candidate, guess.seconds, guess.memory.state, request)
        estimates.append(Estimated(guess, goal, search.limit))
    return sorted(estimates, key=lambda estimate: (not estimate.fits, estimate.goal.seconds))


def best_of(estimates: Sequence[Estimated], request: PlanRequest) -> Estimated:
    """Returns the best candidate for the goal. Candidates that fit by estimate are preferred and, on a tie, the one
    with fewer GPUs."""
    rank = lambda estimate: estimate.goal.cost if request.rank_by == "cost" else estimate.goal.seconds
    return min(estimates, key=lambda estimate: (not estimate.fits, rank(estimate), estimate.gpus))


def show_estimates(estimates: Sequence[Estimated], best: Estimated, request: PlanRequest) -> str:
    """Returns a text with a headline, a table of candidates, and notes."""
    cost = "" if best.goal.cost is None else f" for {with_range(money, best.goal.cost)}"
    answer = (
        f"answer  {count(request.tokens)} tokens in {with_range(span, best.goal.seconds)}{cost}: "
        f"{counted(best.gpus, 'GPU', 'GPUs')}, {describe(best.guess.candidate)}"
        + ("" if best.fits else f"; by estimate no candidate is sure to fit in the {size(best.limit)} that a GPU has")
    )
    rows: list[tuple[str, ...]] = [("GPUs", "mesh", "step", "memory", "takes", "cost")]
    for estimate in estimates:
        guess, goal = estimate.guess, estimate.goal
        peak = f"{size(guess.memory.peak)} ({guess.memory.peak / estimate.limit:.0%})"
        rows.append((
            str(estimate.gpus), describe(guess.candidate), seconds_text(guess.seconds), peak,
            span(goal.seconds), money(goal.cost),
        ))  # fmt: skip
    notes = ["note    these are estimates; --compile 6 compiles the fastest candidates and checks whether they fit"]
    if request.price is not None:
        notes.append(f"        cost is by the given price, {request.price:g} per GPU-hour")
    return "\n\n".join([answer, "\n".join(table(rows, right={0, 2, 3, 4, 5})), "\n".join(notes)])
