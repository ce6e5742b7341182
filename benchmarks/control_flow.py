"""What control flow costs on a device: conditions, loops whose length the compiler does not know, and small products.

    python benchmarks/control_flow.py           on this machine's first device
    python benchmarks/control_flow.py --tiny    a small case, to try the script

XLA copies the value of a condition to the host before it goes on, and so the value of a loop's condition in each
iteration, unless it knows the number of iterations. Prints one JSON line with

- the microseconds that a condition, and an iteration of such a loop, add to a loop of products,
- the time of a product that is cut into pieces of its rows, as a multiple of the whole product's.
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
from jax import Array


@dataclass(frozen=True)
class Case:
    iterations: int
    rows: int
    """Rows of a loop's product, which is so small that control flow shows beside it."""
    width: int
    whole_rows: int
    """Rows of the product that is cut."""
    whole_width: int
    pieces: tuple[int, ...]


USUAL = Case(200, 1024, 1024, 8192, 8192, (2, 4, 8, 16))
TINY = Case(4, 16, 16, 64, 32, (2, 4))

Loop = Callable[[Array, Array, Array], Array]
"""A function of x, a weight, and a number of iterations that is only known when it runs."""


def loops(case: Case) -> dict[str, Loop]:
    """Returns loops of the same products with different control flow."""
    numbers = jnp.arange(case.iterations)
    multiply = lambda x, w: jnp.tanh(x @ w)

    def plain(x: Array, w: Array, count: Array) -> Array:
        return jax.lax.scan(lambda x, _: (multiply(x, w), None), x, numbers)[0]

    def condition(x: Array, w: Array, count: Array) -> Array:
        body = lambda x, number: (jax.lax.cond(number < count, lambda: multiply(x, w), lambda: x), None)
        return jax.lax.scan(body, x, numbers)[0]

    def dynamic_loop(x: Array, w: Array, count: Array) -> Array:
        return jax.lax.fori_loop(0, count, lambda _, x: multiply(x, w), x)

    return {"plain": plain, "condition": condition, "dynamic_loop": dynamic_loop}


def in_pieces(pieces: int) -> Callable[[Array, Array], list[Array]]:
    """Returns a function that multiplies the rows of x in pieces."""
    return lambda x, w: [piece @ w for piece in jnp.split(x, pieces)]


def seconds(function: Callable[..., Any], *arguments: Any, repeats: int) -> float:
    """Returns the median time of a call, after a first one."""
    compiled = jax.jit(function).lower(*arguments).compile()
    jax.block_until_ready(compiled(*arguments))
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """Returns the costs, from the medians of `repeats` calls."""
    normal = lambda *sizes: jax.random.normal(jax.random.key(0), sizes, jnp.bfloat16)
    x, w, count = normal(case.rows, case.width), normal(case.width, case.width), jnp.int32(case.iterations)
    of_loops = {name: seconds(loop, x, w, count, repeats=repeats) for name, loop in loops(case).items()}
    whole_x, whole_w = normal(case.whole_rows, case.whole_width), normal(case.whole_width, case.whole_width)
    whole = seconds(in_pieces(1), whole_x, whole_w, repeats=repeats)
    added = lambda name: 1e6 * (of_loops[name] - of_loops["plain"]) / case.iterations
    return {
        "iteration_us": round(1e6 * of_loops["plain"] / case.iterations, 3),
        "condition_adds_us": round(added("condition"), 3),
        "dynamic_loop_adds_us": round(added("dynamic_loop"), 3),
        "whole_product_us": round(1e6 * whole, 1),
        "pieces_over_whole": {
            str(pieces): round(seconds(in_pieces(pieces), whole_x, whole_w, repeats=repeats) / whole, 3)
            for pieces in case.pieces
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small case, to try the script")
    options = parser.parse_args()
    case = TINY if options.tiny else USUAL
    device = {"device": jax.devices()[0].device_kind, "jax": version("jax")}
    print(json.dumps(device | measure(case, 3 if options.tiny else 20)))


if __name__ == "__main__":
    main()
