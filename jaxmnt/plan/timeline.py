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
from jaxmnt.plan.hlo import HOST_COPY, Collective, Instruction, Program, collective
from jaxmnt.plan.rates import Rates


@dataclass
class CollectiveTime:
    """A collective of the program, over all of its executions in a step, in seconds."""

    one: Collective
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


def play(
    program: Program,
    devices: int,
    rates: Rates | None = None,
    host_of: Callable[[int], int] = lambda device: 0,
    share: Share = lambda where: None,
) -> Timeline:
    """Replays a step of the program on each of `devices` devices. Without `rates` nothing takes time, and only traffic
    is counted."""
    player = _Player(program, devices, rates, host_of, share)
    end = player.computation(program.entry, _Clocks(), 1.0, False)
    other_work = sorted(player.other_work.values(), key=lambda work: -work.seconds)
    return Timeline(end.work, end.flops, list(player.found.values()), list(player.rounds.values()), other_work)


@dataclass(frozen=True)
class _Clocks:
    """The current times of the device and its links in seconds, and the FLOPs done so far."""

    work: float = 0.0
    links: tuple[float, ...] = (0.0, 0.0, 0.0)
    """When the links become free: within the host, between hosts, and to host memory."""
    flops: float = 0.0


Started = dict[str, tuple[CollectiveTime, _Clocks, float]]
"""Running collectives by name: the collective, the clocks at its start, and its end in seconds."""


class _Player:
    def __init__(
        self, program: Program, devices: int, rates: Rates | None, host_of: Callable[[int], int], share: Share
    ):
        self._program, self._devices, self._rates = program, devices, rates
        self._host_of, self._share = host_of, share
        self._costs = None if rates is None else Costs(program, rates)
        self.found: dict[tuple[str, str], CollectiveTime] = {}
        self.rounds: dict[str, Round] = {}
        self.other_work: dict[tuple[str, str], Work] = {}

    def computation(self, name: str, now: _Clocks, times: float, conditional: bool) -> _Clocks:
        """Replays a computation that runs `times` times per step, and returns the clocks after it."""
        began, started, sent = now, Started(), []
        for instruction in self._program.computations[name]:
            if instruction.opcode == "while":
                now = self._loop(instruction, now, times, conditional)
            elif instruction.opcode == "conditional":
                now = self._condition(instruction, now, times, conditional)
            elif instruction.opcode in ("call", "async-start") and instruction.callee in self._program.computations:
                now = self.computation(instruction.callee, now, times, conditional)
            elif (one := collective(instruction, self._devices)) is not None:
                assert not math.isnan(times), f"{name} sends in a loop whose length is not known"
                played = self.found.setdefault((name, instruction.name), CollectiveTime(one))
                sent.append(played)
                now = self._send(played, instruction.name, now, times, started, began)
            elif instruction.opcode.endswith("-done") and instruction.operands[0] in started:
                now = _wait(*started[instruction.operands[0]], now, times, began)
            elif self._costs is not None:
                seconds, flops = self._costs.of(name, instruction)
                if seconds and not flops and not math.isnan(times):
                    work = self.other_work.setdefault((name, instruction.name), Work(instruction))
                    work.times, work.seconds = work.times + times, work.seconds + times * seconds
                now = replace(now, work=now.work + seconds, flops=now.flops + flops)
        if sent:
            self._note(name, sent, now.work - began.work, times)
        return now

    def _send(
        self, played: CollectiveTime, name: str, now: _Clocks, times: float, started: Started, began: _Clocks
    ) -> _Clocks:
        one, seconds = played.one, self._seconds(played.one)
        played.times += times
        played.seconds += times * seconds
        link = 2 if one.kind == HOST_COPY else any(len(set(map(self._host_of, group))) > 1 for group in one.groups)
        begin = max(now.work, now.links[link])
        end = begin + seconds
        links = tuple(end if place == link else at for place, at in enumerate(now.links))
        played.span = (begin - began.work, end - began.work, now.work - began.work)
        if one.asynchronous:
            started[name] = (played, now, end)
            return replace(now, links=links)
        played.exposed += times * (end - now.work)
        return replace(now, work=end, links=links)

    def _seconds(self, one: Collective) -> float:
        if self._rates is None:
            return 0.0
        if one.kind == HOST_COPY:
            return self._rates.copy(one.payload)
        return self._rates.collective(one.kind, one.payload, one.groups, self._host_of)

    def _loop(self, instruction: Instruction, now: _Clocks, times: float, conditional: bool) -> _Clocks:
        """Replays the first iteration, which may wait for earlier work, and a second that stands for all others. A loop
        of unknown length is replayed once."""
        body, rounds = instruction.loop
        unknown = math.isnan(rounds)
        after = self.computation(body, now, math.nan if unknown else times, conditional)
        if unknown or rounds <= 1:
            return after
        more = rounds - 1
        again = self.computation(body, after, times * more, conditional)
        on = lambda first, second: first + more * (second - first)
        work = on(after.work, again.work)
        # What a round starts it waits for: its links are over as long before its end as in the second.
        links = tuple(
            first if second == first else work - (again.work - second)
            for first, second in zip(after.links, again.links, strict=True)
        )
        return _Clocks(work, links, on(after.flops, again.flops))

    def _condition(self, instruction: Instruction, now: _Clocks, times: float, conditional: bool) -> _Clocks:
        """Returns the weighted mean over the branches. For the outermost condition the weights come from `share`; an
        inner one always takes its longest branch."""
        branches = instruction.branches
        shares = [None if conditional else self._share_of(branch) for branch in branches]
        if all(one is None for one in shares):
            longest = max(branches, key=lambda branch: len(self._program.computations[branch]))
            shares = [1.0 if branch == longest else 0.0 for branch in branches]
        rest = 1 - sum(one for one in shares if one is not None)
        rest /= max(1, sum(one is None for one in shares))
        ends = []
        for branch, one in zip(branches, shares, strict=True):
            part = rest if one is None else one
            ends.append((part, self.computation(branch, now, times * part, True) if part else now))
        mean = lambda of: sum(part * of(end) for part, end in ends)
        links = tuple(mean(lambda end, link=link: end.links[link]) for link in range(len(now.links)))
        return _Clocks(mean(lambda end: end.work), links, mean(lambda end: end.flops))

    def _share_of(self, name: str) -> float | None:
        """Returns how often a branch is taken, according to `share` of a scope in it."""
        for instruction in self._program.computations[name]:
            if (part := self._share(instruction.where)) is not None:
                return part
            if instruction.opcode == "call" and instruction.callee is not None:
                return self._share_of(instruction.callee)
        return None

    def _note(self, name: str, sent: list[CollectiveTime], seconds: float, times: float) -> None:
        """Records a pass through a computation. The last pass determines its reported times."""
        found = self.rounds.setdefault(name, Round(name))
        found.times, found.seconds, found.collectives = found.times + times, seconds, sent
        where = (instruction.where for instruction in self._program.computations[name])
        found.scopes = tuple(sorted({scope for one in where for scope in one.split("/")}))


def _wait(played: CollectiveTime, started: _Clocks, end: float, now: _Clocks, times: float, began: _Clocks) -> _Clocks:
    exposed = max(0.0, end - now.work)
    played.exposed += times * exposed
    played.flops += times * (now.flops - started.flops)
    played.covered += times * (now.work - started.work)
    played.span = (*played.span[:2], now.work - began.work)
    return replace(now, work=now.work + exposed)
