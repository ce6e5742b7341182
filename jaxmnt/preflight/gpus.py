"""The state of this host's GPUs, from `nvidia-smi`, which reads NVML. Where there is none, there is nothing."""

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from jaxmnt.distributed.local_gpus import visible_gpus

_FIELDS = (
    "index", "name", "uuid", "memory.total", "memory.used", "temperature.gpu",
    "ecc.errors.uncorrected.volatile.total", "clocks_throttle_reasons.hw_slowdown",
    "clocks_throttle_reasons.hw_thermal_slowdown", "clocks_throttle_reasons.hw_power_brake_slowdown",
    "pcie.link.gen.current", "pcie.link.width.current",
)  # fmt: skip
_XIDS_OF_HARDWARE = {48, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140}
"""Memory, NVLink, the bus, and the GPU's own processor: https://docs.nvidia.com/deploy/xid-errors/"""
_SECONDS = 30.0
_SHARED = "nvidia-cuda-mps-server"
"""Through which several processes share a GPU."""


@dataclass(frozen=True)
class Gpu:
    """One GPU as NVML sees it."""

    index: str
    name: str
    uuid: str
    mebibytes: int
    used_mebibytes: int
    celsius: int
    uncorrected_errors: int
    """Of memory, since the driver was loaded."""
    throttled: list[str]
    """Why the hardware keeps its clocks down: slowdown, heat, power brake."""
    pcie: str


def gpus() -> list[Gpu]:
    """Those that this process can see."""
    found = parse_gpus(_smi(f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"))
    visible = visible_gpus(os.environ, len(found))
    return [gpu for gpu in found if gpu.index in visible or any(gpu.uuid.startswith(name) for name in visible)]


def parse_gpus(text: str) -> list[Gpu]:
    """From nvidia-smi's lines of the fields above. What a GPU does not support it calls [N/A], which counts as 0."""
    found = []
    for line in text.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) != len(_FIELDS):
            continue
        index, name, uuid, *numbers = values
        memory, used, celsius, errors = (int(value) if value.isdecimal() else 0 for value in numbers[:4])
        reasons = zip(("slowdown", "heat", "power brake"), numbers[4:7], strict=True)
        throttled = [reason for reason, state in reasons if state == "Active"]
        found.append(Gpu(index, name, uuid, memory, used, celsius, errors, throttled, f"gen{numbers[7]} x{numbers[8]}"))
    return found


def strangers() -> list[str]:
    """Processes of others that compute on this process's GPUs: `pid name`."""
    ours = {gpu.uuid for gpu in gpus()}
    found = []
    for line in _smi("--query-compute-apps=gpu_uuid,pid,process_name", "--format=csv,noheader").splitlines():
        uuid, pid, name = (part.strip() for part in [*line.split(",", 2), "", ""][:3])
        if uuid in ours and pid.isdecimal() and not name.endswith(_SHARED) and not _ours(int(pid)):
            found.append(f"{pid} {name}")
    return sorted(found)


def active_links() -> dict[str, int]:
    """How many NVLinks of each GPU are active, for GPUs that have any."""
    return {gpu: links for gpu, links in parse_links(_smi("nvlink", "--status")).items() if links}


def parse_links(text: str) -> dict[str, int]:
    """From `nvidia-smi nvlink --status`: lines `GPU 0: …`, each followed by `Link 0: 26.562 GB/s` or `<inactive>`."""
    found: dict[str, int] = {}
    gpu = ""
    for line in text.splitlines():
        if line.startswith("GPU "):
            gpu = line.partition(":")[0]
            found[gpu] = 0
        elif re.match(r"\s*Link \d+:", line) and "inactive" not in line.lower():
            found[gpu] = found.get(gpu, 0) + 1
    return found


def xids() -> list[str]:
    """Errors of GPUs that the driver has reported to the kernel's log since it was started, where we may read it."""
    return parse_xids(_said_by("dmesg"))


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


def _smi(*arguments: str) -> str:
    return _said_by("nvidia-smi", *arguments)


def _said_by(*command: str) -> str:
    """What a command prints; nothing where it is not there or fails, which for GPUs JAX reports in its own way."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
