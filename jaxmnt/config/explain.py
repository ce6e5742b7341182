"""Describes a validation error of a config in one line: where the key was written, the key, and what it accepts."""

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
    """The end of a path through the schema."""

    key: str
    """The path as a user types it: names and numbers joined by dots."""
    schema: Schema | None
    """The schema at the end of the path; None if there is no such key."""
    help: str
    """The help line of the key; empty if it has none."""


@functools.cache
def _config_schema() -> Schema:
    return Config.model_json_schema()


def field_of(dotted: str) -> Schema | None:
    """Returns the schema of a dotted key, or None if the key is unknown. Entries of mappings match any name."""
    *parents, last = dotted.split(".")
    return section_fields(parents).get(last)


def section_fields(parents: Sequence[str]) -> dict[str, Schema]:
    """Returns the schema of each key of the section at this path; empty if there is no such section."""
    return (resolve(parents).schema or {}).get("properties", {})


def resolve(path: Sequence[str | int]) -> SchemaPath:
    """Follows a path into the schema, and ignores the parts that pydantic adds, such as the branch of a union."""
    schema = _config_schema()
    help_line = ""
    names: list[str] = []
    for part in path:
        child = entries_of(schema)
        if "properties" in schema:
            names.append(str(part))
            if str(part) not in schema["properties"]:
                return SchemaPath(".".join(names), None, "")
            child = schema["properties"][str(part)]
            help_line = child.get("description", "")
        elif child is not None:
            names.append(str(part))
        else:
            break
        schema = resolve_reference(child)
    return SchemaPath(".".join(names), schema, help_line)


def resolve_reference(schema: Schema) -> Schema:
    """Returns the section, list or mapping that a schema refers to, or allows in addition to null.

    Returns other schemas unchanged.
    """
    if "$ref" in schema:
        return _config_schema()["$defs"][schema["$ref"].rpartition("/")[2]]
    options = [resolve_reference(member) for member in schema.get("anyOf", ()) if member != {"type": "null"}]
    return options[0] if len(options) == 1 and options[0].get("type") in ("object", "array") else schema


def entries_of(schema: Schema) -> Schema | None:
    """Returns the schema of the entries of a list or mapping; None for other types and for entries of any type."""
    entries = schema.get("items") or schema.get("additionalProperties")
    return entries if isinstance(entries, dict) else None


def describe_values(schema: Schema) -> str:
    """Describes the values that a key accepts, such as: integer of at least 1, or null."""
    *others, last = _alternatives(schema)
    if not others:
        return last
    comma = "," if " " in others[-1] and len(others) == 1 else ""
    return f"{', '.join(others)}{comma} or {last}"


def with_article(words: str) -> str:
    """Puts an article before a description that needs one: an integer, a list; but not before text, true or auto."""
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
    """Returns the range of numbers that a schema allows, after a space; empty if it allows all numbers."""
    limits = {name: _number(schema[name]) for name in _LIMITS if name in schema}
    if "minimum" in limits and "maximum" in limits:
        return f" from {limits['minimum']} to {limits['maximum']}"
    bounds = [f"{words} {limits[name]}" for name, words in _LIMITS.items() if name in limits]
    return f" {' and '.join(bounds)}" if bounds else ""


_LIMITS = {
    "minimum": "of at least",
    "exclusiveMinimum": "above",
    "maximum": "of at most",
    "exclusiveMaximum": "below",
}
"""Keywords of JSON schema that limit a number, with the words that describe the limit."""


def _number(value: float) -> str:
    return f"{value:g}" if value != int(value) else str(int(value))


COMMAND_LINE = "command line"
"""The origin of keys that were set on the command line, in place of a file and line."""

_MAX_REPR_CHARACTERS = 160
"""Maximum number of characters of a text or number in `_limited_repr`. `shortened` then cuts the whole."""


def explain(error: ValidationError, sources: Mapping[str, str], name: str) -> str:
    """Returns a message for the first problem, with the number of problems.

    `sources` maps keys to the places where they were written. `name` stands for the config if that place is unknown.
    """
    # Unknown keys come first, because a misspelled required key is also reported as missing.
    problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    dotted, text = _key_and_text(problems[0], sources)
    distinct = {_key_and_text(problem, sources) for problem in problems}
    remark = f" (the first of {len(distinct)} problems)" if len(distinct) > 1 else ""
    where = source_of(dotted, sources) or name
    return printable(": ".join(part for part in (where, dotted, text) if part) + remark)


