"""The rates that a device attains: how long matrix products, attention, memory traffic and collectives take. No JAX.

A product [m, k] × [k, n] attains the rate of its generation's large products, less where its tiles do not fill all
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

START_SECONDS, STEP_WITHIN_HOST, STEP_BETWEEN_HOSTS = 8.4e-6, 3.4e-6, 14e-6
"""Latencies in seconds that NCCL itself assumes for a ring with its protocol for large messages (src/graph/tuning.cc:
base latency, NVLink, network)."""


class AchievedShares(NamedTuple):
    """Shares of a generation's data sheet that large operations attain."""

    products: float
    float8: float
    """Share of the float8 peak."""
    attention: float
    """Share of the bfloat16 peak in forward, over the pairs that the mask leaves."""
    link: float
    """Share of NVLink's bandwidth, by collectives."""


ACHIEVED_SHARES = {
    "ampere": AchievedShares(0.778, 0.0, 0.60, 0.78),
    "hopper": AchievedShares(0.614, 0.66, 0.55, 0.78),
    "blackwell": AchievedShares(0.76, 0.659, 0.474, 0.78),
}
"""The first three columns, `HALF_DEPTH` and `estimate.CONTENTION` are fitted to published runs by
`benchmarks/published.py --fit`; collectives attain 350 of the 450 GB/s of an H100's NVLink."""

BACKWARD_SHARE = 0.85
"""Rate of attention's backward relative to its forward (Shah et al. 2024, arXiv:2407.08608)."""
MEMORY_SHARE, HOST_LINK_SHARE = 0.85, 0.8
"""Attained shares of the memory's bandwidth, and of the link to host memory."""
HALF_DEPTH, HALF_LENGTH = 400.0, 500.0
"""The depth k at which a product attains half its rate, and the row length at which attention does."""
MALLOC_REUSE_BYTES = 32 << 20
"""Bytes of temporary memory up to which the C library reuses it for the next step (mallopt(3), M_MMAP_THRESHOLD)."""
POWER_EXPONENT = 0.5
"""Exponent of the power limit: a GPU with a share p of its generation's power multiplies at p to this of its rate."""


class Tile(NamedTuple):
    rows: int
    columns: int
    share: float
    """Rate relative to the largest tile."""


TILES = (Tile(256, 128, 1.0), Tile(128, 256, 1.0), Tile(128, 128, 0.93), Tile(64, 128, 0.75))
"""Typical tiles of libraries such as cuBLAS and CUTLASS."""
_SPLIT_K_SHARE = 0.85
"""Rate of a product that is also split along k to fill the multiprocessors (split-k), relative to a large one."""


@dataclass(frozen=True)
class Curve:
    """Measured FLOP/s of products [m, k] × [k, n], at all combinations of some sizes."""

    sizes: tuple[float, ...]
    """Sizes in ascending order."""
    rates: tuple[float, ...]
    """Rates for all (m, n, k), k fastest."""

    def interpolate(self, m: float, n: float, k: float) -> float:
        """Interpolates the rate linearly in the logarithms of m, n and k, and clamps beyond the measured sizes."""
        positions = [self._position(size) for size in (m, n, k)]
        total = 0.0
        # Trilinear: each corner of the surrounding cell counts by how near it is.
        for corner in combinations((0, 1), repeat=3):
            weight, index = 1.0, 0
            for (low, fraction), upper in zip(positions, corner, strict=True):
                weight *= fraction if upper else 1 - fraction
                index = index * len(self.sizes) + min(low + upper, len(self.sizes) - 1)
            total += weight * self.rates[index]
        return total

    def _position(self, size: float) -> tuple[int, float]:
        """Returns the index of the largest size below, and the fraction of the way to the next one."""
        size = min(max(size, self.sizes[0]), self.sizes[-1])
        low = bisect_right(self.sizes, size) - 1
        if low == len(self.sizes) - 1:
            return low, 0.0
        return low, math.log(size / self.sizes[low]) / math.log(self.sizes[low + 1] / self.sizes[low])


class CollectiveRate(NamedTuple):
    """Duration of a collective in seconds: `start`, `step` per step between devices, and its bytes at `rate` per
    second."""

    start: float
    step: float
    rate: float


WITHIN_HOST, BETWEEN_HOSTS = "within hosts", "between hosts"
"""Where a link was measured."""
GRADIENT = "gradient"
"""Marks products that contract over rows, as a weight's gradient does."""


