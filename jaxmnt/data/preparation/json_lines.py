"""Reads documents from JSON lines, with limited memory."""

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, BinaryIO

from jaxmnt.data.preparation.documents import BadRecordError, Document, Report
from jaxmnt.data.preparation.inputs import Input, Piece
from jaxmnt.data.preparation.records import documents_of
from jaxmnt.errors import ConfigError, how_to_install, printable

_BLOCK_BYTES = 2**20

_ZSTANDARD_BYTES = 2**9
"""Number of bytes of a .zst file to decompress at a time. Every 4 bytes may become 128 KiB."""


def plain_blocks(stream: BinaryIO, piece: Piece, advance: Callable[[int], None]) -> Iterator[bytes]:
    """Yields, in blocks, the lines that begin in this range of the file."""
    if piece.start:  # skip the line that begins before the range
        stream.seek(piece.start - 1)
        while (line := stream.readline(_BLOCK_BYTES)) and not line.endswith(b"\n"):
            pass
    offset = stream.tell()
    block = b"\n"
    while offset < piece.stop and (block := stream.read(min(_BLOCK_BYTES, piece.stop - offset))):
        offset += len(block)
        advance(len(block))
        yield block
    while not block.endswith(b"\n") and (block := stream.readline(_BLOCK_BYTES)):  # the last line ends after the range
        advance(len(block))
        yield block


def compressed_blocks(file: Input, raw: BinaryIO, advance: Callable[[int], None]) -> Iterator[bytes]:
    """Yields the decompressed blocks of a .gz or .zst file."""
    if file.path.suffix.lower() == ".gz":
        blocks = iter(partial(gzip.GzipFile(fileobj=raw).read, _BLOCK_BYTES), b"")
    else:
        blocks = _zstandard_blocks(file, raw)
    bytes_read = 0
    for block in blocks:
        advance(raw.tell() - bytes_read)
        bytes_read = raw.tell()
        yield block


def _zstandard_blocks(file: Input, raw: BinaryIO) -> Iterator[bytes]:
    """Yields the decompressed blocks of a .zst file.

    Raises `EOFError` for a truncated file, which the stream reader of the library would accept.
    """
    try:
        from zstandard import ZstdDecompressor, ZstdError
    except ImportError as error:
        raise ConfigError(f"--input: {file.printable_path} needs zstandard; {how_to_install('data')}") from error
    frame = None
    while block := raw.read(_ZSTANDARD_BYTES):
        while block:
            frame = frame or ZstdDecompressor().decompressobj()
            try:
                yield frame.decompress(block)
            except ZstdError as error:
                raise zlib.error(str(error)) from error
            block = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("it ends in the middle of a frame")


_NOT_BLANK = re.compile(rb"\S")


class Lines:
    """Iterates over the lines that are not blank. Yields None for a line of more than `limit` bytes.

    White space at the beginning of a line is dropped if it is in an earlier block than the rest of the line.
    """

    def __init__(self, blocks: Iterator[bytes], limit: int):
        self._blocks, self._limit = blocks, limit
        self.number = 0
        """Number of lines so far, including the current line and blank lines."""
        self.blank = 0
        """Number of blank lines so far."""

    def __iter__(self) -> Iterator[bytes | None]:
        pieces = []  # of the current line
        size = 0  # of the current line, in bytes
        is_blank_so_far = False  # True if the current line has begun, but has only white space
        for block in self._blocks:
            stop = 0
            while stop < len(block):
                start = stop
                if not size:  # at the beginning of a line: count and skip blank lines
                    match = _NOT_BLANK.search(block, start)
                    text_start = match.start() if match else len(block)
                    self._count_blank(block.count(b"\n", start, text_start))
                    is_blank_so_far = not match and not block.endswith(b"\n")
                    if not match:
                        break
                    self.number += 1
                    start = max(start, block.rfind(b"\n", start, text_start) + 1)
                stop = block.find(b"\n", start) + 1 or len(block)
                # Collect the line until it exceeds the limit; after that, only add up its size.
                was_within_limit = size <= self._limit
                size += stop - start
                if size <= self._limit:
                    pieces.append(block[start:stop])
                elif was_within_limit:
                    pieces.clear()
                    yield None  # before reading the rest of the line, because the caller may stop here
                if block[stop - 1 : stop] == b"\n":
                    if pieces:
                        yield b"".join(pieces)
                    pieces = []
                    size = 0
        if pieces:
            yield b"".join(pieces)
        self._count_blank(int(is_blank_so_far))

    def _count_blank(self, lines: int) -> None:
        """Adds this many blank lines to the counts."""
        self.number += lines
        self.blank += lines


_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_lines(piece: Piece, report: Report) -> Iterator[Document]:
    """Yields the documents of the lines that begin in this range of the file."""
    with piece.file.path.open("rb") as stream:
        lines = Lines(plain_blocks(stream, piece, report.advance), report.read_options.max_document)
        yield from _documents(lines, piece, report)


def read_compressed(piece: Piece, report: Report) -> Iterator[Document]:
    """Yields the documents of a compressed file. Raises `ConfigError` if it is damaged."""
    file = piece.file
    with file.path.open("rb") as raw:
        lines = Lines(compressed_blocks(file, raw, report.advance), report.read_options.max_document)
        try:
            yield from _documents(lines, piece, report)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ConfigError(
                f"--input: {file.printable_path} is damaged after line {lines.number}: {printable(str(error))}"
            ) from error


def _documents(lines: Lines, piece: Piece, report: Report) -> Iterator[Document]:
    for line in lines:
        number = lines.number
        if line and number == 1 and piece.start == 0:
            line = line.removeprefix(_BYTE_ORDER_MARK)
        try:
            if line is None:
                report.leave_out_long(can_split=False)
            elif line.strip():
                record = _parse_record(report.decoded(line, "the line"))
                yield from documents_of(record, number, piece.file, report)
            else:
                report.empty += 1
        except BadRecordError as error:
            report.refuse(error, f"{piece.file.printable_path}:{_lines_before(piece) + number}")
    report.records[piece.file.number] = lines.number
    report.empty += lines.blank


def _parse_record(text: str) -> Any:
    """Parses a line of JSON. Raises `BadRecordError` if it is not valid."""
    try:
        try:
            return json.loads(text, object_pairs_hook=_make_object)
        except json.JSONDecodeError:
            raise
        except ValueError:  # an integer with too many digits for Python, in a field that we do not read
            return json.loads(text, object_pairs_hook=_make_object, parse_int=float)
    except (ValueError, RecursionError) as error:
        raise BadRecordError(f"not valid JSON: {error}") from error


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object. Raises `BadRecordError` if a field has two different values."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        for name, value in pairs:
            if repr(fields[name]) != repr(value):
                raise BadRecordError(f'field "{printable(name[:40])}" is given twice with different values; keep one')
    return fields


def _lines_before(piece: Piece) -> int:
    """Returns the number of lines that begin before this range.

    Reads the beginning of the file, so it is used only for errors.
    """
    piece_before = piece._replace(start=0, stop=piece.start)
    with piece.file.path.open("rb") as stream:
        return sum(block.count(b"\n") for block in plain_blocks(stream, piece_before, lambda count: None))
