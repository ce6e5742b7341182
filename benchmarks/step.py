"""Step time, tokens/s, TFLOP/s and MFU of a model size on a mesh; against a bare JAX step; bf16 against f32.

    python benchmarks/step.py --size tiny                    this machine's devices, data parallel
    python benchmarks/step.py --size 1b --mesh fsdp=8        any config key may follow as key=value
    python benchmarks/step.py --size tiny --bare             also the bare JAX step, in turn, on one device
    python benchmarks/step.py --size 125m --check-precision  also 20 steps in bfloat16 against float32

Prints a table, then one JSON line. Needs nothing but jaxmnt's own packages.
"""

import argparse
import json
import platform
import sys
import time
from importlib.metadata import version

_MODEL_KEYS = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "intermediate_size")
SIZES = {
    # The shape of the side-by-side table that jaxmnt is compared with.
    "tiny": (512, 256, 4, 4, 2, 688),
    "125m": (32768, 768, 12, 12, 12, 2048),
    "350m": (32768, 1024, 24, 16, 16, 2816),
    "1b": (128256, 2048, 16, 32, 8, 8192),
    "3b": (128256, 3072, 28, 24, 8, 8192),
    "8b": (128256, 4096, 32, 32, 8, 14336),
}
BATCHES = {  # rows a step, tokens a row
    "tiny": (16, 256), "125m": (32, 1024), "350m": (16, 2048), "1b": (8, 4096), "3b": (4, 4096), "8b": (1, 8192),
}  # fmt: skip


def main() -> None:
    options = parse()
    import jax

    config = make_config(options)
    result = measure(config, options.steps)
    if options.bare:
        result["bare"] = compare_with_bare(config, options.steps, options.rounds)
    if options.check_precision:
        result["precision"] = compare_precisions(config)
    device = jax.devices()[0]
    result |= {
        "size": options.size, "date": time.strftime("%Y-%m-%d"), "device": device.device_kind,
        "devices": jax.device_count(), "cpu": platform.processor() or platform.machine(),
        "python": platform.python_version(), **{name: version(name) for name in ("jax", "flax", "optax")},
    }  # fmt: skip
    for name, value in result.items():
        print(f"{name:20} {value}")
    print(json.dumps(result))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="tiny")
    parser.add_argument("--mesh", nargs="*", default=[], metavar="AXIS=N", help="mesh axes; default data=-1")
    parser.add_argument("--rows", type=int, help="global batch; default by size")
    parser.add_argument("--length", type=int, help="sequence length; default by size")
    parser.add_argument("--steps", type=int, default=20, help="steps measured")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of --bare, the two in turn in each")
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--check-precision", action="store_true")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    return parser.parse_intermixed_args()


def make_config(options: argparse.Namespace):
    from jaxmnt.config.load import apply_overrides, parse_config

    rows, length = BATCHES[options.size]
    tree = {
        "model": dict(zip(_MODEL_KEYS, SIZES[options.size], strict=True)),
        "data": {"global_batch_size": options.rows or rows, "sequence_length": options.length or length},
    }
    apply_overrides(tree, [f"mesh.{axis}" for axis in options.mesh] + options.settings)
    return parse_config(tree)


def make_batch(config, program, seed=0):
    import numpy as np

    from jaxmnt.data.feed import to_devices
    from jaxmnt.training.spec import ControlFlags

    rows, length = config.data.global_batch_size, config.data.sequence_length
    tokens = np.random.default_rng(seed).integers(0, config.model.vocab_size, (rows, length + 1), np.int32)
    local = {
        "tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": np.ones((rows, length), np.float32),
        "segments": np.ones((rows, length), np.int32),
        "positions": np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
    }  # fmt: skip
    batch = to_devices(local, list(range(rows)), rows, program.batch_sharding)
    return batch | {"control": ControlFlags(program.control_sharding).array()}