@dataclass(frozen=True)
class Rates:
    """The rates that a device attains: FLOP/s of large products by the dtype of their operands, and of attention; bytes
    per second of its memory, and sent to another device of its host, through its share of the host's network, or to its
    host's memory."""

    products: Mapping[str, float]
    attention: float
    memory: float
    within_host: float
    between_hosts: float
    to_host: float
    attention_backward: float = 0.0
    """0 means the same as `attention`."""
    cores: int = 0
    """Multiprocessors that tiles are spread over; 0 ignores tiles."""
    depth: float = 0.0
    length: float = 0.0
    """Row length at which attention attains half its rate."""
    instruction: float = 0.0
    """Seconds to start each instruction, in addition."""
    page_faults: float = 0.0
    """Seconds per byte of temporary memory that the kernel maps anew in each step, on CPUs."""
    curves: Mapping[tuple[str, str], Curve] = field(default_factory=dict)
    """Measured products by dtype, and `GRADIENT` or "". They take precedence over `products`."""
    collectives: Mapping[tuple[str, str], CollectiveRate] = field(default_factory=dict)
    """Measured collectives by kind and place. They take precedence over `within_host` and `between_hosts`."""

    def to_json(self) -> dict[str, Any]:
        """Returns the rates of large operations."""
        names = ("products", "attention", "memory", "within_host", "between_hosts", "to_host")
        rates = {name: getattr(self, name) for name in names}
        finite = {name: rate for name, rate in rates.items() if rate != math.inf}
        return finite | {"products": dict(self.products), "measured": bool(self.curves)}

    def product(self, m: float, n: float, k: float, dtype: str, *, gradient: bool = False) -> float:
        """Returns the seconds of [m, k] × [k, n], without memory traffic. `gradient`: the product contracts over
        rows."""
        curve = (gradient and self.curves.get((dtype, GRADIENT))) or self.curves.get((dtype, ""))
        if curve and k:
            return 2.0 * m * n * k / curve.interpolate(m, n, k)
        share = k / (k + self.depth) if k else 1.0
        if self.cores:
            share *= _wave_efficiency(m, n, k, self.cores)
        return 2.0 * m * n * k / (self.products[dtype] * share)

    def attention_seconds(self, flops: float, length: float, *, backward: bool) -> float:
        """Returns the seconds of attention in rows of this length; `flops` are those of the pairs that the mask
        leaves."""
        rate = self.attention_backward if backward and self.attention_backward else self.attention
        return flops / rate * (1 + self.length / length)

    def collective(
        self, kind: str, payload: float, groups: Sequence[Sequence[int]], host_of: Callable[[int], int]
    ) -> float:
        """Returns the seconds of one execution by rings: start latency, each step between devices, and the bytes of
        `payload`, the whole array that a group gathers or reduces. For permutes, `groups` are pairs."""
        if kind == "collective-permute":
            return self.send(payload, between_hosts=any(host_of(a) != host_of(b) for a, b in groups))
        return max(self.ring(kind, payload, Counter(map(host_of, group)).values()) for group in groups)

    def page_fault_seconds(self, temporary: float) -> float:
        """Returns the seconds of page faults for a step's temporary memory."""
        return self.page_faults * temporary if temporary > MALLOC_REUSE_BYTES else 0.0

    def copy(self, payload: float) -> float:
        """Returns the seconds to copy bytes to or from the host's memory."""
        return START_SECONDS + payload / self.to_host

    def send(self, payload: float, *, between_hosts: bool) -> float:
        """Returns the seconds to send bytes to one other device."""
        link = self._link("collective-permute", BETWEEN_HOSTS if between_hosts else WITHIN_HOST)
        return link.start + link.step + payload / link.rate

    def _link(self, kind: str, place: str) -> CollectiveRate:
        if (kind, place) in self.collectives:
            return self.collectives[kind, place]
        if place == WITHIN_HOST:
            return CollectiveRate(START_SECONDS, STEP_WITHIN_HOST, self.within_host)
        return CollectiveRate(START_SECONDS, STEP_BETWEEN_HOSTS, self.between_hosts)

    def ring(self, kind: str, payload: float, shares: Iterable[int]) -> float:
        """Returns the seconds of a ring in which each host has `shares` devices.

        Devices of a group on one host share the traffic between hosts, as in NCCL's rings: when a group on h hosts
        gathers an array, (h - 1) / h of it enters each host, through as many network cards as the host has devices in
        the group.
        """
        of_hosts = tuple(shares)
        size, hosts, rounds = sum(of_hosts), len(of_hosts), ring_passes(kind)
        within, between = self._link(kind, WITHIN_HOST), self._link(kind, BETWEEN_HOSTS)
        seconds = rounds * payload * (size - 1) / size / within.rate if size > hosts else 0.0
        if hosts > 1:
            entering = rounds * payload * (1 - 1 / hosts)
            seconds = max(seconds, entering / (min(of_hosts) * between.rate))
        steps = rounds * ((size - hosts) * within.step + (hosts - 1) * between.step)
        return (between if hosts > 1 else within).start + steps + seconds


def ring_passes(kind: str) -> int:
    """Returns how often a ring passes the whole array that is gathered or reduced."""
    return 2 if kind == "all-reduce" else 1


def _wave_efficiency(m: float, n: float, k: float, cores: int) -> float:
    """Returns the rate of a product relative to a large one, by its tiles: the last wave leaves multiprocessors
    idle."""
    best = 0.0
    for rows, columns, share in TILES:
        waves = math.ceil(math.ceil(m / rows) * math.ceil(n / columns) / cores)
        best = max(best, share * m * n / (rows * columns) / (waves * cores))
    if best < 0.9:
        pieces = min(8, max(1, int(k) // 1024))
        waves = math.ceil(math.ceil(m / 128) * math.ceil(n / 128) * pieces / cores)
        best = max(best, _SPLIT_K_SHARE * m * n / 128**2 * pieces / (waves * cores))
    return min(best, 1.0)


def rates_of(chip: Chip, network: Network | None = None, attained: AchievedShares | None = None) -> Rates:
    """Returns a chip's rates, from its data sheet and, unless `attained` is given, the shares of its generation."""
    network, attained = network or network_of(chip), attained or ACHIEVED_SHARES[chip.generation]
    peaks, slowed = peaks_of(chip.kind), chip.power**POWER_EXPONENT
    share = lambda dtype: attained.float8 if dtype == "float8" else attained.products
    return Rates(
        products={dtype: share(dtype) * slowed * peak for dtype, peak in peaks.items() if share(dtype)},
        attention=attained.attention * slowed * peaks["bfloat16"],
        attention_backward=BACKWARD_SHARE * attained.attention * slowed * peaks["bfloat16"],
        memory=MEMORY_SHARE * chip.bandwidth,
        within_host=attained.link * chip.nvlink,
        between_hosts=network.between_hosts,
        to_host=HOST_LINK_SHARE * chip.to_host,
        cores=chip.cores,
        depth=HALF_DEPTH,
        length=HALF_LENGTH,
    )
