"""One line for whatever is wrong with a config: where it was written, which key, and in words what that key takes."""

import functools
import json
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

from pydantic import ValidationError

from jaxmnt.config.schema import Config
from jaxmnt.errors import closest, printable, shortened

Schema = dict[str, Any]
"""A part of the JSON schema of the config: what a key takes, its help, and what `section.key` says of it."""


class SchemaPath(NamedTuple):
    """Where in the schema a path leads."""

    key: str
    """The path as it is typed: names and numbers with dots between them."""
    schema: Schema | None
    """None if there is no such key."""
    help: str


@functools.cache
def _whole() -> Schema:
    return Config.model_json_schema()


def field_of(dotted: str) -> Schema | None:
    """The schema of a dotted key; any name will do for an entry of a mapping. None if there is none."""
    *parents, last = dotted.split(".")
    return section_fields(parents).get(last)


def section_fields(parents: Sequence[str]) -> dict[str, Schema]:
    """The keys of a section, given as the names on the way to it; empty if that is no section."""
    return (find(parents).schema or {}).get("properties", {})


def find(path: Sequence[str | int]) -> SchemaPath:
    """Follows a path as far as the schema goes. What pydantic adds to it, such as a union's branch, is left off."""
    here, text, names = _whole(), "", list[str]()
    for part in path:
        below = entries_of(here)
        if "properties" in here:
            names.append(str(part))
            if str(part) not in here["properties"]:
                return SchemaPath(".".join(names), None, "")
            below = here["properties"][str(part)]
            text = below.get("description", "")
        elif below is not None:
            names.append(str(part))
        else:
            break
        here = plain(below)
    return SchemaPath(".".join(names), here, text)


def plain(schema: Schema) -> Schema:
    """The section, list or mapping that a schema refers to, or that may be null in it; else the schema itself."""
    if "$ref" in schema:
        return _whole()["$defs"][schema["$ref"].rpartition("/")[2]]
    real = [plain(member) for member in schema.get("anyOf", ()) if member != {"type": "null"}]
    return real[0] if len(real) == 1 and real[0].get("type") in ("object", "array") else schema


def entries_of(schema: Schema) -> Schema | None:
    """What the entries of a list or mapping are; None if it is neither, or they may be anything."""
    entries = schema.get("items") or schema.get("additionalProperties")
    return entries if isinstance(entries, dict) else None


def takes(schema: Schema) -> str:
    """What a key takes, in words: integer from 1 up, or null."""
    *others, last = _alternatives(schema)
    if not others:
        return last
    comma = "," if " " in others[-1] and len(others) == 1 else ""
    return f"{', '.join(others)}{comma} or {last}"


def with_article(words: str) -> str:
    """An integer, a list; but text, true, auto."""
    first = words.partition(" ")[0].rstrip(",")
    articles = {"integer": "an ", "number": "a ", "list": "a ", "mapping": "a ", "section": "a "}
    return articles.get(first, "") + words


def _alternatives(schema: Schema) -> list[str]:
    if "anyOf" in schema:
        return [words for member in schema["anyOf"] for words in _alternatives(member)]
    if "enum" in schema or "const" in schema:
        return [str(choice) for choice in schema.get("enum") or [schema["const"]]]
    if "properties" in plain(schema):
        return ["section with keys"]
    kind, entries = schema["type"], entries_of(schema)
    if kind == "boolean":
        return ["true", "false"]
    if kind in ("array", "object"):
        words = "list of " if kind == "array" else "mapping of names to "
        return ["mapping" if entries is None else words + _plural(entries)]
    return [("text" if kind == "string" else kind) + _range(schema)]


def _plural(schema: Schema) -> str:
    words = takes(schema)
    for singular, plural in {
        "integer": "integers",
        "number": "numbers",
        "list": "lists",
        "section": "sections",
    }.items():
        if words.startswith(singular):
            return words.replace(singular, plural, 1)
    return words


def _range(schema: Schema) -> str:
    limit = {name: _number(schema[name]) for name in _LIMITS if name in schema}
    low = f" from {limit['minimum']}" if "minimum" in limit else ""
    if "exclusiveMinimum" in limit:
        low = f" above {limit['exclusiveMinimum']}"
    if "maximum" in limit:
        return f"{low} {'to' if 'minimum' in limit else 'up to'} {limit['maximum']}"
    if "exclusiveMaximum" in limit:
        return f"{low} to below {limit['exclusiveMaximum']}"
    return f"{low} up" if "minimum" in limit else low


_LIMITS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


def _number(value: float) -> str:
    return f"{value:g}" if value != int(value) else str(int(value))


COMMAND_LINE = "command line"

_LONGEST = 80
"""Characters of a wrong value that are shown."""


