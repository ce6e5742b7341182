"""Collects facts about the host and the GPUs of one process, so that they can be compared with those of the others."""

import os
import platform
import re
import shutil
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxmnt.distributed.container import cores, host_memory_bytes
from jaxmnt.distributed.coordination import gather
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
"""Facts by name, which can be sent as JSON. `quick_facts` and `thorough_facts` list the names."""

_SHM = Path("/dev/shm")  # noqa: S108 - only its size is read
_GPU_PLATFORMS = ("cuda", "gpu", "rocm")

_THROTTLE_REASONS = {
    "nvmlClocksEventReasonHwSlowdown": "slowdown",
    "nvmlClocksEventReasonHwThermalSlowdown": "heat",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": "power brake",
}
"""NVML's reasons for which the hardware lowers a GPU's clocks, and their names in a row."""
_HARDWARE_XIDS = {48, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140}
"""Numbers of the Xid errors that point to memory, NVLink, the bus, or the GPU's system processor. See
https://docs.nvidia.com/deploy/xid-errors/"""
_DMESG_TIMEOUT_SECONDS = 30.0
_MPS_SERVER = "nvidia-cuda-mps-server"
"""Program through which several processes share a GPU (CUDA MPS)."""


def quick_facts(clock: tuple[float, float]) -> Facts:
    """Returns the facts that are compared at each start of a run.

    `clock` holds a lower and an upper bound, in seconds, on how far this process's clock is ahead of process 0's.
    Raises `PreflightError` if there are no devices, or if there are only CPUs although JAX_PLATFORMS lists GPUs first.
    """
    host = socket.gethostname()
    devices = _local_devices(host)
    return {
        "host": host,
        "boot": machine_id(),
        "clock": clock,
        "devices": len(devices),
        "kind": devices[0].device_kind if devices else "none",
        "platform": devices[0].platform if devices else "none",
    }


def _local_devices(host: str) -> "list[jax.Device]":
    import jax

    platforms = os.environ.get("JAX_PLATFORMS", "")
    try:
        devices = jax.local_devices()
    except (RuntimeError, AssertionError) as error:  # JAX asserts that it has found at least one
        if is_connection_error(error):
            raise PeerError(f"another process is gone: {str(error).splitlines()[0]}") from error
        trouble = (str(error).splitlines() or [f"no platform of JAX_PLATFORMS={platforms} can be used"])[0]
        raise _no_devices_error(host, trouble) from error
    # JAX silently skips CUDA if the driver shows no GPU.
    if platforms.partition(",")[0] in _GPU_PLATFORMS and devices[0].platform != "gpu":
        raise _no_devices_error(host, f"JAX_PLATFORMS={platforms}, and JAX finds no GPU")
    return devices


def _no_devices_error(host: str, trouble: str) -> PreflightError:
    return PreflightError(f"{host}: {trouble}; look at nvidia-smi there, and at the lines above").blaming(hosts=[host])


def thorough_facts() -> Facts:
    """Returns the facts that only a preflight compares."""
    free = host_memory().get("host_available_bytes")
    return {
        "python": platform.python_version(),
        "environment": environment_digest(),
        "cores": cores(),
        "memory": {"all": 0 if free is None else host_memory_bytes(), "free": free or 0},
        "shm": shutil.disk_usage(_SHM).free if _SHM.exists() else 0,
        "image": os.environ.get("JAXMNT_IMAGE", ""),
        "nics": [vars(interface) for interface in network.read_interfaces()],
        "fabric": [vars(port) for port in network.fabric_ports()],
        "nccl": {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")},
        "xids": _kernel_xids(),
    } | gpu_facts()


def gather_facts(name: str, facts: Facts, identity: Identity) -> list[Facts] | None:
    """Sends the facts of this process to process 0, which gets the facts of all processes, in the order of the
    processes; the others get None."""
    all_facts = gather(name, facts, identity)
    return None if all_facts is None else _with_unique_hosts(all_facts)


def _with_unique_hosts(all_facts: list[Facts]) -> list[Facts]:
    """Returns the facts of all processes. If several machines have the same host name, the process number is appended
    to the name of all but the first."""
    machine_of: dict[str, str] = {}
    for process, facts in enumerate(all_facts):
        if machine_of.setdefault(facts["host"], facts["boot"]) != facts["boot"]:
            facts["host"] += f" (of process {process})"
    return all_facts


# Functions that read facts about this host's GPUs from NVML and the kernel.


def gpu_facts(nvml: Any = None) -> dict[str, Any]:
    """Reads facts about this host's GPUs. Call it before this process computes on them.

    `nvml` is the module of NVML's Python bindings. Returns three facts, which are empty if NVML is not available:

    - `gpus`: the GPUs that this process can see, with their temperature, the uncorrected errors of their memory since
      the driver was loaded, and the reasons for which the hardware throttles their clocks. Numbers that a GPU does not
      report are 0.
    - `strangers`: other programs that compute on these GPUs, each as `pid name`.
    - `links`: the number of active NVLinks of each GPU on the host that has any.
    """
    try:
        reader = GpuReader(None, nvml, _THROTTLE_REASONS)
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
            strangers |= {
                f"{pid} {name}"
                for pid, name in processes
                if not name.endswith(_MPS_SERVER) and not _belongs_to_preflight(pid)
            }
    links = {f"GPU {number}": active for number, active in enumerate(reader.active_links()) if active}
    reader.close()
    return {"gpus": gpus, "strangers": sorted(strangers), "links": links}


def _kernel_xids() -> list[str]:
    """Returns the hardware errors of GPUs in the kernel's log. The list is empty if the log cannot be read."""
    try:
        dmesg = subprocess.run(
            ["dmesg"], capture_output=True, text=True, errors="replace", timeout=_DMESG_TIMEOUT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_xids(dmesg.stdout) if dmesg.returncode == 0 else []


def parse_xids(text: str) -> list[str]:
    """Returns the Xids in a log that point to hardware, sorted, each once per GPU, such as `0000:3b:00: Xid 79`."""
    errors = re.findall(r"NVRM: Xid \(PCI:([0-9a-f:.]+)\): (\d+)", text)
    return sorted({f"{gpu}: Xid {number}" for gpu, number in errors if int(number) in _HARDWARE_XIDS})


def _belongs_to_preflight(pid: int) -> bool:
    """Returns True if a process belongs to this preflight."""
    try:
        return b"jaxmnt.preflight" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it runs in another container, or has ended
        return False
