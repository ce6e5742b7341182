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
_WARN_SHARE = 0.8
_HOUR = 3600.0


def check_price(config: Config) -> None:
    """Raises `ConfigError` if there is a budget, but no price."""
    if config.run.budget is not None and not config.launch.cost_per_gpu_hour:
        raise ConfigError("run.budget: launch.cost_per_gpu_hour is not set; give what an hour of a GPU costs")


class Spending:
    """The cost of this start and those before it: device-hours times their price."""

    def __init__(self, price: float, budget: float | None, run_dir: Path, devices: int, elapsed: float):
        """`price` is that of an hour of one of this start's `devices`; the start began `elapsed` seconds ago.

        Raises `ConfigError` if earlier starts have spent the `budget`.
        """
        self._per_second, self._budget = price * devices / _HOUR, budget
        self._since = time.monotonic() - elapsed
        self._warned = False
        self._before = cost_of(attempts_so_far(run_dir), price) or 0.0
        if self._budget is not None and self._before >= self._budget:
            raise ConfigError(
                f"run.budget: {self._budget:,.2f} is spent, {self._before:,.2f} by earlier starts; raise it to go on"
            )

    @property
    def spent(self) -> float:
        return self._before + self._per_second * (time.monotonic() - self._since)

    def outlook(self, seconds: float) -> str:
        """Describes the cost so far, and after this many more seconds."""
        return f"cost {self.spent:,.2f} of {self.spent + self._per_second * seconds:,.2f}"

    def check(self, step: int, stop: StopRequest, events: Events, status: StatusLine) -> None:
        """Warns after a step if the cost is near the budget, and asks the run to stop if it has reached it."""
        if self._budget is None or stop.wanted:
            return
        if self.spent >= self._budget:
            events.write("budget", step=step, spent=self.spent, budget=self._budget)
            stop.ask(SPENT)
        elif self.spent >= _WARN_SHARE * self._budget and not self._warned:
            self._warned = True
            events.write("budget", step=step, spent=self.spent, budget=self._budget)
            status.line(f"WARNING step {step}: {self.spent:,.2f} of run.budget ({self._budget:,.2f}) is spent")
