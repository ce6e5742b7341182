"""What a device attains: how long a product, attention, reading memory and a collective take. No JAX.

A product of [m, k] by [k, n] attains what its generation does with large ones, less where its tiles do not fill all
multiprocessors in whole waves, or where k is short: k / (k + `depth`).
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product as combinations
from typing import Any, NamedTuple

from jaxmnt.plan.chips import Chip, Network, network_of
from jaxmnt.telemetry.peaks import peaks_of

START, STEP_WITHIN_HOST, STEP_BETWEEN_HOSTS = 8.4e-6, 3.4e-6, 14e-6
"""Seconds, by which NCCL itself weighs a ring with its protocol for large messages (src/graph/tuning.cc: base latency,
NVLink, network)."""


class AchievedShares(NamedTuple):
    """Shares of a generation's data sheet that large operations attain."""

    products: float
    float8: float
    """Of the peak in float8."""
    attention: float
    """Forward, of the peak in bfloat16, over pairs that the mask leaves."""
    link: float
    """Of NVLink, by collectives."""


ACHIEVED_SHARES = {
    "ampere": AchievedShares(0.778, 0.0, 0.60, 0.78),
    "hopper": AchievedShares(0.614, 0.66, 0.55, 0.78),
    "blackwell": AchievedShares(0.76, 0.659, 0.474, 0.78),
}
"""The first three columns, `HALF_DEPTH` and `estimate.CONTENTION` are fitted to published runs by
`benchmarks/published.py --fit`; collectives attain 350 of the 450 GB/s of an H100's NVLink."""

BACKWARD = 0.85
"""What attention's backward attains of its forward's rate (Shah et al. 2024, arXiv:2407.08608)."""
MEMORY, TO_HOST = 0.85, 0.8
"""Of the memory's bandwidth, and of the link to the host's memory."""
HALF_DEPTH, HALF_LENGTH = 400.0, 500.0
"""The depth at which a product attains half, and the length at which attention does."""
KEPT = 32 << 20
"""Bytes of temporary memory up to which the C library keeps it for the next step (mallopt(3), M_MMAP_THRESHOLD)."""
POWER = 0.5
"""A GPU with a share p of its generation's power multiplies at p to this of its rate."""


class Tile(NamedTuple):
    rows: int
    columns: int
    share: float
    """Of what the largest tile attains."""


TILES = (Tile(256, 128, 1.0), Tile(128, 256, 1.0), Tile(128, 128, 0.93), Tile(64, 128, 0.75))
"""Those of libraries: cuBLAS and CUTLASS choose among such."""
_SPLIT = 0.85
"""What a product attains that is also cut along k, to fill the multiprocessors."""


@dataclass(frozen=True)
class Curve:
    """FLOP/s of products [m, k] by [k, n], measured at all combinations of some sizes."""

    sizes: tuple[float, ...]
    """Rising."""
    rates: tuple[float, ...]
    """Of all (m, n, k), k fastest."""

    def at(self, m: float, n: float, k: float) -> float:
        """Between sizes by the logarithm of m, n and k; beyond them as at the edge."""
        places = [self._place(size) for size in (m, n, k)]
        total = 0.0
        for corner in combinations((0, 1), repeat=3):
            weight, index = 1.0, 0
            for (low, part), upper in zip(places, corner, strict=True):
                weight *= part if upper else 1 - part
                index = index * len(self.sizes) + min(low + upper, len(self.sizes) - 1)
            total += weight * self.rates[index]
        return total

    def _place(self, size: float) -> tuple[int, float]:
        """The largest size below, and how far it is from there to the next."""
        size = min(max(size, self.sizes[0]), self.sizes[-1])
        low = bisect_right(self.sizes, size) - 1
        if low == len(self.sizes) - 1:
            return low, 0.0
        return low, math.log(size / self.sizes[low]) / math.log(self.sizes[low + 1] / self.sizes[low])


class CollectiveRate(NamedTuple):
    """A collective's seconds: `start`, `step` for each step from device to device, and its bytes at `rate` a second."""

    start: float
    step: float
    rate: float


WITHIN_HOST, BETWEEN_HOSTS = "within hosts", "between hosts"
"""Where a link is measured."""
GRADIENT = "gradient"
"""Products in which rows are added up, as in a weight's gradient."""


