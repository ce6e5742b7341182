"""Performs a drill: shrinks the config, and runs the planned starts in order."""

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
from jaxmnt.config.small import small_model
from jaxmnt.drill.faults import Fault
from jaxmnt.errors import ConfigError, ExitCode, UserError
from jaxmnt.models.registry import family_class
from jaxmnt.strict_json import json_text
from jaxmnt.telemetry.events import METRICS, event_files, read_lines

STEPS_PER_CHECKPOINT = 4
"""Number of steps from one checkpoint to the next."""

_SEQUENCE_LENGTH = 64
_ROWS_PER_SHARD = 4
_SILENCE_TIMEOUT_SECONDS = 6.0
_HANG_TIMEOUT_SECONDS = 10.0


def shrink_config(config: Config, devices: int, steps: int, compile_cache: Path | None = None) -> Config:
    """Returns the config with a tiny model and short rows, for `steps` steps on the given number of devices.

    Data, kinds of parallelism and other settings stay the same. `compile_cache` is the folder for compiled programs
    unless the config sets one. Raises `ConfigError` for a config that cannot be made small.
    """
    mesh = _shrink_mesh(config.mesh, devices)
    sizes = mesh.sizes()
    layer_chunks = sizes[STAGE_AXIS] * config.pipeline.chunks
    model, data = config.model, config.data
    num_shards = math.prod(sizes[axis] for axis in BATCH_AXES)
    small_config = config.model_dump()
    grains = [data.grain, *(source.grain for source in data.sources.values())]
    has_fixed_rows = any(grain.elements == "rows" for grain in grains)
    has_patterns = "sliding_window_pattern" in family_class(model.family).settings
    small_config["model"] |= small_model(model, max(2, layer_chunks), has_patterns=has_patterns)
    small_config["telemetry"]["samples"] = []
    small_config["data"] |= {
        "eval_sets": {},
        "sequence_length": data.sequence_length if has_fixed_rows else min(_SEQUENCE_LENGTH, data.sequence_length),
        "global_batch_size": _ROWS_PER_SHARD * num_shards,
        "log_digest": True,
        "stage_dir": None,
        "skip": [],
        "weight_changes": [],
        "verify": False,
    }
    small_config["train"] |= {"steps": steps, "eval_every": 0, "stop_after": None, "max_bad_steps": 1}
    small_config["train"]["float8_least"] = 16  # with the default, no matrix product of this width would use float8
    if config.train.microbatch_size is not None or layer_chunks > 1:
        small_config["train"]["microbatch_size"] = 1
        small_config["model"]["overlap"] = "auto"  # other kinds of overlap need more than one row
    small_config["optimizer"]["warmup_steps"] = min(config.optimizer.warmup_steps, steps // 4)
    small_config["checkpoint"] = Checkpoint(
        every_steps=STEPS_PER_CHECKPOINT, keep=3, read=config.checkpoint.read
    ).model_dump()
    small_config["mesh"] = mesh.model_dump()
    small_config["pipeline"]["layers"] = None
    small_config["run"] |= {"init_from": None, "fork_from": None, "init_from_changes": [], "max_minutes": None}
    if config.lora is not None:  # the small model begins from nothing, so it has no base
        small_config["lora"], small_config["optimizer"]["rules"] = None, []
    small_config["run"]["compile_cache"] = config.run.compile_cache or (
        None if compile_cache is None else str(compile_cache)
    )
    small_config["watchdog"] |= {"step_seconds": _HANG_TIMEOUT_SECONDS, "factor": 10.0}
    small_config["cluster"] |= {"silence_timeout_seconds": _SILENCE_TIMEOUT_SECONDS}
    return parse_config(small_config, "the small config of the drill")


def _shrink_mesh(mesh: Mesh, devices: int) -> Mesh:
    """Returns a mesh with the kinds of parallelism of the given mesh, for the given number of devices.

    Each axis that the given mesh splits gets size 2, as long as the remaining number of devices is even. The data axis
    gets the remaining devices.
    """
    remaining_devices = devices
    sizes = dict.fromkeys(mesh.sizes(), 1)
    for axis, size in mesh.sizes().items():
        if axis != "data" and size not in (None, 1) and remaining_devices % 2 == 0:
            sizes[axis] = 2
            remaining_devices //= 2
    return mesh.model_copy(update=sizes | {"data": remaining_devices, "allow_split_hosts": True})


STEPS_PER_START = 16
"""Number of steps by which each planned start lengthens the run.

A start may train more, because most faults come earlier.
"""

_START_TIMEOUT_SECONDS = 600.0
"""Time after which a start that has not ended counts as hanging, and is terminated."""
_TERMINATION_TIMEOUT_SECONDS = 30.0
"""Time after which a terminated start that has not ended is killed."""
_NETWORK_NAMESPACE_COMMAND = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]

