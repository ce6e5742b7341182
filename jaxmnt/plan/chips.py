"""GPU data sheets, and the networks between hosts of the large clouds' machines. No JAX."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxmnt.errors import ConfigError, suggest


@dataclass(frozen=True)
class Chip:
    """The properties of a GPU that XLA asks for, and its link speeds. Bandwidths are in bytes per second, the clock in
    GHz."""

    kind: str
    """JAX's name of the device."""
    memory: int
    capability: tuple[int, int]
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
    """The key of its rates in `rates.ACHIEVED_SHARES`."""
    domain: int = 8
    """GPUs connected by NVLink. For a rack of 72 it is 64, since jobs take 64, 128, … of them."""
    card_gigabits: float = 400
    """Speed of the network card that each GPU has in its vendor's own system, in Gbit/s."""
    to_host: float = 64e9
    """Bytes per second to its host's memory: 16 lanes of PCIe 5.0, or NVLink to a Grace CPU."""
    power: float = 1.0
    """Power limit as a share of the power that its generation was built for."""

    @property
    def description(self) -> str:
        """The target's configuration in XLA's text format."""
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
    """Returns the data sheet of the devices that JAX names `kind`; None for unknown ones, such as CPUs."""
    return next((chip for chip in CHIPS.values() if chip.kind == kind), None)


FABRIC_SHARES = {"infiniband": 0.9, "roce": 0.9, "efa": 0.8, "tcpxo": 0.85, "tcpx": 0.7, "ethernet": 0.7}
"""Share of a network card's rate that large collectives attain. With eight InfiniBand cards, 370 to 390 of 400 GB/s are
usual; the lower shares are assumptions."""


class Network(NamedTuple):
    """A GPU's links to others: NVLink within its domain, and a share of the host's network cards beyond it."""

    domain: int
    """GPUs connected by NVLink: those of a host, or of a rack of GB200 or GB300."""
    gigabits: float
    """Speed of the network cards between domains, per GPU, in Gbit/s."""
    fabric: str = "infiniband"
    devices_per_host: int = 8
    """GPUs per operating system."""

    @property
    def between_hosts(self) -> float:
        """Bytes per second that a GPU attains between domains."""
        return self.gigabits * 1e9 / 8 * FABRIC_SHARES[self.fabric]


class Instance(NamedTuple):
    """A machine that can be rented."""

    chip: str
    gpus: int
    gigabits: float
    """Speed of all its network cards together, as far as GPUs can use them, in Gbit/s."""
    fabric: str


INSTANCES = {name: Instance(*row) for name, row in GPUS["instances"].items()}


def network_of(chip: Chip) -> Network:
    """Returns the network of the vendor's own systems."""
    return Network(chip.domain, chip.card_gigabits, devices_per_host=4 if chip.domain > 8 else 8)


def find_target(name: str) -> tuple[Chip, Network]:
    """Returns the chip and network of a GPU name or an instance type. Raises `ConfigError` with the nearest name."""
    if name in INSTANCES:
        instance = INSTANCES[name]
        chip = CHIPS[instance.chip]
        domain = max(chip.domain, instance.gpus)
        return chip, Network(domain, instance.gigabits / instance.gpus, instance.fabric, instance.gpus)
    if name in CHIPS:
        return CHIPS[name], network_of(CHIPS[name])
    raise ConfigError(f"--target: no GPU or instance type is named {name!r}; {suggest(name, [*CHIPS, *INSTANCES])}")
