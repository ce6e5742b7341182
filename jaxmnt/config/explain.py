"""One line for whatever is wrong with a config: where it was written, which key, and in words what that key takes."""

import reprlib
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeGuard, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from jaxmnt.config.schema import Config
from jaxmnt.config.synonyms import section_for, setting_for
from jaxmnt.errors import closest, printable, shortened


class SchemaPath(NamedTuple):
    """Where in the schema a path leads."""

    key: str
    """The path as it is typed: names and numbers with dots between them."""
    annotation: Any
    """The type there; None if the schema has no such key."""
    limits: Sequence[Any]
    help: str


def field_of(dotted: str) -> FieldInfo | None:
    """The field that a dotted key names; any name will do for an entry of a mapping. None if there is none."""
    *parents, last = dotted.split(".")
    fields = section_fields(parents)
    return None if fields is None else fields.get(last)


def section_fields(parents: Sequence[str]) -> dict[str, FieldInfo] | None:
    """The fields of a section, given as the names on the way to it; None if that is no section."""
    section = find(parents).annotation
    return dict(section.model_fields) if is_section(section) else None


def is_section(annotation: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def find(path: Sequence[str | int]) -> SchemaPath:
    """Follows a path as far as the schema goes. What pydantic adds to it, such as a union's branch, is left off."""
    here, limits, text, names = Config, [], "", []  # type: Any, list[Any], str, list[str]
    for part in path:
        here, own = _plain(here)
        if is_section(here):
            field = here.model_fields.get(str(part))
            names.append(str(part))
            if field is None:
                return SchemaPath(".".join(names), None, [], "")
            here, limits, text = field.annotation, list(field.metadata), field.description or ""
        elif get_origin(here) in (dict, list):
            here, limits = get_args(here)[-1], []
            names.append(str(part))
        else:
            break
    here, own = _plain(here)
    return SchemaPath(".".join(names), here, [*limits, *own], text)


def takes(annotation: Any, limits: Sequence[Any] = ()) -> str:
    """What a key takes, in words: integer from 1 up, or null."""
    *others, last = _alternatives(annotation, limits)
    if not others:
        return last
    comma = "," if " " in others[-1] and len(others) == 1 else ""
    return f"{', '.join(others)}{comma} or {last}"


def with_article(words: str) -> str:
    """An integer, a list; but text, true, auto."""
    first = words.partition(" ")[0].rstrip(",")
    articles = {"integer": "an ", "number": "a ", "list": "a ", "mapping": "a ", "section": "a "}
    return articles.get(first, "") + words


def _plain(annotation: Any) -> tuple[Any, list[Any]]:
    """The type below `Annotated` and `| None`, and the limits that were written to it."""
    limits: list[Any] = []
    while True:
        if get_origin(annotation) is Annotated:
            annotation, *more = get_args(annotation)
            limits += _limits(more)
            continue
        members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else ()
        real = [member for member in members if member is not NoneType]
        if len(real) != 1 or not (get_origin(real[0]) in (dict, list) or is_section(real[0])):
            return annotation, limits
        annotation = real[0]


def _limits(metadata: Sequence[Any]) -> list[Any]:
    return [limit for one in metadata for limit in (one.metadata if isinstance(one, FieldInfo) else [one])]


def _alternatives(annotation: Any, limits: Sequence[Any]) -> list[str]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _alternatives(arguments[0], _limits(arguments[1:]))
    if origin in (Union, UnionType):
        return [words for member in arguments for words in _alternatives(member, limits)]
    if origin is Literal:
        return [str(choice) for choice in arguments]
    if origin is list:
        return [f"list of {_plural(arguments[0])}"]
    if origin is dict:
        return ["mapping" if arguments[1] is Any else f"mapping of names to {_plural(arguments[1])}"]
    if is_section(annotation):
        return ["section with keys"]
    if annotation is bool:
        return ["true", "false"]
    if annotation is NoneType:
        return ["null"]
    return [{int: "integer", float: "number", str: "text"}[annotation] + _range(limits)]


def _plural(annotation: Any) -> str:
    words = takes(annotation)
    for one, many in {"integer": "integers", "number": "numbers", "list": "lists", "section": "sections"}.items():
        if words.startswith(one):
            return words.replace(one, many, 1)
    return words


def _range(limits: Sequence[Any]) -> str:
    found = {
        name: getattr(limit, name) for limit in limits for name in ("ge", "gt", "le", "lt") if hasattr(limit, name)
    }
    low = (
        f" from {_number(found['ge'])}" if "ge" in found else f" above {_number(found['gt'])}" if "gt" in found else ""
    )
    if "le" in found:
        return f"{low} to {_number(found['le'])}" if "ge" in found else f"{low} up to {_number(found['le'])}"
    if "lt" in found:
        return f"{low} to below {_number(found['lt'])}"
    return f"{low} up" if "ge" in found else low


def _number(value: float) -> str:
    return f"{value:g}" if value != int(value) else str(int(value))


COMMAND_LINE = "command line"

_LONGEST = 80
"""Characters of a wrong value that are shown."""


def explain(error: ValidationError, sources: Mapping[str, str], name: str) -> str:
    """One message for the first problem, and a count of the others. `sources` says where each key was written."""
    problems = error.errors()
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
    key, annotation, limits, help_line = find(path)
    if annotation is None:
        return key, f"unknown key; {_suggestion(key, value)}"
    if is_section(annotation):
        such = f", such as {key}.{next(iter(annotation.model_fields))}" if key else ""
        return key, f"must be a section with keys{such}, not {_shown(value)}"
    words = with_article(takes(annotation, limits))
    found = "and is missing" if kind == "missing" else f"not {_shown(value)}"
    quotes = ""
    if words.startswith("text") and isinstance(value, bool | int | float):
        typed = source_of(key, sources) == COMMAND_LINE
        quotes = "; for text write two kinds of quotes, '\"…\"'" if typed else '; for text write quotes, "…"'
    return key, f"must be {words}, {found}{quotes}" + (f" ({help_line})" if help_line else "")


def _suggestion(dotted: str, value: Any) -> str:
    """What somebody may have meant who wrote this key, or this section with this inside."""
    *parents, last = dotted.split(".")
    known = list(section_fields(parents) or {})
    if not parents and isinstance(value, dict) and value:
        return _section_suggestion(last, str(next(iter(value))), known)
    if meant := setting_for(last, ".".join(parents)):
        return f"did you mean {meant.key}?" + (f" ({meant.note})" if meant.note else "")
    if close := closest(last, known):
        return f"did you mean {'.'.join([*parents, close])}?"
    everywhere = {key.rpartition(".")[2]: key for key in _all_keys()}
    if other := closest(last, list(everywhere)):
        return f"did you mean {everywhere[other]}?"
    return f"known: {', '.join(known)}"


def _section_suggestion(name: str, inner: str, known: list[str]) -> str:
    """Of a section that is none, whose first key is `inner`."""
    section = closest(name, known) or section_for(name)
    if section and inner in (section_fields([section]) or {}):
        return f"did you mean {section}.{inner}?"
    if meant := setting_for(inner, section or ""):
        return f"did you mean {meant.key}?" + (f" ({meant.note})" if meant.note else "")
    return f"did you mean {section}?" if section else f"known: {', '.join(known)}"


def _all_keys() -> list[str]:
    return [
        f"{section}.{name}"
        for section, field in Config.model_fields.items()
        if is_section(field.annotation)
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
