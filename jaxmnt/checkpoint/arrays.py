"""Reads and writes the arrays in a checkpoint's files. No other module knows how Orbax lays them out.

This module uses TensorStore without JAX, so a laptop can read what a cluster wrote. It reads straight into memory that
a CPU device can use without a copy; on CPU, Orbax's own loading takes more than twice as long
(`benchmarks/checkpoint.py`). `Writer` writes only what readers, and a run that starts from the checkpoint, need: the
arrays, piece by piece, and Orbax's marker.
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
from jaxmnt.storage import UNUSABLE_FILE_ERRNOS, StoragePath, publish, url

Shape = tuple[int, ...]

_ALIGNMENT = 64
_CHUNK_BYTES = 16 << 20
_INDEX_CACHE_BYTES = 64 << 20
_ACCESS_FAILURES = ("PERMISSION_DENIED", "UNAUTHENTICATED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")
"""Status codes of a bucket that cannot be accessed at the moment, which does not mean that its contents are damaged."""
_SYSTEM_ERROR = re.compile(r"\[os_error_code='(\d+)'\]")
"""Matches the error number at the end of TensorStore's message for an operating system error. The wording before it
does not identify the error reliably."""


class Reader:
    """Reads the arrays of one checkpoint.

    Raises `DamagedError`, which names the array, and `UserError` if files cannot be reached.
    """

    def __init__(self, checkpoint: Committed, names: Iterable[str] | None = None):
        """Starts to open the arrays with these names (default: all)."""
        self._root = url(checkpoint.path)
        self._arrays = checkpoint.manifest.arrays
        self._context = ts.Context({"cache_pool#index": {"total_bytes_limit": _INDEX_CACHE_BYTES}})
        self._pending_opens = {name: self._start_opening(name) for name in (self._arrays if names is None else names)}

    def open_all(self) -> None:
        """Waits until all arrays are open, so they exist with the expected shapes. Does not check their contents."""
        for name in self._pending_opens:
            self._opened_store(name)

    def start(self, name: str, index: Sequence[slice]) -> tuple[np.ndarray, Any]:
        """Starts to read a part of an array; returns its memory, which `finish` fills, and the pending read."""
        store = self._opened_store(name)
        part = store[tuple(index)] if index else store
        memory = aligned_array(tuple(part.shape), store.dtype.numpy_dtype)
        return memory, ts.array(memory).write(part)

    def finish(self, name: str, reading: Any) -> None:
        """Waits until the `reading` that `start` returned for the array has filled its memory."""
        try:
            reading.result()
        except Exception as error:
            raise _explain_error(name, error) from error

    def read(self, name: str, index: Sequence[slice] = ()) -> np.ndarray:
        memory, reading = self.start(name, index)
        self.finish(name, reading)
        return memory

    def read_verified(self, name: str) -> np.ndarray:
        """Returns a whole array that fits into memory. Raises `DamagedError` if it is not what was saved."""
        array, entry = self.read(name), self._arrays[name]
        if digest.to_text(digest.block_digest(array, (0,) * array.ndim, entry.shape)) != entry.content:
            raise DamagedError(f"array {name} is not what was saved: its digest differs")
        return array

    def pieces(self, name: str, max_bytes: int = 256 << 20) -> Iterator[tuple[Shape, np.ndarray]]:
        """Yields the whole array in pieces of about `max_bytes`, each after the index at which it begins."""
        array = self._arrays[name]
        self._opened_store(name)  # checks the shape in the manifest before memory is allocated for it
        for start, index in split_array(array, max_bytes):
            yield start, self.read(name, index)

    def chunk_shape(self, name: str) -> Shape:
        """Returns the shape of a chunk of the array, the smallest unit that can be read from the files."""
        return tuple(self._opened_store(name).chunk_layout.read_chunk.shape)

    def content_digest(self, name: str) -> str:
        """Reads the array and returns its digest, which the manifest should contain."""
        shape = self._arrays[name].shape
        total = digest.ZERO
        for start, piece in self.pieces(name):
            total = digest.add(total, digest.block_digest(piece, start, shape))
        return digest.to_text(total)

    def _opened_store(self, name: str) -> Any:
        try:
            store = self._pending_opens[name].result()
        except Exception as error:
            raise _explain_error(name, error) from error
        array = self._arrays[name]
        if tuple(store.shape) != array.shape or store.dtype.name != array.dtype:
            raise DamagedError(
                f"array {name} is {store.dtype.name}{list(store.shape)} in its files "
                f"and {array.dtype}{list(array.shape)} in the manifest"
            )
        return store

    def _start_opening(self, name: str) -> Any:
        # The arrays of a part of the state share one index, so let them share a cache of it.
        store = _key_value_store(self._root, name) | {"cache_pool": "cache_pool#index"}
        return ts.open({"driver": "zarr3", "kvstore": store}, context=self._context, open=True, read=True)


def split_array(array: Array, max_bytes: int) -> Iterator[tuple[Shape, tuple[slice, ...]]]:
    """Splits an array along its leading dimensions into pieces of about `max_bytes`, in row-major order.

    Yields, for each piece, the index at which it begins and the slices that select it.
    """
    element_bytes = array.bytes // max(1, math.prod(array.shape))
    max_elements = max(1, max_bytes // element_bytes)
    steps = []
    for dimension, extent in enumerate(array.shape):
        elements_per_index = math.prod(array.shape[dimension + 1 :])
        indices_that_fit = max(1, max_elements // max(1, elements_per_index))
        steps.append(min(max(1, extent), indices_that_fit))
    starts = (range(0, extent, step) for extent, step in zip(array.shape, steps, strict=True))
    for start in itertools.product(*starts):
        ends = zip(start, steps, array.shape, strict=True)
        yield start, tuple(slice(begin, min(begin + step, extent)) for begin, step, extent in ends)


def aligned_array(shape: Shape, dtype: Any) -> np.ndarray:
    """Returns uninitialised memory, aligned so that a CPU device can use it without a copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + size].view(dtype).reshape(shape)


