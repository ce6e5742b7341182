"""Records how a run uses the resources of its hosts and devices: memory, GPUs and network. Each process samples its own
use periodically in a thread, and process 0 writes one line for all of them to resources.jsonl.

A line has the mean, minimum and maximum of each quantity, the latter two with the process that has it. So the length
of a line does not depend on the number of processes.
"""

import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxmnt.distributed.local_gpus import gpus_here, visible_gpus
from jaxmnt.errors import remark, summary
from jaxmnt.telemetry import clock, kernel_counters
from jaxmnt.telemetry.events import RESOURCES
from jaxmnt.telemetry.kernel_counters import Traffic
from jaxmnt.telemetry.nvml import GpuReader
from jaxmnt.telemetry.slow_devices import Device, SlowDevice, SlowDeviceDetector
from jaxmnt.telemetry.writer import LineWriter

Sample = dict[str, Any]
"""A dict with `of` (the values of each quantity), `throttled` (reasons by the index of the GPU) and `faults`
(descriptions)."""

_FIRST_SAMPLE_SECONDS = 1.0
"""Time before a process takes its first sample."""
_MAX_FAULTS = 32
"""Maximum number of faults that wait to be reported."""
_GPU_QUANTITIES = ("clock_mhz", "utilisation", "watts", "celsius")


class ResourceSampler:
    """Samples this process's resource use every `seconds`, in a thread. `take` returns the newest sample."""

    def __init__(
        self, devices: Sequence[jax.Device], seconds: float, gpus: Callable[[], GpuReader | None] = lambda: None
    ):
        """`gpus` opens the reader of this process's GPUs, or returns None without GPUs. It is called in the thread."""
        self._devices, self._seconds, self._open_gpus = list(devices), seconds, gpus
        self._gpus: GpuReader | None = None
        self._previous_traffic: tuple[float, list[Traffic]] | None = None
        self._newest: Sample | None = None
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work, name="resources", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._end.set()

    def take(self) -> Sample | None:
        """Returns the newest sample, or None if it was already taken. May be called from any thread."""
        with self._lock:
            newest, self._newest = self._newest, None
        return newest

    # The methods below run in the thread.

    def _work(self) -> None:
        try:
            self._gpus = self._open_gpus()
        except Exception as error:  # the bindings may raise anything
            remark(f"note: clocks, power and faults of GPUs are not watched: {error}")
        pause = min(_FIRST_SAMPLE_SECONDS, self._seconds)
        while not self._end.wait(pause):
            pause = self._seconds
            try:
                sample = self.read()
            except Exception as error:  # telemetry must not end a run
                remark(f"note: resource use cannot be sampled any more: {summary(error)}")
                return
            with self._lock:
                untaken_faults = [] if self._newest is None else self._newest["faults"]
                self._newest = sample | {"faults": [*untaken_faults, *sample["faults"]][-_MAX_FAULTS:]}

    def read(self) -> Sample:
        """Takes one sample."""
        quantities: dict[str, list[float]] = {name: [value] for name, value in kernel_counters.host_memory().items()}
        all_stats = [device.memory_stats() or {} for device in self._devices]
        for name, field in (("device_bytes", "bytes_in_use"), ("device_peak_bytes", "peak_bytes_in_use")):
            quantities[name] = [stats[field] for stats in all_stats if field in stats]

        throttled: dict[str, list[str]] = {}
        faults: list[str] = []
        if self._gpus is not None:
            states = self._gpus.read()
            for name in _GPU_QUANTITIES:
                values = [getattr(state, name) for state in states]
                quantities[f"gpu_{name}"] = [] if None in values else values
            throttled = {str(index): state.throttled for index, state in enumerate(states) if state.throttled}
            faults = [f"GPU {index}: {fault}" for index, fault in self._gpus.faults()]

        faults += self._add_network_rates(quantities)
        measured = {name: values for name, values in quantities.items() if values}
        return {"of": measured, "throttled": throttled, "faults": faults}

    def _add_network_rates(self, quantities: dict[str, list[float]]) -> list[str]:
        """Adds the network rates since the previous sample to `quantities`. Returns descriptions of new errors."""
        now = time.monotonic()
        traffic = [kernel_counters.ethernet(), kernel_counters.infiniband()]
        previous, self._previous_traffic = self._previous_traffic, (now, traffic)
        if previous is None:
            return []
        seconds = now - previous[0]
        faults = []
        for kind, old, new in zip(("network", "infiniband"), previous[1], traffic, strict=True):
            for direction in ("sent", "received"):
                bytes_now, bytes_then = getattr(new, direction), getattr(old, direction)
                # Interfaces may come and go between samples.
                names = [name for name in bytes_now if name in bytes_then]
                if names:
                    transferred = sum(max(0, bytes_now[name] - bytes_then[name]) for name in names)
                    quantities[f"{kind}_{direction}_per_second"] = [transferred / seconds]
            for name, errors in new.errors.items():
                old_errors = old.errors.get(name, {})
                increases = {counter: number - old_errors.get(counter, number) for counter, number in errors.items()}
                faults += [f"{name}: {number} more {counter}" for counter, number in increases.items() if number > 0]
        return faults


