"""What lies between hosts: the networks of the large clouds' machines, by instance type. No JAX."""

from typing import NamedTuple

from jaxmnt.errors import ConfigError, nearest
from jaxmnt.plan.chips import CHIPS, GPUS, Chip

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


INSTANCES = {name: Instance(*row) for name, row in GPUS["instances"].items()}


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
