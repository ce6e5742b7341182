"""Reading a part: the documents of text files, JSON lines, Parquet and token arrays, one at a time."""

import codecs
import gzip
import hashlib
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from jaxmnt.data.preparation.chat import segments_of_chat
from jaxmnt.data.preparation.inputs import Input, Part, Piece, open_tokens, unreadable
from jaxmnt.data.preparation.segments import BadRecordError, Segment
from jaxmnt.errors import ConfigError

TEXT_PIECE = 2**20
"""Text files are read and encoded in stretches of about so many bytes, cut after a line."""

TOKEN_BLOCK = 2**20
"""An array in which no document ends within so many tokens is cut there."""


class Document(NamedTuple):
    """One document, before it is encoded."""

    file: int
    record: int
    """From 1 within the part's stretch of the file."""
    key: bytes
    """What decides whether it is held out."""
    segments: Iterable[Segment]
    """Its contents, to be gone through once."""
    closed: bool = False
    """Whether an end of document must not be added, because the tokens are given as they are."""


@dataclass(frozen=True)
class Reading:
    """How records are read."""

    text_field: str = "text"
    chat: bool = False
    replace_invalid: bool = False
    token_bytes: int = 2
    end_id: int | None = None
    vocab_size: int = 0


@dataclass
class Report:
    """What happened on the way."""

    records: dict[int, int]
    """Records seen by file, those left out included."""
    on_bad: Callable[[BadRecordError], None]
    """Called for a record that cannot be used; raises if that is to stop the work."""
    advance: Callable[[int], None]
    """Called with the bytes that were read."""
    empty: int = 0
    replaced: int = 0
    binary: list[str] = field(default_factory=list)
    """Names of files that are no text."""


def read_part(part: Part, inputs: list[Input], reading: Reading, report: Report) -> Iterator[Document]:
    """The documents of a part in order."""
    readers = {
        "text": _read_text, "jsonl": _read_lines, "compressed": _read_compressed,
        "parquet": _read_parquet, "tokens": _read_tokens,
    }  # fmt: skip
    for piece in part.pieces:
        file = inputs[piece.file]
        try:
            yield from readers[file.kind](file, piece, reading, report)
        except OSError as error:
            if error.filename is None:
                raise ConfigError(f"--input: {file.path} cannot be read: {error}") from error
            unreadable(error)


