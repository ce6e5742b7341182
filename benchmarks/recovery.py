"""From a kill to the next new step: the time that a run loses, phase by phase, in several processes on this machine.

    python benchmarks/recovery.py [--processes 2 4 8] [--rounds 3]

Each round starts a tiny model with `jaxmnt.launch local`, kills a process with SIGKILL a few steps after a checkpoint,
and waits until the run has taken a step that it had not taken before. The phases of the new start are those of its
event `started`, of the slowest process. Prints a JSON line for each number of processes, and a Markdown table, with
medians in seconds.
"""

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jaxmnt.distributed.container import cores
from jaxmnt.telemetry.events import event_file, last_logged_step, read_lines

CONFIG = Path(__file__).with_name("tiny.yaml")
SAVE_EVERY, KILL_AT = 10, 14
"""Steps between checkpoints, and the step after which a process is killed."""
PHASES = ("environment", "import", "rendezvous", "preflight", "data", "compile", "restore", "first_step")
TIMEOUT_SECONDS = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rows = []
    for processes in options.processes:
        rounds = [recover(processes) for _ in range(options.rounds)]
        result = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
        about = {"processes": processes, "rounds": options.rounds, "cores": cores(), "date": time.strftime("%Y-%m-%d")}
        print(json.dumps(about | {"python": platform.python_version()} | result), flush=True)
        rows.append([str(processes), *(f"{seconds:.2f}" for seconds in result.values())])
    headings = ["processes", *(name.replace("_", " ") for name in result)]
    print("| " + " | ".join(headings) + " |")
    print("| ---: " * len(headings) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")


def recover(processes: int) -> dict[str, float]:
    """Kills a process, and returns the seconds of each phase until the next new step, and of all of them."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        settings = [
            f"run.dir={run}", f"run.compile_cache={folder}/compiled", "data.path=null", "data.synthetic=512",
            "data.sequence_length=64", "train.steps=1000", "train.log_every=1", f"checkpoint.every_steps={SAVE_EVERY}",
        ]  # fmt: skip
        command = [
            sys.executable, "-m", "jaxmnt.launch", "local", "--processes", str(processes), "--devices-per-process", "1",
            "--max-restarts", "1", "--", "--config", str(CONFIG), *settings,
        ]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as launcher:
            try:
                wait(lambda: last_logged_step(run) >= KILL_AT)
                furthest, killed = last_logged_step(run), time.time()
                os.kill(child_of(launcher.pid, processes - 1), signal.SIGKILL)
                # The lines of steps after the checkpoint are removed when the run is resumed.
                wait(lambda: last_logged_step(run) < furthest or len(starts(run)) > 1)
                wait(lambda: len(starts(run)) > 1 and last_logged_step(run) > furthest + 1)
                ended = time.time()
            finally:
                launcher.send_signal(signal.SIGTERM)
        return phases_of(run, processes, killed, ended)


def phases_of(run: Path, processes: int, killed: float, ended: float) -> dict[str, float]:
    events = [read_lines(event_file(run, number)) for number in range(processes)]
    told = max(event["time"] for lines in events for event in lines if event["kind"] == "peer_lost")
    started = [event for lines in events for event in lines if event["kind"] == "started" and event["attempt"] > 0]
    began = min(event["began"] for lines in events for event in lines if event["kind"] == "start" and event["attempt"])
    seconds = {"until_all_know": told - killed, "until_restart": began - told}
    seconds |= {phase: max(event["seconds"].get(phase, 0.0) for event in started) for phase in PHASES}
    seconds["steps_again"] = ended - max(event["time"] for event in started)
    return seconds | {"all": ended - killed}


def starts(run: Path) -> list[dict]:
    return [event for event in read_lines(event_file(run, 0)) if event["kind"] == "started"]


def child_of(launcher: int, number: int) -> int:
    """The launcher's process with this number, by its environment."""
    for process in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if f"JAX_PROCESS_ID={number}".encode() in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
            return int(process)
    raise LookupError(f"the launcher has no process {number}")


def wait(is_done) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not is_done():
        if time.monotonic() > deadline:
            raise TimeoutError("the run takes too long")
        time.sleep(0.02)


if __name__ == "__main__":
    main()
