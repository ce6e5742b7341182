"""Reads documents from Parquet, and checks the size of cells before they are read.

Reading damaged metadata of a column may abort the process in native code instead of raising an error. So a child
process reads it: python -m jaxmnt.data.preparation.parquet FILE GROUP … writes the sizes of column chunks as JSON.
"""

import codecs
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from jaxmnt.data.preparation.documents import BadRecordError, Document, Report, Segment
from jaxmnt.data.preparation.inputs import Input, Piece, Reading, damaged_parquet, open_parquet
from jaxmnt.data.preparation.records import (
    KNOWN_SHAPES,
    SHAPES,
    conversation_advice,
    documents_of,
    fields_to_read,
    key_of,
    names_of,
)
from jaxmnt.errors import ConfigError, printable
from jaxmnt.strict_json import json_text

_HEADER_BYTES = 2**16
"""Upper bound of a page header's size; writers truncate the statistics in it."""

_UNCOMPRESSED, _COMPRESSED = 2, 3
"""Thrift ids of the fields uncompressed_page_size and compressed_page_size of a page header."""

_BINARY, _STRUCT = 8, 12
_NUMBERS = (4, 5, 6)
_SIZES = {1: 0, 2: 0, 3: 1, 7: 8}
"""Type codes of Thrift's compact protocol; `_SIZES` has the bytes of true, false, a byte and a double."""


class Column(NamedTuple):
    """A column chunk: the part of a column in one row group."""

    field: str
    """Top-level field of the record that the column belongs to."""
    uncompressed: int
    start: int
    """Offset in the file of its first page, in bytes."""
    stop: int


def columns_of(path: Path, groups: Sequence[int]) -> list[list[Column]]:
    """Returns the column chunks of each of these row groups. Raises `ValueError` if their metadata is damaged."""
    arguments = [sys.executable, "-m", __name__, str(path), *map(str, groups)]
    child = subprocess.run(arguments, capture_output=True, check=False)
    if child.returncode == 0:
        return [[Column(*column) for column in columns] for columns in json.loads(child.stdout)]
    code = child.returncode
    ended = f"ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"
    lines = child.stderr.decode(errors="replace").strip().splitlines()
    why = f": {lines[-1].strip()}" if lines else ""
    raise ValueError(f"reading the metadata of its columns {ended}{why}")


def _column_of(column: Any) -> Column:
    start = column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset
    field = column.path_in_schema.split(".")[0]
    return Column(field, column.total_uncompressed_size, start, start + column.total_compressed_size)


def _print_column_sizes(path: str, *groups: str) -> None:
    from pyarrow import parquet

    metadata = parquet.ParquetFile(path, pre_buffer=False).metadata
    sizes = []
    for number in groups:
        group = metadata.row_group(int(number))
        sizes.append([_column_of(group.column(column)) for column in range(group.num_columns)])
    print(json_text(sizes))


def largest_page(stream: BinaryIO, column: Column) -> int:
    """Returns the decompressed bytes of the largest page of a column chunk. Raises `ValueError` for damaged headers."""
    place, largest = column.start, 0
    while place < column.stop:
        stream.seek(place)
        header = _Header(stream.read(_HEADER_BYTES))
        try:
            sizes = header.numbers()
            if sizes[_COMPRESSED] < 0:
                raise IndexError("a page of less than no bytes")
            largest = max(largest, sizes[_UNCOMPRESSED])
            place += header.place + sizes[_COMPRESSED]
        except (IndexError, KeyError):
            raise ValueError(f"the header of the page at byte {place} is damaged") from None
    return largest