def explain(error: ValidationError, sources: Mapping[str, str], name: str) -> str:
    """One message for the first problem, and a count of the others. `sources` says where each key was written."""
    # An unknown key explains most: beside a misspelled one the right one is missing.
    problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    dotted, text = _problem(problems[0], sources)
    different = {_problem(problem, sources) for problem in problems}
    more = f" (the first of {len(different)} problems)" if len(different) > 1 else ""
    where = source_of(dotted, sources) or name
    return printable(": ".join(part for part in (where, dotted, text) if part) + more)


def source_of(dotted: str, sources: Mapping[str, str]) -> str | None:
    """Where a key, what it is part of, or what is part of it, was written."""
    place = dotted
    while place:
        if place in sources:
            return sources[place]
        below = next((where for key, where in sources.items() if key.startswith(f"{place}.")), None)
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
    key, schema, help_line = find(path)
    if schema is None:
        return key, f"unknown key; {_suggestion(key, value)}"
    if "properties" in schema:
        such = f", such as {key}.{next(iter(schema['properties']))}" if key else ""
        return key, f"must be a section with keys{such}, not {_shown(value)}"
    words = with_article(takes(schema))
    actual = "and is missing" if kind == "missing" else f"not {_shown(value)}"
    quotes = ""
    if words.startswith("text") and isinstance(value, bool | int | float):
        typed = source_of(key, sources) == COMMAND_LINE
        quotes = "; for text write two kinds of quotes, '\"…\"'" if typed else '; for text write quotes, "…"'
    return key, f"must be {words}, {actual}{quotes}" + (f" ({help_line})" if help_line else "")


def _suggestion(dotted: str, value: Any) -> str:
    """What somebody may have meant who wrote this key, or this section with this inside."""
    *parents, last = dotted.split(".")
    section_keys = list(section_fields(parents))
    if missing := table()["not_available"].get(last.lower()):
        return f"{missing} is not available in this version"
    if not parents and isinstance(value, dict) and value:
        return _section_suggestion(last, str(next(iter(value))), section_keys)
    if meant := setting_for(last, ".".join(parents)):
        return meant.question
    if close := closest(last, section_keys):
        return f"did you mean {'.'.join([*parents, close])}?"
    everywhere = {name: f"{section}.{name}" for section in section_fields([]) for name in section_fields([section])}
    if elsewhere := closest(last, list(everywhere)):
        return f"did you mean {everywhere[elsewhere]}?"
    return f"known: {', '.join(section_keys)}"


def _section_suggestion(name: str, inner: str, section_keys: list[str]) -> str:
    """Of a section that is none, whose first key is `inner`."""
    section = closest(name, section_keys) or section_for(name)
    if section and inner in section_fields([section]):
        return f"did you mean {section}.{inner}?"
    if meant := setting_for(inner, section or ""):
        return meant.question
    return f"did you mean {section}?" if section else f"known: {', '.join(section_keys)}"


class Suggestion(NamedTuple):
    """The key that somebody means."""

    key: str
    note: str = ""
    """How it differs from what was typed, if it does."""

    @property
    def question(self) -> str:
        return f"did you mean {self.key}?" + (f" ({self.note})" if self.note else "")


@functools.cache
def table() -> dict[str, Any]:
    """Reads `synonyms.json`, when an error is worded.

    `sections` and `settings` have names of other programs, with spaces between them, by a section's name and in order.
    `not_available` names what a key of other programs would ask for that this one does not do.
    """
    return json.loads(files("jaxmnt.config").joinpath("synonyms.json").read_text(encoding="utf-8"))


def section_for(name: str) -> str | None:
    """The section that is called `name` elsewhere."""
    return next((section for section, names in table()["sections"].items() if name in names.split()), None)


def setting_for(name: str, section: str = "") -> Suggestion | None:
    """The key that is called `name` elsewhere, or that has this name in another section than `section`.

    A key of the section itself comes before the same word's meaning in others.
    """
    usual = name.lower().replace("-", "_")
    entries = (entry for entry in table()["settings"] if usual in entry["names"].split())
    meant, places = (
        next((Suggestion(entry["key"], entry.get("note", "")) for entry in entries), None),
        list(_places(usual)),
    )
    if meant and (meant.key.startswith(f"{section}.") or not places):
        return meant
    return Suggestion(" or ".join(places)) if places else None


def _places(name: str) -> Iterator[str]:
    """Every key of a section that has this name."""
    for key in section_fields([]):
        inner = section_fields([key])
        if not inner and key == name:
            yield key
        elif name in inner:
            yield f"{key}.{name}"


def _shown(value: Any) -> str:
    return shortened("null" if value is None else str(value).lower() if isinstance(value, bool) else _repr(value))


def _repr(value: Any) -> str:
    """As `repr`, cut where it is long or deep: what aliases in YAML stand for may be larger than any memory."""
    cut = reprlib.Repr()
    cut.maxlevel, cut.maxdict, cut.maxlist = 3, 20, 20
    cut.maxstring = cut.maxlong = cut.maxother = 2 * _LONGEST
    return cut.repr(value)
