"""Replays a compiled program on four timelines: work, and communication within hosts, between hosts, and to host
memory. It shows which work hides each collective.

An asynchronous collective runs, one after another, while the device works on, until the instruction that waits for it;
a synchronous one blocks the device. Between start and wait there is only work that does not need the collective, so
whatever the replay hides can be hidden.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from jaxmnt.plan.costs import Costs
from jaxmnt.plan.hlo import HOST_COPY, Collective, Instruction, Program, collective_of
from jaxmnt.plan.rates import Rates


@dataclass
class CollectiveTime:
    """A collective of the program, over all of its executions in a step, in seconds."""

    collective: Collective
    times: float = 0.0
    seconds: float = 0.0
    """Total duration."""
    exposed: float = 0.0
    """Time that the device waits for it."""
    flops: float = 0.0
    """FLOPs of matrix products and attention between its start and the wait for it."""
    covered: float = 0.0
    """Time that the device works between its start and the wait for it."""
    span: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Within one round of its computation: when it begins, when it ends, and when the device starts to wait."""


@dataclass
class Round:
    """One pass through a computation that communicates: the body of a loop, a branch, or the whole program."""

    name: str
    times: float = 0.0
    seconds: float = 0.0
    collectives: list[CollectiveTime] = field(default_factory=list)
    scopes: tuple[str, ...] = ()
    """Scopes in the source of the instructions in the computation itself."""


@dataclass
class Work:
    """An instruction that multiplies nothing, over all of its executions in a step."""

    instruction: Instruction
    times: float = 0.0
    seconds: float = 0.0


@dataclass
class Timeline:
    """A replayed step."""

    seconds: float
    flops: float
    collectives: list[CollectiveTime]
    """Collectives in program order."""
    rounds: list[Round]
    other_work: list[Work]
    """Work of a step besides matrix products and attention, slowest first."""

    @property
    def exposed(self) -> float:
        return sum(played.exposed for played in self.collectives)


Share = Callable[[str], float | None]
"""Returns how often a condition is true, given the source name of an operation under it; None if unknown."""


def replay_program(
    program: Program,
    devices: int,
    rates: Rates | None = None,
    host_of: Callable[[int], int] = lambda device: 0,
    share: Share = lambda op_name: None,
) -> Timeline:
    """Replays a step of the program on each of `devices` devices. Without `rates` nothing takes time, and only traffic
    is counted."""
    replayer = _Replayer(program, devices, rates, host_of, share)
    end = replayer.replay_computation(program.entry, _Clocks(), 1.0, False)
    other_work = sorted(replayer.other_work.values(), key=lambda work: -work.seconds)
    return Timeline(
        end.work, end.flops, list(replayer.collectives.values()), list(replayer.rounds.values()), other_work
    )


@dataclass(frozen=True)
class _Clocks:
    """The current times of the device and its links in seconds, and the FLOPs done so far."""

    work: float = 0.0
    links: tuple[float, ...] = (0.0, 0.0, 0.0)
    """When the links become free: within the host, between hosts, and to host memory."""
    flops: float = 0.0


Started = dict[str, tuple[CollectiveTime, _Clocks, float]]
"""Running collectives by name: the collective, the clocks at its start, and its end in seconds."""


