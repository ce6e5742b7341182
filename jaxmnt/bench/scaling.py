"""The runs of a scaling study: starts them one after the other, as a user would, and reads their files."""

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
_WARMUP_DIVISOR = 3
"""The first third of the steps of a run does not count."""

_Case = tuple[Mode, int]
"""The kind of scaling and the number of processes of a run."""
_Prediction = tuple[float | None, dict[str, float]]
"""Predicted seconds of a step, and of exposed communication by mesh axis."""


@dataclass(frozen=True)
class ScalingRequest:
    """The runs and options that the user requested."""

    config_file: Path
    config: Config
    overrides: tuple[str, ...]
    processes: tuple[int, ...]
    modes: tuple[Mode, ...]
    steps: int
    rounds: int
    folder: Path
    devices_per_process: int | None = None
    """GPUs of each process, or virtual CPU devices where there are none; None leaves the number to the process."""
    cores_per_process: int | None = None
    slurm: bool = False
    calibration: Path | None = None
    """Rates for predicting steps. If None, rates of this machine's CPUs are measured first; GPUs use data sheets."""
    predicts: bool = True

    def rows(self, mode: Mode, processes: int) -> int:
        """Returns the rows of a step. The config's number of rows is for the first number of processes.

        Raises `ConfigError` if weak scaling gives no whole number.
        """
        rows = self.config.data.global_batch_size
        if mode == "strong":
            return rows
        if rows * processes % self.processes[0]:
            raise ConfigError(
                f"--processes: {rows} rows for {self.processes[0]} processes give no whole number for {processes}; "
                "change data.global_batch_size or --processes"
            )
        return rows * processes // self.processes[0]

    def settings(self, mode: Mode, processes: int) -> list[str]:
        """Returns the overrides for a run of the study.

        It neither saves nor evaluates before its end, and does not touch the checkpoints of the user's own run.
        """
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
class _RunMeasurement:
    """The measurements of one run."""

    seconds: float
    """Median seconds of a step."""
    phases: dict[str, float]
    devices: int
    environment: dict[str, str]
    """Versions, and the kind of its devices."""
    expected: _Prediction
    """Prediction from the data sheet of its GPUs."""


def check(request: ScalingRequest) -> None:
    """Raises `ConfigError` for an unreadable calibration, for missing cores or GPUs, and for impossible cases.

    A case is impossible if its batch or mesh does not divide; this is checked where the number of devices is known.
    """
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
    gpus, per_process = len(_gpus(request)), request.devices_per_process
    if not gpus:
        return
    if per_process is None:
        raise ConfigError(
            f"--devices-per-process: processes would share the {gpus} GPUs of this machine, whatever their number; set "
            "the number of GPUs of each process"
        )
    if request.processes[-1] * per_process > gpus:
        raise ConfigError(
            f"--devices-per-process: {request.processes[-1]} processes with {per_process} GPUs each need more than the "
            f"{gpus} of this machine; lower one of them, or set --slurm"
        )


def _gpus(request: ScalingRequest) -> list[str]:
    """Returns the GPUs of this machine that the study may use."""
    if request.slurm or os.environ.get("JAX_PLATFORMS") == "cpu":
        return []
    return visible_gpus(os.environ, gpus_here())


def measure(request: ScalingRequest, say: Callable[[str], None]) -> Study:
    """Runs every case once in each round, and returns the study. Raises `UserError` for a run that fails."""
    measured: dict[_Case, list[_RunMeasurement]] = {}
    predictions = {}
    rates = {}
    for number in range(1, request.rounds + 1):
        for mode, processes in _cases(request):
            if number == 1 and _should_calibrate(request) and processes not in rates:
                rates[processes] = _calibrate(request, processes, say)
            run = _run(request, mode, processes)
            measured.setdefault((mode, processes), []).append(run)
            say(f"{mode:6} {processes} × process, round {number}: {1e3 * run.seconds:,.1f} ms a step")
            file = request.calibration or rates.get(processes)
            if number == 1 and file is not None and request.predicts:
                try:
                    predictions[mode, processes] = _predict(request, mode, processes, run.devices, file)
                except UserError as error:  # continue without a prediction: the measurements are worth more
                    say(f"note   {mode} {processes} × process: {error}")
    return _study(request, measured, predictions)


def _cases(request: ScalingRequest) -> Iterator[_Case]:
    """Yields the cases. The smallest number is the same case in weak and in strong scaling, so it is run once."""
    for processes in request.processes:
        for mode in request.modes:
            if processes > request.processes[0] or mode == request.modes[0]:
                yield mode, processes


def _study(
    request: ScalingRequest,
    measured: dict[_Case, list[_RunMeasurement]],
    predictions: dict[_Case, _Prediction],
) -> Study:
    def point(mode: Mode, processes: int) -> Point:
        key = (mode, processes) if (mode, processes) in measured else (request.modes[0], processes)
        runs = measured[key]
        expected = predictions.get(key, runs[0].expected)
        return Point(
            processes=processes,
            devices=runs[0].devices,
            rows=request.rows(mode, processes),
            seconds=tuple(run.seconds for run in runs),
            phases={name: statistics.fmean(run.phases.get(name, 0.0) for run in runs) for name in PHASES},
            predicted=expected[0] if request.predicts else None,
            exposed=expected[1] if request.predicts else {},
        )

    environment = next(iter(measured.values()))[0].environment
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


