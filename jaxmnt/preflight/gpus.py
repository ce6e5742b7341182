"""The state of this host's GPUs, from `nvidia-smi`, which reads NVML. Where there is none, there is nothing."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

_FIELDS = (
    "index", "name", "uuid", "memory.total", "memory.used", "temperature.gpu",
    "ecc.errors.uncorrected.volatile.total", "clocks_throttle_reasons.hw_slowdown",
    "clocks_throttle_reasons.hw_thermal_slowdown", "clocks_throttle_reasons.hw_power_brake_slowdown",
    "pcie.link.gen.current", "pcie.link.width.current",
)  # fmt: skip
_SECONDS = 30.0


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
    return parse_gpus(_smi(f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"))


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
    """Processes of others that compute on this host's GPUs: `pid name`, without this one's own."""
    found = []
    for line in _smi("--query-compute-apps=pid,process_name", "--format=csv,noheader").splitlines():
        pid, _, name = (part.strip() for part in line.partition(","))
        if pid.isdecimal() and not _ours(int(pid)):
            found.append(f"{pid} {name}")
    return sorted(found)


def links_down() -> list[str]:
    """NVLinks that are there and inactive, by GPU."""
    found, gpu = [], ""
    for line in _smi("nvlink", "--status").splitlines():
        if line.startswith("GPU "):
            gpu = line.partition(":")[0]
        elif "inactive" in line.lower():
            found.append(f"{gpu} {line.strip()}")
    return found


def _ours(pid: int) -> bool:
    """Whether it is another process of this preflight."""
    try:
        return b"jaxmnt.preflight" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # of another container, or gone
        return False


def _smi(*arguments: str) -> str:
    """What nvidia-smi prints; nothing where it is not there or fails, which JAX then reports in its own way."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