class _Replayer:
    """Walks through a program and collects its collectives, rounds and other work."""

    def __init__(
        self, program: Program, devices: int, rates: Rates | None, host_of: Callable[[int], int], share: Share
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

    def replay_computation(self, name: str, now: _Clocks, times: float, conditional: bool) -> _Clocks:
        """Replays a computation that runs `times` times per step, and returns the clocks after it."""
        began, started = now, Started()
        sent: list[CollectiveTime] = []
        for instruction in self._program.computations[name]:
            if instruction.opcode == "while":
                now = self._replay_loop(instruction, now, times, conditional)
            elif instruction.opcode == "conditional":
                now = self._replay_condition(instruction, now, times, conditional)
            elif instruction.opcode in ("call", "async-start") and instruction.callee in self._program.computations:
                now = self.replay_computation(instruction.callee, now, times, conditional)
            elif (collective := collective_of(instruction, self._devices)) is not None:
                assert not math.isnan(times), f"{name} sends in a loop of unknown length"
                played = self.collectives.setdefault((name, instruction.name), CollectiveTime(collective))
                sent.append(played)
                now = self._send(played, instruction.name, now, times, started, began)
            elif instruction.opcode.endswith("-done") and instruction.operands[0] in started:
                now = _wait_for(*started[instruction.operands[0]], now, times, began)
            elif self._costs is not None:
                seconds, flops = self._costs.cost(name, instruction)
                if seconds and not flops and not math.isnan(times):
                    work = self.other_work.setdefault((name, instruction.name), Work(instruction))
                    work.times, work.seconds = work.times + times, work.seconds + times * seconds
                now = replace(now, work=now.work + seconds, flops=now.flops + flops)
        if sent:
            self._record_round(name, sent, now.work - began.work, times)
        return now

    def _send(
        self, played: CollectiveTime, name: str, now: _Clocks, times: float, started: Started, began: _Clocks
    ) -> _Clocks:
        """Starts a collective on its link, which may be busy. A synchronous one also blocks the device."""
        collective, seconds = played.collective, self._seconds(played.collective)
        played.times += times
        played.seconds += times * seconds
        link = self._link(collective)
        begin = max(now.work, now.links[link])
        end = begin + seconds
        links = tuple(end if index == link else busy_until for index, busy_until in enumerate(now.links))
        played.span = (begin - began.work, end - began.work, now.work - began.work)
        if collective.asynchronous:
            started[name] = (played, now, end)
            return replace(now, links=links)
        played.exposed += times * (end - now.work)
        return replace(now, work=end, links=links)

    def _link(self, collective: Collective) -> int:
        """Returns the index in `_Clocks.links` of the link that a collective occupies."""
        if collective.kind == HOST_COPY:
            return 2
        crosses_hosts = any(len(set(map(self._host_of, group))) > 1 for group in collective.groups)
        return 1 if crosses_hosts else 0

    def _seconds(self, collective: Collective) -> float:
        """Returns the duration of one execution."""
        if self._rates is None:
            return 0.0
        if collective.kind == HOST_COPY:
            return self._rates.copy(collective.payload)
        return self._rates.collective(collective.kind, collective.payload, collective.groups, self._host_of)

    def _replay_loop(self, instruction: Instruction, now: _Clocks, times: float, conditional: bool) -> _Clocks:
        """Replays the first iteration, which may wait for earlier work, and a second that stands for all others. A loop
        of unknown length is replayed once."""
        body, iterations = instruction.loop
        is_unknown = math.isnan(iterations)
        after_first = self.replay_computation(body, now, math.nan if is_unknown else times, conditional)
        if is_unknown or iterations <= 1:
            return after_first
        remaining = iterations - 1
        after_second = self.replay_computation(body, after_first, times * remaining, conditional)
        extrapolated = lambda first, second: first + remaining * (second - first)
        work = extrapolated(after_first.work, after_second.work)
        # Each iteration waits for the collectives it starts, so a used link becomes free as long before the loop's end
        # as before the end of the second iteration.
        links = tuple(
            first if second == first else work - (after_second.work - second)
            for first, second in zip(after_first.links, after_second.links, strict=True)
        )
        return _Clocks(work, links, extrapolated(after_first.flops, after_second.flops))

    def _replay_condition(self, instruction: Instruction, now: _Clocks, times: float, conditional: bool) -> _Clocks:
        """Returns the weighted mean over the branches. For the outermost condition the weights come from `share`; an
        inner one always takes its longest branch."""
        branches = instruction.branches
        shares = [None if conditional else self._share_of(branch) for branch in branches]
        if all(share is None for share in shares):
            longest = max(branches, key=lambda branch: len(self._program.computations[branch]))
            shares = [1.0 if branch == longest else 0.0 for branch in branches]
        # Branches of unknown share divide what is left equally.
        unknown_share = 1 - sum(share for share in shares if share is not None)
        unknown_share /= max(1, sum(share is None for share in shares))
        ends = []
        for branch, known_share in zip(branches, shares, strict=True):
            share = unknown_share if known_share is None else known_share
            ends.append((share, self.replay_computation(branch, now, times * share, True) if share else now))
        mean = lambda clock: sum(share * clock(end) for share, end in ends)
        links = tuple(mean(lambda end, link=link: end.links[link]) for link in range(len(now.links)))
        return _Clocks(mean(lambda end: end.work), links, mean(lambda end: end.flops))

    def _share_of(self, name: str) -> float | None:
        """Returns how often a branch is taken, according to `share` of a scope in it."""
        for instruction in self._program.computations[name]:
            if (share := self._share(instruction.op_name)) is not None:
                return share
            if instruction.opcode == "call" and instruction.callee is not None:
                return self._share_of(instruction.callee)
        return None

    def _record_round(self, name: str, sent: list[CollectiveTime], seconds: float, times: float) -> None:
        """Records a pass through a computation. The last pass determines its reported times."""
        recorded = self.rounds.setdefault(name, Round(name))
        recorded.times += times
        recorded.seconds = seconds
        recorded.collectives = sent
        op_names = (instruction.op_name for instruction in self._program.computations[name])
        recorded.scopes = tuple(sorted({scope for op_name in op_names for scope in op_name.split("/")}))


def _wait_for(
    played: CollectiveTime, started: _Clocks, end: float, now: _Clocks, times: float, began: _Clocks
) -> _Clocks:
    """Blocks the device until a started collective ends, and records the work that hid it."""
    exposed = max(0.0, end - now.work)
    played.exposed += times * exposed
    played.flops += times * (now.flops - started.flops)
    played.covered += times * (now.work - started.work)
    played.span = (*played.span[:2], now.work - began.work)
    return replace(now, work=now.work + exposed)
