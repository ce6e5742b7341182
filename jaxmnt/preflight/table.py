"""What a preflight found: one row a check, as a table or as JSON."""

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
    """One check."""

    check: str
    verdict: Verdict
    where: str
    """The host at fault, or whom it is about."""
    found: str
    advice: str = ""
    """What to do; empty if nothing is."""

    def __str__(self) -> str:
        return f"{self.check}: {self.where}: {self.found}" + (f"; {self.advice}" if self.advice else "")


def good(check: str, where: str, found: str) -> Row:
    return Row(check, Verdict.OK, where, found)


def warning(check: str, where: str, found: str, advice: str) -> Row:
    return Row(check, Verdict.WARNING, where, found, advice)


def failed(check: str, where: str, found: str, advice: str) -> Row:
    return Row(check, Verdict.FAILED, where, found, advice)


def failures(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.verdict is Verdict.FAILED]


def describe_hosts(hosts: Iterable[str]) -> str:
    """Returns how a row names these hosts, each of which may be there several times."""
    names = [*dict.fromkeys(hosts)]
    return names[0] if len(names) == 1 else f"all {len(names)} hosts"


def table(rows: Sequence[Row]) -> str:
    """Aligned, one line a check; what to do stands below the line that it is about."""
    head = ("check", "verdict", "where", "found")
    aligned = progress.table([head, *((row.check, row.verdict, row.where, row.found) for row in rows)], right=set())
    lines, indent = aligned[:1], " " * aligned[0].index("found")
    for row, line in zip(rows, aligned[1:], strict=True):
        lines += [line, f"{indent}→ {row.advice}"] if row.advice else [line]
    return "\n".join(lines)


def to_json(rows: Sequence[Row]) -> str:
    return json_text([asdict(row) for row in rows], indent=1, ensure_ascii=False)


def from_json(text: str) -> list[Row]:
    return [Row(**one | {"verdict": Verdict(one["verdict"])}) for one in json.loads(text)]
