"""Writing the shards of a part; memory does not grow with their size."""

import io
import json
import os
from array import array
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxmnt import storage
from jaxmnt.data.manifest import sealed
from jaxmnt.data.store import file_digest
from jaxmnt.errors import ConfigError, UserError
from jaxmnt.storage import publish

SHARD_TOKENS = 2**26
_HEADER_BYTES = 128
_PIECE = 2**20
"""Values that are written at a time."""


class NpyWriter:
    """A one-dimensional .npy file that is appended to, and that appears under its name when it is whole."""

    def __init__(self, path: Path, work: Path, dtype: np.dtype):
        self._path, self._dtype = path, dtype
        self._temporary = work / f"{path.parent.name}-{path.name}.tmp"
        self.length = 0
        self._file: BinaryIO = self._temporary.open("wb", buffering=2**20)
        self._file.write(b"\0" * _HEADER_BYTES)

    def append(self, values: np.ndarray) -> None:
        for start in range(0, len(values), _PIECE):
            self._file.write(values[start : start + _PIECE].astype(self._dtype, copy=False).tobytes())
        self.length += len(values)

    def close(self) -> str:
        """Finishes the file, durably, and returns its SHA-256."""
        self._file.seek(0)
        self._file.write(_npy_header(self._dtype, self.length))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        digest = file_digest(self._temporary)
        self._temporary.replace(self._path)
        return digest


class ShardWriter:
    """The shards of one split that a part gives rise to, cut after `shard_tokens` tokens."""

    def __init__(
        self, output: Path, work: Path, split: str, part: int, *, dtype: np.dtype, learn_mask: bool, shard_tokens: int
    ):
        self._folder, self._work, self._split, self._part = output / split, work, split, part
        self._dtype, self._learn_mask, self._shard_tokens = dtype, learn_mask, shard_tokens
        self._shards: list[dict[str, Any]] = []
        self._open: tuple[NpyWriter, NpyWriter | None] | None = None
        self._starts, self._origins = array("q"), array("q")
        self.documents = self.tokens = 0

    def begin_document(self, file: int, record: int) -> None:
        """The tokens added from now on belong to a document of this origin."""
        self._shard()
        assert self._open is not None
        self._starts.append(self._open[0].length)
        self._origins.extend((file, record))
        self.documents += 1

    def add(self, tokens: np.ndarray, learn: bool) -> None:
        self.tokens += len(tokens)
        while len(tokens):
            self._shard()
            assert self._open is not None
            writer, mask = self._open
            piece = tokens[: self._shard_tokens - writer.length]
            writer.append(piece)
            if mask is not None:
                mask.append(np.full(len(piece), learn, np.uint8))
            tokens = tokens[len(piece) :]

    def close(self) -> dict[str, Any]:
        """The split's entry in the part's record."""
        if self._open is not None:
            self._close_shard()
        return {"documents": self.documents, "tokens": self.tokens, "shards": self._shards}

    def _shard(self) -> None:
        """Makes sure that a shard is open that takes at least one more token."""
        if self._open is not None and self._open[0].length >= self._shard_tokens:
            self._close_shard()
        if self._open is None:
            mask = self._writer("learn", np.dtype(np.uint8)) if self._learn_mask else None
            self._open = self._writer("tokens", self._dtype), mask

    def _close_shard(self) -> None:
        assert self._open is not None
        writer, mask = self._open
        starts = self._writer("documents", np.dtype(np.int64))
        starts.append(np.array(self._starts, np.int64))
        # The records of origins are counted within the part until all parts are known: see run.py.
        origins = np.array(self._origins, np.int64).reshape(-1, 2)
        save_array(self._work / origins_name(self._split, self._name), origins)
        digests = {self._file("tokens"): writer.close(), self._file("documents"): starts.close()}
        if mask is not None:
            digests[self._file("learn")] = mask.close()
        self._shards.append(
            {"name": self._name, "tokens": writer.length, "documents": len(self._starts), "sha256": digests}
        )
        self._open, self._starts, self._origins = None, array("q"), array("q")

    @property
    def _name(self) -> str:
        return f"{self._part:05d}-{len(self._shards):02d}"

    def _file(self, kind: str) -> str:
        return f"{kind}-{self._name}.npy"

    def _writer(self, kind: str, dtype: np.dtype) -> NpyWriter:
        return NpyWriter(self._folder / self._file(kind), self._work, dtype)


def origins_name(split: str, shard: str) -> str:
    return f"{split}-origins-{shard}.npy"


def save_array(path: Path, array: np.ndarray) -> None:
    """Publishes a small array whole and durably."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as stream:
        np.save(stream, array)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


def read_array(path: Path, *shape: int | None) -> np.ndarray:
    """What `save_array` has published, whole numbers of this shape (None: of any length). Raises `ConfigError` if it is
    not that any more."""
    try:
        array = np.load(io.BytesIO(storage.read(path)), allow_pickle=False)
    except Exception as error:  # on a damaged header NumPy raises what it likes
        raise _damaged(path) from error
    wanted = tuple(there if one is None else one for one, there in zip(shape, array.shape, strict=False))
    if len(shape) != array.ndim or array.shape != wanted or array.dtype != np.int64:
        raise _damaged(path)
    return array


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Publishes what a preparation that goes on later will need, sealed."""
    write_json(path, sealed(json.loads(json.dumps(record))))  # with keys as they will be read


def read_record(path: Path) -> dict[str, Any]:
    """What `write_record` has published. Raises `ConfigError` if it is not that any more."""
    try:
        record = json.loads(storage.read(path).decode())
        found = {name: value for name, value in record.items() if name != "seal"}
        whole = bool(sealed(found) == record)
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise _damaged(path) from error
    if not whole:
        raise _damaged(path)
    return found


def _damaged(path: Path) -> ConfigError:
    return ConfigError(
        f"--output: {path} of an unfinished preparation is damaged, or of an older version; remove the output and "
        "prepare again"
    )


def write_json(path: Path, value: Any) -> None:
    publish(path, json.dumps(value, indent=1, sort_keys=True) + "\n")


def cannot_write(output: Path, error: OSError) -> UserError:
    """What a person is told when the disk is full."""
    return UserError(
        f"--output: {output} cannot be written: {error.strerror or error}; mend that and give the same command again: "
        "it goes on with the parts that are not done"
    )


def _npy_header(dtype: np.dtype, length: int) -> bytes:
    """Version 1.0 of the format, padded to a fixed size so that it can be written last."""
    text = repr({"descr": dtype.newbyteorder("<").str, "fortran_order": False, "shape": (length,)})
    padded = text.ljust(_HEADER_BYTES - 11) + "\n"
    return b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded.encode("ascii")
