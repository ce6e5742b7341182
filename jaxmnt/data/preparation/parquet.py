"""Reads documents from Parquet files, and checks the size of cells before reading them.

Reading the metadata of a column may abort the process in native code if they are damaged, instead of raising an error.
So a child process reads them: python -m jaxmnt.data.preparation.parquet FILE GROUP … writes the sizes of column chunks
as JSON.
"""

import codecs
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from jaxmnt.data.preparation.conversations import KNOWN_SHAPES, SHAPES, conversation_advice, fields_to_read
from jaxmnt.data.preparation.documents import BadRecordError, Document, Report, Segment
from jaxmnt.data.preparation.inputs import Input, Piece, ReadOptions, damaged_parquet, open_parquet
from jaxmnt.data.preparation.records import documents_of, key_of, names_of
from jaxmnt.errors import ConfigError, printable
from jaxmnt.strict_json import json_text

_MAX_HEADER_BYTES = 2**16
"""Maximum size of a page header. It is small, because writers truncate the statistics in it."""

_UNCOMPRESSED_SIZE_ID = 2
_COMPRESSED_SIZE_ID = 3
"""Thrift ids of the fields uncompressed_page_size and compressed_page_size of a page header."""

_BINARY_TYPE = 8
_STRUCT_TYPE = 12
_INTEGER_TYPES = (4, 5, 6)
_BYTES_BY_TYPE = {1: 0, 2: 0, 3: 1, 7: 8}
"""Type codes of Thrift's compact protocol. `_BYTES_BY_TYPE` has the sizes of true, false, a byte and a double."""


class Column(NamedTuple):
    """A column chunk, which is the part of a column in one row group."""

    field: str
    """Top-level field of the records to which the column belongs."""
    uncompressed_bytes: int
    """Size of the chunk when decompressed, in bytes."""
    start: int
    """Offset of the first page in the file, in bytes."""
    stop: int
    """Offset of the end of the last page in the file, in bytes."""


def columns_of(path: Path, groups: Sequence[int]) -> list[list[Column]]:
    """Returns the column chunks of each of these row groups. Raises `ValueError` if their metadata are damaged."""
    arguments = [sys.executable, "-m", __name__, str(path), *map(str, groups)]
    child = subprocess.run(arguments, capture_output=True, check=False)
    if child.returncode == 0:
        return [[Column(*column) for column in columns] for columns in json.loads(child.stdout)]
    code = child.returncode
    outcome = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    lines = child.stderr.decode(errors="replace").strip().splitlines()
    why = f": {lines[-1].strip()}" if lines else ""
    raise ValueError(f"reading the metadata of its columns ended with {outcome}{why}")


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
    """Returns the size in bytes of the largest page of a column chunk when decompressed.

    Raises `ValueError` if the header of a page is damaged.
    """
    offset = column.start
    largest = 0
    while offset < column.stop:
        stream.seek(offset)
        parser = _HeaderParser(stream.read(_MAX_HEADER_BYTES))
        try:
            sizes = parser.read_integers()
            if sizes[_COMPRESSED_SIZE_ID] < 0:
                raise IndexError("a page of negative size")
            largest = max(largest, sizes[_UNCOMPRESSED_SIZE_ID])
            offset += parser.offset + sizes[_COMPRESSED_SIZE_ID]
        except (IndexError, KeyError):
            raise ValueError(f"the header of the page at byte {offset} is damaged") from None
    return largest


