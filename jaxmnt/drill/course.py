"""The course of a drill: shrinks the config, and runs the planned starts in order."""

import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jaxmnt.checkpoint.commit import valid_checkpoints
from jaxmnt.config.load import as_override, dump_config, parse_config
from jaxmnt.config.mesh import BATCH_AXES, STAGE_AXIS, Mesh
from jaxmnt.config.schema import Checkpoint, Config
from jaxmnt.drill.faults import Fault
from jaxmnt.errors import ConfigError, ExitCode, UserError
from jaxmnt.models.registry import family_class
from jaxmnt.strict_json import json_text
from jaxmnt.telemetry.events import METRICS, event_files, read_lines

CHECKPOINT_EVERY = 4
"""Steps between checkpoints."""

_WIDTH, _LENGTH, _ROWS_PER_SHARD = 64, 64, 4
_SILENCE_SECONDS, _HANG_SECONDS = 6.0, 10.0


def shrink_config(config: Config, devices: int, steps: int, cache: Path | None = None) -> Config:
    """Returns the config with a tiny model and short rows, for `steps` steps on this number of devices.

    Data, kinds of parallelism and other settings stay. `cache` is the folder for compiled programs, unless the config
    has its own. Raises `ConfigError` for a config that cannot be made small.
    """
    mesh = _shrink_mesh(config.mesh, devices)
    sizes = mesh.sizes()
    pieces = sizes[STAGE_AXIS] * config.pipeline.chunks
    model, data = config.model, config.data
    shards = math.prod(sizes[axis] for axis in BATCH_AXES)
    small = config.model_dump()
    grains = [data.grain, *(source.grain for source in data.sources.values())]
    rows_are_given = any(grain.elements == "rows" for grain in grains)
    small["model"] |= {
        "hidden_size": _WIDTH,
        "num_layers": max(2, pieces),
        "num_heads": 4,
        "num_kv_heads": 4 if model.num_kv_heads == model.num_heads else 2,
        "head_dim": _WIDTH // 4,
        "intermediate_size": 2 * _WIDTH,
        "attention": "auto",
    }
    if "sliding_window_pattern" in family_class(model.family).settings:  # each stage has whole patterns only
        small["model"] |= {"sliding_window_pattern": 2, "num_layers": 2 * max(2, pieces)}
    small["telemetry"]["samples"] = []
    small["data"] |= {
        "eval_sets": {},
        "sequence_length": data.sequence_length if rows_are_given else min(_LENGTH, data.sequence_length),
        "global_batch_size": _ROWS_PER_SHARD * shards,
        "log_digest": True,
        "stage_dir": None,
        "skip": [],
        "weight_changes": [],
        "verify": False,
    }
    small["train"] |= {"steps": steps, "eval_every": 0, "stop_after": None, "max_bad_steps": 1}
    small["train"]["float8_least"] = 16  # otherwise no matrix product of this width would use float8
    if config.train.microbatch_size is not None or pieces > 1:
        small["train"]["microbatch_size"] = 1
        small["model"]["overlap"] = "auto"  # other kinds of overlap need more than one row
    small["optimizer"]["warmup_steps"] = min(config.optimizer.warmup_steps, steps // 4)
    small["checkpoint"] = Checkpoint(every_steps=CHECKPOINT_EVERY, keep=3, read=config.checkpoint.read).model_dump()
    small["mesh"] = mesh.model_dump()
    small["pipeline"]["layers"] = None
    small["run"] |= {"init_from": None, "fork_from": None, "init_from_changes": [], "max_minutes": None}
    small["run"]["compile_cache"] = config.run.compile_cache or (None if cache is None else str(cache))
    small["watchdog"] |= {"step_seconds": _HANG_SECONDS, "factor": 10.0}
    small["cluster"] |= {"silence_timeout_seconds": _SILENCE_SECONDS}
    return parse_config(small, "the config made small")


def _shrink_mesh(mesh: Mesh, devices: int) -> Mesh:
    """Returns a mesh for this number of devices: axes that the config splits get size 2 while the devices last.

    The data axis gets the remaining devices.
    """
    remaining = devices
    sizes = dict.fromkeys(mesh.sizes(), 1)
    for axis, size in mesh.sizes().items():
        if axis != "data" and size not in (None, 1) and remaining % 2 == 0:
            sizes[axis] = 2
            remaining //= 2
    return mesh.model_copy(update=sizes | {"data": remaining, "allow_split_hosts": True})


STEPS_PER_START = 16
"""Upper bound for the steps of a start before a fault ends it."""

_TIMEOUT_SECONDS = 600.0
_GRACE_SECONDS = 30.0
_OWN_NETWORK = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]

Tell = Callable[[str], None]


@dataclass
class Attempt:
    """One start of the processes, and its records."""

    faults: list[Fault]
    began: float
    ended: float
    code: int
    resumed: int
    """The step that it resumed from."""
    reached: int
    """The last step whose metrics were written."""
    first_step: float | None
    """When the metrics of its first step were written; None if there are none."""
    before: list[int]
    """Steps of the valid checkpoints when it began."""
    committed: list[int]
    """Steps of the valid checkpoints when it ended."""
    events: dict[int, list[dict[str, Any]]]
    """Events of each process in this start."""
    journal: list[dict[str, Any]]
    """Records of the injected faults: when, and in which process."""
    losses: dict[int, float | None]
    """Loss of each step of the whole run so far."""
    log: Path


