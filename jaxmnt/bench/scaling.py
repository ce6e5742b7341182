"""Performs a scaling study: starts its runs one after the other, as a user would, and reads the files they write."""

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
from jaxmnt.errors import ConfigError, UserError, counted
from jaxmnt.launch.local import check_cores
from jaxmnt.parallel.axes import num_microbatches, resolve_sizes
from jaxmnt.plan.calibration import CPU, read_calibration
from jaxmnt.plan.chips import CHIPS
from jaxmnt.report.scaling import Mode, Point, Scaling, Study
from jaxmnt.telemetry.events import METRICS, PHASE_LINES, event_file, read_lines
from jaxmnt.telemetry.phases import PHASES

_POLL_SECONDS = 2.0
_WARMUP_DIVISOR = 3
"""The number of steps of a run is divided by this to get the number of warm-up steps, which are not measured."""

_Case = tuple[Mode, int]
"""The kind of scaling and the number of processes of a run."""
_Prediction = tuple[float | None, dict[str, float]]
"""Predicted duration of a step, and predicted seconds of exposed communication by mesh axis."""


@dataclass(frozen=True)
class ScalingRequest:
    """The runs that the user requested, and their options."""

    config_file: Path
    config: Config
    overrides: tuple[str, ...]
    processes: tuple[int, ...]
    modes: tuple[Mode, ...]
    steps: int
    rounds: int
    folder: Path
    devices_per_process: int | None = None
    """Number of GPUs, or of virtual CPU devices on a machine without GPUs, for each process.

    None keeps those that a process has, and is refused on a machine with GPUs.
    """
    cores_per_process: int | None = None
    """Number of CPU cores that each process is bound to; None does not bind processes."""
    slurm: bool = False
    """True to run each case as a Slurm job."""
    calibration: Path | None = None
    """File of rates for predicting step times.

    If it is None, the rates of this machine's CPUs are measured first, and those of GPUs come from data sheets.
    """
    should_predict: bool = True
    """True to predict step times."""

    def rows(self, mode: Mode, processes: int) -> int:
        """Returns the number of rows in a step. The number in the config applies to the first number of processes.

        Raises `ConfigError` if weak scaling does not result in a whole number of rows.
        """
        rows = self.config.data.global_batch_size
        if mode == "strong":
            return rows
        if rows * processes % self.processes[0]:
            raise ConfigError(
                f"--processes: weak scaling from {rows} rows for {self.processes[0]} processes gives no whole number "
                f"of rows for {processes} processes; change data.global_batch_size or --processes"
            )
        return rows * processes // self.processes[0]

    def settings(self, mode: Mode, processes: int) -> list[str]:
        """Returns the overrides for a run of the study.

        With them, the run neither saves nor evaluates before its end, and does not touch the checkpoints of the user's
        own run.
        """
        user_settings = [setting for setting in self.overrides if not setting.startswith("run.dir=")]
        return drop_overridden(
            [
                *user_settings,
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
    """Median duration of a step."""
    phases: dict[str, float]
    """Mean seconds of each phase of a step."""
    devices: int
    environment: dict[str, str]
    """Properties of the environment that the run recorded, such as versions and the kind of devices."""
    expected: _Prediction
    """The prediction that the run made from the data sheet of its GPUs."""


def check(request: ScalingRequest) -> None:
    """Raises `ConfigError` if the calibration is unreadable, cores or GPUs are missing, or a case is impossible.

    A case of weak scaling is impossible if it would give a fractional number of rows; this is always checked. A case is
    also impossible if its devices do not fit the mesh, or its batch cannot be split evenly among them; this is only
    checked if the request has the number of devices per process.
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
    """Raises `ConfigError` if this machine has GPUs, and the request does not say how many each process gets, or needs
    more than there are."""
    num_gpus = len(_usable_gpus(request))
    per_process = request.devices_per_process
    if not num_gpus:
        return
    if per_process is None:
        raise ConfigError(
            f"--devices-per-process: processes would share the {num_gpus} GPUs of this machine, however many processes "
            "there are; set the number of GPUs for each process"
        )
    if request.processes[-1] * per_process > num_gpus:
        raise ConfigError(
            f"--devices-per-process: {request.processes[-1]} processes with {per_process} GPUs each need more than the "
            f"{num_gpus} of this machine; lower one of the two numbers, or set --slurm"
        )


def _usable_gpus(request: ScalingRequest) -> list[str]:
    """Returns the GPUs of this machine that the study may use; an empty list on Slurm and for CPUs."""
    if request.slurm or os.environ.get("JAX_PLATFORMS") == "cpu":
        return []
    return visible_gpus(os.environ, gpus_here())


def measure(request: ScalingRequest, print_line: Callable[[str], None]) -> Study:
    """Runs every case once in each round, and returns the study. Raises `UserError` if a run fails.

    `print_line` is called with lines that report progress.
    """
    measurements: dict[_Case, list[_RunMeasurement]] = {}
    predictions = {}
    rate_files = {}
    for round_number in range(1, request.rounds + 1):
        for mode, processes in _cases(request):
            if round_number == 1 and _should_calibrate(request) and processes not in rate_files:
                rate_files[processes] = _calibrate(request, processes, print_line)
            run = _run(request, mode, processes)
            measurements.setdefault((mode, processes), []).append(run)
            milliseconds = f"{1e3 * run.seconds:,.1f} ms"
            print_line(f"{mode:6} {_processes_text(processes)}, round {round_number}: {milliseconds} per step")
            rate_file = request.calibration or rate_files.get(processes)
            if round_number == 1 and rate_file is not None and request.should_predict:
                try:
                    predictions[mode, processes] = _predict(request, mode, processes, run.devices, rate_file)
                except UserError as error:  # continue without a prediction, because the measurements matter more
                    print_line(f"note   {mode} {_processes_text(processes)}: {error}")
    return _study(request, measurements, predictions)


def _processes_text(processes: int) -> str:
    return counted(processes, "process", "processes")


def _cases(request: ScalingRequest) -> Iterator[_Case]:
    """Yields the cases that each round runs.

    With the smallest number of processes, weak and strong scaling are the same case, which is therefore run only once.
    """
    for processes in request.processes:
        for mode in request.modes:
            if processes > request.processes[0] or mode == request.modes[0]:
                yield mode, processes


def _study(
    request: ScalingRequest,
    measurements: dict[_Case, list[_RunMeasurement]],
    predictions: dict[_Case, _Prediction],
) -> Study:
    """Returns the study that consists of the measurements and predictions of all cases."""

    def point(mode: Mode, processes: int) -> Point:
        case = (mode, processes) if (mode, processes) in measurements else (request.modes[0], processes)
        runs = measurements[case]
        step_seconds, exposed = predictions.get(case, runs[0].expected)
        return Point(
            processes=processes,
            devices=runs[0].devices,
            rows=request.rows(mode, processes),
            seconds=tuple(run.seconds for run in runs),
            phases={name: statistics.fmean(run.phases.get(name, 0.0) for run in runs) for name in PHASES},
            predicted=step_seconds if request.should_predict else None,
            exposed=exposed if request.should_predict else {},
        )

    environment = next(iter(measurements.values()))[0].environment
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

    The results of an earlier study in the same folder are set aside. The checkpoint that the run saves at its end is
    deleted.
    """
    run_dir = request.folder / f"{mode}-{processes}"
    settings = [*request.settings(mode, processes), as_override("run.dir", str(run_dir))]
    start = _submit if request.slurm else _launch
    start(request, processes, run_dir, ["--config", str(request.config_file), *settings, "--fresh"])
    shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
    return _read_measurements(run_dir, request.steps)


def _launch(request: ScalingRequest, processes: int, run_dir: Path, arguments: list[str]) -> None:
    """Runs processes on this machine, and waits until they end. Raises `UserError` if they fail."""
    gpus = _usable_gpus(request)
    per_process = request.devices_per_process
    options = [] if per_process is None or gpus else ["--devices-per-process", str(per_process)]
    options += [] if request.cores_per_process is None else ["--cores-per-process", str(request.cores_per_process)]
    preflight = ["--preflight"] if "--calibrate" in arguments else []
    # `launch local` divides the visible GPUs among the processes, so exactly as many as they need must be visible.
    environment = {"CUDA_VISIBLE_DEVICES": ",".join(gpus[: processes * per_process])} if per_process and gpus else {}
    _run_launcher(
        ["local", "--processes", str(processes), *options, *preflight, "--", *arguments], run_dir, environment
    )


def _submit(request: ScalingRequest, processes: int, run_dir: Path, arguments: list[str]) -> None:
    """Submits a Slurm job and waits for its end. Raises `UserError` if the job ends without a finished run."""
    events_before = read_lines(event_file(run_dir, 0))
    output = _run_launcher(["slurm", "--nodes", str(processes), *arguments], run_dir, {})
    job = re.match(r"job (\d+)", output)
    assert job is not None, output
    while _is_queued(job[1]):
        time.sleep(_POLL_SECONDS)
    events = read_lines(event_file(run_dir, 0))
    if not events or events[-1]["kind"] != "end" or events[:1] == events_before[:1]:
        raise UserError(f"{output.splitlines()[0]}: the job ended before its run finished; see the log")


def _is_queued(job: str) -> bool:
    """Returns True if Slurm still lists a job."""
    squeue = subprocess.run(["squeue", "--noheader", "--jobs", job, "--format", "%T"], capture_output=True, text=True)
    if squeue.returncode:  # squeue also fails while the controller is busy
        return "Invalid job id" not in squeue.stderr
    return bool(squeue.stdout.strip())


def _run_launcher(arguments: list[str], run_dir: Path, environment: dict[str, str]) -> str:
    """Runs `jaxmnt.launch` and returns its output. Raises `UserError` with the error message if the run fails."""
    launcher = subprocess.run(
        [sys.executable, "-m", "jaxmnt.launch", *arguments], capture_output=True, text=True,
        env=os.environ | environment,
    )  # fmt: skip
    if launcher.returncode:
        lines = launcher.stderr.splitlines()
        error_lines = [line for line in lines if "jaxmnt: error:" in line] or lines
        message = error_lines[0].partition("jaxmnt: error: ")[2] or error_lines[0] if error_lines else ""
        raise UserError(f"{run_dir}: the run ended with exit code {launcher.returncode}: {message}")
    return launcher.stdout


def _read_measurements(run_dir: Path, steps: int) -> _RunMeasurement:
    """Returns the measurements of a finished run of `steps` steps."""

    def measured_lines(name: str, kind: str) -> list[dict[str, Any]]:
        # The first steps are warm-up, and the last one evaluates and saves.
        lines = [line for line in read_lines(run_dir / name) if line["kind"] == kind]
        return [line for line in lines if steps // _WARMUP_DIVISOR < line["step"] < steps]

    times = [line["time"] for line in measured_lines(METRICS, "train")]
    phase_means = [line["mean"] for line in measured_lines(PHASE_LINES, "phases")]
    phases = {}
    if phase_means:
        phases = {name: statistics.fmean(mean.get(name, 0.0) for mean in phase_means) for name in PHASES}
    events = read_lines(event_file(run_dir, 0))
    start = next(event for event in events if event["kind"] == "start")
    compile_event = next((event for event in events if event["kind"] == "compile"), {})
    exposed = compile_event.get("expected_exposed_seconds")
    return _RunMeasurement(
        seconds=statistics.median(after - before for before, after in pairwise(times)),
        phases=phases,
        devices=start["devices"],
        environment=start.get("environment") or {},
        expected=(compile_event.get("expected_step_seconds"), exposed if isinstance(exposed, dict) else {}),
    )


# Predictions.


def _should_calibrate(request: ScalingRequest) -> bool:
    """Returns True if the rates of this machine's CPUs must be measured for predictions.

    GPUs need no measurement, because predictions can use their data sheets.
    """
    on_cpu = os.environ.get("JAX_PLATFORMS") == "cpu" or (
        request.devices_per_process is not None and not _usable_gpus(request)
    )
    return request.should_predict and request.calibration is None and not request.slurm and on_cpu


def _calibrate(request: ScalingRequest, processes: int, print_line: Callable[[str], None]) -> Path:
    """Measures the rates of this machine with the given number of concurrent processes, and returns their file."""
    file = request.folder / f"rates-{processes}.json"
    settings = [
        *request.settings("weak", processes),
        as_override("run.dir", str(request.folder / f"rates-{processes}")),
    ]
    arguments = ["--config", str(request.config_file), *settings, "--calibrate", str(file)]
    _launch(request, processes, request.folder, arguments)
    print_line(f"rates  {_processes_text(processes)}: measured")
    return file


def _predict(request: ScalingRequest, mode: Mode, processes: int, devices: int, rates: Path) -> _Prediction:
    """Returns the prediction for a case, from a dry run with the given file of rates.

    Raises `UserError` if the dry run fails.
    """
    kind = read_calibration(rates).kind
    hosts = processes if request.slurm else 1
    target = ["--devices", str(devices)] if kind == CPU else ["--target", _planning_target(kind), "--hosts", str(hosts)]
    target += ["--devices-per-host", str(devices // hosts)]
    dry_run = subprocess.run(
        [sys.executable, "-m", "jaxmnt.train", "--config", str(request.config_file), "--dry-run", "--json", *target,
         "--calibration", str(rates), *request.settings(mode, processes), as_override("run.dir", str(request.folder))],
        capture_output=True, text=True,
    )  # fmt: skip
    if dry_run.returncode:
        raise UserError(f"the step time could not be predicted: {dry_run.stderr.strip().splitlines()[-1]}")
    plan: dict[str, Any] = json.loads(dry_run.stdout)
    exposed: dict[str, float] = {}
    for collective in plan["collectives"]:
        axis = collective["axis"]
        exposed[axis] = exposed.get(axis, 0.0) + collective["exposed_seconds"]
    return plan["prediction"]["step_seconds"], exposed


def _planning_target(kind: str) -> str:
    """Returns the name of the planning target whose chips are of this kind. Raises `ConfigError` if there is none."""
    targets = [name for name, chip in CHIPS.items() if chip.kind == kind]
    if not targets:
        raise ConfigError(
            f"--calibration: the rates were measured on {kind}, which is not the chip of a planning target"
        )
    return targets[0]
