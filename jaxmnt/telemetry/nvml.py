"""The GPUs of a host as NVML sees them, by NVIDIA's own bindings (the package nvidia-ml-py)."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

BAD_REASONS = {
    "nvmlClocksEventReasonHwSlowdown": "slowed down by the hardware",
    "nvmlClocksEventReasonHwThermalSlowdown": "too hot (hardware)",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": "power brake",
    "nvmlClocksEventReasonSwThermalSlowdown": "too hot (driver)",
}
"""Why a GPU's clocks are kept down though it has work, by NVML's constants. Its power limit is none of these: GPUs at
work reach it."""


@dataclass(frozen=True)
class GpuState:
    """What NVML tells at one moment; None where this GPU does not support it."""

    clock_mhz: int | None
    """Of the multiprocessors."""
    utilisation: int | None
    """Percent of the time in which a kernel ran."""
    watts: float | None
    celsius: int | None
    throttled: list[str]
    """Why the hardware or its driver keeps the clocks down."""


class GpuReader:
    """Reads GPUs of this host. Not for several threads."""

    def __init__(self, names: Sequence[str] | None, nvml: Any = None, reasons: Mapping[str, str] = BAD_REASONS):
        """Opens the GPUs of these names: numbers, or UUIDs as CUDA_VISIBLE_DEVICES has them; None opens all.

        `nvml` is the module of the bindings, `reasons` words why clocks are kept down. Raises `NvmlError` if NVML
        cannot be had.
        """
        try:
            self._nvml = nvml = nvml or import_module("pynvml")  # only of use with a GPU
        except ImportError as error:
            raise NvmlError("the package nvidia-ml-py is not installed") from error
        self._masks = {getattr(nvml, name): what for name, what in reasons.items() if hasattr(nvml, name)}
        try:
            nvml.nvmlInit()
            if names is None:
                names = [str(number) for number in range(nvml.nvmlDeviceGetCount())]
            self._handles = [self._handle(name) for name in names]
        except nvml.NVMLError as error:
            raise NvmlError(str(error)) from error
        self.uuids = [self._ask(nvml.nvmlDeviceGetUUID, handle) for handle in self._handles]
        self._xids = self._ask(self._register)
        self._ecc = self.uncorrected_errors()

    def read(self) -> list[GpuState]:
        """Reads the GPUs one after the other, in the order of the names."""
        return [self._state(handle) for handle in self._handles]

    def uncorrected_errors(self) -> list[int]:
        """Returns each GPU's memory errors that could not be corrected, since the driver was loaded; 0 without ECC."""
        nvml = self._nvml
        kind = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        return [self._ask(nvml.nvmlDeviceGetTotalEccErrors, handle, *kind) or 0 for handle in self._handles]

    def active_links(self) -> list[int]:
        """Returns how many NVLinks of each GPU are active."""
        nvml, links = self._nvml, range(self._nvml.NVML_NVLINK_MAX_LINKS)
        return [
            sum(self._ask(nvml.nvmlDeviceGetNvLinkState, handle, link) == nvml.NVML_FEATURE_ENABLED for link in links)
            for handle in self._handles
        ]

    def processes(self) -> list[list[tuple[int, str]]]:
        """Returns the processes that compute on each GPU: their numbers and names, which a container may not see."""
        nvml, ask = self._nvml, self._ask
        pids = [
            [process.pid for process in ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []]
            for handle in self._handles
        ]
        return [[(pid, str(ask(nvml.nvmlSystemGetProcessName, pid) or "[Not Found]")) for pid in of] for of in pids]

    def faults(self) -> list[tuple[int, str]]:
        """What has gone wrong since this was last called: the place of a GPU among the names, and what."""
        found = []
        for place, errors in enumerate(self.uncorrected_errors()):
            if errors > self._ecc[place]:
                found.append((place, f"{errors - self._ecc[place]} uncorrected memory errors (ECC)"))
                self._ecc[place] = errors
        while self._xids is not None and (xid := self._next_xid()) is not None:
            found.append(xid)
        return found

    def close(self) -> None:
        self._nvml.nvmlShutdown()

    def _handle(self, name: str) -> Any:
        if re.fullmatch("[0-9]+", name):
            return self._nvml.nvmlDeviceGetHandleByIndex(int(name))
        return self._nvml.nvmlDeviceGetHandleByUUID(name)

    def _state(self, handle: Any) -> GpuState:
        nvml, ask = self._nvml, self._ask
        clock = ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)
        rates = ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        milliwatts = ask(nvml.nvmlDeviceGetPowerUsage, handle)
        celsius = ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
        reasons = ask(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle) or 0
        return GpuState(
            clock,
            rates and rates.gpu,
            None if milliwatts is None else milliwatts / 1e3,
            celsius,
            [what for mask, what in self._masks.items() if reasons & mask],
        )

    def _register(self) -> Any:
        """Lets NVML report Xid errors as events."""
        nvml = self._nvml
        events = nvml.nvmlEventSetCreate()
        for handle in self._handles:
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
        return events

    def _next_xid(self) -> tuple[int, str] | None:
        event = self._ask(self._nvml.nvmlEventSetWait_v2, self._xids, 0)
        if event is None:
            return None
        uuid = self._ask(self._nvml.nvmlDeviceGetUUID, event.device)
        place = self.uuids.index(uuid) if uuid in self.uuids else 0
        return place, f"Xid {event.eventData}"

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        """Returns the answer, or None for what this GPU, its driver or its rights do not support."""
        try:
            return question(*arguments)
        except self._nvml.NVMLError:
            return None


class NvmlError(Exception):
    """NVML cannot be had."""
