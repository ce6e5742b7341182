"""Provides devices to compile for, which are GPUs that need not be present, or virtual CPU devices.

Call the functions before JAX starts its backends.
"""

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxmnt.distributed.local_gpus import has_cuda_plugin
from jaxmnt.errors import ConfigError, how_to_install
from jaxmnt.plan.chips import Chip

if TYPE_CHECKING:
    import jax


def silence_xla_warnings(debug: bool) -> None:
    """Suppresses the warnings of XLA when it compiles for devices that are absent, unless `debug` is set."""
    if not debug:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # errors; JAX's own default is 1, warnings


def gpu_devices(chip: Chip, hosts: int, devices_per_host: int) -> "Sequence[jax.Device]":
    """Returns GPUs to compile for, on `hosts` hosts with `devices_per_host` each. Nothing can run on them.

    Raises `ConfigError` if a part of the compiler is missing.
    """
    if not has_cuda_plugin():
        raise _missing_part_error("JAX's CUDA plugin")
    # JAX passes this folder to XLA. If the machine has an older toolkit, it would abort the process for a newer GPU.
    os.environ["CUDA_ROOT"] = str(_cuda_folder())
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # the plugin would refuse to load without a driver
    os.environ["JAX_PLATFORMS"] = "cpu"
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        "", platform="cuda", target_config=chip.description, topology=f"1x{hosts}x{devices_per_host}"
    )
    return topology.devices


def _cuda_folder() -> Path:
    """Returns the folder of NVIDIA's Python packages that contains `bin/ptxas`.

    The machine's CUDA toolkit is not used, so that a plan is the same on every machine. Raises `ConfigError` if no
    package has the file.
    """
    nvidia = importlib.util.find_spec("nvidia")
    for parent in sorted(nvidia.submodule_search_locations or ()) if nvidia else ():
        for package in ("cuda_nvcc", "cu13"):
            if (Path(parent) / package / "bin" / "ptxas").is_file():
                return Path(parent) / package
    raise _missing_part_error("NVIDIA's assembler ptxas")


def _missing_part_error(part: str) -> ConfigError:
    return ConfigError(f"--target: compiling for a GPU needs {part}, but no GPU; {how_to_install('plan')}")


def virtual_devices(count: int) -> "Sequence[jax.Device]":
    """Returns `count` virtual CPU devices of this process."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.config.update("jax_num_cpu_devices", count)
    return jax.devices()[:count]