def reader_of_gpus(devices: Sequence[jax.Device]) -> Callable[[], GpuReader | None]:
    """Returns a function that opens the reader of the GPUs behind some devices of this process."""
    if not devices or devices[0].platform != "gpu":
        return lambda: None
    visible = visible_gpus(os.environ, gpus_here())
    indices = [getattr(device, "local_hardware_id", None) for device in devices]
    names = [visible[index] for index in indices if index is not None and index < len(visible)]
    return lambda: GpuReader(names)


class ResourceLog:
    """Process 0's record of the resource use of all processes. Methods may be called from any thread."""

    def __init__(self, run_dir: Path, processes: int):
        self._lines = LineWriter(run_dir / RESOURCES)
        self._processes = processes
        self._samples: dict[int, Sample] = {}
        self._detector = SlowDeviceDetector()
        self._findings: list[SlowDevice] = []
        self._faults: list[tuple[int, str]] = []
        self.latest: dict[str, Any] = {}
        """The quantities in the newest line. Other threads read this attribute."""
        self._lock = threading.Lock()

    def add(self, process: int, sample: Sample, step: int) -> None:
        """Adds a sample from one process. A line is written when all processes have sent one, or when one sends a
        second.

        Raises an exception if the sample is malformed.
        """
        checked = _checked(sample)
        with self._lock:
            if process in self._samples:
                self._write(step)
            self._samples[process] = checked
            self._faults += [(process, fault) for fault in checked["faults"]]
            if len(self._samples) == self._processes:
                self._write(step)

    def take_findings(self) -> tuple[list[SlowDevice], list[tuple[int, str]]]:
        """Returns the devices that have become slow or recovered, and the faults with their processes, since the last
        call."""
        with self._lock:
            findings, faults = self._findings, self._faults
            self._findings, self._faults = [], []
        return findings, faults

    @property
    def slow(self) -> list[SlowDevice]:
        """The devices that are slow now."""
        with self._lock:
            return self._detector.current

    def close(self) -> None:
        self._lines.close()

    def _write(self, step: int) -> None:
        samples, self._samples = self._samples, {}
        quantities = _mean_and_extremes({process: sample["of"] for process, sample in samples.items()})
        self.latest = quantities
        self._lines.write({
            "kind": "resources", "step": step, "time": clock.now(), "processes": len(samples), "of": quantities,
        })  # fmt: skip
        self._findings += self._detector.see_clocks(
            _by_device(samples, "gpu_clock_mhz"),
            _by_device(samples, "gpu_utilisation"),
            {
                (process, int(index)): reasons
                for process, sample in samples.items()
                for index, reasons in sample["throttled"].items()
            },
        )


def _mean_and_extremes(samples: dict[int, dict[str, list[float]]]) -> dict[str, Any]:
    """Returns the mean of each quantity over all devices or processes, and the minimum and maximum with their
    processes."""
    summaries = {}
    for name in sorted({name for sample in samples.values() for name in sample}):
        readings = [(value, process) for process, sample in sorted(samples.items()) for value in sample.get(name, [])]
        minimum = min(readings)
        maximum = max(readings, key=lambda reading: reading[0])
        mean = statistics.fmean(value for value, _ in readings)
        summaries[name] = {"mean": float(f"{mean:.6g}"), "min": list(minimum), "max": list(maximum)}
    return summaries


def _by_device(samples: dict[int, Sample], name: str) -> dict[Device, float]:
    """Returns the value of a quantity for each device."""
    return {
        (process, index): value
        for process, sample in samples.items()
        for index, value in enumerate(sample["of"].get(name, []))
    }


def _checked(sample: Any) -> Sample:
    """Returns a sample whose entries have the right types. Raises an exception if it is malformed."""
    quantities = {str(name): [float(value) for value in values] for name, values in sample["of"].items() if values}
    throttled = {str(int(index)): [str(reason) for reason in reasons] for index, reasons in sample["throttled"].items()}
    return {"of": quantities, "throttled": throttled, "faults": [str(fault)[:200] for fault in sample["faults"]]}