def measure(config, steps: int) -> dict:
    """Median step time of `steps` steps, each waited for, after three that are not counted."""
    import jax
    import numpy as np

    from jaxmnt.telemetry.flops import CONVENTIONS, peak_flops, token_flops
    from jaxmnt.training.compile import compile_program

    program = compile_program(config, config.model.vocab_size)
    state, batch, times = program.init(), make_batch(config, program), []
    for _ in range(steps + 3):
        started = time.perf_counter()
        state, metrics = program.step(state, batch)
        jax.block_until_ready(metrics)
        times.append(time.perf_counter() - started)
    seconds = float(np.median(times[3:]))
    tokens = config.data.global_batch_size * config.data.sequence_length
    dtype = program.spec.dtype
    convention = config.telemetry.flops
    flops = token_flops(program.spec.definition, config.data.sequence_length)
    rate = tokens / seconds * CONVENTIONS[convention](flops)
    peak = peak_flops(jax.devices()[0].device_kind, dtype)
    return {
        "parameters": program.spec.definition.parameter_count,
        "mesh": {axis: size for axis, size in program.placement.sizes.items() if size > 1},
        "rows": config.data.global_batch_size, "length": config.data.sequence_length,
        "precision": dtype.name, "attention": program.spec.kernel, "remat": config.train.remat,
        "layer_unroll": config.train.layer_unroll, "passes": program.spec.num_microbatches,
        "compile_seconds": round(program.compile_seconds, 2),
        "step_seconds": seconds, "tokens_per_second": tokens / seconds,
        "tflops_per_second_per_device": rate / 1e12 / jax.device_count(),
        "mfu": None if peak is None else rate / jax.device_count() / peak,
        "flops_convention": convention, "temporary_mib": program.memory.temporary / 2**20,
    }  # fmt: skip


def compare_with_bare(config, steps: int, rounds: int) -> dict:
    """CPU time a step of jaxmnt over the bare step's, in turn, on one device; the median of the rounds' ratios."""
    import jax
    import numpy as np
    from bare import make_bare_step

    from jaxmnt.training.compile import compile_program
    from jaxmnt.training.loss import chunk_count

    program = compile_program(config, config.model.vocab_size, jax.devices()[:1])
    batch = make_batch(config, program)
    vocab, limit = config.model.vocab_size, config.train.loss_chunk_mib
    chunks = chunk_count(batch["targets"].size, vocab, program.placement, limit)
    init, step = make_bare_step(config, vocab, chunks)
    bare_state = jax.jit(init)(jax.random.key(0))
    arguments = (batch["tokens"], batch["targets"])
    bare_step = jax.jit(step, donate_argnums=0).lower(bare_state, *arguments).compile()
    state = program.init()
    ours, bare = [], []
    for number in range(rounds + 1):  # the first is a warm-up
        started = time.process_time()
        for _ in range(steps):
            state, metrics = program.step(state, batch)
            jax.block_until_ready(metrics)
        middle = time.process_time()
        for _ in range(steps):
            bare_state, loss = bare_step(bare_state, *arguments)
            jax.block_until_ready(loss)
        if number:
            ours.append((middle - started) / steps)
            bare.append((time.process_time() - middle) / steps)
    ratios = np.array(ours) / np.array(bare)
    return {
        "cpu_ms": 1e3 * float(np.median(ours)), "bare_cpu_ms": 1e3 * float(np.median(bare)),
        "ratio_median": float(np.median(ratios)), "ratio_min": float(ratios.min()), "ratio_max": float(ratios.max()),
        "rounds": rounds,
    }  # fmt: skip


def compare_precisions(config, steps: int = 20) -> dict:
    """Losses of the same `steps` steps in bfloat16 and float32, on the same few batches."""
    import numpy as np

    from jaxmnt.training.compile import compile_program

    curves = {}
    for precision in ("float32", "bfloat16"):
        train = config.train.model_copy(update={"precision": precision})
        attention = "xla" if precision == "float32" else config.model.attention
        model = config.model.model_copy(update={"attention": attention})
        chosen = config.model_copy(update={"train": train, "model": model})
        program = compile_program(chosen, config.model.vocab_size)
        state, losses = program.init(), []
        batches = [make_batch(chosen, program, seed) for seed in range(4)]
        for number in range(steps):
            state, metrics = program.step(state, batches[number % len(batches)])
            losses.append(float(metrics["loss"]))
        curves[precision] = losses
    exact, low = np.array(curves["float32"]), np.array(curves["bfloat16"])
    difference = np.abs(low / exact - 1)
    return {"largest_relative_difference": float(difference.max()), **curves}


if __name__ == "__main__":
    sys.path.insert(0, __file__.rpartition("/")[0] or ".")
    main()
