"""What devices and links attain, measured on the hosts at hand: the rates by which a plan predicts a step.

All devices do the same at a time, each on its own data, as in a step. A figure is the median of a few times in the
slowest process.

Shapes: M, N, K of a product [M, K] by [K, N]; B batch, L length, H query heads, G key/value heads, W head width, D
model, F MLP.
"""

import math
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product as combinations
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from jaxmnt.distributed.coordination import all_gather, barrier
from jaxmnt.distributed.identity import Identity
from jaxmnt.distributed.process_group import host_names, software
from jaxmnt.models import cudnn
from jaxmnt.models.blockwise import ScoreOptions
from jaxmnt.models.kernels import device_capability
from jaxmnt.plan.calibration import Attention, Calibration, Collective, Products
from jaxmnt.plan.chips import CHIPS, network_of
from jaxmnt.plan.hlo import Program
from jaxmnt.plan.rates import (
    BETWEEN_HOSTS,
    STEP_BETWEEN_HOSTS,
    STEP_WITHIN_HOST,
    WITHIN_HOST,
    Rates,
    ring_passes,
)
from jaxmnt.plan.timeline import replay_program
from jaxmnt.preflight.links import COLLECTIVES, map_over_devices, measure_times, repeat_on_devices
from jaxmnt.training.compiler_options import cpu_options
from jaxmnt.training.spec import LEAST_FLOAT8

_TIMES = 3
_PRODUCTS_SECONDS, _ALL_SECONDS = 60.0, 105.0
"""From the start on: when products, and collectives of further sizes, are no longer begun. Compiling them takes most of
the time."""


class Scale(NamedTuple):
    """How much is measured."""

    products: tuple[tuple[str, tuple[int, ...]], ...]
    """By dtype, the sizes of m, n and k. That of the first one is the dtype of a layer's other work."""
    layouts: tuple[bool, ...]
    """Whether rows are added up: on CPUs such products have a rate of their own."""
    most_flops: float
    """Of a product."""
    least_flops: float
    """Of a program of products."""
    pairs: int
    """Of sides, in a round of a program: a few on CPUs, where they lie in the cache as in a step."""
    payloads: tuple[int, ...]
    """Bytes of a collective."""
    work: int
    """Width of the products between two collectives."""
    rounds: int
    """Of a loop of work and a collective."""
    layers: tuple[tuple[int, int, int], ...]
    """(B · L, D, F) of a layer's work besides products."""
    temporary: int
    """Bytes of temporary memory, of a program that has the kernel map it; 0 on GPUs, where it stays mapped."""


ON_CPU = Scale(
    products=(("float32", (64, 256, 1024, 4096)), ("bfloat16", (64, 1024))), layouts=(False, True),
    most_flops=9e9, least_flops=5e8, pairs=2, payloads=(1 << 14, 1 << 17, 1 << 20, 1 << 24), work=256,
    rounds=10, layers=((1024, 128, 344), (4096, 256, 688)), temporary=1 << 28,
)  # fmt: skip
ON_GPU = Scale(
    products=(("bfloat16", (1024, 4096, 16384)), ("float8", (2048, 8192))), layouts=(False,),
    most_flops=1e13, least_flops=1e13, pairs=32, payloads=(1 << 20, 1 << 25, 1 << 28), work=256,
    rounds=30, layers=((8192, 4096, 14336),), temporary=0,
)  # fmt: skip
_LENGTHS, _TOKENS, _HEADS, _KV_HEADS, _HEAD_WIDTH = (2048, 8192), 16384, 32, 8, 128
_ATTENDED = 16
"""Times in a program, beside which its start does not count."""
_COPIED = 1 << 28
_MOST_BYTES = 1 << 30
"""Of the sides of a program's products."""
_LEAST_SHAPES = 4
"""Of products of a dtype, whatever the time."""
_UNSURE = 0.1
"""Of a loop's seconds without a collective: so much the difference of two loops may be wrong by."""
_LEAST_SECONDS = 1e-14
"""Of a byte that is sent: where bytes do not matter."""
_LAYERS, _HEADS_OF_LAYER, _ROW = 24, 4, 256
_EXECUTIONS, _SHORT = 8, 8
"""Of the program that has memory mapped, and the shorter side of what it multiplies."""


