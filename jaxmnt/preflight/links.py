"""A short measured test: matrix products on each device, and what crosses the network along each mesh axis and
between each two hosts.

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

_TIMES = 3
_PAIRED_HOSTS = 16
_MIDDLING, _SLOW = 0.6, 0.25
"""Of the best: what is worth a look, and what a run should not start with."""
_LEAST_OF_LINK = {"cpu": 0.005, "gpu": 0.25}
"""Of the speed of the hosts' network cards: below it, the whole network is not as it should be."""
_BYTES = {"cpu": 1 << 20, "gpu": 64 << 20}
"""What a device sends."""
_WIDTH = {"cpu": 512, "gpu": 8192}
_BITS, _MEGA, _GIGA = 8, 1e6, 1e9


def matmul_rows(identity: Identity, hosts: Sequence[str]) -> list[Row]:
    """Each device by itself: TFLOP/s of a square product. Process 0 gets the rows."""
    barrier("everyone multiplies", identity)
    devices = jax.local_devices()
    product = TimedProduct(devices, _WIDTH.get(devices[0].platform, _WIDTH["cpu"]))
    of_all = gather("matrix products", [product.flops / seconds / 1e12 for seconds in product()], identity)
    if of_all is None:
        return []
    found = {
        f"{host} device {number}": rate
        for host, rates in zip(hosts, of_all, strict=True)
        for number, rate in enumerate(rates)
    }
    usual, on_gpu = statistics.median(found.values()), devices[0].platform != "cpu"
    advice = "look at its clocks, heat and neighbours"
    rows = [
        (failed if rate < _SLOW * usual and on_gpu else warning)(
            "matrix product", where, f"{rate:.3g} TFLOP/s, usual {usual:.3g}", advice
        )
        for where, rate in found.items()
        if rate < _MIDDLING * usual
    ]
    return rows or [good("matrix product", f"all {len(found)} devices", f"{min(found.values()):.3g} TFLOP/s at least")]


def axis_rows(mesh: Mesh, identity: Identity, hosts: Sequence[str]) -> list[Row]:
    """The collectives of a run along each axis that is split. Bytes count as in nccl-tests (bus bandwidth):
    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    rows = []
    for axis, size in mesh.shape.items():
        if size == 1:
            continue
        rates = [_rate(mesh, axis, kind) for kind in COLLECTIVES]
        of_all = gather(f"collectives along {axis}", rates, identity)
        if of_all is None:
            continue
        names = (kind.replace("collective-permute", "point-to-point") for kind in COLLECTIVES)
        slowest = zip(names, map(min, zip(*of_all, strict=True)), strict=True)
        rows.append(
            good(f"axis {axis}", describe_hosts(hosts), ", ".join(f"{name} {_gb(rate)}" for name, rate in slowest))
        )
    return rows


COLLECTIVES: dict[str, tuple[Callable[..., Any], Callable[[int], float], bool]] = {
    "all-reduce": (lambda x, axis, n: jax.lax.psum(x, axis), lambda n: 2 * (n - 1) / n, True),
    "all-gather": (lambda x, axis, n: jax.lax.all_gather(x, axis, tiled=True), lambda n: n - 1, False),
    "reduce-scatter": (lambda x, axis, n: jax.lax.psum_scatter(x, axis, tiled=True), lambda n: (n - 1) / n, True),
    "collective-permute": (
        lambda x, axis, n: jax.lax.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)]), lambda n: 1, True
    ),
}  # fmt: skip
"""What is done with a device's array, how often its bytes cross the bus for N devices, and whether it begins whole
(else with an N-th of the bytes)."""


def _rate(mesh: Mesh, axis: str, kind: str) -> float:
    """Bytes a second and device."""
    operation, crossings, whole = COLLECTIVES[kind]
    size = mesh.shape[axis]
    count = _BYTES.get(mesh.devices.flat[0].platform, _BYTES["cpu"]) // 4 // size * (size if whole else 1)
    program = jax.jit(map_over_devices(mesh, partial(operation, axis=axis, n=size)))
    array = repeat_on_devices(mesh, np.ones(count, np.float32))
    return 4 * count * crossings(size) / _seconds(partial(program, array))


def map_over_devices(mesh: Mesh, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of what one device has, for all devices of the mesh."""
    spec = PartitionSpec(mesh.axis_names)
    return jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


def repeat_on_devices(mesh: Mesh, values: np.ndarray) -> Array:
    """An array that has these values on each device of the mesh, one after the other along the first dimension."""
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    shape = (values.shape[0] * mesh.size, *values.shape[1:])
    return jax.make_array_from_callback(shape, sharding, lambda _: values)


