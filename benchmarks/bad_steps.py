"""What deciding about bad steps costs: a step that looks whether loss and gradient are finite, beside one without.

    python benchmarks/bad_steps.py [--config FILE] [--rounds 7] [--steps 20]

Both are compiled from the same source, the other with a test that always says yes. Rounds of the two alternate in one
process; the ratio is that of the medians. Appends a line to the file that --output names.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxmnt.config import load_config
from jaxmnt.data.feed import to_devices
from jaxmnt.training.compile import Program, compile_program
from jaxmnt.training.spec import ControlFlags


def main() -> None:
    options = _parse()
    config = load_config(options.config, options.overrides)
    vocab = config.model.vocab_size or 320
    careful = _compiled(config, vocab)
    original, jnp.isfinite = jnp.isfinite, lambda value: jnp.array(True)
    try:
        careless = _compiled(config, vocab)
    finally:
        jnp.isfinite = original
    seconds: dict[str, list[float]] = {"careful": [], "careless": []}
    programs = {"careful": careful, "careless": careless}
    states = {name: program.init() for name, program in programs.items()}
    for round in range(options.rounds + 1):
        for name in ("careful", "careless") if round % 2 else ("careless", "careful"):
            states[name], took = _steps(programs[name], states[name], options.steps)
            if round:  # the first one warms up
                seconds[name].append(took / options.steps)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    record = {
        "benchmark": "bad_steps",
        "date": time.strftime("%Y-%m-%d"),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "devices": len(jax.devices()),
        "careful_seconds": medians["careful"],
        "careless_seconds": medians["careless"],
        "ratio": medians["careful"] / medians["careless"],
        "ratios": [a / b for a, b in zip(seconds["careful"], seconds["careless"], strict=True)],
    }
    print(json.dumps(record, indent=1))
    if options.output:
        with options.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def _compiled(config, vocab: int) -> Program:
    jax.clear_caches()  # or the second would be the first
    return compile_program(config, vocab)


def _steps(program: Program, state, steps: int):
    """The state after so many steps, and their seconds."""
    settings = program.spec.config.data
    rows, length = settings.global_batch_size, settings.sequence_length
    tokens = np.random.default_rng(0).integers(0, 256, (rows, length), np.int32)
    batch = {
        "tokens": tokens, "targets": np.roll(tokens, -1, 1), "weights": np.ones((rows, length), np.float32),
        "segments": np.zeros((rows, length), np.int32),
        "positions": np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
    }  # fmt: skip
    placed = to_devices(batch, list(range(rows)), rows, program.batch_sharding)
    placed |= {"control": ControlFlags(program.control_sharding).array()}
    started = time.perf_counter()
    for _ in range(steps):
        state, metrics = program.step(state, placed)
    jax.block_until_ready((state, metrics))
    return state, time.perf_counter() - started


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path(__file__).parent / "tiny.yaml")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=Path, help="file of JSON lines to append to")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    main()
