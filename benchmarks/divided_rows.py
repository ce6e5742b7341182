"""Attention in a row that several devices share, computed for each of them in turn on one device, beside whole rows.

    python benchmarks/divided_rows.py           on this machine's first device
    python benchmarks/divided_rows.py --tiny    a small case, to try the script

For each case, prints one JSON line with the largest errors of the output and of the gradients, relative to the largest
value of float32 attention in whole rows, and with the time of all devices' parts as a multiple of the time in whole
rows. Communication is not included. On a GPU the kernel is cuDNN's, in bfloat16.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxmnt.models.attention_parts import Part
from jaxmnt.models.blockwise import ScoreOptions
from jaxmnt.models.context_parallel import Chunks, RowPart, attend_by_parts, differentiate_by_parts
from jaxmnt.models.kernels import attend
from jaxmnt.parallel.chunks import device_order, row_order


@dataclass(frozen=True)
class Case:
    length: int
    devices: int
    heads: int
    kv_heads: int
    width: int
    rows: int
    document: int | None
    """Mean number of tokens in a document; None: each row is one document."""


ON_CPU = (Case(8192, 4, 4, 2, 64, 2, None), Case(8192, 4, 4, 2, 64, 2, 2000))
ON_GPU = (Case(32768, 4, 32, 8, 128, 2, None), Case(32768, 4, 32, 8, 128, 2, 6000))
TINY = (Case(256, 2, 4, 2, 16, 2, None), Case(256, 2, 4, 2, 16, 2, 60))

Inputs = tuple[Array, Array, Array, Array]
"""Queries, keys, values, and the gradient of the output."""


def make_inputs(case: Case, dtype: Any) -> tuple[Inputs, Array | None]:
    """Returns the inputs, and the segments of the rows if documents are kept apart."""
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    inputs = tuple(
        jax.random.normal(key, (case.rows, case.length, count, case.width), dtype)
        for key, count in zip(keys, heads, strict=True)
    )
    if case.document is None:
        return inputs, None
    rng = np.random.default_rng(0)
    places, segments = np.arange(case.length), []
    for _ in range(case.rows):
        ends = np.cumsum(1 + rng.geometric(1 / case.document, case.length))
        segments.append(np.searchsorted(ends, places, side="right") + 1)
    return inputs, jnp.asarray(np.stack(segments), jnp.int32)


def in_whole_rows(kernel: Any, inputs: Inputs, segments: Array | None) -> list[Array]:
    """Returns the output and the gradients of attention in whole rows."""
    *tensors, gradient = inputs
    output, backward = jax.vjp(lambda q, k, v: attend(q, k, v, segments, kernel), *tensors)
    return [output, *backward(gradient)]


def of_device(kernel: Any, case: Case, rank: Array, inputs: Inputs, segments: Array | None) -> list[Array]:
    """Returns a device's output, the gradient of its queries, and its part of the gradients of all keys and values, as
    [2, B, …]. The inputs are those of all devices, in the order of the devices."""
    chunk = case.length // (2 * case.devices)
    by_half = lambda x: jnp.moveaxis(x.reshape(case.rows, case.devices, 2, chunk, *x.shape[2:]), 2, 0).reshape(
        2, case.rows, -1, *x.shape[2:]
    )
    q, k, v, gradient = map(by_half, inputs)
    own = lambda x: jax.lax.dynamic_slice_in_dim(x, rank * chunk, chunk, axis=2)
    row = RowPart(case.devices, rank, chunk, segments)
    chunks = Chunks(own(q), own(k), own(v), k, v, None)
    causal = ScoreOptions(case.width**-0.5)
    total = attend_by_parts(kernel, causal, row, chunks)
    total = Part(total.a_BLHK.astype(q.dtype), total.log_sum_BLH)
    gradients = differentiate_by_parts(kernel, causal, row, chunks, total, own(gradient))
    add_own = lambda others, diagonal: jax.lax.dynamic_update_slice_in_dim(
        others, own(others) + diagonal.reshape(own(others).shape).astype(jnp.float32), rank * chunk, axis=2
    )
    k_gradient = add_own(gradients.gathered_k_2BLGK, gradients.own_k_NCGK)
    v_gradient = add_own(gradients.gathered_v_2BLGK, gradients.own_v_NCGK)
    return [total.a_BLHK, gradients.q_2BCHK.astype(q.dtype), k_gradient, v_gradient]


def in_divided_rows(kernel: Any, case: Case, inputs: Inputs, segments: Array | None) -> list[Array]:
    """Returns the same as `in_whole_rows`, from the parts of all devices."""
    columns, places = device_order(case.length, case.devices), row_order(case.length, case.devices)
    ordered = tuple(x[:, columns] for x in inputs)
    run = jax.lax.map(lambda rank: of_device(kernel, case, rank, ordered, segments), jnp.arange(case.devices))
    output, q_gradient, k_gradient, v_gradient = run
    by_device = lambda x: jnp.moveaxis(x, 2, 0).reshape(case.rows, case.length, *x.shape[4:])[:, places]

    def of_keys(x: Array) -> Array:
        summed = x.sum(0)  # [2, B, L / 2, …]
        chunk = case.length // (2 * case.devices)
        by_rank = jnp.moveaxis(summed.reshape(2, case.rows, case.devices, chunk, *summed.shape[3:]), 0, 2)
        return by_rank.reshape(case.rows, case.length, *summed.shape[3:])[:, places]

    return [by_device(output), by_device(q_gradient), of_keys(k_gradient), of_keys(v_gradient)]


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Returns the result of a case."""
    device = jax.devices()[0]
    kernel, dtype = ("blockwise", jnp.float32) if device.platform == "cpu" else ("cudnn", jnp.bfloat16)
    inputs, segments = make_inputs(case, dtype)
    functions: dict[str, Callable[..., list[Array]]] = {
        "whole": lambda *inputs: in_whole_rows(kernel, inputs, segments),
        "divided": lambda *inputs: in_divided_rows(kernel, case, inputs, segments),
    }
    compiled = {name: jax.jit(function).lower(*inputs).compile() for name, function in functions.items()}
    results = {name: jax.block_until_ready(program(*inputs)) for name, program in compiled.items()}
    seconds: dict[str, list[float]] = {name: [] for name in compiled}
    for _ in range(rounds):
        for name, program in compiled.items():
            started = time.perf_counter()
            jax.block_until_ready(program(*inputs))
            seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    exact = jax.jit(lambda *inputs: in_whole_rows("blockwise", inputs, segments))(
        *(x.astype(jnp.float32) for x in inputs)
    )
    error = lambda name: {
        part: float(jnp.max(jnp.abs(result - value)) / jnp.max(jnp.abs(value)))
        for part, result, value in zip(("output", "q", "k", "v"), results[name], exact, strict=True)
    }
    return {
        **vars(case), "kernel": kernel, "dtype": jnp.dtype(dtype).name, "device": device.device_kind,
        "jax": version("jax"), "errors_divided": error("divided"), "errors_whole": error("whole"),
        "seconds_whole": medians["whole"], "times_whole": medians["divided"] / medians["whole"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small case")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="alternating rounds (5)")
    options = parser.parse_args()
    cases = TINY if options.tiny else ON_CPU if jax.devices()[0].platform == "cpu" else ON_GPU
    for case in cases:
        print(json.dumps(measure(case, options.rounds)), flush=True)


if __name__ == "__main__":
    main()