def source_of(dotted: str, sources: Mapping[str, str]) -> str | None:
    """Returns where a key was written, or else a key inside it, or else the nearest enclosing section.

    Returns None if none of them was written.
    """
    path = dotted
    while path:
        if path in sources:
            return sources[path]
        where_inside = next((where for key, where in sources.items() if key.startswith(f"{path}.")), None)
        if where_inside is not None:
            return where_inside
        path = path.rpartition(".")[0]
    return None


def _key_and_text(problem: Any, sources: Mapping[str, str]) -> tuple[str, str]:
    """Returns the key that a problem of pydantic concerns, and a description of the problem."""
    kind = problem["type"]
    value = problem["input"]
    path = list(problem["loc"])
    if kind == "value_error":  # raised by our own validators, whose text begins with the key
        key, _, text = str(problem["ctx"]["error"]).partition(": ")
        return key, text
    if kind == "invalid_key" or path[-1:] == ["[key]"]:
        *section, name = [part for part in path if part != "[key]"]
        return ".".join(map(str, section)), f"the key {name!r} must be text; put it in quotes"
    key, schema, help_line = resolve(path)
    if schema is None:
        return key, f"unknown key; {_suggestion(key, value)}"
    if "properties" in schema:
        example = f", such as {key}.{next(iter(schema['properties']))}" if key else ""
        return key, f"must be a section with keys{example}, not {_shortened_value(value)}"
    expected = with_article(describe_values(schema))
    actual = "and is missing" if kind == "missing" else f"not {_shortened_value(value)}"
    advice = ""
    if expected.startswith("text") and isinstance(value, bool | int | float):
        advice = '; to make it text, put it in quotes: "…"'
        if source_of(key, sources) == COMMAND_LINE:
            advice = "; to make it text, put it in two kinds of quotes: '\"…\"'"
    return key, f"must be {expected}, {actual}{advice}" + (f" ({help_line})" if help_line else "")


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
    dotted_keys = {name: f"{section}.{name}" for section in section_fields([]) for name in section_fields([section])}
    if close := closest(last, list(dotted_keys)):
        return f"did you mean {dotted_keys[close]}?"
    return f"known: {', '.join(section_keys)}"


def _section_suggestion(name: str, first_key: str, section_keys: list[str]) -> str:
    """Suggests a section or key for an unknown section that contains `first_key`."""
    section = closest(name, section_keys) or section_for(name)
    if section and first_key in section_fields([section]):
        return f"did you mean {section}.{first_key}?"
    if suggestion := setting_for(first_key, section or ""):
        return suggestion.question
    return f"did you mean {section}?" if section else f"known: {', '.join(section_keys)}"


class Suggestion(NamedTuple):
    """A key that the user probably meant."""

    key: str
    note: str = ""
    """Difference between the suggested key and the one that was typed; empty if they mean the same."""

    @property
    def question(self) -> str:
        return f"did you mean {self.key}?" + (f" ({self.note})" if self.note else "")


@functools.cache
def synonyms() -> dict[str, Any]:
    """Returns the contents of `synonyms.json`, which is read at the first error that needs it.

    `sections` and `settings` map our names to the names that other programs use, separated by spaces.
    `not_available` maps keys of other programs to features that this version lacks.
    """
    return json.loads(files("jaxmnt.config").joinpath("synonyms.json").read_text(encoding="utf-8"))


def section_for(name: str) -> str | None:
    """Returns the section that other programs call `name`, or None."""
    return next((section for section, names in synonyms()["sections"].items() if name in names.split()), None)


def setting_for(name: str, section: str = "") -> Suggestion | None:
    """Returns a suggestion for `name`: the key that other programs call so, or our keys of that name in any section.

    Synonyms of keys in `section` take precedence. Returns None if there is no such key.
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
        fields = section_fields([key])
        if not fields and key == name:
            yield key
        elif name in fields:
            yield f"{key}.{name}"


def _shortened_value(value: Any) -> str:
    """Returns a value for a message: null, true and false as in YAML, and others as a shortened `repr`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return shortened(_limited_repr(value))


def _limited_repr(value: Any) -> str:
    """Returns the beginning of a value's `repr`. The full text could exceed memory, because YAML aliases expand."""
    representation = reprlib.Repr()
    representation.maxlevel = 3
    representation.maxdict = representation.maxlist = 20
    representation.maxstring = representation.maxlong = representation.maxother = _MAX_REPR_CHARACTERS
    return representation.repr(value)
