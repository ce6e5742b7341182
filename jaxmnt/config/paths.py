"""Settings that are paths: `~` in them means a home, and variables of the shell are refused."""

import os
from collections.abc import Callable
from typing import Any

from jaxmnt.config.explain import field_of
from jaxmnt.errors import ConfigError, shortened

_HUGGING_FACE = "hf:"
"""Stands before the folder in run.init_from."""


def is_path(dotted: str) -> bool:
    """Returns whether a key takes a path, or a list of paths."""
    field = field_of(dotted)
    return field is not None and isinstance(field.json_schema_extra, dict) and "path" in field.json_schema_extra


def with_homes(tree: dict[Any, Any], source_of: Callable[[str], str], prefix: str = "") -> dict[Any, Any]:
    """Returns the tree with `~` replaced in every path. `source_of` says where a key was written.

    Raises `ConfigError` for a variable of the shell, and for `~NAME` if there is no such user.
    """
    expanded: dict[Any, Any] = {}
    for name, value in tree.items():
        dotted = f"{prefix}{name}"
        if isinstance(value, dict):
            expanded[name] = with_homes(value, source_of, f"{dotted}.")
        elif not is_path(dotted):
            expanded[name] = value
        elif isinstance(value, list):
            expanded[name] = [_checked(item, dotted, source_of) for item in value]
        else:
            expanded[name] = _checked(value, dotted, source_of)
    return expanded


def with_home(path: str) -> str:
    """Returns the path with `~` or `~NAME` replaced. Raises `ValueError` if there is no such user."""
    prefix = _HUGGING_FACE if path.startswith(_HUGGING_FACE) else ""
    expanded = os.path.expanduser(path.removeprefix(prefix))  # noqa: PTH111 (pathlib drops what a path ends with)
    if expanded.startswith("~"):
        user = expanded.partition("/")[0]
        raise ValueError(f"there is no user {user[1:]}; write the path out, or ./{user} for a folder of that name")
    return f"{prefix}{expanded}"


def _checked(value: Any, dotted: str, source_of: Callable[[str], str]) -> Any:
    """Returns the path with its home. What is not text is left for the schema to refuse."""
    if not isinstance(value, str):
        return value
    where = f"{source_of(dotted)}: {dotted}: {shortened(repr(value))}"
    if "$" in value:
        raise ConfigError(f"{where} has a $, and settings expand no variables; write the path out, or ~ for the home")
    try:
        return with_home(value)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
