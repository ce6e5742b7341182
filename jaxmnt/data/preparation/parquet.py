"""Parquet files: a row is a document."""

from collections.abc import Iterator
from typing import Any

from jaxmnt.data.preparation.document import BadRecordError, Document, Reading, Report
from jaxmnt.data.preparation.inputs import Input, Piece
from jaxmnt.data.preparation.record import documents_of
from jaxmnt.errors import ConfigError


def open_parquet(file: Input) -> Any:
    """A pyarrow.parquet.ParquetFile. Raises `ConfigError` where pyarrow is missing or the file is damaged."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ConfigError(f"--input: {file.path} needs pyarrow; install it with: pip install 'jaxmnt[data]'") from error
    try:
        # Without these a whole column of a row group would be held at a time.
        return parquet.ParquetFile(file.path, pre_buffer=False, buffer_size=2**20)
    except (ArrowException, OSError) as error:
        raise ConfigError(f"--input: {file.path} cannot be read as Parquet: {error}") from error


def read_parquet(file: Input, piece: Piece, reading: Reading, report: Report) -> Iterator[Document]:
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
        lacking = "messages, or prompt and completion" if reading.chat else reading.text_field
        raise ConfigError(f"--input: {file.path} has no column {lacking}; its columns: {', '.join(known)}")
    number, share = 0, file.size // max(1, parquet.metadata.num_rows)
    for batch in parquet.iter_batches(64, row_groups=groups, columns=wanted, use_threads=False):
        for record in _records_of(batch, reading):
            number += 1
            report.advance(share)
            if isinstance(record, UnicodeDecodeError):
                report.on_bad(BadRecordError(f"{name(number)}: not valid UTF-8: {record.reason}"))
                continue
            yield from documents_of(record, number, piece.file, name, reading, report)
    report.records[piece.file] = rows


def _records_of(batch: Any, reading: Reading) -> Iterator[Any]:
    """The rows of a batch; in place of one that cannot be decoded, the error.

    Text by itself is taken as bytes, because Parquet files are not checked for being UTF-8.
    """
    import pyarrow

    if reading.chat:
        for row in range(len(batch)):
            try:
                yield batch.slice(row, 1).to_pylist()[0]
            except UnicodeDecodeError as error:
                yield error
        return
    column = batch.column(0)
    if pyarrow.types.is_string(column.type):
        column = column.cast(pyarrow.binary())
    elif pyarrow.types.is_large_string(column.type):
        column = column.cast(pyarrow.large_binary())
    for value in column:
        yield {reading.text_field: value.as_py()}
