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
"""Approximate size in bytes of the stretches in which text files are read and encoded. A stretch ends at the end of a
line.

The tokens of all stretches together decode to the text (`data/text_pieces.py`). Near a cut, they may differ from the
tokens of the entire text if the tokenizer joins a newline to the text after it.
"""


def read_text(piece: Piece, report: Report) -> Iterator[Document]:
    """Yields the document in a text file, whose digest decides whether it is held out. Yields nothing if the file is
    empty or binary."""
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
            report.refuse(error, file.printable_path)
            report.advance(file.size)
            return
        stream.seek(0)
        yield Document(file, 1, key, _text_segments(file, stream, report))


def _check_utf8(stream: BinaryIO, report: Report) -> None:
    """Raises `BadRecordError` if the stream is not valid UTF-8, unless invalid bytes are to be replaced."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    bytes_before = 0
    try:
        while block := stream.read(TEXT_PIECE):
            decoder.decode(block)
            bytes_before += len(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        report.replace_invalid(f"not valid UTF-8 near byte {bytes_before + error.start}")


def _text_segments(file: Input, stream: BinaryIO, report: Report) -> Iterator[Segment]:
    """Yields a text in segments, each of which ends at the end of a line if it has one."""
    rest = b""
    try:
        while block := stream.read(TEXT_PIECE):
            report.advance(len(block))
            block = rest + block
            is_last = len(block) < TEXT_PIECE
            end = len(block) if is_last else block.rfind(b"\n") + 1
            # A line that is longer than a block is cut between characters.
            text, consumed = codecs.utf_8_decode(block[: end or len(block)], "replace", is_last)
            yield Segment(text)
            rest = block[consumed:]
        if rest:
            yield Segment(rest.decode("utf-8", errors="replace"))
    except OSError as error:  # the caller would treat an OSError as an error of the output
        raise ConfigError(f"--input: {file.printable_path} cannot be read: {error.strerror or error}") from error


TOKEN_BLOCK = 2**20
"""Token arrays are cut at every multiple of this many tokens, which limits memory. A document that crosses such a cut
becomes two or more documents."""


def read_tokens(piece: Piece, report: Report) -> Iterator[Document]:
    """Yields the documents that begin in this range of a token array.

    The position of a document decides whether it is held out, so a changed token does not move it to the other split.
    """
    file, end_id = piece.file, report.read_options.end_id
    array = open_tokens(file, f"u{report.read_options.token_bytes}")
    if end_id is None:
        report.records[file.number] = int(piece.start == 0)
        segments = (
            _segment(file, array, start, min(start + TOKEN_BLOCK, piece.stop), report)
            for start in range(piece.start, piece.stop, TOKEN_BLOCK)
        )
        yield Document(file, 1, _split_key(file, 0), segments, closed=True, continues=piece.start > 0)
        return
    number = 0
    for first in range(piece.start // TOKEN_BLOCK * TOKEN_BLOCK, piece.stop, TOKEN_BLOCK):
        block = array[first : first + TOKEN_BLOCK]
        starts = first + 1 + np.flatnonzero(block == end_id)
        edges = np.unique(np.append(starts, [first, first + len(block)])).tolist()
        for start, stop in pairwise(edges):
            if piece.start <= start < piece.stop:
                number += 1
                segment = _segment(file, array, start, stop, report)
                report.lengths[stop - start] += 1
                yield Document(file, number, _split_key(file, start), [segment], closed=True)
    report.records[file.number] = number


def _split_key(file: Input, start: int) -> bytes:
    """Returns the digest that decides whether the document at this position is held out."""
    return hashlib.sha256(f"{file.name}/{start}".encode("utf-8", "surrogateescape")).digest()


def _segment(file: Input, array: np.ndarray, start: int, stop: int, report: Report) -> Segment:
    """Returns the elements from `start` to `stop`. Raises `ConfigError` for an id that is not in the vocabulary."""
    tokens = array[start:stop]
    vocab_size = report.read_options.vocab_size
    invalid = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
    if len(invalid):
        raise ConfigError(
            f"--input: {file.printable_path} holds the id {tokens[invalid[0]]} at element {start + invalid[0]}, which "
            f"the vocabulary of {vocab_size} does not have; give the right --vocab-size or --token-dtype"
        )
    report.advance(tokens.nbytes)
    return Segment(tokens)
