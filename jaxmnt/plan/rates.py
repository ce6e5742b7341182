"""Holds the rates that a device attains. They say how long products, attention, memory traffic and collectives take.

A product [m, k] × [k, n] attains the rate of large products on its generation of GPUs, times k / (k + `depth`), which
lowers the rate if k is short. It attains less if its tiles do not occupy all multiprocessors. Does not import JAX.
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

START_SECONDS = 8.4e-6
"""Time to start a collective. This and the next two are the latencies that NCCL itself assumes for a ring with its
protocol for large messages (src/graph/tuning.cc: base latency, NVLink, network)."""
STEP_WITHIN_HOST = 3.4e-6
"""Latency in seconds of a ring's step between two devices of a host."""
STEP_BETWEEN_HOSTS = 14e-6
"""Latency in seconds of a ring's step between two hosts."""


class AchievedShares(NamedTuple):
    """Shares of the rates in the data sheets of a generation that large operations attain."""

    products: float
    """Share of the peak of a dtype other than float8 that matrix products attain."""
    float8: float
    """Share of the float8 peak that matrix products attain."""
    attention: float
    """Share of the bfloat16 peak that attention attains in the forward pass, if only pairs that the mask leaves
    count."""
    link: float
    """Share of NVLink's bandwidth that collectives attain."""


ACHIEVED_SHARES = {
    "ampere": AchievedShares(0.778, 0.0, 0.60, 0.78),
    "hopper": AchievedShares(0.614, 0.66, 0.55, 0.78),
    "blackwell": AchievedShares(0.76, 0.659, 0.474, 0.78),
}
"""Shares by generation. `benchmarks/published.py --fit` fits the first three of each, `HALF_DEPTH` and
`estimate.CONTENTION` to published runs. The share of a link comes from an H100, where collectives attain 350 of the
450 GB/s of NVLink."""

BACKWARD_SHARE = 0.85
"""Rate of attention's backward relative to its forward (Shah et al. 2024, arXiv:2407.08608)."""
MEMORY_SHARE = 0.85
"""Share of the memory's bandwidth that is attained."""
HOST_LINK_SHARE = 0.8
"""Share of the bandwidth to host memory that is attained."""
HALF_DEPTH = 400.0
"""The depth k at which a product attains half of its full rate."""
HALF_LENGTH = 500.0
"""The row length at which attention attains half of its full rate."""
MALLOC_REUSE_BYTES = 32 << 20
"""Maximum bytes of temporary memory that the C library keeps for the next step (mallopt(3), M_MMAP_THRESHOLD)."""
POWER_EXPONENT = 0.5
"""Exponent x for GPUs whose power limit is a share p of their generation's. They multiply at p^x of the rate."""


class Tile(NamedTuple):
    """A part of a product that one multiprocessor computes at a time."""

    rows: int
    columns: int
    share: float
    """Rate relative to that of the largest tile."""


TILES = (Tile(256, 128, 1.0), Tile(128, 256, 1.0), Tile(128, 128, 0.93), Tile(64, 128, 0.75))
"""Typical tiles of libraries such as cuBLAS and CUTLASS."""
_SPLIT_K_SHARE = 0.85
"""Rate relative to a large product's if a product is also split along k to occupy all multiprocessors (split-k)."""


@dataclass(frozen=True)
class Curve:
    """Measured FLOP/s of products [m, k] × [k, n], where m, n and k each take all of some sizes."""

    sizes: tuple[float, ...]
    """Sizes in ascending order."""
    rates: tuple[float, ...]
    """Rates for all (m, n, k), in which k varies fastest and m slowest."""

    def interpolate(self, m: float, n: float, k: float) -> float:
        """Interpolates the rate linearly in the logarithms of m, n and k, which are first clamped to the measured
        sizes."""
        positions = [self._position(size) for size in (m, n, k)]
        total = 0.0
        # The nearer a corner of the surrounding cell is, the more it counts (trilinear interpolation).
        for corner in combinations((0, 1), repeat=3):
            weight = 1.0
            index = 0
            for (low, fraction), upper in zip(positions, corner, strict=True):
                weight *= fraction if upper else 1 - fraction
                index = index * len(self.sizes) + min(low + upper, len(self.sizes) - 1)
            total += weight * self.rates[index]
        return total

    def _position(self, size: float) -> tuple[int, float]:
        """Returns the index of the largest measured size up to `size`, and the fraction of the way to the next
        index."""
        size = min(max(size, self.sizes[0]), self.sizes[-1])
        low = bisect_right(self.sizes, size) - 1
        if low == len(self.sizes) - 1:
            return low, 0.0
        return low, math.log(size / self.sizes[low]) / math.log(self.sizes[low + 1] / self.sizes[low])


