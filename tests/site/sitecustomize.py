"""Imported by every Python that a test starts: each process of a run keeps what it compiled, not process 0 alone.

JAX lets only process 0 write to its compilation cache, and on CPU the programs of the other processes are not process
0's. Without this, every test that starts several processes would compile again in all but one of them.
"""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODULE = "jax._src.compiler"


class WritesInEveryProcess:
    """Changes one module as it is imported, and then leaves: Python asks it about every module."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            change(module)

        spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec


def change(compiler: Any) -> None:
    write, state = compiler._cache_write, compiler.distributed.global_state

    def write_as_process_0(*arguments: Any) -> None:
        number, state.process_id = state.process_id, 0
        try:
            write(*arguments)
        finally:
            state.process_id = number

    compiler._cache_write = write_as_process_0


sys.meta_path.insert(0, WritesInEveryProcess())