class _Header:
    """Parses a page header in Thrift's compact protocol. Raises `IndexError` if it is damaged."""

    def __init__(self, raw: bytes):
        self._raw = raw
        self.place = 0

    def numbers(self) -> dict[int, int]:
        """Reads a struct, and returns its integers by field id."""
        values, field = {}, 0
        while byte := self._byte():
            # A field header has the increment of the field id in the high half, and the type in the low half.
            step, kind = byte >> 4, byte & 15
            field = field + step if step else self._number()
            if kind in _NUMBERS:
                values[field] = self._number()
            else:
                self._skip(kind)
        return values

    def _byte(self) -> int:
        self.place += 1
        return self._raw[self.place - 1]

    def _unsigned(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def _number(self) -> int:
        value = self._unsigned()  # zigzag encoding
        return value >> 1 ^ -(value & 1)

    def _skip(self, kind: int) -> None:
        if kind == _STRUCT:
            self.numbers()
        elif kind == _BINARY:
            size = self._unsigned()  # advances self.place
            self.place += size
        elif kind in _SIZES:
            self.place += _SIZES[kind]
        else:
            raise IndexError("headers of pages have no lists and maps")


_ROWS = 8
"""Rows held in memory at a time: each may be as long as the largest document."""

_LARGE_PAGE = 2**27
"""Pages up to this many bytes are always read, because some programs write them."""


def read_parquet(piece: Piece, report: Report) -> Iterator[Document]:
    """Yields the documents of these row groups. Raises `ConfigError` if the file is damaged."""
    from pyarrow import ArrowException

    file, reading = piece.file, report.reading
    parquet = open_parquet(file)
    groups = list(range(piece.start, piece.stop))
    before = sum(parquet.metadata.row_group(group).num_rows for group in range(piece.start))
    column_names = _columns(file, parquet.schema_arrow, reading)
    if reading.long_documents == "error":
        _check_pages(file, parquet.metadata, groups, column_names, reading)
    number, share = 0, file.size // max(1, parquet.metadata.num_rows)
    try:
        for batch in parquet.iter_batches(_ROWS, row_groups=groups, columns=column_names, use_threads=False):
            for row in _rows_of(batch, reading):
                number += 1
                report.advance(share)
                try:
                    yield from _documents(row, number, file, report)
                except BadRecordError as error:
                    report.refuse(error, f"{file.shown}: row {before + number}")
    except ArrowException as error:
        raise damaged_parquet(file, error) from error
    report.records[file.number] = number


def _columns(file: Input, schema: Any, reading: Reading) -> list[str]:
    """Returns the columns to read. Raises `ConfigError` if they are missing, or if the text column holds no text."""
    names = schema.names
    columns = f"its columns: {names_of(names)}"
    if reading.chat:
        column_names = fields_to_read(names, reading)
        if set(SHAPES).isdisjoint(column_names):
            raise ConfigError(f"--input: {file.shown} has no column {KNOWN_SHAPES}; {columns}")
        return column_names
    field = reading.text_field
    if field not in names:
        advice = conversation_advice(names)
        raise ConfigError(
            f"--input: {file.shown} has no column {printable(field)}; {columns}{advice and '; ' + advice}"
        )
    kind = schema.types[names.index(field)]
    if not _is_text(kind):
        raise ConfigError(
            f"--input: {file.shown}: its column {printable(field)} holds {printable(str(kind)[:80])}, which is not "
            "text; --text-field names another"
        )
    return [field]


def _check_pages(file: Input, metadata: Any, groups: list[int], column_names: list[str], reading: Reading) -> None:
    """Raises `ConfigError` for pages that need too much memory: a small file may hold a very large cell."""
    limit = max(2 * reading.max_document, _LARGE_PAGE)
    large = [group for group in groups if metadata.row_group(group).total_byte_size > limit]
    if not large:
        return
    try:
        with file.path.open("rb") as stream:
            for group, columns in zip(large, columns_of(file.path, large), strict=True):
                read = [column for column in columns if column.field in column_names and column.uncompressed > limit]
                size = max((largest_page(stream, column) for column in read), default=0)
                if size > limit:
                    first = 1 + sum(metadata.row_group(before).num_rows for before in range(group))
                    last = first + metadata.row_group(group).num_rows - 1
                    raise ConfigError(
                        f"--input: {file.shown}: a page between rows {first} and {last} has {size / 2**20:.0f} MiB and "
                        "must be read at once; raise --max-document-mib if memory allows, or set "
                        "--long-documents split or skip"
                    )
    except ValueError as error:
        raise damaged_parquet(file, error) from error


def _rows_of(batch: Any, reading: Reading) -> Iterator[Any]:
    """Returns the rows of a batch, not yet decoded.

    A single text column is read as bytes, because Parquet does not guarantee that text is UTF-8.
    """
    if reading.chat:
        return (batch.slice(row, 1) for row in range(len(batch)))
    return (value.as_py() for value in _as_bytes(batch.column(0)))


def _documents(row: Any, number: int, file: Input, report: Report) -> Iterator[Document]:
    """Yields the documents of a row from `_rows_of`. Raises `BadRecordError`."""
    reading = report.reading
    size = row.nbytes if reading.chat else len(row or b"")
    if size <= reading.max_document:
        record = _conversation(row) if reading.chat else {reading.text_field: row}
        yield from documents_of(record, number, file, report)
    elif reading.long_documents == "split" and not reading.chat:
        yield from _split(row, number, file, report)
    else:
        report.leave_out_long(can_split=not reading.chat)


def _conversation(row: Any) -> Any:
    try:
        return row.to_pylist()[0]
    except UnicodeDecodeError as error:
        raise BadRecordError(f"not valid UTF-8: {error.reason}") from error
    except (ValueError, OverflowError) as error:  # a timestamp in another field that Python cannot represent
        raise BadRecordError(f"cannot be decoded: {printable(str(error)[:200])}") from error


def _split(text: bytes, number: int, file: Input, report: Report) -> Iterator[Document]:
    """Splits a text that is too long into documents, which are all held out or all not. Raises `BadRecordError`."""
    start, size = 0, report.reading.max_document
    try:
        for _, stop in _pieces(text, size, "strict"):
            start = stop
    except UnicodeDecodeError as error:
        where = f"at byte {start + error.start} of {printable(report.reading.text_field)}"
        report.replace_invalid(f"not valid UTF-8 {where}")
    report.split += 1
    key = b""
    for piece, _ in _pieces(text, size, "replace"):
        segments = [Segment(piece)]
        key = key or key_of(segments)
        yield Document(file, number, key, segments)


def _pieces(text: bytes, size: int, errors: str) -> Iterator[tuple[str, int]]:
    """Cuts a text into pieces of at most `size` bytes and of whole characters, and yields each with its end."""
    stop = 0
    while stop < len(text):
        piece, consumed = codecs.utf_8_decode(text[stop : stop + size], errors, stop + size >= len(text))
        stop += consumed
        yield piece, stop


def _is_text(kind: Any) -> bool:
    """Returns True if a column of this type may hold text: strings, bytes, or only nulls."""
    from pyarrow import BaseExtensionType, types

    if isinstance(kind, BaseExtensionType):
        kind = kind.storage_type
    if types.is_dictionary(kind):
        kind = kind.value_type
    checks = (
        types.is_string, types.is_large_string, types.is_string_view, types.is_null,
        types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary,
    )  # fmt: skip
    return any(check(kind) for check in checks)


def _as_bytes(column: Any) -> Any:
    """Converts a column of text, in any of Arrow's encodings, to bytes."""
    from pyarrow import BaseExtensionType, binary, large_binary, types

    if isinstance(column.type, BaseExtensionType):
        column = column.storage
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if types.is_string(column.type) or types.is_string_view(column.type):
        return column.cast(binary())
    return column.cast(large_binary()) if types.is_large_string(column.type) else column


if __name__ == "__main__":
    _print_column_sizes(*sys.argv[1:])