class CollectiveRate(NamedTuple):
    """The terms of a collective's duration, which is `start` + steps · `step` + bytes / `rate`."""

    start: float
    """Seconds to start the collective."""
    step: float
    """Seconds for each step between devices."""
    rate: float
    """Bytes per second."""


WITHIN_HOST, BETWEEN_HOSTS = "within hosts", "between hosts"
"""Places at which links are measured."""
GRADIENT = "gradient"
"""Key of products that contract over rows, as a weight's gradient does."""


@dataclass(frozen=True)
class Rates:
    """The rates that a device attains."""

    products: Mapping[str, float]
    """FLOP/s of large products by the dtype of their operands."""
    attention: float
    """FLOP/s of attention in long rows."""
    memory: float
    """Bytes per second that the device reads from and writes to its memory."""
    within_host: float
    """Bytes per second that the device sends to another device of its host."""
    between_hosts: float
    """Bytes per second that the device sends through its share of the host's network."""
    to_host: float
    """Bytes per second between the device and its host's memory."""
    attention_backward: float = 0.0
    """FLOP/s of attention in the backward pass; 0 if it is the same as `attention`."""
    cores: int = 0
    """Number of multiprocessors over which tiles are spread; 0 to ignore tiles."""
    depth: float = 0.0
    """The depth k at which a product attains half of its full rate."""
    length: float = 0.0
    """The row length at which attention attains half of its full rate."""
    instruction: float = 0.0
    """Seconds to start an instruction, in addition to the time that its work takes."""
    page_faults: float = 0.0
    """Seconds per byte of temporary memory that the kernel maps anew in each step; 0 on GPUs."""
    curves: Mapping[tuple[str, str], Curve] = field(default_factory=dict)
    """Measured products by (dtype, `GRADIENT` or ""). They take precedence over `products`."""
    collectives: Mapping[tuple[str, str], CollectiveRate] = field(default_factory=dict)
    """Measured collectives by (kind, place). They take precedence over `within_host` and `between_hosts`."""

    def to_json(self) -> dict[str, Any]:
        """Returns the rates of large operations."""
        names = ("products", "attention", "memory", "within_host", "between_hosts", "to_host")
        rates = {name: getattr(self, name) for name in names}
        finite = {name: rate for name, rate in rates.items() if rate != math.inf}
        return finite | {"products": dict(self.products), "measured": bool(self.curves)}

    def product_seconds(
        self, m: float, n: float, k: float, dtype: str, *, batch: float = 1.0, gradient: bool = False
    ) -> float:
        """Returns the time of `batch` products [m, k] × [k, n] at the same time, in seconds, without memory traffic.
        `gradient` is True if they contract over rows."""
        flops = 2.0 * batch * m * n * k
        curve = (gradient and self.curves.get((dtype, GRADIENT))) or self.curves.get((dtype, ""))
        if curve and k:
            return flops / curve.interpolate(batch * m, n, k)
        share = k / (k + self.depth) if k else 1.0
        if self.cores:
            share *= _wave_efficiency(m, n, k, self.cores, batch)
        return flops / (self.products[dtype] * share)

    def attention_seconds(self, flops: float, length: float, *, backward: bool) -> float:
        """Returns the time of attention in seconds. `length` is that of a row, and `flops` count only pairs that the
        mask leaves."""
        rate = self.attention_backward if backward and self.attention_backward else self.attention
        return flops / rate * (1 + self.length / length)

    def collective_seconds(
        self, kind: str, payload: float, groups: Sequence[Sequence[int]], host_of: Callable[[int], int]
    ) -> float:
        """Returns the time of one execution in seconds, if the collective uses rings. `payload` is the size in bytes of
        the whole array that a group gathers or reduces, or of a device's array in an all-to-all. For a permute,
        `groups` are pairs of source and target."""
        if kind == "collective-permute":
            return self.send_seconds(payload, between_hosts=any(host_of(a) != host_of(b) for a, b in groups))
        if kind == "all-to-all":
            return max(self.all_to_all_seconds(payload, Counter(map(host_of, group)).values()) for group in groups)
        return max(self.ring_seconds(kind, payload, Counter(map(host_of, group)).values()) for group in groups)

    def page_fault_seconds(self, temporary: float) -> float:
        """Returns the time of a step's page faults in seconds. `temporary` is the size of its temporary memory in
        bytes."""
        return self.page_faults * temporary if temporary > MALLOC_REUSE_BYTES else 0.0

    def copy_seconds(self, payload: float) -> float:
        """Returns the time in seconds to copy `payload` bytes to or from the host's memory."""
        return START_SECONDS + payload / self.to_host

    def send_seconds(self, payload: float, *, between_hosts: bool) -> float:
        """Returns the time in seconds to send `payload` bytes to one other device."""
        link = self._link_rate("collective-permute", BETWEEN_HOSTS if between_hosts else WITHIN_HOST)
        return link.start + link.step + payload / link.rate

    def _link_rate(self, kind: str, place: str) -> CollectiveRate:
        """Returns the measured rate of a collective or, if there is none, the rate of its link."""
        if (kind, place) in self.collectives:
            return self.collectives[kind, place]
        if place == WITHIN_HOST:
            return CollectiveRate(START_SECONDS, STEP_WITHIN_HOST, self.within_host)
        return CollectiveRate(START_SECONDS, STEP_BETWEEN_HOSTS, self.between_hosts)

    def ring_seconds(self, kind: str, payload: float, shares: Iterable[int]) -> float:
        """Returns the time of a ring in seconds. `shares` has the number of its devices on each host.

        The devices of a group on one host share the traffic between hosts, as in NCCL's rings. When a group on h hosts
        gathers an array, (h - 1) / h of the array enters each host, through as many network cards as the host has
        devices in the group.
        """
        devices_of_hosts = tuple(shares)
        size, hosts = sum(devices_of_hosts), len(devices_of_hosts)
        passes = ring_passes(kind)
        within = self._link_rate(kind, WITHIN_HOST)
        between = self._link_rate(kind, BETWEEN_HOSTS)
        seconds = passes * payload * (size - 1) / size / within.rate if size > hosts else 0.0
        if hosts > 1:
            entering_bytes = passes * payload * (1 - 1 / hosts)
            seconds = max(seconds, entering_bytes / (min(devices_of_hosts) * between.rate))
        steps = passes * ((size - hosts) * within.step + (hosts - 1) * between.step)
        return (between if hosts > 1 else within).start + steps + seconds

    def all_to_all_seconds(self, payload: float, shares: Iterable[int]) -> float:
        """Returns the time of an all-to-all in seconds, in which each device sends a piece of its `payload` bytes to
        each other device. `shares` has the number of its devices on each host.

        What leaves a host goes through the sending device's own share of the network. So it takes as many times longer
        than a gather of equal size as the group has devices on a host.
        """
        devices_of_hosts = tuple(shares)
        size, hosts = sum(devices_of_hosts), len(devices_of_hosts)
        within = self._link_rate("all-to-all", WITHIN_HOST)
        between = self._link_rate("all-to-all", BETWEEN_HOSTS)
        seconds = payload * (max(devices_of_hosts) - 1) / size / within.rate
        if hosts == 1:
            return within.start + within.step + seconds
        leaving_bytes = payload * (1 - min(devices_of_hosts) / size)
        return between.start + between.step + max(seconds, leaving_bytes / between.rate)


