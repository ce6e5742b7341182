"""Measures the rates of devices and links on the given hosts, from which a plan predicts the time of a step.

All devices run each measurement simultaneously, each on its own data, as in a step. The result is the median of a few
executions in the slowest process.

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
from jaxmnt.training.spec import MIN_FLOAT8_CAPABILITY

_REPEATS = 3
_PRODUCTS_SECONDS, _ALL_SECONDS = 60.0, 105.0
"""Seconds since the start after which no more products, and no more collectives of further sizes, are begun. Compiling
takes most of the time."""


class Scale(NamedTuple):
    """The sizes and the extent of the measurements."""

    products: tuple[tuple[str, tuple[int, ...]], ...]
    """Sizes of m, n and k for each dtype. The first dtype is also that of a layer's other work."""
    layouts: tuple[bool, ...]
    """True for products that sum over rows, as in a weight's gradient: on CPUs these have a rate of their own."""
    most_flops: float
    """Most FLOPs of a product."""
    least_flops: float
    """Least FLOPs of a program of products."""
    pairs: int
    """Most pairs of matrices that a program multiplies in a round: few on CPUs, to stay in the cache as in a step."""
    payloads: tuple[int, ...]
    """Bytes of a collective."""
    work: int
    """Width of the products between two collectives."""
    rounds: int
    """Iterations of a loop of work and a collective."""
    layers: tuple[tuple[int, int, int], ...]
    """Shapes (B · L, D, F) of a layer's work other than products."""
    temporary: int
    """Bytes of temporary memory of the program that measures page faults; 0 on GPUs, where memory stays mapped."""


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
_ATTENTION_REPEATS = 16
"""Executions of attention in a program: enough for the start of the program not to matter."""
_COPIED_BYTES = 1 << 28
_MOST_BYTES = 1 << 30
"""Most bytes of the operands of a program's products."""
_LEAST_SHAPES = 4
"""Shapes of products that are measured for each dtype, however long it takes."""
_UNCERTAINTY = 0.1
"""Error of the difference of two loops, as a fraction of the seconds of the loop without a collective."""
_LEAST_SECONDS = 1e-14
"""Least seconds of a sent byte, for payloads whose size has no measurable effect."""
_LAYERS, _HEADS_OF_LAYER, _ROW = 24, 4, 256
_EXECUTIONS, _SHORT = 8, 8
"""Executions of the program that measures page faults, and the shorter side of its operands."""