PrintLine = Callable[[str], None]


@dataclass
class Attempt:
    """The records of one start of the processes."""

    faults: list[Fault]
    """The faults that were to happen in this start."""
    begin_time: float
    """When the processes were started, in unix seconds."""
    end_time: float
    """When the last process had ended, in unix seconds."""
    exit_code: int
    resumed_step: int
    """The step of the checkpoint from which the start resumed; 0 if there was none."""
    reached_step: int
    """The last step whose metrics were written."""
    first_step_time: float | None
    """When the metrics of the first step of the start were written, in unix seconds; None if there are none."""
    checkpoints_before: list[int]
    """Steps of the valid checkpoints when the start began, in increasing order."""
    checkpoints_after: list[int]
    """Steps of the valid checkpoints when the start had ended, in increasing order."""
    events: dict[int, list[dict[str, Any]]]
    """The events that each process wrote in this start."""
    journal: list[dict[str, Any]]
    """A record of each injected fault, with its time and process."""
    losses: dict[int, float | None]
    """The loss at each step of the run so far, earlier starts included."""
    log: Path
    """The output of all processes in this start."""


@dataclass
class Drill:
    """A drill with a fixed number of processes, in its own folder."""

    config: Config
    config_file: Path
    folder: Path
    processes: int
    devices: int
    """Number of devices of each process."""
    start_command: list[str]
    """The command that starts all processes, such as srun; empty to start them on this machine."""
    plan: list[list[Fault]]
    """The faults of each start."""
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def run_dir(self) -> Path:
        """The directory of the run into which faults are injected."""
        return self.folder / "run"

    def run_baseline(self) -> Path:
        """Runs the small config without faults, and returns its run directory."""
        run_dir = self.folder / "undisturbed"
        attempt = self._start_processes([], run_dir, "undisturbed")
        if attempt.exit_code != ExitCode.FINISHED:
            error_class = ConfigError if attempt.exit_code == ExitCode.CONFIG else UserError
            raise error_class(
                f"the run without faults ended with exit code {attempt.exit_code}: {_last_error(attempt.log)}"
            )
        return run_dir

    def run(self, print_line: PrintLine) -> None:
        """Runs all planned starts, of which the last one should finish the run. Reports progress with `print_line`."""
        for number, faults in enumerate(self.plan, 1):
            attempt = self._start_processes(faults, self.run_dir, f"start-{number}")
            self.attempts.append(attempt)
            fault_names = ", ".join(fault.name for fault in faults) or "no faults"
            print_line(
                f"start {number} of {len(self.plan)}: {fault_names}; from step {attempt.resumed_step} to "
                f"{attempt.reached_step}, exit code {attempt.exit_code}, {attempt.end_time - attempt.begin_time:.0f} s"
            )

    def _start_processes(self, faults: list[Fault], run_dir: Path, name: str) -> Attempt:
        """Starts the processes, waits for their end, and returns the records of this start."""
        plan = self.folder / f"{name}.json"
        journal = self.folder / f"{name}.journal"
        log = self.folder / f"{name}.log"
        # Poisoned batches are part of the data, so they are planned in every start.
        poisoned_batches = [fault for start in self.plan for fault in start if fault.act == "poison"]
        planned_faults = [asdict(fault) for fault in dict.fromkeys([*faults, *poisoned_batches])]
        plan.write_text(json_text({"faults": planned_faults, "journal": str(journal)}))
        namespace_command = _NETWORK_NAMESPACE_COMMAND if any(fault.namespace for fault in faults) else []
        begin_time = time.time()
        checkpoints_before = _checkpoint_steps(run_dir)
        exit_code = _run_to_log([*namespace_command, *self._command(plan, run_dir)], log)
        if exit_code is None:
            raise UserError(
                f"start {name!r} of the drill hung, and no timeout of the run ended it; its output is in {log}"
            )
        end_time = time.time()
        lines = read_lines(run_dir / METRICS)
        new_lines = [line for line in lines if line["time"] >= begin_time and "step" in line]
        events = {
            int(path.stem): [event for event in read_lines(path) if event["time"] >= begin_time]
            for path in event_files(run_dir)
        }
        restored = [event["step"] for event in events.get(0, []) if event["kind"] == "restore" and "step" in event]
        resumed_step = restored[-1] if restored else max(checkpoints_before, default=0)
        return Attempt(
            faults, begin_time, end_time, exit_code, resumed_step,
            reached_step=max((line["step"] for line in new_lines), default=resumed_step),
            first_step_time=min((line["time"] for line in new_lines), default=None),
            checkpoints_before=checkpoints_before,
            checkpoints_after=_checkpoint_steps(run_dir),
            events=events,
            journal=read_lines(journal),
            losses={line["step"]: line["loss"] for line in lines if line["kind"] == "train"},
            log=log,
        )  # fmt: skip

    def _command(self, plan: Path, run_dir: Path) -> list[str]:
        """Returns the command that starts the processes so that they inject the faults of a plan."""
        python = [sys.executable, "-m"]
        arguments = [
            "--config",
            str(self.config_file),
            as_override("run.dir", str(run_dir)),
            *self._cluster_overrides(),
        ]
        if self.start_command:
            start_command = [part.replace("{processes}", str(self.processes)) for part in self.start_command]
            return [*start_command, *python, "jaxmnt.drill.inject", str(plan), "--", *arguments]
        counts = [str(self.processes), str(self.devices)]
        return [*python, "jaxmnt.drill.start", *counts, str(plan), "--", *arguments]

    def _cluster_overrides(self) -> list[str]:
        """Returns the cluster settings as overrides, because the config file of a run does not contain them."""
        settings = self.config.cluster.model_dump(exclude={"processes", "process_id"})
        if not self.start_command:  # the local launcher sets these
            del settings["coordinator"], settings["launcher"], settings["local_devices"]
        return [as_override(f"cluster.{key}", value) for key, value in sorted(settings.items()) if value is not None]


