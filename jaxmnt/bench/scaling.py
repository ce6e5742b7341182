"""The runs of a scaling study: started one after the other as a user starts them, and read from their files."""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from jaxmnt.config.load import as_override, drop_overridden
from jaxmnt.config.schema import Config
from jaxmnt.distributed.local_gpus import gpus_here, visible_gpus
from jaxmnt.errors import ConfigError, UserError
from jaxmnt.launch.local import check_cores
from jaxmnt.parallel.axes import num_microbatches, resolve_sizes
from jaxmnt.plan.calibration import CPU, read_calibration
from jaxmnt.plan.chips import CHIPS
from jaxmnt.report.scaling import Mode, Point, Scaling, Study
from jaxmnt.telemetry.events import METRICS, PHASE_LINES, event_file, read_lines
from jaxmnt.telemetry.phases import PHASES

_POLL_SECONDS = 2.0
_SKIPPED = 3
"""The first of so many parts of the steps of a run does not count."""

_Case = tuple[Mode, int]
"""How a run scales, and its number of processes."""
_Prediction = tuple[float | None, dict[str, float]]
"""Seconds of a step, and of exposed communication by axis."""


@dataclass(frozen=True)
class ScalingRequest:
    """What is asked for."""

    config_file: Path
    config: Config
    overrides: tuple[str, ...]
    processes: tuple[int, ...]
    modes: tuple[Mode, ...]
    steps: int
    rounds: int
    folder: Path
    devices_per_process: int | None = None
    """GPUs, where there are some, or virtual CPU devices; None for what a process has."""
    cores_per_process: int | None = None
    slurm: bool = False
    calibration: Path | None = None
    """By which steps are predicted. None: on CPUs of this machine they are measured first, on GPUs a data sheet
    counts."""
    predicts: bool = True

    def rows(self, mode: Mode, processes: int) -> int:
        """Of a step. Those of the config are for the first number."""
        rows = self.config.data.global_batch_size
        if mode == "strong":
            return rows
        if rows * processes % self.processes[0]:
            raise ConfigError(
                f"--processes: {processes} do not take a whole number of times the {rows} rows of {self.processes[0]}"
            )
        return rows * processes // self.processes[0]

    def settings(self, mode: Mode, processes: int) -> list[str]:
        """Over those of the file. A run of a study neither saves nor evaluates on its way, and keeps away from what the
        run itself has saved."""
        users = [setting for setting in self.overrides if not setting.startswith("run.dir=")]
        return drop_overridden(
            [
                *users,
                f"data.global_batch_size={self.rows(mode, processes)}",
                f"train.steps={self.steps}",
                "train.eval_every=0",
                "checkpoint.every_steps=0",
                "checkpoint.every_minutes=null",
                "checkpoint.dir=null",
                "telemetry.phases=true",
            ]
        )


@dataclass(frozen=True)
class _Measured:
    """One run."""

    seconds: float
    """Of a step."""
    phases: dict[str, float]
    devices: int
    environment: dict[str, str]
    """Versions, and the kind of its devices."""
    expected: _Prediction
    """By the data sheet of its GPUs."""


def check(request: ScalingRequest) -> None:
    """Raises `ConfigError` for batches and meshes that do not come out whole, where the devices are known, for cores
    that are not there, and for a calibration that is none."""
    if request.calibration is not None:
        read_calibration(request.calibration)
    check_cores(request.processes[-1], request.cores_per_process)
    _check_gpus(request)
    for mode in request.modes:
        for processes in request.processes:
            rows = request.rows(mode, processes)
            if request.devices_per_process is None:
                continue
            data = request.config.data.model_copy(update={"global_batch_size": rows})
            devices = processes * request.devices_per_process
            try:
                sizes = resolve_sizes(request.config.mesh, devices)
                num_microbatches(request.config.model_copy(update={"data": data}), sizes)
            except ConfigError as error:
                raise ConfigError(f"{error} ({mode} scaling to {processes} processes)") from error


def _check_gpus(request: ScalingRequest) -> None:
    gpus, each = len(_gpus(request)), request.devices_per_process
    if not gpus:
        return
    if each is None:
        raise ConfigError(
            f"--devices-per-process: processes would share the {gpus} GPUs of this machine, whatever their number; set "
            "how many each has"
        )
    if request.processes[-1] * each > gpus:
        raise ConfigError(
            f"--devices-per-process: {request.processes[-1]} processes with {each} GPUs each need more than the {gpus} "
            "of this machine; lower one of them, or set --slurm"
        )


