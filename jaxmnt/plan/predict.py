"""Predicts the time of a step from its compiled program, with a range, and as a sum of components."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxmnt.plan.estimate import CONTENTION, HOST_SECONDS
from jaxmnt.plan.rates import Rates
from jaxmnt.plan.timeline import Timeline
from jaxmnt.training.spec import StepSpec

LOW, HIGH = 0.9, 1.2
"""Ends of the range of a step's time, as multiples of the prediction. The range contains nine in ten published runs if
the rates are fitted without the other runs of their publisher (`benchmarks/published.py`)."""


def with_range(to_text: Callable[[float], str], value: float) -> str:
    """Formats a time or cost with `to_text`, followed by its range. `value` must be proportional to
    the step time."""
    return f"{to_text(value)} ({to_text(LOW * value)} to {to_text(HIGH * value)})"


@dataclass(frozen=True)
class Prediction:
    """The components of a step's time in seconds, which add up to the whole."""

    work: float
    """Matrix products, attention and all other computation of the device."""
    exposed: float
    """Communication that the device waits for."""
    bubble: float
    """Idle time of a pipeline stage."""
    contention: float
    """Slowdown of work that runs at the same time as communication."""
    host: float
    """Time to launch the step and, on CPUs, to map its temporary memory."""

    @property
    def seconds(self) -> float:
        return self.work + self.exposed + self.bubble + self.contention + self.host

    def to_json(self) -> dict[str, Any]:
        parts = {f"{name}_seconds": round(value, 6) for name, value in vars(self).items()}
        return {"step_seconds": round(self.seconds, 4), "from": LOW * self.seconds, "to": HIGH * self.seconds, **parts}


def predict_step(spec: StepSpec, timeline: Timeline, rates: Rates, temporary: int) -> Prediction:
    """Predicts a step from its replay, in which idle stages take no time. `temporary` is the size in bytes of the
    step's temporary memory."""
    hidden = max(0.0, sum(collective_time.seconds for collective_time in timeline.collectives) - timeline.exposed)
    idle = spec.schedule.idle_share() if spec.schedule.stages > 1 else 0.0
    # The longest loop is the one over ticks.
    loop_seconds = [iteration.times * iteration.seconds for iteration in timeline.rounds if iteration.times > 1]
    return Prediction(
        work=timeline.seconds - timeline.exposed,
        exposed=timeline.exposed,
        bubble=idle * max(loop_seconds, default=timeline.seconds),
        contention=CONTENTION * hidden,
        host=HOST_SECONDS + rates.page_fault_seconds(temporary),
    )
