"""What a config is made of: sections with keys."""

from functools import partial
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, model_validator

Resume = Literal["harmless", "maths", "breaks"]
"""What a changed key means for a run that resumes: nothing, other numbers from here on, or a refusal."""


def key(default: Any, text: str, *, resume: Resume = "harmless", path: bool = False, **limits: Any) -> Any:
    """Makes a config key: its default, its line of help, its class on resume, and limits such as `ge=1`.

    `path` says that it takes paths, in which `~` is a home.
    """
    extra: dict[str, Any] = {"resume": resume} | ({"path": True} if path else {})
    return Field(default, description=text, json_schema_extra=extra, **limits)


maths_key = partial(key, resume="maths")
"""Makes a key whose change gives other numbers from there on."""
breaking_key = partial(key, resume="breaks")
"""Makes a key whose change a run refuses when it resumes."""


class Section(BaseModel):
    """One section of the config. Unknown keys are errors; instances are frozen.

    Values are not coerced, but for a number such as 1e3, which is the integer that it is where one is wanted.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=False, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _integers(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        annotations = {name: field.annotation for name, field in cls.model_fields.items()}
        return {name: _as_integer(value, annotations.get(name)) for name, value in raw.items()}


_EXACT = 2**53
"""From here on a float does not say which integer is meant."""


def _as_integer(value: Any, annotation: Any) -> Any:
    """The value with floats that are whole as integers, where the type has integers and no floats."""
    if isinstance(value, list):
        return [_as_integer(entry, member) for member in _members(annotation, list)[:1] for entry in value] or value
    if not isinstance(value, float) or not value.is_integer() or abs(value) >= _EXACT:
        return value
    kinds = {member for member in _members(annotation) if isinstance(member, type)}
    return int(value) if int in kinds and float not in kinds else value


def _members(annotation: Any, of: type | None = None) -> list[Any]:
    """The types that a type is made of; with `of`, those that a list or mapping in it has as entries."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _members(arguments[0], of)
    if origin in (Union, UnionType):
        return [inner for member in arguments for inner in _members(member, of)]
    if origin is Literal:
        return [type(choice) for choice in arguments]
    if of is None:
        return [annotation]
    return [arguments[-1]] if origin is of else []