def prepare_drill(
    config: Config, folder: Path, processes: int, devices: int, start_command: list[str], plan: list[list[Fault]]
) -> Drill:
    """Creates a folder that contains the small config, and returns a drill that runs in it."""
    folder.mkdir(parents=True)
    small_config = shrink_config(config, processes * devices, STEPS_PER_START * len(plan), folder / "compiled")
    config_file = folder / "small.yaml"
    config_file.write_text(dump_config(small_config), encoding="utf-8")
    return Drill(small_config, config_file, folder, processes, devices, start_command, plan)


def _run_to_log(command: list[str], log: Path) -> int | None:
    """Runs a command and returns its exit code; None if the command had to be stopped after a timeout.

    The output of the command is written to `log`.
    """
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            return process.wait(_START_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                process.terminate()  # a launcher then stops its processes, and kills them if they do not end
                try:
                    process.wait(_TERMINATION_TIMEOUT_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _last_error(log: Path) -> str:
    """Returns the last error message in the output of a run, or where to find the output if there is none."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if "error: " in line]
    return lines[-1].partition("error: ")[2] if lines else f"its output is in {log}"


def _checkpoint_steps(run_dir: Path) -> list[int]:
    """Returns the steps of the valid checkpoints of a run, in increasing order."""
    return [checkpoint.step for checkpoint in valid_checkpoints(run_dir / "checkpoints")]
