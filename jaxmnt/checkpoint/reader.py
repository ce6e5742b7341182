"""Reading arrays of a checkpoint from its files. The only module that knows how Orbax lays them out.

TensorStore alone, without JAX: a laptop can read what a cluster wrote. It reads straight into memory that a CPU
device can use as it is; Orbax's own loading takes more than twice as long there (`benchmarks/checkpoint.py`).
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorstore as ts

from jaxmnt.checkpoint import digest
from jaxmnt.checkpoint.commit import Committed
from jaxmnt.checkpoint.manifest import Array, DamagedError
from jaxmnt.errors import UserError
from jaxmnt.storage import NO_FILE, url

_ALIGNMENT = 64
_INDEX_BYTES = 64 << 20
_NOT_ITS_CONTENT = ("PERMISSION_DENIED", "UNAUTHENTICATED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")
"""Failures of a bucket that say nothing about what was written."""
_SYSTEM_ERROR = re.compile(r"\[os_error_code='(\d+)'\]")
"""How TensorStore ends what it says of an error of the operating system, which its own words for it blur."""


class Reader:
    """The arrays of one checkpoint. Errors: `DamagedError` names the array; `UserError` if files cannot be reached."""

    def __init__(self, checkpoint: Committed, names: Iterable[str] | None = None):
        """Begins to open the arrays with these names (default: all)."""
        self._root = url(checkpoint.path)
        self._arrays = checkpoint.manifest.arrays
        self._context = ts.Context({"cache_pool#index": {"total_bytes_limit": _INDEX_BYTES}})
        self._opening = {name: self._begin_to_open(name) for name in (self._arrays if names is None else names)}
        self._open: dict[str, Any] = {}

    def open_all(self) -> None:
        """Waits until all are open: their places and shapes are there, if not yet their contents."""
        for name in self._opening:
            self._store(name)

    def start(self, name: str, index: Sequence[slice]) -> tuple[np.ndarray, Any]:
        """Begins to read a part of an array; the memory is filled when `finish` has returned."""
        store = self._store(name)
        part = store[tuple(index)] if index else store
        memory = aligned(tuple(part.shape), store.dtype.numpy_dtype)
        return memory, ts.array(memory).write(part)

    def finish(self, name: str, reading: Any) -> None:
        """Waits for a part of an array."""
        try:
            reading.result()
        except Exception as error:
            raise _explained(name, error) from error

    def read(self, name: str, index: Sequence[slice] = ()) -> np.ndarray:
        memory, reading = self.start(name, index)
        self.finish(name, reading)
        return memory

    def pieces(self, name: str, most_bytes: int = 256 << 20) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
        """The whole array in pieces, each with the index where it begins."""
        array = self._arrays[name]
        self._store(name)  # whose shape it is, however large the manifest says that it is
        for start, index in cut(array, most_bytes):
            yield start, self.read(name, index)

    def chunk(self, name: str) -> tuple[int, ...]:
        """What is read at a time, even if a part of it is wanted."""
        return tuple(self._store(name).chunk_layout.read_chunk.shape)

    def content(self, name: str) -> str:
        """The digest of the array as it is in the files."""
        shape, total = self._arrays[name].shape, digest.ZERO
        for start, piece in self.pieces(name):
            total = digest.add(total, digest.block_digest(piece, start, shape))
        return digest.to_text(total)

    def _store(self, name: str) -> Any:
        if name in self._open:
            return self._open[name]
        try:
            store = self._opening[name].result()
        except Exception as error:
            raise _explained(name, error) from error
        array = self._arrays[name]
        if tuple(store.shape) != array.shape or store.dtype.name != array.dtype:
            raise DamagedError(
                f"array {name} is {store.dtype.name}{list(store.shape)} in its files "
                f"and {array.dtype}{list(array.shape)} in the manifest"
            )
        self._open[name] = store
        return store

    def _begin_to_open(self, name: str) -> Any:
        part, _, rest = name.partition("/")
        spec = {
            "driver": "zarr3",
            "kvstore": {
                "driver": "ocdbt",
                "base": f"{self._root}/{part}/",
                "path": f"{rest.replace('/', '.')}/",
                "cache_pool": "cache_pool#index",  # all arrays of a part share one index
            },
        }
        return ts.open(spec, context=self._context, open=True, read=True)


def cut(array: Array, most_bytes: int) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """Cuts an array along its leading dimensions into pieces of about `most_bytes`, in row-major order."""
    item = array.bytes // max(1, math.prod(array.shape))
    steps, room = [], max(1, most_bytes // item)
    for dimension, extent in enumerate(array.shape):
        inner = math.prod(array.shape[dimension + 1 :])
        steps.append(min(max(1, extent), max(1, room // max(1, inner))))
    starts = (range(0, extent, step) for extent, step in zip(array.shape, steps, strict=True))
    for start in itertools.product(*starts):
        ends = zip(start, steps, array.shape, strict=True)
        yield start, tuple(slice(begin, min(begin + step, extent)) for begin, step, extent in ends)


def aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Uninitialised memory that begins where a CPU device wants an array to begin, so that it need not copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + size].view(dtype).reshape(shape)


def _explained(name: str, error: Exception) -> UserError:
    summary = str(error).strip().splitlines()[0][:300]
    system = _SYSTEM_ERROR.search(str(error))
    away = system is not None and int(system[1]) not in NO_FILE
    if away or any(sign in summary for sign in _NOT_ITS_CONTENT) or isinstance(error, PermissionError):
        return UserError(
            f"array {name} of a checkpoint cannot be reached: {summary}; check that it is mounted and "
            "readable and try again"
        )
    return DamagedError(f"array {name} cannot be read: {summary}")
