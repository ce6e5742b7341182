"""The state of this host's GPUs as NVML tells it. Where NVML cannot be had, there is nothing."""

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxmnt.distributed.local_gpus import visible_gpus
from jaxmnt.telemetry.nvml import GpuReader, NvmlError

_REASONS = {
    "nvmlClocksEventReasonHwSlowdown": "slowdown",
    "nvmlClocksEventReasonHwThermalSlowdown": "heat",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": "power brake",
}
_XIDS_OF_HARDWARE = {48, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140}
"""Memory, NVLink, the bus, and the GPU's own processor: https://docs.nvidia.com/deploy/xid-errors/"""
_SECONDS = 30.0
_SHARED = "nvidia-cuda-mps-server"
"""Through which several processes share a GPU."""


@dataclass(frozen=True)
class Gpu:
    """One GPU of this process. What it does not support counts as 0."""

    index: str
    celsius: int
    uncorrected_errors: int
    """Of memory, since the driver was loaded."""
    throttled: list[str]
    """Why the hardware keeps its clocks down: slowdown, heat, power brake."""


def gpu_facts(nvml: Any = None) -> dict[str, Any]:
    """Reads the GPUs before this process computes on them; `nvml` is the module of the bindings.

    Returns `gpus`, those that this process can see; `strangers`, processes of others that compute on these
    (`pid name`); `links`, how many NVLinks of each GPU of the host are active, for GPUs that have any.
    """
    try:
        reader = GpuReader(None, nvml, _REASONS)
    except NvmlError:
        return {"gpus": [], "strangers": [], "links": {}}
    visible = visible_gpus(os.environ, len(reader.uuids))
    gpus, strangers = [], set()
    for number, (uuid, state, errors, processes) in enumerate(
        zip(reader.uuids, reader.read(), reader.uncorrected_errors(), reader.processes(), strict=True)
    ):
        if str(number) in visible or any(str(uuid).startswith(name) for name in visible):
            gpus.append(vars(Gpu(str(number), state.celsius or 0, errors, state.throttled)))
            strangers |= {f"{pid} {name}" for pid, name in processes if not name.endswith(_SHARED) and not _ours(pid)}
    links = {f"GPU {number}": active for number, active in enumerate(reader.active_links()) if active}
    reader.close()
    return {"gpus": gpus, "strangers": sorted(strangers), "links": links}


def xids() -> list[str]:
    """Errors of GPUs that the driver has reported to the kernel's log since it was started, where we may read it."""
    try:
        done = subprocess.run(["dmesg"], capture_output=True, text=True, errors="replace", timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_xids(done.stdout) if done.returncode == 0 else []


def parse_xids(text: str) -> list[str]:
    """The last Xid of each kind that points at hardware, by GPU: `0000:3b:00: Xid 79`."""
    found = re.findall(r"NVRM: Xid \(PCI:([0-9a-f:.]+)\): (\d+)", text)
    return sorted({f"{gpu}: Xid {number}" for gpu, number in found if int(number) in _XIDS_OF_HARDWARE})


def _ours(pid: int) -> bool:
    """Whether it is another process of this preflight."""
    try:
        return b"jaxmnt.preflight" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # of another container, or gone
        return False
