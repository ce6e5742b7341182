"""What lies between hosts: the networks of the large clouds' machines, by instance type. No JAX."""

from typing import NamedTuple

from jaxmnt.errors import ConfigError, nearest
from jaxmnt.plan.chips import CHIPS, Chip

ATTAINED = {"infiniband": 0.9, "roce": 0.9, "efa": 0.8, "tcpxo": 0.85, "tcpx": 0.7, "ethernet": 0.7}
"""What large collectives attain of a network card's rate. 370 to 390 GB/s of the 400 of eight InfiniBand cards are
usual; those below are assumptions."""


class Network(NamedTuple):
    """What a GPU reaches others by: NVLink within its domain, and a share of the host's cards beyond."""

    domain: int
    """GPUs that reach each other by NVLink: those of a host, or of a rack of GB200 or GB300."""
    gigabits: float
    """Of the cards between domains, for each GPU, in Gbit/s."""
    fabric: str = "infiniband"
    devices_per_host: int = 8
    """GPUs of one operating system."""

    @property
    def between_hosts(self) -> float:
        """Bytes a second that a GPU attains between domains."""
        return self.gigabits * 1e9 / 8 * ATTAINED[self.fabric]


class Instance(NamedTuple):
    """A machine that can be rented."""

    chip: str
    gpus: int
    gigabits: float
    """Of all its network cards together that GPUs can use."""
    fabric: str


INSTANCES = {
    "p4d.24xlarge": Instance("a100-40gb", 8, 400, "efa"),
    "p4de.24xlarge": Instance("a100", 8, 400, "efa"),
    "p5.48xlarge": Instance("h100", 8, 3200, "efa"),
    "p5en.48xlarge": Instance("h200", 8, 3200, "efa"),
    "p6-b200.48xlarge": Instance("b200", 8, 3200, "efa"),
    "p6-b300.48xlarge": Instance("b300", 8, 6400, "efa"),
    "u-p6e-gb200x72": Instance("gb200", 4, 1600, "efa"),
    "a2-highgpu-8g": Instance("a100-40gb", 8, 100, "ethernet"),
    "a2-ultragpu-8g": Instance("a100", 8, 100, "ethernet"),
    "a3-highgpu-8g": Instance("h100", 8, 800, "tcpx"),
    "a3-megagpu-8g": Instance("h100", 8, 1600, "tcpxo"),
    "a3-ultragpu-8g": Instance("h200", 8, 3200, "roce"),
    "a4-highgpu-8g": Instance("b200", 8, 3200, "roce"),
    "a4x-highgpu-4g": Instance("gb200", 4, 1600, "roce"),
    "Standard_ND96asr_v4": Instance("a100-40gb", 8, 1600, "infiniband"),
    "Standard_ND96amsr_A100_v4": Instance("a100", 8, 1600, "infiniband"),
    "Standard_ND96isr_H100_v5": Instance("h100", 8, 3200, "infiniband"),
    "Standard_ND96isr_H200_v5": Instance("h200", 8, 3200, "infiniband"),
    "Standard_ND128isr_NDR_GB200_v6": Instance("gb200", 4, 1600, "infiniband"),
    "Standard_ND128isr_GB300_v6": Instance("gb300", 4, 3200, "infiniband"),
    "BM.GPU4.8": Instance("a100-40gb", 8, 1600, "roce"),
    "BM.GPU.A100-v2.8": Instance("a100", 8, 1600, "roce"),
    "BM.GPU.H100.8": Instance("h100", 8, 3200, "roce"),
    "BM.GPU.H200.8": Instance("h200", 8, 3200, "roce"),
    "BM.GPU.B200.8": Instance("b200", 8, 3200, "roce"),
}
"""By the clouds' pages on their GPU machines (AWS, Google Cloud, Azure, Oracle)."""


def network_of(chip: Chip) -> Network:
    """That of its vendor's own systems."""
    return Network(chip.domain, chip.card_gigabits, devices_per_host=4 if chip.domain > 8 else 8)


def find_target(name: str) -> tuple[Chip, Network]:
    """Of a GPU's name, or of an instance type. Raises `ConfigError` with the nearest name."""
    if name in INSTANCES:
        instance = INSTANCES[name]
        chip = CHIPS[instance.chip]
        domain = max(chip.domain, instance.gpus)
        return chip, Network(domain, instance.gigabits / instance.gpus, instance.fabric, instance.gpus)
    if name in CHIPS:
        return CHIPS[name], network_of(CHIPS[name])
    raise ConfigError(f"--target: no GPU or instance type is named {name!r}; {nearest(name, [*CHIPS, *INSTANCES])}")
