"""Slurm's short forms: `gpu[001-003,007]` for host names, `2(x3),1` for numbers a host.

The forms are those of Slurm's manual: https://slurm.schedmd.com/scontrol.html (hostlists) and sbatch's
`SLURM_TASKS_PER_NODE`.
"""

import math
import re
from collections.abc import Iterator
from itertools import product

from jaxmnt.errors import shortened

_NAMES_AT_MOST = 100_000
_WIDTH_AT_MOST = 18
"""Digits of a number."""


def hosts_in(text: str) -> list[str]:
    """The names of a hostlist, in its order. Raises `ValueError` if it is none, before it would take much memory."""
    names: list[str] = []
    for part in _split(text):
        pieces = re.split(r"(\[[^\[\]]*\])", part)
        if any(bracket in piece for piece in pieces[::2] for bracket in "[]") or not part:
            raise ValueError(f"{shortened(text)!r} is not a list of hosts")
        choices: list[_Numbers | list[str]] = [
            _Numbers(piece[1:-1]) if piece.startswith("[") else [piece] for piece in pieces
        ]
        if len(names) + math.prod(map(len, choices)) > _NAMES_AT_MOST:
            raise ValueError(f"{shortened(text)!r} is not a list of hosts: it has more than {_NAMES_AT_MOST}")
        names += ["".join(chosen) for chosen in product(*choices)]
    return names


def counts_in(text: str) -> list[int]:
    """The numbers of a list such as `2(x3),1`: 2, 2, 2, 1. Raises `ValueError` if it is none."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part.strip())
        if not found or len(counts) + int(found[2] or 1) > _NAMES_AT_MOST:
            raise ValueError(f"{shortened(text)!r} is not a list of numbers such as 2(x3),1")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _split(text: str) -> list[str]:
    """At the commas that are not in brackets."""
    parts, inside = [""], False
    for piece in re.split(r"([\[\],])", text):
        if piece == "," and not inside:
            parts.append("")
            continue
        inside = piece == "[" or (inside and piece != "]")
        parts[-1] += piece
    return [part.strip() for part in parts]


class _Numbers:
    """`001-003,007`: 001, 002, 003, 007, made one by one. Raises `ValueError` if the text is no such."""

    def __init__(self, text: str):
        self._ranges: list[tuple[range, int]] = []
        for part in text.split(","):
            found = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part.strip())
            first, last = (found[1], found[2] or found[1]) if found else ("", "")
            if not found or max(len(first), len(last)) > _WIDTH_AT_MOST or int(last) < int(first):
                raise ValueError(f"[{shortened(text)}] is not a range of numbers")
            self._ranges.append((range(int(first), int(last) + 1), len(first)))

    def __len__(self) -> int:
        return sum(len(numbers) for numbers, _ in self._ranges)

    def __iter__(self) -> Iterator[str]:
        return (str(number).zfill(width) for numbers, width in self._ranges for number in numbers)
