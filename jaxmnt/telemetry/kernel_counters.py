"""Reads this host's kernel counters: memory, and the bytes and errors of network interfaces and InfiniBand ports."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from jaxmnt.distributed.container import available_bytes, number_in_file, text_in_file

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_WORD_BYTES = 4
"""Bytes per unit of an InfiniBand port's data counters; see https://docs.nvidia.com/networking, "port_xmit_data"."""

_INFINIBAND_ERRORS = (
    "symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)  # fmt: skip


@dataclass
class Traffic:
    """Network counters since the host was started."""

    sent: dict[str, int] = field(default_factory=dict)
    """Bytes that each interface or port has sent."""
    received: dict[str, int] = field(default_factory=dict)
    """Bytes that each interface or port has received."""
    errors: dict[str, dict[str, int]] = field(default_factory=dict)
    """Number of errors, by interface or port and then by counter."""


def ethernet(root: Path = Path("/sys")) -> Traffic:
    """Reads the physical network interfaces. In a container, where none are visible, reads all except the loopback."""
    interfaces = [path for path in folder_entries(root / "class" / "net") if path.name != "lo"]
    devices = [path for path in interfaces if (path / "device").exists()]
    folders = {path.name: path / "statistics" for path in devices or interfaces}
    return _traffic(folders, "tx_bytes", "rx_bytes", ("rx_errors", "tx_errors"))


def infiniband(root: Path = Path("/sys")) -> Traffic:
    """Reads all InfiniBand ports. With RoCE, these are the Ethernet ports."""
    folders = {name: port / "counters" for name, port in infiniband_ports(root).items()}
    return _traffic(folders, "port_xmit_data", "port_rcv_data", _INFINIBAND_ERRORS, _WORD_BYTES)


def infiniband_ports(root: Path = Path("/sys")) -> dict[str, Path]:
    """Returns the folder of each InfiniBand port, by ADAPTER/PORT."""
    adapters = folder_entries(root / "class" / "infiniband")
    return {f"{adapter.name}/{port.name}": port for adapter in adapters for port in folder_entries(adapter / "ports")}


def host_memory(proc: Path = Path("/proc")) -> dict[str, int]:
    """Returns this process's resident memory and the host's available memory, in bytes. What the kernel does not report
    is left out."""
    pages = text_in_file(proc / "self" / "statm").split()
    available = re.search(r"^MemAvailable: +(\d+)", text_in_file(proc / "meminfo"), re.MULTILINE)
    memory = {"host_bytes": int(pages[1]) * _PAGE_BYTES} if pages else {}
    if available:
        memory["host_available_bytes"] = available_bytes(int(available[1]) * 1024, proc.parent)
    return memory


def _traffic(folders: dict[str, Path], sent: str, received: str, errors: tuple[str, ...], factor: int = 1) -> Traffic:
    """Reads those counters that exist, since devices differ. Byte counters are multiplied by `factor`."""
    traffic = Traffic()
    for name, folder in folders.items():
        read = {counter: number_in_file(folder / counter) for counter in (sent, received, *errors)}
        counts = {counter: value for counter, value in read.items() if value is not None}
        if sent in counts:
            traffic.sent[name] = counts.pop(sent) * factor
        if received in counts:
            traffic.received[name] = counts.pop(received) * factor
        if counts:
            traffic.errors[name] = counts
    return traffic


def folder_entries(folder: Path) -> list[Path]:
    """Returns the entries of a folder in a kernel file system, sorted; an empty list if the folder does not exist."""
    try:
        return sorted(folder.iterdir())
    except OSError:  # there is no such class of devices
        return []
