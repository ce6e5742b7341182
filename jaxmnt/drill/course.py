"""The course of a drill: a config made small, and its starts in order."""

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

EVERY = 4
"""Steps from checkpoint to checkpoint."""

_WIDTH, _LENGTH, _ROWS_A_SHARD = 64, 64, 4
_SILENCE_SECONDS, _HANG_SECONDS = 6.0, 10.0


def shrunk(config: Config, devices: int, steps: int, cache: Path | None = None) -> Config:
    """The same data, kinds of parallelism and settings, with a tiny model and short rows, for `steps` steps.

    Compiled programs are kept in `cache`, unless the config has a folder for them. Raises `ConfigError` for what cannot
    be made small.
    """
    mesh = _mesh(config.mesh, devices)
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
    if "sliding_window_pattern" in family_class(model.family).settings:  # a stage ends with a whole pattern
        small["model"] |= {"sliding_window_pattern": 2, "num_layers": 2 * max(2, pieces)}
    small["telemetry"]["samples"] = []
    small["data"] |= {
        "eval_sets": {},
        "sequence_length": data.sequence_length if rows_are_given else min(_LENGTH, data.sequence_length),
        "global_batch_size": _ROWS_A_SHARD * shards,
        "log_digest": True,
        "stage_dir": None,
        "skip": [],
        "weight_changes": [],
        "verify": False,
    }
    small["train"] |= {"steps": steps, "eval_every": 0, "stop_after": None, "max_bad_steps": 1}
    small["train"]["float8_least"] = 16  # or no product of this width would be in float8
    if config.train.microbatch_size is not None or pieces > 1:
        small["train"]["microbatch_size"] = 1
        small["model"]["overlap"] = "auto"  # of rows there is one
    small["optimizer"]["warmup_steps"] = min(config.optimizer.warmup_steps, steps // 4)
    small["checkpoint"] = Checkpoint(every_steps=EVERY, keep=3, read=config.checkpoint.read).model_dump()
    small["mesh"] = mesh.model_dump()
    small["pipeline"]["layers"] = None
    small["run"] |= {"init_from": None, "fork_from": None, "init_from_changes": [], "max_minutes": None}
    small["run"]["compile_cache"] = config.run.compile_cache or (None if cache is None else str(cache))
    small["watchdog"] |= {"step_seconds": _HANG_SECONDS, "factor": 10.0}
    small["cluster"] |= {"silence_timeout_seconds": _SILENCE_SECONDS}
    return parse_config(small, "the config made small")


def _mesh(mesh: Mesh, devices: int) -> Mesh:
    """The axes that the config splits over, each by two as long as there are devices; data takes the rest."""
    left, sizes = devices, dict.fromkeys(mesh.sizes(), 1)
    for axis, size in mesh.sizes().items():
        if axis != "data" and size not in (None, 1) and left % 2 == 0:
            sizes[axis], left = 2, left // 2
    return mesh.model_copy(update=sizes | {"data": left, "allow_split_hosts": True})


STEPS_A_START = 16
"""So many at most are taken before a fault ends a start."""

_PATIENCE_SECONDS = 600.0
_GRACE_SECONDS = 30.0
_OWN_NETWORK = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]

Tell = Callable[[str], None]


@dataclass
class Attempt:
    """One start of the processes, and what was seen of it."""

    faults: list[Fault]
    began: float
    ended: float
    code: int
    resumed: int
    """The step after which it went on."""
    reached: int
    """The last step whose metrics were written."""
    first_step: float | None
    """When they were written for its first step."""
    before: list[int]
    """The steps of whole checkpoints when it began."""
    committed: list[int]
    """And when it ended."""
    events: dict[int, list[dict[str, Any]]]
    """Of each process, since it began."""
    journal: list[dict[str, Any]]
    """When which fault was caused in which process."""
    losses: dict[int, float | None]
    """By step, of the whole run so far."""
    log: Path


