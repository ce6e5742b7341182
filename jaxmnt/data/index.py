"""Reads the index files of prepared data, which are mapped instead of computing their contents at every start.

    DIR/index/NAME.json       describes an index; sealed; if it exists, the arrays are complete
    DIR/index/NAME-ARRAY.npy  the arrays of the index

An index holds where the documents of a split start (`train-documents`), or the plan of its packed rows
(`train-packed-4096-cut`). `index_files.py` writes it. A split with few documents has no index, because its contents are
computed in a moment.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmnt.data.attempts import NAME_OF_ATTEMPT
from jaxmnt.data.manifest import sealed_text, unsealed
from jaxmnt.data.npy_files import map_array
from jaxmnt.data.packing import Plan, damaged_index_error, plan_rows
from jaxmnt.errors import printable, remark_once
from jaxmnt.storage import read

FOLDER = "index"
CONTENTS = re.compile(rf"lock|[a-z0-9-]{{1,80}}\.(json|npy|npz)(\.{NAME_OF_ATTEMPT}\.tmp)?", re.ASCII)
"""Names of the files in an index folder."""
FORMAT = "jaxmnt-index"
VERSION = 1

MAX_DOCUMENTS_WITHOUT_INDEX = 2**16
"""Maximum number of documents of a split whose starts and plans are computed at every start. That takes 20 ms."""

_MAX_REASON = 200
"""Maximum number of characters of a library's message that are quoted."""


class IndexKey(NamedTuple):
    """Says what an index holds: the document starts of a split, or its plan of packed rows."""

    split: str
    row_length: int | None = None
    """Number of tokens of a packed row; None for the document starts."""
    skip_long: bool = False
    """True if documents that are longer than a row are left out."""

    @property
    def name(self) -> str:
        """Name of the index in its folder."""
        if self.row_length is None:
            return f"{self.split}-documents"
        return f"{self.split}-packed-{self.row_length}-{'skip' if self.skip_long else 'cut'}"

    @property
    def dtypes(self) -> dict[str, np.dtype]:
        """The dtype of each array of the index, by name."""
        if self.row_length is None:
            return {"start": np.dtype(np.int64)}
        return {
            "first_piece": np.dtype(np.int64), "start": np.dtype(np.int64),
            "length": np.dtype(np.int32), "opens": np.dtype(np.bool_),
        }  # fmt: skip


class Index(NamedTuple):
    """An index whose files are mapped."""

    counts: dict[str, int]
    arrays: dict[str, np.ndarray]
    """The arrays by name; read-only views of the mapped files."""


def description_path(folder: Path, name: str) -> Path:
    """Returns the path of the file that describes the index of this name."""
    return folder / f"{name}.json"


def array_path(folder: Path, name: str, array: str) -> Path:
    """Returns the path of an array of the index of this name."""
    return folder / f"{name}-{array}.npy"


def read_index(folder: Path, key: IndexKey, data_digest: str, expected_digest: str | None = None) -> Index | None:
    """Maps an index; returns None if there is none.

    `data_digest` is the digest of the prepared data, and `expected_digest` the SHA-256 of the description in the
    manifest, or None if the manifest does not list the index. Raises `ConfigError` if the index is damaged, of other
    data or of another version. The arrays are not read; `data.verify` compares them with their digests.
    """
    description = read_description(folder, key.name, data_digest, expected_digest)
    if description is None:
        return None
    if description["arrays"].keys() != key.dtypes.keys():
        raise damaged_index_error(folder, f"{key.name}.json lists other arrays")
    try:
        arrays = {name: _map(folder, key, name, entry["length"]) for name, entry in description["arrays"].items()}
    except PermissionError as error:
        _note_unreadable(error)
        return None
    return Index(description["counts"], arrays)


