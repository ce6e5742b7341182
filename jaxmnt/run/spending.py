"""Tracks the cost of a run over all its starts and enforces `run.budget`, in process 0."""

import time
from pathlib import Path

from jaxmnt.config.schema import Config
from jaxmnt.errors import ConfigError
from jaxmnt.report.goodput import cost_of
from jaxmnt.report.history import attempts_so_far
from jaxmnt.run.preemption import StopRequest
from jaxmnt.telemetry.events import Events
from jaxmnt.telemetry.progress import StatusLine

SPENT = "run.budget is spent"
"""The reason with which a run is asked to stop when it has spent its budget."""
_WARNING_FRACTION = 0.8
"""Fraction of the budget at which a warning is printed."""
_HOUR_SECONDS = 3600.0


def check_price(config: Config) -> None:
    """Raises `ConfigError` if the config has a budget, but no price."""
    if config.run.budget is not None and not config.launch.cost_per_gpu_hour:
        raise ConfigError("run.budget: launch.cost_per_gpu_hour is not set; set it to the cost of one GPU for one hour")


class Spending:
    """The cost of this start and earlier starts: device-hours times the price of one."""

    def __init__(self, price: float, budget: float | None, run_dir: Path, devices: int, elapsed: float):
        """This start uses `devices` devices, each of which costs `price` per hour, and began `elapsed` seconds ago.

        Raises `ConfigError` if earlier starts have already spent the `budget`.
        """
        self._cost_per_second, self._budget = price * devices / _HOUR_SECONDS, budget
        self._began = time.monotonic() - elapsed
        self._warned = False
        self._earlier_cost = cost_of(attempts_so_far(run_dir), price) or 0.0
        if self._budget is not None and self._earlier_cost >= self._budget:
            raise ConfigError(
                f"run.budget: {self._budget:,.2f} is spent, {self._earlier_cost:,.2f} by earlier starts; raise it "
                "to continue"
            )

    @property
    def spent(self) -> float:
        """The cost so far."""
        return self._earlier_cost + self._cost_per_second * (time.monotonic() - self._began)

    def outlook(self, seconds: float) -> str:
        """Describes the cost so far and the cost once `seconds` more have passed."""
        return f"cost {self.spent:,.2f} of {self.spent + self._cost_per_second * seconds:,.2f}"

    def check(self, step: int, stop: StopRequest, events: Events, status: StatusLine) -> None:
        """Warns after a step if the cost is close to the budget, and asks the run to stop if it has reached the
        budget."""
        if self._budget is None or stop.wanted:
            return
        if self.spent >= self._budget:
            events.write("budget", step=step, spent=self.spent, budget=self._budget)
            stop.ask(SPENT)
        elif self.spent >= _WARNING_FRACTION * self._budget and not self._warned:
            self._warned = True
            events.write("budget", step=step, spent=self.spent, budget=self._budget)
            status.line(f"WARNING step {step}: {self.spent:,.2f} of run.budget ({self._budget:,.2f}) is spent")
