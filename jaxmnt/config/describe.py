"""The config as help text, as a JSON schema for editors, and as differences between two runs."""

from typing import Any, NamedTuple, cast, get_args, get_origin

from pydantic.fields import FieldInfo

from jaxmnt.config.explain import field_of, is_section, takes
from jaxmnt.config.load import flatten
from jaxmnt.config.schema import Config
from jaxmnt.config.section import Resume
from jaxmnt.strict_json import json_text

MEANING: dict[Resume, str] = {"harmless": "harmless", "maths": "changes the maths", "breaks": "breaks resume"}
"""The classes of a changed key, for people."""

PLANNED = ("train.steps", "data.skip", "data.weight_changes")
"""Keys of the maths that are there to be changed on the way. What else changes the maths has to be accepted."""


CHOSEN = ("mesh.zero",)
"""Keys of which a run keeps what `auto` came to at its first start. So `auto` is no change of them."""


class Change(NamedTuple):
    """A key whose value differs between a run directory and the config at hand."""

    key: str
    before: Any
    now: Any
    resume: Resume


def help_text() -> str:
    """Every key with what it takes, its default and its line of explanation, for a terminal to wrap."""
    return "\n".join(
        f"  {name}  {takes(field.annotation, field.metadata)}; {_default(field)}\n      {field.description}"
        for name, field in fields_by_key().items()
    )


def json_schema() -> str:
    """A JSON schema of the config file, for editors."""
    return json_text(Config.model_json_schema(), indent=2) + "\n"


def fields_by_key() -> dict[str, FieldInfo]:
    """Dotted key → field, in the order of the schema; NAME stands for any name in a mapping."""
    fields: dict[str, FieldInfo] = {}

    def add(prefix: str, field: FieldInfo) -> None:
        annotation = field.annotation
        if not is_section(annotation):
            fields[prefix] = field
        inner, under = annotation, prefix
        if get_origin(annotation) is dict:
            inner, under = get_args(annotation)[1], f"{prefix}.NAME"
        if is_section(inner):
            for name, item in inner.model_fields.items():
                add(f"{under}.{name}", item)

    for name, field in Config.model_fields.items():
        add(name, field)
    return fields


def changes(before: Config, now: Config) -> list[Change]:
    """Keys that differ, each with what that means for a resumed run. A key that one of them lacks counts as null."""
    old, new = flatten(before), flatten(now)
    keys = [*new, *(key for key in old if key not in new)]
    different = [key for key in keys if old.get(key) != new.get(key)]
    different = [key for key in different if not (key in CHOSEN and new.get(key) == "auto")]
    return [Change(key, old.get(key), new.get(key), _resume_class(key)) for key in different]


def maths(config: Config) -> dict[str, Any]:
    """Every key that the numbers of a run depend on, and that can be changed on the way, with its value."""
    return {key: value for key, value in flatten(config).items() if _resume_class(key) == "maths"}


def _resume_class(dotted: str) -> Resume:
    """Of the key, or of the mapping that it is an entry of."""
    field = field_of(dotted)
    while field is None:
        dotted = dotted.rpartition(".")[0]
        field = field_of(dotted)
    assert isinstance(field.json_schema_extra, dict)
    return cast(Resume, field.json_schema_extra["resume"])


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if value in (None, [], {}):
        return f"default {'null' if value is None else 'empty'}"
    return f"default {str(value).lower() if isinstance(value, bool) else value}"