def index_files(folder: Path, data_digest: str, listed: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields the name, relative to the directory of the data, and the SHA-256 of every file of an index folder.

    The arguments are those of `SplitIndex`. Descriptions follow their arrays. Raises `ConfigError` as `read_index`
    does.
    """
    for path in sorted(folder.glob("*.json")):
        description = read_description(folder, path.stem, data_digest, listed.get(path.name))
        if description is None:
            continue  # removed in the meantime
        for array, entry in sorted(description["arrays"].items()):
            yield f"{FOLDER}/{array_path(folder, path.stem, array).name}", entry["sha256"]
        yield f"{FOLDER}/{path.name}", hashlib.sha256(sealed_text(unsealed(description)).encode()).hexdigest()


def read_description(folder: Path, name: str, data_digest: str, expected_digest: str | None) -> dict[str, Any] | None:
    """Returns the description of an index, whose seal and structure are checked; None if there is none. The arguments
    are those of `read_index`."""
    try:
        content = read(description_path(folder, name))
    except FileNotFoundError:
        return None
    except PermissionError as error:
        _note_unreadable(error)
        return None
    except OSError as error:
        raise damaged_index_error(folder, f"{name}.json cannot be read ({error.strerror or error})") from error
    try:
        description = json.loads(content.decode())
        if not isinstance(description, dict) or description.get("format") != FORMAT:
            raise ValueError("it does not describe an index")
        if type(description.get("version")) is int and description["version"] > VERSION:
            raise damaged_index_error(
                folder, f"{name}.json has version {description['version']}, but this jaxmnt reads {VERSION}"
            )
        _check_description(unsealed(description))
    except (ValueError, RecursionError) as error:
        raise damaged_index_error(
            folder, f"{name}.json is not intact ({printable(str(error)[:_MAX_REASON])})"
        ) from error
    if description["data"] != data_digest:
        raise damaged_index_error(folder, f"{name}.json is the index of other data")
    if expected_digest not in (None, hashlib.sha256(content).hexdigest()):
        raise damaged_index_error(folder, f"{name}.json differs from that in the manifest")
    return description


def _note_unreadable(error: PermissionError) -> None:
    """Says that an index is not used because this user may not read it, as if there were none."""
    remark_once(
        f"data.path: {error.filename} may not be read by this user, so its contents are computed in memory; let its "
        "owner change the permissions"
    )


def _check_description(description: dict[str, Any]) -> None:
    """Checks the types of all fields. Raises `ValueError`."""
    if description.keys() != {"format", "version", "data", "counts", "arrays"}:
        raise ValueError("it has other keys")
    is_count = lambda value: type(value) is int and value >= 0
    counts, arrays = description["counts"], description["arrays"]
    if not isinstance(counts, dict) or not all(map(is_count, counts.values())):
        raise ValueError("its counts are not numbers")
    is_array = lambda entry: (
        isinstance(entry, dict) and entry.keys() == {"length", "sha256"} and is_count(entry["length"])
    )
    if not isinstance(arrays, dict) or not all(map(is_array, arrays.values())):
        raise ValueError("its arrays have no length")


def _map(folder: Path, key: IndexKey, name: str, length: int) -> np.ndarray:
    """Maps an array of an index. Raises `ConfigError` unless its type, shape and size match the description."""
    path = array_path(folder, key.name, name)
    try:
        array, file_bytes, expected_bytes = map_array(path, is_read_in_bits=True)
    except PermissionError:
        raise
    except Exception as error:  # NumPy may raise any exception for a damaged header
        reason = getattr(error, "strerror", None) or str(error)
        raise damaged_index_error(folder, f"{path.name} cannot be read ({printable(reason[:_MAX_REASON])})") from error
    if file_bytes != expected_bytes:
        raise damaged_index_error(folder, f"{path.name} has {file_bytes} bytes, but its header says {expected_bytes}")
    if array.dtype != key.dtypes[name] or array.shape != (length,):
        raise damaged_index_error(
            folder, f"{path.name} holds {array.dtype} of shape {array.shape}, not {length} of {key.dtypes[name]}"
        )
    return array


class SplitIndex:
    """The document starts and the plans of a split: mapped if it has an index of them, else computed.

    The methods raise `ConfigError` for a damaged index, and for the errors of `starts_by_shard`.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        data_digest: str,
        documents: int,
        tokens: int,
        starts_by_shard: Callable[[], Iterator[np.ndarray]],
        listed: Mapping[str, str],
    ):
        """`data_digest` is the digest of the prepared data. `starts_by_shard` yields the document starts in the
        stream, shard by shard. `listed` has the SHA-256 of the descriptions that the manifest lists, by file name."""
        self.folder, self.split, self._data_digest = folder, split, data_digest
        self._documents, self._tokens = documents, tokens
        self._starts_by_shard, self._listed = starts_by_shard, listed

    def document_starts(self) -> np.ndarray:
        """Returns the offset in the stream of each document's first token; int64 [documents]."""
        index = self.read(IndexKey(self.split))
        if index is None:
            return np.concatenate([np.zeros(0, np.int64), *self._starts_by_shard()])
        starts = index.arrays["start"]
        if len(starts) != self._documents or starts[0] != 0 or starts[-1] >= self._tokens:
            raise damaged_index_error(self.folder, f"{self.split}-documents-start.npy does not match the manifest")
        return starts

    def plan(self, row_length: int, *, skip_long: bool) -> Plan:
        """Returns the plan of packed rows of `row_length` tokens."""
        key = IndexKey(self.split, row_length, skip_long)
        index = self.read(key)
        if index is None:
            return plan_rows(self.document_starts(), self._tokens, row_length, skip_long=skip_long)
        try:
            return Plan(
                **index.arrays,
                tokens=index.counts["tokens"],
                long_documents=index.counts["long_documents"],
                folder=self.folder,
            )
        except KeyError as error:
            raise damaged_index_error(self.folder, f"{key.name}.json lacks the count {error}") from error

    def read(self, key: IndexKey) -> Index | None:
        """Maps an index of this split; returns None if there is none."""
        if not self.needs_index:
            return None
        return read_index(self.folder, key, self._data_digest, self._listed.get(f"{key.name}.json"))

    @property
    def needs_index(self) -> bool:
        """True if the split has so many documents that an index is worth its files."""
        return self._documents > MAX_DOCUMENTS_WITHOUT_INDEX
