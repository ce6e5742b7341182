"""JSON lines, plain and compressed: a line is a document."""

import json
from collections.abc import Callable, Iterator

from jaxmnt.data.preparation.blocks import compressed_blocks, plain_blocks, signs_of_damage
from jaxmnt.data.preparation.document import BadRecordError, Document, Reading, Report
from jaxmnt.data.preparation.inputs import Input, Piece
from jaxmnt.data.preparation.linewise import Lines
from jaxmnt.data.preparation.long_text import text_in_pieces
from jaxmnt.data.preparation.record import documents_of, documents_of_pieces, leave_out_long, replacing
from jaxmnt.errors import ConfigError, printable

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_lines(file: Input, piece: Piece, reading: Reading, report: Report) -> Iterator[Document]:
    """The lines that begin in this stretch of the file."""
    with file.path.open("rb") as stream:
        lines = Lines(plain_blocks(stream, piece, report.advance), reading.max_document)
        name = lambda line: f"{file.shown}:{_lines_before(file, piece.start) + line}"
        yield from _documents(lines, piece, name, reading, report)


def read_compressed(file: Input, piece: Piece, reading: Reading, report: Report) -> Iterator[Document]:
    with file.path.open("rb") as raw:
        lines = Lines(compressed_blocks(file, raw, report.advance), reading.max_document)
        try:
            yield from _documents(lines, piece, lambda line: f"{file.shown}:{line}", reading, report)
        except signs_of_damage() as error:
            raise ConfigError(
                f"--input: {file.shown} is damaged after line {lines.number}: {printable(str(error))}"
            ) from error


def _documents(
    lines: Lines, piece: Piece, name: Callable[[int], str], reading: Reading, report: Report
) -> Iterator[Document]:
    for line in lines:
        number = lines.number
        if isinstance(line, bytes):
            line = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 and piece.start == 0 else line
            yield from _line(line, number, piece.file, name, reading, report)
        elif reading.long_documents == "split" and not reading.chat:
            odd = replacing(reading, report)
            pieces = text_in_pieces(line, reading.text_field, reading.max_document, odd)
            yield from documents_of_pieces(pieces, number, piece.file, name, report)
        else:
            leave_out_long(name(number), reading, report)
    report.records[piece.file] = lines.number
    report.empty += lines.blank


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
