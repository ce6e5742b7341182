"""Expands Slurm's short forms, such as `gpu[001-003,007]` for host names and `2(x3),1` for a number per host.

The forms are those of Slurm's manual: https://slurm.schedmd.com/scontrol.html (hostlists) and sbatch's
`SLURM_TASKS_PER_NODE`.
"""

import math
import re
from collections.abc import Iterator
from itertools import product

from jaxmnt.errors import shortened

_MAX_NAMES = 100_000
_MAX_DIGITS = 18
"""Maximum number of digits in a number."""


def expand_hostlist(text: str) -> list[str]:
    """Returns the names in a hostlist, in its order.

    Raises `ValueError` if the text is not a hostlist, or if it has more than 100,000 names.
    """
    names: list[str] = []
    for part in _split(text):
        pieces = re.split(r"(\[[^\[\]]*\])", part)
        # Every second piece is outside brackets, so a bracket there has no partner.
        if any(bracket in piece for piece in pieces[::2] for bracket in "[]") or not part:
            raise ValueError(f"{shortened(text)!r} is not a list of hosts")
        choices: list[_Numbers | list[str]] = [
            _Numbers(piece[1:-1]) if piece.startswith("[") else [piece] for piece in pieces
        ]
        if len(names) + math.prod(map(len, choices)) > _MAX_NAMES:
            raise ValueError(f"{shortened(text)!r} is not a list of hosts: it has more than {_MAX_NAMES}")
        names += ["".join(parts) for parts in product(*choices)]
    return names


def expand_counts(text: str) -> list[int]:
    """Returns the numbers in a list such as `2(x3),1`, which stands for 2, 2, 2, 1. Raises `ValueError` for other
    text."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part.strip())
        if not match or len(counts) + int(match[2] or 1) > _MAX_NAMES:
            raise ValueError(f"{shortened(text)!r} is not a list of numbers such as 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _split(text: str) -> list[str]:
    """Splits a hostlist at the commas that are not in brackets."""
    parts = [""]
    in_brackets = False
    for piece in re.split(r"([\[\],])", text):
        if piece == "," and not in_brackets:
            parts.append("")
            continue
        in_brackets = piece == "[" or (in_brackets and piece != "]")
        parts[-1] += piece
    return [part.strip() for part in parts]


class _Numbers:
    """Iterates over the numbers in a text such as `001-003,007`, which stands for 001, 002, 003, 007. Raises
    `ValueError` for any other text."""

    def __init__(self, text: str):
        self._ranges: list[tuple[range, int]] = []
        for part in text.split(","):
            match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part.strip())
            first, last = (match[1], match[2] or match[1]) if match else ("", "")
            if not match or max(len(first), len(last)) > _MAX_DIGITS or int(last) < int(first):
                raise ValueError(f"[{shortened(text)}] is not a range of numbers")
            self._ranges.append((range(int(first), int(last) + 1), len(first)))

    def __len__(self) -> int:
        return sum(len(numbers) for numbers, _ in self._ranges)

    def __iter__(self) -> Iterator[str]:
        return (str(number).zfill(width) for numbers, width in self._ranges for number in numbers)
