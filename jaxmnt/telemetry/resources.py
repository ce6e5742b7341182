"""What a run takes of its hosts and devices: memory, GPUs, network. Each process reads its own every now and then, in a
thread; process 0 writes a line for all into resources.jsonl.

A line has the mean, the least and the most of each quantity, with the process that has it, whatever their number.
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
"""`of`: values of each quantity; `throttled`: why GPUs are, by their place; `faults`: what has gone wrong."""

_FIRST_SECONDS = 1.0
"""After which a process reads for the first time."""
_MOST_FAULTS = 32
"""That wait to be told."""
_QUANTITIES_OF_GPUS = ("clock_mhz", "utilisation", "watts", "celsius")


class ResourceSampler:
    """Reads what this process takes of its host, every `seconds`, in a thread. `take` has what is new."""

    def __init__(
        self, devices: Sequence[jax.Device], seconds: float, gpus: Callable[[], GpuReader | None] = lambda: None
    ):
        """`gpus` opens the reader of this process's GPUs, in the thread; None if there are none."""
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
        """The newest reading, if nobody has had it. From any thread."""
        with self._lock:
            newest, self._newest = self._newest, None
        return newest

    # In the thread.

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
                remark(f"note: what the run takes of its host cannot be read any more: {summary(error)}")
                return
            with self._lock:
                missed = [] if self._newest is None else self._newest["faults"]
                self._newest = sample | {"faults": [*missed, *sample["faults"]][-_MOST_FAULTS:]}

    def read(self) -> Sample:
        """One reading."""
        of: dict[str, list[float]] = {name: [value] for name, value in kernel_counters.host_memory().items()}
        statistics_of = [device.memory_stats() or {} for device in self._devices]
        for name, field in (("device_bytes", "bytes_in_use"), ("device_peak_bytes", "peak_bytes_in_use")):
            of[name] = [told[field] for told in statistics_of if field in told]
        throttled: dict[str, list[str]] = {}
        faults: list[str] = []
        if self._gpus is not None:
            states = self._gpus.read()
            for name in _QUANTITIES_OF_GPUS:
                values = [getattr(state, name) for state in states]
                of[f"gpu_{name}"] = [] if None in values else values
            throttled = {str(place): state.throttled for place, state in enumerate(states) if state.throttled}
            faults = [f"GPU {place}: {what}" for place, what in self._gpus.faults()]
        faults += self._network(of)
        return {"of": {name: values for name, values in of.items() if values}, "throttled": throttled, "faults": faults}

    def _network(self, of: dict[str, list[float]]) -> list[str]:
        """Adds rates since the reading before; returns new errors in words."""
        now, counted = time.monotonic(), [kernel_counters.ethernet(), kernel_counters.infiniband()]
        before, self._before = self._before, (now, counted)
        if before is None:
            return []
        seconds, faults = now - before[0], []
        for kind, old, new in zip(("network", "infiniband"), before[1], counted, strict=True):
            for which in ("sent", "received"):
                bytes_now, bytes_then = getattr(new, which), getattr(old, which)
                both = [name for name in bytes_now if name in bytes_then]
                if both:
                    sent = sum(max(0, bytes_now[name] - bytes_then[name]) for name in both)
                    of[f"{kind}_{which}_per_second"] = [sent / seconds]
            for name, errors in new.errors.items():
                more = {counter: n - old.errors.get(name, {}).get(counter, n) for counter, n in errors.items()}
                faults += [f"{name}: {n} more {counter}" for counter, n in more.items() if n > 0]
        return faults


def reader_of_gpus(devices: Sequence[jax.Device]) -> Callable[[], GpuReader | None]:
    """Opens the GPUs that these devices of this process are."""
    if not devices or devices[0].platform != "gpu":
        return lambda: None
    visible = visible_gpus(os.environ, gpus_here())
    places = [getattr(device, "local_hardware_id", None) for device in devices]
    names = [visible[place] for place in places if place is not None and place < len(visible)]
    return lambda: GpuReader(names)


class ResourceLog:
    """Process 0's account of what all processes take. From any thread."""

    def __init__(self, run_dir: Path, processes: int):
        self._lines = LineWriter(run_dir / RESOURCES)
        self._processes = processes
        self._samples: dict[int, Sample] = {}
        self._detector = SlowDeviceDetector()
        self._findings: list[SlowDevice] = []
        self._faults: list[tuple[int, str]] = []
        self.latest: dict[str, Any] = {}
        """The quantities of the newest line. For other threads to read."""
        self._lock = threading.Lock()

    def heard(self, process: int, sample: Sample, step: int) -> None:
        """A reading of one process. The line is written when all have come, or when one comes for the second time.

        Raises an error if it makes no sense.
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
        """Devices that began to be slow or no longer are, and faults by process, since this was last called."""
        with self._lock:
            found, faults = self._findings, self._faults
            self._findings, self._faults = [], []
        return found, faults

    @property
    def slow(self) -> list[SlowDevice]:
        with self._lock:
            return self._detector.known

    def close(self) -> None:
        self._lines.close()

    def _write(self, step: int) -> None:
        samples, self._samples = self._samples, {}
        of = _summed_up({process: sample["of"] for process, sample in samples.items()})
        self.latest = of
        self._lines.write({"kind": "resources", "step": step, "time": clock.now(), "processes": len(samples), "of": of})
        self._findings += self._detector.see_clocks(
            _by_device(samples, "gpu_clock_mhz"),
            _by_device(samples, "gpu_utilisation"),
            {
                (process, int(place)): why
                for process, sample in samples.items()
                for place, why in sample["throttled"].items()
            },
        )


def _summed_up(samples: dict[int, dict[str, list[float]]]) -> dict[str, Any]:
    """Of each quantity the mean over all devices or processes, and the extremes with their process."""
    found = {}
    for name in sorted({name for sample in samples.values() for name in sample}):
        values = [(value, process) for process, sample in sorted(samples.items()) for value in sample.get(name, [])]
        least, most = min(values), max(values, key=lambda one: one[0])
        mean = statistics.fmean(value for value, _ in values)
        found[name] = {"mean": float(f"{mean:.6g}"), "min": list(least), "max": list(most)}
    return found


def _by_device(samples: dict[int, Sample], name: str) -> dict[Device, float]:
    return {
        (process, place): value
        for process, sample in samples.items()
        for place, value in enumerate(sample["of"].get(name, []))
    }


def _checked(sample: Any) -> Sample:
    of = {str(name): [float(value) for value in values] for name, values in sample["of"].items() if values}
    throttled = {str(int(place)): [str(one) for one in why] for place, why in sample["throttled"].items()}
    return {"of": of, "throttled": throttled, "faults": [str(fault)[:200] for fault in sample["faults"]]}
