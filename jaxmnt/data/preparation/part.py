"""One part of the work: its documents are read, encoded and written as shards."""

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
from jaxmnt.data.preparation.inputs import Input, Part, Settings, unreadable
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
"""The folder in the output of an unfinished preparation."""

_HEADER_BYTES = 128
_PIECE = 2**20
"""Tokens that are counted and written at a time; counting takes 8 bytes for each."""


@dataclass(frozen=True)
class Job:
    """What is prepared, from what, and where."""

    inputs: list[Input]
    parts: list[Part]
    output: Path
    settings: Settings
    """The vocabulary and the end of documents in `reading` are those of the tokenizer, once that is known."""

    @property
    def work(self) -> Path:
        return self.output / WORK

    def record_path(self, part: int) -> Path:
        """Where the record of a part is; its presence says that the part is done."""
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
    """A one-dimensional .npy file that is appended to, and that appears under its name when it is whole."""

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
    """The shards of one split that a part gives rise to, cut after `shard_tokens` tokens."""

    def __init__(self, job: Job, split: str, part: int, attempt: Attempt):
        self._job, self._split, self._part, self._attempt = job, split, part, attempt
        self._shards: list[dict[str, Any]] = []
        self._open: dict[str, NpyWriter] = {}
        """The files of the present shard by kind: tokens, and perhaps learn."""
        self._starts, self._origins = array("q"), array("q")
        self.counts = np.zeros(job.settings.reading.vocab_size, np.int64)
        """How often each token occurs."""
        self._targets = 0
        self._text_bytes: int | None = 0

    def begin_document(self, file: int, record: int) -> None:
        """The tokens added from now on belong to a document of this origin."""
        start = self._shard()["tokens"].length  # which may begin a shard, and a list of its documents
        self._starts.append(start)
        self._origins.extend((file, record))

    def count_text(self, segment: Segment) -> None:
        """Counts the UTF-8 bytes of text whose tokens are targets. Of tokens as they are, nothing is known."""
        if not isinstance(segment.content, str):
            self._text_bytes = None
        elif self._text_bytes is not None and segment.learn and not segment.markup:
            self._text_bytes += len(segment.content.encode(errors="replace"))

    def add(self, tokens: np.ndarray, learn: bool) -> None:
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
        """The split's entry in the part's record."""
        if self._open:
            self._close_shard()
        totals = {of: sum(shard[of] for shard in self._shards) for of in ("documents", "tokens")}
        return totals | {"targets": self._targets, "text_bytes": self._text_bytes, "shards": self._shards}

    def _shard(self) -> dict[str, NpyWriter]:
        """Returns the files of a shard that takes at least one more token."""
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
        # The records of origins are counted within the part until all parts are known: see run.py.
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
    """Publishes a small array whole and durably."""
    with attempt.writing(path) as stream:
        np.save(stream, array)


def read_array(path: Path, *shape: int | None) -> np.ndarray:
    """What `save_array` has published, whole numbers of this shape (None: of any length). Raises `ConfigError` if it is
    not that any more."""
    try:
        array = np.load(io.BytesIO(storage.read(path)), allow_pickle=False)
    except Exception as error:  # on a damaged header NumPy raises what it likes
        raise _damaged(path) from error
    lengths = zip(shape, array.shape, strict=False)
    fits = len(shape) == array.ndim and all(length in (None, there) for length, there in lengths)
    if not fits or array.dtype != np.int64:
        raise _damaged(path)
    return array


def write_record(path: Path, record: dict[str, Any], attempt: Attempt | None = None) -> None:
    """Publishes what a preparation that goes on later will need, sealed; with an attempt, if there is none yet."""
    text = sealed_text(json.loads(json_text(record)))  # with keys as they will be read
    if attempt is None:
        publish(path, text)
        return
    with attempt.writing(path) as stream:
        stream.write(text.encode())


def read_record(path: Path) -> dict[str, Any]:
    """What `write_record` has published. Raises `ConfigError` if it is not that any more."""
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
    """Version 1.0 of the format, padded to a fixed size so that it can be written last."""
    text = repr({"descr": dtype.newbyteorder("<").str, "fortran_order": False, "shape": (length,)})
    padded = text.ljust(_HEADER_BYTES - 11) + "\n"
    return b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded.encode("ascii")


def read_part(part: Part, report: Report) -> Iterator[Document]:
    """The documents of a part in order."""
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
            unreadable(error)


