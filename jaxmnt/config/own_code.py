"""Code of a user that a config names by a dotted path: how it is imported, and how its errors are told."""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from jaxmnt.config.schema import Config
from jaxmnt.errors import ConfigError, UserError, printable, summary


def import_dotted(path: str, key: str, expected: str) -> Any:
    """The object at the dotted path that a key of the config has. Raises `ConfigError` if it cannot be imported."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except Exception as error:  # it may be the user's own code that runs
        raise ConfigError(
            f"{key}: {printable(path)} cannot be imported: {printable(summary(error))}; it must be the dotted path of "
            f"{expected}, in a module that can be imported where the run is started"
        ) from error


@contextmanager
def telling_whose_code(config: Config) -> Iterator[None]:
    """Inside, an error in the family or the loss that the config names becomes a `ConfigError` with its place."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        named = {"model.family": config.model.family, "train.loss": config.train.loss}
        for key, path in named.items():
            if path and (place := _place_in(path.rpartition(".")[0], error)):
                raise ConfigError(f"{key}: {place}: {printable(summary(error))}; correct it") from error
        raise


def _place_in(module: str, error: Exception) -> str:
    """The innermost line of this module that the error went through; empty if there is none."""
    file = getattr(sys.modules.get(module), "__file__", None)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if file and frame.filename == file]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
