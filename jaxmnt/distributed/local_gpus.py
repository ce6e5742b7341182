"""Which GPUs of this machine are this process's, and where there are none. JAX has to be told before it starts."""

import ctypes
import importlib.util
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from jaxmnt.errors import ConfigError

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEVICE = re.compile(r"[0-9]|GPU-|MIG-")
"""How a device's name begins. CUDA reads the list up to the first that is none, such as -1."""


@dataclass(frozen=True)
class Neighbours:
    """The processes of the run on this process's machine, as its launcher counts them."""

    rank: int = 0
    """This process among them."""
    processes: int = 1
    gpus: int | None = None
    """How many GPUs the launcher gave all of them together; None if it did not say."""


def gpus_here() -> int:
    """The number of NVIDIA GPUs that this machine, or this container, has a device file for."""
    return sum(bool(re.fullmatch(r"nvidia[0-9]+", path.name)) for path in Path("/dev").glob("nvidia*"))


def has_cuda_plugin() -> bool:
    """Whether JAX's plugin for CUDA is installed. A folder of its name has a spec, too, but no origin."""
    plugins = (importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
    return any(plugin is not None and plugin.origin is not None for plugin in plugins)


def keep_to_the_cpu(environment: MutableMapping[str, str]) -> None:
    """Sets JAX_PLATFORMS=cpu where JAX's plugin for CUDA is installed, as plans need it, and nothing of a GPU is here.

    JAX would come to the CPU as well, after a traceback of the plugin. A machine with a device file or a driver is left
    alone: there JAX has to say why its GPUs cannot be used. Takes effect before JAX is imported.
    """
    if "JAX_PLATFORMS" not in environment and has_plugin_for_plans_alone():
        environment["JAX_PLATFORMS"] = "cpu"


def has_plugin_for_plans_alone() -> bool:
    """Whether JAX's plugin for CUDA is installed, and neither a device file nor a driver of a GPU is here."""
    return has_cuda_plugin() and not gpus_here() and not _has_driver()


def computes_on_cpus(environment: Mapping[str, str]) -> bool:
    """Whether a process with this environment will compute on CPUs: JAX is told so, or nothing of a GPU is here."""
    platforms = environment.get("JAX_PLATFORMS", "")
    return platforms == "cpu" or (not platforms and not gpus_here() and not _has_driver())


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def visible_gpus(environment: Mapping[str, str], here: int) -> list[str]:
    """The GPUs that this process can see, as `CUDA_VISIBLE_DEVICES` names them."""
    text = environment.get(_VISIBLE)
    if text is None:
        return [str(number) for number in range(here)]
    return list(takewhile(_DEVICE.match, map(str.strip, text.split(","))))


def own_gpus(neighbours: Neighbours, environment: Mapping[str, str], here: int) -> tuple[int, ...] | None:
    """This process's share of the GPUs it sees, by their places among those; None is all of them.

    A process keeps all GPUs that it sees if the launcher has given each its own: if what it sees times the processes is
    no more than the launcher's count, or, without a count, if it sees one and the host has one for each. Raises
    `ConfigError` if they cannot be shared out.
    """
    names, count = visible_gpus(environment, here), neighbours.processes
    seen = len(names)
    given = seen * count <= neighbours.gpus if neighbours.gpus is not None else seen == 1 and count <= here
    if count == 1 or seen == 0 or given or names[0].startswith("MIG-"):
        return None
    share, left = divmod(seen, count)
    if left or share == 0:
        raise ConfigError(
            f"cluster.local_devices: {count} processes on this host see the same {seen} "
            f"GPU{'s' if seen > 1 else ''}, which cannot be divided evenly among them; start one process per host "
            "or one per GPU, or set cluster.local_devices in each process"
        )
    return tuple(range(neighbours.rank * share, (neighbours.rank + 1) * share))
