"""Presents the results of a preflight, one row per check, as a table or as JSON."""

import json
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
    """The host at fault, or the hosts or devices that were checked."""
    found: str
    advice: str = ""
    """The remedy; empty if there is nothing to do."""

    def __str__(self) -> str:
        return f"{self.check}: {self.where}: {self.found}" + (f"; {self.advice}" if self.advice else "")


def good(check: str, where: str, finding: str) -> Row:
    return Row(check, Verdict.OK, where, finding)


def warning(check: str, where: str, finding: str, advice: str) -> Row:
    return Row(check, Verdict.WARNING, where, finding, advice)


def failed(check: str, where: str, finding: str, advice: str) -> Row:
    return Row(check, Verdict.FAILED, where, finding, advice)


def failures(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.verdict is Verdict.FAILED]


def describe_hosts(hosts: Iterable[str]) -> str:
    """Returns the text by which a row names these hosts, which may contain duplicates."""
    names = [*dict.fromkeys(hosts)]
    return names[0] if len(names) == 1 else f"all {len(names)} hosts"


def table(rows: Sequence[Row]) -> str:
    """Returns an aligned table with one line per check, and the advice below the line of its check."""
    head = ("check", "verdict", "where", "found")
    aligned = progress.table([head, *((row.check, row.verdict, row.where, row.found) for row in rows)], right=set())
    lines, indent = aligned[:1], " " * aligned[0].index("found")
    for row, line in zip(rows, aligned[1:], strict=True):
        lines += [line, f"{indent}→ {row.advice}"] if row.advice else [line]
    return "\n".join(lines)


def to_json(rows: Sequence[Row]) -> str:
    return json_text([asdict(row) for row in rows], indent=1, ensure_ascii=False)


def from_json(text: str) -> list[Row]:
    return [Row(**record | {"verdict": Verdict(record["verdict"])}) for record in json.loads(text)]
