"""Measures the rates of devices and links on the hosts of a run. From these rates a plan predicts the time of a step.

All devices run each measurement simultaneously, each on its own data, as in a step. The result is the median of a few
executions in the slowest process.

Shapes: M, N, K of a product [M, K] by [K, N]; T tokens, B batch, L length, H query heads, G key/value heads, W head
width, D model, F MLP.
"""

import json
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

from jaxmnt.distributed.coordination import agree, barrier
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
from jaxmnt.strict_json import json_text
from jaxmnt.training.compiler_options import cpu_options
from jaxmnt.training.spec import MIN_FLOAT8_CAPABILITY

_REPEATS = 3
_PRODUCTS_TIMEOUT_SECONDS = 60.0
"""Seconds after the start of the calibration after which no further product is measured. Compiling takes most of the
time."""
_COLLECTIVES_TIMEOUT_SECONDS = 105.0
"""Seconds after the start of the calibration after which no further payload of a collective is measured."""


class Scale(NamedTuple):
    """Sizes and limits of the measurements."""

    products: tuple[tuple[str, tuple[int, ...]], ...]
    """Dtypes of products, each with the sizes that m, n and k take. Work other than products has the first dtype."""
    gradients: tuple[bool, ...]
    """Kinds of products to measure. True means products that sum over rows, as a weight's gradient does. On CPUs they
    have a rate of their own."""
    max_product_flops: float
    """Maximum FLOPs of a product that is measured."""
    min_program_flops: float
    """Minimum FLOPs of a program, which repeats a small product until it reaches them."""
    max_pairs: int
    """Maximum number of pairs of matrices that a program multiplies in turn. On CPUs they are few, so that they stay in
    the cache as in a step."""
    payloads: tuple[int, ...]
    """Bytes of the arrays that collectives gather, reduce or send."""
    work_width: int
    """Width of the square matrices that are multiplied between two collectives."""
    rounds: int
    """Iterations of the loop that multiplies matrices and runs a collective."""
    layer_shapes: tuple[tuple[int, int, int], ...]
    """Shapes (B · L, D, F) of the layers whose work other than products is measured."""
    temporary_bytes: int
    """Bytes of temporary memory that the program for page faults uses; 0 on GPUs, where memory stays mapped."""


ON_CPU = Scale(
    products=(("float32", (64, 256, 1024, 4096)), ("bfloat16", (64, 1024))), gradients=(False, True),
    max_product_flops=9e9, min_program_flops=5e8, max_pairs=2,
    payloads=(1 << 14, 1 << 17, 1 << 20, 1 << 24), work_width=256, rounds=10,
    layer_shapes=((1024, 128, 344), (4096, 256, 688)), temporary_bytes=1 << 28,
)  # fmt: skip
ON_GPU = Scale(
    products=(("bfloat16", (1024, 4096, 16384)), ("float8", (2048, 8192))), gradients=(False,),
    max_product_flops=1e13, min_program_flops=1e13, max_pairs=32,
    payloads=(1 << 20, 1 << 25, 1 << 28), work_width=256, rounds=30,
    layer_shapes=((8192, 4096, 14336),), temporary_bytes=0,
)  # fmt: skip
_ATTENTION_LENGTHS = (2048, 8192)
"""Row lengths with which attention is measured."""
_ATTENTION_TOKENS = 16384
_ATTENTION_HEADS, _ATTENTION_KV_HEADS = 32, 8
_ATTENTION_HEAD_WIDTH = 128
_ATTENTION_REPEATS = 16
"""Executions of attention in a program. They are so many that the time to start the program does not matter."""
_COPIED_BYTES = 1 << 28
"""Size of the array that is copied to the host's memory."""
_MAX_OPERAND_BYTES = 1 << 30
"""Maximum bytes of all operands of the products in a program."""
_MIN_SHAPES = 4
"""Minimum number of shapes that are measured for each kind of product, however long it takes."""
_DIFFERENCE_ERROR = 0.1
"""Error of the difference between two loops' times, as a fraction of the time of the loop without a collective."""
_MIN_SECONDS_PER_BYTE = 1e-14
"""Minimum time to send a byte. It is used if the size of the payload has no measurable effect."""
_OTHER_WORK_LAYERS = 24
"""Number of layers in the program that measures work other than products."""
_OTHER_WORK_HEADS = 4
"""Number of heads in the layers of the program that measures work other than products."""
_OTHER_WORK_LENGTH = 256
"""Tokens per row in the layers of the program that measures work other than products."""
_PAGE_FAULT_EXECUTIONS = 8
"""Executions of the program that measures page faults."""
_SHORT_SIDE = 8
"""Shorter side of the matrices in the program that measures page faults."""


