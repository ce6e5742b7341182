"""Turns validation errors of a config into one line: where it was written, the key, and the values it accepts."""

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
"""Part of the JSON schema of the config: a key's type, its help, and the extra fields that `section.key` adds."""


class SchemaPath(NamedTuple):
    """The part of the schema that a path leads to."""

    key: str
    """The path as a user types it: names and numbers joined by dots."""
    schema: Schema | None
    """None if there is no such key."""
    help: str


@functools.cache
def _config_schema() -> Schema:
    return Config.model_json_schema()


def field_of(dotted: str) -> Schema | None:
    """Returns the schema of a dotted key, or None if the key is unknown. Entries of mappings match any name."""
    *parents, last = dotted.split(".")
    return section_fields(parents).get(last)


def section_fields(parents: Sequence[str]) -> dict[str, Schema]:
    """Returns the keys of the section at a path of names; empty if there is no such section."""
    return (resolve(parents).schema or {}).get("properties", {})


def resolve(path: Sequence[str | int]) -> SchemaPath:
    """Follows a path as far as the schema goes, and drops the parts that pydantic adds, such as a union's branch."""
    here, text, names = _config_schema(), "", list[str]()
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
        here = resolve_reference(below)
    return SchemaPath(".".join(names), here, text)


def resolve_reference(schema: Schema) -> Schema:
    """Returns the section, list or mapping that a schema refers to or allows besides null; else the schema itself."""
    if "$ref" in schema:
        return _config_schema()["$defs"][schema["$ref"].rpartition("/")[2]]
    real = [resolve_reference(member) for member in schema.get("anyOf", ()) if member != {"type": "null"}]
    return real[0] if len(real) == 1 and real[0].get("type") in ("object", "array") else schema


def entries_of(schema: Schema) -> Schema | None:
    """Returns the schema of the entries of a list or mapping; None for other types and for entries of any type."""
    entries = schema.get("items") or schema.get("additionalProperties")
    return entries if isinstance(entries, dict) else None


def describe_values(schema: Schema) -> str:
    """Describes the values that a key accepts: integer from 1 up, or null."""
    *others, last = _alternatives(schema)
    if not others:
        return last
    comma = "," if " " in others[-1] and len(others) == 1 else ""
    return f"{', '.join(others)}{comma} or {last}"


def with_article(words: str) -> str:
    """Puts an article before the words that need one: an integer, a list, but text, true, auto."""
    first = words.partition(" ")[0].rstrip(",")
    articles = {"integer": "an ", "number": "a ", "list": "a ", "mapping": "a ", "section": "a "}
    return articles.get(first, "") + words


def _alternatives(schema: Schema) -> list[str]:
    if "anyOf" in schema:
        return [words for member in schema["anyOf"] for words in _alternatives(member)]
    if "enum" in schema or "const" in schema:
        return [str(choice) for choice in schema.get("enum") or [schema["const"]]]
    if "properties" in resolve_reference(schema):
        return ["section with keys"]
    kind, entries = schema["type"], entries_of(schema)
    if kind == "boolean":
        return ["true", "false"]
    if kind in ("array", "object"):
        words = "list of " if kind == "array" else "mapping of names to "
        return ["mapping" if entries is None else words + _plural(entries)]
    return [("text" if kind == "string" else kind) + _range(schema)]


def _plural(schema: Schema) -> str:
    words = describe_values(schema)
    for noun in ("integer", "number", "list", "section"):
        if words.startswith(noun):
            return words.replace(noun, f"{noun}s", 1)
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

_LONGEST_VALUE = 80
"""Most characters of an invalid value that a message shows."""


def explain(error: ValidationError, sources: Mapping[str, str], name: str) -> str:
    """Returns a message for the first problem, with the number of problems. `sources` maps keys to their origin."""
    # Unknown keys come first: a misspelled required key is also reported as missing.
    problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    dotted, text = _problem(problems[0], sources)
    different = {_problem(problem, sources) for problem in problems}
    more = f" (the first of {len(different)} problems)" if len(different) > 1 else ""
    where = source_of(dotted, sources) or name
    return printable(": ".join(part for part in (where, dotted, text) if part) + more)


