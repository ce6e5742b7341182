"""What may stand in a job script or a manifest."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxmnt.config.secrets import holds_a_secret, is_secret_name
from jaxmnt.errors import ConfigError, printable


def check_rendered(what: dict[str, Any]) -> None:
    """Raises `ConfigError`, with its dotted key, for a text that could become other lines of a script, or that others
    should not read, and for a value that has no form in a manifest, such as a date.

    Every text of a job goes through this, so that none depends on how it is quoted.
    """
    for where, value in _leaves("", what):
        if isinstance(value, str):
            _check_text(where, value)
        elif not (value is None or isinstance(value, (bool, int, float))):
            raise ConfigError(f"{where}: {value!r} must be a text, a number or a boolean; put it in quotes")
    for where, name in _variables("", what):
        if is_secret_name(name):
            raise ConfigError(
                f"{where}: {printable(name)} looks like a secret, and scripts and manifests are readable; take its "
                "value from a Kubernetes secret (valueFrom)"
            )


def _check_text(where: str, text: str) -> None:
    if not text.isprintable():
        raise ConfigError(
            f"{where}: '{printable(text)}' must have no line ends, control characters or other characters that cannot "
            "be printed, since it becomes part of a script or manifest; remove them, or make each line an item"
        )
    if holds_a_secret(text):
        raise ConfigError(
            f"{where}: its value looks like a secret, and scripts and manifests are readable; keep it in a file of "
            "yours or a Kubernetes secret, and read it in launch.setup"
        )


def _leaves(where: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What is no container, with its dotted key; names of mappings, too."""
    if isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str):
                raise ConfigError(f"{where}: the key {name!r} must be a text; put it in quotes")
            yield where, name
            yield from _leaves(f"{where}.{printable(name)}" if where else name, item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(where, item)
    else:
        yield where, str(value) if isinstance(value, Path) else value


def _variables(where: str, value: Any) -> Iterator[tuple[str, str]]:
    """Names of variables that a part of a pod's spec sets to a value."""
    if isinstance(value, dict):
        if isinstance(value.get("name"), str) and value.get("value"):
            yield where, value["name"]
        for name, item in value.items():
            yield from _variables(f"{where}.{name}" if where else name, item)
    elif isinstance(value, list):
        for item in value:
            yield from _variables(where, item)
