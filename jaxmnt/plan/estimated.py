"""Ways to split a run as they are estimated, priced without compiling any: an answer in seconds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxmnt.plan.answer import Wish
from jaxmnt.plan.goal import Faults, Goal, faults_of, reach
from jaxmnt.plan.search import Guess, Search, describe
from jaxmnt.telemetry.progress import table
from jaxmnt.units import count, seconds_text, size

SHOWN = 6
"""Ways that are shown for each number of GPUs."""


@dataclass(frozen=True)
class Estimated:
    """A way to split the run, and what it would take to the goal."""

    guess: Guess
    faults: Faults
    goal: Goal

    @property
    def gpus(self) -> int:
        return self.guess.candidate.gpus

    def to_json(self) -> dict[str, Any]:
        """As plain values; seconds, bytes and days."""
        return {
            "gpus": self.gpus, "settings": self.guess.candidate.settings,
            "estimated_seconds": round(self.guess.seconds, 4), "estimated_peak": round(self.guess.memory.peak),
            "days": round(self.goal.days, 3), "cost": None if self.goal.cost is None else round(self.goal.cost),
        }  # fmt: skip


def fastest(search: Search, gpus: int, wish: Wish) -> list[Estimated]:
    """The ways that are estimated to reach the goal first and may fit."""
    ways = [_estimated(search, guess, wish) for guess in search.distinct(search.guesses(gpus))[:SHOWN]]
    return sorted(ways, key=lambda one: one.goal.seconds)


def _estimated(search: Search, guess: Guess, wish: Wish) -> Estimated:
    one, data = guess.candidate, search.config.data
    rate = data.global_batch_size * data.sequence_length / guess.seconds
    faults = faults_of(
        one.gpus, guess.memory.state / one.data, search.network.devices_per_host,
        hours_between=wish.hours_between_failures, restart_seconds=wish.restart_seconds,
    )  # fmt: skip
    return Estimated(guess, faults, reach(wish.tokens, rate, faults, one.gpus, wish.price))


def show_estimates(ways: Sequence[Estimated], best: Estimated, wish: Wish) -> str:
    """A line that answers, and a table."""
    money = "" if best.goal.cost is None else f" for {best.goal.cost:,.0f}"
    answer = (
        f"answer  {count(wish.tokens)} tokens in about {best.goal.days:,.1f} days{money}: {best.gpus} GPUs, "
        f"{describe(best.guess.candidate)}"
    )
    rows: list[tuple[str, ...]] = [("GPUs", "mesh", "step", "memory", "days", "cost")]
    for one in ways:
        cost = "-" if one.goal.cost is None else f"{one.goal.cost:,.0f}"
        step, peak = seconds_text(one.guess.seconds), size(one.guess.memory.peak)
        rows.append((str(one.gpus), describe(one.guess.candidate), step, peak, f"{one.goal.days:,.1f}", cost))
    note = "note    all of this is estimated; --compile 6 compiles the fastest ways, and says whether they fit"
    return "\n\n".join([answer, "\n".join(table(rows, right={0, 2, 3, 4, 5})), note])
