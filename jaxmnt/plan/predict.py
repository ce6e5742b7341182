"""Predicts the time of a step from the compiled program, with its range and its components."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxmnt.plan.estimate import CONTENTION, HOST_SECONDS
from jaxmnt.plan.rates import Rates
from jaxmnt.plan.timeline import Timeline
from jaxmnt.training.spec import StepSpec

LOW, HIGH = 0.9, 1.2
"""Range of a step's time, as multiples of the prediction. It holds nine in ten published runs of publishers whose runs
the rates were not fitted to (`benchmarks/published.py`)."""


def with_range(shown: Callable[[float], str], value: float) -> str:
    """Formats a time or cost that is proportional to the step time with `shown`, together with its range."""
    return f"{shown(value)} ({shown(LOW * value)} to {shown(HIGH * value)})"


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step. The parts add up to it."""

    work: float
    """Matrix products, attention and all other computation of the device."""
    exposed: float
    """Communication that the device waits for."""
    bubble: float
    """Idle time of a pipeline stage."""
    contention: float
    """Slowdown of work beside communication."""
    host: float
    """Launching the step and, on CPUs, mapping its temporary memory."""

    @property
    def seconds(self) -> float:
        return self.work + self.exposed + self.bubble + self.contention + self.host

    def to_json(self) -> dict[str, Any]:
        parts = {f"{name}_seconds": round(value, 6) for name, value in vars(self).items()}
        return {"step_seconds": round(self.seconds, 4), "from": LOW * self.seconds, "to": HIGH * self.seconds, **parts}


def predict_step(spec: StepSpec, timeline: Timeline, rates: Rates, temporary: int) -> Prediction:
    """Predicts a step from its replay, in which idle stages take no time; `temporary` is its temporary memory in
    bytes."""
    hidden = max(0.0, sum(played.seconds for played in timeline.collectives) - timeline.exposed)
    idle = spec.schedule.idle_share() if spec.schedule.stages > 1 else 0.0
    # The longest loop is the one over ticks.
    looped = [iteration.times * iteration.seconds for iteration in timeline.rounds if iteration.times > 1]
    return Prediction(
        work=timeline.seconds - timeline.exposed,
        exposed=timeline.exposed,
        bubble=idle * max(looped, default=timeline.seconds),
        contention=CONTENTION * hidden,
        host=HOST_SECONDS + rates.page_fault_seconds(temporary),
    )
