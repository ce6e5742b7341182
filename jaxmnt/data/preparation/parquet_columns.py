"""The sizes of column chunks of a Parquet file, read by a process of its own.

Metadata of a column that is damaged may abort the process that asks for it, in a library below Python, instead of
raising an error: python -m jaxmnt.data.preparation.parquet_columns FILE GROUP … writes JSON.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxmnt.strict_json import json_text


class Column(NamedTuple):
    """A column chunk: the part of a column that is in one row group."""

    field: str
    """The field of a record that it belongs to."""
    uncompressed: int
    start: int
    """Byte of the file where its first page begins."""
    stop: int


def columns_of(path: Path, groups: Sequence[int]) -> list[list[Column]]:
    """Returns the column chunks of each of these row groups. Raises `ValueError` if their metadata is damaged."""
    arguments = [sys.executable, "-m", __name__, str(path), *map(str, groups)]
    done = subprocess.run(arguments, capture_output=True, check=False)
    if done.returncode == 0:
        return [[Column(*column) for column in columns] for columns in json.loads(done.stdout)]
    lines = [line.strip() for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
    why = lines[-1] if lines else ""
    ended = f"reading the metadata of its columns ended with {_name_of(done.returncode)}"
    raise ValueError(f"{ended}: {why}" if why else ended)


def _name_of(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _sizes(column: Any) -> Column:
    start = column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset
    field = column.path_in_schema.split(".")[0]
    return Column(field, column.total_uncompressed_size, start, start + column.total_compressed_size)


def _child(path: str, *groups: str) -> None:
    from pyarrow import parquet

    metadata = parquet.ParquetFile(path, pre_buffer=False).metadata
    sizes = []
    for number in groups:
        group = metadata.row_group(int(number))
        sizes.append([_sizes(group.column(column)) for column in range(group.num_columns)])
    print(json_text(sizes))


if __name__ == "__main__":
    _child(*sys.argv[1:])