@dataclass(frozen=True)
class Rates:
    """What a device attains. FLOP/s of large products by the dtype that is multiplied, and of attention; bytes a second
    of its memory, and sent to another device of its host, by its share of the host's network, or to its host's memory.
    """

    products: Mapping[str, float]
    attention: float
    memory: float
    within_host: float
    between_hosts: float
    to_host: float
    attention_backward: float = 0.0
    """0: as `attention`."""
    cores: int = 0
    """Multiprocessors that tiles are spread over; 0: tiles do not matter."""
    depth: float = 0.0
    length: float = 0.0
    """At which attention attains half."""
    instruction: float = 0.0
    """Seconds of each instruction besides, which starts it."""
    page_faults: float = 0.0
    """Seconds of a byte of temporary memory that the kernel maps: on CPUs anew for each step."""
    curves: Mapping[tuple[str, str], Curve] = field(default_factory=dict)
    """Where products were measured: by dtype, and `GRADIENT` or nothing. They count instead of `products`."""
    collectives: Mapping[tuple[str, str], CollectiveRate] = field(default_factory=dict)
    """Where collectives were measured: by kind and place. They count instead of `within_host` and `between_hosts`."""

    def to_json(self) -> dict[str, Any]:
        """Those of large operations."""
        names = ("products", "attention", "memory", "within_host", "between_hosts", "to_host")
        found = {name: getattr(self, name) for name in names}
        finite = {name: value for name, value in found.items() if value != math.inf}
        return finite | {"products": dict(self.products), "measured": bool(self.curves)}

    def product(self, m: float, n: float, k: float, dtype: str, *, gradient: bool = False) -> float:
        """Seconds of [m, k] by [k, n], without what memory needs. `gradient`: the rows of both sides are added up."""
        curve = (gradient and self.curves.get((dtype, GRADIENT))) or self.curves.get((dtype, ""))
        if curve and k:
            return 2.0 * m * n * k / curve.at(m, n, k)
        share = k / (k + self.depth) if k else 1.0
        if self.cores:
            share *= _filled(m, n, k, self.cores)
        return 2.0 * m * n * k / (self.products[dtype] * share)

    def attend(self, flops: float, length: float, *, backward: bool) -> float:
        """Seconds of attention in rows of this length; `flops` of the pairs that the mask leaves."""
        rate = self.attention_backward if backward and self.attention_backward else self.attention
        return flops / rate * (1 + self.length / length)

    def collective(
        self, kind: str, payload: float, groups: Sequence[Sequence[int]], host_of: Callable[[int], int]
    ) -> float:
        """Seconds of one execution, by rings: what starts them, each step from device to device, and the bytes of
        `payload`, the whole that is gathered or reduced in a group. Of permutes the groups are pairs."""
        if kind == "collective-permute":
            return self.send(payload, between_hosts=any(host_of(a) != host_of(b) for a, b in groups))
        return max(self.ring(kind, payload, Counter(map(host_of, group)).values()) for group in groups)

    def mapping(self, temporary: float) -> float:
        """Seconds in which a step's temporary memory is mapped."""
        return self.page_faults * temporary if temporary > KEPT else 0.0

    def copy(self, payload: float) -> float:
        """Seconds of bytes to the host's memory, or from it."""
        return START + payload / self.to_host

    def send(self, payload: float, *, between_hosts: bool) -> float:
        """Seconds of bytes to one other device."""
        link = self._link("collective-permute", BETWEEN_HOSTS if between_hosts else WITHIN_HOST)
        return link.start + link.step + payload / link.rate

    def _link(self, kind: str, place: str) -> CollectiveRate:
        if (kind, place) in self.collectives:
            return self.collectives[kind, place]
        if place == WITHIN_HOST:
            return CollectiveRate(START, STEP_WITHIN_HOST, self.within_host)
        return CollectiveRate(START, STEP_BETWEEN_HOSTS, self.between_hosts)

    def ring(self, kind: str, payload: float, shares: Iterable[int]) -> float:
        """Seconds among devices of which each host has its share.

        Devices of a group that share a host share what goes between hosts, as NCCL's rings do: of a whole that is
        gathered on h hosts, (h - 1) / h enter each host, by as many network cards as it has devices in the group.
        """
        of_hosts = tuple(shares)
        size, hosts, rounds = sum(of_hosts), len(of_hosts), rounds_of(kind)
        within, between = self._link(kind, WITHIN_HOST), self._link(kind, BETWEEN_HOSTS)
        seconds = rounds * payload * (size - 1) / size / within.rate if size > hosts else 0.0
        if hosts > 1:
            entering = rounds * payload * (1 - 1 / hosts)
            seconds = max(seconds, entering / (min(of_hosts) * between.rate))
        steps = rounds * ((size - hosts) * within.step + (hosts - 1) * between.step)
        return (between if hosts > 1 else within).start + steps + seconds


def rounds_of(kind: str) -> int:
    """How often a ring passes all of what is gathered or reduced."""
    return 2 if kind == "all-reduce" else 1


def _filled(m: float, n: float, k: float, cores: int) -> float:
    """What a product attains of a large one, by its tiles: those of the last wave leave multiprocessors idle."""
    best = 0.0
    for rows, columns, share in TILES:
        waves = math.ceil(math.ceil(m / rows) * math.ceil(n / columns) / cores)
        best = max(best, share * m * n / (rows * columns) / (waves * cores))
    if best < 0.9:
        pieces = min(8, max(1, int(k) // 1024))
        waves = math.ceil(math.ceil(m / 128) * math.ceil(n / 128) * pieces / cores)
        best = max(best, _SPLIT * m * n / 128**2 * pieces / (waves * cores))
    return min(best, 1.0)


def rates_of(chip: Chip, network: Network | None = None, attained: AchievedShares | None = None) -> Rates:
    """What a chip attains, by its data sheet and what its generation attains of that, if nothing else is given."""
    network, attained = network or network_of(chip), attained or ACHIEVED_SHARES[chip.generation]
    peaks, slowed = peaks_of(chip.kind), chip.power**POWER
    share = lambda dtype: attained.float8 if dtype == "float8" else attained.products
    return Rates(
        products={dtype: share(dtype) * slowed * peak for dtype, peak in peaks.items() if share(dtype)},
        attention=attained.attention * slowed * peaks["bfloat16"],
        attention_backward=BACKWARD * attained.attention * slowed * peaks["bfloat16"],
        memory=MEMORY * chip.bandwidth,
        within_host=attained.link * chip.nvlink,
        between_hosts=network.between_hosts,
        to_host=TO_HOST * chip.to_host,
        cores=chip.cores,
        depth=HALF_DEPTH,
        length=HALF_LENGTH,
    )
