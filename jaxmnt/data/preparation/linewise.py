"""Blocks of bytes as lines: blank ones are counted in bulk, and one that is too long is never held."""

import re
from collections.abc import Iterator
from itertools import chain

_NOT_BLANK = re.compile(rb"\S")


class Lines:
    """The lines that hold more than white space, in order; in place of one of more than `limit` bytes, its pieces.

    What is not taken of such pieces is passed over. White space of earlier blocks that a line begins with is left out.
    """

    def __init__(self, blocks: Iterator[bytes], limit: int):
        self._blocks, self._limit = blocks, limit
        self._block, self._place = b"", 0
        self.number = 0
        """Lines so far, the present one and blank ones included."""
        self.blank = 0

    def __iter__(self) -> Iterator[bytes | Iterator[bytes]]:
        while self._find_line():
            line = self._line()
            yield line
            if not isinstance(line, bytes):
                for _ in line:
                    pass

    def _find_line(self) -> bool:
        """Goes on to where the next line begins that is not blank."""
        begun = False  # whether a line of nothing but white space so far has begun
        while True:
            found = _NOT_BLANK.search(self._block, self._place)
            stop = found.start() if found else len(self._block)
            passed = self._block.count(b"\n", self._place, stop)
            self.number += passed
            self.blank += passed
            if found:
                self._place = max(self._place, self._block.rfind(b"\n", self._place, stop) + 1)
                self.number += 1
                return True
            if stop > self._place:
                begun = not self._block.endswith(b"\n")
            if not self._next_block():
                self.number += begun
                self.blank += begun
                return False

    def _line(self) -> bytes | Iterator[bytes]:
        pieces, size, rest = [], 0, self._rest_of_line()
        for piece in rest:
            pieces.append(piece)
            size += len(piece)
            if size > self._limit:
                return chain(pieces, rest)
        return b"".join(pieces)

    def _rest_of_line(self) -> Iterator[bytes]:
        while True:
            end = self._block.find(b"\n", self._place) + 1
            piece = self._block[self._place : end or len(self._block)]
            self._place += len(piece)
            yield piece
            if end or not self._next_block():
                return

    def _next_block(self) -> bool:
        """False, and nothing left, at the end."""
        self._block, self._place = next((block for block in self._blocks if block), b""), 0
        return bool(self._block)
