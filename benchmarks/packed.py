"""Temporary memory of the compiled step with packed rows, by length of a row; nothing is executed.

    python benchmarks/packed.py                 on one CPU device, a tiny model in float32
    python benchmarks/packed.py --target h100   on one H100 that need not be there, in bfloat16 (extra `plan`)

Prints one line of JSON a length: MiB of temporaries with 4 rows, and how that grows with each doubling.
"""

import argparse
import json
from importlib.metadata import version

from jaxmnt.config.load import parse_config
from jaxmnt.plan.chips import find_target
from jaxmnt.plan.targets import gpu_devices

LENGTHS = (2048, 4096, 8192, 16384)


def temporary_bytes(length: int, target: str | None) -> int:
    """Of a step of one row at a time."""
    config = parse_config(
        {
            "data": {"global_batch_size": 4, "sequence_length": length, "document_mask": True},
            "model": {"vocab_size": 512, "hidden_size": 256, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2},
            "train": {"microbatch_size": 1, "precision": "bfloat16" if target else "float32"},
        }
    )
    devices = gpu_devices(find_target(target)[0], 1, 1) if target else None

    import jax

    from jaxmnt.training.build import build_spec
    from jaxmnt.training.compile import compile_step
    from jaxmnt.training.state import abstract_state

    spec = build_spec(config, 512, devices or jax.devices()[:1])
    return int(compile_step(spec, abstract_state(spec)).memory_analysis().temp_size_in_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="a chip that --dry-run knows, such as h100")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    options = parser.parse_args()
    before = None
    for length in options.lengths:
        size = temporary_bytes(length, options.target)
        line = {"length": length, "temporary_mib": round(size / 2**20, 1), "target": options.target or "cpu"}
        growth = {} if before is None else {"growth": round(size / before, 3)}
        print(json.dumps(line | growth | {"jax": version("jax")}), flush=True)
        before = size


if __name__ == "__main__":
    main()
