"""The format of prepared data: flat NumPy token arrays and a manifest that commits them.

    DIR/manifest.json                what is inside; its presence says that the rest is complete
    DIR/SPLIT/tokens-00000.npy       token ids, each document followed by the end-of-document id
    DIR/SPLIT/documents-00000.npy    int64 offsets in this shard at which a document starts

A split is one stream, cut into shards at fixed sizes, so a document may go on in the next shard. Files open
with `numpy.load`. Memory-mapped and read a batch at a time this gives several times the tokens of a record
format for the same CPU time (benchmarks/data.py).
"""

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxmnt.data.tokenizer import Tokenizer
from jaxmnt.errors import ConfigError

FORMAT = "jaxmnt-tokens"
VERSION = 1
MANIFEST = "manifest.json"
SHARD_TOKENS = 2**26
SPLITS = ("train", "eval")


class SplitWriter:
    """Appends documents to one split; holds at most one shard in memory."""

    def __init__(self, directory: Path, tokenizer: Tokenizer, shard_tokens: int = SHARD_TOKENS):
        self.directory = directory
        self.dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
        self.end = np.array([tokenizer.end_of_document], self.dtype)
        self.shard_tokens = shard_tokens
        self.counts = np.zeros(tokenizer.vocab_size, np.int64)
        self.documents = 0
        self.tokens = 0
        self.shards: list[dict[str, Any]] = []
        self._buffer = np.empty(shard_tokens, self.dtype)
        self._filled = 0
        self._starts: list[int] = []
        directory.mkdir(parents=True)

    def add(self, tokens: np.ndarray) -> None:
        """Adds one document and its end."""
        document = np.concatenate([tokens.astype(self.dtype), self.end])
        self.counts += np.bincount(document, minlength=len(self.counts))
        self.documents += 1
        self.tokens += len(document)
        self._starts.append(self._filled)
        while len(document):
            taken = min(len(document), self.shard_tokens - self._filled)
            self._buffer[self._filled : self._filled + taken] = document[:taken]
            self._filled += taken
            document = document[taken:]
            if self._filled == self.shard_tokens:
                self._flush()

    def close(self) -> dict[str, Any]:
        """Writes what is left and returns the split's entry for the manifest."""
        if self._filled:
            self._flush()
        return {"documents": self.documents, "tokens": self.tokens, "shards": self.shards}

    def _flush(self) -> None:
        number = len(self.shards)
        files = {
            f"tokens-{number:05d}.npy": self._buffer[: self._filled],
            f"documents-{number:05d}.npy": np.array(self._starts, np.int64),
        }
        digests = {}
        for name, array in files.items():
            np.save(self.directory / name, array)
            digests[name] = hashlib.sha256((self.directory / name).read_bytes()).hexdigest()
        self.shards.append({"tokens": self._filled, "sha256": digests})
        self._filled, self._starts = 0, []


@dataclass(frozen=True)
class PreparedData:
    """A committed directory of prepared data."""

    path: Path
    manifest: dict[str, Any]

    @property
    def vocab_size(self) -> int:
        return int(self.manifest["vocab_size"])

    @property
    def digest(self) -> str:
        """Identifies the contents, wherever they lie."""
        canonical = json.dumps(self.manifest, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def tokens(self, split: str) -> int:
        return int(self.manifest["splits"][split]["tokens"])

    def stream(self, split: str) -> "TokenStream":
        return TokenStream(self, split)


def open_prepared(path: str | None) -> PreparedData:
    """Opens a directory written by jaxmnt.prepare.

    Raises `ConfigError` when it is missing, incomplete or of another format version.
    """
    how = "make it with: python -m jaxmnt.prepare --input TEXT --output DIR"
    if path is None:
        raise ConfigError(f"data.path: not set; {how}")
    directory = Path(path)
    if not directory.is_dir():
        raise ConfigError(f"data.path: there is no directory {path}; {how}")
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"data.path: {path} has no {MANIFEST}, so it is no prepared data or was not finished; {how}"
        ) from None
    except ValueError as error:
        raise ConfigError(f"data.path: {directory / MANIFEST} is damaged ({error}); prepare it again") from error
    found = (manifest.get("format"), manifest.get("version")) if isinstance(manifest, dict) else None
    if found != (FORMAT, VERSION):
        raise ConfigError(
            f"data.path: {path} has format {found}, this version reads {(FORMAT, VERSION)}; prepare it again"
        )
    return PreparedData(directory, manifest)


class TokenStream:
    """Random access to one split as a single stream of tokens. Thread-safe: reading keeps no state."""

    def __init__(self, data: PreparedData, split: str):
        entry = data.manifest["splits"][split]
        self.tokens = int(entry["tokens"])
        self.end_of_document = int(data.manifest["tokenizer"]["end_of_document"])
        self._folder = data.path / split
        self._shards: list[np.ndarray] = []
        self._offsets = np.zeros(len(entry["shards"]) + 1, np.int64)
        for number, shard in enumerate(entry["shards"]):
            array = self._load(self._folder / f"tokens-{number:05d}.npy", int(shard["tokens"]))
            self._shards.append(array)
            self._offsets[number + 1] = self._offsets[number] + len(array)

    @functools.cached_property
    def document_starts(self) -> np.ndarray:
        """Offset in the stream of each document's first token; int64, loaded when first asked for."""
        starts = [
            self._load(self._folder / f"documents-{number:05d}.npy", None) + self._offsets[number]
            for number in range(len(self._shards))
        ]
        return np.concatenate(starts) if starts else np.zeros(0, np.int64)

    @staticmethod
    def _load(path: Path, length: int | None) -> np.ndarray:
        try:
            array: np.ndarray = np.load(path, mmap_mode="r" if length is not None else None, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise ConfigError(f"data.path: {path} cannot be read ({error}); prepare the data again") from error
        if length is not None and array.shape != (length,):
            raise ConfigError(f"data.path: {path} holds {array.shape} tokens, the manifest says {length}")
        return array

    def rows(self, starts: Sequence[int], length: int) -> np.ndarray:
        """int32 [len(starts), length]: for each start the tokens from there on.

        Offset -1 and offsets past the end read as the end of a document.
        """
        rows = np.full((len(starts), length), self.end_of_document, np.int32)
        for row, start in zip(rows, starts, strict=True):
            self._copy(int(start), row)
        return rows

    def _copy(self, start: int, row: np.ndarray) -> None:
        position, stop = max(start, 0), min(start + len(row), self.tokens)
        shard = int(np.searchsorted(self._offsets, position, side="right")) - 1
        while position < stop:
            first = int(self._offsets[shard])
            end = min(stop, int(self._offsets[shard + 1]))
            row[position - start : end - start] = self._shards[shard][position - first : end - first]
            position, shard = end, shard + 1
