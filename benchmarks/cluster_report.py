"""Collects evidence on one or two hosts with GPUs: one JSON file and one page to attach to an issue.

Its parts are sized for about 20 minutes, which has not been timed on GPUs yet.

    python benchmarks/cluster_report.py                                    one host, all of its GPUs
    srun -N 2 --ntasks-per-node 1 python benchmarks/cluster_report.py      two hosts, with a folder that both see
    python benchmarks/cluster_report.py --rehearse                         all parts on CPU devices, tiny

Each process starts the same commands of jaxmnt, which find each other as any run does. The parts answer: do the hosts
and NCCL pass the checks; are the losses of all GPUs those of one GPU; how long is a step, and how much of its
communication is exposed, beside the plan; does a run that loses a process resume with the same losses. Process 0 writes
`cluster_report.json` and `cluster_report.html` into `--folder`. They contain no host names, addresses, paths or
secrets: hosts are numbered.
"""

import argparse
import contextlib
import getpass
import html
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu import lines, plan_target, query_gpus

from jaxmnt.config.schema import Cluster
from jaxmnt.distributed.identity import VARIABLES, identify
from jaxmnt.distributed.local_gpus import visible_gpus
from jaxmnt.distributed.process_group import software
from jaxmnt.drill.faults import Fault
from jaxmnt.errors import ExitCode

ROOT = Path(__file__).resolve().parent.parent
Result = dict[str, Any]

STEPS = 20
"""Steps of the small runs."""
SAVE_EVERY = 5
KILLED_STEP = 12
"""The step in which `resume` kills a process, between two saves."""
CLOSE = 1e-4
"""Relative difference of float32 losses that is still called equal: sums run in another order on another mesh."""


