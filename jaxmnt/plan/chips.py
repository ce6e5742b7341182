"""Holds data sheets of GPUs, and the networks between the machines of the large clouds. Does not import JAX."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxmnt.errors import ConfigError, suggest


@dataclass(frozen=True)
class Chip:
    """The properties of a GPU that XLA needs to compile for it, and the speeds of its links. Sizes are in bytes,
    bandwidths in bytes per second, and the clock in GHz."""

    kind: str
    """JAX's name for the device."""
    memory: int
    capability: tuple[int, int]
    """CUDA compute capability."""
    cores: int
    """Number of streaming multiprocessors."""
    bandwidth: int
    """Memory bandwidth."""
    l2_cache: int
    clock: float
    shared_memory: int
    nvlink: float
    """NVLink bandwidth in one direction."""
    generation: str
    """The key of this GPU's generation in `rates.ACHIEVED_SHARES`."""
    domain: int = 8
    """Number of GPUs that NVLink connects. For a rack of 72 GPUs it is 64, because jobs use 64, 128, … of them."""
    card_gigabits: float = 400
    """Speed in Gbit/s of the network card that each GPU has in the vendor's own systems."""
    to_host: float = 64e9
    """Bytes per second to the host's memory, over 16 lanes of PCIe 5.0, or over NVLink to a Grace CPU."""
    power: float = 1.0
    """Power limit, as a share of the power for which the generation was built."""

    @property
    def description(self) -> str:
        """The description of the GPU, in XLA's text format, for which XLA compiles."""
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
    """Reads a TOML file from this module's folder."""
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


GPUS = read_table("gpus.toml")
CHIPS = {name: Chip(**row | {"capability": tuple(row["capability"])}) for name, row in GPUS["chips"].items()}


def chip_of(kind: str) -> Chip | None:
    """Returns the data sheet of the devices that JAX names `kind`, or None if there is none, as for CPUs."""
    return next((chip for chip in CHIPS.values() if chip.kind == kind), None)


FABRIC_SHARES = {"infiniband": 0.9, "roce": 0.9, "efa": 0.8, "tcpxo": 0.85, "tcpx": 0.7, "ethernet": 0.7}
"""Share of a network card's rate that large collectives attain, by fabric. With eight InfiniBand cards, 370 to 390 of
400 GB/s are usual. The lower shares are assumptions."""


class Network(NamedTuple):
    """The links of a GPU to others: NVLink within its domain, and its share of the host's network cards beyond that."""

    domain: int
    """Number of GPUs that NVLink connects, in a host or in a rack of GB200 or GB300."""
    gigabits: float
    """Speed of the network cards between domains, per GPU, in Gbit/s."""
    fabric: str = "infiniband"
    """A key of `FABRIC_SHARES`."""
    devices_per_host: int = 8
    """Number of GPUs that one operating system has."""

    @property
    def between_hosts(self) -> float:
        """Bytes per second that a GPU attains between domains."""
        return self.gigabits * 1e9 / 8 * FABRIC_SHARES[self.fabric]


class Instance(NamedTuple):
    """A machine that can be rented."""

    chip: str
    gpus: int
    gigabits: float
    """Total speed in Gbit/s of the network cards that its GPUs can use."""
    fabric: str
    """A key of `FABRIC_SHARES`."""


INSTANCES = {name: Instance(*row) for name, row in GPUS["instances"].items()}


def network_of(chip: Chip) -> Network:
    """Returns the network of a GPU in its vendor's own systems."""
    return Network(chip.domain, chip.card_gigabits, devices_per_host=4 if chip.domain > 8 else 8)


def find_target(name: str) -> tuple[Chip, Network]:
    """Returns the chip and the network of a GPU or instance type. If its name is unknown, raises a `ConfigError` that
    suggests the nearest name."""
    if name in INSTANCES:
        instance = INSTANCES[name]
        chip = CHIPS[instance.chip]
        domain = max(chip.domain, instance.gpus)
        return chip, Network(domain, instance.gigabits / instance.gpus, instance.fabric, instance.gpus)
    if name in CHIPS:
        return CHIPS[name], network_of(CHIPS[name])
    raise ConfigError(f"--target: no GPU or instance type is named {name!r}; {suggest(name, [*CHIPS, *INSTANCES])}")
