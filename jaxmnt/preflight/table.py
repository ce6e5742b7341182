"""Presents the results of a preflight, one row per check, as a table or as JSON."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from jaxmnt.strict_json import json_text
from jaxmnt.telemetry import progress


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True)
class Row:
    """The result of one check."""

    check: str
    verdict: Verdict
    where: str
    """The host at fault or, if the check passed, the hosts or devices that were checked."""
    found: str
    """The result of the check in words, such as a measured rate."""
    advice: str = ""
    """The remedy; empty if none is needed or known."""

    def __str__(self) -> str:
        return f"{self.check}: {self.where}: {self.found}" + (f"; {self.advice}" if self.advice else "")


def ok_row(check: str, where: str, finding: str) -> Row:
    """Returns a row for a check that passed."""
    return Row(check, Verdict.OK, where, finding)


def warning_row(check: str, where: str, finding: str, advice: str) -> Row:
    """Returns a row for a problem with which a run can start."""
    return Row(check, Verdict.WARNING, where, finding, advice)


def failed_row(check: str, where: str, finding: str, advice: str) -> Row:
    """Returns a row for a problem with which a run cannot or should not start."""
    return Row(check, Verdict.FAILED, where, finding, advice)


def failures(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows of the checks that failed."""
    return [row for row in rows if row.verdict is Verdict.FAILED]


def describe_hosts(hosts: Iterable[str]) -> str:
    """Returns the text that stands for these hosts in a row. `hosts` may contain duplicates."""
    names = [*dict.fromkeys(hosts)]
    return names[0] if len(names) == 1 else f"all {len(names)} hosts"


def table(rows: Sequence[Row]) -> str:
    """Returns an aligned table with one line for each row, followed by a line with its advice, if it has any."""
    header = ("check", "verdict", "where", "found")
    aligned = progress.table([header, *((row.check, row.verdict, row.where, row.found) for row in rows)], right=set())
    lines = aligned[:1]
    indent = " " * aligned[0].index("found")
    for row, line in zip(rows, aligned[1:], strict=True):
        lines += [line, f"{indent}→ {row.advice}"] if row.advice else [line]
    return "\n".join(lines)


def to_json(rows: Sequence[Row]) -> str:
    """Returns a JSON array with an object for each row, which has the fields of `Row`."""
    return json_text([asdict(row) for row in rows], indent=1, ensure_ascii=False)
