"""Suppresses messages about a missing driver from JAX's plugin for CUDA, if the plugin is installed only for plans.

On a machine without a GPU, each of the plugin's libraries reports while it is loaded that there is no driver, and no
setting can prevent that. So stderr is redirected to a file during the load, and everything else that was written to it
is copied to stderr afterwards.
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

from jaxmnt.distributed.local_gpus import has_cuda_plugin_without_gpu

_PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
_LOADING_MODULES = ("jax", *_PLUGINS)
"""Modules that load the plugin's libraries, when they are imported or in their function `initialize`."""

_STDERR = 2
_MISSING_DRIVER = re.compile(
    rb"^(WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR"
    rb"|I\d{4} .*\bcudart_stub\.cc:\d+\] Could not find cuda drivers on your machine.*)\r?(\n|\Z)",
    re.MULTILINE,
)


def install() -> None:
    """Hides messages about a missing driver during later imports of JAX, unless the environment requests a GPU."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules in `_LOADING_MODULES` as Python does, and wraps their loaders."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _LOADING_MODULES or _gpus_requested() or not has_cuda_plugin_without_gpu():
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _QuietLoader(spec.loader)
        return spec


class _QuietLoader(importlib.abc.Loader):
    """Wraps a module's loader, which it puts back when it loads the module."""

    def __init__(self, loader: importlib.abc.Loader):
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        with hide_missing_driver():
            self._loader.exec_module(module)
        if module.__name__ in _PLUGINS and (initialize := vars(module).get("initialize")) is not None:
            vars(module)["initialize"] = hide_missing_driver()(initialize)


def _gpus_requested() -> bool:
    return os.environ.get("JAX_PLATFORMS", "cpu") not in ("", "cpu")


@contextmanager
def hide_missing_driver() -> Iterator[None]:
    """Captures stderr within this context, and at its end writes all but the lines about a missing driver to stderr.

    If stderr is closed, or no file can be created, nothing is captured. If the process is killed meanwhile, the
    captured output is lost.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            stderr = os.dup(_STDERR)
            stack.callback(os.close, stderr)
            captured = stack.enter_context(tempfile.TemporaryFile())
            _flush_stderr()
            os.dup2(captured.fileno(), _STDERR)
            stack.callback(_restore_stderr, captured, stderr)
        yield


def _restore_stderr(captured: BinaryIO, stderr: int) -> None:
    """Restores stderr, and writes the captured output to it."""
    _flush_stderr()
    os.dup2(stderr, _STDERR)
    captured.seek(0)
    with suppress(OSError), open(_STDERR, "wb", closefd=False) as stream:  # its reader may be gone
        stream.write(_MISSING_DRIVER.sub(b"", captured.read()))


def _flush_stderr() -> None:
    with suppress(OSError, ValueError, AttributeError):  # it may be closed, or not exist
        sys.stderr.flush()