def calibrate(identity: Identity, date: str, scale: Scale | None = None) -> Calibration | None:
    """Process 0 gets it, the others None."""
    machines = host_names(identity)
    devices = jax.devices()
    hosts = [machines[device.process_index] for device in devices]
    bench = _Bench(devices, identity)
    on_cpu = bench.on_cpu
    scale = scale or (ON_CPU if on_cpu else ON_GPU)
    has_float8 = not on_cpu and device_capability(devices[0]) >= LEAST_FLOAT8
    kinds = [
        (sizes, dtype, gradient)
        for dtype, sizes in scale.products
        for gradient in scale.layouts
        if dtype != "float8" or has_float8
    ]
    calibration = Calibration(
        kind=devices[0].device_kind,
        devices=len(devices),
        hosts=len(set(hosts)),
        date=date,
        software=software(),
        # Measured from here on, in the same order in all processes.
        products=tuple(
            _products(bench, scale, *kind, until=_PRODUCTS_SECONDS * number / len(kinds))
            for number, kind in enumerate(kinds, 1)
        ),
        memory=_memory(bench, scale),
        instruction=_instruction(bench) if on_cpu else 0.0,
        page_faults=_page_faults(bench, scale.temporary) if on_cpu else 0.0,
        attention=None if on_cpu else _attention(bench),
        to_host=None if on_cpu else _to_host(bench),
        collectives=tuple(_collectives(bench, scale, hosts)),
    )
    return calibration if identity.process_id == 0 else None


class _Bench:
    """Times programs on all devices at once."""

    def __init__(self, devices: Sequence[jax.Device], identity: Identity):
        self.devices, self.identity = devices, identity
        self.on_cpu = devices[0].platform == "cpu"
        self._mesh = Mesh(np.array(devices), ("all",))
        self._random = np.random.default_rng(0).standard_normal(1 << 20, np.float32)
        self._options = cpu_options(jnp.dtype("float32"), "2") if self.on_cpu else {}
        self._began = time.perf_counter()
        self.elapsed = 0.0
        """Seconds since the start, of the process that began first: the same in all of them."""

    def array(self, shape: tuple[int, ...], dtype: Any = jnp.float32, mesh: Mesh | None = None) -> Array:
        """Random numbers of this shape on each device, whose first dimensions lie one after the other. Of zeros a GPU
        multiplies more, since they take less power."""
        return repeat_on_devices(mesh or self._mesh, np.resize(self._random, shape).astype(dtype))

    def compiled(self, function: Callable[..., Any], *arguments: Any, mesh: Mesh | None = None) -> Any:
        """The function of what one device has, for all devices."""
        return jax.jit(map_over_devices(mesh or self._mesh, function)).lower(*arguments).compile(self._options)

    def timed(self, function: Callable[..., Any], *arguments: Any, mesh: Mesh | None = None) -> tuple[float, Any]:
        """The seconds of one execution, and the program."""
        program = self.compiled(function, *arguments, mesh=mesh)
        return self.seconds(partial(program, *arguments)), program

    def seconds(self, act: Callable[[], Any]) -> float:
        """Seconds of the slowest process."""
        jax.block_until_ready(act())
        barrier("everyone measures", self.identity)
        return self.slowest(statistics.median(measure_times(act, _TIMES)))

    def slowest(self, seconds: float) -> float:
        """What the process found that found most."""
        of_all = all_gather("seconds", (seconds, time.perf_counter() - self._began), self.identity)
        self.elapsed = max(elapsed for _, elapsed in of_all)
        return float(max(seconds for seconds, _ in of_all))


# What devices compute.


