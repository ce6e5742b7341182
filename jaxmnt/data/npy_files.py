"""Writes .npy files piece by piece, and memory-maps them."""

import io
import math
import mmap
import os
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

import numpy as np

from jaxmnt.data.attempts import Attempt
from jaxmnt.data.manifest import file_digest

HEADER_BYTES = 128
"""Size of the header of every .npy file that is written here."""
_MAX_HEADER_BYTES = 4096
"""Maximum size of a header that is read."""


class NpyWriter:
    """Writes a one-dimensional .npy file piece by piece, and publishes it when it is complete."""

    def __init__(self, path: Path, attempt: Attempt, dtype: np.dtype, *, replace: bool = False):
        """`replace` is that of `Attempt.publish`."""
        self._path, self._attempt, self._dtype, self._replace = path, attempt, dtype, replace
        self.length = 0
        """Number of elements so far."""
        self._file: BinaryIO = attempt.temporary(path).open("xb", buffering=2**20)
        self._file.write(b"\0" * HEADER_BYTES)

    def append(self, values: np.ndarray) -> None:
        self._file.write(values.astype(self._dtype, copy=False).data)
        self.length += len(values)

    def close(self) -> str:
        """Publishes the complete file, durably, and returns its SHA-256."""
        self._file.seek(0)
        self._file.write(_npy_header(self._dtype, self.length))
        self._attempt.publish(self._file, self._path, self._replace)
        self._file.close()
        return file_digest(self._path)


class MappedArray(NamedTuple):
    """A memory-mapped .npy file."""

    array: np.ndarray
    """Read-only view of the file; empty if the file is too short."""
    file_bytes: int
    expected_bytes: int
    """Size of the file according to its header."""


def map_array(path: Path, *, is_read_in_bits: bool = False) -> MappedArray:
    """Memory-maps a .npy file. Opens it, reads its header and asks for its size, each once, because storage may be
    slow.

    `is_read_in_bits` is True if few bytes are read at a time, for which reading ahead would be a waste. Raises
    `OSError` if the path cannot be read or is a folder, and any exception of NumPy for a damaged header.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe must not block
    try:
        shape, is_fortran_order, dtype, offset = _parse_header(os.read(descriptor, _MAX_HEADER_BYTES))
        mapping = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)  # 0: the whole file, whose size it asks for
    finally:
        os.close(descriptor)
    if is_read_in_bits:
        mapping.madvise(mmap.MADV_RANDOM)
    expected_bytes = offset + math.prod(shape) * dtype.itemsize
    if len(mapping) < expected_bytes:
        return MappedArray(np.empty(0, dtype), len(mapping), expected_bytes)
    order: Literal["C", "F"] = "F" if is_fortran_order else "C"
    array: np.ndarray = np.ndarray(shape, dtype, mapping, offset, order=order)
    return MappedArray(array, len(mapping), expected_bytes)


def _parse_header(content: bytes) -> tuple[tuple[int, ...], bool, np.dtype, int]:
    """Returns the shape, whether the order is Fortran's, the dtype, and the offset of the first element."""
    stream = io.BytesIO(content)
    version = np.lib.format.read_magic(stream)
    read_header = {
        (1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0,
    }.get(version)  # fmt: skip
    if read_header is None:
        raise ValueError(f"its format version is {version[0]}.{version[1]}")
    shape, is_fortran_order, dtype = read_header(stream)
    if dtype.hasobject:
        raise ValueError("it holds Python objects")
    return shape, is_fortran_order, dtype, stream.tell()


def is_mapped(array: np.ndarray) -> bool:
    """Returns True if the array is a view of a memory-mapped file."""
    return isinstance(array.base, mmap.mmap)


def _npy_header(dtype: np.dtype, length: int) -> bytes:
    """Returns a .npy header of format version 1.0, padded to a fixed size, so that it can be written last."""
    text = repr({"descr": dtype.newbyteorder("<").str, "fortran_order": False, "shape": (length,)})
    padded = text.ljust(HEADER_BYTES - 11) + "\n"
    return b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded.encode("ascii")