def _gpus(request: ScalingRequest) -> list[str]:
    """Those of this machine that a study here may use."""
    if request.slurm or os.environ.get("JAX_PLATFORMS") == "cpu":
        return []
    return visible_gpus(os.environ, gpus_here())


def measure(request: ScalingRequest, say: Callable[[str], None]) -> Study:
    """All runs, in turn: each round has one of each. Raises `UserError` for a run that fails."""
    found: dict[_Case, list[_Measured]] = {}
    predictions = {}
    rates = {}
    for number in range(1, request.rounds + 1):
        for mode, processes in _cases(request):
            if number == 1 and _can_calibrate(request) and processes not in rates:
                rates[processes] = _calibrate(request, processes, say)
            one = _run(request, mode, processes)
            found.setdefault((mode, processes), []).append(one)
            say(f"{mode:6} {processes} × process, round {number}: {1e3 * one.seconds:,.1f} ms a step")
            file = request.calibration or rates.get(processes)
            if number == 1 and file is not None and request.predicts:
                try:
                    predictions[mode, processes] = _predict(request, mode, processes, one.devices, file)
                except UserError as error:  # what was measured is worth more
                    say(f"note   {mode} {processes} × process: {error}")
    return _study(request, found, predictions)


def _cases(request: ScalingRequest) -> Iterator[_Case]:
    """The smallest number is the same in weak and in strong scaling, and is run once."""
    for processes in request.processes:
        for mode in request.modes:
            if processes > request.processes[0] or mode == request.modes[0]:
                yield mode, processes


def _study(
    request: ScalingRequest,
    found: dict[_Case, list[_Measured]],
    predictions: dict[_Case, _Prediction],
) -> Study:
    def point(mode: Mode, processes: int) -> Point:
        key = (mode, processes) if (mode, processes) in found else (request.modes[0], processes)
        runs = found[key]
        expected = predictions.get(key, runs[0].expected)
        return Point(
            processes=processes,
            devices=runs[0].devices,
            rows=request.rows(mode, processes),
            seconds=tuple(one.seconds for one in runs),
            phases={name: statistics.fmean(one.phases.get(name, 0.0) for one in runs) for name in PHASES},
            predicted=expected[0] if request.predicts else None,
            exposed=expected[1] if request.predicts else {},
        )

    environment = next(iter(found.values()))[0].environment
    return Study(
        date=time.strftime("%Y-%m-%d"),
        device=environment.get("device kind", "unknown devices"),
        length=request.config.data.sequence_length,
        environment=environment,
        settings=request.overrides,
        scalings=tuple(
            Scaling(mode=mode, points=tuple(point(mode, processes) for processes in request.processes))
            for mode in request.modes
        ),
    )


# Starting and reading a run.


def _run(request: ScalingRequest, mode: Mode, processes: int) -> _Measured:
    """What an earlier study has there is set aside. Of the checkpoint at the end nothing is kept."""
    run_dir = request.folder / f"{mode}-{processes}"
    settings = [*request.settings(mode, processes), as_override("run.dir", str(run_dir))]
    start = _submit if request.slurm else _launch
    start(request, processes, run_dir, ["--config", str(request.config_file), *settings, "--fresh"])
    shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
    return _read(run_dir, request.steps)


def _launch(request: ScalingRequest, processes: int, run_dir: Path, arguments: list[str]) -> None:
    gpus, each = _gpus(request), request.devices_per_process
    own = [] if each is None or gpus else ["--devices-per-process", str(each)]
    own += [] if request.cores_per_process is None else ["--cores-per-process", str(request.cores_per_process)]
    preflight = ["--preflight"] if "--calibrate" in arguments else []
    # `launch local` shares out what is visible.
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpus[: processes * each])} if each and gpus else {}
    _call(["local", "--processes", str(processes), *own, *preflight, "--", *arguments], run_dir, visible)


def _submit(request: ScalingRequest, processes: int, run_dir: Path, arguments: list[str]) -> None:
    """A job, and waits for its end."""
    before = read_lines(event_file(run_dir, 0))
    told = _call(["slurm", "--nodes", str(processes), *arguments], run_dir, {})
    job = re.match(r"job (\d+)", told)
    assert job is not None, told
    while _is_there(job[1]):
        time.sleep(_POLL_SECONDS)
    events = read_lines(event_file(run_dir, 0))
    if not events or events[-1]["kind"] != "end" or events[:1] == before[:1]:
        raise UserError(f"{told.splitlines()[0]} ended before its run had; its log says why")


