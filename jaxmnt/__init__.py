"""jaxmnt: multi-node language-model training in JAX and Flax.

`load_config`, `train`, `load_run` and `load_rows` are the public interface (docs/api.ipynb). Importing this package
does not import JAX or touch a device. What one of these names needs is imported when the name is used.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxmnt.api import Run, load_rows, load_run
    from jaxmnt.config import load_config

__version__ = "0.2.0"

__all__ = ["Run", "load_config", "load_rows", "load_run", "train"]

_PUBLIC_MODULES = {
    "Run": "jaxmnt.api",
    "load_config": "jaxmnt.config",
    "load_rows": "jaxmnt.api",
    "load_run": "jaxmnt.api",
}


def _before_jax() -> None:
    """Prepares the import of JAX as commands do, so that without a GPU the CPU is used and the CUDA plugin does not
    warn."""
    if "jax" not in sys.modules:
        from jaxmnt.distributed import local_gpus, quiet_plugin

        local_gpus.default_to_cpu(os.environ)
        quiet_plugin.install()


def __dir__() -> list[str]:
    """Returns the public names, each of which is imported when it is used."""
    return ["__version__", *__all__]


def __getattr__(name: str) -> Any:
    if name == "train" or name in _PUBLIC_MODULES:
        _before_jax()
    if name == "train":
        return import_module("jaxmnt.train")  # a callable module
    if name in _PUBLIC_MODULES:
        return getattr(import_module(_PUBLIC_MODULES[name]), name)
    raise AttributeError(f"module 'jaxmnt' has no attribute {name!r}")
