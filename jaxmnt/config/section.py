"""The building blocks of a config: sections and keys."""

from functools import partial
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, model_validator

OwnValue = bool | int | float | str | None | list[bool | int | float | str]
"""A setting of a part of the user's own code."""

Resume = Literal["harmless", "maths", "breaks"]
"""Effect of a changed key on a resumed run: harmless has none, maths changes the numerics from then on, breaks is an
error."""


def key(default: Any, text: str, *, resume: Resume = "harmless", path: bool = False, **limits: Any) -> Any:
    """Defines a config key: its default, its help line, the effect of a change on resume, and limits such as `ge=1`.

    `path` marks keys whose values are paths, in which `~` is expanded.
    """
    extra: dict[str, Any] = {"resume": resume} | ({"path": True} if path else {})
    return Field(default, description=text, json_schema_extra=extra, **limits)


maths_key = partial(key, resume="maths")
"""Defines a key that changes the numerics of a resumed run if its value changes."""
breaking_key = partial(key, resume="breaks")
"""Defines a key whose value must not change when a run resumes."""


class Section(BaseModel):
    """One section of the config. Unknown keys are errors; instances are frozen.

    Values are not converted to other types, except that integral floats such as 1e3 become integers where the type
    requires an integer.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=False, allow_inf_nan=False
    )

    def __hash__(self) -> int:
        """Hashes sections with lists and mappings, too, so that a model's settings can be the key of a cache."""
        return hash(self.model_dump_json())

    @model_validator(mode="before")
    @classmethod
    def _convert_integers(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        annotations = {name: field.annotation for name, field in cls.model_fields.items()}
        return {name: _as_integer(value, annotations.get(name)) for name, value in raw.items()}


_EXACT_INTEGERS = 2**53
"""Float64 represents every integer below this exactly."""


def _as_integer(value: Any, annotation: Any) -> Any:
    """Converts integral floats to integers where the type allows integers but no floats. Other values are unchanged."""
    if isinstance(value, list):
        entry_types = _members(annotation, list)
        return [_as_integer(entry, entry_types[0]) for entry in value] if entry_types else value
    if not isinstance(value, float) or not value.is_integer() or abs(value) >= _EXACT_INTEGERS:
        return value
    types = {member for member in _members(annotation) if isinstance(member, type)}
    return int(value) if int in types and float not in types else value


def _members(annotation: Any, container: type | None = None) -> list[Any]:
    """Returns the member types of a union or literal, or the type itself if it is neither.

    With `container`, returns instead the types of the entries of those members that are such containers.
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _members(arguments[0], container)
    if origin in (Union, UnionType):
        return [nested for member in arguments for nested in _members(member, container)]
    if origin is Literal:
        return [type(choice) for choice in arguments]
    if container is None:
        return [annotation]
    return [arguments[-1]] if origin is container else []
