"""The format of prepared data, and reading it: flat NumPy arrays and a manifest that commits them.

    DIR/manifest.json              what is inside; its presence says that the rest is complete
    DIR/tokenizer.json             the tokenizer, unless it is bytes
    DIR/sources.txt                the input files by number, a JSON string a line
    DIR/SPLIT/tokens-SHARD.npy     token ids; each document is followed by the end-of-document id
    DIR/SPLIT/documents-SHARD.npy  int64 [documents]: offsets in this shard at which a document starts
    DIR/SPLIT/origins-SHARD.npy    int64 [documents, 2]: the input file's number, and the record in it (from 1)
    DIR/SPLIT/learn-SHARD.npy      uint8 per token, 0 where it is no target; only if the manifest says `learn_mask`

A split is one stream, cut into shards, so a document may go on in the next shard. Files open with `numpy.load`.
Memory-mapped and read a batch at a time this gives several times the tokens of a record format for the same CPU time
(benchmarks/data.py).
"""

import functools
import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmnt.errors import ConfigError

FORMAT = "jaxmnt-tokens"
VERSION = 2
MANIFEST = "manifest.json"
SOURCES = "sources.txt"
SPLITS = ("train", "eval")


class Origin(NamedTuple):
    """Where a document came from."""

    file: str
    record: int
    """Line, row or document of the file, from 1."""


class TokenStream:
    """Random access to one split as a single stream of tokens. Thread-safe: reading keeps no state."""

    def __init__(
        self,
        tokens: Sequence[np.ndarray],
        document_starts: Callable[[], np.ndarray],
        end_of_document: int,
        learn: Sequence[np.ndarray] | None = None,
    ):
        self._offsets = [0]
        for array in tokens:
            self._offsets.append(self._offsets[-1] + len(array))
        # Plain views: a memmap's own indexing is slow.
        self._tokens = [np.asarray(array) for array in tokens]
        self._learn = None if learn is None else [np.asarray(array) for array in learn]
        self._document_starts = document_starts
        self.end_of_document = end_of_document
        self._bounds = np.array(self._offsets, np.int64)
        self.tokens = self._offsets[-1]

    @functools.cached_property
    def document_starts(self) -> np.ndarray:
        """Offset in the stream of each document's first token; int64, loaded when first asked for."""
        return self._document_starts()

    @property
    def has_learn_mask(self) -> bool:
        return self._learn is not None

    def read(self, start: int, out: np.ndarray) -> None:
        """Copies tokens from offset `start` on into `out`; there must be as many."""
        self._copy(self._tokens, start, out)

    def read_all(self, starts: np.ndarray, outs: Sequence[np.ndarray]) -> None:
        """Like `read`, of many stretches."""
        self._copy_all(self._tokens, starts, outs)

    def read_all_learn(self, starts: np.ndarray, outs: Sequence[np.ndarray]) -> None:
        """Like `read_all`, of the mask of targets: 0 where a token is none. Only if there is a mask."""
        assert self._learn is not None
        self._copy_all(self._learn, starts, outs)

    def documents(self, offsets: np.ndarray) -> np.ndarray:
        """The number of the document that each offset lies in."""
        return np.searchsorted(self.document_starts, offsets, side="right") - 1

    def _copy_all(self, shards: list[np.ndarray], starts: np.ndarray, outs: Sequence[np.ndarray]) -> None:
        """One slice a stretch: a copy of a thousand tokens costs as much as the Python around it."""
        shard = np.searchsorted(self._bounds, starts, side="right") - 1
        local = (starts - self._bounds[shard]).tolist()
        for out, number, first, start in zip(outs, shard.tolist(), local, starts.tolist(), strict=True):
            piece = shards[number][first : first + len(out)]
            if len(piece) == len(out):
                out[:] = piece
            else:
                self._copy(shards, start, out)

    def _copy(self, shards: list[np.ndarray], start: int, out: np.ndarray) -> None:
        """Copies across the ends of shards."""
        shard = bisect_right(self._offsets, start) - 1
        done = 0
        while done < len(out):
            first = start + done - self._offsets[shard]
            piece = shards[shard][first : first + len(out) - done]
            out[done : done + len(piece)] = piece
            done += len(piece)
            shard += 1


