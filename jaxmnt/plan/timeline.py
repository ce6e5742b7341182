"""Replays a compiled program, to show which work hides each collective.

The replay has four timelines, for work and for communication within hosts, between hosts, and to host memory. The
collectives on a timeline run one after another. While an asynchronous collective runs, the device continues to work
until the instruction that waits for the collective. A synchronous collective blocks the device. Between start and wait
there is only work that does not need the collective, so whatever the replay hides can be hidden.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from jaxmnt.plan.costs import Costs
from jaxmnt.plan.hlo import HOST_COPY, Collective, Instruction, Program, collective_of
from jaxmnt.plan.rates import Rates


@dataclass
class CollectiveTime:
    """All executions of one collective in a step. Times are in seconds."""

    collective: Collective
    times: float = 0.0
    """Number of executions, which branches may make fractional."""
    seconds: float = 0.0
    """Total duration of all executions."""
    exposed: float = 0.0
    """Time for which the device waits for the collective."""
    flops: float = 0.0
    """FLOPs of matrix products and attention between the start of the collective and the wait for it."""
    work_meanwhile: float = 0.0
    """Time for which the device works between the start of the collective and the wait for it."""
    span: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Times, from the beginning of a round, at which the collective begins, ends, and the device starts to wait for
    it."""


@dataclass
class Round:
    """One pass through a computation that communicates, which is the body of a loop, a branch, or the whole program."""

    name: str
    times: float = 0.0
    """Number of passes in a step."""
    seconds: float = 0.0
    """Duration of one pass."""
    collectives: list[CollectiveTime] = field(default_factory=list)
    scopes: tuple[str, ...] = ()
    """Scopes in the source from which the instructions of this computation come, without those of nested ones."""


@dataclass
class Work:
    """All executions in a step of one instruction that multiplies nothing."""

    instruction: Instruction
    times: float = 0.0
    """Number of executions in a step."""
    seconds: float = 0.0
    """Total duration of all executions."""


@dataclass
class Condition:
    """All evaluations in a step of one condition: of branches, or of a loop whose trip count the compiler does not
    know. On GPUs, XLA copies its value to the host, which waits for it. So nothing that comes before the condition
    runs at the same time as what comes after it."""

    is_loop: bool
    scopes: tuple[str, ...]
    """Scopes in the source from which the instructions of the branches, or of the loop's body, come."""
    times: float = 0.0
    """Number of evaluations in a step."""


@dataclass
class Timeline:
    """A replayed step."""

    seconds: float
    flops: float
    collectives: list[CollectiveTime]
    """Collectives in program order."""
    rounds: list[Round]
    other_work: list[Work]
    """Work other than matrix products and attention, slowest first."""
    conditions: list[Condition] = field(default_factory=list)
    """Conditions in program order."""

    @property
    def exposed(self) -> float:
        """Seconds for which the device waits for collectives."""
        return sum(collective_time.exposed for collective_time in self.collectives)


BranchShare = Callable[[str], float | None]
"""A function from the source name of an operation in a branch to the share of executions in which the branch is taken,
or to None if that is unknown."""


def replay_program(
    program: Program,
    devices: int,
    rates: Rates | None = None,
    host_of: Callable[[int], int] = lambda device: 0,
    share: BranchShare = lambda op_name: None,
) -> Timeline:
    """Replays a step of the program on one of `devices` devices, which all do the same. Without `rates` nothing takes
    time, and only traffic is counted."""
    replayer = _Replayer(program, devices, rates, host_of, share)
    end = replayer.replay_computation(program.entry, _Clocks(), 1.0, False)
    other_work = sorted(replayer.other_work.values(), key=lambda work: -work.seconds)
    return Timeline(
        end.work, end.flops, list(replayer.collectives.values()), list(replayer.rounds.values()), other_work,
        list(replayer.conditions.values()),
    )  # fmt: skip


@dataclass(frozen=True)
class _Clocks:
    """The current times of a device and its links in seconds, and the FLOPs done so far."""

    work: float = 0.0
    """When the device finishes its current work."""
    links: tuple[float, ...] = (0.0, 0.0, 0.0)
    """When each link becomes free: the one within the host, the one between hosts, and the one to host memory."""
    flops: float = 0.0


RunningCollectives = dict[str, tuple[CollectiveTime, _Clocks, float]]
"""Collectives that have started, by name of the instruction: the collective, the clocks at its start, and when it
ends."""


