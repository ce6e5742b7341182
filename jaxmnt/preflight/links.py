"""Measures matrix products on each device, collectives along each mesh axis, and links between all pairs of hosts.

Legend: N devices along an axis.
"""

import os
import re
import statistics
import timeit
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmnt.distributed.coordination import barrier, gather
from jaxmnt.distributed.identity import Identity
from jaxmnt.errors import ConfigError
from jaxmnt.preflight.table import Row, describe_hosts, failed_row, ok_row, warning_row
from jaxmnt.run.probe import TimedProduct

_REPEATS = 3
_MAX_PAIRED_HOSTS = 16
"""Maximum number of hosts whose pairs are all measured."""
_WARNING_FRACTION = 0.6
"""Fraction of the median or best rate below which a rate causes a warning."""
_FAILURE_FRACTION = 0.25
"""Fraction of the median or best rate below which a rate is a failure."""
_MIN_LINK_FRACTION = {"cpu": 0.005, "gpu": 0.25}
"""Minimum rate of the best pair of hosts, as a fraction of the speed of the slowest network card, by platform. A lower
rate means that the network as a whole is at fault."""
_SENT_BYTES = {"cpu": 1 << 20, "gpu": 64 << 20}
"""Bytes of the array that a collective gathers, reduces or sends, by platform."""
_PRODUCT_WIDTH = {"cpu": 512, "gpu": 8192}
"""Rows and columns of the matrices that are multiplied, by platform."""
_BITS_PER_BYTE = 8
_MEGA, _GIGA = 1e6, 1e9


def matmul_rows(identity: Identity, hosts: Sequence[str]) -> list[Row]:
    """Measures the TFLOP/s of a product of square matrices on each device. Process 0 gets the rows."""
    barrier("everyone multiplies", identity)
    devices = jax.local_devices()
    product = TimedProduct(devices, _PRODUCT_WIDTH.get(devices[0].platform, _PRODUCT_WIDTH["cpu"]))
    process_rates = gather("matrix products", [product.flops / seconds / 1e12 for seconds in product()], identity)
    if process_rates is None:
        return []
    device_rates = {
        f"{host} device {index}": rate
        for host, rates in zip(hosts, process_rates, strict=True)
        for index, rate in enumerate(rates)
    }
    median_rate = statistics.median(device_rates.values())
    on_gpu = devices[0].platform != "cpu"
    advice = "look at its clocks, heat and neighbours"
    rows = []
    for where, rate in device_rates.items():
        if rate < _WARNING_FRACTION * median_rate:
            make_row = failed_row if rate < _FAILURE_FRACTION * median_rate and on_gpu else warning_row
            rows.append(make_row("matrix product", where, f"{rate:.3g} TFLOP/s, usual {median_rate:.3g}", advice))
    slowest = min(device_rates.values())
    return rows or [ok_row("matrix product", f"all {len(device_rates)} devices", f"{slowest:.3g} TFLOP/s at least")]


def axis_rows(mesh: Mesh, identity: Identity, hosts: Sequence[str]) -> list[Row]:
    """Measures the collectives of a run along each axis with more than one device. Process 0 gets the rows.

    Rates are bus bandwidths, as in nccl-tests: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    rows = []
    for axis, size in mesh.shape.items():
        if size == 1:
            continue
        rates = [_collective_rate(mesh, axis, kind) for kind in COLLECTIVES]
        process_rates = gather(f"collectives along {axis}", rates, identity)
        if process_rates is None:
            continue
        names = (kind.replace("collective-permute", "point-to-point") for kind in COLLECTIVES)
        slowest = map(min, zip(*process_rates, strict=True))
        finding = ", ".join(f"{name} {_rate_text(rate)}" for name, rate in zip(names, slowest, strict=True))
        rows.append(ok_row(f"axis {axis}", describe_hosts(hosts), finding))
    return rows


COLLECTIVES: dict[str, tuple[Callable[..., Any], Callable[[int], float], bool]] = {
    "all-reduce": (lambda x, axis, n: jax.lax.psum(x, axis), lambda n: 2 * (n - 1) / n, True),
    "all-gather": (lambda x, axis, n: jax.lax.all_gather(x, axis, tiled=True), lambda n: n - 1, False),
    "reduce-scatter": (lambda x, axis, n: jax.lax.psum_scatter(x, axis, tiled=True), lambda n: (n - 1) / n, True),
    "collective-permute": (
        lambda x, axis, n: jax.lax.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)]), lambda n: 1, True
    ),
}  # fmt: skip
"""Collectives by kind. Each has its operation on one device's array, a function from N to the number of times that each
byte crosses the bus, and True if a device starts with the whole array, or False if it starts with 1/N of the array."""


def _collective_rate(mesh: Mesh, axis: str, kind: str) -> float:
    """Returns the bus bandwidth of a collective along an axis, in bytes per second and device."""
    operation, crossings, starts_whole = COLLECTIVES[kind]
    size = mesh.shape[axis]
    shard = _SENT_BYTES.get(mesh.devices.flat[0].platform, _SENT_BYTES["cpu"]) // 4 // size
    count = shard * (size if starts_whole else 1)
    program = jax.jit(map_over_devices(mesh, partial(operation, axis=axis, n=size)))
    array = repeat_on_devices(mesh, np.ones(count, np.float32))
    return 4 * count * crossings(size) / _shortest_seconds(partial(program, array))


def map_over_devices(mesh: Mesh, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that applies `function` to the shard of each device of the mesh."""
    spec = PartitionSpec(mesh.axis_names)
    return jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


