"""What one process knows of its host, to be compared with what the others know of theirs."""

import json
import os
import platform
import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxmnt.distributed.container import cores, host_memory_bytes
from jaxmnt.distributed.coordination import all_gather
from jaxmnt.distributed.identity import Identity
from jaxmnt.distributed.process_group import environment_digest, machine_id
from jaxmnt.distributed.termination import is_connection_error
from jaxmnt.errors import PeerError, PreflightError
from jaxmnt.preflight import gpus, network
from jaxmnt.strict_json import json_text
from jaxmnt.telemetry.kernel_counters import host_memory

if TYPE_CHECKING:
    import jax

Facts = dict[str, Any]
"""Plain data that can be sent as JSON; the keys are those of `quick` and `thorough`."""

_SHM = Path("/dev/shm")  # noqa: S108 - only its size is read
_GPUS = ("cuda", "gpu", "rocm")


def quick(clock: tuple[float, float]) -> Facts:
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


def thorough() -> Facts:
    """What only the command looks at."""
    free = host_memory().get("host_available_bytes")
    return {
        "python": platform.python_version(),
        "environment": environment_digest(),
        "cores": cores(),
        "memory": {"all": 0 if free is None else host_memory_bytes(), "free": free or 0},
        "shm": _free(_SHM),
        "image": os.environ.get("JAXMNT_IMAGE", ""),
        "nics": [vars(card) for card in network.cards()],
        "fabric": [vars(port) for port in network.fabric_ports()],
        "nccl": {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")},
        "xids": gpus.xids(),
    } | gpus.gpu_facts()


def told_to_all(name: str, facts: Facts, identity: Identity) -> list[Facts]:
    """The facts of all processes, in order, in each of them."""
    return _told_apart([json.loads(text) for text in all_gather(name, json_text(facts), identity)])


def _told_apart(all_facts: list[Facts]) -> list[Facts]:
    """With the number of a process in the name of a host that another machine has as well."""
    first: dict[str, str] = {}
    for process, facts in enumerate(all_facts):
        if first.setdefault(facts["host"], facts["boot"]) != facts["boot"]:
            facts["host"] += f" (of process {process})"
    return all_facts


def _free(folder: Path) -> int:
    """Bytes that can still be written there; 0 if it is not there."""
    return shutil.disk_usage(folder).free if folder.exists() else 0
