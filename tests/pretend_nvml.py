"""A pretend NVML: `pynvml` without a driver."""

from types import SimpleNamespace

import pynvml


class PretendNvml:
    """Answers like `pynvml` for GPUs whose state tests set."""

    NVMLError = pynvml.NVMLError

    def __init__(self, gpus: int):
        self.gpus = [
            SimpleNamespace(
                clock=1980, load=97, milliwatts=650_000, celsius=61, reasons=0, ecc=3, uuid=f"GPU-{n}",
                links=[], processes={},
            )
            for n in range(gpus)
        ]  # fmt: skip
        self.xids: list[tuple[int, int]] = []
        self.supported = True
        self.readings = 0

    def __getattr__(self, name: str):
        return getattr(pynvml, name)  # constants; the real functions would need a driver

    def nvmlInit(self): ...

    def nvmlShutdown(self): ...

    def nvmlDeviceGetCount(self):
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, number):
        if number >= len(self.gpus):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self.gpus[number]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return next(gpu for gpu in self.gpus if gpu.uuid == uuid)

    def nvmlDeviceGetUUID(self, gpu):
        return gpu.uuid

    def nvmlDeviceGetClockInfo(self, gpu, which):
        self.readings += 1
        assert which == pynvml.NVML_CLOCK_SM
        return gpu.clock

    def nvmlDeviceGetUtilizationRates(self, gpu):
        return SimpleNamespace(gpu=gpu.load)

    def nvmlDeviceGetPowerUsage(self, gpu):
        return gpu.milliwatts

    def nvmlDeviceGetTemperature(self, gpu, sensor):
        return gpu.celsius

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu):
        return gpu.reasons

    def nvmlDeviceGetTotalEccErrors(self, gpu, kind, counter):
        if not self.supported:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return gpu.ecc

    def nvmlDeviceGetNvLinkState(self, gpu, link):
        if link >= len(gpu.links):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return gpu.links[link]

    def nvmlDeviceGetComputeRunningProcesses(self, gpu):
        return [SimpleNamespace(pid=pid) for pid in gpu.processes]

    def nvmlSystemGetProcessName(self, pid):
        return next(gpu.processes[pid] for gpu in self.gpus if pid in gpu.processes)

    def nvmlEventSetCreate(self):
        return object()

    def nvmlDeviceRegisterEvents(self, gpu, kinds, events): ...

    def nvmlEventSetWait_v2(self, events, milliseconds):
        if not self.xids:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        place, xid = self.xids.pop(0)
        return SimpleNamespace(device=self.gpus[place], eventData=xid)