class _Replayer:
    """Walks through a program and collects its collectives, rounds and other work."""

    def __init__(
        self, program: Program, devices: int, rates: Rates | None, host_of: Callable[[int], int], share: BranchShare
    ):
        self._program = program
        self._devices = devices
        self._rates = rates
        self._host_of = host_of
        self._share = share
        self._costs = None if rates is None else Costs(program, rates)
        self.collectives: dict[tuple[str, str], CollectiveTime] = {}
        self.rounds: dict[str, Round] = {}
        self.other_work: dict[tuple[str, str], Work] = {}
        self.conditions: dict[tuple[str, str], Condition] = {}

    def replay_computation(self, name: str, clocks: _Clocks, times: float, in_branch: bool) -> _Clocks:
        """Replays a computation that runs `times` times per step. `in_branch` is True inside a branch of a condition.
        Returns the clocks after the computation."""
        round_start = clocks
        running = RunningCollectives()
        sent_here: list[CollectiveTime] = []
        for instruction in self._program.computations[name]:
            if instruction.opcode == "while":
                clocks = self._replay_loop(name, instruction, clocks, times, in_branch)
            elif instruction.opcode == "conditional":
                clocks = self._replay_condition(name, instruction, clocks, times, in_branch)
            elif instruction.opcode in ("call", "async-start") and instruction.callee in self._program.computations:
                clocks = self.replay_computation(instruction.callee, clocks, times, in_branch)
            elif (collective := collective_of(instruction, self._devices)) is not None:
                assert not math.isnan(times), f"{name} sends in a loop of unknown length"
                collective_time = self.collectives.setdefault((name, instruction.name), CollectiveTime(collective))
                sent_here.append(collective_time)
                clocks = self._start_collective(collective_time, instruction.name, clocks, times, running, round_start)
            elif instruction.opcode.endswith("-done") and instruction.operands[0] in running:
                clocks = _wait_for(*running[instruction.operands[0]], clocks, times, round_start)
            elif self._costs is not None:
                seconds, flops = self._costs.cost(name, instruction)
                if seconds and not flops and not math.isnan(times):
                    work = self.other_work.setdefault((name, instruction.name), Work(instruction))
                    work.times += times
                    work.seconds += times * seconds
                clocks = replace(clocks, work=clocks.work + seconds, flops=clocks.flops + flops)
        if sent_here:
            self._record_round(name, sent_here, clocks.work - round_start.work, times)
        return clocks

    def _start_collective(
        self,
        collective_time: CollectiveTime,
        name: str,
        clocks: _Clocks,
        times: float,
        running: RunningCollectives,
        round_start: _Clocks,
    ) -> _Clocks:
        """Starts a collective as soon as its link is free. A synchronous collective also blocks the device."""
        collective = collective_time.collective
        seconds = self._duration(collective)
        collective_time.times += times
        collective_time.seconds += times * seconds
        link = self._link_index(collective)
        begin = max(clocks.work, clocks.links[link])
        end = begin + seconds
        links = tuple(end if index == link else busy_until for index, busy_until in enumerate(clocks.links))
        collective_time.span = (begin - round_start.work, end - round_start.work, clocks.work - round_start.work)
        if collective.asynchronous:
            running[name] = (collective_time, clocks, end)
            return replace(clocks, links=links)
        collective_time.exposed += times * (end - clocks.work)
        return replace(clocks, work=end, links=links)

    def _link_index(self, collective: Collective) -> int:
        """Returns the index in `_Clocks.links` of the link that a collective occupies."""
        if collective.kind == HOST_COPY:
            return 2
        crosses_hosts = any(len(set(map(self._host_of, group))) > 1 for group in collective.groups)
        return 1 if crosses_hosts else 0

    def _duration(self, collective: Collective) -> float:
        """Returns the duration of one execution of a collective in seconds; 0 without rates."""
        if self._rates is None:
            return 0.0
        if collective.kind == HOST_COPY:
            return self._rates.copy_seconds(collective.payload)
        return self._rates.collective_seconds(collective.kind, collective.payload, collective.groups, self._host_of)

    def _replay_loop(
        self, computation: str, instruction: Instruction, clocks: _Clocks, times: float, in_branch: bool
    ) -> _Clocks:
        """Replays two iterations of a loop in a computation. The first may wait for earlier work, and the second
        represents all others. A loop of unknown length is replayed once."""
        body, iterations = instruction.loop
        is_unknown = math.isnan(iterations)
        if not instruction.is_counted_loop:
            evaluations = 1 + (1 if is_unknown else iterations)
            self._record_condition(computation, instruction, [body], times * evaluations)
        if iterations == 0:
            return clocks
        after_first = self.replay_computation(body, clocks, math.nan if is_unknown else times, in_branch)
        if is_unknown or iterations <= 1:
            return after_first
        remaining = iterations - 1
        after_second = self.replay_computation(body, after_first, times * remaining, in_branch)
        extrapolated = lambda first, second: first + remaining * (second - first)
        work = extrapolated(after_first.work, after_second.work)
        # Each iteration waits for the collectives that it starts. So a link that the loop uses becomes free as long
        # before the end of the loop as it became free before the end of the second iteration.
        links = tuple(
            first if second == first else work - (after_second.work - second)
            for first, second in zip(after_first.links, after_second.links, strict=True)
        )
        return _Clocks(work, links, extrapolated(after_first.flops, after_second.flops))

    def _replay_condition(
        self, computation: str, instruction: Instruction, clocks: _Clocks, times: float, in_branch: bool
    ) -> _Clocks:
        """Returns the weighted mean of the clocks after each branch of a condition in a computation. The weights of an
        outermost condition come from the `share` of the replay. A nested condition always takes its longest branch."""
        branches = instruction.branches
        self._record_condition(computation, instruction, branches, times)
        shares = [None if in_branch else self._taken_share(branch) for branch in branches]
        if all(share is None for share in shares):
            longest = max(branches, key=lambda branch: len(self._program.computations[branch]))
            shares = [1.0 if branch == longest else 0.0 for branch in branches]
        # Branches of unknown share divide the rest equally.
        share_of_unknown = 1 - sum(share for share in shares if share is not None)
        share_of_unknown /= max(1, sum(share is None for share in shares))
        ends = []
        for branch, share_if_known in zip(branches, shares, strict=True):
            share = share_of_unknown if share_if_known is None else share_if_known
            ends.append((share, self.replay_computation(branch, clocks, times * share, True) if share else clocks))
        weighted_mean = lambda clock: sum(share * clock(end) for share, end in ends)
        links = tuple(weighted_mean(lambda end, link=link: end.links[link]) for link in range(len(clocks.links)))
        return _Clocks(weighted_mean(lambda end: end.work), links, weighted_mean(lambda end: end.flops))

    def _taken_share(self, name: str) -> float | None:
        """Returns the share of executions in which a branch is taken, judged by a scope in the branch; None if
        unknown."""
        for instruction in self._program.computations[name]:
            if (share := self._share(instruction.op_name)) is not None:
                return share
            if instruction.opcode == "call" and instruction.callee is not None:
                return self._taken_share(instruction.callee)
        return None

    def _record_round(self, name: str, sent_here: list[CollectiveTime], seconds: float, times: float) -> None:
        """Records a pass through a computation. The times of the last pass are those that are reported."""
        recorded = self.rounds.setdefault(name, Round(name))
        recorded.times += times
        recorded.seconds = seconds
        recorded.collectives = sent_here
        recorded.scopes = self._scopes([name])

    def _record_condition(
        self, computation: str, instruction: Instruction, controlled: list[str], times: float
    ) -> None:
        """Records evaluations of a condition. `controlled` are the computations that it may run. `times` is NaN within
        a loop of unknown length, whose conditions are not counted."""
        if math.isnan(times):
            return
        is_loop = instruction.opcode == "while"
        condition = Condition(is_loop, self._scopes(controlled))
        self.conditions.setdefault((computation, instruction.name), condition).times += times

    def _scopes(self, names: list[str]) -> tuple[str, ...]:
        """Returns the sorted scopes in the source from which the instructions of computations come."""
        op_names = (instruction.op_name for name in names for instruction in self._program.computations[name])
        return tuple(sorted({scope for op_name in op_names for scope in op_name.split("/")}))


def _wait_for(
    collective_time: CollectiveTime,
    clocks_at_start: _Clocks,
    end: float,
    clocks: _Clocks,
    times: float,
    round_start: _Clocks,
) -> _Clocks:
    """Blocks the device until a running collective ends, and records the work that hid the collective."""
    exposed = max(0.0, end - clocks.work)
    collective_time.exposed += times * exposed
    collective_time.flops += times * (clocks.flops - clocks_at_start.flops)
    collective_time.work_meanwhile += times * (clocks.work - clocks_at_start.work)
    collective_time.span = (*collective_time.span[:2], clocks.work - round_start.work)
    return replace(clocks, work=clocks.work + exposed)
