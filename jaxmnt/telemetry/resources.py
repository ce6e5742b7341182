"""Resource use of a run on its hosts and devices: memory, GPUs, network. Each process samples its own periodically in a
thread; process 0 writes one line for all into resources.jsonl.

A line has the mean, minimum and maximum of each quantity, the latter two with their process. So its length does not
depend on the number of processes.
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
"""`of`: values of each quantity; `throttled`: reasons by index of the GPU; `faults`: descriptions of faults."""

_FIRST_SECONDS = 1.0
"""Seconds before a process takes its first sample."""
_MOST_FAULTS = 32
"""Limit of faults that wait to be reported."""
_QUANTITIES_OF_GPUS = ("clock_mhz", "utilisation", "watts", "celsius")


class ResourceSampler:
    """Samples this process's resource use every `seconds`, in a thread. `take` returns the newest sample."""

    def __init__(
        self, devices: Sequence[jax.Device], seconds: float, gpus: Callable[[], GpuReader | None] = lambda: None
    ):
        """`gpus` opens the reader of this process's GPUs; it is called in the thread. It returns None without GPUs."""
        self._devices, self._seconds, self._open_gpus = list(devices), seconds, gpus
        self._gpus: GpuReader | None = None
        self._before: tuple[float, list[Traffic]] | None = None
        self._newest: Sample | None = None
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work, name="resources", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._end.set()

    def take(self) -> Sample | None:
        """Returns the newest sample, or None if it was taken already. From any thread."""
        with self._lock:
            newest, self._newest = self._newest, None
        return newest

    # The methods below run in the thread.

    def _work(self) -> None:
        try:
            self._gpus = self._open_gpus()
        except Exception as error:  # whatever the bindings raise
            remark(f"note: clocks, power and faults of GPUs are not watched: {error}")
        pause = min(_FIRST_SECONDS, self._seconds)
        while not self._end.wait(pause):
            pause = self._seconds
            try:
                sample = self.read()
            except Exception as error:  # telemetry ends no run
                remark(f"note: resource use cannot be sampled any more: {summary(error)}")
                return
            with self._lock:
                missed = [] if self._newest is None else self._newest["faults"]
                self._newest = sample | {"faults": [*missed, *sample["faults"]][-_MOST_FAULTS:]}

    def read(self) -> Sample:
        """Takes one sample."""
        of: dict[str, list[float]] = {name: [value] for name, value in kernel_counters.host_memory().items()}
        all_stats = [device.memory_stats() or {} for device in self._devices]
        for name, field in (("device_bytes", "bytes_in_use"), ("device_peak_bytes", "peak_bytes_in_use")):
            of[name] = [stats[field] for stats in all_stats if field in stats]

        throttled: dict[str, list[str]] = {}
        faults: list[str] = []
        if self._gpus is not None:
            states = self._gpus.read()
            for name in _QUANTITIES_OF_GPUS:
                values = [getattr(state, name) for state in states]
                of[f"gpu_{name}"] = [] if None in values else values
            throttled = {str(index): state.throttled for index, state in enumerate(states) if state.throttled}
            faults = [f"GPU {index}: {fault}" for index, fault in self._gpus.faults()]

        faults += self._network(of)
        return {"of": {name: values for name, values in of.items() if values}, "throttled": throttled, "faults": faults}

    def _network(self, of: dict[str, list[float]]) -> list[str]:
        """Adds the network rates since the previous sample to `of`. Returns descriptions of new errors."""
        now = time.monotonic()
        traffic = [kernel_counters.ethernet(), kernel_counters.infiniband()]
        before, self._before = self._before, (now, traffic)
        if before is None:
            return []
        seconds, faults = now - before[0], []
        for kind, old, new in zip(("network", "infiniband"), before[1], traffic, strict=True):
            for which in ("sent", "received"):
                bytes_now, bytes_then = getattr(new, which), getattr(old, which)
                # Interfaces may come and go between samples.
                both = [name for name in bytes_now if name in bytes_then]
                if both:
                    moved = sum(max(0, bytes_now[name] - bytes_then[name]) for name in both)
                    of[f"{kind}_{which}_per_second"] = [moved / seconds]
            for name, errors in new.errors.items():
                more = {counter: n - old.errors.get(name, {}).get(counter, n) for counter, n in errors.items()}
                faults += [f"{name}: {n} more {counter}" for counter, n in more.items() if n > 0]
        return faults


def reader_of_gpus(devices: Sequence[jax.Device]) -> Callable[[], GpuReader | None]:
    """Returns a function that opens the GPUs of these devices of this process."""
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
        """Quantities of the newest line. Other threads read it."""
        self._lock = threading.Lock()

    def add(self, process: int, sample: Sample, step: int) -> None:
        """Adds a sample of one process. The line is written when all processes have one, or when one has a second.

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
        """Returns devices that became slow or recovered, and faults with their process, since the last call."""
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
        of = _summary({process: sample["of"] for process, sample in samples.items()})
        self.latest = of
        self._lines.write({"kind": "resources", "step": step, "time": clock.now(), "processes": len(samples), "of": of})
        self._findings += self._detector.see_clocks(
            _by_device(samples, "gpu_clock_mhz"),
            _by_device(samples, "gpu_utilisation"),
            {
                (process, int(index)): reasons
                for process, sample in samples.items()
                for index, reasons in sample["throttled"].items()
            },
        )


def _summary(samples: dict[int, dict[str, list[float]]]) -> dict[str, Any]:
    """Returns the mean of each quantity over all devices or processes, and the extremes with their process."""
    summaries = {}
    for name in sorted({name for sample in samples.values() for name in sample}):
        readings = [(value, process) for process, sample in sorted(samples.items()) for value in sample.get(name, [])]
        least = min(readings)
        most = max(readings, key=lambda reading: reading[0])
        mean = statistics.fmean(value for value, _ in readings)
        summaries[name] = {"mean": float(f"{mean:.6g}"), "min": list(least), "max": list(most)}
    return summaries


def _by_device(samples: dict[int, Sample], name: str) -> dict[Device, float]:
    """Returns a quantity of each device."""
    return {
        (process, index): value
        for process, sample in samples.items()
        for index, value in enumerate(sample["of"].get(name, []))
    }


def _checked(sample: Any) -> Sample:
    """Returns a sample whose entries have the right types. Raises an exception if it is malformed."""
    of = {str(name): [float(value) for value in values] for name, values in sample["of"].items() if values}
    throttled = {str(int(index)): [str(reason) for reason in reasons] for index, reasons in sample["throttled"].items()}
    return {"of": of, "throttled": throttled, "faults": [str(fault)[:200] for fault in sample["faults"]]}