_BATCH_CHARACTERS = 2**19
"""Text that is encoded at a time; encoding many short texts one by one would cost more."""

COUNTED = [field.name for field in fields(Counts)]
"""What a part's record says of `Counts`."""


def do_part(job: Job, part: Part, tokenizer: Tokenizer | None, advance: Callable[[int], None]) -> None:
    """Does one part. Raises `ConfigError` for bad input, `OSError` when the output cannot be written."""
    reading, attempt = job.settings.reading, Attempt(job.work)
    report = Report(reading=reading, skip_bad=job.settings.skip_bad, advance=advance)
    writers = {split: ShardWriter(job, split, part.number, attempt) for split in SPLITS}
    try:
        documents = (_with_text_counted(one, writers[split_of(one, job.settings)]) for one in read_part(part, report))
        for document, encoded in _encoded(documents, tokenizer):
            writer = writers[split_of(document, job.settings)]
            if not document.continues:
                writer.begin_document(document.file.number, document.record)
            for tokens, learn in encoded:
                writer.add(tokens, learn)
            if not document.closed:
                assert reading.end_id is not None
                writer.add(np.array([reading.end_id]), document.end_is_target)
        splits = {split: writer.close() for split, writer in writers.items()}
        save_array(job.counts_path(part.number), np.stack([writer.counts for writer in writers.values()]), attempt)
        record = {"splits": splits, "records": report.records, "lengths": report.lengths}
        record |= {name: getattr(report, name) for name in COUNTED}
        write_record(job.record_path(part.number), record, attempt)
    finally:
        attempt.remove_unpublished()


def _with_text_counted(document: Document, writer: ShardWriter) -> Document:
    """Returns the document. The writer counts the text of long documents while their segments are read."""

    def counted() -> Iterator[Segment]:
        for segment in document.segments:
            writer.count_text(segment)
            yield segment

    return document._replace(segments=list(counted()) if isinstance(document.segments, list) else counted())


def held_out_documents(job: Job, part: Part) -> Iterator[tuple[bool, Document]]:
    """The documents of a part with whether they are held out; bad ones are passed over."""
    report = Report(reading=job.settings.reading, skip_bad=True, advance=lambda count: None)
    for document in read_part(part, report):
        yield split_of(document, job.settings) == "eval", document


def split_of(document: Document, settings: Settings) -> str:
    """train or eval, by settings that have been decided."""
    fraction = settings.eval_fraction
    assert fraction is not None
    return document.file.split or ("eval" if int.from_bytes(document.key[:8], "big") < fraction * 2**64 else "train")


Tokens = tuple[np.ndarray, bool]
"""Tokens of a stretch of a document, and whether they are targets."""


def _encoded(documents: Iterator[Document], tokenizer: Tokenizer | None) -> Iterator[tuple[Document, Iterable[Tokens]]]:
    """Each document with its tokens. Short ones are encoded together, long ones a segment at a time."""
    waiting = []
    characters = 0
    for document in documents:
        if isinstance(document.segments, list):
            waiting.append((document, document.segments))
            characters += sum(len(segment.content) for segment in document.segments)
            if characters < _BATCH_CHARACTERS:
                continue
        yield from _encode_together(waiting, tokenizer)
        waiting, characters = [], 0
        if not isinstance(document.segments, list):
            yield document, _encode_in_stretches(document, tokenizer)
    yield from _encode_together(waiting, tokenizer)


def _encode_together(
    waiting: list[tuple[Document, list[Segment]]], tokenizer: Tokenizer | None
) -> Iterator[tuple[Document, Iterable[Tokens]]]:
    texts = [
        [Piece(segment.content, segment.markup) for segment in segments if isinstance(segment.content, str)]
        for _, segments in waiting
    ]
    assert tokenizer is not None or not any(texts)
    encoded: list[list[Any]] = texts if tokenizer is None else encode_pieces(tokenizer, texts)
    for (document, segments), ids in zip(waiting, encoded, strict=True):
        tokens = ids or [segment.content for segment in segments]  # a document is text, or tokens as they are
        yield document, zip(tokens, (segment.learn for segment in segments), strict=True)


def _encode_in_stretches(document: Document, tokenizer: Tokenizer | None) -> Iterator[Tokens]:
    contents: Iterator[Any] = (segment.content for segment in document.segments)
    if not document.closed:
        assert tokenizer is not None
        contents = encode_stretches(tokenizer, contents)
    return ((tokens, True) for tokens in contents)
