"""Slurm's short forms: `gpu[001-003,007]` for host names, `2(x3),1` for numbers a host.

The forms are those of Slurm's manual: https://slurm.schedmd.com/scontrol.html (hostlists) and sbatch's
`SLURM_TASKS_PER_NODE`.
"""

import re
from itertools import product

_NAMES_AT_MOST = 100_000


def hosts_in(text: str) -> list[str]:
    """The names of a hostlist, in its order. Raises `ValueError` if it is none."""
    names: list[str] = []
    for part in _split(text):
        pieces = re.split(r"(\[[^\[\]]*\])", part)
        choices = [_range_of(piece[1:-1]) if piece.startswith("[") else [piece] for piece in pieces]
        if any(bracket in piece for piece in pieces[::2] for bracket in "[]") or not part:
            raise ValueError(f"{text!r} is no list of hosts")
        names += ["".join(chosen) for chosen in product(*choices)]
        if len(names) > _NAMES_AT_MOST:
            raise ValueError(f"{text!r} is a list of more than {_NAMES_AT_MOST} hosts")
    return names


def counts_in(text: str) -> list[int]:
    """The numbers of a list such as `2(x3),1`: 2, 2, 2, 1. Raises `ValueError` if it is none."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not found or int(found[2] or 1) > _NAMES_AT_MOST:
            raise ValueError(f"{text!r} is no list of numbers such as 2(x3),1")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _split(text: str) -> list[str]:
    """At the commas that are not in brackets."""
    return [part.strip() for part in re.split(r",(?![^\[]*\])", text)]


def _range_of(text: str) -> list[str]:
    """`001-003,007`: 001, 002, 003, 007."""
    names: list[str] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if not found:
            raise ValueError(f"[{text}] is no range of numbers")
        first, last = found[1], found[2] or found[1]
        if int(last) < int(first) or int(last) - int(first) >= _NAMES_AT_MOST:
            raise ValueError(f"[{text}] is no range of numbers")
        names += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return names
