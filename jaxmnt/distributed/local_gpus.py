"""Assigns GPUs of this machine to this process, and detects machines without GPUs, before JAX starts."""

import ctypes
import importlib.util
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from jaxmnt.errors import ConfigError

_VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
_DEVICE_NAME_START = re.compile(r"[0-9]|GPU-|MIG-")
"""The beginning of a device's name. CUDA reads the list up to the first entry that is not a device, such as -1."""


@dataclass(frozen=True)
class Neighbours:
    """The processes of the run on this machine, according to the launcher."""

    rank: int = 0
    """Rank of this process among those on this machine."""
    processes: int = 1
    """Number of processes on this machine."""
    gpus: int | None = None
    """Number of GPUs that the launcher assigned to these processes together; None if it does not say."""


def gpus_here() -> int:
    """Returns the number of NVIDIA GPUs that this machine, or this container, has a device file for."""
    return sum(bool(re.fullmatch(r"nvidia[0-9]+", path.name)) for path in Path("/dev").glob("nvidia*"))


def has_cuda_plugin() -> bool:
    """Returns True if JAX's plugin for CUDA is installed."""
    plugins = (importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
    # A plain folder with that name also has a spec, but no origin.
    return any(plugin is not None and plugin.origin is not None for plugin in plugins)


def default_to_cpu(environment: MutableMapping[str, str]) -> None:
    """Sets JAX_PLATFORMS=cpu if JAX's plugin for CUDA is installed, because plans need it, but there is no GPU or
    driver.

    JAX would use the CPU anyway, but only after it shows a traceback from the plugin. A machine with a device file or a
    driver keeps its setting, because there JAX has to report why the GPUs cannot be used. This must be called before
    JAX is imported.
    """
    if "JAX_PLATFORMS" not in environment and has_cuda_plugin_without_gpu():
        environment["JAX_PLATFORMS"] = "cpu"


def has_cuda_plugin_without_gpu() -> bool:
    """Returns True if JAX's plugin for CUDA is installed, but neither a device file nor a driver of a GPU exists."""
    return has_cuda_plugin() and not gpus_here() and not _has_driver()


def computes_on_cpus(environment: Mapping[str, str]) -> bool:
    """Returns True if a process with this environment will compute on CPUs, because of JAX_PLATFORMS or for lack of
    GPUs."""
    platforms = environment.get("JAX_PLATFORMS", "")
    return platforms == "cpu" or (not platforms and not gpus_here() and not _has_driver())


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def visible_gpus(environment: Mapping[str, str], machine_gpus: int) -> list[str]:
    """Returns the GPUs that this process can see, as `CUDA_VISIBLE_DEVICES` names them. `machine_gpus` is the number of
    GPUs in the machine."""
    text = environment.get(_VISIBLE_VARIABLE)
    if text is None:
        return [str(index) for index in range(machine_gpus)]
    return list(takewhile(_DEVICE_NAME_START.match, map(str.strip, text.split(","))))


def assigned_gpus(neighbours: Neighbours, environment: Mapping[str, str], machine_gpus: int) -> tuple[int, ...] | None:
    """Returns this process's share of the GPUs that it sees, as indices among them; None means all of them.

    A process keeps all GPUs that it sees if the launcher has assigned separate GPUs to each process. That is the case
    if the GPUs that it sees, times the number of processes, are no more than the launcher's count. Without such a
    count, it is the case if the process sees one GPU and the host has one for each process. Raises `ConfigError` if the
    GPUs cannot be divided evenly.
    """
    names = visible_gpus(environment, machine_gpus)
    num_visible = len(names)
    processes = neighbours.processes
    if neighbours.gpus is not None:
        has_separate_gpus = num_visible * processes <= neighbours.gpus
    else:
        has_separate_gpus = num_visible == 1 and processes <= machine_gpus
    if processes == 1 or num_visible == 0 or has_separate_gpus or names[0].startswith("MIG-"):
        return None
    share, remainder = divmod(num_visible, processes)
    if remainder or share == 0:
        raise ConfigError(
            f"cluster.local_devices: {processes} processes on this host see the same {num_visible} "
            f"GPU{'s' if num_visible > 1 else ''}, which cannot be divided evenly among them; start one process per "
            "host or one per GPU, or set cluster.local_devices in each process"
        )
    return tuple(range(neighbours.rank * share, (neighbours.rank + 1) * share))
