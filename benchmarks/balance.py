"""Whether the loads of experts become even: a tiny mixture that starts with all tokens at two of eight experts.

    python benchmarks/balance.py    1,000 steps for each way to balance, on this machine's CPU

The ways are the balance loss of each row, of the batch with the loads of the step before, and a bias; and, for
comparison, no way at all, and the loss of the batch with its own loads, which needs the whole batch in one microbatch.
Tokens follow a random Markov chain. `load` is the largest load of an expert relative to the mean, in the worst layer,
averaged over 20 steps, and `held_out` the loss on other rows, for each seed.
"""

import argparse
import json
import time
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from torch_curve import LENGTH, VOCAB, fields_of, tokens_of

from jaxmnt.config.load import parse_config
from jaxmnt.config.model import Model
from jaxmnt.data.feed import to_devices
from jaxmnt.models import experts
from jaxmnt.models.routing import Routes, loads_of_rows
from jaxmnt.parallel.sharding import Placement
from jaxmnt.training.compile import Program, compile_program
from jaxmnt.training.spec import ControlFlags
from jaxmnt.training.state import model_state

ROWS, EXPERTS, CHOICES = 16, 8, 2
WAYS: dict[str, dict[str, Any]] = {
    "none": {"balance_loss": 0.0},
    "row": {"balance_over": "row"},
    "batch, step before": {"balance_over": "batch"},
    "bias": {"balance_loss": 0.0, "router_bias_rate": 0.001},
    "batch, own loads": {"balance_over": "batch"},
}


def own_loads(config: Model, routes: Routes, last_shares_E: Array, is_real_BL: Array, placement: Placement) -> Array:
    """Returns the balance loss of a batch that is one microbatch on one device."""
    counts_E = jax.lax.stop_gradient(jnp.sum(loads_of_rows(routes.ids_BSK, EXPERTS), axis=0))
    scores_E = jnp.sum(routes.scores_BSE, axis=(0, 1))
    return EXPERTS / CHOICES * jnp.sum(counts_E / jnp.sum(is_real_BL) * scores_E)


def program_of(way: str, seed: int, steps: int) -> Program:
    tree = {
        "seed": seed,
        "data": {"global_batch_size": ROWS, "sequence_length": LENGTH},
        "model": {
            "family": "qwen3_moe", "vocab_size": VOCAB, "hidden_size": 32, "num_layers": 2, "num_heads": 4,
            "num_experts": EXPERTS, "experts_per_token": CHOICES, "expert_size": 32, **WAYS[way],
        },
        "optimizer": {"learning_rate": 3e-3, "warmup_steps": 20},
        "train": {"precision": "float32", "steps": steps},
    }  # fmt: skip
    with mock.patch.object(experts, "balance_loss", own_loads if way == "batch, own loads" else experts.balance_loss):
        return compile_program(parse_config(tree), VOCAB, jax.devices()[:1])


def skewed(state: dict[str, Any]) -> dict[str, Any]:
    """Adds to all embeddings a component to which the routers' first experts respond."""
    direction = np.random.default_rng(0).standard_normal(32).astype(np.float32)
    direction /= np.linalg.norm(direction)
    params = state["params"]
    params["embedding"]["table"] += 0.1 * direction
    routers = params["layers"]["experts"]
    routers["router"] = routers["router"].at[..., :CHOICES].add(2 * direction[:, None])
    return state


def batches(program: Program, seed: int, steps: int) -> Iterator[dict[str, Any]]:
    """Yields batches of a random Markov chain, with flags."""
    control = {"control": ControlFlags(program.control_sharding).array()}
    for tokens in tokens_of(steps, ROWS, seed):
        yield to_devices(fields_of(tokens), list(range(ROWS)), ROWS, program.batch_sharding) | control


def train(way: str, seed: int, steps: int) -> tuple[np.ndarray, float]:
    """Returns the largest load in each step, and the loss on 20 other batches."""
    program = program_of(way, seed, steps)
    state, loads = skewed(program.init()), []
    for batch in batches(program, 10 + seed, steps):
        state, values = program.step(state, batch)
        loads.append(values["model"]["expert_load_max"])
    held_out = [program.evaluate(model_state(state), batch) for batch in batches(program, 5, 20)]
    loss = sum(float(sums["loss_sum"]) for sums in held_out) / sum(float(sums["tokens"]) for sums in held_out)
    return np.asarray(jax.device_get(loads)), loss


def measure(way: str, steps: int, seeds: int) -> dict[str, Any]:
    loads, losses = zip(*(train(way, seed, steps) for seed in range(seeds)), strict=True)
    smooth = np.stack([np.convolve(load, np.full(20, 1 / 20), "valid") for load in loads])
    is_uneven = smooth.max(axis=0) >= 1.5
    return {
        "way": way,
        "load_at": {
            step: round(float(smooth[:, step - 20].max()), 2) for step in (20, 100, 200, 500, 1000) if step <= steps
        },
        "even_from_step": int(np.max(np.nonzero(is_uneven)[0], initial=-1)) + 21 if not is_uneven[-1] else None,
        "largest_load_of_last_half": round(float(smooth[:, len(smooth[0]) // 2 :].max()), 2),
        "held_out": [round(loss, 4) for loss in losses],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    about = {"date": time.strftime("%Y-%m-%d"), "jax": version("jax"), "steps": options.steps}
    for way in WAYS:
        print(json.dumps(about | measure(way, options.steps, options.seeds)), flush=True)


if __name__ == "__main__":
    main()