def _is_there(job: str) -> bool:
    """Whether Slurm still has something to do for a job."""
    asked = subprocess.run(["squeue", "--noheader", "--jobs", job, "--format", "%T"], capture_output=True, text=True)
    if asked.returncode:  # its controller may only be busy
        return "Invalid job id" not in asked.stderr
    return bool(asked.stdout.strip())


def _call(arguments: list[str], run_dir: Path, environment: dict[str, str]) -> str:
    """Returns what `jaxmnt.launch` prints. Raises `UserError` with the last line of a failed run."""
    done = subprocess.run(
        [sys.executable, "-m", "jaxmnt.launch", *arguments], capture_output=True, text=True,
        env=os.environ | environment,
    )  # fmt: skip
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "jaxmnt: error:" in line] or done.stderr.splitlines()
        last = lines[0].partition("jaxmnt: error: ")[2] or lines[0] if lines else ""
        raise UserError(f"{run_dir}: the run ended with exit code {done.returncode}: {last}")
    return done.stdout


def _read(run_dir: Path, steps: int) -> _Measured:
    counts = lambda line: steps // _SKIPPED < line["step"] < steps  # the last one evaluates, and saves
    times = [line["time"] for line in read_lines(run_dir / METRICS) if line["kind"] == "train" and counts(line)]
    phases = [line for line in read_lines(run_dir / PHASE_LINES) if line["kind"] == "phases" and counts(line)]
    events = read_lines(event_file(run_dir, 0))
    start = next(event for event in events if event["kind"] == "start")
    compiled = next((event for event in events if event["kind"] == "compile"), {})
    exposed = compiled.get("expected_exposed_seconds")
    return _Measured(
        seconds=statistics.median(after - before for before, after in pairwise(times)),
        phases={name: statistics.fmean(line["mean"].get(name, 0.0) for line in phases) for name in PHASES if phases},
        devices=start["devices"],
        environment=start.get("environment") or {},
        expected=(compiled.get("expected_step_seconds"), exposed if isinstance(exposed, dict) else {}),
    )


# Predictions.


def _can_calibrate(request: ScalingRequest) -> bool:
    """On the CPUs of this machine; GPUs have data sheets."""
    on_cpu = os.environ.get("JAX_PLATFORMS") == "cpu" or (
        request.devices_per_process is not None and not _gpus(request)
    )
    return request.predicts and request.calibration is None and not request.slurm and on_cpu


def _calibrate(request: ScalingRequest, processes: int, say: Callable[[str], None]) -> Path:
    """The rates of so many processes at a time."""
    file = request.folder / f"rates-{processes}.json"
    settings = [
        *request.settings("weak", processes),
        as_override("run.dir", str(request.folder / f"rates-{processes}")),
    ]
    arguments = ["--config", str(request.config_file), *settings, "--calibrate", str(file)]
    _launch(request, processes, request.folder, arguments)
    say(f"rates  {processes} × process: measured")
    return file


def _predict(request: ScalingRequest, mode: Mode, processes: int, devices: int, rates: Path) -> _Prediction:
    """Raises `UserError` where there is no prediction."""
    kind, hosts = read_calibration(rates).kind, processes if request.slurm else 1
    target = ["--devices", str(devices)] if kind == CPU else ["--target", _target(kind), "--hosts", str(hosts)]
    target += ["--devices-per-host", str(devices // hosts)]
    done = subprocess.run(
        [sys.executable, "-m", "jaxmnt.train", "--config", str(request.config_file), "--dry-run", "--json", *target,
         "--calibration", str(rates), *request.settings(mode, processes), as_override("run.dir", str(request.folder))],
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise UserError(f"the step could not be predicted: {done.stderr.strip().splitlines()[-1]}")
    plan: dict[str, Any] = json.loads(done.stdout)
    exposed: dict[str, float] = {}
    for one in plan["collectives"]:
        exposed[one["axis"]] = exposed.get(one["axis"], 0.0) + one["exposed_seconds"]
    return plan["prediction"]["step_seconds"], exposed


def _target(kind: str) -> str:
    found = [name for name, chip in CHIPS.items() if chip.kind == kind]
    if not found:
        raise ConfigError(f"--calibration: it was measured on {kind}, for which there is no plan")
    return found[0]