@dataclass(frozen=True)
class PreparedData:
    """A committed directory of prepared data."""

    path: Path
    manifest: dict[str, Any]

    @property
    def vocab_size(self) -> int:
        return int(self.manifest["vocab_size"])

    @property
    def tokenizer(self) -> dict[str, Any]:
        return dict(self.manifest["tokenizer"])

    @property
    def digest(self) -> str:
        """Identifies the contents, wherever they lie."""
        canonical = json.dumps(self.manifest, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def tokens(self, split: str) -> int:
        return int(self.manifest["splits"][split]["tokens"])

    def documents(self, split: str) -> int:
        return int(self.manifest["splits"][split]["documents"])

    def unigram_nats(self, split: str) -> float | None:
        """What knowing only the training text's token frequencies costs on this split, in nats a token."""
        value = self.manifest["unigram_nats"][split]
        return None if value is None else float(value)

    def stream(self, split: str) -> TokenStream:
        """Opens a split. Raises `ConfigError` naming a shard that is missing or not of its length."""
        shards = self.manifest["splits"][split]["shards"]
        tokens = [self._load(split, "tokens", shard, "tokens") for shard in shards]
        learn = [self._load(split, "learn", shard, "tokens") for shard in shards] if self._has_learn else None
        end = int(self.manifest["tokenizer"]["end_of_document"])
        return TokenStream(tokens, lambda: self._document_starts(split), end, learn)

    def check(self) -> None:
        """Looks for every file, so that one that is missing or too short is named before anything else happens."""
        for name, _ in self.files():
            if not (self.path / name).is_file():
                raise ConfigError(
                    f"data.path: {self.path / name} cannot be read (No such file or directory); "
                    "copy it again or prepare the data again"
                )
        for split in SPLITS:
            self.stream(split)
            for shard in self.manifest["splits"][split]["shards"]:
                self._load(split, "documents", shard, "documents")

    def origin(self, split: str, document: int) -> Origin:
        """Where a document, numbered over the whole split, came from."""
        for shard in self.manifest["splits"][split]["shards"]:
            if document < shard["documents"]:
                file, record = self._load(split, "origins", shard, "documents")[document].tolist()
                return Origin(self._source_names[file], record)
            document -= shard["documents"]
        raise IndexError("no such document")

    def files(self) -> Iterator[tuple[str, str]]:
        """(name below the directory, SHA-256) of every file that the manifest vouches for, in order."""
        yield from sorted(self.manifest["files"].items())
        for split in SPLITS:
            for shard in self.manifest["splits"][split]["shards"]:
                for name, digest in sorted(shard["sha256"].items()):
                    yield f"{split}/{name}", digest

    def verify(self, progress: Callable[[str], None] = lambda name: None) -> None:
        """Compares every file with its digest. Raises `ConfigError` with the first that is not what was written."""
        for name, expected in self.files():
            progress(name)
            if file_digest(self.path / name) != expected:
                raise ConfigError(
                    f"data.path: {self.path / name} is damaged: its SHA-256 is not the manifest's; "
                    "copy it again from where it is whole, or prepare the data again"
                )

    @property
    def _has_learn(self) -> bool:
        return bool(self.manifest["learn_mask"])

    @functools.cached_property
    def _source_names(self) -> list[str]:
        return [json.loads(line) for line in (self.path / SOURCES).read_text(encoding="utf-8").splitlines()]

    def _document_starts(self, split: str) -> np.ndarray:
        first, starts = 0, [np.zeros(0, np.int64)]
        for shard in self.manifest["splits"][split]["shards"]:
            starts.append(self._load(split, "documents", shard, "documents") + first)
            first += shard["tokens"]
        return np.concatenate(starts)

    def _load(self, split: str, kind: str, shard: dict[str, Any], length: str) -> np.ndarray:
        path = self.path / split / f"{kind}-{shard['name']}.npy"
        try:
            array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise ConfigError(
                f"data.path: {path} cannot be read ({reason}); copy it again or prepare the data again"
            ) from error
        if len(array) != shard[length]:
            raise ConfigError(
                f"data.path: {path} has {len(array)} {length}, the manifest says {shard[length]}; "
                "copy it again or prepare the data again"
            )
        return array


def open_prepared(path: str | Path, key: str = "data.path") -> PreparedData:
    """Opens a directory written by jaxmnt.prepare; `key` is the config key that named it.

    Raises `ConfigError` when it is missing, incomplete or of another format version.
    """
    how = "make it with: python -m jaxmnt.prepare --input TEXT --output DIR"
    directory = Path(path)
    if not directory.is_dir():
        raise ConfigError(f"{key}: there is no directory {path}; {how}")
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{key}: {path} has no {MANIFEST}, so it is no prepared data or was not finished; {how}"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: {directory / MANIFEST} is damaged ({error}); prepare it again") from error
    found = (manifest.get("format"), manifest.get("version")) if isinstance(manifest, dict) else None
    if found != (FORMAT, VERSION):
        raise ConfigError(f"{key}: {path} has format {found}, this version reads {(FORMAT, VERSION)}; prepare it again")
    return PreparedData(directory, manifest)


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hex. Raises `ConfigError` if it cannot be read."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"data.path: {path} cannot be read ({error.strerror}); copy or prepare it again") from error
