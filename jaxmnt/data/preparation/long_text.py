"""The text of a JSON record that is too long to be held, taken from the pieces of its line as they are read.

Of the fields beside the text no more is looked at than is needed to find their ends.
"""

import json
import re
from collections.abc import Callable, Iterator

from jaxmnt.data.preparation.documents import BadRecordError, given_twice, not_text
from jaxmnt.errors import printable

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SPACE = re.compile(rb"[ \t\r\n]*+")
_PLAIN = re.compile(rb'[^\s"{}\[\],:]++')
_HELD = 2**16
"""Bytes of the line that are looked at at a time."""

_LONGEST_KEY = 2**12
_LONGEST_UNIT = 12
"""Bytes that belong together: half characters are spelled as two escapes."""

_UNITS = re.compile(
    rb"""(?: [^"\\\x80-\xff]++
    | (?:[\xc2-\xdf][\x80-\xbf])+ | (?:[\xe0-\xef][\x80-\xbf]{2})+ | (?:[\xf0-\xf4][\x80-\xbf]{3})+
    | \\["\\/bfnrt]
    | \\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}
    | \\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}
    )*""",
    re.VERBOSE,
)
"""What can be decoded by itself: whole characters and whole escapes. No group is possessive: before Python 3.11.5 such
a group may take a part of an alternative that does not match (python/cpython#106052)."""

_HALF = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_REPLACEMENT = "\ufffd".encode()


def text_in_pieces(
    line: Iterator[bytes], field: str, size: int, on_odd: Callable[[], None] | None = None
) -> Iterator[str]:
    """The text of this field, in pieces of about `size` bytes of the line. Raises `BadRecordError`.

    With `on_odd` what is not UTF-8, and halves of characters, are replaced, and it is called for each.
    """
    scanner = _Scanner(_small(line, max(_LONGEST_UNIT, min(size, _HELD))), on_odd)
    scanner.expect(b"{")
    while True:
        key = scanner.key()
        scanner.expect(b":")
        if key == field:
            break
        scanner.skip()
        if not scanner.found(b","):
            raise BadRecordError(f"has no field {printable(field)} (--text-field names another)")
    gathered: list[str] = []
    taken = 0
    for raw in _text_of(scanner, field):
        if taken and taken + len(raw) > size:  # a stretch is no longer than what was read, and the rest of a unit
            yield "".join(gathered)
            gathered, taken = [], 0
        gathered.append(_decoded(raw, on_odd))
        taken += len(raw)
    if taken:
        yield "".join(gathered)
    while scanner.found(b","):
        if scanner.key() == field:  # the text that was given out would have to be compared
            raise given_twice(field)
        scanner.expect(b":")
        scanner.skip()
    scanner.expect(b"}")
    if scanner.peek():
        raise BadRecordError("not valid JSON: there is more behind the record")


def _text_of(scanner: "_Scanner", field: str) -> Iterator[bytes]:
    """Returns the stretches of the field's text, none for null. Raises `BadRecordError` for another value."""
    if scanner.found(b'"'):
        yield from scanner.string()
    elif scanner.peek() == b"n":
        scanner.skip()
    else:
        raise not_text(field, _KINDS.get(scanner.peek(), "a number"))


_KINDS = {b"t": "true", b"f": "false", b"[": "a list", b"{": "an object", b"": "missing"}
"""Values of JSON by their first byte."""


def _small(pieces: Iterator[bytes], size: int) -> Iterator[bytes]:
    for piece in pieces:
        for start in range(0, len(piece), size):
            yield piece[start : start + size]


def _decoded(raw: bytes, on_odd: Callable[[], None] | None) -> str:
    try:
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:  # of the right bytes for a character, but of none that there is
            if on_odd is None:
                raise
            on_odd()
            text = raw.decode("utf-8", errors="replace")
        return str(json.loads(f'"{text}"'))
    except ValueError as error:
        raise BadRecordError(f"not valid JSON: {error}") from error


class _Scanner:
    """Goes through the bytes of a record, of which it holds no more than a piece."""

    def __init__(self, pieces: Iterator[bytes], on_odd: Callable[[], None] | None):
        self._pieces, self._on_odd = pieces, on_odd
        self._buffer = next(pieces, b"").removeprefix(_BYTE_ORDER_MARK)
        self._place = 0

    def peek(self) -> bytes:
        """The next byte that is no white space; none at the end."""
        while True:
            match = _SPACE.match(self._buffer, self._place)
            assert match
            self._place = match.end()
            if self._place < len(self._buffer) or not self._read():
                return self._buffer[self._place : self._place + 1]

    def found(self, wanted: bytes) -> bool:
        """Whether the next byte is this one; goes behind it then."""
        is_next = self.peek() == wanted
        self._place += is_next
        return is_next

    def expect(self, wanted: bytes) -> None:
        if not self.found(wanted):
            raise BadRecordError(f"not valid JSON: it lacks {wanted.decode()!r} where {self.peek()!r} stands")

    def key(self) -> str:
        self.expect(b'"')
        raw = b""
        for piece in self.string():
            raw += piece
            if len(raw) > _LONGEST_KEY:
                raise BadRecordError("the name of a field is too long")
        return _decoded(raw, self._on_odd)

    def string(self) -> Iterator[bytes]:
        """What stands before the closing quote, in stretches that can be decoded by themselves."""
        while True:
            match = _UNITS.match(self._buffer, self._place)
            assert match
            if match.end() > self._place:
                yield match[0]
            self._place = match.end()
            if self._buffer[self._place : self._place + 1] == b'"':
                self._place += 1
                return
            if len(self._buffer) - self._place >= _LONGEST_UNIT or not self._read():
                length = self._length_of_odd()
                if not length or self._on_odd is None:
                    raise BadRecordError(
                        "not valid JSON or UTF-8, or half of a character, in a text that is to be split"
                    )
                self._on_odd()
                self._place += length
                yield _REPLACEMENT

    def _length_of_odd(self) -> int:
        """The length of the half of a character, or of what is not UTF-8, that stands here; 0 if it is neither."""
        rest = self._buffer[self._place : self._place + _LONGEST_UNIT]
        if half := _HALF.match(rest):
            return half.end()
        try:
            rest.decode("utf-8")
        except UnicodeDecodeError as error:
            return 0 if error.start else error.end  # as much as the decoder replaces by one character
        return 0

    def skip(self) -> None:
        """Goes behind a value."""
        depth = 0
        while True:
            byte = self.peek()
            if byte == b'"':
                self._place += 1
                for _ in self.string():
                    pass
            elif byte and byte in b"{[":
                self._place += 1
                depth += 1
            elif byte and byte in b"}]" and depth:
                self._place += 1
                depth -= 1
            elif byte and byte in b",:" and depth:
                self._place += 1
                continue
            elif not self._skip_plain():
                raise BadRecordError("not valid JSON: it ends within a value, or lacks one")
            if not depth:
                return

    def _skip_plain(self) -> bool:
        """Goes behind a number or a name."""
        begun = False
        while match := _PLAIN.match(self._buffer, self._place):
            self._place, begun = match.end(), True
            if self._place < len(self._buffer) or not self._read():
                break
        return begun

    def _read(self) -> bool:
        more = next(self._pieces, None)
        if more is None:
            return False
        self._buffer = self._buffer[self._place :] + more
        self._place = 0
        return True
