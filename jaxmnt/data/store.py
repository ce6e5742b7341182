"""Defines and reads the format of prepared data: flat NumPy arrays, and a manifest that marks them as complete.

    DIR/manifest.json              describes the contents; sealed; if it exists, all other files are complete
    DIR/tokenizer.json             the tokenizer; missing if it is bytes
    DIR/sources.txt                names of the input files in order of their numbers; each line is a JSON string
    DIR/SPLIT/tokens-SHARD.npy     token ids; if there is an end-of-document id, it follows each document
    DIR/SPLIT/documents-SHARD.npy  int64 [documents]: offset in this shard at which each document starts
    DIR/SPLIT/origins-SHARD.npy    int64 [documents, 2]: number of the input file, and of the record in it (from 1)
    DIR/SPLIT/learn-SHARD.npy      uint8 per token: 0 if it is not a target; only if `learn_mask` is true
    DIR/index                      document starts and plans of large splits, which can be written again; see `index.py`

A split is one stream that is cut into shards, so a document may continue in the next shard. `numpy.load` opens the
files. They are memory-mapped and read a batch at a time, which delivers several times as many tokens per CPU time as a
record format (benchmarks/data.py).

Files may be damaged or changed by hand. Only `verify` reads every file and compares its digest. Cheap checks always
run: of the manifest, of the type and size of each file, of document starts when they are loaded, and of the ids of each
batch.
"""

import errno
import functools
import hashlib
import json
import math
import stat
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from jaxmnt.data.chat.template import ChatFormat
from jaxmnt.data.index import FOLDER as INDEX_FOLDER
from jaxmnt.data.index import SplitIndex, index_files
from jaxmnt.data.manifest import (
    CHAT_TEMPLATE_FILE,
    HOW_TO_PREPARE,
    HOW_TO_REPAIR,
    SOURCES,
    SPLITS,
    UNSEALED,
    content_digest,
    file_digest,
    read_manifest,
)
from jaxmnt.data.npy_files import HEADER_BYTES, is_mapped, map_array
from jaxmnt.data.open_shards import LazyShards
from jaxmnt.data.packing import Plan, damaged_index_error, plan_rows
from jaxmnt.errors import ConfigError, UserError, printable
from jaxmnt.storage import read

_KINDS = {
    "tokens": (None, "tokens"), "learn": ("uint8", "tokens"),
    "documents": ("int64", "documents"), "origins": ("int64", "documents"),
}  # fmt: skip
"""For each kind of file: its dtype (None for the dtype in the manifest), and the entry of a shard that has its
length."""


_LOOKUPS_AT_A_TIME = 16
"""Number of files whose sizes are looked up at the same time."""


class Origin(NamedTuple):
    """The place in the input from which a document came."""

    file: str
    record: int
    """Number of the line, row, document or element in the file or dataset, from 1."""


