"""Prepares a part: reads its documents, encodes them, and writes shards."""

import io
import json
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from jaxmnt import storage
from jaxmnt.data.attempts import Attempt
from jaxmnt.data.manifest import SPLITS, sealed_text, unsealed
from jaxmnt.data.npy_files import NpyWriter
from jaxmnt.data.preparation.documents import Counts, Document, Report, Segment
from jaxmnt.data.preparation.encoding import encode_documents
from jaxmnt.data.preparation.inputs import Input, Part, Settings, raise_unreadable
from jaxmnt.data.preparation.json_lines import read_compressed, read_lines
from jaxmnt.data.preparation.markup import open_markup
from jaxmnt.data.preparation.parquet import read_parquet
from jaxmnt.data.preparation.text import read_text, read_tokens
from jaxmnt.data.tokenizer import Tokenizer
from jaxmnt.errors import ConfigError, printable
from jaxmnt.storage import publish
from jaxmnt.strict_json import json_text

WORK = "work"
"""Name of the folder in the output that holds an unfinished preparation."""

_TOKENS_PER_WRITE = 2**20
"""Number of tokens to count and write at a time. Counting takes 8 bytes per token."""


@dataclass(frozen=True)
class Job:
    """A preparation: its inputs, parts, output and settings."""

    inputs: list[Input]
    parts: list[Part]
    output: Path
    settings: Settings
    """Once the tokenizer is known, `reading` has its vocabulary size and end of document."""

    @property
    def work(self) -> Path:
        return self.output / WORK

    def record_path(self, part: int) -> Path:
        """Returns the path of the record of a part. If the file exists, the part is done."""
        return self.work / f"part-{part:05d}.json"

    def counts_path(self, part: int) -> Path:
        """Returns the path of the token counts of a part."""
        return self.work / f"counts-{part:05d}.npy"

    def origins_path(self, split: str, shard: str) -> Path:
        """Returns the path of the origins of a shard, before `commit.commit` publishes them."""
        return self.work / f"{split}-origins-{shard}.npy"

    @property
    def dtype(self) -> np.dtype:
        """The smallest unsigned type that can hold every token id."""
        return np.min_scalar_type(self.settings.reading.vocab_size - 1)


class ShardWriter:
    """Writes the shards of one split of a part. A shard ends after `shard_tokens` tokens."""

    def __init__(self, job: Job, split: str, part: int, attempt: Attempt):
        self._job, self._split, self._part, self._attempt = job, split, part, attempt
        self._shards: list[dict[str, Any]] = []
        self._open_writers: dict[str, NpyWriter] = {}
        """The open files of the current shard by kind: `tokens`, and `learn` for conversations."""
        self._starts, self._origins = array("q"), array("q")
        self.counts = np.zeros(job.settings.reading.vocab_size, np.int64)
        """Number of occurrences of each token."""
        self._targets = 0
        self._text_bytes: int | None = 0

    def begin_document(self, file: int, record: int) -> None:
        """Begins a document, to which the next tokens belong. Its origin is this record of this file."""
        start = self._current_shard()["tokens"].length  # this may begin a new shard, which resets _starts
        self._starts.append(start)
        self._origins.extend((file, record))

    def count_text(self, segment: Segment) -> None:
        """Counts the UTF-8 bytes of text whose tokens are targets. With token arrays the count becomes unknown
        (None)."""
        if not isinstance(segment.content, str):
            self._text_bytes = None
        elif self._text_bytes is not None and segment.learn and not segment.markup:
            self._text_bytes += len(segment.content.encode(errors="replace"))

    def add(self, tokens: np.ndarray, learn: bool) -> None:
        """Appends tokens to the current document. `learn` is True if the tokens are targets."""
        self._targets += learn * len(tokens)
        while len(tokens):
            files = self._current_shard()
            room = self._job.settings.shard_tokens - files["tokens"].length
            piece = tokens[: min(room, _TOKENS_PER_WRITE)]
            np.add.at(self.counts, piece.astype(np.intp), 1)
            files["tokens"].append(piece)
            if "learn" in files:
                files["learn"].append(np.full(len(piece), learn, np.uint8))
            tokens = tokens[len(piece) :]

    def close(self) -> dict[str, Any]:
        """Publishes the last shard, and returns the entry of the split for the record of the part."""
        if self._open_writers:
            self._close_shard()
        totals = {name: sum(shard[name] for shard in self._shards) for name in ("documents", "tokens")}
        return totals | {"targets": self._targets, "text_bytes": self._text_bytes, "shards": self._shards}

    def _current_shard(self) -> dict[str, NpyWriter]:
        """Returns the files of a shard that has room for at least one token. Begins a new shard if necessary."""
        if self._open_writers and self._open_writers["tokens"].length >= self._job.settings.shard_tokens:
            self._close_shard()
        if not self._open_writers:
            self._open_writers = {"tokens": self._writer("tokens", self._job.dtype)}
            if self._job.settings.reading.chat:
                self._open_writers["learn"] = self._writer("learn", np.dtype(np.uint8))
        return self._open_writers

    def _close_shard(self) -> None:
        starts = self._writer("documents", np.dtype(np.int64))
        starts.append(np.array(self._starts, np.int64))
        # Records are numbered from the start of the part. commit.commit adds the number of records in earlier parts.
        origins = np.array(self._origins, np.int64).reshape(-1, 2)
        save_array(self._job.origins_path(self._split, self._name), origins, self._attempt)
        files = self._open_writers | {"documents": starts}
        digests = {self._file(kind): file.close() for kind, file in files.items()}
        tokens = self._open_writers["tokens"].length
        self._shards.append({"name": self._name, "tokens": tokens, "documents": len(self._starts), "sha256": digests})
        self._open_writers, self._starts, self._origins = {}, array("q"), array("q")

    @property
    def _name(self) -> str:
        return f"{self._part:05d}-{len(self._shards):02d}"

    def _file(self, kind: str) -> str:
        return f"{kind}-{self._name}.npy"

    def _writer(self, kind: str, dtype: np.dtype) -> NpyWriter:
        return NpyWriter(self._job.output / self._split / self._file(kind), self._attempt, dtype)


