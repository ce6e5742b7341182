"""Encodes documents: short ones together, which is faster, and long ones a segment at a time."""

from collections.abc import Iterable, Iterator
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from jaxmnt.data.preparation.documents import Document, Report, Segment
from jaxmnt.data.text_pieces import Piece, encode_pieces, encode_stretches
from jaxmnt.data.tokenizer import TargetText, Tokenizer

_BATCH_CHARACTERS = 2**19
"""Number of characters to encode at a time, because encoding many short texts one by one is slower."""

Tokens = tuple[np.ndarray, bool]
"""Tokens from a document, and True if they are targets."""


def encode_documents(
    documents: Iterable[Document], tokenizer: Tokenizer | None, report: Report
) -> Iterator[tuple[Document, Iterable[Tokens]]]:
    """Yields each document with its tokens. Counts tokens that cross the boundary of a target in `report`."""
    batch = []
    characters = 0
    for document in documents:
        if isinstance(document.segments, list):
            batch.append((document, document.segments))
            characters += sum(len(segment.content) for segment in document.segments)
            if characters < _BATCH_CHARACTERS:
                continue
        yield from _encode_together(batch, tokenizer, report)
        batch, characters = [], 0
        if not isinstance(document.segments, list):
            yield document, _encode_in_stretches(document, tokenizer)
    yield from _encode_together(batch, tokenizer, report)


def _encode_together(
    batch: list[tuple[Document, list[Segment]]], tokenizer: Tokenizer | None, report: Report
) -> Iterator[tuple[Document, Iterable[Tokens]]]:
    """Encodes a batch of short documents together, and yields each with its tokens. Token arrays are not changed."""
    texts = [
        [Piece(segment.content, segment.markup) for segment in segments if isinstance(segment.content, str)]
        if not document.joined
        else []
        for document, segments in batch
    ]
    assert tokenizer is not None or not any(texts)
    encoded: list[list[Any]] = texts if tokenizer is None else encode_pieces(tokenizer, texts)
    joined = iter(_encode_joined([segments for document, segments in batch if document.joined], tokenizer, report))
    for (document, segments), ids in zip(batch, encoded, strict=True):
        if document.joined:
            yield document, next(joined)
            continue
        tokens = ids or [segment.content for segment in segments]  # without text, the segments hold tokens
        yield document, zip(tokens, (segment.learn for segment in segments), strict=True)


def _encode_joined(
    documents: list[list[Segment]], tokenizer: Tokenizer | None, report: Report
) -> Iterator[list[Tokens]]:
    """Yields the tokens of documents whose segments are one text."""
    if not documents:
        return
    assert tokenizer is not None
    texts = []
    for segments in documents:
        groups = [(learn, list(group)) for learn, group in groupby(segments, lambda segment: segment.learn)]
        pieces = ["".join(str(segment.content) for segment in group) for _, group in groups]
        texts.append(TargetText(pieces, [learn for learn, _ in groups]))
    for ids, is_target, crossing in tokenizer.encode_with_targets(texts):
        report.crossing += crossing
        # The end of the document before already precedes the text. A template that begins with it would repeat it.
        begin = int(len(ids) > 0 and ids[0] == tokenizer.end_of_document)
        edges = [begin, *(np.flatnonzero(np.diff(is_target[begin:])) + begin + 1).tolist(), len(ids)]
        yield [(ids[start:stop], bool(is_target[start])) for start, stop in pairwise(edges) if stop > start]


def _encode_in_stretches(document: Document, tokenizer: Tokenizer | None) -> Iterator[Tokens]:
    """Returns the tokens of a long document, which is encoded a segment at a time. All of them are targets."""
    contents: Iterator[Any] = (segment.content for segment in document.segments)
    if not document.closed:
        assert tokenizer is not None
        contents = encode_stretches(tokenizer, contents)
    return ((tokens, True) for tokens in contents)
