"""Lists the contents of the rows of a batch: the documents, where the input files have them, and which tokens are
targets."""

from bisect import bisect, insort
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmnt.config.schema import Config
from jaxmnt.data.batches import TrainingData
from jaxmnt.data.elements import DatasetRows
from jaxmnt.data.grain_source import GrainData
from jaxmnt.data.preparation.inputs import Kind, kind_of_file
from jaxmnt.data.rows import Packed
from jaxmnt.data.sources import Part, Sources
from jaxmnt.data.store import PreparedData, open_prepared
from jaxmnt.data.text_pieces import MAX_CONTEXT, decode_after
from jaxmnt.data.tokenizer import Tokenizer, make_tokenizer

_TOKENS_PER_READ = 1 << 20
_SHOWN_TOKENS = 2048
"""Maximum number of tokens of a document that `first_document` returns."""

_UNITS: dict[Kind, str] = {
    "text": "file",
    "jsonl": "line",
    "compressed": "line",
    "parquet": "row",
    "tokens": "document",
}
"""Name for a record in each kind of file."""


class Span(NamedTuple):
    """Consecutive tokens of which either all are targets or none is."""

    learned: bool
    """True if the tokens are targets, which the model learns to predict."""
    ids: list[int]
    text: str | None
    """The decoded text, including names of special tokens; None without a tokenizer."""


class Extract(NamedTuple):
    """The part of a document that a row holds."""

    place: int
    """Index in the row of the first token."""
    document: int | None
    """The document's number in its source; None for rows of a Grain dataset of rows."""
    first: int
    """Index in the document of the first token."""
    file: str
    record: int
    """Number of the record in the file, from 1."""
    record_unit: str
    """Name for a record: file (of text), line, row, document or element."""
    line: int | None
    """Number of the line, from 1 in the text of the document, in which the first token begins; None without a
    tokenizer."""
    spans: list[Span]

    @property
    def tokens(self) -> int:
        return sum(len(span.ids) for span in self.spans)


class Row(NamedTuple):
    """A row of a batch."""

    row: int
    source: str
    kind: str
    """Either window, packed row or row."""
    number: int
    """Number of the row in its source."""
    epoch: int
    """Epoch of the source, from 1."""
    targets: int
    extracts: list[Extract]


def rows_of(
    config: Config,
    sources: Sources,
    training: TrainingData,
    tokenizer: Tokenizer | None,
    step: int,
    limit: int,
) -> Iterator[Row]:
    """Yields the first `limit` rows of the batch of optimizer step `step` (1 is the first)."""
    row_numbers = range(min(limit, config.data.global_batch_size))
    located = training.order.locate(step - 1, row_numbers)
    batch = training.batch(step - 1, row_numbers)
    lines = {name: LineCounter(reader, tokenizer) if tokenizer else None for name, reader in training.readers.items()}
    for row in row_numbers:
        name = training.names[located.source[row]]
        number = int(located.row[row])
        reader, part = training.readers[name], sources.parts[name]
        is_target_L = batch["weights"][row] > 0
        if isinstance(reader, DatasetRows):
            kind, origin = "row", part.origin("train", number)
            spans = _spans(tokenizer, batch["targets"][row], is_target_L, np.empty(0, np.int64))
            extracts = [Extract(0, None, 0, origin.file, origin.record, _record_unit(part, origin.file), None, spans)]
        else:
            kind = "packed row" if isinstance(reader, Packed) else "window"
            extracts = list(_extracts(part, reader, number, is_target_L, tokenizer, lines[name]))
        yield Row(row, name, kind, number, int(located.epoch[row]) + 1, int(is_target_L.sum()), extracts)


def _extracts(
    part: Part, reader: Any, row: int, is_target_L: np.ndarray, tokenizer: Tokenizer | None, lines: "LineCounter | None"
) -> Iterator[Extract]:
    """Yields the part of each document that a row holds, in order."""
    offsets = reader.offsets(row)
    columns = np.flatnonzero(offsets >= 0)
    documents = reader.stream.documents(offsets[columns])
    edges = (np.flatnonzero(np.diff(documents)) + 1).tolist()
    for begin, end in pairwise([0, *edges, len(columns)]):
        document = int(documents[begin])
        start = int(offsets[columns[begin]])
        first = start - int(reader.stream.document_starts[document])
        context = _read(reader.stream, start - min(first, MAX_CONTEXT), start)
        ids = _read(reader.stream, start, start + end - begin)
        origin = part.origin("train", document)
        line = lines.line_of(document, start) if lines else None
        spans = _spans(tokenizer, ids, is_target_L[columns[begin:end]], context)
        unit = _record_unit(part, origin.file)
        yield Extract(int(columns[begin]), document, first, origin.file, origin.record, unit, line, spans)