def save_array(path: Path, array: np.ndarray, attempt: Attempt) -> None:
    """Publishes a small array, complete and durable."""
    with attempt.writing(path) as stream:
        np.save(stream, array)


def read_array(path: Path, *shape: int | None) -> np.ndarray:
    """Reads an int64 array of this shape that `save_array` published. None in `shape` allows any length.

    Raises `ConfigError` if the array is damaged.
    """
    try:
        array = np.load(io.BytesIO(storage.read(path)), allow_pickle=False)
    except Exception as error:  # NumPy may raise any exception for a damaged header
        raise _damaged(path) from error
    lengths = zip(shape, array.shape, strict=False)
    has_shape = len(shape) == array.ndim and all(expected in (None, actual) for expected, actual in lengths)
    if not has_shape or array.dtype != np.int64:
        raise _damaged(path)
    return array


def write_record(path: Path, record: dict[str, Any], attempt: Attempt | None = None) -> None:
    """Publishes a sealed record, which a resumed preparation will read. With `attempt`, an existing record is kept."""
    text = sealed_text(json.loads(json_text(record)))  # the conversion turns keys into strings, as in the file
    if attempt is None:
        publish(path, text)
        return
    with attempt.writing(path) as stream:
        stream.write(text.encode())


def read_record(path: Path) -> dict[str, Any]:
    """Reads a record that `write_record` published. Raises `ConfigError` if the record is damaged."""
    try:
        return unsealed(json.loads(storage.read(path).decode()))
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise _damaged(path) from error


def _damaged(path: Path) -> ConfigError:
    return ConfigError(
        f"--output: {path} of an unfinished preparation is damaged, or of an older version; remove the output and "
        "prepare the data again"
    )


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
                raise ConfigError(f"--input: {file.printable_path} cannot be read: {printable(str(error))}") from error
            raise_unreadable(error)


COUNTED = [field.name for field in fields(Counts)]
"""Names of the counts that the record of a part stores."""


def prepare_part(job: Job, part: Part, tokenizer: Tokenizer | None, advance: Callable[[int], None]) -> None:
    """Prepares a part. Raises `ConfigError` for invalid input, and `OSError` if the output cannot be written."""
    attempt = Attempt(job.work)
    report = Report(read_options=job.settings.reading, skip_bad=job.settings.skip_bad, advance=advance)
    writers = {split: ShardWriter(job, split, part.number, attempt) for split in SPLITS}
    try:
        with open_markup(job.settings.reading, tokenizer) as report.markup:
            _write_documents(job, part, tokenizer, report, writers)
        # The record is published last, because it marks the part as done.
        splits = {split: writer.close() for split, writer in writers.items()}
        save_array(job.counts_path(part.number), np.stack([writer.counts for writer in writers.values()]), attempt)
        record = {"splits": splits, "records": report.records, "lengths": report.lengths}
        record |= {name: getattr(report, name) for name in COUNTED}
        write_record(job.record_path(part.number), record, attempt)
    finally:
        attempt.remove_unpublished()


def _write_documents(
    job: Job, part: Part, tokenizer: Tokenizer | None, report: Report, writers: dict[str, ShardWriter]
) -> None:
    """Reads and encodes the documents of a part, and writes each to the shards of its split."""
    end_id = job.settings.reading.end_id
    documents = (
        _count_text(document, writers[split_of(document, job.settings)]) for document in read_part(part, report)
    )
    for document, encoded in encode_documents(documents, tokenizer, report):
        writer = writers[split_of(document, job.settings)]
        if not document.continues:
            writer.begin_document(document.file.number, document.record)
        for tokens, learn in encoded:
            writer.add(tokens, learn)
        if not document.closed:
            assert end_id is not None
            writer.add(np.array([end_id]), document.end_is_target)


def _count_text(document: Document, writer: ShardWriter) -> Document:
    """Lets the writer count the text of a document, and returns the document.

    The text of a long document is counted later, while its segments are read.
    """

    def counting_segments() -> Iterator[Segment]:
        for segment in document.segments:
            writer.count_text(segment)
            yield segment

    segments = counting_segments()
    return document._replace(segments=list(segments) if isinstance(document.segments, list) else segments)


def documents_with_split(job: Job, part: Part) -> Iterator[tuple[str, Document]]:
    """Yields the split, `train` or `eval`, and the document, for each document of a part. Skips records that cannot be
    used."""
    report = Report(read_options=job.settings.reading, skip_bad=True, advance=lambda count: None)
    with open_markup(job.settings.reading, None) as report.markup:
        for document in read_part(part, report):
            yield split_of(document, job.settings), document


def split_of(document: Document, settings: Settings) -> str:
    """Returns the split of a document: `train` or `eval`. Requires that `inputs.decide_held_out` has set the held-out
    share in `settings`."""
    fraction = settings.eval_fraction
    assert fraction is not None
    return document.file.split or ("eval" if int.from_bytes(document.key[:8], "big") < fraction * 2**64 else "train")
