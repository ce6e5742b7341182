"""The GPUs of this process as NVML sees them, by NVIDIA's own bindings (the package nvidia-ml-py)."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    """Reads the GPUs by these names: numbers, or UUIDs as CUDA_VISIBLE_DEVICES has them. Not for several threads."""

    def __init__(self, names: Sequence[str], nvml: Any = None):
        """`nvml` is the module of the bindings. Raises `NvmlError` if NVML cannot be had."""
        self._nvml = nvml = nvml or _bindings()
        self._masks = {getattr(nvml, name): what for name, what in BAD_REASONS.items() if hasattr(nvml, name)}
        try:
            nvml.nvmlInit()
            self._handles = [self._handle(name) for name in names]
        except nvml.NVMLError as error:
            raise NvmlError(str(error)) from error
        self._uuids = [self._uuid(handle) for handle in self._handles]
        self._xids = self._register()
        self._ecc = [self._uncorrected(handle) or 0 for handle in self._handles]

    def read(self) -> list[GpuState]:
        """One after the other, in the order of the names."""
        return [self._state(handle) for handle in self._handles]

    def faults(self) -> list[tuple[int, str]]:
        """What has gone wrong since this was last called: the place of a GPU among the names, and what."""
        found = []
        for place, handle in enumerate(self._handles):
            errors = self._uncorrected(handle)
            if errors is not None and errors > self._ecc[place]:
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

    def _uuid(self, handle: Any) -> Any:
        return self._ask(lambda: self._nvml.nvmlDeviceGetUUID(handle))

    def _state(self, handle: Any) -> GpuState:
        nvml, ask = self._nvml, self._ask
        clock = ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        utilisation = ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        milliwatts = ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        celsius = ask(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        reasons = ask(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)) or 0
        throttled = [what for mask, what in self._masks.items() if reasons & mask]
        return GpuState(clock, utilisation, None if milliwatts is None else milliwatts / 1e3, celsius, throttled)

    def _uncorrected(self, handle: Any) -> int | None:
        """Memory errors that could not be corrected, since the driver was loaded."""
        nvml = self._nvml
        count: int | None = self._ask(
            lambda: nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            )
        )
        return count

    def _register(self) -> Any:
        """Xid errors are told as events; None where that is not permitted."""
        nvml = self._nvml

        def register() -> Any:
            events = nvml.nvmlEventSetCreate()
            for handle in self._handles:
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
            return events

        return self._ask(register)

    def _next_xid(self) -> tuple[int, str] | None:
        nvml = self._nvml
        event = self._ask(lambda: nvml.nvmlEventSetWait_v2(self._xids, 0))
        if event is None:
            return None
        uuid = self._uuid(event.device)
        place = self._uuids.index(uuid) if uuid in self._uuids else 0
        return place, f"Xid {event.eventData}"

    def _ask(self, question: Callable[[], Any]) -> Any:
        """None for what this GPU, its driver or its rights do not support."""
        try:
            return question()
        except self._nvml.NVMLError:
            return None


def _bindings() -> Any:
    try:
        import pynvml  # only of use with a GPU
    except ImportError as error:
        raise NvmlError("the package nvidia-ml-py is not installed") from error
    return pynvml


class NvmlError(Exception):
    """NVML cannot be had."""