def _run(request: ScalingRequest, mode: Mode, processes: int) -> _RunMeasurement:
    """Runs one case and returns its measurements.

    Results of an earlier study in the same folder are set aside. The checkpoint at the end is deleted.
    """
    run_dir = request.folder / f"{mode}-{processes}"
    settings = [*request.settings(mode, processes), as_override("run.dir", str(run_dir))]
    start = _submit if request.slurm else _launch
    start(request, processes, run_dir, ["--config", str(request.config_file), *settings, "--fresh"])
    shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
    return _read(run_dir, request.steps)


def _launch(request: ScalingRequest, processes: int, run_dir: Path, arguments: list[str]) -> None:
    gpus, per_process = _gpus(request), request.devices_per_process
    options = [] if per_process is None or gpus else ["--devices-per-process", str(per_process)]
    options += [] if request.cores_per_process is None else ["--cores-per-process", str(request.cores_per_process)]
    preflight = ["--preflight"] if "--calibrate" in arguments else []
    # `launch local` divides the visible GPUs among the processes, so show it exactly as many as they need.
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpus[: processes * per_process])} if per_process and gpus else {}
    _call(["local", "--processes", str(processes), *options, *preflight, "--", *arguments], run_dir, visible)


def _submit(request: ScalingRequest, processes: int, run_dir: Path, arguments: list[str]) -> None:
    """Submits a job and waits for its end. Raises `UserError` if the job ends without a finished run."""
    before = read_lines(event_file(run_dir, 0))
    output = _call(["slurm", "--nodes", str(processes), *arguments], run_dir, {})
    job = re.match(r"job (\d+)", output)
    assert job is not None, output
    while _is_queued(job[1]):
        time.sleep(_POLL_SECONDS)
    events = read_lines(event_file(run_dir, 0))
    if not events or events[-1]["kind"] != "end" or events[:1] == before[:1]:
        raise UserError(f"{output.splitlines()[0]} ended before its run did; see its log")


def _is_queued(job: str) -> bool:
    """Returns True if Slurm still lists a job."""
    squeue = subprocess.run(["squeue", "--noheader", "--jobs", job, "--format", "%T"], capture_output=True, text=True)
    if squeue.returncode:  # a busy controller also makes it fail
        return "Invalid job id" not in squeue.stderr
    return bool(squeue.stdout.strip())


def _call(arguments: list[str], run_dir: Path, environment: dict[str, str]) -> str:
    """Runs `jaxmnt.launch` and returns its output. Raises `UserError` with the error of a failed run."""
    done = subprocess.run(
        [sys.executable, "-m", "jaxmnt.launch", *arguments], capture_output=True, text=True,
        env=os.environ | environment,
    )  # fmt: skip
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "jaxmnt: error:" in line] or done.stderr.splitlines()
        last = lines[0].partition("jaxmnt: error: ")[2] or lines[0] if lines else ""
        raise UserError(f"{run_dir}: the run ended with exit code {done.returncode}: {last}")
    return done.stdout


def _read(run_dir: Path, steps: int) -> _RunMeasurement:
    """Returns the measurements of a finished run of `steps` steps."""
    # Without the first steps, and without the last one, which evaluates and saves.
    counts = lambda line: steps // _WARMUP_DIVISOR < line["step"] < steps
    times = [line["time"] for line in read_lines(run_dir / METRICS) if line["kind"] == "train" and counts(line)]
    phases = [line for line in read_lines(run_dir / PHASE_LINES) if line["kind"] == "phases" and counts(line)]
    events = read_lines(event_file(run_dir, 0))
    start = next(event for event in events if event["kind"] == "start")
    compiled = next((event for event in events if event["kind"] == "compile"), {})
    exposed = compiled.get("expected_exposed_seconds")
    return _RunMeasurement(
        seconds=statistics.median(after - before for before, after in pairwise(times)),
        phases={name: statistics.fmean(line["mean"].get(name, 0.0) for line in phases) for name in PHASES if phases},
        devices=start["devices"],
        environment=start.get("environment") or {},
        expected=(compiled.get("expected_step_seconds"), exposed if isinstance(exposed, dict) else {}),
    )


# Predictions.


def _should_calibrate(request: ScalingRequest) -> bool:
    """Returns True if rates are measured first: on the CPUs of this machine, since GPUs have data sheets."""
    on_cpu = os.environ.get("JAX_PLATFORMS") == "cpu" or (
        request.devices_per_process is not None and not _gpus(request)
    )
    return request.predicts and request.calibration is None and not request.slurm and on_cpu


def _calibrate(request: ScalingRequest, processes: int, say: Callable[[str], None]) -> Path:
    """Measures the rates with this number of concurrent processes; returns their file."""
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
    """Returns the predicted step time from a dry run with these rates. Raises `UserError` if the dry run fails."""
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
    for collective in plan["collectives"]:
        axis = collective["axis"]
        exposed[axis] = exposed.get(axis, 0.0) + collective["exposed_seconds"]
    return plan["prediction"]["step_seconds"], exposed


def _target(kind: str) -> str:
    """Returns the plan target with these chips. Raises `ConfigError` for unknown chips."""
    targets = [name for name, chip in CHIPS.items() if chip.kind == kind]
    if not targets:
        raise ConfigError(f"--calibration: the rates were measured on {kind}, which is not a known target of plans")
    return targets[0]
