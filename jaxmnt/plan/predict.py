"""What a step takes, predicted from the compiled program, with its range and what it goes into."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxmnt.plan.estimate import CONTENTION, HOST_SECONDS
from jaxmnt.plan.rates import Rates
from jaxmnt.plan.timeline import Timeline
from jaxmnt.training.spec import StepSpec

LOW, HIGH = 0.9, 1.2
"""A step takes between so many times what is predicted: nine in ten of the published runs did, of whose publisher the
rates had seen nothing (`benchmarks/published.py`)."""


def with_range(shown: Callable[[float], str], value: float) -> str:
    """A time or cost that goes with the step's, as `shown` writes it, with the range that a step's time has."""
    return f"{shown(value)} ({shown(LOW * value)} to {shown(HIGH * value)})"


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step. The parts add up to it."""

    work: float
    """Products, attention and all else that the device computes."""
    exposed: float
    """Communication that the device waits for."""
    bubble: float
    """A stage of a pipeline has nothing to do."""
    contention: float
    """Work is slower beside communication."""
    host: float
    """Starting the step, and on CPUs having its temporary memory mapped."""

    @property
    def seconds(self) -> float:
        return self.work + self.exposed + self.bubble + self.contention + self.host

    def to_json(self) -> dict[str, Any]:
        parts = {f"{name}_seconds": round(value, 6) for name, value in vars(self).items()}
        return {"step_seconds": round(self.seconds, 4), "from": LOW * self.seconds, "to": HIGH * self.seconds, **parts}


def predicted(spec: StepSpec, timeline: Timeline, rates: Rates, temporary: int) -> Prediction:
    """From the compiled step as it was played by the rates, in which a stage that is idle takes no time; `temporary` is
    its temporary memory in bytes."""
    hidden = max(0.0, sum(played.seconds for played in timeline.collectives) - timeline.exposed)
    idle = spec.schedule.idle_share() if spec.schedule.stages > 1 else 0.0
    looped = [one.times * one.seconds for one in timeline.rounds if one.times > 1]  # the longest is that over ticks
    return Prediction(
        work=timeline.seconds - timeline.exposed,
        exposed=timeline.exposed,
        bubble=idle * max(looped, default=timeline.seconds),
        contention=CONTENTION * hidden,
        host=HOST_SECONDS + rates.mapping(temporary),
    )
