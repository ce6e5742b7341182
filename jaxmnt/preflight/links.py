"""Measures matrix products on each device, collectives along each mesh axis, and links between each two hosts.

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
from jaxmnt.preflight.table import Row, describe_hosts, failed, good, warning
from jaxmnt.run.probe import TimedProduct

_REPEATS = 3
_PAIRED_HOSTS = 16
_WARNING_FRACTION, _FAILURE_FRACTION = 0.6, 0.25
"""Fractions of the best rate below which a rate is a warning, and a failure."""
_LEAST_OF_LINK = {"cpu": 0.005, "gpu": 0.25}
"""Fraction of the speed of the hosts' network cards below which the whole network is wrong."""
_BYTES = {"cpu": 1 << 20, "gpu": 64 << 20}
"""Bytes that each device sends."""
_WIDTH = {"cpu": 512, "gpu": 8192}
_BITS, _MEGA, _GIGA = 8, 1e6, 1e9


def matmul_rows(identity: Identity, hosts: Sequence[str]) -> list[Row]:
    """Measures the TFLOP/s of a square product on each device by itself. Process 0 gets the rows."""
    barrier("everyone multiplies", identity)
    devices = jax.local_devices()
    product = TimedProduct(devices, _WIDTH.get(devices[0].platform, _WIDTH["cpu"]))
    process_rates = gather("matrix products", [product.flops / seconds / 1e12 for seconds in product()], identity)
    if process_rates is None:
        return []
    device_rates = {
        f"{host} device {index}": rate
        for host, rates in zip(hosts, process_rates, strict=True)
        for index, rate in enumerate(rates)
    }
    usual = statistics.median(device_rates.values())
    on_gpu = devices[0].platform != "cpu"
    advice = "look at its clocks, heat and neighbours"
    rows = []
    for where, rate in device_rates.items():
        if rate < _WARNING_FRACTION * usual:
            judge = failed if rate < _FAILURE_FRACTION * usual and on_gpu else warning
            rows.append(judge("matrix product", where, f"{rate:.3g} TFLOP/s, usual {usual:.3g}", advice))
    slowest = min(device_rates.values())
    return rows or [good("matrix product", f"all {len(device_rates)} devices", f"{slowest:.3g} TFLOP/s at least")]


