"""Prepares one part: reads its documents, encodes them and writes shards."""

import io
import json
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxmnt import storage
from jaxmnt.data.manifest import SPLITS, sealed_text, unsealed
from jaxmnt.data.preparation.attempts import Attempt
from jaxmnt.data.preparation.documents import Counts, Document, Report, Segment
from jaxmnt.data.preparation.inputs import Input, Part, Settings, raise_unreadable
from jaxmnt.data.preparation.json_lines import read_compressed, read_lines
from jaxmnt.data.preparation.parquet import read_parquet
from jaxmnt.data.preparation.text import read_text, read_tokens
from jaxmnt.data.store import file_digest
from jaxmnt.data.text_pieces import Piece, encode_pieces, encode_stretches
from jaxmnt.data.tokenizer import Tokenizer
from jaxmnt.errors import ConfigError, printable
from jaxmnt.storage import publish
from jaxmnt.strict_json import json_text

WORK = "work"
"""Name of the folder in the output that holds an unfinished preparation."""

_HEADER_BYTES = 128
_PIECE = 2**20
"""Tokens that are counted and written at a time; counting takes 8 bytes for each."""


@dataclass(frozen=True)
class Job:
    """A preparation: its inputs, parts, output and settings."""

    inputs: list[Input]
    parts: list[Part]
    output: Path
    settings: Settings
    """`reading` has the vocabulary and end of document of the tokenizer, once it is known."""

    @property
    def work(self) -> Path:
        return self.output / WORK

    def record_path(self, part: int) -> Path:
        """Returns the path of a part's record. If the file exists, the part is done."""
        return self.work / f"part-{part:05d}.json"

    def counts_path(self, part: int) -> Path:
        return self.work / f"counts-{part:05d}.npy"

    def origins_path(self, split: str, shard: str) -> Path:
        return self.work / f"{split}-origins-{shard}.npy"

    @property
    def dtype(self) -> np.dtype:
        """The smallest unsigned type that holds every id."""
        return np.min_scalar_type(self.settings.reading.vocab_size - 1)


class NpyWriter:
    """A one-dimensional .npy file that is appended to, and published under its name when it is complete."""

    def __init__(self, path: Path, attempt: Attempt, dtype: np.dtype):
        self._path, self._attempt, self._dtype = path, attempt, dtype
        self.length = 0
        self._file: BinaryIO = attempt.temporary(path).open("xb", buffering=2**20)
        self._file.write(b"\0" * _HEADER_BYTES)

    def append(self, values: np.ndarray) -> None:
        self._file.write(values.astype(self._dtype, copy=False).data)
        self.length += len(values)

    def close(self) -> str:
        """Finishes the file, durably, and returns its SHA-256."""
        self._file.seek(0)
        self._file.write(_npy_header(self._dtype, self.length))
        self._attempt.publish(self._file, self._path)
        self._file.close()
        return file_digest(self._path)