@dataclass(frozen=True)
class ReportRun:
    """The processes of this report, and where they work."""

    process: int
    processes: int
    folder: Path
    rehearse: bool

    @property
    def log(self) -> Path:
        """The file with the messages of this process's commands."""
        return self.folder / f"log-{self.process}.txt"

    @property
    def writes(self) -> bool:
        """True in the process that compares results and writes files."""
        return self.process == 0

    def small(self, name: str, *overrides: str) -> list[str]:
        """Returns the arguments of a run that takes seconds, in float32."""
        width, layers, length, rows = (64, 2, 64, 8) if self.rehearse else (1024, 8, 1024, 32)
        return self._arguments(name, width, layers, length, rows, "train.precision=float32", *overrides)

    def large(self, name: str, *overrides: str) -> list[str]:
        """Returns the arguments of a run of Llama 3 8B's layers in bfloat16, as many as fit half of the memory."""
        common = ("train.precision=bfloat16", "checkpoint.every_steps=0")  # its checkpoints would be large
        if self.rehearse:
            return self._arguments(name, 64, 2, 64, 8, *common, *overrides)
        devices = self.processes * len(visible())
        parameters = 0.5 * min(map(float, query_gpus("memory.total"))) * 2**20 * devices / 16 - 2 * 128256 * 4096
        layers = max(2, min(32, int(parameters // 218e6)))
        mlp = ("model.num_kv_heads=8", "model.intermediate_size=14336", "data.synthetic=128256", "train.remat=full")
        return self._arguments(name, 4096, layers, 8192, 2 * devices, *common, *mlp, *overrides)

    def _arguments(self, name: str, width: int, layers: int, length: int, rows: int, *overrides: str) -> list[str]:
        settings = [
            f"run.dir={self.folder / 'runs' / name}", "data.synthetic=256", f"data.sequence_length={length}",
            f"data.global_batch_size={rows}", f"model.hidden_size={width}", f"model.num_layers={layers}",
            f"model.num_heads={width // 16 if self.rehearse else width // 128}", f"train.steps={STEPS}",
            "optimizer.warmup_steps=1", f"checkpoint.every_steps={SAVE_EVERY}", "telemetry.sinks=[]",
        ]  # fmt: skip
        names = {setting.partition("=")[0] for setting in overrides}
        return [*(setting for setting in settings if setting.partition("=")[0] not in names), *overrides]

    def start(self, arguments: list[str], *module: str, **variables: str) -> subprocess.Popen[str]:
        """Starts a command of jaxmnt in this process's place in the cluster, by default jaxmnt.train.

        `module` may continue with arguments that precede `arguments`. The messages go to a log in the folder.
        """
        config = self.folder / f"empty-{self.process}.yaml"
        config.write_text("{}\n")
        environment = os.environ | variables
        if self.rehearse:
            environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": variables.get("JAX_NUM_CPU_DEVICES", "2")}
        command = [sys.executable, "-m", *(module or ("jaxmnt.train",)), "--config", str(config), *arguments]
        with self.log.open("a", encoding="utf-8") as log:
            return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT, env=environment)

    def execute(self, arguments: list[str], *module: str, codes: tuple[int, ...] = (0,), **variables: str) -> str:
        """Runs a command to its end and returns its output.

        Raises `RuntimeError` if its exit code is not in `codes`.
        """
        process = self.start(arguments, *module, **variables)
        output, _ = process.communicate()
        if process.returncode not in codes:
            messages = self.log.read_text(encoding="utf-8").strip().splitlines()
            last_message = messages[-1] if messages else ""
            raise RuntimeError(
                f"{(module or ('jaxmnt.train',))[0]} ended with exit code {process.returncode}: {last_message}"
            )
        return output

    def records(self, name: str, file: str = "metrics.jsonl", kind: str = "train") -> list[Result]:
        """Returns the records of a kind that a run has written."""
        return lines(self.folder / "runs" / name, file, kind)

    def losses(self, name: str) -> list[float]:
        """Returns the loss of each step of a run."""
        return [record["loss"] for record in self.records(name)]


def visible() -> list[str]:
    """Returns the GPUs that this process can see. Ends the command if there is none."""
    gpus = visible_gpus(os.environ, len(query_gpus("name")))
    return gpus or sys.exit("CUDA_VISIBLE_DEVICES hides all GPUs of this host; --rehearse runs all parts on the CPU")


# -- the parts


def checks(run: ReportRun) -> Result:
    """The table of preflight: hosts, network, and the collectives along each mesh axis."""
    options = ["--json"] if run.rehearse else ["--json", "--nccl-debug"]
    codes = (ExitCode.FINISHED, ExitCode.PREFLIGHT)
    output = run.execute([*run.small("preflight"), *options], "jaxmnt.preflight", codes=codes)
    if not run.writes:
        return {}
    rows = json.loads(output)
    return {"ok": all(row["verdict"] != "failed" for row in rows), "rows": rows}


def losses(run: ReportRun) -> Result:
    """The losses of all devices against those of one device, in float32."""
    run.execute([*run.small("all", "mesh.data=1", "mesh.fsdp=-1"), "--fresh"])
    if not run.writes:
        return {}
    # One process on one device: an explicit launcher whose variables are empty says nothing.
    one_gpu = {} if run.rehearse else {"CUDA_VISIBLE_DEVICES": visible()[0]}
    alone = {"JAX_NUM_CPU_DEVICES": "1"} | one_gpu | dict.fromkeys(VARIABLES.values(), "")
    run.execute([*run.small("one", "cluster.launcher=explicit"), "--fresh"], **alone)
    pairs = list(zip(run.losses("all"), run.losses("one"), strict=True))
    difference = max(abs(both / single - 1) for both, single in pairs)
    return {"ok": difference < CLOSE, "largest_relative_difference": difference, "steps": len(pairs)}


def speed(run: ReportRun) -> Result:
    """The time of a step and its exposed communication, measured and planned."""
    profiled = STEPS - 2
    run.execute([*run.large("large", "mesh.data=1", "mesh.fsdp=-1", f"telemetry.profile_at={profiled}"), "--fresh"])
    if not run.writes:
        return {}
    steps = [record for record in run.records("large")[3:] if abs(record["step"] - profiled) > 1]
    middle = lambda name: statistics.median(record[name] for record in steps)
    summary = run.folder / "runs" / "large" / "profiles" / str(profiled) / "summary.json"
    profile = json.loads(summary.read_text()) if summary.exists() else None
    return {
        "ok": True,
        "step_seconds": middle("step_seconds"),
        "tokens_per_second": middle("tokens_per_second"),
        "mfu": None if steps[0]["mfu"] is None else middle("mfu"),
        "profile_of_a_device": profile and {name: profile[name] for name in profile if name != "operations"},
        "exposed_seconds": profile and profile["communication"] - profile["overlap"],
        "planned": planned(run),
    }


def planned(run: ReportRun) -> Result | None:
    """What `--dry-run` says of the same run; None for devices whose data sheet jaxmnt does not have."""
    if run.rehearse:
        target = ["--devices", str(2 * run.processes)]
    else:
        chip = plan_target()
        if chip is None:
            return None
        target = ["--target", chip, "--hosts", str(run.processes), "--devices-per-host", str(len(visible()))]
    settings = run.large("plan", "mesh.data=1", "mesh.fsdp=-1")
    output = run.execute([*settings, "--dry-run", "--json", *target], JAX_PLATFORMS="cpu")
    plan = json.loads(output)
    return {"prediction": plan.get("prediction"), "memory": plan["memory"], "mesh": plan["mesh"]}


def resume(run: ReportRun) -> Result:
    """A process is killed in the middle; the others end, and the same command resumes with the same losses."""
    arguments = run.small("killed", "mesh.data=1", "mesh.fsdp=-1")
    journal, plan = run.folder / "killed.jsonl", run.folder / f"kill-{run.process}.json"
    victim = run.processes - 1
    if run.process == victim:
        journal.unlink(missing_ok=True)
    fault = Fault("kill", "kill", "mid-step", victim, "peer_lost", offset=KILLED_STEP)
    plan.write_text(json.dumps({"faults": [vars(fault)], "journal": str(journal)}))
    process = run.start([*arguments, "--fresh"], "jaxmnt.drill.inject", str(plan), "--")
    process.communicate()
    ended = time.time()
    code = process.returncode
    run.execute(arguments)
    if not run.writes:
        return {}
    same = run.losses("killed") == run.losses("all")
    steps_again = run.records("killed", "events/0.jsonl", "steps_again")
    killed = json.loads(journal.read_text())["time"]
    return {
        "ok": same and code != 0,
        "losses_equal_those_of_an_uninterrupted_run": same,
        "exit_code_of_process_0": code,
        "seconds_until_process_0_ended": round(ended - killed, 1),
        "steps_taken_again": sum(event["steps"] for event in steps_again),
    }


PARTS: dict[str, Callable[[ReportRun], Result]] = {
    "checks": checks, "losses": losses, "speed": speed, "resume": resume,
}  # fmt: skip


# -- the report


def secrets(run: ReportRun) -> list[tuple[str, str]]:
    """Returns patterns of what a report must not contain, each with what replaces it."""
    paths = {str(run.folder), str(ROOT), str(Path.home())} - {"/"}
    patterns = [(re.escape(path), "FOLDER") for path in sorted(paths, key=len, reverse=True)]
    for process in range(run.processes):
        host = (run.folder / f"host-{process}.txt").read_text()
        for name in dict.fromkeys((host, host.partition(".")[0])):
            patterns.append((rf"\b{re.escape(name)}(\.[\w.-]+)?\b", f"host {process}"))
    patterns.append((r"\b\d{1,3}(\.\d{1,3}){3}\b", "ADDRESS"))
    patterns.append((r"\b[0-9a-fA-F]{1,4}(:[0-9a-fA-F]{0,4}){2,}", "ADDRESS"))
    with contextlib.suppress(KeyError, OSError):  # raised for a user without a name
        patterns.append((rf"\b{re.escape(getpass.getuser())}\b", "USER"))
    return patterns


def anonymous(value: Any, patterns: list[tuple[str, str]]) -> Any:
    """Returns a part of the report, with the patterns replaced in its texts."""
    if isinstance(value, dict):
        return {key: anonymous(entry, patterns) for key, entry in value.items()}
    if isinstance(value, list):
        return [anonymous(entry, patterns) for entry in value]
    if not isinstance(value, str):
        return value
    for pattern, replacement in patterns:
        value = re.sub(pattern, replacement, value)
    return value


def versions() -> Result:
    """Returns what the report was made with."""
    git = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, cwd=ROOT).stdout.strip() if shutil.which("git") else ""
    return {"commit": commit, "python": sys.version.split()[0], "software": software()}


def page(report: Result) -> str:
    """Returns the report as one HTML page without scripts."""
    rows = []
    for name, part in report["parts"].items():
        mark = "ok" if part["ok"] else "FAILED"
        text = html.escape(json.dumps({key: part[key] for key in part if key != "ok"}, indent=2, ensure_ascii=False))
        rows.append(f"<h2>{html.escape(name)}: {mark}</h2><pre>{text}</pre>")
    about = html.escape(json.dumps({"gpus": report["gpus"]} | report["versions"], indent=2))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>jaxmnt on a cluster</title>'
        "<style>body{font:15px system-ui;max-width:60em;margin:2em auto;padding:0 1em}pre{overflow-x:auto}</style>"
        f"<h1>jaxmnt on {report['processes']} × {report['devices_per_process']} devices</h1><p>{report['date']}, "
        f"{report['seconds']:.0f} s</p>{''.join(rows)}<h2>versions</h2><pre>{about}</pre></html>\n"
    )