class TokenStream(ABC):
    """Random access to one split as a single stream of tokens. Thread-safe."""

    tokens: int
    """Number of tokens."""
    has_learn_mask: bool
    """True if the stream has a target mask; else every token is a target."""

    def __init__(self, document_starts: Callable[[], np.ndarray], end_of_document: int | None):
        self._document_starts = document_starts
        self.end_of_document = end_of_document

    @property
    def filler(self) -> int:
        """The id before a document and in padding: the end-of-document id, or 0 if there is no such id."""
        return self.end_of_document or 0

    @property
    def index_bytes(self) -> int:
        """Host memory of the document boundaries, in bytes. Mapped files take none."""
        return 0 if is_mapped(self.document_starts) else self.document_starts.nbytes

    @functools.cached_property
    def document_starts(self) -> np.ndarray:
        """Offset in the stream of each document's first token; int64, loaded on first use."""
        return self._document_starts()

    def plan(self, row_length: int, *, skip_long: bool) -> Plan:
        """Returns the plan of packed rows of `row_length` tokens. With `skip_long`, longer documents are left out."""
        return plan_rows(self.document_starts, self.tokens, row_length, skip_long=skip_long)

    def documents(self, offsets: np.ndarray) -> np.ndarray:
        """Returns the number of the document that contains each offset."""
        return np.searchsorted(self.document_starts, offsets, side="right") - 1

    def read(self, start: int, out: np.ndarray) -> None:
        """Copies tokens into `out`, from offset `start` on. The stream must have enough of them."""
        if len(out):
            self.read_all(np.array([start], np.int64), [out])

    @abstractmethod
    def read_all(self, starts: np.ndarray, outs: Sequence[np.ndarray], field: str = "tokens") -> None:
        """Copies the range that begins at each start into the array of `outs` with the same index, which must not be
        empty.

        `field` is `tokens`, or `weights` for the target mask, which requires `has_learn_mask`. The mask is 0 where a
        token is not a target.
        """

    def are_valid_ids(self, tokens: np.ndarray) -> bool:
        """Returns True if these int32 tokens are all in the vocabulary. Checks only the maximum of their unsigned
        values."""
        return True

    def raise_invalid_id(self, offsets: np.ndarray) -> NoReturn:
        """Raises `ConfigError` for the first token at these offsets that is not in the vocabulary. There must be
        one."""
        raise AssertionError("all ids are in the vocabulary")

    def check_target_mask(self, weights: np.ndarray) -> None:
        """Raises `ConfigError` if weights that were read from the target mask are not all 0 or 1."""
        assert weights.max(initial=0) <= 1


class StoredTokens(TokenStream):
    """A stream whose shards are arrays. Reading changes no state."""

    def __init__(
        self,
        tokens: Sequence[np.ndarray],
        document_starts: Callable[[], np.ndarray],
        end_of_document: int | None,
        learn: Sequence[np.ndarray] | None = None,
        *,
        index: SplitIndex | None = None,
        lengths: Sequence[int] | None = None,
        ids: int | None = None,
        folder: Path = Path(),
        names: Sequence[str] = (),
    ):
        """`tokens` and `learn` hold the tokens and the target mask of each shard. `lengths` are the numbers of tokens
        of the shards; None if `tokens` is a list of arrays. `index` has the plans of packed rows; None to compute them.

        `ids`, the exclusive upper bound of valid tokens, is set if the shards may hold invalid ones. An error then
        names the shard by `folder` and `names`.
        """
        self._bounds = np.cumsum([0, *(map(len, tokens) if lengths is None else lengths)])
        self._shards = {"tokens": tokens} | ({} if learn is None else {"weights": learn})
        super().__init__(document_starts, end_of_document)
        self._ids, self._folder, self._names, self._index = ids, folder, names, index
        self.tokens, self.has_learn_mask = int(self._bounds[-1]), learn is not None

    def plan(self, row_length: int, *, skip_long: bool) -> Plan:
        if self._index is None:
            return super().plan(row_length, skip_long=skip_long)
        return self._index.plan(row_length, skip_long=skip_long)

    def read_all(self, starts: np.ndarray, outs: Sequence[np.ndarray], field: str = "tokens") -> None:
        """Copies each range with one slice, unless the range crosses the end of a shard."""
        # A copy of a thousand tokens takes as long as the Python code around it, so this loop does little.
        shards = self._shards[field]
        shard = np.searchsorted(self._bounds, starts, side="right") - 1
        local = (starts - self._bounds[shard]).tolist()
        for out, number, first, start in zip(outs, shard.tolist(), local, starts.tolist(), strict=True):
            piece = shards[number][first : first + len(out)]
            if len(piece) == len(out):
                out[:] = piece
            else:
                self._copy(shards, start, out)

    def are_valid_ids(self, tokens: np.ndarray) -> bool:
        return self._ids is None or not tokens.size or int(tokens.view(np.uint32).max()) < self._ids

    def raise_invalid_id(self, offsets: np.ndarray) -> NoReturn:
        assert self._ids is not None
        for offset in np.unique(offsets[(offsets >= 0) & (offsets < self.tokens)]).tolist():
            shard = bisect_right(self._bounds, offset) - 1
            element = offset - int(self._bounds[shard])
            token = int(self._shards["tokens"][shard][element])
            if token >= self._ids:
                raise ConfigError(
                    f"data.path: {self._folder / self._names[shard]} is damaged: it holds the id {token} at element "
                    f"{element}, and its ids are below {self._ids}; {HOW_TO_REPAIR}"
                )
        raise AssertionError("all ids are in the vocabulary")

    def check_target_mask(self, weights: np.ndarray) -> None:
        if weights.max(initial=0) > 1:
            raise ConfigError(
                f"data.path: {self._folder} is damaged: a learn mask holds more than 0 and 1; {HOW_TO_REPAIR}"
            )

    def _copy(self, shards: Sequence[np.ndarray], start: int, out: np.ndarray) -> None:
        """Copies a range that crosses the end of one or more shards."""
        shard = bisect_right(self._bounds, start) - 1
        done = 0
        while done < len(out):
            first = start + done - int(self._bounds[shard])
            piece = shards[shard][first : first + len(out) - done]
            out[done : done + len(piece)] = piece
            done += len(piece)
            shard += 1


