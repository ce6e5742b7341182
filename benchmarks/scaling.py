"""Weak and strong scaling on CPU cores, from one process to two, side by side with PyTorch's DistributedDataParallel.

    python benchmarks/scaling.py --torch-python ENV/bin/python [--rounds 3] [--steps 15]

The model is that of `tiny.yaml`, as in `peers.py`. Each process is bound to a core of its own. jaxmnt is measured by
`python -m jaxmnt.bench scaling`, PyTorch by the worker of `peers.py` with one thread; they take turns in each round.
Prints seconds of a step and efficiencies (of a round, against one process in the same round), then one JSON line.
Linux only.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROWS = 16
CASES = {"1 process": (1, ROWS), "2 processes, weak": (2, 2 * ROWS), "2 processes, strong": (2, ROWS)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-python", default=sys.executable, metavar="PATH", help="a Python that has torch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15, help="of a run")
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {"jaxmnt": [], "torch": []}
    with tempfile.TemporaryDirectory() as name:
        for number in range(options.rounds):
            folder = Path(name) / str(number)
            found["jaxmnt"].append(of_jaxmnt(folder, options.steps))
            found["torch"].append({case: of_torch(folder, case, options) for case in CASES})
            print(f"round {number + 1}", {side: rounds[-1] for side, rounds in found.items()}, file=sys.stderr)
    print(f"{'':8} {'case':20} {'step':>9} {'efficiency':>10}  of rounds")
    for side, rounds in found.items():
        for case, (processes, rows) in CASES.items():
            share = rows / processes / ROWS
            own = [share * one["1 process"] / one[case] for one in rounds]
            seconds = statistics.median(one[case] for one in rounds)
            print(
                f"{side:8} {case:20} {1e3 * seconds:6.0f} ms {statistics.median(own):10.2f}  "
                f"{min(own):.2f} to {max(own):.2f}"
            )
    told = {"date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "jax": version("jax"), "rounds": found}
    print(json.dumps(told))


def of_jaxmnt(folder: Path, steps: int) -> dict[str, float]:
    """Seconds of a step."""
    command = [
        sys.executable, "-m", "jaxmnt.bench", "scaling", "--config", str(HERE / "tiny.yaml"), "--processes", "1,2",
        "--devices-per-process", "1", "--cores-per-process", "1", "--rounds", "1", "--steps", str(steps),
        "--no-prediction", "--json", "data.path=null", "data.synthetic=512", f"run.dir={folder}",
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    of = {one["mode"]: [statistics.median(point["seconds"]) for point in one["points"]]
          for one in json.loads(done.stdout)["scalings"]}  # fmt: skip
    return dict(zip(CASES, (of["weak"][0], of["weak"][1], of["strong"][1]), strict=True))


def of_torch(folder: Path, case: str, options: argparse.Namespace) -> float:
    """Seconds of a step."""
    processes, rows = CASES[case]
    metrics = folder / f"torch {case}.jsonl"
    cores = sorted(os.sched_getaffinity(0))
    port = 29600 + len(list(folder.glob("torch *")))
    common = os.environ | {
        "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(processes), "METRICS": str(metrics), "ROWS": str(rows),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    worker = [options.torch_python, str(HERE / "peers.py"), "--torch-worker", "--steps", str(options.steps)]
    running = [
        subprocess.Popen(["taskset", "-c", str(cores[rank]), *worker], env=common | {"RANK": str(rank)})
        for rank in range(processes)
    ]
    if any(process.wait() for process in running):
        raise SystemExit(f"torch failed: {case}")
    times = [json.loads(line)["time"] for line in metrics.read_text(encoding="utf-8").splitlines()]
    counted = times[options.steps // 3 : -1]
    return statistics.median(after - before for before, after in itertools.pairwise(counted))


if __name__ == "__main__":
    main()
