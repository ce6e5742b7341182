"""What the loop around the step costs, and what a run needs until its first step.

    python benchmarks/loop.py --data data/quickstart

1. Steps per second of `jaxmnt.train.train` with all its telemetry, over the bare compiled step in a `for` loop in
   the same process, in turn; the ratio of each round and their median.
2. A run of its own of three steps: seconds from the start of the process to the end of the first step, and the
   peak of its resident memory.

Prints one JSON line. Linux only (reads /proc for the process's start).
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        result = start_up(options, Path(folder) / "first") | loop_cost(options, Path(folder))
    result |= {
        "date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "cpu": platform.machine(),
        "python": platform.python_version(), "jax": version("jax"),
    }  # fmt: skip
    for name, value in result.items():
        print(f"{name:24} {value}")
    print(json.dumps(result))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="data/quickstart", help="prepared data")
    parser.add_argument("--steps", type=int, default=30, help="steps a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("settings", nargs="*", metavar="key=value")
    return parser.parse_intermixed_args()


def start_up(options: argparse.Namespace, run_dir: Path) -> dict:
    """Time to the first step and peak memory of a short run in a new process."""
    settings = [f"data.path={options.data}", f"run.dir={run_dir}", "train.steps=3", *options.settings]
    started = time.time()
    subprocess.run(
        [sys.executable, "-m", "jaxmnt.train", "--config", str(HERE / "tiny.yaml"), *settings],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    first = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[0])
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return {"seconds_to_first_step": first["time"] - started, "peak_rss_mib": peak / 1024}


def loop_cost(options: argparse.Namespace, folder: Path) -> dict:
    import jax
    import numpy as np

    from jaxmnt.config import load_config
    from jaxmnt.data.batches import TrainingData
    from jaxmnt.data.sources import fit_to_data, open_sources
    from jaxmnt.run.input import training_feed
    from jaxmnt.train import train
    from jaxmnt.training.compile import compile_program
    from jaxmnt.training.spec import ControlFlags

    def config_of(number: int):
        settings = [f"data.path={options.data}", f"run.dir={folder / str(number)}"]
        return load_config(HERE / "tiny.yaml", [*settings, f"train.stop_after={options.steps + 3}", *options.settings])

    config = config_of(-1)
    data = open_sources(config.data)
    config = fit_to_data(config, data)
    program = compile_program(config, data.vocab_size)
    batch, _ = training_feed(TrainingData(config, data), program, 0).take()
    batch |= {"control": ControlFlags(program.control_sharding).array()}

    def bare() -> float:
        state = program.init()
        for number in range(options.steps + 3):
            if number == 3:
                jax.block_until_ready(state)
                started = time.perf_counter()
            state, metrics = program.step(state, batch)
        jax.block_until_ready((state, metrics))
        return options.steps / (time.perf_counter() - started)

    def loop(number: int) -> float:
        train(config_of(number))
        lines = [json.loads(line) for line in (folder / str(number) / "metrics.jsonl").read_text().splitlines()]
        waits.extend(line["data_wait_seconds"] / line["step_seconds"] for line in lines[3:] if line["kind"] == "train")
        return options.steps / (lines[-1]["time"] - lines[2]["time"])

    waits: list[float] = []
    rounds = []
    for number in range(options.rounds):
        before, real, after = bare(), loop(number), bare()
        rounds.append((real, (before + after) / 2))
    ratios = np.array([real / plain for real, plain in rounds])
    return {
        "step_milliseconds": 1e3 / float(np.median([plain for _, plain in rounds])),
        "data_wait_share_median": float(np.median(waits)),
        "loop_over_bare_median": float(np.median(ratios)),
        "loop_over_bare_rounds": [round(float(ratio), 4) for ratio in ratios],
    }


if __name__ == "__main__":
    main()
