"""Simulates a fleet as it is and with changes, each with several seeds, and describes the results."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxmnt.fleet.fault_rates import FAULT_KINDS
from jaxmnt.fleet.simulation import PARTS, Fleet, Outcome, simulate
from jaxmnt.fleet.start_time import Term
from jaxmnt.telemetry.progress import TableRows, table

_START_SECONDS = (60.0, 120.0, 300.0, 600.0, 900.0)
_SAVE_MINUTES = (10.0, 60.0)
_FAULT_FACTORS = (2.0, 5.0, 10.0, 20.0, 50.0)


@dataclass(frozen=True)
class Case:
    """A fleet that was simulated."""

    name: str
    fleet: Fleet
    outcomes: list[Outcome]

    @property
    def shares(self) -> dict[str, float]:
        """Mean share of the time by part."""
        return {
            part: statistics.fmean(outcome.seconds[part] / outcome.total for outcome in self.outcomes) for part in PARTS
        }

    @property
    def given_up(self) -> list[Outcome]:
        """The runs that were given up, the shortest first."""
        return sorted((outcome for outcome in self.outcomes if outcome.given_up), key=lambda outcome: outcome.total)

    def to_json(self) -> dict[str, Any]:
        ended = [{"after_days": outcome.total / 86400, "reason": outcome.given_up} for outcome in self.given_up]
        return {
            "case": self.name,
            "shares": self.shares,
            "faults": statistics.fmean(outcome.faults for outcome in self.outcomes),
            "new_allocations": statistics.fmean(outcome.requeues for outcome in self.outcomes),
            "runs": len(self.outcomes),
            "given_up": ended,
        }


def simulate_cases(fleet: Fleet, composed_start: float, days: float, seeds: int) -> Iterator[Case]:
    """Yields the fleet itself, and the fleet with changes one at a time."""
    half, double = fleet.spare_nodes // 2, 2 * fleet.spare_nodes
    changes: list[tuple[str, dict[str, Any]]] = [("as given", {})]
    changes += [(f"start {seconds:g} s", {"start": seconds}) for seconds in _START_SECONDS]
    changes.append((f"start {composed_start:.0f} s, composed of its terms", {"start": composed_start}))
    changes += [
        (f"{spares} spare nodes", {"spare_nodes": spares}) for spares in sorted({0, half, double} - {fleet.spare_nodes})
    ]
    changes += [(f"a save every {minutes:g} minutes", {"save_minutes": minutes}) for minutes in _SAVE_MINUTES]
    changes.append(("10 restarts in an allocation", {"restarts": 10}))
    changes += [(f"{factor:g} times the faults", {"fault_factor": factor}) for factor in _FAULT_FACTORS]
    for name, change in changes:
        changed = replace(fleet, **change)
        if change and changed == fleet:
            continue
        yield Case(name, changed, [simulate(changed, days, seed) for seed in range(seeds)])


def describe(fleet: Fleet, cases: Sequence[Case], terms: Sequence[Term], days: float) -> list[str]:
    """Returns the lines that show the results."""
    hours = 1 / (3600 * fleet.faults_per_second)
    lines = [
        f"{fleet.gpus:,} GPUs for {days:g} days, {len(cases[0].outcomes)} runs of each case; a fault every {hours:.3g} "
        "hours",
        "",
        *_fault_table(fleet),
        "",
        *_case_table(cases),
    ]
    lines += [f"{part:10}  {description}" for part, description in PARTS.items()]
    given_up = [case for case in cases if case.given_up]
    if given_up:
        lines += ["", "runs that were given up"]
    for case in given_up:
        first = case.given_up[0]
        lines.append(
            f"  {case.name}: {len(case.given_up)} of {len(case.outcomes)}, the first after {first.total / 86400:.1f} "
            f"days: {first.given_up}"
        )
    start: TableRows = [("a start is composed of", "seconds", "")]
    start += [(term.name, f"{term.seconds:.1f}", term.source) for term in terms]
    start.append(("in all", f"{sum(term.seconds for term in terms):.1f}", ""))
    return [*lines, "", *table(start, right={1})]


def _fault_table(fleet: Fleet) -> list[str]:
    rows: TableRows = [("fault", "per 1,000 GPUs and day", "shows as", "source")]
    for rate in fleet.rates:
        per_day = 24e3 * rate.per_gpu_hour * fleet.fault_factor
        rows.append((rate.kind, f"{per_day:.3f}", FAULT_KINDS[rate.kind], rate.source))
    return table(rows, right={1})


def _case_table(cases: Sequence[Case]) -> list[str]:
    rows: TableRows = [("share of the time, %", *PARTS, "faults", "new allocations", "given up")]
    for case in cases:
        shares = [f"{100 * share:.2f}" for share in case.shares.values()]
        faults = statistics.fmean(outcome.faults for outcome in case.outcomes)
        requeues = statistics.fmean(outcome.requeues for outcome in case.outcomes)
        given_up = f"{len(case.given_up)} of {len(case.outcomes)}" if case.given_up else ""
        rows.append((case.name, *shares, f"{faults:.0f}", f"{requeues:.1f}", given_up))
    return table(rows, right=set(range(1, len(rows[0]))))
