"""Simulates a long run on many devices: faults occur at random, and the run is restarted as a real one is.

The policy of restarts and the timer of saves are the functions that launchers and runs call. Time is divided into the
parts of `PARTS`, which add up. All times are in seconds.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxmnt.checkpoint.retention import SaveTimer
from jaxmnt.fleet.fault_rates import FaultRate, rate_of_all
from jaxmnt.fleet.restart_policy import Start, decide

PARTS = {
    "steps": "steps that count",
    "checkpoint": "saving, while training waits",
    "again": "steps that are repeated",
    "detect": "from a fault until the run notices it",
    "start": "from a new start to its first step",
    "between": "waiting for another allocation, or for a lost node",
}
"""The parts of the time of a simulated run, each with its description."""

_BLAMED_KINDS = ("node", "silent", "hang")
"""Kinds of faults for which a node is blamed."""


@dataclass(frozen=True)
class Fleet:
    """The devices of a run, and the times that its faults and saves cost. The defaults are assumptions."""

    gpus: int
    rates: Sequence[FaultRate]
    start: float
    """From a new start to its first step."""
    blocked: float
    """Time for which a save blocks training."""
    written: float
    """Time from the beginning of a save to its commit."""
    gpus_per_node: int = 8
    spare_nodes: int = 0
    save_minutes: float | None = None
    """Time between saves; None for the interval that the run chooses itself."""
    restarts: int | None = None
    """Maximum number of restarts in an allocation; None for no maximum."""
    step: float = 20.0
    """Time of a step."""
    requeue: float = 1800.0
    """From the end of an allocation to the beginning of the next."""
    closed: float = 1.0
    """From the end of a process to the end of the others."""
    silence: float = 30.0
    """From the last sign of life of a host until the run notices (cluster.silence_timeout_seconds)."""
    hang: float = 60.0
    """From the beginning of a hang until the run notices."""
    wrong_after: float = 3600.0
    """Work that is lost if a device computes wrongly."""
    warned: float = 0.8
    """Share of maintenance that is announced early enough for a save."""
    lost_node: float = 18.0
    """Time until an allocation goes on without a lost node."""
    fault_factor: float = 1.0
    """Factor by which faults are more frequent than `rates` say."""

    @property
    def faults_per_second(self) -> float:
        return rate_of_all(self.rates) * self.gpus * self.fault_factor / 3600


@dataclass
class Outcome:
    """The result of a simulated run."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    """Time by part."""
    faults: int = 0
    requeues: int = 0
    given_up: str = ""
    """Why the run was given up; empty if it lasted to the end."""

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def effective(self) -> float:
        """Effective training time ratio: the share of the time that went into steps that count."""
        return self.seconds["steps"] / self.total


def simulate(fleet: Fleet, days: float, seed: int) -> Outcome:
    """Simulates a run of so many days. The same arguments give the same outcome."""
    return _Simulation(fleet, days * 86400, random.Random(seed)).run()  # noqa: S311 - no secret depends on it


class _Simulation:
    """One run. Time passes in `_spend`, and the work of the run is counted in seconds of steps."""

    def __init__(self, fleet: Fleet, end: float, generator: random.Random):
        self._fleet, self._end, self._random = fleet, end, generator
        self._now = 0.0
        self._outcome = Outcome()
        self._work = self._committed = 0.0
        """Seconds of steps that the run has behind it, and those in its newest checkpoint."""
        self._starts: list[Start] = []
        self._in_allocation = 0
        timer = SaveTimer(fleet.save_minutes or "auto", 1 / fleet.faults_per_second, 0.0)
        timer.record_cost(fleet.blocked, fleet.written)
        assert timer.seconds is not None
        self._interval = timer.seconds

    def run(self) -> Outcome:
        self._spend("start", self._fleet.start)
        while self._now < self._end and not self._outcome.given_up:
            self._train_until(self._now + self._random.expovariate(self._fleet.faults_per_second))
            if self._now < self._end:
                self._fail()
        return self._outcome

    def _spend(self, part: str, seconds: float) -> None:
        seconds = min(seconds, self._end - self._now)
        self._outcome.seconds[part] += seconds
        self._now += seconds

    def _train_until(self, fault_time: float) -> None:
        """Takes steps and saves until the next fault. A save counts once it is written."""
        stop = min(fault_time, self._end)
        pending: tuple[float, float] | None = None  # time of the commit, and the work in it
        since_save = 0.0
        while self._now < stop:
            worked = min(self._interval - since_save, stop - self._now)
            self._spend("steps", worked)
            self._work += worked
            since_save += worked
            if pending and self._now >= pending[0]:
                self._committed, pending = pending[1], None
            if since_save >= self._interval - 1e-6 and self._now < stop:
                self._spend("checkpoint", min(self._fleet.blocked, stop - self._now))
                pending, since_save = (self._now + self._fleet.written, self._work), 0.0

    def _fail(self) -> None:
        """Lets a fault occur, and starts the run again, until a start succeeds or the run is given up."""
        kind = self._draw_kind()
        step: int | None = int(self._work / self._fleet.step) + 1
        self._lose_work(kind)
        self._spend("detect", {"silent": self._fleet.silence, "hang": self._fleet.hang}.get(kind, self._fleet.closed))
        self._outcome.faults += 1
        while self._start_again(kind, step):
            # A fault may also occur during a start, which then has taken no step.
            until_fault = self._random.expovariate(self._fleet.faults_per_second)
            if until_fault >= self._fleet.start or self._now >= self._end:
                self._spend("start", self._fleet.start)
                return
            self._spend("start", until_fault)
            self._outcome.faults += 1
            kind, step = "node", None

    def _draw_kind(self) -> str:
        kinds = [rate.kind for rate in self._fleet.rates]
        return self._random.choices(kinds, [rate.per_gpu_hour for rate in self._fleet.rates])[0]

    def _lose_work(self, kind: str) -> None:
        """Returns to the newest checkpoint. Half of the step that the fault interrupts was taken as well."""
        lost = self._work - self._committed
        if kind == "maintenance" and self._random.random() < self._fleet.warned:
            lost = 0.0  # saved when it was asked to
        if kind == "wrong":
            lost = max(lost, min(self._work, self._fleet.wrong_after))
        self._work -= lost
        self._committed = self._work
        repeated = min(lost + self._fleet.step / 2, self._outcome.seconds["steps"])
        self._outcome.seconds["steps"] -= repeated
        self._outcome.seconds["again"] += repeated

    def _start_again(self, kind: str, step: int | None) -> bool:
        """Decides as launchers do after a failed start. Returns False if the run is given up."""
        fleet = self._fleet
        nodes = -(-fleet.gpus // fleet.gpus_per_node) + fleet.spare_nodes
        node = f"node-{self._random.randrange(nodes)}" if kind in _BLAMED_KINDS else None
        self._starts.append(Start(self._now, True, step, kind, node))
        self._in_allocation += 1
        decision = decide(
            self._starts, self._in_allocation, fleet.gpus, restarts=fleet.restarts, spare_nodes=fleet.spare_nodes
        )
        if decision.action == "end":
            self._outcome.given_up = decision.reason
            return False
        # Without spare nodes, an allocation that has lost a node is useless.
        if decision.action == "requeue" or (node and not fleet.spare_nodes):
            self._outcome.requeues += 1
            self._in_allocation = 0
            self._spend("between", fleet.requeue)
        elif node:
            self._spend("between", fleet.lost_node)
        return True