def pair_rows(identity: Identity, hosts: Sequence[str], megabits: dict[str, int]) -> list[Row]:
    """Each two hosts exchange bytes, as many pairs at a time as there can be. `megabits` is each host's card.

    Process 0 gets the rows; with more than 16 hosts there are none.
    """
    first = list(dict.fromkeys(hosts))
    if not 2 <= len(first) <= _PAIRED_HOSTS:
        return []
    firsts = [hosts.index(host) for host in first]
    own = []
    for number, pairs in enumerate(_tournament(len(first))):
        barrier(f"round {number} of pairs of hosts", identity)
        for one, other in pairs:
            if identity.process_id in (firsts[one], firsts[other]):
                own.append((one, other, _pair_rate(firsts[one], firsts[other])))
    of_all = gather("pairs of hosts", own, identity)
    if of_all is None:
        return []
    rates: dict[tuple[int, int], float] = {}
    for one, other, rate in chain.from_iterable(of_all):
        rates[one, other] = min(rate, rates.get((one, other), rate))
    return judge_pairs(first, rates, [megabits[host] for host in first], jax.devices()[0].platform)


def _tournament(hosts: int) -> list[list[tuple[int, int]]]:
    """Rounds in which each host meets one other, until all have met (the circle method)."""
    ring = [*range(hosts + hosts % 2)]  # of an odd number, whoever meets the one that is not there rests
    rounds = []
    for _ in range(len(ring) - 1):
        half = zip(ring[: len(ring) // 2], reversed(ring[len(ring) // 2 :]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in half if max(a, b) < hosts])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


def judge_pairs(
    hosts: Sequence[str], rates: dict[tuple[int, int], float], megabits: Sequence[int], platform: str
) -> list[Row]:
    """What rates of pairs (bytes a second) say of hosts: who is slow with everybody is named alone."""
    best = max(rates.values())
    expected = min((speed for speed in megabits if speed), default=0) * _MEGA / _BITS
    least = _LEAST_OF_LINK.get(platform, _LEAST_OF_LINK["gpu"]) * expected
    if best < least:
        found = f"{_gb(best)} at best, and the hosts' cards have {_gb(expected)}"
        return [failed("links", f"all {len(hosts)} hosts", found, "look at the switches, and at which network is used")]
    rows: list[Row] = []
    named: set[int] = set()
    for number, host in enumerate(hosts):
        fastest = max(rate for pair, rate in rates.items() if number in pair)
        if len(hosts) > 2 and fastest < _MIDDLING * best:
            named.add(number)
            rows.append(_slow(host, fastest, best))
    for (one, other), rate in sorted(rates.items()):
        if rate < _MIDDLING * best and not named & {one, other}:
            rows.append(_slow(f"{hosts[one]} – {hosts[other]}", rate, best))
    slowest = min(rates.values())
    return rows or [good("links", f"all {len(rates)} pairs", f"{_gb(slowest)} at least, {_gb(best)} at best")]


def _slow(where: str, rate: float, best: float) -> Row:
    judge = failed if rate < _SLOW * best else warning
    return judge("links", where, f"{_gb(rate)}, others {_gb(best)}", "look at its cable, switch port and card")


def _pair_rate(one: int, other: int) -> float:
    devices = [next(device for device in jax.devices() if device.process_index == process) for process in (one, other)]
    return _rate(Mesh(np.array(devices), ("pair",)), "pair", "collective-permute")


def _seconds(act: Callable[[], Any]) -> float:
    """The shortest of a few times, after one that compiles and connects."""
    jax.block_until_ready(act())
    return min(measure_times(act, _TIMES))


def measure_times(act: Callable[[], Any], times: int) -> list[float]:
    """The seconds of each time until the devices have what `act` returns."""
    return timeit.repeat(lambda: jax.block_until_ready(act()), number=1, repeat=times)


def _gb(rate: float) -> str:
    return f"{rate / _GIGA:.3g} GB/s"


_USING = re.compile(r"NCCL INFO NET/(IB|Socket) : Using (.+)")
_PLUGIN = re.compile(r"NCCL INFO Using network (\S+)")


def configure_nccl_logs(folder: Path) -> None:
    """Lets NCCL, which reads this when it starts, write a file a process. Raises `ConfigError` if the folder cannot be
    made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in sorted(folder.glob("nccl-*.log")):
            old.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"--nccl-debug: {folder} cannot be made: {error.strerror}; choose another run.dir") from error
    os.environ |= {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET",
        "NCCL_DEBUG_FILE": str(folder / "nccl-%h-%p.log"),
    }


def transport(text: str) -> str:
    """Which network and interfaces one process's NCCL uses; empty if it does not say."""
    using, plugin = _USING.findall(text), _PLUGIN.findall(text)
    parts = [f"{kind} {where.strip()}" for kind, where in using]
    return ", ".join(dict.fromkeys([*plugin, *parts]))


def nccl_rows(folder: Path, host: str) -> list[Row]:
    """What the files there tell; `host` is where nothing is told."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.glob("nccl-*.log")):
        said = transport(path.read_text(errors="replace"))
        if said:
            found.setdefault(said, []).append(path.name.removeprefix("nccl-").rpartition("-")[0])
    if not found:
        return [warning("NCCL", host, f"it wrote nothing into {folder}", "it only runs between GPUs")]
    return [good("NCCL", ", ".join(dict.fromkeys(hosts)), said) for said, hosts in sorted(found.items())]
