"""Keeps back what JAX's plugin for CUDA says on stderr where it is installed for plans alone.

On a machine without a GPU each of the plugin's libraries says, while it is loaded, that no driver is there. It says so
before anything could be set that keeps it from doing so. So stderr leads into a file for that moment, and what else
came is written out afterwards.
"""

import importlib.abc
import importlib.machinery
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import ModuleType
from typing import BinaryIO

from jaxmnt.distributed.local_gpus import has_plugin_for_plans_alone

_PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
_LOADING = ("jax", *_PLUGINS)
"""Modules whose import loads such libraries, or which do it in their function `initialize`."""

_STDERR = 2
_MISSING_DRIVER = re.compile(
    rb"^(WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR"
    rb"|I\d{4} .*\bcudart_stub\.cc:\d+\] Could not find cuda drivers on your machine.*)\r?(\n|\Z)",
    re.MULTILINE,
)


def install() -> None:
    """From now on the import of JAX is quiet about a missing driver, unless the environment asks for a GPU."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds these modules as Python does, and has them loaded quietly."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _LOADING or not _nobody_asks_for_gpus() or not has_plugin_for_plans_alone():
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _QuietLoader(spec.loader)
        return spec


class _QuietLoader(importlib.abc.Loader):
    """Stands for a module's loader until the module is loaded."""

    def __init__(self, usual: importlib.abc.Loader):
        self._usual = usual

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._usual.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._usual
        if module.__spec__ is not None:
            module.__spec__.loader = self._usual
        with without_missing_driver():
            self._usual.exec_module(module)
        if module.__name__ in _PLUGINS and (initialize := vars(module).get("initialize")) is not None:
            vars(module)["initialize"] = without_missing_driver()(initialize)


def _nobody_asks_for_gpus() -> bool:
    return os.environ.get("JAX_PLATFORMS", "cpu") in ("", "cpu")


@contextmanager
def without_missing_driver() -> Iterator[None]:
    """Inside, what comes to stderr is kept, and all of it but lines about a missing driver written out at the end.

    If stderr is closed, or no file can be made, nothing is kept back. What a process says that is killed meanwhile is
    lost.
    """
    with ExitStack() as held:
        with suppress(OSError):
            stderr = os.dup(_STDERR)
            held.callback(os.close, stderr)
            captured = held.enter_context(tempfile.TemporaryFile())
            _flush()
            os.dup2(captured.fileno(), _STDERR)
            held.callback(_write_out, captured, stderr)
        yield


def _write_out(captured: BinaryIO, stderr: int) -> None:
    """Leads stderr again to where it led, and writes there what has been captured."""
    _flush()
    os.dup2(stderr, _STDERR)
    captured.seek(0)
    with suppress(OSError), open(_STDERR, "wb", closefd=False) as stream:  # nobody may read it any more
        stream.write(_MISSING_DRIVER.sub(b"", captured.read()))


def _flush() -> None:
    with suppress(OSError, ValueError, AttributeError):  # it may be closed, or never have been there
        sys.stderr.flush()
