"""jaxmnt: multi-node language-model training in JAX and Flax.

`load_config`, `train`, `load_run` and `load_rows` are the public interface (docs/api.ipynb). Importing this package
imports no JAX and touches no device; using one of them imports what it needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxmnt.api import Run, load_rows, load_run
    from jaxmnt.config import load_config

__version__ = "0.1.0"

__all__ = ["Run", "load_config", "load_rows", "load_run", "train"]

_WHERE = {
    "Run": "jaxmnt.api",
    "load_config": "jaxmnt.config",
    "load_rows": "jaxmnt.api",
    "load_run": "jaxmnt.api",
}


def __getattr__(name: str) -> Any:
    if name == "train":
        return import_module("jaxmnt.train")  # which can be called
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'jaxmnt' has no attribute {name!r}")
