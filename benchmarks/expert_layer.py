"""A layer of experts against a dense MLP of the same active FLOPs: forward and backward under remat, in turn.

    python benchmarks/expert_layer.py           on this machine's first device
    python benchmarks/expert_layer.py --tiny    a small case, to try the script

The layer routes, multiplies and sums as in training on one device; each token uses K of E experts of width F, and the
MLP has the width K · F. On a GPU, which computes in bfloat16, each kernel is measured that the GPU supports, and its
products are compared with XLA's. Each time is the median of alternating rounds. Prints one JSON line for each case.
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

from jaxmnt.config.load import parse_config
from jaxmnt.config.mesh import Mesh
from jaxmnt.models import experts, grouped, mosaic
from jaxmnt.models.kernels import device_capability
from jaxmnt.models.registry import build_family
from jaxmnt.models.routing import choose_experts
from jaxmnt.parallel.sharding import Placement, build_mesh


@dataclass(frozen=True)
class Case:
    tokens: int
    hidden: int
    experts: int
    choices: int
    width: int


ON_CPU = (Case(4096, 512, 8, 2, 512), Case(4096, 512, 64, 8, 128))
ON_GPU = (Case(65536, 2048, 16, 8, 768), Case(16384, 4096, 8, 2, 14336))
"""The second has Mixtral's sizes. The first has the experts that a device of eight has of Qwen3-30B-A3B."""
TINY = (Case(256, 64, 4, 2, 64),)


def methods(case: Case, dtype: Any) -> list[grouped.ProductMethod]:
    """Returns the methods that this device supports."""
    device = jax.devices()[0]
    kinds: list[grouped.ProductKind] = ["loop", "chunks"] if device.platform == "cpu" else ["chunks"]
    found = [grouped.ProductMethod(kind, grouped.TILE_ROWS[kind]) for kind in kinds]
    if mosaic.obstacle(device_capability(device), dtype, case.experts, (case.hidden, case.width)) is None:
        found.append(grouped.ProductMethod("mosaic", mosaic.BLOCK_ROWS, device.core_count))
    return found


def layers(case: Case, dtype: Any, ways: list[grouped.ProductMethod]) -> dict[str, Callable[[], Any]]:
    """Returns functions that compute the output and the gradients of the MLP, and of the layer by each method."""
    settings = {
        "family": "qwen3_moe", "vocab_size": 64, "hidden_size": case.hidden, "num_layers": 1, "num_heads": 1,
        "num_experts": case.experts, "experts_per_token": case.choices, "expert_size": case.width,
    }  # fmt: skip
    model = build_family(parse_config({"model": settings}).model, 64).config
    placement = Placement(build_mesh(Mesh(data=1), jax.devices()[:1]))
    rng = np.random.default_rng(0)
    random = lambda *shape: jnp.asarray(rng.standard_normal(shape) / 20, dtype)
    x_BSD, gradient_BSD = random(1, case.tokens, case.hidden), random(1, case.tokens, case.hidden)
    router_DE = jnp.asarray(rng.standard_normal((case.hidden, case.experts)), jnp.float32)
    wide = case.choices * case.width
    dense = random(case.hidden, wide), random(case.hidden, wide), random(wide, case.hidden)
    into = (case.experts, case.hidden, case.width)
    weights = random(*into), random(*into), random(case.experts, case.width, case.hidden)

    def mlp(x: Array, gate: Array, up: Array, down: Array) -> Array:
        return (jax.nn.silu(x @ gate) * (x @ up)) @ down

    def mixture(by: grouped.ProductMethod) -> Callable[..., Array]:
        group = experts.ExpertGroup(placement, (), (), by, case.tokens * case.choices)

        def layer(x: Array, router: Array, *weights: Array) -> Array:
            logits = jnp.matmul(x.astype(jnp.float32), router, precision="highest")
            routes = choose_experts(model, logits, jnp.zeros(case.experts), jnp.ones(x.shape[:2], bool))
            return experts.mix(group, x, routes.ids_BSK, routes.shares_BSK, *weights)[0]

        return layer

    def backward(layer: Callable[..., Array], *arguments: Array) -> Callable[[], Any]:
        def forward_and_backward(gradient: Array, *arguments: Array) -> tuple[Array, ...]:
            y, pull_back = jax.vjp(jax.checkpoint(layer), *arguments)
            return y, *pull_back(gradient)

        compute = jax.jit(forward_and_backward)
        return lambda: jax.block_until_ready(compute(gradient_BSD, *arguments))

    return {"mlp": backward(mlp, x_BSD, *dense)} | {
        by.kind: backward(mixture(by), x_BSD, router_DE, *weights) for by in ways
    }


def measure(case: Case, rounds: int) -> dict[str, Any]:
    dtype = jnp.dtype("float32" if jax.devices()[0].platform == "cpu" else "bfloat16")
    ways = methods(case, dtype)
    for by in ways:
        if by.kind == "mosaic":
            grouped.check(by)
    functions = layers(case, dtype, ways)
    for function in functions.values():
        function()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - start)
    median = {name: statistics.median(times) for name, times in seconds.items()}
    # Forward has three products, backward has six, and recomputes two.
    flops = 2 * 11 * case.tokens * case.hidden * case.choices * case.width
    return vars(case) | {
        "dtype": dtype.name,
        "seconds": {name: round(value, 5) for name, value in median.items()},
        "times_the_mlp": {by.kind: round(median[by.kind] / median["mlp"], 2) for by in ways},
        "tflops": {name: round(flops / value / 1e12, 3) for name, value in median.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="a small case, to try the script")
    options = parser.parse_args()
    device = jax.devices()[0]
    cases = TINY if options.tiny else ON_CPU if device.platform == "cpu" else ON_GPU
    about = {"date": time.strftime("%Y-%m-%d"), "device": device.device_kind, "jax": version("jax")}
    for case in cases:
        print(json.dumps(about | measure(case, options.rounds)), flush=True)


if __name__ == "__main__":
    main()