def _products(
    bench: _Bench, scale: Scale, sizes: tuple[int, ...], dtype: str, gradient: bool, until: float
) -> Products:
    """In random order, the extreme shapes first. What is too large, or is not begun `until` then, is said to attain
    what the nearest does that was measured."""

    @cache  # they stay, for others of the same shape
    def side(place: int, rows: int, columns: int) -> Array:
        return bench.array((rows, columns), jnp.float8_e4m3fn if dtype == "float8" else dtype)

    def multiply(sides: list[tuple[Array, Array]], place: Array, rounds: int) -> list[Array]:
        """One number of each product, so that they are written into the same memory one after the other."""

        def once(number: int, found: list[Array]) -> list[Array]:
            # Without it the products would be made once, before the loop.
            again, number = jax.lax.optimization_barrier((sides, number))
            whole, at = (_product(left, right, dtype, gradient) for left, right in again), place[0] * number
            return [sum_ + jax.lax.dynamic_slice(one, (at, at), (1, 1)) for sum_, one in zip(found, whole, strict=True)]

        zero = jnp.zeros((1, 1), jnp.float32 if dtype == "float32" else jnp.bfloat16)
        return jax.lax.fori_loop(0, rounds, once, [zero] * len(sides))

    places = bench.array((1,), jnp.int32)
    found: dict[tuple[int, ...], float] = {}
    shapes = list(combinations(sizes, repeat=3))
    in_turn = [shapes[place] for place in np.random.default_rng(0).permutation(len(shapes))]
    for m, n, k in sorted(in_turn, key=lambda shape: not {*shape} <= {sizes[0], sizes[-1]}):
        flops = 2.0 * m * n * k
        if flops > scale.most_flops or (len(found) >= _LEAST_SHAPES and bench.elapsed > until):
            continue
        times = max(1, int(scale.least_flops // flops))
        pairs = max(1, min(scale.pairs, times, _MOST_BYTES // (4 * k * (m + n))))
        rounds = times // pairs
        left = (k, m) if gradient else (m, k)
        sides = [(side(place, *left), side(scale.pairs + place, k, n)) for place in range(pairs)]
        seconds, _ = bench.timed(partial(multiply, rounds=rounds), sides, places)
        found[m, n, k] = rounds * pairs * flops / seconds
    rates = tuple(found[_nearest(found, shape)] for shape in shapes)
    return Products(dtype=dtype, gradient=gradient, sizes=sizes, rates=rates)


def _product(left: Array, right: Array, dtype: str, gradient: bool) -> Array:
    inside = (((0,) if gradient else (1,), (0,)), ((), ()))
    out = jnp.float32 if dtype == "float32" else jnp.bfloat16
    precision = "highest" if dtype == "float32" else None  # as training multiplies
    return jax.lax.dot_general(left, right, inside, precision=precision, preferred_element_type=out)


def _nearest(found: Iterable[tuple[int, ...]], shape: tuple[int, ...]) -> tuple[int, ...]:
    """By the logarithms of sizes."""
    apart = lambda one: sum(math.log(a / b) ** 2 for a, b in zip(one, shape, strict=True))
    return min(sorted(found), key=apart)


def _memory(bench: _Bench, scale: Scale) -> float:
    """Bytes a second, as a plan counts them, of what a layer does besides products, forward and backward."""
    dtype, _ = scale.products[0]
    moved = seconds = 0.0
    for rows, width, mlp in scale.layers:
        took, program = bench.timed(
            _other_work, *(bench.array((rows, size), dtype) for size in (width, width, mlp, mlp))
        )
        moved += _played(program, replace(_FREE, memory=1.0))
        seconds += took
    return moved / seconds


def _other_work(x_TD: Array, y_TD: Array, gate_TF: Array, up_TF: Array) -> tuple[Array, ...]:
    def forward(x_TD: Array, gate_TF: Array, up_TF: Array) -> tuple[Array, ...]:
        wide_TD = (x_TD + y_TD).astype(jnp.float32)
        normed_TD = (wide_TD * jax.lax.rsqrt(jnp.mean(wide_TD**2, -1, keepdims=True) + 1e-5)).astype(x_TD.dtype)
        heads_BLHW = normed_TD.reshape(-1, _ROW, _HEADS_OF_LAYER, x_TD.shape[-1] // _HEADS_OF_LAYER)
        one, two = jnp.split(heads_BLHW, 2, -1)
        turned_BHLW = jnp.concatenate([one - two, one + two], -1).swapaxes(1, 2)
        return turned_BHLW.reshape(x_TD.shape), jax.nn.silu(gate_TF) * up_TF

    def layer(_: int, given: tuple[Array, ...]) -> tuple[Array, ...]:
        out, backward = jax.vjp(forward, *given)
        return tuple(one - 0.01 * gradient for one, gradient in zip(given, backward(out), strict=True))

    return tuple(one[:1, :1] for one in jax.lax.fori_loop(0, _LAYERS, layer, (x_TD, gate_TF, up_TF)))


def _instruction(bench: _Bench) -> float:
    """Seconds that an instruction takes that does next to nothing."""

    def chain(x_NN: Array) -> Array:
        return jax.lax.fori_loop(0, 1000, lambda _, x_NN: jnp.dot(jnp.dot(x_NN, x_NN) * 0.1, x_NN) * 0.1, x_NN)

    seconds, program = bench.timed(chain, bench.array((8, 8)))
    return seconds / _played(program, replace(_FREE, instruction=1.0))


def _page_faults(bench: _Bench, temporary: int) -> float:
    """Seconds of the kernel for a byte of a program's temporary memory, which it maps and clears for each execution."""
    side = math.isqrt(temporary // 4)
    tall_NK, wide_KN = bench.array((side, _SHORT)), bench.array((_SHORT, side))
    program = bench.compiled(lambda tall_NK, wide_KN: tall_NK @ wide_KN @ wide_KN.T, tall_NK, wide_KN)

    def act() -> None:
        for _ in range(_EXECUTIONS):
            jax.block_until_ready(program(tall_NK, wide_KN))

    act()
    barrier("everyone maps memory", bench.identity)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_stime
    act()
    seconds = resource.getrusage(resource.RUSAGE_SELF).ru_stime - before
    mapped = _EXECUTIONS * len(jax.local_devices()) * program.memory_analysis().temp_size_in_bytes
    return bench.slowest(seconds / mapped)


_FREE = Rates(
    products={"float32": math.inf, "bfloat16": math.inf}, attention=math.inf, memory=math.inf, within_host=math.inf,
    between_hosts=math.inf, to_host=math.inf,
)  # fmt: skip
"""By which nothing takes time."""


def _played(program: Any, rates: Rates) -> float:
    """What a plan counts of a program."""
    return replay_program(Program(program.as_text()), 1, rates).seconds


def _attention(bench: _Bench) -> Attention:
    """Of cuDNN's, in rows of two lengths: seconds are FLOPs / rate × (1 + half length / length)."""
    attend = partial(cudnn.attend_whole, ScoreOptions(_HEAD_WIDTH**-0.5))

    def both(q: Array, k: Array, v: Array) -> Any:
        out, backward = jax.vjp(attend, q, k, v)
        return backward(out)

    ahead, back = [], []
    for length in _LENGTHS:
        q, k, v = (
            bench.array((_TOKENS // length, length, heads, _HEAD_WIDTH), jnp.bfloat16)
            for heads in (_HEADS, _KV_HEADS, _KV_HEADS)
        )
        ahead.append(_repeated(bench, attend, q, k, v))
        back.append(_repeated(bench, both, q, k, v) - ahead[-1])
    flops = [2 * 2.0 * _TOKENS * _HEADS * length / 2 * _HEAD_WIDTH for length in _LENGTHS]
    seconds_a_flop = [seconds / count for seconds, count in zip(ahead, flops, strict=True)]
    slope, offset = statistics.linear_regression([1 / length for length in _LENGTHS], seconds_a_flop)
    half = max(0.0, slope / offset)
    long = 1 + half / _LENGTHS[-1]
    return Attention(forward=flops[-1] * long / ahead[-1], backward=2.5 * flops[-1] * long / back[-1], half_length=half)


def _repeated(bench: _Bench, function: Callable[..., Any], *arrays: Array) -> float:
    """Seconds of one of many times in a program."""

    def many(*given: Array) -> Array:
        def once(number: int, found: Array) -> Array:
            again, number = jax.lax.optimization_barrier((given, number))  # or it would be done once, before the loop
            cut = lambda one: jax.lax.dynamic_slice(one, [0 * number] * one.ndim, [1] * one.ndim).ravel()
            return sum(map(cut, jax.tree.leaves(function(*again))), found)

        return jax.lax.fori_loop(0, _ATTENDED, once, jnp.zeros((1,), given[0].dtype))

    seconds, _ = bench.timed(many, *arrays)
    return seconds / _ATTENDED


def _to_host(bench: _Bench) -> float:
    """Bytes a second from each device to its host's memory."""
    array = bench.array((_COPIED // 4,))
    near = array.sharding.with_memory_kind("pinned_host")
    return _COPIED / bench.seconds(lambda: jax.device_put(array, near))


# What devices send.


class _Sent(NamedTuple):
    steps: int
    bytes: float
    seconds: float
    unsure: float = 0.0
    """By so many seconds that figure may be wrong."""


def _collectives(bench: _Bench, scale: Scale, hosts: Sequence[str]) -> list[Collective]:
    """Each kind and place with the smallest and the largest payload, and in time also with those between."""
    groups = list(_groups(bench.devices, hosts))
    sent: dict[tuple[str, str], list[_Sent]] = {}
    for number, payload in enumerate((scale.payloads[0], scale.payloads[-1], *scale.payloads[1:-1])):
        for place, grid in groups:
            for kind in COLLECTIVES:
                if number < 2 or bench.elapsed < _ALL_SECONDS:
                    sent.setdefault((kind, place), []).append(_send(bench, scale, kind, grid, payload))
    steps = {} if bench.on_cpu else {WITHIN_HOST: STEP_WITHIN_HOST, BETWEEN_HOSTS: STEP_BETWEEN_HOSTS}
    found = []
    for (kind, place), each in sent.items():
        start, step, rate = fit_collective(each, steps.get(place, 0.0))
        found.append(Collective(kind=kind, place=place, start=start, step=step, rate=rate))
    return found


def _groups(devices: Sequence[jax.Device], hosts: Sequence[str]) -> Iterable[tuple[str, np.ndarray]]:
    """By place, and for each size of groups there, the devices in rows of a group. None, if processes would be left
    out."""
    network = next((network_of(chip) for chip in CHIPS.values() if chip.kind == devices[0].device_kind), None)
    in_racks = network is not None and network.domain > network.devices_per_host
    if network is not None and in_racks and len(devices) <= network.domain:
        hosts = [""] * len(devices)  # as in a plan, a rack counts as a host
    by_host = {host: [one for one, at in zip(devices, hosts, strict=True) if at == host] for host in sorted(set(hosts))}
    each = min(map(len, by_host.values()))
    grid = np.array([own[:each] for own in by_host.values()])  # [hosts, devices of each]
    if {one.process_index for one in grid.flat} != {one.process_index for one in devices}:
        return
    # Of several racks, which host is in which is not known.
    places = [(WITHIN_HOST, grid)] if in_racks else [(WITHIN_HOST, grid), (BETWEEN_HOSTS, grid.T)]
    for place, rows in places:
        most = rows.shape[1]
        for size in sorted({2, most} - {1}):
            if most % size == 0:
                yield place, rows.reshape(-1, size)


def _send(bench: _Bench, scale: Scale, kind: str, grid: np.ndarray, payload: int) -> _Sent:
    """Between products, as it is in a step: processes on CPUs look for what has arrived every few milliseconds, but at
    once if they have just looked. And many times in a program, whose start takes longer than a collective on GPUs."""
    act, _, whole = COLLECTIVES[kind]
    size = grid.shape[1]
    mesh = Mesh(grid, ("groups", "group"))
    share = payload // 4 // size
    array = bench.array((share * size if whole else share,), mesh=mesh)
    seconds, work = _beside_work(bench, scale, partial(act, axis="group", n=size), array, mesh)
    if kind == "collective-permute":
        return _Sent(1, payload, seconds, _UNSURE * work)
    steps = ring_passes(kind) * (size - 1)
    return _Sent(steps, payload * steps / size, seconds, _UNSURE * work)


def _beside_work(
    bench: _Bench, scale: Scale, send: Callable[[Any], Any], array: Array, mesh: Mesh
) -> tuple[float, float]:
    """Seconds of sending in a loop that also multiplies, less those of the loop that only multiplies; and the
    latter."""
    square_NN = bench.array((scale.work, scale.work), mesh=mesh)

    def loop(x: Array, y_NN: Array, send: Callable[[Any], Any]) -> Array:
        def once(_: int, given: tuple[Array, Array]) -> tuple[Array, Array]:
            x, product_NN = given
            product_NN = 0.01 * jnp.dot(product_NN, y_NN)
            return 0.5 * x + send(x + product_NN[0, 0])[0], product_NN

        return jax.lax.fori_loop(0, scale.rounds, once, (x, y_NN))[0]

    times = []
    for each in (send, lambda x: x):
        seconds, _ = bench.timed(partial(loop, send=each), array, square_NN, mesh=mesh)
        times.append(seconds / scale.rounds)
    return times[0] - times[1], times[1]


def fit_collective(sent: Sequence[_Sent], step: float = 0.0) -> tuple[float, float, float]:
    """(start, step, rate) that meet the seconds best, relative errors counting; none is below zero. What is not surely
    above nothing is left out, if enough others tell. Groups of one size alone do not tell a step from the start: it is
    then `step`, as far as there is room."""
    sure = [one for one in sent if one.seconds > one.unsure]
    sizes = len({one.steps for one in sent})
    if len(sure) > 1 and len({one.steps for one in sure}) == sizes:
        sent = sure
    steps, payloads, seconds, unsure = np.array(sent, float).T
    columns = {"start": np.ones_like(seconds), "step": steps, "bytes": payloads}
    if sizes == 1:
        del columns["step"]
    scales = np.maximum(seconds, unsure)
    solved: dict[str, float] = {}
    while columns:
        weighted = np.array([*columns.values()]).T / scales[:, None]
        solution = np.linalg.lstsq(weighted, seconds / scales, rcond=None)[0]
        solved = dict(zip(columns, solution.tolist(), strict=True))
        least = min(solved, key=lambda name: solved[name])
        if solved[least] >= 0:
            break
        del columns[least], solved[least]
    start, rate = solved.get("start", 0.0), 1 / max(solved.get("bytes", 0.0), _LEAST_SECONDS)
    if sizes > 1:
        return start, solved.get("step", 0.0), rate
    step = min(step, start / sent[0].steps)
    return start - step * sent[0].steps, step, rate