def ring_passes(kind: str) -> int:
    """Returns how many times a ring passes the whole array from device to device."""
    return 2 if kind == "all-reduce" else 1


def _wave_efficiency(m: float, n: float, k: float, cores: int, batch: float) -> float:
    """Returns the rate of `batch` products [m, k] × [k, n] relative to that of a large product. It is at most 1,
    because the last wave of tiles leaves multiprocessors idle. The tiles of all products share the waves."""
    best = 0.0
    for rows, columns, share in TILES:
        waves = math.ceil(batch * math.ceil(m / rows) * math.ceil(n / columns) / cores)
        best = max(best, share * batch * m * n / (rows * columns) / (waves * cores))
    if best < 0.9:
        k_parts = min(8, max(1, int(k) // 1024))
        waves = math.ceil(batch * math.ceil(m / 128) * math.ceil(n / 128) * k_parts / cores)
        best = max(best, _SPLIT_K_SHARE * batch * m * n / 128**2 * k_parts / (waves * cores))
    return min(best, 1.0)


def rates_of(chip: Chip, network: Network | None = None, attained: AchievedShares | None = None) -> Rates:
    """Returns a chip's rates, from its data sheet and the shares of the data sheet that operations attain. The default
    of `attained` is the shares of the chip's generation, and of `network` that of the vendor's own systems."""
    network = network or network_of(chip)
    attained = attained or ACHIEVED_SHARES[chip.generation]
    peaks = peaks_of(chip.kind)
    power_factor = chip.power**POWER_EXPONENT
    share = lambda dtype: attained.float8 if dtype == "float8" else attained.products
    return Rates(
        products={dtype: share(dtype) * power_factor * peak for dtype, peak in peaks.items() if share(dtype)},
        attention=attained.attention * power_factor * peaks["bfloat16"],
        attention_backward=BACKWARD_SHARE * attained.attention * power_factor * peaks["bfloat16"],
        memory=MEMORY_SHARE * chip.bandwidth,
        within_host=attained.link * chip.nvlink,
        between_hosts=network.between_hosts,
        to_host=HOST_LINK_SHARE * chip.to_host,
        cores=chip.cores,
        depth=HALF_DEPTH,
        length=HALF_LENGTH,
    )