def open_parquet(file: Input) -> Any:
    """A pyarrow.parquet.ParquetFile. Raises `ConfigError` where pyarrow is missing or the file is damaged."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ConfigError(f"--input: {file.path} needs pyarrow; install it with: pip install 'jaxmnt[data]'") from error
    try:
        # Without these a whole column of a row group would be held at a time.
        return parquet.ParquetFile(file.path, pre_buffer=False, buffer_size=2**20)
    except ArrowException as error:
        raise ConfigError(f"--input: {file.path} is no Parquet file or damaged: {error}") from error


# -- text files: a file is a document


def _read_text(file: Input, piece: Piece, reading: Reading, report: Report) -> Iterator[Document]:
    report.records[piece.file] = 1
    with file.path.open("rb") as stream:
        first = stream.read(TEXT_PIECE)
        if b"\0" in first:
            report.binary.append(file.name)
            report.advance(file.size)
            return
        if not first:
            report.empty += 1
            return
        digest = hashlib.sha256(first)
        while block := stream.read(TEXT_PIECE):
            digest.update(block)
        stream.seek(0)
        try:
            _check_utf8(file, stream, reading, report)
        except BadRecordError as error:
            report.on_bad(error)
            report.advance(file.size)
            return
        stream.seek(0)
        yield Document(piece.file, 1, digest.digest(), _text_segments(file, stream, report))


def _check_utf8(file: Input, stream: BinaryIO, reading: Reading, report: Report) -> None:
    decoder, place = codecs.getincrementaldecoder("utf-8")(), 0
    try:
        while block := stream.read(TEXT_PIECE):
            decoder.decode(block)
            place += len(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        if not reading.replace_invalid:
            raise BadRecordError(f"{file.path}: not valid UTF-8 near byte {place + error.start}") from error
        report.replaced += 1


def _text_segments(file: Input, stream: BinaryIO, report: Report) -> Iterator[Segment]:
    rest = b""
    while block := _read_block(file, stream):
        report.advance(len(block))
        block = rest + block
        cut = block.rfind(b"\n") + 1 if len(block) >= TEXT_PIECE else len(block)
        cut = cut or _whole_characters(block)
        yield Segment(block[:cut].decode("utf-8", errors="replace"))
        rest = block[cut:]
    if rest:
        yield Segment(rest.decode("utf-8", errors="replace"))


def _read_block(file: Input, stream: BinaryIO) -> bytes:
    """Reads on. Raised by whoever takes the segments, an OSError would pass for one of the output."""
    try:
        return stream.read(TEXT_PIECE)
    except OSError as error:
        raise ConfigError(f"--input: {file.path} cannot be read: {error.strerror or error}") from error


def _whole_characters(block: bytes) -> int:
    """The length of `block` without a character that is cut off at its end."""
    for back in range(1, min(4, len(block)) + 1):
        byte = block[-back]
        if byte & 0xC0 != 0x80:
            wanted = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
            return len(block) - back if wanted > back else len(block)
    return len(block)


# -- JSON lines: a line is a document


def _read_lines(file: Input, piece: Piece, reading: Reading, report: Report) -> Iterator[Document]:
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
            yield from _line(line, number, piece.file, name, reading, report)
        report.records[piece.file] = number


def _read_compressed(file: Input, piece: Piece, reading: Reading, report: Report) -> Iterator[Document]:
    number, read = 0, 0
    with file.path.open("rb") as raw:
        try:
            for line in _decompress(file, raw):
                number += 1
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
    rest = b""
    for block in _zstandard_blocks(file, raw):
        *whole, rest = (rest + block).split(b"\n")
        for line in whole:
            yield line + b"\n"
    if rest:
        yield rest


def _zstandard_blocks(file: Input, raw: BinaryIO) -> Iterator[bytes]:
    """Decompressed frame by frame: the library's own stream takes a file that was cut off for one that ends there."""
    try:
        import zstandard
    except ImportError as error:
        raise ConfigError(
            f"--input: {file.path} needs zstandard; install it with: pip install 'jaxmnt[data]'"
        ) from error
    frame = None
    while block := raw.read(2**18):
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
    yield from _record(record, number, file, name, reading, report)


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


# -- Parquet: a row is a document


def _read_parquet(file: Input, piece: Piece, reading: Reading, report: Report) -> Iterator[Document]:
    parquet = open_parquet(file)
    groups = list(range(piece.start, piece.stop))
    before = sum(parquet.metadata.row_group(group).num_rows for group in range(piece.start))
    rows = sum(parquet.metadata.row_group(group).num_rows for group in groups)
    name = lambda row: f"{file.path}: row {before + row}"
    known = parquet.schema_arrow.names
    wanted = (
        [reading.text_field] if not reading.chat else [n for n in ("messages", "prompt", "completion") if n in known]
    )
    if not set(wanted) <= set(known) or not wanted:
        raise ConfigError(f"--input: {file.path} has no column {reading.text_field}; its columns: {', '.join(known)}")
    number, share = 0, file.size // max(1, parquet.metadata.num_rows)
    for batch in parquet.iter_batches(64, row_groups=groups, columns=wanted, use_threads=False):
        for record in _records_of(batch, file, before + number, reading):
            number += 1
            report.advance(share)
            yield from _record(record, number, piece.file, name, reading, report)
    report.records[piece.file] = rows


def _records_of(batch: Any, file: Input, before: int, reading: Reading) -> Iterator[Any]:
    """The rows of a batch. Text is taken as bytes, because Parquet files are not checked for being UTF-8."""
    import pyarrow

    column = batch.column(0)
    if not reading.chat and pyarrow.types.is_string(column.type):
        column = column.cast(pyarrow.binary())
    elif not reading.chat and pyarrow.types.is_large_string(column.type):
        column = column.cast(pyarrow.large_binary())
    try:
        yield from ({reading.text_field: value.as_py()} for value in column) if not reading.chat else batch.to_pylist()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--input: {file.path}: not valid UTF-8 in rows {before + 1} to {before + len(batch)}; mend the file"
        ) from error


