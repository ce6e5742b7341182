"""JSON lines, plain and compressed: a line is a document."""

import gzip
import json
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO

from jaxmnt.data.preparation.document import BadRecordError, Document, Reading, Report
from jaxmnt.data.preparation.inputs import Input, Piece
from jaxmnt.data.preparation.record import documents_of
from jaxmnt.errors import ConfigError

_COMPRESSED_PIECE = 2**12
"""Bytes that are decompressed at a time: a few may become very many."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_lines(file: Input, piece: Piece, reading: Reading, report: Report) -> Iterator[Document]:
    """The lines that begin in this stretch of the file."""
    with file.path.open("rb") as stream:
        if piece.start:
            stream.seek(piece.start - 1)
            stream.readline()  # ends the line that began before; nothing is lost if it ended just there
        name = lambda line: f"{file.path}:{_lines_before(file, piece.start) + line}"
        number = 0
        while stream.tell() < piece.stop and (line := stream.readline()):
            number += 1
            report.advance(len(line))
            line = line.removeprefix(_BYTE_ORDER_MARK) if stream.tell() == len(line) else line
            yield from _line(line, number, piece.file, name, reading, report)
        report.records[piece.file] = number


def read_compressed(file: Input, piece: Piece, reading: Reading, report: Report) -> Iterator[Document]:
    number, read = 0, 0
    with file.path.open("rb") as raw:
        try:
            for line in _decompress(file, raw):
                number += 1
                line = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
                report.advance(raw.tell() - read)
                read = raw.tell()
                yield from _line(line, number, piece.file, lambda line: f"{file.path}:{line}", reading, report)
        except _signs_of_damage() as error:
            raise ConfigError(f"--input: {file.path} is damaged after line {number}: {error}") from error
    report.records[piece.file] = number


def _decompress(file: Input, raw: BinaryIO) -> Iterator[bytes]:
    """The lines of a .gz or .zst file."""
    if file.path.suffix == ".gz":
        with gzip.open(raw) as lines:
            yield from lines
        return
    pieces: list[bytes] = []  # of a line that is not at its end
    for block in _zstandard_blocks(file, raw):
        *ends, rest = block.split(b"\n")
        for end in ends:
            yield b"".join([*pieces, end, b"\n"])
            pieces = []
        pieces.append(rest)
    if any(pieces):
        yield b"".join(pieces)


def _zstandard_blocks(file: Input, raw: BinaryIO) -> Iterator[bytes]:
    """Decompressed frame by frame: the library's own stream takes a file that was cut off for one that ends there."""
    try:
        import zstandard
    except ImportError as error:
        raise ConfigError(
            f"--input: {file.path} needs zstandard; install it with: pip install 'jaxmnt[data]'"
        ) from error
    frame = None
    while block := raw.read(_COMPRESSED_PIECE):
        while block:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(block)
            block = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("it ends in the middle of a frame")


def _signs_of_damage() -> tuple[type[Exception], ...]:
    """What reading a damaged compressed file raises."""
    known: list[type[Exception]] = [EOFError, zlib.error, gzip.BadGzipFile]
    if "zstandard" in sys.modules:
        known.append(sys.modules["zstandard"].ZstdError)
    return tuple(known)


def _line(
    line: bytes, number: int, file: int, name: Callable[[int], str], reading: Reading, report: Report
) -> Iterator[Document]:
    if not line.strip():
        report.empty += 1
        return
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        if not reading.replace_invalid:
            report.on_bad(BadRecordError(f"{name(number)}: not valid UTF-8 at byte {error.start} of the line"))
            return
        report.replaced += 1
        text = line.decode("utf-8", errors="replace")
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        report.on_bad(BadRecordError(f"{name(number)}: not valid JSON: {error}"))
        return
    yield from documents_of(record, number, file, name, reading, report)


def _lines_before(file: Input, start: int) -> int:
    """Lines that begin before byte `start`; reads the file up to there, which only an error is worth."""
    lines = 0
    with file.path.open("rb") as stream:
        left, last = start, b"\n"
        while left and (block := stream.read(min(left, 2**22))):
            lines += block.count(b"\n")
            left -= len(block)
            last = block[-1:]
    return lines + (last != b"\n")