class ShardWriter:
    """Writes a part's shards of one split, cut after `shard_tokens` tokens."""

    def __init__(self, job: Job, split: str, part: int, attempt: Attempt):
        self._job, self._split, self._part, self._attempt = job, split, part, attempt
        self._shards: list[dict[str, Any]] = []
        self._open: dict[str, NpyWriter] = {}
        """The files of the current shard by kind: tokens, and learn for conversations."""
        self._starts, self._origins = array("q"), array("q")
        self.counts = np.zeros(job.settings.reading.vocab_size, np.int64)
        """Occurrences of each token."""
        self._targets = 0
        self._text_bytes: int | None = 0

    def begin_document(self, file: int, record: int) -> None:
        """Begins a document of this origin, to which the next tokens belong."""
        start = self._shard()["tokens"].length  # may begin a new shard, which resets _starts
        self._starts.append(start)
        self._origins.extend((file, record))

    def count_text(self, segment: Segment) -> None:
        """Counts the UTF-8 bytes of text whose tokens are targets. For token arrays the count is unknown (None)."""
        if not isinstance(segment.content, str):
            self._text_bytes = None
        elif self._text_bytes is not None and segment.learn and not segment.markup:
            self._text_bytes += len(segment.content.encode(errors="replace"))

    def add(self, tokens: np.ndarray, learn: bool) -> None:
        """Appends tokens to the current document. `learn` is True if they are targets."""
        self._targets += learn * len(tokens)
        while len(tokens):
            files = self._shard()
            room = self._job.settings.shard_tokens - files["tokens"].length
            piece = tokens[: min(room, _PIECE)]
            np.add.at(self.counts, piece.astype(np.intp), 1)
            files["tokens"].append(piece)
            if "learn" in files:
                files["learn"].append(np.full(len(piece), learn, np.uint8))
            tokens = tokens[len(piece) :]

    def close(self) -> dict[str, Any]:
        """Finishes the shards, and returns the split's entry for the part's record."""
        if self._open:
            self._close_shard()
        totals = {name: sum(shard[name] for shard in self._shards) for name in ("documents", "tokens")}
        return totals | {"targets": self._targets, "text_bytes": self._text_bytes, "shards": self._shards}

    def _shard(self) -> dict[str, NpyWriter]:
        """Returns the files of a shard with room for at least one token; opens a new shard if necessary."""
        if self._open and self._open["tokens"].length >= self._job.settings.shard_tokens:
            self._close_shard()
        if not self._open:
            self._open = {"tokens": self._writer("tokens", self._job.dtype)}
            if self._job.settings.reading.chat:
                self._open["learn"] = self._writer("learn", np.dtype(np.uint8))
        return self._open

    def _close_shard(self) -> None:
        starts = self._writer("documents", np.dtype(np.int64))
        starts.append(np.array(self._starts, np.int64))
        # Origins number records within the part; plan.commit adds the records of earlier parts of the file.
        origins = np.array(self._origins, np.int64).reshape(-1, 2)
        save_array(self._job.origins_path(self._split, self._name), origins, self._attempt)
        files = self._open | {"documents": starts}
        digests = {self._file(kind): file.close() for kind, file in files.items()}
        tokens = self._open["tokens"].length
        self._shards.append({"name": self._name, "tokens": tokens, "documents": len(self._starts), "sha256": digests})
        self._open, self._starts, self._origins = {}, array("q"), array("q")

    @property
    def _name(self) -> str:
        return f"{self._part:05d}-{len(self._shards):02d}"

    def _file(self, kind: str) -> str:
        return f"{kind}-{self._name}.npy"

    def _writer(self, kind: str, dtype: np.dtype) -> NpyWriter:
        return NpyWriter(self._job.output / self._split / self._file(kind), self._attempt, dtype)


def save_array(path: Path, array: np.ndarray, attempt: Attempt) -> None:
    """Publishes a small array completely and durably."""
    with attempt.writing(path) as stream:
        np.save(stream, array)


def read_array(path: Path, *shape: int | None) -> np.ndarray:
    """Reads an int64 array that `save_array` published. None in `shape` stands for any length. Raises `ConfigError` if
    it is damaged."""
    try:
        array = np.load(io.BytesIO(storage.read(path)), allow_pickle=False)
    except Exception as error:  # NumPy may raise any exception for a damaged header
        raise _damaged(path) from error
    lengths = zip(shape, array.shape, strict=False)
    fits = len(shape) == array.ndim and all(expected in (None, actual) for expected, actual in lengths)
    if not fits or array.dtype != np.int64:
        raise _damaged(path)
    return array


def write_record(path: Path, record: dict[str, Any], attempt: Attempt | None = None) -> None:
    """Publishes a sealed record that a resumed preparation will read. With `attempt`, an existing one is kept."""
    text = sealed_text(json.loads(json_text(record)))  # keys become strings, as they will be read
    if attempt is None:
        publish(path, text)
        return
    with attempt.writing(path) as stream:
        stream.write(text.encode())


def read_record(path: Path) -> dict[str, Any]:
    """Reads a record that `write_record` published. Raises `ConfigError` if it is damaged."""
    try:
        return unsealed(json.loads(storage.read(path).decode()))
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise _damaged(path) from error


def _damaged(path: Path) -> ConfigError:
    return ConfigError(
        f"--output: {path} of an unfinished preparation is damaged, or of an older version; remove the output and "
        "prepare again"
    )


def _npy_header(dtype: np.dtype, length: int) -> bytes:
    """Returns a header of version 1.0 of the format, padded to a fixed size so that it can be written last."""
    text = repr({"descr": dtype.newbyteorder("<").str, "fortran_order": False, "shape": (length,)})
    padded = text.ljust(_HEADER_BYTES - 11) + "\n"
    return b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded.encode("ascii")


def read_part(part: Part, report: Report) -> Iterator[Document]:
    """Yields the documents of a part in order. Raises `ConfigError` if a file cannot be read."""
    readers = {
        "text": read_text, "jsonl": read_lines, "compressed": read_compressed,
        "parquet": read_parquet, "tokens": read_tokens,
    }  # fmt: skip
    for piece in part.pieces:
        file = piece.file
        try:
            yield from readers[file.kind](piece, report)
        except OSError as error:
            if error.filename is None:
                raise ConfigError(f"--input: {file.shown} cannot be read: {printable(str(error))}") from error
            raise_unreadable(error)


