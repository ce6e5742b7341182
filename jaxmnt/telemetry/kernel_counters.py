"""What the kernel counts of this host: memory, and bytes and errors of network interfaces and InfiniBand ports."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from jaxmnt.distributed.container import available_bytes, kernel_number, kernel_text

_PAGE = os.sysconf("SC_PAGE_SIZE")
_WORD = 4
"""Bytes in which an InfiniBand port counts its data: https://docs.nvidia.com/networking, "port_xmit_data"."""

_INFINIBAND_ERRORS = (
    "symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)  # fmt: skip


@dataclass
class Traffic:
    """Counts since the host was started."""

    sent: dict[str, int] = field(default_factory=dict)
    """Bytes of each interface or port."""
    received: dict[str, int] = field(default_factory=dict)
    errors: dict[str, dict[str, int]] = field(default_factory=dict)
    """By interface or port, and by counter."""


def ethernet(root: Path = Path("/sys")) -> Traffic:
    """Of the interfaces that are devices; in a container, which sees none of these, of all but the loopback."""
    interfaces = [path for path in listed(root / "class" / "net") if path.name != "lo"]
    devices = [path for path in interfaces if (path / "device").exists()]
    folders = {path.name: path / "statistics" for path in devices or interfaces}
    return _traffic(folders, "tx_bytes", "rx_bytes", ("rx_errors", "tx_errors"))


def infiniband(root: Path = Path("/sys")) -> Traffic:
    """Of all ports, which of RoCE are Ethernet's."""
    folders = {name: port / "counters" for name, port in infiniband_ports(root).items()}
    return _traffic(folders, "port_xmit_data", "port_rcv_data", _INFINIBAND_ERRORS, _WORD)


def infiniband_ports(root: Path = Path("/sys")) -> dict[str, Path]:
    """Returns the folder of each port, by the names of its adapter and its own."""
    adapters = listed(root / "class" / "infiniband")
    return {f"{adapter.name}/{port.name}": port for adapter in adapters for port in listed(adapter / "ports")}


def host_memory(proc: Path = Path("/proc")) -> dict[str, int]:
    """Bytes that are resident of this process, and that are available on the host; nothing where the kernel does not
    tell."""
    pages = kernel_text(proc / "self" / "statm").split()
    available = re.search(r"^MemAvailable: +(\d+)", kernel_text(proc / "meminfo"), re.MULTILINE)
    found = {"host_bytes": int(pages[1]) * _PAGE} if pages else {}
    if available:
        found["host_available_bytes"] = available_bytes(int(available[1]) * 1024, proc.parent)
    return found


def _traffic(folders: dict[str, Path], sent: str, received: str, errors: tuple[str, ...], factor: int = 1) -> Traffic:
    """Reads those counters that there are: devices differ."""
    found = Traffic()
    for name, folder in folders.items():
        read = {counter: kernel_number(folder / counter) for counter in (sent, received, *errors)}
        counts = {counter: value for counter, value in read.items() if value is not None}
        if sent in counts:
            found.sent[name] = counts.pop(sent) * factor
        if received in counts:
            found.received[name] = counts.pop(received) * factor
        if counts:
            found.errors[name] = counts
    return found


def listed(folder: Path) -> list[Path]:
    """Returns what is in a folder of the kernel, by name."""
    try:
        return sorted(folder.iterdir())
    except OSError:  # there is no such class of devices
        return []
