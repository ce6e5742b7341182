"""GPUs, by their data sheets. No JAX."""

from dataclasses import dataclass


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


MIB = 2**20

CHIPS = {
    "a100-40gb": Chip(
        kind="NVIDIA A100-SXM4-40GB", memory=40371 * MIB, capability=(8, 0), cores=108, bandwidth=1_555_200_000_000,
        l2_cache=40 * MIB, clock=1.41, shared_memory=166912, nvlink=300e9, generation="ampere", card_gigabits=200,
        to_host=32e9,
    ),
    "a100": Chip(
        kind="NVIDIA A100-SXM4-80GB", memory=81920 * MIB, capability=(8, 0), cores=108, bandwidth=2_039_000_000_000,
        l2_cache=40 * MIB, clock=1.41, shared_memory=166912, nvlink=300e9, generation="ampere", card_gigabits=200,
        to_host=32e9,
    ),
    "h100": Chip(
        kind="NVIDIA H100 80GB HBM3", memory=81042 * MIB, capability=(9, 0), cores=132, bandwidth=3_352_320_000_000,
        l2_cache=50 * MIB, clock=1.98, shared_memory=232448, nvlink=450e9, generation="hopper",
    ),
    "h200": Chip(
        kind="NVIDIA H200", memory=143771 * MIB, capability=(9, 0), cores=132, bandwidth=4_800_000_000_000,
        l2_cache=50 * MIB, clock=1.98, shared_memory=232448, nvlink=450e9, generation="hopper",
    ),
    "b200": Chip(
        kind="NVIDIA B200", memory=183359 * MIB, capability=(10, 0), cores=148, bandwidth=8_000_000_000_000,
        l2_cache=126 * MIB, clock=1.965, shared_memory=232448, nvlink=900e9, generation="blackwell",
    ),
    "gb200": Chip(
        kind="NVIDIA GB200", memory=188730 * MIB, capability=(10, 0), cores=152, bandwidth=8_000_000_000_000,
        l2_cache=129 * MIB, clock=2.062, shared_memory=232448, nvlink=900e9, generation="blackwell", domain=64,
        to_host=225e9,
    ),
    "b300": Chip(
        kind="NVIDIA B300 SXM6 AC", memory=275040 * MIB, capability=(10, 3), cores=148, bandwidth=8_000_000_000_000,
        l2_cache=129 * MIB, clock=1.965, shared_memory=232448, nvlink=900e9, generation="blackwell", card_gigabits=800,
    ),
    "gb300": Chip(
        kind="NVIDIA GB300", memory=283262 * MIB, capability=(10, 3), cores=152, bandwidth=8_000_000_000_000,
        l2_cache=129 * MIB, clock=2.07, shared_memory=232448, nvlink=900e9, generation="blackwell", domain=64,
        card_gigabits=800, to_host=225e9,
    ),
}  # fmt: skip
"""After NVIDIA's data sheets; memory, cores, caches and clocks as the CUDA driver tells them."""


def chip_of(kind: str) -> Chip | None:
    """Returns the data sheet of devices that JAX names so; None for those that are not known, such as CPUs."""
    return next((chip for chip in CHIPS.values() if chip.kind == kind), None)
