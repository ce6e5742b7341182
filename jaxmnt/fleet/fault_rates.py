"""Reads the rates at which runs are interrupted, by kind of fault, from published counts or from a user's file."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jaxmnt.errors import ConfigError, printable, suggest

FAULT_KINDS = {
    "node": "a process or a host ends, and its connection closes",
    "software": "a process raises an exception, which no node is blamed for",
    "silent": "a host or the network falls silent",
    "hang": "devices wait for each other until the watchdog ends the run",
    "wrong": "a device computes wrongly, which is noticed later",
    "maintenance": "a host is taken away, mostly after a warning",
}
"""The kinds of faults, and how they show."""

_COLUMNS = ("kind", "interruptions", "gpus", "days", "source")
_MAX_LINES = 1000


class FaultRate(NamedTuple):
    """The rate of one kind of fault."""

    kind: str
    per_gpu_hour: float
    source: str


def published_rates() -> list[FaultRate]:
    """Returns the rates of the published run that `faults.csv` describes."""
    return read_rates(Path(__file__).with_name("faults.csv"))


def read_rates(path: Path) -> list[FaultRate]:
    """Reads a CSV file with the columns kind, interruptions, gpus, days and source.

    A line says that a run on so many GPUs had so many interruptions of a kind in so many days. Raises `ConfigError` for
    a file that cannot be read, and for unknown kinds and impossible numbers.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            columns = tuple(reader.fieldnames or ())
            lines = [line for line, _ in zip(reader, range(_MAX_LINES), strict=False)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"--faults: {path} cannot be read: {printable(reason)}; give a CSV file") from error
    if columns != _COLUMNS:
        raise ConfigError(
            f"--faults: the first line of {path} must be {','.join(_COLUMNS)}; it is "
            f"{printable(','.join(columns)[:100])!r}"
        )
    rates = [_read_line(f"{path}, line {number}", line) for number, line in enumerate(lines, 2)]
    if not any(rate.per_gpu_hour for rate in rates):
        raise ConfigError(f"--faults: {path} has no interruptions; give at least one line with a number above 0")
    return rates


def rate_of_all(rates: Sequence[FaultRate]) -> float:
    """Returns the interruptions per GPU-hour of all kinds."""
    return sum(rate.per_gpu_hour for rate in rates)


def _read_line(place: str, line: dict[str, str]) -> FaultRate:
    kind = line["kind"] or ""
    if kind not in FAULT_KINDS:
        raise ConfigError(
            f"--faults: {place}: {printable(kind[:40])!r} is not a kind of fault{suggest(kind, list(FAULT_KINDS))}; "
            f"kinds are {', '.join(FAULT_KINDS)}"
        )
    numbers = {}
    for name in ("interruptions", "gpus", "days"):
        text = line[name] or ""
        try:
            numbers[name] = float(text)
        except ValueError:
            numbers[name] = -1.0
        is_possible = 0 <= numbers[name] < 1e12 and (name == "interruptions" or numbers[name] > 0)
        if not is_possible:
            bound = "0 or more" if name == "interruptions" else "more than 0"
            raise ConfigError(f"--faults: {place}: {name} is {printable(text[:40])!r}; give a number, {bound}")
    return FaultRate(kind, numbers["interruptions"] / (numbers["gpus"] * numbers["days"] * 24), line["source"] or "")