def source_of(dotted: str, sources: Mapping[str, str]) -> str | None:
    """Returns where a key, its nearest enclosing section or a key below it was written; None if nowhere."""
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
    """Returns the key that a problem concerns, and the description of the problem."""
    kind, value = problem["type"], problem["input"]
    path = list(problem["loc"])
    if kind == "value_error":  # raised by our own validators, whose text begins with the key
        key, _, text = str(problem["ctx"]["error"]).partition(": ")
        return key, text
    if kind == "invalid_key" or path[-1:] == ["[key]"]:
        *section, wrong = [part for part in path if part != "[key]"]
        return ".".join(map(str, section)), f"the key {wrong!r} must be text; put it in quotes"
    key, schema, help_line = resolve(path)
    if schema is None:
        return key, f"unknown key; {_suggestion(key, value)}"
    if "properties" in schema:
        example = f", such as {key}.{next(iter(schema['properties']))}" if key else ""
        return key, f"must be a section with keys{example}, not {_shown(value)}"
    words = with_article(describe_values(schema))
    actual = "and is missing" if kind == "missing" else f"not {_shown(value)}"
    quotes = ""
    if words.startswith("text") and isinstance(value, bool | int | float):
        typed = source_of(key, sources) == COMMAND_LINE
        quotes = "; for text write two kinds of quotes, '\"…\"'" if typed else '; for text write quotes, "…"'
    return key, f"must be {words}, {actual}{quotes}" + (f" ({help_line})" if help_line else "")


def _suggestion(dotted: str, value: Any) -> str:
    """Suggests the key that was probably meant by an unknown key, or by an unknown section with this value."""
    *parents, last = dotted.split(".")
    section_keys = list(section_fields(parents))
    if feature := synonyms()["not_available"].get(last.lower()):
        return f"{feature} is not available in this version"
    if not parents and isinstance(value, dict) and value:
        return _section_suggestion(last, str(next(iter(value))), section_keys)
    if suggestion := setting_for(last, ".".join(parents)):
        return suggestion.question
    if close := closest(last, section_keys):
        return f"did you mean {'.'.join([*parents, close])}?"
    everywhere = {name: f"{section}.{name}" for section in section_fields([]) for name in section_fields([section])}
    if elsewhere := closest(last, list(everywhere)):
        return f"did you mean {everywhere[elsewhere]}?"
    return f"known: {', '.join(section_keys)}"


def _section_suggestion(name: str, inner: str, section_keys: list[str]) -> str:
    """Suggests a section or key for an unknown section whose first key is `inner`."""
    section = closest(name, section_keys) or section_for(name)
    if section and inner in section_fields([section]):
        return f"did you mean {section}.{inner}?"
    if suggestion := setting_for(inner, section or ""):
        return suggestion.question
    return f"did you mean {section}?" if section else f"known: {', '.join(section_keys)}"


class Suggestion(NamedTuple):
    """A key that the user probably meant."""

    key: str
    note: str = ""
    """The difference from the key that was typed; empty if there is none."""

    @property
    def question(self) -> str:
        return f"did you mean {self.key}?" + (f" ({self.note})" if self.note else "")


@functools.cache
def synonyms() -> dict[str, Any]:
    """Reads `synonyms.json`, on the first error that needs it.

    `sections` and `settings` map our names to the names that other programs use, separated by spaces.
    `not_available` maps keys of other programs to features that this version lacks.
    """
    return json.loads(files("jaxmnt.config").joinpath("synonyms.json").read_text(encoding="utf-8"))


def section_for(name: str) -> str | None:
    """Returns the section that other programs call `name`, if any."""
    return next((section for section, names in synonyms()["sections"].items() if name in names.split()), None)


def setting_for(name: str, section: str = "") -> Suggestion | None:
    """Returns the key that other programs call `name`, or that has this name in a section other than `section`.

    Keys of `section` take precedence.
    """
    normalized = name.lower().replace("-", "_")
    entries = (entry for entry in synonyms()["settings"] if normalized in entry["names"].split())
    synonym = next((Suggestion(entry["key"], entry.get("note", "")) for entry in entries), None)
    same_name = list(_keys_named(normalized))
    if synonym and (synonym.key.startswith(f"{section}.") or not same_name):
        return synonym
    return Suggestion(" or ".join(same_name)) if same_name else None


def _keys_named(name: str) -> Iterator[str]:
    """Yields every top-level key and every key of a section that has this name."""
    for key in section_fields([]):
        inner = section_fields([key])
        if not inner and key == name:
            yield key
        elif name in inner:
            yield f"{key}.{name}"


def _shown(value: Any) -> str:
    return shortened("null" if value is None else str(value).lower() if isinstance(value, bool) else _repr(value))


def _repr(value: Any) -> str:
    """Returns a shortened `repr`. YAML aliases can expand to values that do not fit into memory."""
    cut = reprlib.Repr()
    cut.maxlevel, cut.maxdict, cut.maxlist = 3, 20, 20
    cut.maxstring = cut.maxlong = cut.maxother = 2 * _LONGEST_VALUE
    return cut.repr(value)