def repeat_on_devices(mesh: Mesh, values: np.ndarray) -> Array:
    """Returns an array with these values on each device of the mesh, concatenated along the first dimension."""
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    shape = (values.shape[0] * mesh.size, *values.shape[1:])
    return jax.make_array_from_callback(shape, sharding, lambda _: values)


def pair_rows(identity: Identity, hosts: Sequence[str], megabits: dict[str, int]) -> list[Row]:
    """Measures the link between the hosts of each pair, with as many pairs at a time as possible.

    `megabits` is the speed of each host's network card in Mbit/s; only process 0 needs it, and gets the rows. With more
    than 16 hosts, nothing is measured.
    """
    names = list(dict.fromkeys(hosts))
    if not 2 <= len(names) <= _MAX_PAIRED_HOSTS:
        return []
    # Only the first process of each host takes part in its pairs.
    processes = [hosts.index(host) for host in names]
    own_rates = []
    for index, pairs in enumerate(_pair_rounds(len(names))):
        barrier(f"round {index} of pairs of hosts", identity)
        for a, b in pairs:
            if identity.process_id in (processes[a], processes[b]):
                own_rates.append((a, b, _pair_rate(processes[a], processes[b])))
    process_rates = gather("pairs of hosts", own_rates, identity)
    if process_rates is None:
        return []
    # Both processes of a pair measure its rate, and the slower measurement counts.
    rates: dict[tuple[int, int], float] = {}
    for a, b, rate in chain.from_iterable(process_rates):
        rates[a, b] = min(rate, rates.get((a, b), rate))
    return judge_pairs(names, rates, [megabits[host] for host in names], jax.devices()[0].platform)


