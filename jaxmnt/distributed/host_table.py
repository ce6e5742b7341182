"""Packs the hosts of all processes into a short text, which process 0 sends to each of them."""

import base64
import json
import zlib
from collections.abc import Sequence

import numpy as np

from jaxmnt.strict_json import json_text

_MAX_NAMED_PROCESSES = 256
"""Maximum number of processes to which process 0 sends the names of all hosts. In larger runs, the others number the
hosts, because they only need to know which processes share one."""


def pack_hosts(hosts: Sequence[str]) -> str:
    """Packs the host name of each process.

    The numbers of hosts are stored as differences, which are mostly the same, so that 10,000 of them take 100 bytes.
    """
    numbers: dict[str, int] = {}
    for host in hosts:
        numbers.setdefault(host, len(numbers))
    differences = np.diff([numbers[host] for host in hosts], prepend=0).astype("<i4")
    names = list(numbers) if len(hosts) <= _MAX_NAMED_PROCESSES else None
    packed = base64.b85encode(zlib.compress(differences.tobytes(), 9)).decode()
    return json_text([packed, names])


def unpack_hosts(text: str) -> dict[int, str]:
    """Returns the host of each process, by its number: its name, or `host N` if the names were left out."""
    packed, names = json.loads(text)
    numbers = np.cumsum(np.frombuffer(zlib.decompress(base64.b85decode(packed)), "<i4")).tolist()
    return {process: f"host {number}" if names is None else names[number] for process, number in enumerate(numbers)}