def calibrate(identity: Identity, date: str, scale: Scale | None = None) -> Calibration | None:
    """Measures all rates in all processes. Returns the calibration in process 0, None in the others."""
    machines = host_names(identity)
    devices = jax.devices()
    hosts = [machines[device.process_index] for device in devices]
    bench = _Bench(devices, identity)
    on_cpu = bench.on_cpu
    scale = scale or (ON_CPU if on_cpu else ON_GPU)
    has_float8 = not on_cpu and device_capability(devices[0]) >= MIN_FLOAT8_CAPABILITY
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
        # From here on these are measurements: all processes make them in the same order. Each kind of product may use
        # an equal share of the time.
        products=tuple(
            _products(bench, scale, *kind, until=_PRODUCTS_SECONDS * count / len(kinds))
            for count, kind in enumerate(kinds, 1)
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
        """Seconds since the start of the process that started first: the same in all processes."""

    def array(self, shape: tuple[int, ...], dtype: Any = jnp.float32, mesh: Mesh | None = None) -> Array:
        """Returns random numbers of this shape on each device, concatenated along the first dimension.

        They are not zeros, which a GPU multiplies faster, since they take less power.
        """
        return repeat_on_devices(mesh or self._mesh, np.resize(self._random, shape).astype(dtype))

    def compiled(self, function: Callable[..., Any], *arguments: Any, mesh: Mesh | None = None) -> Any:
        """Compiles, for all devices, a function of one device's shard."""
        return jax.jit(map_over_devices(mesh or self._mesh, function)).lower(*arguments).compile(self._options)

    def timed(self, function: Callable[..., Any], *arguments: Any, mesh: Mesh | None = None) -> tuple[float, Any]:
        """Returns the seconds of one execution in the slowest process, and the program."""
        program = self.compiled(function, *arguments, mesh=mesh)
        return self.seconds(partial(program, *arguments)), program

    def seconds(self, act: Callable[[], Any]) -> float:
        """Returns the median seconds of `act` in the slowest process, after one execution that is not measured."""
        jax.block_until_ready(act())
        barrier("everyone measures", self.identity)
        return self.slowest(statistics.median(measure_times(act, _REPEATS)))

    def slowest(self, seconds: float) -> float:
        """Returns the largest `seconds` of all processes, in all of them, and updates `elapsed`."""
        process_times = all_gather("seconds", (seconds, time.perf_counter() - self._began), self.identity)
        self.elapsed = max(elapsed for _, elapsed in process_times)
        return float(max(seconds for seconds, _ in process_times))


# Computation.


def _products(
    bench: _Bench, scale: Scale, sizes: tuple[int, ...], dtype: str, gradient: bool, until: float
) -> Products:
    """Measures products in random order, the extreme shapes first.

    Shapes that are too large, or that are not begun before `until` seconds since the start, get the rate of the nearest
    measured shape.
    """

    @cache  # shapes share their operands
    def operand(index: int, rows: int, columns: int) -> Array:
        return bench.array((rows, columns), jnp.float8_e4m3fn if dtype == "float8" else dtype)

    def multiply(operands: list[tuple[Array, Array]], offset: Array, rounds: int) -> list[Array]:
        """Returns one element of each product, so that all products are written to the same memory in turn."""

        def once(step: int, sums: list[Array]) -> list[Array]:
            # Without the barrier XLA would compute the products once, before the loop.
            again, step = jax.lax.optimization_barrier((operands, step))
            products = (_product(lhs, rhs, dtype, gradient) for lhs, rhs in again)
            start = offset[0] * step
            return [
                total + jax.lax.dynamic_slice(product, (start, start), (1, 1))
                for total, product in zip(sums, products, strict=True)
            ]

        zero = jnp.zeros((1, 1), jnp.float32 if dtype == "float32" else jnp.bfloat16)
        return jax.lax.fori_loop(0, rounds, once, [zero] * len(operands))

    offset = bench.array((1,), jnp.int32)
    measured: dict[tuple[int, ...], float] = {}
    shapes = list(combinations(sizes, repeat=3))
    in_random_order = [shapes[index] for index in np.random.default_rng(0).permutation(len(shapes))]
    for m, n, k in sorted(in_random_order, key=lambda shape: not {*shape} <= {sizes[0], sizes[-1]}):
        flops = 2.0 * m * n * k
        if flops > scale.most_flops or (len(measured) >= _LEAST_SHAPES and bench.elapsed > until):
            continue
        # A small product is repeated, over several pairs of operands as far as they fit in memory.
        times = max(1, int(scale.least_flops // flops))
        pairs = max(1, min(scale.pairs, times, _MOST_BYTES // (4 * k * (m + n))))
        rounds = times // pairs
        lhs_shape = (k, m) if gradient else (m, k)
        operands = [(operand(index, *lhs_shape), operand(scale.pairs + index, k, n)) for index in range(pairs)]
        seconds, _ = bench.timed(partial(multiply, rounds=rounds), operands, offset)
        measured[m, n, k] = rounds * pairs * flops / seconds
    rates = tuple(measured[_nearest(measured, shape)] for shape in shapes)
    return Products(dtype=dtype, gradient=gradient, sizes=sizes, rates=rates)


def _product(lhs: Array, rhs: Array, dtype: str, gradient: bool) -> Array:
    contracted = (((0,) if gradient else (1,), (0,)), ((), ()))
    out = jnp.float32 if dtype == "float32" else jnp.bfloat16
    precision = "highest" if dtype == "float32" else None  # as training multiplies
    return jax.lax.dot_general(lhs, rhs, contracted, precision=precision, preferred_element_type=out)


def _nearest(shapes: Iterable[tuple[int, ...]], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape at the least Euclidean distance from `shape`, in the logarithms of their sizes."""
    distance = lambda candidate: sum(math.log(a / b) ** 2 for a, b in zip(candidate, shape, strict=True))
    return min(sorted(shapes), key=distance)


def _memory(bench: _Bench, scale: Scale) -> float:
    """Measures the bytes per second, as a plan counts bytes, of a layer's work other than products.

    Both the forward and the backward pass count.
    """
    dtype, _ = scale.products[0]
    moved_bytes = total_seconds = 0.0
    for rows, width, mlp in scale.layers:
        arrays = [bench.array((rows, size), dtype) for size in (width, width, mlp, mlp)]
        seconds, program = bench.timed(_other_work, *arrays)
        # At one byte per second, the predicted seconds are the bytes.
        moved_bytes += _predicted_seconds(program, replace(_FREE, memory=1.0))
        total_seconds += seconds
    return moved_bytes / total_seconds


def _other_work(x_TD: Array, y_TD: Array, gate_TF: Array, up_TF: Array) -> tuple[Array, ...]:
    """Runs layers of a residual sum, a norm, a rotation of heads and SwiGLU, forward and backward."""

    def forward(x_TD: Array, gate_TF: Array, up_TF: Array) -> tuple[Array, ...]:
        wide_TD = (x_TD + y_TD).astype(jnp.float32)
        normed_TD = (wide_TD * jax.lax.rsqrt(jnp.mean(wide_TD**2, -1, keepdims=True) + 1e-5)).astype(x_TD.dtype)
        heads_BLHW = normed_TD.reshape(-1, _ROW, _HEADS_OF_LAYER, x_TD.shape[-1] // _HEADS_OF_LAYER)
        first, second = jnp.split(heads_BLHW, 2, -1)
        turned_BHLW = jnp.concatenate([first - second, first + second], -1).swapaxes(1, 2)
        return turned_BHLW.reshape(x_TD.shape), jax.nn.silu(gate_TF) * up_TF

    def layer(_: int, inputs: tuple[Array, ...]) -> tuple[Array, ...]:
        out, backward = jax.vjp(forward, *inputs)
        return tuple(array - 0.01 * gradient for array, gradient in zip(inputs, backward(out), strict=True))

    return tuple(array[:1, :1] for array in jax.lax.fori_loop(0, _LAYERS, layer, (x_TD, gate_TF, up_TF)))


def _instruction(bench: _Bench) -> float:
    """Measures the seconds of an instruction that does almost nothing."""

    def chain(x_NN: Array) -> Array:
        return jax.lax.fori_loop(0, 1000, lambda _, x_NN: jnp.dot(jnp.dot(x_NN, x_NN) * 0.1, x_NN) * 0.1, x_NN)

    seconds, program = bench.timed(chain, bench.array((8, 8)))
    # At one second per instruction, the predicted seconds are the number of instructions.
    return seconds / _predicted_seconds(program, replace(_FREE, instruction=1.0))


def _page_faults(bench: _Bench, temporary: int) -> float:
    """Measures the kernel's seconds for a byte of temporary memory, which it maps and clears for each execution."""
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
"""Rates under which every operation is free."""


def _predicted_seconds(program: Any, rates: Rates) -> float:
    """Returns the seconds that a plan predicts for a compiled program."""
    return replay_program(Program(program.as_text()), 1, rates).seconds


def _attention(bench: _Bench) -> Attention:
    """Measures cuDNN's attention in rows of two lengths.

    Fits the model of `Attention`: seconds = FLOPs / rate × (1 + half length / length).
    """
    attend = partial(cudnn.attend_whole_rows, ScoreOptions(_HEAD_WIDTH**-0.5))

    def both(q: Array, k: Array, v: Array) -> Any:
        out, backward = jax.vjp(attend, q, k, v)
        return backward(out)

    forward_seconds, backward_seconds = [], []
    for length in _LENGTHS:
        q, k, v = (
            bench.array((_TOKENS // length, length, heads, _HEAD_WIDTH), jnp.bfloat16)
            for heads in (_HEADS, _KV_HEADS, _KV_HEADS)
        )
        forward_seconds.append(_repeated(bench, attend, q, k, v))
        backward_seconds.append(_repeated(bench, both, q, k, v) - forward_seconds[-1])
    # Two products of 2 FLOPs for each head, width and pair of tokens, of which a causal mask leaves half.
    flops = [2 * 2.0 * _TOKENS * _HEADS * length / 2 * _HEAD_WIDTH for length in _LENGTHS]
    seconds_per_flop = [seconds / count for seconds, count in zip(forward_seconds, flops, strict=True)]
    slope, offset = statistics.linear_regression([1 / length for length in _LENGTHS], seconds_per_flop)
    half_length = max(0.0, slope / offset)
    slowdown = 1 + half_length / _LENGTHS[-1]
    return Attention(
        forward=flops[-1] * slowdown / forward_seconds[-1],
        backward=2.5 * flops[-1] * slowdown / backward_seconds[-1],  # five products instead of two
        half_length=half_length,
    )


def _repeated(bench: _Bench, function: Callable[..., Any], *arrays: Array) -> float:
    """Measures the seconds of one execution of a function that a program repeats many times."""

    def many(*inputs: Array) -> Array:
        def once(step: int, total: Array) -> Array:
            # Without the barrier XLA would call the function once, before the loop.
            again, step = jax.lax.optimization_barrier((inputs, step))
            first_element = lambda array: jax.lax.dynamic_slice(
                array, [0 * step] * array.ndim, [1] * array.ndim
            ).ravel()
            return sum(map(first_element, jax.tree.leaves(function(*again))), total)

        return jax.lax.fori_loop(0, _ATTENTION_REPEATS, once, jnp.zeros((1,), inputs[0].dtype))

    seconds, _ = bench.timed(many, *arrays)
    return seconds / _ATTENTION_REPEATS


def _to_host(bench: _Bench) -> float:
    """Measures the bytes per second from each device to its host's memory."""
    array = bench.array((_COPIED_BYTES // 4,))
    host_sharding = array.sharding.with_memory_kind("pinned_host")
    return _COPIED_BYTES / bench.seconds(lambda: jax.device_put(array, host_sharding))


# Communication.


class _Sent(NamedTuple):
    """One measurement of a collective."""

    steps: int
    bytes: float
    seconds: float
    unsure: float = 0.0
    """Error of `seconds`."""


def _collectives(bench: _Bench, scale: Scale, hosts: Sequence[str]) -> list[Collective]:
    """Measures each kind at each place with the smallest and the largest payload, and with others as time permits."""
    groups = list(_groups(bench.devices, hosts))
    measurements: dict[tuple[str, str], list[_Sent]] = {}
    for index, payload in enumerate((scale.payloads[0], scale.payloads[-1], *scale.payloads[1:-1])):
        for place, grid in groups:
            for kind in COLLECTIVES:
                if index < 2 or bench.elapsed < _ALL_SECONDS:
                    measurements.setdefault((kind, place), []).append(_send(bench, scale, kind, grid, payload))
    steps = {} if bench.on_cpu else {WITHIN_HOST: STEP_WITHIN_HOST, BETWEEN_HOSTS: STEP_BETWEEN_HOSTS}
    collectives = []
    for (kind, place), sent in measurements.items():
        start, step, rate = fit_collective(sent, steps.get(place, 0.0))
        collectives.append(Collective(kind=kind, place=place, start=start, step=step, rate=rate))
    return collectives


def _groups(devices: Sequence[jax.Device], hosts: Sequence[str]) -> Iterable[tuple[str, np.ndarray]]:
    """Yields each place and, for each size of groups there, the devices as an array [groups, devices of a group].

    Yields nothing if a process would have no device in it.
    """
    network = next((network_of(chip) for chip in CHIPS.values() if chip.kind == devices[0].device_kind), None)
    in_racks = network is not None and network.domain > network.devices_per_host
    if network is not None and in_racks and len(devices) <= network.domain:
        hosts = [""] * len(devices)  # as in a plan, a rack counts as a host
    by_host = {
        name: [device for device, host in zip(devices, hosts, strict=True) if host == name]
        for name in sorted(set(hosts))
    }
    # Each host takes part with as many devices as the smallest has.
    per_host = min(map(len, by_host.values()))
    grid = np.array([host_devices[:per_host] for host_devices in by_host.values()])  # [hosts, devices of each]
    if {device.process_index for device in grid.flat} != {device.process_index for device in devices}:
        return
    # With several racks it is not known which host is in which.
    places = [(WITHIN_HOST, grid)] if in_racks else [(WITHIN_HOST, grid), (BETWEEN_HOSTS, grid.T)]
    for place, rows in places:
        most = rows.shape[1]
        for size in sorted({2, most} - {1}):
            if most % size == 0:
                yield place, rows.reshape(-1, size)


def _send(bench: _Bench, scale: Scale, kind: str, grid: np.ndarray, payload: int) -> _Sent:
    """Measures a collective between products, as in a step, many times in a program.

    Processes on CPUs poll for arrived data only every few milliseconds, but do so at once if they have just polled. On
    GPUs the start of a program takes longer than a collective.
    """
    operation, _, starts_whole = COLLECTIVES[kind]
    size = grid.shape[1]
    mesh = Mesh(grid, ("groups", "group"))
    shard = payload // 4 // size
    array = bench.array((shard * size if starts_whole else shard,), mesh=mesh)
    seconds, work = _beside_work(bench, scale, partial(operation, axis="group", n=size), array, mesh)
    if kind == "collective-permute":
        return _Sent(1, payload, seconds, _UNCERTAINTY * work)
    steps = ring_passes(kind) * (size - 1)
    return _Sent(steps, payload * steps / size, seconds, _UNCERTAINTY * work)


def _beside_work(
    bench: _Bench, scale: Scale, send: Callable[[Any], Any], array: Array, mesh: Mesh
) -> tuple[float, float]:
    """Measures the seconds of sending, and those of the work, in one iteration.

    The former is the difference of a loop that multiplies and sends and a loop that only multiplies.
    """
    square_NN = bench.array((scale.work, scale.work), mesh=mesh)

    def loop(x: Array, y_NN: Array, send: Callable[[Any], Any]) -> Array:
        def once(_: int, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            x, product_NN = carry
            product_NN = 0.01 * jnp.dot(product_NN, y_NN)
            return 0.5 * x + send(x + product_NN[0, 0])[0], product_NN

        return jax.lax.fori_loop(0, scale.rounds, once, (x, y_NN))[0]

    times = []
    for operation in (send, lambda x: x):
        seconds, _ = bench.timed(partial(loop, send=operation), array, square_NN, mesh=mesh)
        times.append(seconds / scale.rounds)
    return times[0] - times[1], times[1]


def fit_collective(sent: Sequence[_Sent], step: float = 0.0) -> tuple[float, float, float]:
    """Fits (start, step, rate) to measurements by least squares of relative errors; none is negative.

    Measurements below their error are excluded if enough others remain. Groups of only one size do not distinguish the
    seconds of a step from those of the start: the former are then `step`, or less if the start is shorter.
    """
    certain = [measurement for measurement in sent if measurement.seconds > measurement.unsure]
    sizes = len({measurement.steps for measurement in sent})
    if len(certain) > 1 and len({measurement.steps for measurement in certain}) == sizes:
        sent = certain
    steps, payloads, seconds, unsure = np.array(sent, float).T
    columns = {"start": np.ones_like(seconds), "step": steps, "bytes": payloads}
    if sizes == 1:
        del columns["step"]
    scales = np.maximum(seconds, unsure)
    solved: dict[str, float] = {}
    # Drops the most negative term and solves again, until none is negative.
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