# -- one record of JSON or Parquet


def _record(
    record: Any, number: int, file: int, name: Callable[[int], str], reading: Reading, report: Report
) -> Iterator[Document]:
    try:
        segments = segments_of_chat(record) if reading.chat else [Segment(_text_of(record, reading, report))]
    except BadRecordError as error:
        report.on_bad(BadRecordError(f"{name(number)}: {error}"))
        return
    if not any(segment.content for segment in segments):
        report.empty += 1
        return
    try:
        key = _key(segments)
    except UnicodeEncodeError:  # JSON can spell halves of characters
        if not reading.replace_invalid:
            report.on_bad(BadRecordError(f"{name(number)}: holds half of a character (a lone surrogate)"))
            return
        report.replaced += 1
        segments = [segment._replace(content=_without_surrogates(segment.content)) for segment in segments]
        key = _key(segments)
    yield Document(file, number, key, segments)


def _key(segments: list[Segment]) -> bytes:
    digest = hashlib.sha256()
    for segment in segments:
        assert isinstance(segment.content, str)
        digest.update(segment.content.encode("utf-8"))
    return digest.digest()


def _without_surrogates(text: str | np.ndarray) -> str:
    assert isinstance(text, str)
    return text.encode("utf-16", errors="surrogatepass").decode("utf-16", errors="replace")


def _text_of(record: Any, reading: Reading, report: Report) -> str:
    field = reading.text_field
    if not isinstance(record, dict):
        raise BadRecordError("a record must be an object with fields")
    if field not in record:
        raise BadRecordError(
            f"has no field {field}; its fields: {', '.join(sorted(record))} (--text-field names another)"
        )
    text = record[field]
    if text is None:
        return ""
    if isinstance(text, bytes):
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError as error:
            if not reading.replace_invalid:
                raise BadRecordError(f"not valid UTF-8 at byte {error.start} of {field}") from error
            report.replaced += 1
            return text.decode("utf-8", errors="replace")
    if not isinstance(text, str):
        raise BadRecordError(f"{field} is no text")
    return text


# -- token arrays: a document ends with its end token, or after a block


def _read_tokens(file: Input, piece: Piece, reading: Reading, report: Report) -> Iterator[Document]:
    """The documents that begin in this stretch. Held out by place, so that a changed token moves no document."""
    array = open_tokens(file, f"u{reading.token_bytes}")
    assert reading.end_id is not None
    number = 0
    start = 0 if piece.start == 0 else _after_end(array, piece.start - 1, reading.end_id)
    while start < piece.stop:
        stop = _after_end(array, start, reading.end_id)
        number += 1
        _check_ids(file, array[start:stop], start, reading.vocab_size)
        key = hashlib.sha256(f"{file.name}/{start}".encode()).digest()
        report.advance((stop - start) * array.dtype.itemsize)
        yield Document(piece.file, number, key, [Segment(array[start:stop])], closed=True)
        start = stop
    report.records[piece.file] = number


def _check_ids(file: Input, tokens: np.ndarray, start: int, vocab_size: int) -> None:
    wrong = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
    if len(wrong):
        raise ConfigError(
            f"--input: {file.path} holds the id {tokens[wrong[0]]} at element {start + wrong[0]}, which the vocabulary "
            f"of {vocab_size} does not have; give the right --vocab-size or --token-dtype"
        )


def _after_end(array: np.ndarray, start: int, end_id: int) -> int:
    """Where the document that holds `start` stops: after its end token, or where a block of the file stops."""
    stop = min((start // TOKEN_BLOCK + 1) * TOKEN_BLOCK, len(array))
    step = 2**12
    for first in range(start, stop, step):
        found = np.flatnonzero(array[first : min(first + step, stop)] == end_id)
        if len(found):
            return first + int(found[0]) + 1
    return stop
