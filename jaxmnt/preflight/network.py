"""Reads the network interfaces and the InfiniBand or RoCE ports of this host from /sys."""

import socket
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxmnt.distributed.container import number_in_file, text_in_file
from jaxmnt.telemetry.kernel_counters import folder_entries, infiniband, infiniband_ports

_ROUTES = Path("/proc/net/route")
_ADDRESSES6 = Path("/proc/net/if_inet6")
_LOCAL_INTERFACE_PREFIXES = ("lo", "docker", "virbr", "cni", "flannel", "cali", "kube", "tunl", "dummy", "podman")
"""Name prefixes of the interfaces that reach no other host: loopback, and those for containers and virtual machines."""


@dataclass(frozen=True)
class Interface:
    """A network interface that is up."""

    name: str
    megabits: int
    """Speed in Mbit/s; 0 if the kernel does not report it."""
    address: str
    """IPv4 address or, if it has none, IPv6 address; empty if it has neither."""
    default: bool = False
    """True if the default route uses this interface."""

    @property
    def may_connect_hosts(self) -> bool:
        """True if the interface has an address, and is neither a loopback nor a virtual interface."""
        return bool(self.address) and not self.name.startswith(_LOCAL_INTERFACE_PREFIXES)


@dataclass(frozen=True)
class Port:
    """A port of an InfiniBand or RoCE adapter."""

    name: str
    state: str
    gigabits: float
    layer: str
    errors: dict[str, int] = field(default_factory=dict)
    """Error counters that are not 0."""


def read_interfaces(root: Path = Path("/sys")) -> list[Interface]:
    """Returns all interfaces that are up, in the kernel's order, in which NCCL also examines them."""
    routes = [line.split() for line in text_in_file(_ROUTES).splitlines()[1:]]
    default_interfaces = {route[0] for route in routes if route[1:2] == ["00000000"]}
    interfaces = []
    for path in sorted(folder_entries(root / "class" / "net"), key=lambda path: number_in_file(path / "ifindex") or 0):
        if text_in_file(path / "operstate") in ("up", "unknown"):
            megabits = number_in_file(path / "speed") or 0
            interfaces.append(Interface(path.name, megabits, _address(path.name), path.name in default_interfaces))
    return interfaces


def select_nccl_interface(interfaces: list[Interface], ifname: str) -> Interface | None:
    """Returns the interface that NCCL would use for its sockets. `ifname` is NCCL_SOCKET_IFNAME, or empty if not set.

    The rules are those of NCCL's manual:
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname
    """
    candidates = [interface for interface in interfaces if interface.address]
    if ifname:
        exclude = ifname.startswith("^")
        exact = ifname.lstrip("^").startswith("=")
        names = ifname.lstrip("^=").split(",")
        matches = lambda interface: interface.name in names if exact else interface.name.startswith(tuple(names))
        return next((interface for interface in candidates if matches(interface) != exclude), None)
    # Without NCCL_SOCKET_IFNAME, NCCL prefers InfiniBand, then others, then docker, then loopback.
    ranks = {"ib": 0, "docker": 2, "lo": 3}
    rank_of = lambda interface: next((rank for prefix, rank in ranks.items() if interface.name.startswith(prefix)), 1)
    return min(candidates, key=rank_of, default=None)


def fabric_ports(root: Path = Path("/sys")) -> list[Port]:
    """Returns all ports of InfiniBand or RoCE adapters."""
    ports = []
    counters = infiniband(root).errors
    for name, path in infiniband_ports(root).items():
        rate = text_in_file(path / "rate").split(" ")[0]
        gigabits = float(rate) if rate.replace(".", "", 1).isdecimal() else 0.0
        state = text_in_file(path / "state").partition(": ")[2]
        errors = {counter: count for counter, count in counters.get(name, {}).items() if count}
        ports.append(Port(name, state, gigabits, text_in_file(path / "link_layer"), errors))
    return ports


def _address(interface_name: str) -> str:
    """Returns the IPv4 address of an interface or, if it has none, its IPv6 address; empty if it has neither."""
    import fcntl

    get_address_request = 0x8915  # SIOCGIFADDR, see netdevice(7)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, get_address_request, struct.pack("256s", interface_name.encode()[:15]))
        except OSError:  # it has no IPv4 address
            return _address6(interface_name)
    return socket.inet_ntoa(answer[20:24])


def _address6(interface_name: str) -> str:
    """Returns the first IPv6 address of global scope of an interface; empty if it has none."""
    for line in text_in_file(_ADDRESSES6).splitlines():
        fields = line.split()
        if fields[-1] == interface_name and fields[3] == "00":  # global scope
            return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(fields[0]))
    return ""


# Functions that extract a host's network interfaces and ports from the facts that the host sent as JSON.


def interfaces_up(facts: dict[str, Any]) -> list[Interface]:
    """Returns the interfaces of a host that are up."""
    return [Interface(**nic) for nic in facts["nics"]]


def nccl_interface(facts: dict[str, Any]) -> tuple[str, Interface | None]:
    """Returns the host's NCCL_SOCKET_IFNAME, and the interface that NCCL would use on this host."""
    ifname = facts["nccl"].get("NCCL_SOCKET_IFNAME", "")
    return ifname, select_nccl_interface(interfaces_up(facts), ifname)


def active_ports(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the active ports of the host's InfiniBand or RoCE adapters."""
    return [port for port in facts["fabric"] if port["state"] == "ACTIVE"]


def megabits(facts: dict[str, Any]) -> int:
    """Returns the speed in Mbit/s of the port or interface that NCCL would use for a GPU of this host; 0 if the speed
    is unknown."""
    ports = active_ports(facts)
    if ports and facts["platform"] == "gpu":
        return int(1000 * max(port["gigabits"] for port in ports))
    _, interface = nccl_interface(facts)
    return interface.megabits if interface else 0
