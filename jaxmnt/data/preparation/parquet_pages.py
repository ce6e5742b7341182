"""How large the pages of a Parquet file become, read from their headers: pyarrow holds each whole, and does not say.

A cell is no larger than its page. Headers are Thrift structs in the compact protocol
(github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md), of which the first fields are the page's
type, its size and its size in the file.
"""

from typing import Any, BinaryIO

_HEADER_BYTES = 2**16
"""More than a header takes: statistics in it are cut by those who write them."""

_UNCOMPRESSED, _COMPRESSED = 2, 3
"""Numbers of the fields."""

_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _STRUCT = 1, 2, 3, 7, 8, 12
_NUMBERS = (4, 5, 6)
"""Kinds of fields."""


def largest_page(stream: BinaryIO, column: Any) -> int:
    """Bytes of the largest page of a column chunk, decompressed. Raises `ValueError` for headers that are none."""
    place = column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset
    stop, largest = place + column.total_compressed_size, 0
    while place < stop:
        stream.seek(place)
        header = _Header(stream.read(_HEADER_BYTES))
        try:
            sizes = header.numbers()
            largest = max(largest, sizes[_UNCOMPRESSED])
            place += header.place + sizes[_COMPRESSED]
        except (IndexError, KeyError):
            raise ValueError(f"the header of the page at byte {place} is damaged") from None
        if sizes[_COMPRESSED] < 0:
            raise ValueError(f"the header of the page at byte {place} is damaged")
    return largest


class _Header:
    def __init__(self, raw: bytes):
        self._raw = raw
        self.place = 0

    def numbers(self) -> dict[int, int]:
        """Goes behind a struct; its numbers by field."""
        found, field = {}, 0
        while byte := self._byte():
            step, kind = byte >> 4, byte & 15
            field = field + step if step else self._number()
            if kind in _NUMBERS:
                found[field] = self._number()
            else:
                self._skip(kind)
        return found

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
        value = self._unsigned()
        return value >> 1 ^ -(value & 1)

    def _skip(self, kind: int) -> None:
        if kind == _BYTE:
            self.place += 1
        elif kind == _DOUBLE:
            self.place += 8
        elif kind == _BINARY:
            self.place += self._unsigned()
        elif kind == _STRUCT:
            self.numbers()
        elif kind not in (_TRUE, _FALSE):
            raise IndexError("headers of pages have no lists and maps")
