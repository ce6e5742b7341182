"""Imports user code that a config names by a dotted path, gives it its settings, and attributes errors to it."""

import dataclasses
import hashlib
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from jaxmnt.config.schema import Config
from jaxmnt.errors import ConfigError, UserError, printable, suggest, summary

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

_LIBRARIES = {"jaxmnt", "jax", "optax", "flax", "grain"}
"""Packages that are not the user's own, although a config may name something in them."""


def import_dotted(path: str, key: str, expected: str) -> Any:
    """Returns the object at a dotted path, which is the value of a config key.

    Raises `ConfigError` with the key and `expected`, a description of the object, if it cannot be imported.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except Exception as error:  # importing runs user code, which may raise anything
        raise ConfigError(
            f"{key}: {printable(path)} cannot be imported: {printable(summary(error))}; it must be the dotted path of "
            f"{expected}, in a module that can be imported where the run is started"
        ) from error


def own_settings(kind: type[T], values: Mapping[str, Any], key: str, owner: str) -> T:
    """Returns an instance of a dataclass with these values, and its defaults for all others.

    Values are not converted to other types. Raises `ConfigError`, which names the setting `key`.NAME and its `owner`,
    for a name that the dataclass does not have, a value of another type, and a missing value.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}
    types = get_type_hints(kind)
    for name, setting in values.items():
        if name not in fields:
            raise ConfigError(f"{key}.{name}: {owner} has {', '.join(fields)}; {suggest(name, list(fields))}")
        try:
            TypeAdapter(types[name]).validate_python(setting, strict=True)
        except ValidationError as error:
            reason = error.errors(include_url=False)[0]["msg"]
            raise ConfigError(f"{key}.{name}: {printable(repr(setting))}: {reason[0].lower()}{reason[1:]}") from error
    required = [name for name, field in fields.items() if field.default is field.default_factory is dataclasses.MISSING]
    if missing := [name for name in required if name not in values]:
        raise ConfigError(f"{key}.{missing[0]}: not set; {owner} needs it")
    return kind(**values)


def own_modules(config: Config) -> dict[str, str]:
    """Returns a digest of the file of each imported module in the user's own packages, by the module's name. These are
    the packages of everything that changes the maths of the run and that the config names by a dotted path.

    Raises `ConfigError` if one of them cannot be imported.
    """
    paths = _dotted_paths(config)
    for key, path in paths:
        import_dotted(path, key, "a class" if key == "model.family" else "a function")
    packages = {path.partition(".")[0] for _, path in paths} - _LIBRARIES
    files = {
        name: module.__file__
        for name, module in sorted(sys.modules.items())
        if name.partition(".")[0] in packages and getattr(module, "__file__", None)
    }
    return {name: hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16] for name, file in files.items() if file}


def _dotted_paths(config: Config) -> list[tuple[str, str]]:
    """Returns the keys and values of settings that name the user's code. Datasets are not among them, because their
    contents have digests of their own."""
    optimizer = config.optimizer
    settings = [("model.family", config.model.family), ("train.loss", config.train.loss)]
    settings += [("optimizer.kind", optimizer.kind)]
    settings += [(f"optimizer.rules.{index}.kind", rule.kind) for index, rule in enumerate(optimizer.rules)]
    return [(key, path) for key, path in settings if path and "." in path]


@contextmanager
def attributing_user_errors(config: Config) -> Iterator[None]:
    """Turns an error in the user's model family, loss function or optimizer into a `ConfigError`, which names the file
    and the line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        for key, path in _dotted_paths(config):
            if line := _line_in(path.rpartition(".")[0], error):
                raise ConfigError(f"{key}: {line}: {printable(summary(error))}; correct it") from error
        raise


def _line_in(module: str, error: Exception) -> str:
    """Returns the innermost line of a traceback in this module, as file:line; empty if there is none."""
    file = getattr(sys.modules.get(module), "__file__", None)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if file and frame.filename == file]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
