"""What telemetry costs a run: all of it on, against all of it off.

    python benchmarks/telemetry.py --data data/quickstart

1. CPU time a step, by the process's own clock: a run of one process whose step does next to nothing, so that the rest
   of a step is seen. On and off in turn; the difference of each pair.
2. The rate of two processes whose steps take about 50 ms, on and off in turn; the ratio of each pair, and the interval
   in which its median lies with 95 % (by resampling the pairs).

On: phases, resources every 5 s, a probe every 100 steps, TensorBoard, the status server. Off: none of these;
metrics.jsonl and the events stay. Prints a table and a JSON line. Linux only.
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
ON = (
    "telemetry.phases=true", "telemetry.resources_every_seconds=5", "telemetry.probe_every=100",
    "telemetry.sinks=[tensorboard]", "telemetry.port=0",
)  # fmt: skip
OFF = (
    "telemetry.phases=false", "telemetry.resources_every_seconds=null", "telemetry.probe_every=0",
    "telemetry.sinks=[]",
)  # fmt: skip
NOTHING = (
    "model.hidden_size=16", "model.num_layers=1", "model.num_heads=2", "model.intermediate_size=32",
    "data.global_batch_size=8", "data.sequence_length=16", "train.eval_every=0", "checkpoint.every_steps=0",
)  # fmt: skip
SKIPPED = 50
"""Steps until all is loaded."""

CPU_CLOCK = """
import json, sys, time
from jaxmnt import train
from jaxmnt.run.monitoring import Monitoring
first, last, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
end, told = Monitoring.end_step, {}
def end_step(self, step, stop):
    end(self, step, stop)
    if step in (first, last):
        told[step] = time.process_time()
Monitoring.end_step = end_step
train.main(sys.argv[4:])
open(path, "w").write(json.dumps((told[last] - told[first]) / (last - first)))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="data/quickstart", help="prepared data")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200, help="of each run of two processes; ten times as many of one")
    parser.add_argument("--width", type=int, default=160, help="of the model of two processes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cpu = in_turn(
            options.pairs, lambda number, settings: cpu_a_step(options, Path(folder) / f"c{number}", settings)
        )
        rate = in_turn(
            options.pairs, lambda number, settings: step_time(options, Path(folder) / f"r{number}", settings)
        )
    more = [1e3 * (on - off) for on, off in cpu]
    ratios = [off / on for on, off in rate]
    low, high = interval(ratios)
    result = {
        "cpu_ms_a_step_on": 1e3 * statistics.median(on for on, _ in cpu),
        "cpu_ms_a_step_off": 1e3 * statistics.median(off for _, off in cpu),
        "cpu_ms_a_step_more": statistics.median(more),
        "cpu_ms_a_step_more_of_pairs": more,
        "step_ms_off": 1e3 * statistics.median(off for _, off in rate),
        "rate_on_over_off": statistics.median(ratios),
        "rate_interval_95": [low, high],
        "rate_of_pairs": ratios,
        "date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "cpu": platform.machine(),
        "python": platform.python_version(), "jax": version("jax"), "tensorboard": version("tensorboard"),
    }  # fmt: skip
    for name, value in result.items():
        print(f"{name:28} {value}")
    print(json.dumps(result))


def in_turn(pairs: int, measure) -> list[tuple[float, float]]:
    """(on, off) of each pair; every other pair begins with off."""
    found = []
    for number in range(pairs):
        order = [("on", ON), ("off", OFF)][:: 1 if number % 2 == 0 else -1]
        values = {name: measure(f"{number}-{name}", settings) for name, settings in order}
        found.append((values["on"], values["off"]))
    return found


def cpu_a_step(options: argparse.Namespace, run_dir: Path, settings: tuple[str, ...]) -> float:
    """Seconds of all threads of a process."""
    steps = SKIPPED + 10 * options.steps
    told = run_dir.with_suffix(".json")
    command = [
        sys.executable, "-c", CPU_CLOCK, str(SKIPPED), str(steps), str(told), "--config", str(HERE / "tiny.yaml"),
        f"data.path={options.data}", f"run.dir={run_dir}", f"train.steps={steps}", *NOTHING, *settings,
    ]  # fmt: skip
    run(command)
    return json.loads(told.read_text())


def step_time(options: argparse.Namespace, run_dir: Path, settings: tuple[str, ...]) -> float:
    """Mean seconds of a step of two processes."""
    steps = SKIPPED + options.steps
    command = [
        sys.executable, "-m", "jaxmnt.launch", "local", "--processes", "2", "--devices-per-process", "1", "--",
        "--config", str(HERE / "tiny.yaml"), f"data.path={options.data}", f"run.dir={run_dir}", f"train.steps={steps}",
        f"model.hidden_size={options.width}", "model.num_layers=2", "model.num_heads=4", "model.intermediate_size=256",
        "data.global_batch_size=8", "data.sequence_length=128", "train.eval_every=0", "checkpoint.every_steps=0",
        *settings,
    ]  # fmt: skip
    run(command)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return statistics.mean(line["step_seconds"] for line in lines if line["kind"] == "train" and line["step"] > SKIPPED)


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"JAX_NUM_CPU_DEVICES": "1"})
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")


def interval(values: list[float]) -> tuple[float, float]:
    """In which the median of such values lies with 95 %."""
    chosen = random.Random(0)
    medians = sorted(statistics.median(chosen.choices(values, k=len(values))) for _ in range(10_000))
    return medians[249], medians[9749]


if __name__ == "__main__":
    main()
