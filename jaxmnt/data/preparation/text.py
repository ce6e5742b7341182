"""Reads documents from text files and token arrays."""

import codecs
import hashlib
from collections.abc import Iterator
from itertools import pairwise
from typing import BinaryIO

import numpy as np

from jaxmnt.data.preparation.documents import BadRecordError, Document, Report, Segment
from jaxmnt.data.preparation.inputs import Input, Piece, open_tokens
from jaxmnt.errors import ConfigError

TEXT_PIECE = 2**20
"""Approximate bytes of the stretches in which text files are read and encoded. They are cut after a line.

The tokens of the stretches together decode to the text (`data/text_pieces.py`). They may differ from those of the whole
text beside a cut, if the tokenizer joins a newline to the text after it.
"""


def read_text(piece: Piece, report: Report) -> Iterator[Document]:
    """Yields the document of a text file, which is held out by its digest; none if it is empty or binary."""
    file = piece.file
    report.records[file.number] = 1
    with file.path.open("rb") as stream:
        first = stream.read(TEXT_PIECE)
        if b"\0" in first:
            report.leave_out_binary(file.name)
            report.advance(file.size)
            return
        if not first:
            report.empty += 1
            return
        stream.seek(0)
        key = hashlib.file_digest(stream, "sha256").digest()
        stream.seek(0)
        try:
            _check_utf8(stream, report)
        except BadRecordError as error:
            report.refuse(error, file.shown)
            report.advance(file.size)
            return
        stream.seek(0)
        yield Document(file, 1, key, _text_segments(file, stream, report))


def _check_utf8(stream: BinaryIO, report: Report) -> None:
    decoder, place = codecs.getincrementaldecoder("utf-8")(), 0
    try:
        while block := stream.read(TEXT_PIECE):
            decoder.decode(block)
            place += len(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        report.replace_invalid(f"not valid UTF-8 near byte {place + error.start}")


def _text_segments(file: Input, stream: BinaryIO, report: Report) -> Iterator[Segment]:
    rest = b""
    try:
        while block := stream.read(TEXT_PIECE):
            report.advance(len(block))
            block = rest + block
            is_last = len(block) < TEXT_PIECE
            lines = len(block) if is_last else block.rfind(b"\n") + 1
            # A line that is longer than a block is cut between characters.
            text, consumed = codecs.utf_8_decode(block[: lines or len(block)], "replace", is_last)
            yield Segment(text)
            rest = block[consumed:]
        if rest:
            yield Segment(rest.decode("utf-8", errors="replace"))
    except OSError as error:  # the caller would take it for an error of the output
        raise ConfigError(f"--input: {file.shown} cannot be read: {error.strerror or error}") from error


TOKEN_BLOCK = 2**20
"""Token arrays are cut at every multiple of this many tokens, which bounds memory. A short document across such a cut
becomes two documents."""


def read_tokens(piece: Piece, report: Report) -> Iterator[Document]:
    """Yields the documents that begin in this range. Held out by position, so that a changed token moves none."""
    file, end_id = piece.file, report.reading.end_id
    array = open_tokens(file, f"u{report.reading.token_bytes}")
    if end_id is None:
        report.records[file.number] = int(piece.start == 0)
        segments = (
            _segment(file, array, start, min(start + TOKEN_BLOCK, piece.stop), report)
            for start in range(piece.start, piece.stop, TOKEN_BLOCK)
        )
        yield Document(file, 1, _key(file, 0), segments, closed=True, continues=piece.start > 0)
        return
    number = 0
    for first in range(piece.start // TOKEN_BLOCK * TOKEN_BLOCK, piece.stop, TOKEN_BLOCK):
        block = array[first : first + TOKEN_BLOCK]
        after_ends = first + 1 + np.flatnonzero(block == end_id)
        edges = np.unique(np.append(after_ends, [first, first + len(block)])).tolist()
        for start, stop in pairwise(edges):
            if piece.start <= start < piece.stop:
                number += 1
                segment = _segment(file, array, start, stop, report)
                report.lengths[stop - start] += 1
                yield Document(file, number, _key(file, start), [segment], closed=True)
    report.records[file.number] = number


def _key(file: Input, start: int) -> bytes:
    return hashlib.sha256(f"{file.name}/{start}".encode("utf-8", "surrogateescape")).digest()


def _segment(file: Input, array: np.ndarray, start: int, stop: int, report: Report) -> Segment:
    """Returns the elements from `start` to `stop`. Raises `ConfigError` for an id outside the vocabulary."""
    tokens, vocab_size = array[start:stop], report.reading.vocab_size
    invalid = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
    if len(invalid):
        raise ConfigError(
            f"--input: {file.shown} holds the id {tokens[invalid[0]]} at element {start + invalid[0]}, which the "
            f"vocabulary of {vocab_size} does not have; give the right --vocab-size or --token-dtype"
        )
    report.advance(tokens.nbytes)
    return Segment(tokens)