def _pair_rounds(hosts: int) -> list[list[tuple[int, int]]]:
    """Returns rounds of disjoint pairs in which each host meets every other once (the circle method)."""
    ring = [*range(hosts + hosts % 2)]  # an odd number of hosts gets a dummy, and the host that meets it pauses
    rounds = []
    for _ in range(len(ring) - 1):
        half = zip(ring[: len(ring) // 2], reversed(ring[len(ring) // 2 :]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in half if max(a, b) < hosts])
        ring = [ring[0], ring[-1], *ring[1:-1]]  # the first stays, the others rotate
    return rounds


def judge_pairs(
    hosts: Sequence[str], rates: dict[tuple[int, int], float], megabits: Sequence[int], platform: str
) -> list[Row]:
    """Returns rows for slow hosts and slow pairs. `rates` are in bytes per second, by pairs of indices of `hosts`.

    A host that is slow in all its pairs gets a single row. `megabits` are the speeds of the hosts' network cards in
    Mbit/s.
    """
    best_rate = max(rates.values())
    card_rate = min((speed for speed in megabits if speed), default=0) * _MEGA / _BITS_PER_BYTE
    min_rate = _MIN_LINK_FRACTION.get(platform, _MIN_LINK_FRACTION["gpu"]) * card_rate
    if best_rate < min_rate:
        finding = f"{_rate_text(best_rate)} at best, but the hosts' network cards are rated at {_rate_text(card_rate)}"
        advice = "look at the switches, and at which network is used"
        return [failed_row("links", f"all {len(hosts)} hosts", finding, advice)]
    rows: list[Row] = []
    # Find hosts that are slow in all pairs. With two hosts, their only pair does not show which of them is slow.
    slow_hosts: set[int] = set()
    for index, host in enumerate(hosts):
        fastest = max(rate for pair, rate in rates.items() if index in pair)
        if len(hosts) > 2 and fastest < _WARNING_FRACTION * best_rate:
            slow_hosts.add(index)
            rows.append(_slow_row(host, fastest, best_rate))
    # Find slow pairs among the other hosts.
    for (a, b), rate in sorted(rates.items()):
        if rate < _WARNING_FRACTION * best_rate and not slow_hosts & {a, b}:
            rows.append(_slow_row(f"{hosts[a]} – {hosts[b]}", rate, best_rate))
    slowest = min(rates.values())
    return rows or [
        ok_row("links", f"all {len(rates)} pairs", f"{_rate_text(slowest)} at least, {_rate_text(best_rate)} at best")
    ]


def _slow_row(where: str, rate: float, best_rate: float) -> Row:
    """Returns a failure or a warning for a host or pair of hosts that is slow."""
    make_row = failed_row if rate < _FAILURE_FRACTION * best_rate else warning_row
    finding = f"{_rate_text(rate)}, others {_rate_text(best_rate)}"
    return make_row("links", where, finding, "look at its cable, switch port and network card")


def _pair_rate(a: int, b: int) -> float:
    """Returns the rate, in bytes per second, at which the first devices of two processes send data to each other."""
    devices = [next(device for device in jax.devices() if device.process_index == process) for process in (a, b)]
    return _collective_rate(Mesh(np.array(devices), ("pair",)), "pair", "collective-permute")


def _shortest_seconds(execute: Callable[[], Any]) -> float:
    """Returns the shortest duration of a few executions. A first one, which compiles and connects, is not measured."""
    jax.block_until_ready(execute())
    return min(measure_times(execute, _REPEATS))


def measure_times(execute: Callable[[], Any], repeats: int) -> list[float]:
    """Returns the duration of each execution in seconds, until its results are ready on the devices."""
    return timeit.repeat(lambda: jax.block_until_ready(execute()), number=1, repeat=repeats)


def _rate_text(rate: float) -> str:
    return f"{rate / _GIGA:.3g} GB/s"


_NETWORK_LINE = re.compile(r"NCCL INFO NET/(IB|Socket) : Using (.+)")
_PLUGIN_LINE = re.compile(r"NCCL INFO Using network (\S+)")


def configure_nccl_logs(folder: Path) -> None:
    """Makes NCCL write one log per process to a folder. Call it before NCCL starts.

    Raises `ConfigError` if the folder cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old_log in sorted(folder.glob("nccl-*.log")):
            old_log.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"--nccl-debug: cannot create {folder}: {error.strerror}; choose another run.dir") from error
    os.environ |= {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET",
        "NCCL_DEBUG_FILE": str(folder / "nccl-%h-%p.log"),
    }


def transport(text: str) -> str:
    """Returns the network and interfaces that NCCL uses according to the log of one process; empty if it names none."""
    plugins = _PLUGIN_LINE.findall(text)
    networks = [f"{kind} {interfaces.strip()}" for kind, interfaces in _NETWORK_LINE.findall(text)]
    return ", ".join(dict.fromkeys([*plugins, *networks]))


def nccl_rows(folder: Path, host: str) -> list[Row]:
    """Returns a row for each transport that the logs in a folder name, or a warning for `host` if they name none."""
    hosts_of: dict[str, list[str]] = {}
    for path in sorted(folder.glob("nccl-*.log")):
        description = transport(path.read_text(errors="replace"))
        if description:
            hosts_of.setdefault(description, []).append(path.name.removeprefix("nccl-").rpartition("-")[0])
    if not hosts_of:
        return [warning_row("NCCL", host, f"it wrote nothing to {folder}", "it only runs between GPUs")]
    return [
        ok_row("NCCL", ", ".join(dict.fromkeys(hosts)), description) for description, hosts in sorted(hosts_of.items())
    ]
