"""GPUs, by their data sheets. No JAX."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Chip:
    """What XLA asks about a GPU, and what its links are made for. Bandwidth in bytes a second, clock in GHz."""

    kind: str
    """As JAX names the device."""
    memory: int
    capability: tuple[int, int]
    cores: int
    """Streaming multiprocessors."""
    bandwidth: int
    """Of its memory."""
    l2_cache: int
    clock: float
    shared_memory: int
    nvlink: float
    """In one direction."""
    generation: str
    """Whose rates it attains: a key of `rates.ATTAINED`."""
    domain: int = 8
    """GPUs that reach each other by NVLink; of a rack of 72 the 64 that jobs of 64, 128, … take."""
    card_gigabits: float = 400
    """Of the network card that each GPU has in its vendor's own system, in Gbit/s."""
    to_host: float = 64e9
    """Bytes a second to its host's memory: 16 lanes of PCIe of the fifth generation, or NVLink to a Grace."""
    power: float = 1.0
    """Its limit of power as a share of what its generation was built for."""

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


def read_table(name: str) -> dict[str, Any]:
    """Reads a TOML file beside this module."""
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


GPUS = read_table("gpus.toml")
CHIPS = {name: Chip(**row | {"capability": tuple(row["capability"])}) for name, row in GPUS["chips"].items()}


def chip_of(kind: str) -> Chip | None:
    """Returns the data sheet of devices that JAX names so; None for those that are not known, such as CPUs."""
    return next((chip for chip in CHIPS.values() if chip.kind == kind), None)
