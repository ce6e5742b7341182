"""One line for whatever is wrong with a config: where it was written, which key, what it takes."""

import reprlib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from jaxmnt.config import fields
from jaxmnt.config.schema import Config
from jaxmnt.config.synonyms import SECTIONS, setting_for
from jaxmnt.errors import nearest, printable

COMMAND_LINE = "command line"

_LONGEST = 80
"""Characters of a wrong value that are shown."""


def explain(error: ValidationError, sources: Mapping[str, str], name: str) -> str:
    """One message for the first problem, and a count of the others. `sources` says where each key was written."""
    problems = error.errors()
    dotted, text = _problem(problems[0], sources)
    different = {_problem(problem, sources) for problem in problems}
    more = f" ({len(different) - 1} more problems follow)" if len(different) > 1 else ""
    where = source_of(dotted, sources) or name
    return printable(": ".join(part for part in (where, dotted, text) if part) + more)


def source_of(dotted: str, sources: Mapping[str, str]) -> str | None:
    """Where a key, what it is part of, or what is part of it, was written."""
    place = dotted
    while place:
        if place in sources:
            return sources[place]
        below = next((where for known, where in sources.items() if known.startswith(f"{place}.")), None)
        if below is not None:
            return below
        place = place.rpartition(".")[0]
    return None


def _problem(problem: Any, sources: Mapping[str, str]) -> tuple[str, str]:
    """The key that a problem is with, and what is wrong."""
    kind, path, value = problem["type"], list(problem["loc"]), problem["input"]
    if kind == "value_error":  # ours, from a rule over several keys: it names its key itself
        key, _, text = str(problem["ctx"]["error"]).partition(": ")
        return key, text
    if kind == "invalid_key" or path[-1:] == ["[key]"]:
        *section, wrong = [part for part in path if part != "[key]"]
        return ".".join(map(str, section)), f"the key {wrong!r} must be text; put it in quotes"
    key, annotation, limits, help_line = fields.find(path)
    if annotation is None:
        return key, f"unknown key; {_suggestion(key, value)}"
    if fields.is_section(annotation):
        such = f", such as {key}.{next(iter(annotation.model_fields))}" if key else ""
        return key, f"must be a section with keys{such}, not {_shown(value)}"
    words = fields.with_article(fields.takes(annotation, limits))
    found = "and is missing" if kind == "missing" else f"not {_shown(value)}"
    quotes = ""
    if words.startswith("text") and isinstance(value, bool | int | float):
        typed = source_of(key, sources) == COMMAND_LINE
        quotes = "; for text write two kinds of quotes, '\"…\"'" if typed else '; for text write quotes, "…"'
    return key, f"must be {words}, {found}{quotes}" + (f" ({help_line})" if help_line else "")


def _suggestion(dotted: str, value: Any) -> str:
    """What somebody may have meant who wrote this key, or this section with this inside."""
    *parents, last = dotted.split(".")
    known = list(fields.section_fields(parents) or {})
    if not parents and isinstance(value, dict) and value:
        return _section_suggestion(last, str(next(iter(value))), known)
    if meant := setting_for(last, ".".join(parents)):
        return f"did you mean {meant.key}?" + (f" ({meant.note})" if meant.note else "")
    hint = nearest(last, known)
    if not hint.startswith("did you mean"):
        everywhere = {key.rpartition(".")[2]: key for key in _all_keys()}
        other = nearest(last, list(everywhere))
        if other.startswith("did you mean"):
            return f"did you mean {everywhere[other.removeprefix('did you mean ').rstrip('?')]}?"
    return hint.replace("did you mean ", f"did you mean {'.'.join(parents)}.") if parents else hint


def _section_suggestion(name: str, inner: str, known: list[str]) -> str:
    """Of a section that is none, whose first key is `inner`."""
    hint = nearest(name, known)
    section = hint.removeprefix("did you mean ").rstrip("?") if hint.startswith("did you mean") else SECTIONS.get(name)
    if section and inner in (fields.section_fields([section]) or {}):
        return f"did you mean {section}.{inner}?"
    if meant := setting_for(inner, section or ""):
        return f"did you mean {meant.key}?" + (f" ({meant.note})" if meant.note else "")
    return f"did you mean {section}?" if section else hint


def _all_keys() -> list[str]:
    return [
        f"{section}.{name}"
        for section, field in Config.model_fields.items()
        if fields.is_section(field.annotation)
        for name in field.annotation.model_fields
    ]


def _shown(value: Any) -> str:
    return shortened("null" if value is None else str(value).lower() if isinstance(value, bool) else _repr(value))


def _repr(value: Any) -> str:
    """As `repr`, cut where it is long or deep: what aliases in YAML stand for may be larger than any memory."""
    cut = reprlib.Repr()
    cut.maxlevel, cut.maxdict, cut.maxlist = 3, 20, 20
    cut.maxstring = cut.maxlong = cut.maxother = 2 * _LONGEST
    return cut.repr(value)


def shortened(text: str) -> str:
    """As much of a text as belongs into a message."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