def calibrate(identity: Identity, date: str, scale: Scale | None = None) -> Calibration | None:
    """Measures all rates in all processes. Returns the calibration in process 0, and None in the others."""
    machines = host_names(identity)
    devices = jax.devices()
    hosts = [machines[device.process_index] for device in devices]
    bench = _Bench(devices, identity)
    on_cpu = bench.on_cpu
    scale = scale or (ON_CPU if on_cpu else ON_GPU)
    has_float8 = not on_cpu and device_capability(devices[0]) >= MIN_FLOAT8_CAPABILITY
    product_kinds = [
        (sizes, dtype, gradient)
        for dtype, sizes in scale.products
        for gradient in scale.gradients
        if dtype != "float8" or has_float8
    ]
    calibration = Calibration(
        kind=devices[0].device_kind,
        devices=len(devices),
        hosts=len(set(hosts)),
        date=date,
        software=software(),
        # The following arguments are measurements, which all processes make in the same order. Each kind of product may
        # take an equal share of the time.
        products=tuple(
            _measure_products(bench, scale, *kind, deadline=_PRODUCTS_TIMEOUT_SECONDS * count / len(product_kinds))
            for count, kind in enumerate(product_kinds, 1)
        ),
        memory=_measure_memory_rate(bench, scale),
        instruction=_measure_instruction_seconds(bench) if on_cpu else 0.0,
        page_faults=_measure_page_fault_seconds(bench, scale.temporary_bytes) if on_cpu else 0.0,
        attention=None if on_cpu else _measure_attention(bench),
        to_host=None if on_cpu else _measure_to_host_rate(bench),
        collectives=tuple(_measure_collectives(bench, scale, hosts)),
    )
    return calibration if identity.process_id == 0 else None


class _Bench:
    """Times programs on all devices at once."""

    def __init__(self, devices: Sequence[jax.Device], identity: Identity):
        self.devices = devices
        self.identity = identity
        self.on_cpu = devices[0].platform == "cpu"
        self._mesh = Mesh(np.array(devices), ("all",))
        self._random = np.random.default_rng(0).standard_normal(1 << 20, np.float32)
        self._options = cpu_options(jnp.dtype("float32"), "2") if self.on_cpu else {}
        self._began = time.perf_counter()
        self.elapsed = 0.0
        """Seconds from the start of the first process to the last measurement, equal in all processes."""

    def random_array(self, shape: tuple[int, ...], dtype: Any = jnp.float32, mesh: Mesh | None = None) -> Array:
        """Returns an array of random numbers of this shape on each device, concatenated along the first dimension.

        The numbers are not zeros, because zeros take less power, so that a GPU multiplies them faster.
        """
        return repeat_on_devices(mesh or self._mesh, np.resize(self._random, shape).astype(dtype))

    def compile(self, function: Callable[..., Any], *arguments: Any, mesh: Mesh | None = None) -> Any:
        """Compiles a program that applies `function` to the shards of `arguments` on each device."""
        return jax.jit(map_over_devices(mesh or self._mesh, function)).lower(*arguments).compile(self._options)

    def compile_and_time(
        self, function: Callable[..., Any], *arguments: Any, mesh: Mesh | None = None
    ) -> tuple[float, Any]:
        """Compiles and measures a program. Returns the seconds of an execution in the slowest process and the
        program."""
        program = self.compile(function, *arguments, mesh=mesh)
        return self.measure(partial(program, *arguments)), program

    def measure(self, execute: Callable[[], Any]) -> float:
        """Returns the median seconds of `execute` in the slowest process. A first execution is not measured."""
        jax.block_until_ready(execute())
        barrier("everyone measures", self.identity)
        return self.max_over_processes(statistics.median(measure_times(execute, _REPEATS)))

    def max_over_processes(self, seconds: float) -> float:
        """Returns the largest `seconds` of all processes, the same in each of them, and updates `elapsed`."""

        def slowest_of(process_times: list[Any]) -> str:
            return json_text([max(column) for column in zip(*process_times, strict=True)])

        own_times = (seconds, time.perf_counter() - self._began)
        slowest, self.elapsed = json.loads(agree("seconds", own_times, slowest_of, self.identity))
        return float(slowest)