def _explain_error(name: str, error: Exception) -> UserError:
    """Returns `UserError` if the array cannot be accessed at the moment, and `DamagedError` if it is damaged."""
    summary = _summarize_error(error)
    system_error = _SYSTEM_ERROR.search(str(error))
    is_system_failure = system_error is not None and int(system_error[1]) not in UNUSABLE_FILE_ERRNOS
    is_bucket_failure = any(code in summary for code in _ACCESS_FAILURES)
    if is_system_failure or is_bucket_failure or isinstance(error, PermissionError):
        return UserError(
            f"array {name} of a checkpoint cannot be reached: {summary}; check that the checkpoint is mounted and "
            "readable, and try again"
        )
    return DamagedError(f"array {name} cannot be read: {summary}")


class Writer:
    """Writes the arrays of a new step directory. Its methods raise `UserError` if an array cannot be written."""

    def __init__(self, path: StoragePath):
        self._path = path
        self._arrays: dict[str, tuple[Any, Shape, np.dtype]] = {}
        self._digests: dict[str, digest.Lanes] = {}
        self._context = ts.Context()

    def create(self, name: str, shape: Shape, dtype: np.dtype) -> None:
        """Creates an array.

        If it has several dimensions, a chunk spans one index of the first one, so one layer of a stack can be read
        alone.
        """
        spec = {
            "driver": "zarr3",
            "kvstore": _key_value_store(url(self._path), name),
            "metadata": {
                "shape": list(shape),
                "data_type": dtype.name,
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": _chunk_shape(shape, dtype)}},
            },
        }
        store = self._attempt(name, lambda: ts.open(spec, context=self._context, create=True, open=False).result())
        self._arrays[name] = (store, shape, dtype)
        self._digests[name] = digest.ZERO

    def write(self, name: str, start: Shape, piece: np.ndarray) -> None:
        """Writes a piece that begins at index `start`, and adds it to the array's digest."""
        store, shape, dtype = self._arrays[name]
        assert piece.dtype == dtype
        index = tuple(slice(begin, begin + extent) for begin, extent in zip(start, piece.shape, strict=True))
        self._attempt(name, lambda: store[index].write(piece).result())
        self._digests[name] = digest.add(self._digests[name], digest.block_digest(piece, start, shape))

    def finish(self) -> dict[str, Array]:
        """Marks the arrays as written and returns their manifest entries, with which the caller commits the step."""
        publish(self._path / ORBAX_MARKER, "")
        return {
            name: Array(shape, dtype.name, digest.to_text(self._digests[name]))
            for name, (_, shape, dtype) in sorted(self._arrays.items())
        }

    def _attempt(self, name: str, action: Any) -> Any:
        """Calls `action`, and raises its error as a `UserError` that names the array."""
        try:
            return action()
        except Exception as error:
            raise UserError(f"array {name} cannot be written to {self._path}: {_summarize_error(error)}") from error


def _chunk_shape(shape: Shape, dtype: np.dtype) -> list[int]:
    """Returns the shape of a chunk of at most about `_CHUNK_BYTES`.

    It has extent 1 in the leading dimensions and the full extent in the trailing ones. The dimension between them is
    split so that the chunk fits. The first of several dimensions always has extent 1.
    """
    chunk = [max(1, extent) for extent in shape]
    for dimension in range(len(chunk)):
        bytes_per_index = math.prod(chunk[dimension + 1 :]) * dtype.itemsize
        chunk[dimension] = min(chunk[dimension], max(1, _CHUNK_BYTES // bytes_per_index))
        if chunk[dimension] > 1:
            break
    if len(shape) > 1:
        chunk[0] = 1
    return chunk


def _key_value_store(root: str, name: str) -> dict[str, str]:
    """Returns TensorStore's key-value store spec of an array. Each part of a state has its own OCDBT database."""
    part, _, name_in_part = name.partition("/")
    return {"driver": "ocdbt", "base": f"{root}/{part}/", "path": f"{name_in_part.replace('/', '.')}/"}


def _summarize_error(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:300]
