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
import getpass
import html
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gpu import lines, plan_target, query_gpus

from jaxmnt.config.schema import Cluster as ClusterSettings
from jaxmnt.distributed.identity import VARIABLES, identify

ROOT = Path(__file__).resolve().parent.parent
Result = dict[str, Any]

STEPS = 20
"""Steps of the small runs."""
SAVE_EVERY = 5
CLOSE = 1e-4
"""Relative difference of float32 losses that is still called equal: sums run in another order on another mesh."""


@dataclass(frozen=True)
class Cluster:
    """The processes of this report, and where they work."""

    process: int
    processes: int
    folder: Path
    rehearse: bool

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
        if self.rehearse:
            return self._arguments(name, 64, 2, 64, 8, "train.precision=bfloat16", *overrides)
        devices = self.processes * len(gpu_memory_mib())
        parameters = 0.5 * min(gpu_memory_mib()) * 2**20 * devices / 16 - 2 * 128256 * 4096
        layers = max(2, min(32, int(parameters // 218e6)))
        mlp = ("model.num_kv_heads=8", "model.intermediate_size=14336", "data.synthetic=128256", "train.remat=full")
        return self._arguments(name, 4096, layers, 8192, 2 * devices, "train.precision=bfloat16", *mlp, *overrides)

    def _arguments(self, name: str, width: int, layers: int, length: int, rows: int, *overrides: str) -> list[str]:
        settings = [
            f"run.dir={self.folder / 'runs' / name}", "data.synthetic=256", f"data.sequence_length={length}",
            f"data.global_batch_size={rows}", f"model.hidden_size={width}", f"model.num_layers={layers}",
            f"model.num_heads={width // 16 if self.rehearse else width // 128}", f"train.steps={STEPS}",
            "optimizer.warmup_steps=1", f"checkpoint.every_steps={SAVE_EVERY}", "telemetry.sinks=[]",
        ]  # fmt: skip
        names = {setting.partition("=")[0] for setting in overrides}
        return [*(setting for setting in settings if setting.partition("=")[0] not in names), *overrides]

    def start(self, arguments: list[str], module: str = "jaxmnt.train", **variables: str) -> subprocess.Popen[str]:
        """Starts a command of jaxmnt in this process's place in the cluster. Its output goes to a log in the folder."""
        config = self.folder / f"empty-{self.process}.yaml"
        config.write_text("{}\n")
        log = (self.folder / f"log-{self.process}.txt").open("a", encoding="utf-8")
        environment = os.environ | variables
        if self.rehearse:
            environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": variables.get("JAX_NUM_CPU_DEVICES", "2")}
        command = [sys.executable, "-m", module, "--config", str(config), *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT, env=environment)

    def run(self, arguments: list[str], module: str = "jaxmnt.train", **variables: str) -> str:
        """Runs a command to its end and returns its output. Raises `RuntimeError` if it fails."""
        process = self.start(arguments, module, **variables)
        output, _ = process.communicate()
        if process.returncode:
            log = (self.folder / f"log-{self.process}.txt").read_text(encoding="utf-8").strip().splitlines()
            raise RuntimeError(f"{module} ended with exit code {process.returncode}: {log[-1] if log else ''}")
        return output

    def records(self, name: str, file: str = "metrics.jsonl", kind: str = "train") -> list[Result]:
        """Returns the records of a kind that a run has written."""
        return lines(self.folder / "runs" / name, file, kind)

    def losses(self, name: str) -> list[float]:
        """Returns the loss of each step of a run."""
        return [record["loss"] for record in self.records(name)]


def gpu_memory_mib() -> list[float]:
    """Returns the memory of each GPU of this host. Ends the command if there is none."""
    return [float(memory) for memory in query_gpus("memory.total")]


# -- the parts


def checks(cluster: Cluster) -> Result:
    """The table of preflight: hosts, network, and the collectives along each mesh axis."""
    output = cluster.run([*cluster.small("preflight"), "--json"], "jaxmnt.preflight")
    if not cluster.writes:
        return {}
    rows = json.loads(output)
    return {"ok": all(row["verdict"] != "failed" for row in rows), "rows": rows}


def losses(cluster: Cluster) -> Result:
    """The losses of all devices against those of one device, in float32."""
    cluster.run(cluster.small("all", "mesh.data=1", "mesh.fsdp=-1"))
    if not cluster.writes:
        return {}
    # One process on one device: an explicit launcher, whose variables are empty, is none.
    alone = {"CUDA_VISIBLE_DEVICES": "0", "JAX_NUM_CPU_DEVICES": "1"} | dict.fromkeys(VARIABLES.values(), "")
    cluster.run(cluster.small("one", "cluster.launcher=explicit"), **alone)
    pairs = list(zip(cluster.losses("all"), cluster.losses("one"), strict=True))
    difference = max(abs(both / single - 1) for both, single in pairs)
    return {"ok": difference < CLOSE, "largest_relative_difference": difference, "steps": len(pairs)}


def speed(cluster: Cluster) -> Result:
    """The time of a step and its exposed communication, measured and planned."""
    profiled = STEPS - 2
    cluster.run(cluster.large("large", "mesh.data=1", "mesh.fsdp=-1", f"telemetry.profile_at={profiled}"))
    if not cluster.writes:
        return {}
    steps = [record for record in cluster.records("large")[3:] if abs(record["step"] - profiled) > 1]
    middle = lambda name: statistics.median(record[name] for record in steps)
    summary = cluster.folder / "runs" / "large" / "profiles" / str(profiled) / "summary.json"
    profile = json.loads(summary.read_text()) if summary.exists() else None
    return {
        "ok": True,
        "step_seconds": middle("step_seconds"),
        "tokens_per_second": middle("tokens_per_second"),
        "mfu": None if steps[0]["mfu"] is None else middle("mfu"),
        "profile_of_a_device": profile and {name: profile[name] for name in profile if name != "operations"},
        "exposed_seconds": profile and profile["communication"] - profile["overlap"],
        "planned": planned(cluster),
    }


def planned(cluster: Cluster) -> Result | None:
    """What `--dry-run` says of the same run; None for devices whose data sheet jaxmnt does not have."""
    if cluster.rehearse:
        target = ["--devices", str(2 * cluster.processes)]
    else:
        chip = plan_target()
        if chip is None:
            return None
        target = ["--target", chip, "--hosts", str(cluster.processes), "--devices-per-host", str(len(gpu_memory_mib()))]
    settings = cluster.large("plan", "mesh.data=1", "mesh.fsdp=-1")
    output = cluster.run([*settings, "--dry-run", "--json", *target], JAX_PLATFORMS="cpu")
    plan = json.loads(output)
    return {"prediction": plan.get("prediction"), "memory": plan["memory"], "mesh": plan["mesh"]}


def resume(cluster: Cluster) -> Result:
    """A process is killed in the middle; the others end, and the same command resumes with the same losses."""
    arguments = cluster.small("killed", "mesh.data=1", "mesh.fsdp=-1")
    note = cluster.folder / "killed.txt"
    process = cluster.start(arguments)
    if cluster.process == cluster.processes - 1:
        wait_for_checkpoint(cluster, process)
        note.write_text(repr(time.time()))
        process.send_signal(signal.SIGKILL)
    process.communicate()
    ended = time.time()
    code = process.returncode
    cluster.run(arguments)
    if not cluster.writes:
        return {}
    same = cluster.losses("killed") == cluster.losses("all")
    steps_again = cluster.records("killed", "events/0.jsonl", "steps_again")
    return {
        "ok": same and (cluster.processes == 1 or code != 0),
        "losses_equal_those_of_an_uninterrupted_run": same,
        "exit_code_of_process_0": code,
        "seconds_until_process_0_ended": round(ended - float(note.read_text()), 1),
        "steps_taken_again": sum(event["steps"] for event in steps_again),
    }


def wait_for_checkpoint(cluster: Cluster, process: "subprocess.Popen[str]") -> None:
    """Returns when the first checkpoint is committed. Raises `RuntimeError` if the run ends before."""
    manifest = cluster.folder / "runs" / "killed" / "checkpoints" / str(SAVE_EVERY) / "jaxmnt.json"
    while not manifest.exists():
        if process.poll() is not None:
            raise RuntimeError("the run ended before its first checkpoint")
        time.sleep(0.01)


PARTS: dict[str, Callable[[Cluster], Result]] = {
    "checks": checks, "losses": losses, "speed": speed, "resume": resume,
}  # fmt: skip


# -- the report


def anonymous(text: str, cluster: Cluster, hosts: list[str]) -> str:
    """Returns the text with hosts numbered, and without the names of users and folders."""
    for number, host in enumerate(hosts):
        text = re.sub(rf"\b{re.escape(host)}\b", f"host {number}", text)
    text = re.sub(r"\b\d{1,3}(\.\d{1,3}){3}\b", "ADDRESS", text)
    for path in sorted({str(cluster.folder), str(ROOT), str(Path.home())}, key=len, reverse=True):
        text = text.replace(path, "FOLDER")
    return re.sub(rf"\b{re.escape(getpass.getuser())}\b", "USER", text)


def versions() -> Result:
    """Returns what the report was made with."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True).stdout if shutil.which(query[0]) else ""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    packages = {name: version(name) for name in ("jaxmnt", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint")}
    return {"gpus": found.splitlines(), "commit": commit, "python": sys.version.split()[0], "packages": packages}


def page(report: Result) -> str:
    """Returns the report as one HTML page without scripts."""
    rows = []
    for name, part in report["parts"].items():
        mark = "ok" if part["ok"] else "FAILED"
        text = html.escape(json.dumps({key: part[key] for key in part if key != "ok"}, indent=2, ensure_ascii=False))
        rows.append(f"<h2>{html.escape(name)}: {mark}</h2><pre>{text}</pre>")
    about = html.escape(json.dumps(report["versions"], indent=2))
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
    identity = identify(ClusterSettings())
    cluster = Cluster(identity.process_id, identity.processes, folder, options.rehearse)
    (folder / f"host-{cluster.process}.txt").write_text(socket.gethostname())
    devices = 2 if options.rehearse else len(gpu_memory_mib())
    began, parts = time.monotonic(), {}
    for name in options.only or PARTS:
        started = time.monotonic()
        try:
            parts[name] = PARTS[name](cluster)
        except Exception as error:  # is part of the report, and the other parts may still work
            parts[name] = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        parts[name]["seconds"] = round(time.monotonic() - started, 1)
        mark = "ok" if parts[name].get("ok", True) else "FAILED"
        print(f"{name:8} {mark} in {parts[name]['seconds']:.0f} s", file=sys.stderr, flush=True)
    if not cluster.writes:
        return
    report = {
        "format": 1, "date": time.strftime("%Y-%m-%d"), "rehearsal": options.rehearse, "processes": cluster.processes,
        "devices_per_process": devices, "seconds": time.monotonic() - began, "versions": versions(), "parts": parts,
    }  # fmt: skip
    hosts = [path.read_text() for path in sorted(folder.glob("host-*.txt"))]
    text = anonymous(json.dumps(report, indent=1, ensure_ascii=False), cluster, hosts)
    (folder / "cluster_report.json").write_text(text + "\n", encoding="utf-8")
    (folder / "cluster_report.html").write_text(page(json.loads(text)), encoding="utf-8")
    print(f"report  {folder / 'cluster_report.json'}\npage    {folder / 'cluster_report.html'}")
    sys.exit(0 if all(part["ok"] for part in parts.values()) else 1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path("cluster_report")
    parser.add_argument("--folder", type=Path, default=default, help="a folder that all hosts see (cluster_report)")
    parser.add_argument("--rehearse", action="store_true", help="all parts on CPU devices, tiny")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="these parts alone")
    return parser.parse_args()


if __name__ == "__main__":
    main()