@dataclass
class Drill:
    """A drill with one number of processes, in its own folder."""

    config: Config
    config_file: Path
    folder: Path
    processes: int
    devices: int
    prefix: list[str]
    """Command that starts all processes, such as srun; empty to start them on this machine."""
    plan: list[list[Fault]]
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def run_baseline(self) -> Path:
        """Runs the small config without faults, and returns its run directory."""
        run_dir = self.folder / "undisturbed"
        attempt = self._attempt([], run_dir, "undisturbed")
        if attempt.code != ExitCode.FINISHED:
            kind = ConfigError if attempt.code == ExitCode.CONFIG else UserError
            raise kind(f"the run without faults ended with exit code {attempt.code}: {_last_error(attempt.log)}")
        return run_dir

    def run(self, tell: Tell) -> None:
        """Runs all planned starts. The last one should finish."""
        for number, faults in enumerate(self.plan, 1):
            attempt = self._attempt(faults, self.run_dir, f"start-{number}")
            self.attempts.append(attempt)
            names = ", ".join(fault.name for fault in faults) or "nothing"
            tell(
                f"start {number} of {len(self.plan)}: {names}; from step {attempt.resumed} to {attempt.reached}, "
                f"exit code {attempt.code}, {attempt.ended - attempt.began:.0f} s"
            )

    def _attempt(self, faults: list[Fault], run_dir: Path, name: str) -> Attempt:
        """Starts the processes, waits for their end, and returns the records of this start."""
        plan, journal, log = (self.folder / f"{name}{suffix}" for suffix in (".json", ".journal", ".log"))
        # Poisoned batches belong to the data, so every start has them.
        in_data = [fault for start in self.plan for fault in start if fault.act == "poison"]
        planned = [asdict(fault) for fault in dict.fromkeys([*faults, *in_data])]
        plan.write_text(json_text({"faults": planned, "journal": str(journal)}))
        namespace = _OWN_NETWORK if any(fault.namespace for fault in faults) else []
        began, before = time.time(), _checkpoint_steps(run_dir)
        code = _run([*namespace, *self._command(plan, run_dir)], log)
        if code is None:
            raise UserError(f"{name} of the drill hung, and no timeout of the run ended it; its output is in {log}")
        ended = time.time()
        lines = read_lines(run_dir / METRICS)
        new = [line for line in lines if line["time"] >= began and "step" in line]
        events = {
            int(path.stem): [event for event in read_lines(path) if event["time"] >= began]
            for path in event_files(run_dir)
        }
        restored = [event["step"] for event in events.get(0, []) if event["kind"] == "restore" and "step" in event]
        resumed = restored[-1] if restored else max(before, default=0)
        return Attempt(
            faults, began, ended, code, resumed,
            reached=max((line["step"] for line in new), default=resumed),
            first_step=min((line["time"] for line in new), default=None),
            before=before,
            committed=_checkpoint_steps(run_dir),
            events=events,
            journal=read_lines(journal),
            losses={line["step"]: line["loss"] for line in lines if line["kind"] == "train"},
            log=log,
        )  # fmt: skip

    def _command(self, plan: Path, run_dir: Path) -> list[str]:
        """Returns the command that starts the processes with a plan of faults."""
        python = [sys.executable, "-m"]
        arguments = ["--config", str(self.config_file), as_override("run.dir", str(run_dir)), *self._cluster()]
        if self.prefix:
            filled = [part.replace("{processes}", str(self.processes)) for part in self.prefix]
            return [*filled, *python, "jaxmnt.drill.inject", str(plan), "--", *arguments]
        counts = [str(self.processes), str(self.devices)]
        return [*python, "jaxmnt.drill.start", *counts, str(plan), "--", *arguments]

    def _cluster(self) -> list[str]:
        """Returns the cluster settings as overrides: the config file of a run does not contain them."""
        settings = self.config.cluster.model_dump(exclude={"processes", "process_id"})
        if not self.prefix:  # the local launcher sets these
            del settings["coordinator"], settings["launcher"], settings["local_devices"]
        return [as_override(f"cluster.{key}", value) for key, value in sorted(settings.items()) if value is not None]


def prepare_drill(
    config: Config, folder: Path, processes: int, devices: int, prefix: list[str], plan: list[list[Fault]]
) -> Drill:
    """Creates a folder with the small config, and returns its drill."""
    folder.mkdir(parents=True)
    small = shrink_config(config, processes * devices, STEPS_PER_START * len(plan), folder / "compiled")
    config_file = folder / "small.yaml"
    config_file.write_text(dump_config(small), encoding="utf-8")
    return Drill(small, config_file, folder, processes, devices, prefix, plan)


def _run(command: list[str], log: Path) -> int | None:
    """Runs a command and returns its exit code, or None if it had to be stopped after a timeout."""
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            return process.wait(_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                process.terminate()  # a launcher then stops its processes, by force after a while
                try:
                    process.wait(_GRACE_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _last_error(log: Path) -> str:
    """Returns the last error in the output of a run."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if "error: " in line]
    return lines[-1].partition("error: ")[2] if lines else f"its output is in {log}"


def _checkpoint_steps(run_dir: Path) -> list[int]:
    """Returns the steps of the valid checkpoints, the newest last."""
    return [checkpoint.step for checkpoint in valid_checkpoints(run_dir / "checkpoints")]
