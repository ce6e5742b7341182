"""Ways to split a run as they are estimated, priced without compiling any: an answer in seconds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxmnt.errors import counted
from jaxmnt.plan.answer import Wish, to_goal
from jaxmnt.plan.goal import Goal
from jaxmnt.plan.search import Guess, Search, describe
from jaxmnt.telemetry.progress import table
from jaxmnt.units import count, money, seconds_text, size, span

SHOWN = 6
"""Ways that are shown for each number of GPUs."""


@dataclass(frozen=True)
class Estimated:
    """A way to split the run, and what it would take to the goal."""

    guess: Guess
    goal: Goal

    @property
    def gpus(self) -> int:
        return self.guess.candidate.gpus

    def to_json(self) -> dict[str, Any]:
        """As plain values; seconds, bytes and days."""
        return {
            "gpus": self.gpus, "settings": self.guess.candidate.settings,
            "estimated_seconds": round(self.guess.seconds, 4), "estimated_peak": round(self.guess.memory.peak),
            **self.goal.to_json(),
        }  # fmt: skip


def fastest(search: Search, gpus: int, wish: Wish) -> list[Estimated]:
    """The ways that are estimated to reach the goal first and may fit."""
    guesses = search.distinct(search.guesses(gpus))[:SHOWN]
    goal = lambda one: to_goal(search, one.candidate, one.seconds, one.memory.state, wish)[1]
    return sorted((Estimated(one, goal(one)) for one in guesses), key=lambda one: one.goal.seconds)


def show_estimates(ways: Sequence[Estimated], best: Estimated, wish: Wish) -> str:
    """A line that answers, and a table."""
    cost = "" if best.goal.cost is None else f" for {money(best.goal.cost)}"
    answer = (
        f"answer  {count(wish.tokens)} tokens in about {span(best.goal.seconds)}{cost}: "
        f"{counted(best.gpus, 'GPU', 'GPUs')}, {describe(best.guess.candidate)}"
    )
    rows: list[tuple[str, ...]] = [("GPUs", "mesh", "step", "memory", "takes", "cost")]
    for one in ways:
        step, peak = seconds_text(one.guess.seconds), size(one.guess.memory.peak)
        takes, cost = span(one.goal.seconds), money(one.goal.cost)
        rows.append((str(one.gpus), describe(one.guess.candidate), step, peak, takes, cost))
    note = "note    all of this is estimated; --compile 6 compiles the fastest ways, and says whether they fit"
    return "\n\n".join([answer, "\n".join(table(rows, right={0, 2, 3, 4, 5})), note])