class _HeaderParser:
    """Parses a page header in Thrift's compact protocol. The methods raise `IndexError` if the header is damaged."""

    def __init__(self, raw: bytes):
        self._raw = raw
        self.offset = 0
        """Number of bytes that have been read."""

    def read_integers(self) -> dict[int, int]:
        """Reads a struct, and returns its integers by field id."""
        integers = {}
        field_id = 0
        while byte := self._read_byte():
            # A field header has the increment of the field id in the high four bits, and the type in the low four.
            increment = byte >> 4
            type_code = byte & 15
            field_id = field_id + increment if increment else self._read_integer()
            if type_code in _INTEGER_TYPES:
                integers[field_id] = self._read_integer()
            else:
                self._skip(type_code)
        return integers

    def _read_byte(self) -> int:
        self.offset += 1
        return self._raw[self.offset - 1]

    def _read_unsigned(self) -> int:
        number = shift = 0
        while True:
            byte = self._read_byte()
            number |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return number

    def _read_integer(self) -> int:
        encoded = self._read_unsigned()  # zigzag encoding
        return encoded >> 1 ^ -(encoded & 1)

    def _skip(self, type_code: int) -> None:
        """Skips a field of this type."""
        if type_code == _STRUCT_TYPE:
            self.read_integers()
        elif type_code == _BINARY_TYPE:
            size = self._read_unsigned()  # changes self.offset, so this cannot be part of the next line
            self.offset += size
        elif type_code in _BYTES_BY_TYPE:
            self.offset += _BYTES_BY_TYPE[type_code]
        else:
            raise IndexError("page headers have no lists or maps")


_ROWS_PER_BATCH = 8
"""Number of rows in memory at a time. It is small, because each row may be as long as the longest document."""

_MIN_PAGE_LIMIT = 2**27
"""Pages of up to this many bytes are always read, because some programs write such pages."""


def read_parquet(piece: Piece, report: Report) -> Iterator[Document]:
    """Yields the documents of the piece's row groups. Raises `ConfigError` if the file is damaged."""
    from pyarrow import ArrowException

    file, read_options = piece.file, report.read_options
    parquet = open_parquet(file)
    groups = list(range(piece.start, piece.stop))
    rows_before = sum(parquet.metadata.row_group(group).num_rows for group in range(piece.start))
    column_names = _columns_to_read(file, parquet.schema_arrow, read_options)
    if read_options.long_documents == "error":
        _check_pages(file, parquet.metadata, groups, column_names, read_options)
    number = 0
    mean_row_bytes = file.size // max(1, parquet.metadata.num_rows)
    try:
        for batch in parquet.iter_batches(_ROWS_PER_BATCH, row_groups=groups, columns=column_names, use_threads=False):
            for row in _rows_of(batch, read_options):
                number += 1
                report.advance(mean_row_bytes)
                try:
                    yield from _documents(row, number, file, report)
                except BadRecordError as error:
                    report.refuse(error, f"{file.printable_path}: row {rows_before + number}")
    except ArrowException as error:
        raise damaged_parquet(file, error) from error
    report.records[file.number] = number


def _columns_to_read(file: Input, schema: Any, read_options: ReadOptions) -> list[str]:
    """Returns the names of the columns to read. Raises `ConfigError` if one is missing, or has the wrong type."""
    names = schema.names
    columns_text = f"its columns: {names_of(names)}"
    if read_options.chat:
        column_names = fields_to_read(names, read_options)
        if set(SHAPES).isdisjoint(column_names):
            raise ConfigError(f"--input: {file.printable_path} has no column {KNOWN_SHAPES}; {columns_text}")
        return column_names
    field = read_options.text_field
    if field not in names:
        advice = conversation_advice(names)
        raise ConfigError(
            f"--input: {file.printable_path} has no column {printable(field)}; {columns_text}{advice and '; ' + advice}"
        )
    kind = schema.types[names.index(field)]
    if not _is_text(kind):
        raise ConfigError(
            f"--input: {file.printable_path}: its column {printable(field)} holds {printable(str(kind)[:80])}, which "
            "is not text; --text-field names another"
        )
    return [field]