@dataclass
class Drill:
    """A drill with one number of processes, in a folder of its own."""

    config: Config
    config_file: Path
    folder: Path
    processes: int
    devices: int
    prefix: list[str]
    """What starts all processes, such as srun; empty for this machine alone."""
    plan: list[list[Fault]]
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def undisturbed(self) -> Path:
        """Runs what the drill is compared with; its directory."""
        run_dir = self.folder / "undisturbed"
        attempt = self._attempt([], run_dir, "undisturbed")
        if attempt.code != ExitCode.FINISHED:
            kind = ConfigError if attempt.code == ExitCode.CONFIG else UserError
            raise kind(f"the run that nothing disturbs ended with {attempt.code}: {_error_in(attempt.log)}")
        return run_dir

    def run(self, tell: Tell) -> None:
        """All starts, the last of which has to finish."""
        for number, faults in enumerate(self.plan, 1):
            attempt = self._attempt(faults, self.run_dir, f"start-{number}")
            self.attempts.append(attempt)
            names = ", ".join(fault.name for fault in faults) or "nothing"
            tell(
                f"start {number} of {len(self.plan)}: {names}; from step {attempt.resumed} to {attempt.reached}, "
                f"exit code {attempt.code}, {attempt.ended - attempt.began:.0f} s"
            )

    def _attempt(self, faults: list[Fault], run_dir: Path, name: str) -> Attempt:
        plan, journal, log = (self.folder / f"{name}{end}" for end in (".json", ".journal", ".log"))
        in_data = [fault for start in self.plan for fault in start if fault.act == "poison"]
        planned = [asdict(fault) for fault in dict.fromkeys([*faults, *in_data])]
        plan.write_text(json_text({"faults": planned, "journal": str(journal)}))
        own_network = _OWN_NETWORK if any(fault.namespace for fault in faults) else []
        began, before = time.time(), _whole(run_dir)
        code = _run([*own_network, *self._command(plan, run_dir)], log)
        if code is None:
            raise UserError(f"the drill's {name} hangs: nothing ended it; its output is {log}")
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
            committed=_whole(run_dir),
            events=events,
            journal=read_lines(journal),
            losses={line["step"]: line["loss"] for line in lines if line["kind"] == "train"},
            log=log,
        )  # fmt: skip

    def _command(self, plan: Path, run_dir: Path) -> list[str]:
        python = [sys.executable, "-m"]
        arguments = ["--config", str(self.config_file), as_override("run.dir", str(run_dir)), *self._cluster()]
        if self.prefix:
            filled = [part.replace("{processes}", str(self.processes)) for part in self.prefix]
            return [*filled, *python, "jaxmnt.drill.inject", str(plan), "--", *arguments]
        counts = [str(self.processes), str(self.devices)]
        return [*python, "jaxmnt.drill.start", *counts, str(plan), "--", *arguments]

    def _cluster(self) -> list[str]:
        """The settings that a config file of a run does not hold, since they are about processes."""
        settings = self.config.cluster.model_dump(exclude={"processes", "process_id"})
        if not self.prefix:  # our own launcher says these
            del settings["coordinator"], settings["launcher"], settings["local_devices"]
        return [as_override(f"cluster.{key}", value) for key, value in sorted(settings.items()) if value is not None]


def prepared(
    config: Config, folder: Path, processes: int, devices: int, prefix: list[str], plan: list[list[Fault]]
) -> Drill:
    """A drill in a new folder, with the small config written down."""
    folder.mkdir(parents=True)
    small = shrunk(config, processes * devices, STEPS_A_START * len(plan), folder / "compiled")
    config_file = folder / "small.yaml"
    config_file.write_text(dump_config(small), encoding="utf-8")
    return Drill(small, config_file, folder, processes, devices, prefix, plan)


def _run(command: list[str], log: Path) -> int | None:
    """The exit code of a command, or None if it did not end; nothing of it is left."""
    with log.open("w") as output:
        started = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            return started.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if started.poll() is None:
                started.terminate()  # a launcher ends its processes, and those that do not end, after a while
                try:
                    started.wait(_GRACE_SECONDS)
                except subprocess.TimeoutExpired:
                    started.kill()
                    started.wait()


def _error_in(log: Path) -> str:
    """The last error that a run has told."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if "error: " in line]
    return lines[-1].partition("error: ")[2] if lines else f"its output is {log}"


def _whole(run_dir: Path) -> list[int]:
    """The steps of the whole checkpoints, the newest last."""
    return [checkpoint.step for checkpoint in valid_checkpoints(run_dir / "checkpoints")]
