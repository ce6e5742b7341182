"""Imports user code that a config names by a dotted path, and attributes errors to it."""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from jaxmnt.config.schema import Config
from jaxmnt.errors import ConfigError, UserError, printable, summary


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


@contextmanager
def attributing_user_errors(config: Config) -> Iterator[None]:
    """Turns an error in the user's model family or loss function into a `ConfigError` with its file and line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        dotted_paths = {"model.family": config.model.family, "train.loss": config.train.loss}
        for key, path in dotted_paths.items():
            if path and (line := _line_in(path.rpartition(".")[0], error)):
                raise ConfigError(f"{key}: {line}: {printable(summary(error))}; correct it") from error
        raise


def _line_in(module: str, error: Exception) -> str:
    """Returns the innermost line of a traceback in this module, as file:line; empty if there is none."""
    file = getattr(sys.modules.get(module), "__file__", None)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if file and frame.filename == file]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