def _check_pages(
    file: Input, metadata: Any, groups: list[int], column_names: list[str], read_options: ReadOptions
) -> None:
    """Raises `ConfigError` for a page that needs too much memory, because even a small file may hold a very large
    cell."""
    limit = max(2 * read_options.max_document, _MIN_PAGE_LIMIT)
    large_groups = [group for group in groups if metadata.row_group(group).total_byte_size > limit]
    if not large_groups:
        return
    try:
        with file.path.open("rb") as stream:
            for group, columns in zip(large_groups, columns_of(file.path, large_groups), strict=True):
                large_columns = [
                    column for column in columns if column.field in column_names and column.uncompressed_bytes > limit
                ]
                size = max((largest_page(stream, column) for column in large_columns), default=0)
                if size > limit:
                    first = 1 + sum(metadata.row_group(before).num_rows for before in range(group))
                    last = first + metadata.row_group(group).num_rows - 1
                    raise ConfigError(
                        f"--input: {file.printable_path}: a page between rows {first} and {last} has "
                        f"{size / 2**20:.0f} MiB and must be read at once; raise --max-document-mib if memory allows, "
                        "or set --long-documents split or skip"
                    )
    except ValueError as error:
        raise damaged_parquet(file, error) from error


def _rows_of(batch: Any, read_options: ReadOptions) -> Iterator[Any]:
    """Returns the rows of a batch, which are not decoded yet.

    Text is returned as bytes, because Parquet does not guarantee that it is UTF-8.
    """
    if read_options.chat:
        return (batch.slice(row, 1) for row in range(len(batch)))
    return (value.as_py() for value in _as_bytes(batch.column(0)))


def _documents(row: Any, number: int, file: Input, report: Report) -> Iterator[Document]:
    """Yields the documents in a row that `_rows_of` returned. Raises `BadRecordError` if the row cannot be used."""
    read_options = report.read_options
    size = row.nbytes if read_options.chat else len(row or b"")
    if size <= read_options.max_document:
        record = _conversation(row) if read_options.chat else {read_options.text_field: row}
        yield from documents_of(record, number, file, report)
    elif read_options.long_documents == "split" and not read_options.chat:
        yield from _split(row, number, file, report)
    else:
        report.leave_out_long(can_split=not read_options.chat)


def _conversation(row: Any) -> Any:
    try:
        return row.to_pylist()[0]
    except UnicodeDecodeError as error:
        raise BadRecordError(f"not valid UTF-8: {error.reason}") from error
    except (ValueError, OverflowError) as error:  # a timestamp in another field that Python cannot represent
        raise BadRecordError(f"cannot be decoded: {printable(str(error)[:200])}") from error


def _split(text: bytes, number: int, file: Input, report: Report) -> Iterator[Document]:
    """Splits a text that is too long into documents. Either all or none of them are held out.

    Raises `BadRecordError` for bytes that are not UTF-8, unless they are to be replaced.
    """
    size = report.read_options.max_document
    valid_bytes = 0
    try:
        for _, stop in _pieces(text, size, "strict"):
            valid_bytes = stop
    except UnicodeDecodeError as error:
        where = f"at byte {valid_bytes + error.start} of {printable(report.read_options.text_field)}"
        report.replace_invalid(f"not valid UTF-8 {where}")
    report.split += 1
    key = b""
    for piece, _ in _pieces(text, size, "replace"):
        segments = [Segment(piece)]
        key = key or key_of(segments)
        yield Document(file, number, key, segments)


def _pieces(text: bytes, size: int, errors: str) -> Iterator[tuple[str, int]]:
    """Cuts a text between characters into pieces of at most `size` bytes, and yields each piece with its end offset.

    `errors` is `strict` or `replace`, as for `bytes.decode`.
    """
    stop = 0
    while stop < len(text):
        piece, consumed = codecs.utf_8_decode(text[stop : stop + size], errors, stop + size >= len(text))
        stop += consumed
        yield piece, stop


def _is_text(kind: Any) -> bool:
    """Returns True if a column of this type may hold text, which is strings, bytes or only nulls."""
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
