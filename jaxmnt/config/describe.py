"""The config as help text, as a JSON schema for editors, and as differences between two runs."""

import json
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from jaxmnt.config.load import flatten
from jaxmnt.config.schema import Config, Resume


class Change(NamedTuple):
    """A key whose value differs between a run directory and the config at hand."""

    key: str
    before: Any
    now: Any
    resume: Resume


def help_text() -> str:
    """Every key with its type, default and line of explanation."""
    rows = [
        (name, _type_name(field.annotation), _default(field), field.description or "")
        for name, field in sorted_fields().items()
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        f"  {name:<{widths[0]}}  {kind:<{widths[1]}}  {default:<{widths[2]}}  {text}"
        for name, kind, default, text in rows
    )


def json_schema() -> str:
    """A JSON schema of the config file, for editors."""
    return json.dumps(Config.model_json_schema(), indent=2) + "\n"


def sorted_fields() -> dict[str, FieldInfo]:
    """Dotted key → field, in the order of the schema."""
    fields: dict[str, FieldInfo] = {}
    for name, field in Config.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            fields |= {f"{name}.{sub}": item for sub, item in section.model_fields.items()}
        else:
            fields[name] = field
    return fields


def changes(before: Config, now: Config) -> list[Change]:
    """Keys that differ, each with what that means for a resumed run."""
    fields = sorted_fields()
    old, new = flatten(before), flatten(now)
    return [Change(key, old[key], new[key], _resume_class(fields[key])) for key in new if old.get(key) != new[key]]


def _resume_class(field: FieldInfo) -> Resume:
    extra = field.json_schema_extra
    assert isinstance(extra, dict)
    return extra["resume"]  # type: ignore[return-value]


def _type_name(annotation: Any) -> str:
    if annotation is type(None):
        return "null"
    if get_origin(annotation) is not None and get_args(annotation):
        parts = [repr(a)[1:-1] if isinstance(a, str) else _type_name(a) for a in get_args(annotation)]
        return "|".join(parts)
    return getattr(annotation, "__name__", str(annotation))


def _default(field: FieldInfo) -> str:
    value = field.default
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
