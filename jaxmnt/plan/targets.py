"""Devices to compile for: chips that XLA can compile for without having one, and virtual CPU devices.

Both must be chosen before JAX starts its backends.
"""

import importlib.util
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxmnt.errors import ConfigError
from jaxmnt.plan.chips import Chip

if TYPE_CHECKING:
    import jax


def gpu_devices(chip: Chip, hosts: int, devices_per_host: int) -> "Sequence[jax.Device]":
    """Devices to compile for, in hosts of so many. Nothing can run on them.

    Raises `ConfigError` where the compiler is missing.
    """
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        raise ConfigError(
            "--target: compiling for a GPU needs JAX's CUDA plugin, though no GPU; "
            'install it with pip install -c constraints.txt -e ".[plan]"'
        )
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # the plugin would refuse to load without a driver
    os.environ["JAX_PLATFORMS"] = "cpu"
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        "", platform="cuda", target_config=chip.description, topology=f"1x{hosts}x{devices_per_host}"
    )
    return topology.devices


def virtual_devices(count: int) -> "Sequence[jax.Device]":
    """CPU devices of this process."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.config.update("jax_num_cpu_devices", count)
    return jax.devices()[:count]
