"""Reads the state of a host's GPUs from NVML, with NVIDIA's own bindings (the package nvidia-ml-py)."""

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
"""Reasons for abnormal throttling of a busy GPU's clocks, by the names of NVML's constants. The power limit is not
among them, since every busy GPU reaches it."""


@dataclass(frozen=True)
class GpuState:
    """The state of one GPU. A field is None if the GPU does not support it."""

    clock_mhz: int | None
    """Clock of the multiprocessors, in MHz."""
    utilisation: int | None
    """Percentage of the time during which a kernel was running."""
    watts: float | None
    celsius: int | None
    throttled: list[str]
    """The reasons why the hardware or its driver throttles the clocks."""


class GpuReader:
    """Reads GPUs of this host. Not thread-safe."""

    def __init__(self, names: Sequence[str] | None, nvml: Any = None, reasons: Mapping[str, str] = BAD_REASONS):
        """Opens the GPUs with the given names, which are indices or UUIDs as in CUDA_VISIBLE_DEVICES; None opens all
        GPUs.

        `nvml` is the module of the bindings, and `reasons` describes NVML's reasons for throttling. Raises `NvmlError`
        if NVML is not available.
        """
        try:
            self._nvml = nvml = nvml or import_module("pynvml")  # imported late, as only GPUs need it
        except ImportError as error:
            raise NvmlError("the package nvidia-ml-py is not installed") from error
        self._masks = {getattr(nvml, name): reason for name, reason in reasons.items() if hasattr(nvml, name)}
        try:
            nvml.nvmlInit()
            if names is None:
                names = [str(number) for number in range(nvml.nvmlDeviceGetCount())]
            self._handles = [self._handle(name) for name in names]
        except nvml.NVMLError as error:
            raise NvmlError(str(error)) from error
        self.uuids = [self._ask(nvml.nvmlDeviceGetUUID, handle) for handle in self._handles]
        self._xids = self._ask(self._subscribe_to_xids)
        self._ecc = self.uncorrected_errors()

    def read(self) -> list[GpuState]:
        """Reads the GPUs one after the other, in the order of the names."""
        return [self._state(handle) for handle in self._handles]

    def uncorrected_errors(self) -> list[int]:
        """Returns the number of each GPU's uncorrected memory errors since the driver was loaded; 0 without ECC."""
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
        """Returns the PIDs and names of the processes that compute on each GPU. A container may not see them."""
        nvml, ask = self._nvml, self._ask
        pids = [
            [process.pid for process in ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []]
            for handle in self._handles
        ]
        name_of = lambda pid: str(ask(nvml.nvmlSystemGetProcessName, pid) or "[Not Found]")
        return [[(pid, name_of(pid)) for pid in pids_of_gpu] for pids_of_gpu in pids]

    def faults(self) -> list[tuple[int, str]]:
        """Returns the faults since the last call, each as the index of the GPU among the names and a description."""
        faults = []
        for index, errors in enumerate(self.uncorrected_errors()):
            if errors > self._ecc[index]:
                faults.append((index, f"{errors - self._ecc[index]} uncorrected memory errors (ECC)"))
                self._ecc[index] = errors
        while self._xids is not None and (xid := self._next_xid()) is not None:
            faults.append(xid)
        return faults

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
            [reason for mask, reason in self._masks.items() if reasons & mask],
        )

    def _subscribe_to_xids(self) -> Any:
        """Subscribes to Xid errors. Returns NVML's event set."""
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
        index = self.uuids.index(uuid) if uuid in self.uuids else 0
        return index, f"Xid {event.eventData}"

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function of NVML. Returns None if this GPU, its driver or our permissions do not support it."""
        try:
            return function(*arguments)
        except self._nvml.NVMLError:
            return None


class NvmlError(Exception):
    """Raised if NVML is not available."""
