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
    """Returns the object at the dotted path that a config key names; `expected` describes it in the error.

    Raises `ConfigError` if it cannot be imported.
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
    """Turns errors in the user's model family or loss function into a `ConfigError` with file and line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        named = {"model.family": config.model.family, "train.loss": config.train.loss}
        for key, path in named.items():
            if path and (place := _line_in(path.rpartition(".")[0], error)):
                raise ConfigError(f"{key}: {place}: {printable(summary(error))}; correct it") from error
        raise


def _line_in(module: str, error: Exception) -> str:
    """Returns file:line of the innermost frame of this module in the traceback; empty if there is none."""
    file = getattr(sys.modules.get(module), "__file__", None)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if file and frame.filename == file]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