_BATCH_CHARACTERS = 2**19
"""Characters that are encoded at a time, because encoding many short texts one by one is slower."""

COUNTED = [field.name for field in fields(Counts)]
"""Fields of `Counts` that a part's record stores."""


def prepare_part(job: Job, part: Part, tokenizer: Tokenizer | None, advance: Callable[[int], None]) -> None:
    """Prepares one part. Raises `ConfigError` for bad input, and `OSError` if the output cannot be written."""
    reading = job.settings.reading
    attempt = Attempt(job.work)
    report = Report(reading=reading, skip_bad=job.settings.skip_bad, advance=advance)
    writers = {split: ShardWriter(job, split, part.number, attempt) for split in SPLITS}
    try:
        documents = (
            _with_text_counted(document, writers[split_of(document, job.settings)])
            for document in read_part(part, report)
        )
        for document, encoded in _encoded(documents, tokenizer):
            writer = writers[split_of(document, job.settings)]
            if not document.continues:
                writer.begin_document(document.file.number, document.record)
            for tokens, learn in encoded:
                writer.add(tokens, learn)
            if not document.closed:
                assert reading.end_id is not None
                writer.add(np.array([reading.end_id]), document.end_is_target)
        # The record is published last, since it marks the part as done.
        splits = {split: writer.close() for split, writer in writers.items()}
        save_array(job.counts_path(part.number), np.stack([writer.counts for writer in writers.values()]), attempt)
        record = {"splits": splits, "records": report.records, "lengths": report.lengths}
        record |= {name: getattr(report, name) for name in COUNTED}
        write_record(job.record_path(part.number), record, attempt)
    finally:
        attempt.remove_unpublished()


def _with_text_counted(document: Document, writer: ShardWriter) -> Document:
    """Returns the document, and has the writer count its text. Long documents are counted as they are read."""

    def counted() -> Iterator[Segment]:
        for segment in document.segments:
            writer.count_text(segment)
            yield segment

    return document._replace(segments=list(counted()) if isinstance(document.segments, list) else counted())


def held_out_documents(job: Job, part: Part) -> Iterator[tuple[bool, Document]]:
    """Yields (is held out, document) for each document of a part, and skips bad records."""
    report = Report(reading=job.settings.reading, skip_bad=True, advance=lambda count: None)
    for document in read_part(part, report):
        yield split_of(document, job.settings) == "eval", document


def split_of(document: Document, settings: Settings) -> str:
    """Returns train or eval. Requires a held-out share in `settings` (`inputs.decide_held_out`)."""
    fraction = settings.eval_fraction
    assert fraction is not None
    return document.file.split or ("eval" if int.from_bytes(document.key[:8], "big") < fraction * 2**64 else "train")


Tokens = tuple[np.ndarray, bool]
"""Tokens of part of a document, and True if they are targets."""


def _encoded(documents: Iterator[Document], tokenizer: Tokenizer | None) -> Iterator[tuple[Document, Iterable[Tokens]]]:
    """Yields each document with its tokens. Short documents are encoded together, long ones a segment at a time."""
    batch = []
    characters = 0
    for document in documents:
        if isinstance(document.segments, list):
            batch.append((document, document.segments))
            characters += sum(len(segment.content) for segment in document.segments)
            if characters < _BATCH_CHARACTERS:
                continue
        yield from _encode_together(batch, tokenizer)
        batch, characters = [], 0
        if not isinstance(document.segments, list):
            yield document, _encode_in_stretches(document, tokenizer)
    yield from _encode_together(batch, tokenizer)


def _encode_together(
    batch: list[tuple[Document, list[Segment]]], tokenizer: Tokenizer | None
) -> Iterator[tuple[Document, Iterable[Tokens]]]:
    """Encodes a batch of short documents at once. Token arrays pass unchanged."""
    texts = [
        [Piece(segment.content, segment.markup) for segment in segments if isinstance(segment.content, str)]
        for _, segments in batch
    ]
    assert tokenizer is not None or not any(texts)
    encoded: list[list[Any]] = texts if tokenizer is None else encode_pieces(tokenizer, texts)
    for (document, segments), ids in zip(batch, encoded, strict=True):
        tokens = ids or [segment.content for segment in segments]  # a document is either text or already tokens
        yield document, zip(tokens, (segment.learn for segment in segments), strict=True)


def _encode_in_stretches(document: Document, tokenizer: Tokenizer | None) -> Iterator[Tokens]:
    """Encodes a long document a segment at a time. All its tokens are targets."""
    contents: Iterator[Any] = (segment.content for segment in document.segments)
    if not document.closed:
        assert tokenizer is not None
        contents = encode_stretches(tokenizer, contents)
    return ((tokens, True) for tokens in contents)
