"""Devices to compile for: chips that XLA can compile for without having one, and virtual CPU devices.

Both must be chosen before JAX starts its backends.
"""

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxmnt.errors import ConfigError

if TYPE_CHECKING:
    import jax

    from jaxmnt.plan.costs import Rates


@dataclass(frozen=True)
class Chip:
    """What XLA asks about a GPU, from its vendor's data sheet; and what it attains of its links, by which a step is
    played. Bandwidth in bytes a second, clock in GHz."""

    kind: str
    memory: int
    capability: tuple[int, int]
    cores: int
    bandwidth: int
    l2_cache: int
    clock: float
    shared_memory: int
    within_host: float
    """What collectives attain between GPUs of a host, in one direction: about 78 % of NVLink's."""
    between_hosts: float
    """And between hosts, for each GPU: 90 % of a network card of 400 Gbit/s, with the A100 of 200."""
    to_host: float = 50e9
    """And to the memory of its host: 80 % of 16 lanes of PCIe, of the fifth generation, with the A100 of the fourth."""

    @property
    def rates(self) -> "Rates":
        """What large operations attain: assumptions, which say where a step's time goes, and not what it will be.

        Products 60 % of the dense peak (600 TFLOP/s on an H100), attention 50 %, and 85 % of the memory's bandwidth.
        """
        from jaxmnt.plan.costs import Rates
        from jaxmnt.telemetry.flops import peaks_of

        peaks = peaks_of(self.kind)
        products = {dtype: 0.6 * peak for dtype, peak in peaks.items()}
        links = (self.within_host, self.between_hosts, self.to_host)
        return Rates(products, 0.5 * peaks["bfloat16"], 0.85 * self.bandwidth, *links)

    @property
    def description(self) -> str:
        """The target's configuration in XLA's text form."""
        major, minor = self.capability
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: {self.shared_memory + 1024}
  threads_per_core_limit: 2048 core_count: {self.cores} fpus_per_core: {64 if major == 8 and minor == 0 else 128}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {self.bandwidth} l2_cache_size: {self.l2_cache} clock_rate_ghz: {self.clock}
  device_memory_size: {self.memory} shared_memory_per_block_optin: {self.shared_memory}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "{self.kind}"
"""


MIB = 2**20
CHIPS = {
    "a100": Chip(
        "NVIDIA A100-SXM4-80GB",
        81920 * MIB,
        (8, 0),
        108,
        2_039_000_000_000,
        40 * MIB,
        1.41,
        166912,
        235e9,
        22.5e9,
        25e9,
    ),
    "h100": Chip(
        "NVIDIA H100 80GB HBM3", 81042 * MIB, (9, 0), 132, 3_352_320_000_000, 50 * MIB, 1.98, 232448, 350e9, 45e9
    ),
    "h200": Chip("NVIDIA H200", 143771 * MIB, (9, 0), 132, 4_800_000_000_000, 50 * MIB, 1.98, 232448, 350e9, 45e9),
    "b200": Chip("NVIDIA B200", 183359 * MIB, (10, 0), 148, 8_000_000_000_000, 126 * MIB, 1.965, 232448, 700e9, 45e9),
}


def find_chip(name: str) -> Chip:
    """Raises `ConfigError` with the known chips."""
    if name not in CHIPS:
        raise ConfigError(f"--target: unknown GPU {name!r}; choose one of {', '.join(CHIPS)}")
    return CHIPS[name]


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
