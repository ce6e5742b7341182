"""What one process knows of its host and its GPUs, to be compared with what the others know of theirs."""

import os
import platform
import re
import shutil
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxmnt.distributed.container import cores, host_memory_bytes
from jaxmnt.distributed.coordination import all_gather
from jaxmnt.distributed.identity import Identity
from jaxmnt.distributed.local_gpus import visible_gpus
from jaxmnt.distributed.process_group import environment_digest, machine_id
from jaxmnt.distributed.termination import is_connection_error
from jaxmnt.errors import PeerError, PreflightError
from jaxmnt.preflight import network
from jaxmnt.telemetry.kernel_counters import host_memory
from jaxmnt.telemetry.nvml import GpuReader, NvmlError

if TYPE_CHECKING:
    import jax

Facts = dict[str, Any]
"""Plain data that can be sent as JSON; the keys are those of `quick_facts` and `thorough_facts`."""

_SHM = Path("/dev/shm")  # noqa: S108 - only its size is read
_GPUS = ("cuda", "gpu", "rocm")

_REASONS = {
    "nvmlClocksEventReasonHwSlowdown": "slowdown",
    "nvmlClocksEventReasonHwThermalSlowdown": "heat",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": "power brake",
}
_XIDS_OF_HARDWARE = {48, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140}
"""Memory, NVLink, the bus, and the GPU's own processor: https://docs.nvidia.com/deploy/xid-errors/"""
_DMESG_SECONDS = 30.0
_SHARED = "nvidia-cuda-mps-server"
"""Through which several processes share a GPU."""


def quick_facts(clock: tuple[float, float]) -> Facts:
    """What the start of each run looks at. `clock` is how far this one is ahead of process 0's: at least, at most.

    Raises `PreflightError` if there are no devices, or only CPUs where JAX_PLATFORMS wants GPUs first.
    """
    host = socket.gethostname()
    devices = _devices(host)
    return {
        "host": host,
        "boot": machine_id(),
        "clock": clock,
        "devices": len(devices),
        "kind": devices[0].device_kind if devices else "none",
        "platform": devices[0].platform if devices else "none",
    }


def _devices(host: str) -> "list[jax.Device]":
    import jax

    wanted = os.environ.get("JAX_PLATFORMS", "")
    try:
        devices = jax.local_devices()
    except (RuntimeError, AssertionError) as error:  # JAX asserts that it has found some
        if is_connection_error(error):
            raise PeerError(f"another process is gone: {str(error).splitlines()[0]}") from error
        trouble = (str(error).splitlines() or [f"nothing of JAX_PLATFORMS={wanted} can be used"])[0]
        raise _no_devices(host, trouble) from error
    # JAX passes over CUDA without a word where the driver shows no GPU.
    if wanted.partition(",")[0] in _GPUS and devices[0].platform != "gpu":
        raise _no_devices(host, f"JAX_PLATFORMS={wanted}, and JAX finds no GPU")
    return devices


def _no_devices(host: str, trouble: str) -> PreflightError:
    return PreflightError(f"{host}: {trouble}; look at nvidia-smi there, and at the lines above").blaming(hosts=[host])


def thorough_facts() -> Facts:
    """What only the command looks at."""
    free = host_memory().get("host_available_bytes")
    return {
        "python": platform.python_version(),
        "environment": environment_digest(),
        "cores": cores(),
        "memory": {"all": 0 if free is None else host_memory_bytes(), "free": free or 0},
        "shm": shutil.disk_usage(_SHM).free if _SHM.exists() else 0,
        "image": os.environ.get("JAXMNT_IMAGE", ""),
        "nics": [vars(card) for card in network.cards()],
        "fabric": [vars(port) for port in network.fabric_ports()],
        "nccl": {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")},
        "xids": _xids(),
    } | gpu_facts()


def exchange_facts(name: str, facts: Facts, identity: Identity) -> list[Facts]:
    """The facts of all processes, in order, in each of them, with the number of a process in the name of a host that
    another machine has as well."""
    all_facts: list[Facts] = all_gather(name, facts, identity)
    first: dict[str, str] = {}
    for process, facts in enumerate(all_facts):
        if first.setdefault(facts["host"], facts["boot"]) != facts["boot"]:
            facts["host"] += f" (of process {process})"
    return all_facts


# The GPUs of this host as NVML and the kernel tell of them. Where NVML cannot be had, there is nothing.


def gpu_facts(nvml: Any = None) -> dict[str, Any]:
    """Reads the GPUs before this process computes on them; `nvml` is the module of the bindings.

    Returns `gpus`, those that this process can see, with their memory's uncorrected errors since the driver was loaded
    and why the hardware keeps their clocks down, where what a GPU does not support counts as 0; `strangers`, processes
    of others that compute on these (`pid name`); `links`, how many NVLinks of each GPU of the host are active, for GPUs
    that have any.
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
            gpus.append({
                "index": str(number),
                "celsius": state.celsius or 0,
                "uncorrected_errors": errors,
                "throttled": state.throttled,
            })  # fmt: skip
            strangers |= {f"{pid} {name}" for pid, name in processes if not name.endswith(_SHARED) and not _ours(pid)}
    links = {f"GPU {number}": active for number, active in enumerate(reader.active_links()) if active}
    reader.close()
    return {"gpus": gpus, "strangers": sorted(strangers), "links": links}


def _xids() -> list[str]:
    """Errors of GPUs that the driver has reported to the kernel's log since it was started, where we may read it."""
    try:
        done = subprocess.run(["dmesg"], capture_output=True, text=True, errors="replace", timeout=_DMESG_SECONDS)
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
