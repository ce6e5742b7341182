"""The arrays of a checkpoint in its files, read and written. The only module that knows how Orbax lays them out.

TensorStore alone, without JAX: a laptop can read what a cluster wrote. It reads straight into memory that a CPU
device can use as it is; Orbax's own loading takes more than twice as long there (`benchmarks/checkpoint.py`). Of a new
checkpoint only what reading, and a run that starts from it, need is written: the arrays piece by piece, and Orbax's
marker.
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorstore as ts

from jaxmnt.checkpoint import digest
from jaxmnt.checkpoint.commit import ORBAX_MARKER, Committed
from jaxmnt.checkpoint.manifest import Array, DamagedError
from jaxmnt.errors import UserError
from jaxmnt.storage import NO_FILE, StoragePath, publish, url

Shape = tuple[int, ...]

_ALIGNMENT = 64
_CHUNK_BYTES = 16 << 20
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

    def pieces(self, name: str, most_bytes: int = 256 << 20) -> Iterator[tuple[Shape, np.ndarray]]:
        """The whole array in pieces, each with the index where it begins."""
        array = self._arrays[name]
        self._store(name)  # whose shape it is, however large the manifest says that it is
        for start, index in cut(array, most_bytes):
            yield start, self.read(name, index)

    def chunk(self, name: str) -> Shape:
        """What is read at a time, even if a part of it is wanted."""
        return tuple(self._store(name).chunk_layout.read_chunk.shape)

    def content(self, name: str) -> str:
        """The digest of the array as it is in the files."""
        shape, total = self._arrays[name].shape, digest.ZERO
        for start, piece in self.pieces(name):
            total = digest.add(total, digest.block_digest(piece, start, shape))
        return digest.to_text(total)

    def _store(self, name: str) -> Any:
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
        return store

    def _begin_to_open(self, name: str) -> Any:
        place = _place(self._root, name) | {"cache_pool": "cache_pool#index"}  # all arrays of a part share one index
        return ts.open({"driver": "zarr3", "kvstore": place}, context=self._context, open=True, read=True)


def cut(array: Array, most_bytes: int) -> Iterator[tuple[Shape, tuple[slice, ...]]]:
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


def aligned(shape: Shape, dtype: Any) -> np.ndarray:
    """Uninitialised memory that begins where a CPU device wants an array to begin, so that it need not copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + size].view(dtype).reshape(shape)


def _explained(name: str, error: Exception) -> UserError:
    summary = _summary(error)
    system = _SYSTEM_ERROR.search(str(error))
    away = system is not None and int(system[1]) not in NO_FILE
    if away or any(sign in summary for sign in _NOT_ITS_CONTENT) or isinstance(error, PermissionError):
        return UserError(
            f"array {name} of a checkpoint cannot be reached: {summary}; check that it is mounted and "
            "readable and try again"
        )
    return DamagedError(f"array {name} cannot be read: {summary}")


class Writer:
    """The arrays of a new step directory. Raises `UserError` if it cannot be written."""

    def __init__(self, path: StoragePath):
        self._path = path
        self._arrays: dict[str, tuple[Any, Shape, np.dtype]] = {}
        self._digests: dict[str, digest.Lanes] = {}
        self._context = ts.Context()

    def create(self, name: str, shape: Shape, dtype: np.dtype) -> None:
        """Begins an array, in chunks of whole trailing dimensions: one layer of a stack can be read by itself."""
        spec = {
            "driver": "zarr3",
            "kvstore": _place(url(self._path), name),
            "metadata": {
                "shape": list(shape),
                "data_type": dtype.name,
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": _chunk(shape, dtype)}},
            },
        }
        store = self._tried(name, lambda: ts.open(spec, context=self._context, create=True, open=False).result())
        self._arrays[name], self._digests[name] = (store, shape, dtype), digest.ZERO

    def write(self, name: str, start: Shape, piece: np.ndarray) -> None:
        """Writes a piece that begins at this index."""
        store, shape, dtype = self._arrays[name]
        assert piece.dtype == dtype
        index = tuple(slice(begin, begin + extent) for begin, extent in zip(start, piece.shape, strict=True))
        self._tried(name, lambda: store[index].write(piece).result())
        self._digests[name] = digest.add(self._digests[name], digest.block_digest(piece, start, shape))

    def finish(self) -> dict[str, Array]:
        """Marks the arrays as written, and says what a manifest says of them. The caller commits."""
        publish(self._path / ORBAX_MARKER, "")
        return {
            name: Array(shape, dtype.name, digest.to_text(self._digests[name]))
            for name, (_, shape, dtype) in sorted(self._arrays.items())
        }

    def _tried(self, name: str, action: Any) -> Any:
        try:
            return action()
        except Exception as error:
            raise UserError(f"array {name} cannot be written to {self._path}: {_summary(error)}") from error


def _chunk(shape: Shape, dtype: np.dtype) -> list[int]:
    """Along the first dimensions one, then as many as make a chunk, then all."""
    chunk = [max(1, extent) for extent in shape]
    for dimension in range(len(chunk)):
        inner = math.prod(chunk[dimension + 1 :]) * dtype.itemsize
        chunk[dimension] = min(chunk[dimension], max(1, _CHUNK_BYTES // inner))
        if chunk[dimension] > 1:
            break
    if len(shape) > 1:
        chunk[0] = 1
    return chunk


def _place(root: str, name: str) -> dict[str, str]:
    """Where an array lies, for TensorStore: parts of a state have a database each."""
    part, _, rest = name.partition("/")
    return {"driver": "ocdbt", "base": f"{root}/{part}/", "path": f"{rest.replace('/', '.')}/"}


def _summary(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:300]