def main() -> None:
    options = parse()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    identity = identify(Cluster())
    run = ReportRun(identity.process_id, identity.processes, folder, options.rehearse)
    (folder / f"host-{run.process}.txt").write_text(socket.gethostname())
    made_with = versions()
    gpus = [] if options.rehearse else query_gpus("name,driver_version")
    devices = 2 if options.rehearse else len(visible())
    began, parts = time.monotonic(), {}
    for name in options.only or PARTS:
        started = time.monotonic()
        try:
            parts[name] = PARTS[name](run)
        except Exception as error:  # is part of the report, and the other parts may still work
            parts[name] = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        parts[name]["seconds"] = round(time.monotonic() - started, 1)
        mark = "ok" if parts[name].get("ok", True) else "FAILED"
        print(f"{name:8} {mark} in {parts[name]['seconds']:.0f} s", file=sys.stderr, flush=True)
    if not run.writes:
        return
    report = {
        "format": 1, "date": time.strftime("%Y-%m-%d"), "rehearsal": options.rehearse, "processes": run.processes,
        "devices_per_process": devices, "seconds": time.monotonic() - began, "gpus": gpus, "versions": made_with,
        "parts": anonymous(parts, secrets(run)),
    }  # fmt: skip
    text = json.dumps(report, indent=1, ensure_ascii=False)
    (folder / "cluster_report.json").write_text(text + "\n", encoding="utf-8")
    (folder / "cluster_report.html").write_text(page(report), encoding="utf-8")
    print(f"report  {folder / 'cluster_report.json'}\npage    {folder / 'cluster_report.html'}")
    sys.exit(0 if all(part["ok"] for part in parts.values()) else 1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path("cluster_report")
    parser.add_argument("--folder", type=Path, default=default, help="a folder that all hosts see (cluster_report)")
    parser.add_argument("--rehearse", action="store_true", help="all parts on CPU devices, tiny")
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, help="these parts alone; resume needs the run of losses in the folder"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