@dataclass(frozen=True)
class PreparedData:
    """A complete directory of prepared data."""

    path: Path
    manifest: dict[str, Any]

    @property
    def vocab_size(self) -> int:
        return self.manifest["vocab_size"]

    @property
    def ids(self) -> int:
        """Exclusive upper bound of the ids that occur. The vocabulary may be larger, because of tokens that no text
        has."""
        return self.manifest.get("largest_id", self.vocab_size - 1) + 1

    @property
    def tokenizer(self) -> dict[str, Any]:
        return dict(self.manifest["tokenizer"])

    @property
    def chat(self) -> ChatFormat | None:
        """The format of the conversations; None if the data has none, or if an earlier version prepared it."""
        if "chat" not in self.manifest:
            return None
        path = self.path / CHAT_TEMPLATE_FILE
        try:
            content = read(path)
        except OSError as error:
            raise ConfigError(f"data.path: {path} cannot be read ({error.strerror}); {HOW_TO_REPAIR}") from error
        if hashlib.sha256(content).hexdigest() != self.manifest["files"][CHAT_TEMPLATE_FILE]:
            raise ConfigError(f"data.path: {path} has changed since the data was prepared; {HOW_TO_REPAIR}")
        template = content.decode()
        return ChatFormat.from_json(self.manifest["chat"], template)

    @functools.cached_property
    def digest(self) -> str:
        """Digest of the contents, independent of their location."""
        return content_digest(self.manifest)

    @property
    def is_sealed(self) -> bool:
        """True if the manifest has a seal, which detects changes. Manifests of the previous version have none."""
        return self.manifest["version"] != UNSEALED

    def tokens(self, split: str) -> int:
        return self.manifest["splits"][split]["tokens"]

    def documents(self, split: str) -> int:
        return self.manifest["splits"][split]["documents"]

    def unigram_nats(self, split: str) -> float | None:
        """Returns the cross-entropy of this split, in nats per token, under the training split's token frequencies."""
        return self.manifest["unigram_nats"][split]

    def bytes_per_target(self, split: str) -> float | None:
        """Returns the mean UTF-8 bytes of text per target of this split; None if it was not recorded."""
        return self.manifest.get("bytes_per_target", {}).get(split)

    def stream(self, split: str) -> TokenStream:
        """Opens a split, whose shards are opened when they are first read.

        Reading raises `ConfigError` for a shard that is missing or does not match the manifest.
        """
        shards, index = self._shards(split), self.index(split)
        lazy = lambda kind: LazyShards(len(shards), lambda number: self._load(split, kind, shards[number]))
        return StoredTokens(
            lazy("tokens"),
            index.document_starts,
            self.manifest["tokenizer"]["end_of_document"],
            lazy("learn") if self.manifest["learn_mask"] else None,
            index=index,
            lengths=[shard["tokens"] for shard in shards],
            ids=self.ids,
            folder=self.path / split,
            names=[f"tokens-{shard['name']}.npy" for shard in shards],
        )

    def index(self, split: str) -> SplitIndex:
        """Returns the document starts and plans of a split, which are mapped if it has an index."""
        return SplitIndex(
            self.path / INDEX_FOLDER,
            split,
            self.digest,
            self.documents(split),
            self.tokens(split),
            lambda: self.starts_by_shard(split),
            self.manifest.get("index", {}),
        )

    def check(self) -> None:
        """Checks that every file exists and has the right size, with one look-up for each. Types are checked when
        shards are opened.

        Raises `ConfigError` for the first that does not.
        """
        for name in sorted(self.manifest["files"]):  # those of shards are opened below
            if not (self.path / name).is_file():
                raise ConfigError(
                    f"data.path: {self.path / name} cannot be read (No such file or directory); {HOW_TO_REPAIR}"
                )
        kinds = ("tokens", "documents", "origins", *(("learn",) if self.manifest["learn_mask"] else ()))
        files = [(split, kind, shard) for split in SPLITS for shard in self._shards(split) for kind in kinds]
        with ThreadPoolExecutor(_LOOKUPS_AT_A_TIME) as pool:  # because each waits for the storage
            has_right_size = pool.map(lambda file: self._has_right_size(*file), files)
            for file, is_right in zip(files, has_right_size, strict=True):
                if not is_right:
                    self._load(*file)  # raises an error that says what is wrong

    def origin(self, split: str, document: int) -> Origin:
        """Returns the origin of a document, given its number in the split."""
        for shard in self._shards(split):
            if document < shard["documents"]:
                file, record = self._load(split, "origins", shard)[document].tolist()
                if not (0 <= file < len(self._source_names) and record >= 1):
                    raise ConfigError(
                        f"data.path: {self.path / split} is damaged: origins-{shard['name']}.npy names record {record} "
                        f"of file {file}, which is not there; {HOW_TO_REPAIR}"
                    )
                return Origin(self._source_names[file], record)
            document -= shard["documents"]
        raise IndexError("no such document")

    def files(self) -> Iterator[tuple[str, str]]:
        """Yields the name, relative to the directory, and the SHA-256 of every file, in order: of those that the
        manifest lists, and of the index."""
        yield from sorted(self.manifest["files"].items())
        for split in SPLITS:
            for shard in self._shards(split):
                for name, digest in sorted(shard["sha256"].items()):
                    yield f"{split}/{name}", digest
        yield from index_files(self.path / INDEX_FOLDER, self.digest, self.manifest.get("index", {}))

    def verify(self, progress: Callable[[str], None] = lambda name: None) -> None:
        """Compares every file with its digest. Raises `ConfigError` for the first that has changed."""
        for name, expected in self.files():
            progress(name)
            if file_digest(self.path / name) != expected:
                if name.startswith(f"{INDEX_FOLDER}/"):
                    raise damaged_index_error(self.path / INDEX_FOLDER, f"the SHA-256 of {name} differs")
                raise ConfigError(
                    f"data.path: {self.path / name} is damaged: its SHA-256 differs from that in the manifest; "
                    f"{HOW_TO_REPAIR}"
                )

    @functools.cached_property
    def _source_names(self) -> list[str]:
        """Names of the input files in order of their numbers. Raises `ConfigError` if their file is damaged."""
        path = self.path / SOURCES
        try:
            names = [json.loads(line) for line in read(path).decode().splitlines()]
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"data.path: {path} cannot be read ({error}); {HOW_TO_REPAIR}") from error
        if not all(isinstance(name, str) for name in names):
            raise ConfigError(f"data.path: {path} is damaged: it holds entries that are not names; {HOW_TO_REPAIR}")
        return names

    def starts_by_shard(self, split: str) -> Iterator[np.ndarray]:
        """Yields the offset in the stream of each document, int64, shard by shard. Raises `ConfigError` if the offsets
        are invalid."""
        first = 0  # offset of the shard in the stream
        for shard in self._shards(split):
            shard_starts = self._load(split, "documents", shard)
            are_valid = not len(shard_starts) or (
                shard_starts[0] >= 0
                and shard_starts[-1] < shard["tokens"]
                and bool((shard_starts[1:] > shard_starts[:-1]).all())
            )
            # The stream must begin with a document.
            if not are_valid or (first == 0 and (not len(shard_starts) or shard_starts[0] != 0)):
                raise ConfigError(
                    f"data.path: {self.path / split} is damaged: the documents of documents-{shard['name']}.npy do not "
                    f"start one after another within its {shard['tokens']} tokens; {HOW_TO_REPAIR}"
                )
            yield shard_starts + first
            first += shard["tokens"]

    def _shards(self, split: str) -> list[dict[str, Any]]:
        return self.manifest["splits"][split]["shards"]

    def _layout(self, kind: str) -> tuple[np.dtype, tuple[int, ...], str]:
        """Returns the dtype of a kind of file, the shape of its elements, and the entry of a shard that has their
        number."""
        dtype_name, unit = _KINDS[kind]
        return np.dtype(dtype_name or self.manifest["dtype"]), (2,) if kind == "origins" else (), unit

    def _shard_path(self, split: str, kind: str, shard: dict[str, Any]) -> Path:
        return self.path / split / f"{kind}-{shard['name']}.npy"

    def _has_right_size(self, split: str, kind: str, shard: dict[str, Any]) -> bool:
        """Returns True if a file of a shard exists and has the size that `prepare` gives it."""
        dtype, element_shape, unit = self._layout(kind)
        expected = HEADER_BYTES + shard[unit] * dtype.itemsize * math.prod(element_shape)
        try:
            status = self._shard_path(split, kind, shard).stat()
        except OSError:
            return False
        return stat.S_ISREG(status.st_mode) and status.st_size == expected

    def _load(self, split: str, kind: str, shard: dict[str, Any]) -> np.ndarray:
        """Memory-maps a file of a shard. Raises `ConfigError` unless its type, shape and size match the manifest."""
        path = self._shard_path(split, kind, shard)
        try:
            array, file_bytes, expected_bytes = map_array(path)
        except Exception as error:  # NumPy may raise any exception for a damaged header
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise UserError(f"{path} cannot be opened: {error.strerror}; raise the limit with ulimit -n") from error
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise ConfigError(
                f"data.path: {path} cannot be read ({printable(reason[:200])}); {HOW_TO_REPAIR}"
            ) from error
        dtype, row_shape, unit = self._layout(kind)
        if file_bytes != expected_bytes:
            problem = f"has {file_bytes} bytes, but its header says {expected_bytes}"
        elif array.dtype != dtype or array.shape[1:] != row_shape or array.ndim == 0 or not array.flags.c_contiguous:
            problem = f"holds {array.dtype} of shape {array.shape}, but must hold {dtype}"
        elif len(array) != shard[unit]:
            problem = f"has {len(array)} {unit}, but the manifest says {shard[unit]}"
        else:
            return array
        raise ConfigError(f"data.path: {path} {problem}; {HOW_TO_REPAIR}")


def open_prepared(path: str | Path, key: str = "data.path") -> PreparedData:
    """Opens a directory written by jaxmnt.prepare; `key` is the config key that names it.

    Raises `ConfigError` if the directory is missing, incomplete, damaged or of another format version.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise ConfigError(f"{key}: {path} is not a directory; {HOW_TO_PREPARE}")
    return PreparedData(directory, read_manifest(directory, key))
