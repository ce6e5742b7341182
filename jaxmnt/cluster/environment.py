"""Which process of how many this is, from the config or the environment."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from jaxmnt.config.schema import Cluster
from jaxmnt.errors import ConfigError

VARIABLES = {
    "coordinator": "JAX_COORDINATOR_ADDRESS",
    "processes": "JAX_NUM_PROCESSES",
    "process_id": "JAX_PROCESS_ID",
}
"""The same names that JAX itself reads."""


@dataclass(frozen=True)
class Identity:
    """This process's place in the run. `coordinator` is None when it is alone."""

    process_id: int = 0
    processes: int = 1
    coordinator: str | None = None

    @property
    def alone(self) -> bool:
        return self.processes == 1

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of process 0."""
        assert self.coordinator is not None
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)

    @property
    def bind_host(self) -> str:
        """Where process 0 listens: on this machine only if the others are on it, else on all interfaces."""
        host, _ = self.address
        return host if host in ("localhost", "::1") or host.startswith("127.") else ""

    @property
    def label(self) -> str:
        """`process 1 of 4 on HOST`, or nothing when alone."""
        return "" if self.alone else f"process {self.process_id} of {self.processes} on {socket.gethostname()}"


def identify(cluster: Cluster, environment: Mapping[str, str] | None = None) -> Identity:
    """The identity from `cluster`, each missing setting taken from the environment.

    Raises `ConfigError` when the settings are incomplete or contradict each other.
    """
    environment = os.environ if environment is None else environment
    coordinator = cluster.coordinator or environment.get(VARIABLES["coordinator"])
    processes = _number(cluster.processes, "processes", environment)
    process_id = _number(cluster.process_id, "process_id", environment)
    if processes is None and (coordinator or process_id is not None):
        raise ConfigError(
            "cluster.processes: missing, though a coordinator or process id is given; "
            f"set it or {VARIABLES['processes']} (1 for a run of its own)"
        )
    if processes is None or (processes == 1 and not process_id):
        return Identity()
    if process_id is None:
        raise ConfigError(
            f"cluster.process_id: missing, with {processes} processes; set it or {VARIABLES['process_id']}"
        )
    if process_id >= processes:
        raise ConfigError(
            f"cluster.process_id: {process_id} is out of range for {processes} processes "
            f"(0 to {processes - 1}); correct it or cluster.processes"
        )
    if not coordinator:
        raise ConfigError(
            f"cluster.coordinator: missing, with {processes} processes; "
            f"set it or {VARIABLES['coordinator']} to HOST:PORT of process 0"
        )
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"cluster.coordinator: {coordinator!r} is not HOST:PORT, such as node0:12355")
    return Identity(process_id, processes, coordinator)


def _number(setting: int | None, name: str, environment: Mapping[str, str]) -> int | None:
    if setting is not None:
        return setting
    text = environment.get(VARIABLES[name])
    if text is None or text == "":
        return None
    if not text.isdigit():
        raise ConfigError(f"{VARIABLES[name]}: {text!r} is not a number; correct the environment variable")
    return int(text)