def _spans(tokenizer: Tokenizer | None, ids: np.ndarray, is_target: np.ndarray, context: np.ndarray) -> list[Span]:
    """Splits ids where targets begin or end. `context` holds the preceding ids of the document."""
    edges = (np.flatnonzero(np.diff(is_target)) + 1).tolist()
    spans = []
    for begin, end in pairwise([0, *edges, len(ids)]):
        piece = ids[begin:end]
        text = None if tokenizer is None else _decode(tokenizer, context[-MAX_CONTEXT:], piece)
        spans.append(Span(bool(is_target[begin]), piece.tolist(), text))
        context = np.concatenate([context, piece])
    return spans


def first_document(folder: Path) -> list[Span]:
    """Returns the first document of the training split of prepared data, with its targets, up to `_SHOWN_TOKENS`
    tokens."""
    data = open_prepared(folder)
    stream = data.stream("train")
    shard = data.manifest["splits"]["train"]["shards"][0]["name"]
    starts = np.load(folder / "train" / f"documents-{shard}.npy", mmap_mode="r")
    stop = min([*starts[1:2].tolist(), stream.tokens, _SHOWN_TOKENS])
    tokens = _read(stream, 0, stop)
    weights = np.ones(stop, np.float32)
    if stream.has_learn_mask:
        stream.read_all(np.array([0]), [weights], "weights")
    tokenizer = make_tokenizer(data.tokenizer, folder)
    return _spans(tokenizer, tokens, weights > 0, np.empty(0, np.int64))


def _decode(tokenizer: Tokenizer, context: np.ndarray, ids: np.ndarray) -> str:
    """Returns the text that ids add to a context, including the names of special tokens."""
    names = tokenizer.special_names
    text = ""
    begin = 0
    for end in [*np.flatnonzero(np.isin(ids, [*names])).tolist(), len(ids)]:
        text += decode_after(tokenizer, np.concatenate([context, ids[:begin]]), ids[begin:end])
        text += names[int(ids[end])] if end < len(ids) else ""
        begin = end + 1
    return text


def _record_unit(part: Part, file: str) -> str:
    """Returns the name for a record in a file: file, line, row, document or element."""
    if isinstance(part, PreparedData):
        return _UNITS[kind_of_file(Path(file))]
    return "element" if isinstance(part, GrainData) else "document"


class LineCounter:
    """Finds the line of a document in which a token begins.

    The counter remembers the lines that it has counted, because many rows of a batch may come from one long text.
    """

    def __init__(self, reader: Any, tokenizer: Tokenizer):
        self._reader, self._tokenizer = reader, tokenizer
        self._newlines_of_id: dict[int, int] = {}
        self._positions: dict[int, list[tuple[int, int]]] = {}
        """For each document: pairs of an offset in the stream and the line there, sorted."""

    def line_of(self, document: int, offset: int) -> int:
        """Returns the line, from 1, of the token at this offset in the stream, which must be in the document."""
        begin = int(self._reader.stream.document_starts[document])
        positions = self._positions.setdefault(document, [(begin, 1)])
        before, line = positions[bisect(positions, offset, key=lambda entry: entry[0]) - 1]
        for start in range(before, offset, _TOKENS_PER_READ):
            line += self._newlines(_read(self._reader.stream, start, min(offset, start + _TOKENS_PER_READ)))
        insort(positions, (offset, line))
        return line

    def _newlines(self, ids: np.ndarray) -> int:
        """Returns the number of line feeds in the text of tokens. No token ends within one, because it is one byte."""
        total = 0
        unique_ids, counts = np.unique(ids, return_counts=True)
        for token, occurrences in zip(unique_ids.tolist(), counts.tolist(), strict=True):
            if token not in self._newlines_of_id:
                self._newlines_of_id[token] = self._tokenizer.decode(np.array([token])).count("\n")
            total += self._newlines_of_id[token] * occurrences
        return total


def _read(stream: Any, begin: int, end: int) -> np.ndarray:
    tokens = np.empty(end - begin, np.int64)
    if len(tokens):
        stream.read(begin, tokens)
    return tokens


def to_json(row: Row) -> dict[str, Any]:
    """Converts a row to values for JSON, under the field names of `Row`, `Extract` and `Span`."""
    extracts = [
        extract._asdict() | {"tokens": extract.tokens, "spans": [span._asdict() for span in extract.spans]}
        for extract in row.extracts
    ]
    return row._asdict() | {"extracts": extracts}