def axis_rows(mesh: Mesh, identity: Identity, hosts: Sequence[str]) -> list[Row]:
    """Measures the collectives of a run along each axis with more than one device. Process 0 gets the rows.

    Rates are bus bandwidths, as in nccl-tests: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    rows = []
    for axis, size in mesh.shape.items():
        if size == 1:
            continue
        rates = [_rate(mesh, axis, kind) for kind in COLLECTIVES]
        process_rates = gather(f"collectives along {axis}", rates, identity)
        if process_rates is None:
            continue
        names = (kind.replace("collective-permute", "point-to-point") for kind in COLLECTIVES)
        slowest = map(min, zip(*process_rates, strict=True))
        finding = ", ".join(f"{name} {_gb(rate)}" for name, rate in zip(names, slowest, strict=True))
        rows.append(good(f"axis {axis}", describe_hosts(hosts), finding))
    return rows


COLLECTIVES: dict[str, tuple[Callable[..., Any], Callable[[int], float], bool]] = {
    "all-reduce": (lambda x, axis, n: jax.lax.psum(x, axis), lambda n: 2 * (n - 1) / n, True),
    "all-gather": (lambda x, axis, n: jax.lax.all_gather(x, axis, tiled=True), lambda n: n - 1, False),
    "reduce-scatter": (lambda x, axis, n: jax.lax.psum_scatter(x, axis, tiled=True), lambda n: (n - 1) / n, True),
    "collective-permute": (
        lambda x, axis, n: jax.lax.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)]), lambda n: 1, True
    ),
}  # fmt: skip
"""For each collective its operation on a device's array, the bus crossings of each byte for N devices, and whether a
device starts with all bytes (else with 1/N of them)."""


def _rate(mesh: Mesh, axis: str, kind: str) -> float:
    """Returns the bytes per second and device of a collective along an axis."""
    operation, crossings, starts_whole = COLLECTIVES[kind]
    size = mesh.shape[axis]
    shard = _BYTES.get(mesh.devices.flat[0].platform, _BYTES["cpu"]) // 4 // size
    count = shard * (size if starts_whole else 1)
    program = jax.jit(map_over_devices(mesh, partial(operation, axis=axis, n=size)))
    array = repeat_on_devices(mesh, np.ones(count, np.float32))
    return 4 * count * crossings(size) / _seconds(partial(program, array))


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
    """Measures the link between each two hosts, with as many pairs at a time as possible.

    `megabits` is the speed of each host's card in Mbit/s. Process 0 gets the rows; with more than 16 hosts there are
    none.
    """
    names = list(dict.fromkeys(hosts))
    if not 2 <= len(names) <= _PAIRED_HOSTS:
        return []
    # Only the first process of each host takes part in its pairs.
    processes = [hosts.index(host) for host in names]
    own_rates = []
    for index, pairs in enumerate(_tournament(len(names))):
        barrier(f"round {index} of pairs of hosts", identity)
        for a, b in pairs:
            if identity.process_id in (processes[a], processes[b]):
                own_rates.append((a, b, _pair_rate(processes[a], processes[b])))
    process_rates = gather("pairs of hosts", own_rates, identity)
    if process_rates is None:
        return []
    # Both processes of a pair measure it: the slower measurement counts.
    rates: dict[tuple[int, int], float] = {}
    for a, b, rate in chain.from_iterable(process_rates):
        rates[a, b] = min(rate, rates.get((a, b), rate))
    return judge_pairs(names, rates, [megabits[host] for host in names], jax.devices()[0].platform)


def _tournament(hosts: int) -> list[list[tuple[int, int]]]:
    """Returns rounds of disjoint pairs in which each host meets every other once (the circle method)."""
    ring = [*range(hosts + hosts % 2)]  # an odd number gets a dummy, and the host that meets it pauses
    rounds = []
    for _ in range(len(ring) - 1):
        half = zip(ring[: len(ring) // 2], reversed(ring[len(ring) // 2 :]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in half if max(a, b) < hosts])
        ring = [ring[0], ring[-1], *ring[1:-1]]  # the first stays, the others rotate
    return rounds


def judge_pairs(
    hosts: Sequence[str], rates: dict[tuple[int, int], float], megabits: Sequence[int], platform: str
) -> list[Row]:
    """Returns rows for slow hosts and pairs, from the rates of pairs in bytes per second.

    A host that is slow in all its pairs gets a single row.
    """
    best = max(rates.values())
    expected = min((speed for speed in megabits if speed), default=0) * _MEGA / _BITS
    least = _LEAST_OF_LINK.get(platform, _LEAST_OF_LINK["gpu"]) * expected
    if best < least:
        finding = f"{_gb(best)} at best, and the hosts' cards have {_gb(expected)}"
        advice = "look at the switches, and at which network is used"
        return [failed("links", f"all {len(hosts)} hosts", finding, advice)]
    rows: list[Row] = []
    # Hosts that are slow in all pairs. With two hosts the one pair does not tell which is slow.
    slow_hosts: set[int] = set()
    for index, host in enumerate(hosts):
        fastest = max(rate for pair, rate in rates.items() if index in pair)
        if len(hosts) > 2 and fastest < _WARNING_FRACTION * best:
            slow_hosts.add(index)
            rows.append(_slow_row(host, fastest, best))
    # Slow pairs of the other hosts.
    for (a, b), rate in sorted(rates.items()):
        if rate < _WARNING_FRACTION * best and not slow_hosts & {a, b}:
            rows.append(_slow_row(f"{hosts[a]} – {hosts[b]}", rate, best))
    slowest = min(rates.values())
    return rows or [good("links", f"all {len(rates)} pairs", f"{_gb(slowest)} at least, {_gb(best)} at best")]


def _slow_row(where: str, rate: float, best: float) -> Row:
    judge = failed if rate < _FAILURE_FRACTION * best else warning
    return judge("links", where, f"{_gb(rate)}, others {_gb(best)}", "look at its cable, switch port and card")


def _pair_rate(a: int, b: int) -> float:
    """Returns the bytes per second that the first devices of two processes send to each other."""
    devices = [next(device for device in jax.devices() if device.process_index == process) for process in (a, b)]
    return _rate(Mesh(np.array(devices), ("pair",)), "pair", "collective-permute")


def _seconds(act: Callable[[], Any]) -> float:
    """Returns the shortest of a few times, after a first execution that compiles and connects."""
    jax.block_until_ready(act())
    return min(measure_times(act, _REPEATS))


def measure_times(act: Callable[[], Any], repeats: int) -> list[float]:
    """Returns the seconds of each execution, until the results of `act` are ready on the devices."""
    return timeit.repeat(lambda: jax.block_until_ready(act()), number=1, repeat=repeats)


def _gb(rate: float) -> str:
    return f"{rate / _GIGA:.3g} GB/s"


_USING = re.compile(r"NCCL INFO NET/(IB|Socket) : Using (.+)")
_PLUGIN = re.compile(r"NCCL INFO Using network (\S+)")


def configure_nccl_logs(folder: Path) -> None:
    """Makes NCCL write one log per process to a folder. Must run before NCCL starts.

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
    """Returns the network and interfaces that NCCL uses, from the log of one process; empty if it does not tell."""
    using, plugin = _USING.findall(text), _PLUGIN.findall(text)
    parts = [f"{kind} {where.strip()}" for kind, where in using]
    return ", ".join(dict.fromkeys([*plugin, *parts]))


def nccl_rows(folder: Path, host: str) -> list[Row]:
    """Returns a row for each transport in the logs of a folder; without any, a warning for `host`."""
    hosts_of: dict[str, list[str]] = {}
    for path in sorted(folder.glob("nccl-*.log")):
        description = transport(path.read_text(errors="replace"))
        if description:
            hosts_of.setdefault(description, []).append(path.name.removeprefix("nccl-").rpartition("-")[0])
    if not hosts_of:
        return [warning("NCCL", host, f"it wrote nothing to {folder}", "it only runs between GPUs")]
    return [
        good("NCCL", ", ".join(dict.fromkeys(hosts)), description) for description, hosts in sorted(hosts_of.items())
    ]
