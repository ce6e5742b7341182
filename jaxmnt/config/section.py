"""The building blocks of a config: sections and keys."""

from functools import partial
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, model_validator

Resume = Literal["harmless", "maths", "breaks"]
"""Effect of a changed key on a resumed run: none, different numerics from then on, or an error."""


def key(default: Any, text: str, *, resume: Resume = "harmless", path: bool = False, **limits: Any) -> Any:
    """Defines a config key: its default, help line, resume class, and limits such as `ge=1`.

    `path` marks keys that take paths, in which `~` is expanded.
    """
    extra: dict[str, Any] = {"resume": resume} | ({"path": True} if path else {})
    return Field(default, description=text, json_schema_extra=extra, **limits)


maths_key = partial(key, resume="maths")
"""Defines a key whose change alters the numerics from then on."""
breaking_key = partial(key, resume="breaks")
"""Defines a key that must not change when a run resumes."""


class Section(BaseModel):
    """One section of the config. Unknown keys are errors; instances are frozen.

    Values are not coerced, except that whole floats such as 1e3 become integers where the type requires one.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=False, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _convert_integers(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        annotations = {name: field.annotation for name, field in cls.model_fields.items()}
        return {name: _as_integer(value, annotations.get(name)) for name, value in raw.items()}


_EXACT_FLOATS = 2**53
"""Below this, every integer is exact as a float64."""


def _as_integer(value: Any, annotation: Any) -> Any:
    """Converts whole floats to integers where the type allows integers and no floats."""
    if isinstance(value, list):
        return [_as_integer(entry, member) for member in _members(annotation, list)[:1] for entry in value] or value
    if not isinstance(value, float) or not value.is_integer() or abs(value) >= _EXACT_FLOATS:
        return value
    kinds = {member for member in _members(annotation) if isinstance(member, type)}
    return int(value) if int in kinds and float not in kinds else value


def _members(annotation: Any, of: type | None = None) -> list[Any]:
    """Returns the member types of a union or literal; with `of`, the entry types of its lists or mappings."""
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
