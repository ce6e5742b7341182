"""What is in the rows of a batch: documents, their places in the files they came from, and which tokens are targets."""

from bisect import bisect, insort
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmnt.config.schema import Config
from jaxmnt.data.batches import TrainingData
from jaxmnt.data.elements import GivenRows
from jaxmnt.data.grain_source import GrainData
from jaxmnt.data.preparation.inputs import Kind, kind_of_file
from jaxmnt.data.rows import Packed
from jaxmnt.data.sources import Part, Sources
from jaxmnt.data.store import PreparedData
from jaxmnt.data.text_pieces import LONGEST_CONTEXT, decode_after
from jaxmnt.data.tokenizer import Tokenizer

_READ_AT_ONCE = 1 << 20

_UNITS: dict[Kind, str] = {
    "text": "file",
    "jsonl": "line",
    "compressed": "line",
    "parquet": "row",
    "tokens": "document",
}
"""What a record of each kind of file is."""


class Span(NamedTuple):
    """Tokens that follow one another, all of them targets or none."""

    learned: bool
    """Whether the model learns to predict them."""
    ids: list[int]
    text: str | None
    """With the names of special tokens; None without a tokenizer."""


class Extract(NamedTuple):
    """What a row holds of one document."""

    place: int
    """The first of its places in the row."""
    document: int | None
    """The document's number in its source; None for a row that a dataset gives as it is."""
    first: int
    """The first token of the document that is in the row."""
    file: str
    record: int
    """Its number in the file, from 1."""
    record_unit: str
    """What `record` counts: file (a text file is one record), line, row, document or element."""
    line: int | None
    """The line of the document's text, from 1, in which the first token begins; None without a tokenizer."""
    spans: list[Span]

    @property
    def tokens(self) -> int:
        return sum(len(span.ids) for span in self.spans)


class Row(NamedTuple):
    """A row of a batch."""

    row: int
    source: str
    kind: str
    """window, packed row or row."""
    number: int
    """Its number in the source."""
    epoch: int
    """From 1."""
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
    """Yields the first `limit` rows of the batch that update number `step` (1 is the first) is made of."""
    row_numbers = range(min(limit, config.data.global_batch_size))
    located, batch = training.order.locate(step - 1, row_numbers), training.batch(step - 1, row_numbers)
    lines = {name: Lines(reader, tokenizer) if tokenizer else None for name, reader in training.readers.items()}
    for row in row_numbers:
        name, number = training.names[located.source[row]], int(located.row[row])
        reader, part = training.readers[name], sources.parts[name]
        learned_L = batch["weights"][row] > 0
        if isinstance(reader, GivenRows):
            kind, origin = "row", part.origin("train", number)
            spans = _spans(tokenizer, batch["targets"][row], learned_L, np.empty(0, np.int64))
            extracts = [Extract(0, None, 0, origin.file, origin.record, _unit(part, origin.file), None, spans)]
        else:
            kind = "packed row" if isinstance(reader, Packed) else "window"
            extracts = list(_extracts(part, reader, number, learned_L, tokenizer, lines[name]))
        yield Row(row, name, kind, number, int(located.epoch[row]) + 1, int(learned_L.sum()), extracts)


def _extracts(
    part: Part, reader: Any, row: int, learned_L: np.ndarray, tokenizer: Tokenizer | None, lines: "Lines | None"
) -> Iterator[Extract]:
    """Yields what the row holds of each document, in order."""
    offsets = reader.offsets(row)
    places = np.flatnonzero(offsets >= 0)
    documents = reader.stream.documents(offsets[places])
    edges = (np.flatnonzero(np.diff(documents)) + 1).tolist()
    for begin, end in pairwise([0, *edges, len(places)]):
        document, start = int(documents[begin]), int(offsets[places[begin]])
        first = start - int(reader.stream.document_starts[document])
        context = _read(reader.stream, start - min(first, LONGEST_CONTEXT), start)
        ids = _read(reader.stream, start, start + end - begin)
        origin = part.origin("train", document)
        line = lines.of(document, start) if lines else None
        spans = _spans(tokenizer, ids, learned_L[places[begin:end]], context)
        unit = _unit(part, origin.file)
        yield Extract(int(places[begin]), document, first, origin.file, origin.record, unit, line, spans)


def _spans(tokenizer: Tokenizer | None, ids: np.ndarray, learned: np.ndarray, context: np.ndarray) -> list[Span]:
    """Cuts the ids where targets begin or end. `context` stands before them in their document."""
    edges = (np.flatnonzero(np.diff(learned)) + 1).tolist()
    spans, before = [], context
    for begin, end in pairwise([0, *edges, len(ids)]):
        piece = ids[begin:end]
        text = None if tokenizer is None else _text(tokenizer, before[-LONGEST_CONTEXT:], piece)
        spans.append(Span(bool(learned[begin]), piece.tolist(), text))
        before = np.concatenate([before, piece])
    return spans


def _text(tokenizer: Tokenizer, context: np.ndarray, ids: np.ndarray) -> str:
    """The text of ids, with the names of tokens that no text makes."""
    names = tokenizer.names_of_special
    text, begin = "", 0
    for end in [*np.flatnonzero(np.isin(ids, [*names])).tolist(), len(ids)]:
        text += decode_after(tokenizer, np.concatenate([context, ids[:begin]]), ids[begin:end])
        text += names[int(ids[end])] if end < len(ids) else ""
        begin = end + 1
    return text


def _unit(part: Part, file: str) -> str:
    """What the numbers of records of a file count."""
    if isinstance(part, PreparedData):
        return _UNITS[kind_of_file(Path(file))]
    return "element" if isinstance(part, GrainData) else "document"


class Lines:
    """In which line of its document a token of a stream begins.

    Of each document it remembers what was counted: rows of a batch may come from one long text.
    """

    def __init__(self, reader: Any, tokenizer: Tokenizer):
        self._reader, self._tokenizer = reader, tokenizer
        self._newlines_of_id: dict[int, int] = {}
        self._known: dict[int, list[tuple[int, int]]] = {}
        """Offsets in the stream with their lines, in order, by document."""

    def of(self, document: int, offset: int) -> int:
        """The line, from 1, of the token at an offset of the stream that is in this document."""
        begin = int(self._reader.stream.document_starts[document])
        positions = self._known.setdefault(document, [(begin, 1)])
        before, line = positions[bisect(positions, offset, key=lambda entry: entry[0]) - 1]
        for start in range(before, offset, _READ_AT_ONCE):
            line += self._newlines(_read(self._reader.stream, start, min(offset, start + _READ_AT_ONCE)))
        insort(positions, (offset, line))
        return line

    def _newlines(self, ids: np.ndarray) -> int:
        """How many lines end in the text of these tokens. A line feed is one byte, so no two tokens share it."""
        total = 0
        for number, times in zip(*(array.tolist() for array in np.unique(ids, return_counts=True)), strict=True):
            if number not in self._newlines_of_id:
                self._newlines_of_id[number] = self._tokenizer.decode(np.array([number])).count("\n")
            total += self._newlines_of_id[number] * times
        return total


def _read(stream: Any, begin: int, end: int) -> np.ndarray:
    tokens = np.empty(end - begin, np.int64)
    if len(tokens):
        stream.read(begin, tokens)
    return tokens


def to_json(row: Row) -> dict[str, Any]:
    """The row as plain values, by the names of `Row`, `Extract` and `Span`."""
    extracts = [
        extract._asdict() | {"tokens": extract.tokens, "spans": [span._asdict() for span in extract.spans]}
        for extract in row.extracts
    ]
    return row._asdict() | {"extracts": extracts}
