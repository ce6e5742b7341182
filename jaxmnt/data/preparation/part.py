"""One part of the work: its documents encoded, split, and written as shards with a record of what was done."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from jaxmnt.data.manifest import SPLITS
from jaxmnt.data.preparation.document import BadRecordError, Document, Reading, Report, Segment
from jaxmnt.data.preparation.held_out import split_of
from jaxmnt.data.preparation.inputs import Input, Part
from jaxmnt.data.preparation.reader import read_part
from jaxmnt.data.preparation.shards import SHARD_TOKENS, ShardWriter, cannot_write, save_array, write_record
from jaxmnt.data.tokenizer import Tokenizer
from jaxmnt.errors import ConfigError

_BATCH_CHARACTERS = 2**19
"""Text that is encoded at a time; encoding many short texts one by one would cost more."""

_COUNTED_TOKENS = 2**20

_REMARKS = 20
"""Bad records of a part that are described; all are counted."""

_HOW_TO_SKIP = "to leave such records out: --on-error skip"


@dataclass(frozen=True)
class Job:
    """What all parts have in common."""

    inputs: list[Input]
    output: Path
    work: Path
    reading: Reading
    eval_fraction: float
    skip_bad: bool
    vocab_size: int
    end_of_document: int | None
    shard_tokens: int = SHARD_TOKENS

    @property
    def dtype(self) -> np.dtype:
        """The smallest unsigned type that holds every id."""
        return np.min_scalar_type(self.vocab_size - 1)


def record_path(work: Path, part: int) -> Path:
    """Where the record of a part is; its presence says that the part is done."""
    return work / f"part-{part:05d}.json"


def counts_path(work: Path, part: int) -> Path:
    return work / f"counts-{part:05d}.npy"


def do_part(job: Job, part: Part, tokenizer: Tokenizer | None, advance: Callable[[int], None]) -> None:
    """Does one part. Raises `ConfigError` for bad input, `UserError` when the output cannot be written."""
    remarks: list[str] = []
    skipped = 0

    def on_bad(error: BadRecordError) -> None:
        nonlocal skipped
        if not job.skip_bad:
            raise ConfigError(f"--input: {error}; {error.advice and error.advice + '; '}{_HOW_TO_SKIP}")
        skipped += 1
        if len(remarks) < _REMARKS:
            remarks.append(str(error))

    report = Report({}, on_bad, advance)
    writers = {
        split: ShardWriter(
            job.output, job.work, split, part.number,
            dtype=job.dtype, learn_mask=job.reading.chat, shard_tokens=job.shard_tokens,
        )
        for split in SPLITS
    }  # fmt: skip
    counts = {split: _Counts(job.vocab_size, job.dtype) for split in SPLITS}
    try:
        for document, encoded in _encoded(job, read_part(part, job.inputs, job.reading, report), tokenizer):
            split = split_of(document, job.inputs[document.file], job.eval_fraction)
            if not document.continues:
                writers[split].begin_document(document.file, document.record)
            for tokens, learn in encoded:
                counts[split].add(tokens)
                writers[split].add(tokens, learn)
        splits = {split: writer.close() for split, writer in writers.items()}
        save_array(counts_path(job.work, part.number), np.stack([counts[split].total() for split in SPLITS]))
        record = {
            "splits": splits, "records": {str(file): number for file, number in report.records.items()},
            "skipped": skipped, "remarks": remarks,
            "empty": report.empty, "replaced": report.replaced, "long": report.long, "split": report.split,
            "broken": report.broken,
            "lengths": {str(length): number for length, number in report.lengths.items()},
            "binary": len(report.binary), "binary_names": report.binary[:_REMARKS],
        }  # fmt: skip
        write_record(record_path(job.work, part.number), record)
    except OSError as error:
        raise cannot_write(job.output, error) from error


def held_out_documents(job: Job, part: Part) -> Iterator[tuple[bool, Document]]:
    """The documents of a part with whether they are held out; bad ones are passed over."""
    report = Report({}, lambda error: None, lambda count: None)
    for document in read_part(part, job.inputs, job.reading, report):
        yield split_of(document, job.inputs[document.file], job.eval_fraction) == "eval", document


class _Counts:
    """How often each token occurs. Tokens are counted many at a time, since counting few costs a whole vocabulary."""

    def __init__(self, vocab_size: int, dtype: np.dtype):
        self._totals = np.zeros(vocab_size, np.int64)
        self._dtype = dtype
        self._waiting: list[np.ndarray] = []
        self._tokens = 0

    def add(self, tokens: np.ndarray) -> None:
        for start in range(0, len(tokens), _COUNTED_TOKENS):  # counting takes 8 bytes for each
            piece = tokens[start : start + _COUNTED_TOKENS]
            self._waiting.append(piece.astype(self._dtype, copy=False))
            self._tokens += len(piece)
            if self._tokens >= _COUNTED_TOKENS:
                self.total()

    def total(self) -> np.ndarray:
        if self._waiting:
            self._totals += np.bincount(np.concatenate(self._waiting), minlength=len(self._totals))
            self._waiting, self._tokens = [], 0
        return self._totals


def _encoded(
    job: Job, documents: Iterator[Document], tokenizer: Tokenizer | None
) -> Iterator[tuple[Document, Iterator[tuple[np.ndarray, bool]]]]:
    """Each document with its tokens. Short ones are encoded together, long ones a segment at a time."""
    waiting: list[tuple[Document, list[Segment]]] = []
    characters = 0
    for document in documents:
        if isinstance(document.segments, list):
            waiting.append((document, document.segments))
            characters += sum(len(segment.content) for segment in document.segments)
            if characters < _BATCH_CHARACTERS:
                continue
        yield from _encode_together(job, waiting, tokenizer)
        waiting, characters = [], 0
        if not isinstance(document.segments, list):
            yield document, _encode_one_by_one(job, document, tokenizer)
    yield from _encode_together(job, waiting, tokenizer)


def _encode_together(
    job: Job, waiting: list[tuple[Document, list[Segment]]], tokenizer: Tokenizer | None
) -> Iterator[tuple[Document, Iterator[tuple[np.ndarray, bool]]]]:
    segments = [segment for _, own in waiting for segment in own]
    encoded = iter(_encode(segments, tokenizer))
    for document, own in waiting:
        tokens = [(next(encoded), segment.learn) for segment in own]
        yield document, iter(tokens + _end(job, document))


def _encode_one_by_one(job: Job, document: Document, tokenizer: Tokenizer | None) -> Iterator[tuple[np.ndarray, bool]]:
    for segment in document.segments:
        for tokens in _encode([segment], tokenizer):
            yield tokens, segment.learn
    yield from _end(job, document)


def _encode(segments: list[Segment], tokenizer: Tokenizer | None) -> list[np.ndarray]:
    encoded: list[np.ndarray] = []
    for _, group in groupby(segments, lambda one: (isinstance(one.content, str), one.markup)):
        alike = list(group)
        texts = [segment.content for segment in alike if isinstance(segment.content, str)]
        if texts:
            assert tokenizer is not None
            encoded += tokenizer.encode_batch(texts, markup=alike[0].markup)
        encoded += [segment.content for segment in alike if not isinstance(segment.content, str)]
    return encoded


def _end(job: Job, document: Document) -> list[tuple[np.ndarray, bool]]:
    if document.closed:
        return []
    assert job.end_of_document is not None
    return [(np.array([job.end_of_document], job.dtype), True)]