# Computation.


def _measure_products(
    bench: _Bench, scale: Scale, sizes: tuple[int, ...], dtype: str, gradient: bool, deadline: float
) -> Products:
    """Measures products of one dtype and kind, first the extreme shapes, then the others, each in random order.

    Shapes that are too large, or that are not begun within `deadline` seconds of the start, get the rate of the nearest
    measured shape.
    """

    @cache  # shapes share their operands
    def operand(index: int, rows: int, columns: int) -> Array:
        return bench.random_array((rows, columns), jnp.float8_e4m3fn if dtype == "float8" else dtype)

    def multiply(operands: list[tuple[Array, Array]], offset: Array, rounds: int) -> list[Array]:
        """Returns only one element of each product, so that all products are written to the same memory in turn."""

        def body(step: int, sums: list[Array]) -> list[Array]:
            # Without the barrier XLA would compute the products once, before the loop.
            current_operands, step = jax.lax.optimization_barrier((operands, step))
            products = (_product(lhs, rhs, dtype, gradient) for lhs, rhs in current_operands)
            start = offset[0] * step
            return [
                total + jax.lax.dynamic_slice(product, (start, start), (1, 1))
                for total, product in zip(sums, products, strict=True)
            ]

        zero = jnp.zeros((1, 1), jnp.float32 if dtype == "float32" else jnp.bfloat16)
        return jax.lax.fori_loop(0, rounds, body, [zero] * len(operands))

    offset = bench.random_array((1,), jnp.int32)
    rate_by_shape: dict[tuple[int, ...], float] = {}
    shapes = list(combinations(sizes, repeat=3))
    shuffled_shapes = [shapes[index] for index in np.random.default_rng(0).permutation(len(shapes))]
    for m, n, k in sorted(shuffled_shapes, key=lambda shape: not {*shape} <= {sizes[0], sizes[-1]}):
        flops = 2.0 * m * n * k
        if flops > scale.max_product_flops or (len(rate_by_shape) >= _MIN_SHAPES and bench.elapsed > deadline):
            continue
        # A small product is repeated, with as many different pairs of operands as fit in memory.
        repetitions = max(1, int(scale.min_program_flops // flops))
        pair_count = max(1, min(scale.max_pairs, repetitions, _MAX_OPERAND_BYTES // (4 * k * (m + n))))
        rounds = repetitions // pair_count
        lhs_shape = (k, m) if gradient else (m, k)
        operands = [(operand(index, *lhs_shape), operand(scale.max_pairs + index, k, n)) for index in range(pair_count)]
        seconds, _ = bench.compile_and_time(partial(multiply, rounds=rounds), operands, offset)
        rate_by_shape[m, n, k] = rounds * pair_count * flops / seconds
    rates = tuple(rate_by_shape[_nearest_shape(rate_by_shape, shape)] for shape in shapes)
    return Products(dtype=dtype, gradient=gradient, sizes=sizes, rates=rates)


def _product(lhs: Array, rhs: Array, dtype: str, gradient: bool) -> Array:
    """Returns lhs @ rhs or, for a gradient, lhs.T @ rhs: [M, N], in float32 if `dtype` is, otherwise in bfloat16."""
    dimension_numbers = (((0,) if gradient else (1,), (0,)), ((), ()))
    out = jnp.float32 if dtype == "float32" else jnp.bfloat16
    precision = "highest" if dtype == "float32" else None  # the precision with which training multiplies
    return jax.lax.dot_general(lhs, rhs, dimension_numbers, precision=precision, preferred_element_type=out)


def _nearest_shape(shapes: Iterable[tuple[int, ...]], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape that is nearest to `shape` by the Euclidean distance between the logarithms of their sizes."""
    distance = lambda candidate: sum(math.log(a / b) ** 2 for a, b in zip(candidate, shape, strict=True))
    return min(sorted(shapes), key=distance)


def _measure_memory_rate(bench: _Bench, scale: Scale) -> float:
    """Measures a layer's work other than products, forward and backward, in bytes per second.

    The bytes are those that a plan counts for the same program.
    """
    dtype, _ = scale.products[0]
    moved_bytes = total_seconds = 0.0
    for rows, width, mlp in scale.layer_shapes:
        arrays = [bench.random_array((rows, size), dtype) for size in (width, width, mlp, mlp)]
        seconds, program = bench.compile_and_time(_other_work, *arrays)
        # At a rate of one byte per second, the predicted seconds equal the number of bytes.
        moved_bytes += _predicted_seconds(program, replace(_FREE, memory=1.0))
        total_seconds += seconds
    return moved_bytes / total_seconds


def _other_work(x_TD: Array, y_TD: Array, gate_TF: Array, up_TF: Array) -> tuple[Array, ...]:
    """Runs layers forward and backward that consist of a residual sum, a norm, a rotation of heads and SwiGLU."""

    def forward(x_TD: Array, gate_TF: Array, up_TF: Array) -> tuple[Array, ...]:
        wide_TD = (x_TD + y_TD).astype(jnp.float32)
        normed_TD = (wide_TD * jax.lax.rsqrt(jnp.mean(wide_TD**2, -1, keepdims=True) + 1e-5)).astype(x_TD.dtype)
        heads_BLHW = normed_TD.reshape(-1, _OTHER_WORK_LENGTH, _OTHER_WORK_HEADS, x_TD.shape[-1] // _OTHER_WORK_HEADS)
        first, second = jnp.split(heads_BLHW, 2, -1)
        turned_BHLW = jnp.concatenate([first - second, first + second], -1).swapaxes(1, 2)
        return turned_BHLW.reshape(x_TD.shape), jax.nn.silu(gate_TF) * up_TF

    def layer(_: int, inputs: tuple[Array, ...]) -> tuple[Array, ...]:
        out, backward = jax.vjp(forward, *inputs)
        return tuple(array - 0.01 * gradient for array, gradient in zip(inputs, backward(out), strict=True))

    return tuple(array[:1, :1] for array in jax.lax.fori_loop(0, _OTHER_WORK_LAYERS, layer, (x_TD, gate_TF, up_TF)))


def _measure_instruction_seconds(bench: _Bench) -> float:
    """Measures the time of an instruction that does almost nothing, in seconds."""

    def chain(x_NN: Array) -> Array:
        return jax.lax.fori_loop(0, 1000, lambda _, x_NN: jnp.dot(jnp.dot(x_NN, x_NN) * 0.1, x_NN) * 0.1, x_NN)

    seconds, program = bench.compile_and_time(chain, bench.random_array((8, 8)))
    # At a rate of one second per instruction, the predicted seconds equal the number of instructions.
    return seconds / _predicted_seconds(program, replace(_FREE, instruction=1.0))


def _measure_page_fault_seconds(bench: _Bench, temporary_bytes: int) -> float:
    """Measures the seconds that the kernel takes to map and clear a byte of temporary memory, as in each execution."""
    side = math.isqrt(temporary_bytes // 4)
    tall_NK, wide_KN = bench.random_array((side, _SHORT_SIDE)), bench.random_array((_SHORT_SIDE, side))
    program = bench.compile(lambda tall_NK, wide_KN: tall_NK @ wide_KN @ wide_KN.T, tall_NK, wide_KN)

    def execute() -> None:
        for _ in range(_PAGE_FAULT_EXECUTIONS):
            jax.block_until_ready(program(tall_NK, wide_KN))

    execute()
    barrier("everyone maps memory", bench.identity)
    start_seconds = resource.getrusage(resource.RUSAGE_SELF).ru_stime
    execute()
    seconds = resource.getrusage(resource.RUSAGE_SELF).ru_stime - start_seconds
    mapped_bytes = _PAGE_FAULT_EXECUTIONS * len(jax.local_devices()) * program.memory_analysis().temp_size_in_bytes
    return bench.max_over_processes(seconds / mapped_bytes)


_FREE = Rates(
    products={"float32": math.inf, "bfloat16": math.inf}, attention=math.inf, memory=math.inf, within_host=math.inf,
    between_hosts=math.inf, to_host=math.inf,
)  # fmt: skip
"""Rates under which every operation is free."""


def _predicted_seconds(program: Any, rates: Rates) -> float:
    """Returns the seconds that a plan predicts for a compiled program."""
    return replay_program(Program(program.as_text()), 1, rates).seconds


def _measure_attention(bench: _Bench) -> Attention:
    """Measures cuDNN's attention in rows of two lengths, and fits the model of `Attention` to the measurements.

    The model is: seconds = FLOPs / rate × (1 + half length / length).
    """
    attend = partial(cudnn.attend_whole_rows, ScoreOptions(_ATTENTION_HEAD_WIDTH**-0.5))

    def forward_and_backward(q: Array, k: Array, v: Array) -> Any:
        out, backward = jax.vjp(attend, q, k, v)
        return backward(out)

    forward_seconds, backward_seconds = [], []
    for length in _ATTENTION_LENGTHS:
        q, k, v = (
            bench.random_array((_ATTENTION_TOKENS // length, length, heads, _ATTENTION_HEAD_WIDTH), jnp.bfloat16)
            for heads in (_ATTENTION_HEADS, _ATTENTION_KV_HEADS, _ATTENTION_KV_HEADS)
        )
        forward_seconds.append(_measure_repeated(bench, attend, q, k, v))
        backward_seconds.append(_measure_repeated(bench, forward_and_backward, q, k, v) - forward_seconds[-1])
    # There are two products of 2 FLOPs for each head, width and pair of tokens. A causal mask leaves half of the pairs.
    flops = [
        2 * 2.0 * _ATTENTION_TOKENS * _ATTENTION_HEADS * length / 2 * _ATTENTION_HEAD_WIDTH
        for length in _ATTENTION_LENGTHS
    ]
    seconds_per_flop = [seconds / count for seconds, count in zip(forward_seconds, flops, strict=True)]
    slope, offset = statistics.linear_regression([1 / length for length in _ATTENTION_LENGTHS], seconds_per_flop)
    half_length = max(0.0, slope / offset)
    slowdown = 1 + half_length / _ATTENTION_LENGTHS[-1]
    return Attention(
        forward=flops[-1] * slowdown / forward_seconds[-1],
        backward=2.5 * flops[-1] * slowdown / backward_seconds[-1],  # backward has five products instead of two
        half_length=half_length,
    )


def _measure_repeated(bench: _Bench, function: Callable[..., Any], *arrays: Array) -> float:
    """Measures the time of one execution of a function, in seconds, with a program that repeats it many times."""

    def repeat(*inputs: Array) -> Array:
        def body(step: int, total: Array) -> Array:
            # Without the barrier XLA would call the function once, before the loop.
            current_operands, step = jax.lax.optimization_barrier((inputs, step))
            first_element = lambda array: jax.lax.dynamic_slice(
                array, [0 * step] * array.ndim, [1] * array.ndim
            ).ravel()
            return sum(map(first_element, jax.tree.leaves(function(*current_operands))), total)

        return jax.lax.fori_loop(0, _ATTENTION_REPEATS, body, jnp.zeros((1,), inputs[0].dtype))

    seconds, _ = bench.compile_and_time(repeat, *arrays)
    return seconds / _ATTENTION_REPEATS


def _measure_to_host_rate(bench: _Bench) -> float:
    """Measures the rate, in bytes per second, at which each device copies to its host's memory."""
    array = bench.random_array((_COPIED_BYTES // 4,))
    host_sharding = array.sharding.with_memory_kind("pinned_host")
    return _COPIED_BYTES / bench.measure(lambda: jax.device_put(array, host_sharding))


# Communication.


class Measurement(NamedTuple):
    """One measurement of a collective."""

    steps: int
    """Steps between devices, each of which adds a latency."""
    bytes: float
    """Bytes that a device sends."""
    seconds: float
    error: float = 0.0
    """Estimated error of `seconds`."""


def _measure_collectives(bench: _Bench, scale: Scale, hosts: Sequence[str]) -> list[Collective]:
    """Measures each kind of collective at each place, with two payloads, and with more as time permits."""
    groups = list(_device_groups(bench.devices, hosts))
    measurements: dict[tuple[str, str], list[Measurement]] = {}
    for index, payload in enumerate((scale.payloads[0], scale.payloads[-1], *scale.payloads[1:-1])):
        for place, grid in groups:
            for kind in COLLECTIVES:
                if index < 2 or bench.elapsed < _COLLECTIVES_TIMEOUT_SECONDS:
                    measurements.setdefault((kind, place), []).append(
                        _measure_collective(bench, scale, kind, grid, payload)
                    )
    steps = {} if bench.on_cpu else {WITHIN_HOST: STEP_WITHIN_HOST, BETWEEN_HOSTS: STEP_BETWEEN_HOSTS}
    collectives = []
    for (kind, place), of_collective in measurements.items():
        start, step, rate = fit_collective(of_collective, steps.get(place, 0.0))
        collectives.append(Collective(kind=kind, place=place, start=start, step=step, rate=rate))
    return collectives


def _device_groups(devices: Sequence[jax.Device], hosts: Sequence[str]) -> Iterable[tuple[str, np.ndarray]]:
    """Yields pairs (place, devices), where devices is an array [groups, devices of a group] to measure at the place.

    A place is `WITHIN_HOST` or `BETWEEN_HOSTS`, and has an array for each size of groups. Yields nothing if a process
    would have no device in the groups.
    """
    network = next((network_of(chip) for chip in CHIPS.values() if chip.kind == devices[0].device_kind), None)
    in_racks = network is not None and network.domain > network.devices_per_host
    if network is not None and in_racks and len(devices) <= network.domain:
        hosts = [""] * len(devices)  # a rack counts as one host, as in a plan
    by_host = {
        name: [device for device, host in zip(devices, hosts, strict=True) if host == name]
        for name in sorted(set(hosts))
    }
    # Each host takes part with as many devices as the smallest host has.
    per_host = min(map(len, by_host.values()))
    grid = np.array([host_devices[:per_host] for host_devices in by_host.values()])  # [hosts, devices of a host]
    if {device.process_index for device in grid.flat} != {device.process_index for device in devices}:
        return
    # A rack counts as one host. It is not known which hosts share a rack, so nothing is measured between hosts then.
    places = [(WITHIN_HOST, grid)] if in_racks else [(WITHIN_HOST, grid), (BETWEEN_HOSTS, grid.T)]
    for place, rows in places:
        max_group = rows.shape[1]
        for size in sorted({2, max_group} - {1}):
            if max_group % size == 0:
                yield place, rows.reshape(-1, size)


def _measure_collective(bench: _Bench, scale: Scale, kind: str, grid: np.ndarray, payload: int) -> Measurement:
    """Measures a collective in a program that alternates between products and the collective, as a step does.

    A program with a single collective would not do. Processes on CPUs poll for arrived data only every few milliseconds
    unless they have just polled, and on GPUs the start of a program takes longer than a collective.
    """
    operation, _, starts_whole = COLLECTIVES[kind]
    size = grid.shape[1]
    mesh = Mesh(grid, ("groups", "group"))
    shard = payload // 4 // size
    array = bench.random_array((shard * size if starts_whole else shard,), mesh=mesh)
    seconds, work_seconds = _measure_between_products(
        bench, scale, partial(operation, axis="group", n=size), array, mesh
    )
    if kind == "collective-permute":
        return Measurement(1, payload, seconds, _DIFFERENCE_ERROR * work_seconds)
    steps = ring_passes(kind) * (size - 1)
    return Measurement(steps, payload * steps / size, seconds, _DIFFERENCE_ERROR * work_seconds)


def _measure_between_products(
    bench: _Bench, scale: Scale, send: Callable[[Any], Any], array: Array, mesh: Mesh
) -> tuple[float, float]:
    """Returns the seconds that sending and the products take in one iteration of a loop.

    The time of sending is that of a loop that multiplies and sends, minus that of a loop that only multiplies.
    """
    square_NN = bench.random_array((scale.work_width, scale.work_width), mesh=mesh)

    def loop(x: Array, y_NN: Array, send: Callable[[Any], Any]) -> Array:
        def body(_: int, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            x, product_NN = carry
            product_NN = 0.01 * jnp.dot(product_NN, y_NN)
            return 0.5 * x + send(x + product_NN[0, 0])[0], product_NN

        return jax.lax.fori_loop(0, scale.rounds, body, (x, y_NN))[0]

    loop_seconds = []
    for operation in (send, lambda x: x):
        seconds, _ = bench.compile_and_time(partial(loop, send=operation), array, square_NN, mesh=mesh)
        loop_seconds.append(seconds / scale.rounds)
    return loop_seconds[0] - loop_seconds[1], loop_seconds[1]


def fit_collective(measurements: Sequence[Measurement], step: float = 0.0) -> tuple[float, float, float]:
    """Fits (start, step, rate) to measurements by least squares of relative errors. None of the three is negative.

    Measurements below their error are excluded if enough others remain. If all groups have the same size, the time of a
    step cannot be told from the time of the start. A step then takes `step` seconds, or less if the start is shorter.
    """
    reliable = [measurement for measurement in measurements if measurement.seconds > measurement.error]
    sizes = len({measurement.steps for measurement in measurements})
    if len(reliable) > 1 and len({measurement.steps for measurement in reliable}) == sizes:
        measurements = reliable
    steps, payloads, seconds, error = np.array(measurements, float).T
    columns = {"start": np.ones_like(seconds), "step": steps, "bytes": payloads}
    if sizes == 1:
        del columns["step"]
    scales = np.maximum(seconds, error)
    coefficients: dict[str, float] = {}
    # Drop the most negative term and solve again, until no term is negative.
    while columns:
        weighted = np.array([*columns.values()]).T / scales[:, None]
        solution = np.linalg.lstsq(weighted, seconds / scales, rcond=None)[0]
        coefficients = dict(zip(columns, solution.tolist(), strict=True))
        least = min(coefficients, key=lambda name: coefficients[name])
        if coefficients[least] >= 0:
            break
        del columns[least], coefficients[least]
    start = coefficients.get("start", 0.0)
    rate = 1 / max(coefficients.get("bytes", 0.0), _MIN_SECONDS_PER_BYTE)
    if sizes > 1:
        return start, coefficients.get("step", 0.0), rate
    step = min(step, start / measurements[0].steps)
    return start - step * measurements[0].steps, step, rate
