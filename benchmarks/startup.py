"""How long a start takes, phase by phase: new runs and restarts of a tiny model in several processes on this machine.

    python benchmarks/startup.py [--processes 2,8] [--rounds 3]

Each round starts a run anew and then again from its checkpoint, with `jaxmnt.launch local`; the table has medians over
rounds of the slowest process, from the events `started`. Prints Markdown.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CONFIG = Path(__file__).with_name("tiny.yaml")
PHASES = ("process", "environment", "import", "rendezvous", "preflight", "data", "compile", "restore", "first_step")


def main() -> None:
    options = _parse()
    counts = [int(part) for part in options.processes.split(",")]
    rows = []
    for processes in counts:
        starts = [_round(processes, options.steps) for _ in range(options.rounds)]
        for number, name in enumerate(("new", "again")):
            seconds = {phase: statistics.median(start[number][phase] for start in starts) for phase in PHASES}
            total = statistics.median(sum(start[number].values()) for start in starts)
            rows.append([str(processes), name, *(f"{seconds[phase]:.2f}" for phase in PHASES), f"{total:.1f}"])
    headings = ["processes", "start", *(phase.replace("_", " ") for phase in PHASES), "all"]
    print("| " + " | ".join(headings) + " |")
    print("| ---: | --- " + "| ---: " * (len(PHASES) + 1) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")


def _round(processes: int, steps: int) -> list[dict[str, float]]:
    """The slowest process's seconds by phase, of a new run and of its restart."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        settings = [
            f"run.dir={run_dir}", f"run.compile_cache={folder}/compiled", "data.path=null", "data.synthetic=512",
            f"data.global_batch_size={processes}",
            f"train.steps={2 * steps}", "checkpoint.every_steps=0",
        ]  # fmt: skip
        for stop, code in ((steps, 75), (None, 0)):
            more = [] if stop is None else [f"train.stop_after={stop}"]
            done = subprocess.run(
                [sys.executable, "-m", "jaxmnt.launch", "local", "--processes", str(processes),
                 "--devices-per-process", "1", "--", "--config", str(CONFIG), *settings, *more],
                env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True,
            )  # fmt: skip
            assert done.returncode == code, done.stderr
        found: list[list[dict[str, float]]] = [[], []]
        for path in sorted((run_dir / "events").glob("*.jsonl")):
            events = [json.loads(line) for line in path.read_text().splitlines()]
            for number, event in enumerate(event for event in events if event["kind"] == "started"):
                found[number].append(event["seconds"])
        return [{phase: max(one.get(phase, 0.0) for one in seconds) for phase in PHASES} for seconds in found]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", default="2,8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    return parser.parse_args()


if __name__ == "__main__":
    main()
