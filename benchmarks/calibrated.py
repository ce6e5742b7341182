"""Steps that are predicted from the compiled program and a calibration, against steps that are measured, on CPU cores.

    python benchmarks/calibrated.py [--steps 12] [--only NAME …]

For each of 8 configs on one process, and again on two, each process bound to a core of its own: `preflight --calibrate`
measures what the cores attain, `train --dry-run --calibration` predicts, and a run is measured, in turn. Prints a row a
case, the median error, and one JSON line. Linux only.
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
SMALL = ["model.hidden_size=128", "model.intermediate_size=344"]
CASES: dict[str, tuple[list[str], str]] = {  # settings, the mesh axis of two processes
    "tiny": ([], "fsdp"),
    "narrow and deep": (["model.hidden_size=64", "model.intermediate_size=172", "model.num_layers=12"], "data"),
    "wide": (
        [
            "model.hidden_size=512",
            "model.intermediate_size=1376",
            "model.num_heads=8",
            "model.num_layers=2",
            "data.global_batch_size=8",
        ],
        "model",
    ),
    "long rows": (["data.sequence_length=1024", "data.global_batch_size=4", "model.num_layers=2"], "fsdp"),
    "microbatches": ([*SMALL, "train.microbatch_size=2"], "fsdp"),
    "all kept": ([*SMALL, "train.remat=none"], "pipeline"),
    "many tokens": ([*SMALL, "model.vocab_size=8192", "data.global_batch_size=8"], "data"),
    "bfloat16": ([*SMALL, "train.precision=bfloat16", "train.remat=full"], "fsdp"),
}
CONFIG = ["--config", str(HERE / "tiny.yaml"), "data.path=null"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="steps of a run, of which the last two thirds count")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="of the cases")
    options = parser.parse_args()
    rows = []
    print(f"{'config':16} {'processes':>9} {'predicted':>10} {'measured':>10} {'error':>7}")
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only or CASES:
            for processes in (1, 2):
                row = {"config": name, "processes": processes} | case(name, processes, Path(folder), options.steps)
                row["error"] = row["predicted"] / row["measured"] - 1
                rows.append(row)
                print(
                    f"{name:16} {processes:9} {1e3 * row['predicted']:7.1f} ms {1e3 * row['measured']:7.1f} ms "
                    f"{row['error']:+7.1%}",
                    flush=True,
                )
    median = statistics.median(abs(row["error"]) for row in rows)
    print(f"median error {median:.1%}, largest {max(abs(row['error']) for row in rows):.1%}")
    told = {"date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "jax": version("jax"), "median": median}
    print(json.dumps(told | {"rows": rows}))


def case(name: str, processes: int, folder: Path, steps: int) -> dict[str, float]:
    """Seconds of a step."""
    settings, axis = CASES[name]
    vocab = next((one.split("=")[1] for one in settings if one.startswith("model.vocab_size")), "512")
    place = folder / f"{name} {processes}".replace(" ", "-")
    calibration = place.with_suffix(".json")
    config = [
        *CONFIG,
        *settings,
        f"data.synthetic={vocab}",
        f"run.dir={place}",
        "mesh.data=1",
        f"mesh.{axis}={processes}",
    ]
    local = ["jaxmnt.launch", "local", "--processes", str(processes), "--devices-per-process", "1"]
    local += ["--cores-per-process", "1"]
    call([*local, "--preflight", "--", *config, "--calibrate", str(calibration)])
    plan = ["--dry-run", "--devices", str(processes), "--json", "--calibration", str(calibration)]
    predicted = json.loads(call(["jaxmnt.train", *config, *plan]))["prediction"]["step_seconds"]
    call([*local, "--", *config, f"train.steps={steps}"])
    lines = map(json.loads, (place / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    times = [line["time"] for line in lines if line["kind"] == "train"][steps // 3 :]
    seconds = statistics.median(after - before for before, after in itertools.pairwise(times))
    return {"predicted": predicted, "measured": seconds}


def call(arguments: list[str]) -> str:
    """What a command prints."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run([sys.executable, "-m", *arguments], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
