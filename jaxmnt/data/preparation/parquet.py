"""Parquet files: a row is a document."""

from collections.abc import Iterator
from typing import Any

from jaxmnt.data.preparation.document import Document, Reading, Report
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
    except ArrowException as error:
        raise ConfigError(f"--input: {file.path} is no Parquet file or damaged: {error}") from error


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
        raise ConfigError(f"--input: {file.path} has no column {reading.text_field}; its columns: {', '.join(known)}")
    number, share = 0, file.size // max(1, parquet.metadata.num_rows)
    for batch in parquet.iter_batches(64, row_groups=groups, columns=wanted, use_threads=False):
        for record in _records_of(batch, file, before + number, reading):
            number += 1
            report.advance(share)
            yield from documents_of(record, number, piece.file, name, reading, report)
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
