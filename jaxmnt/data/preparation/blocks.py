"""Files of lines as blocks of bytes: plain, .gz and .zst. No block is large, whatever the file holds."""

import gzip
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO

from jaxmnt.data.preparation.inputs import Input, Piece
from jaxmnt.errors import ConfigError

_BLOCK = 2**20

_ZSTANDARD_PIECE = 2**9
"""Bytes of a .zst that are decompressed at a time: each 4 may become 128 KiB."""


def plain_blocks(stream: BinaryIO, piece: Piece, advance: Callable[[int], None]) -> Iterator[bytes]:
    """The lines that begin in this stretch of the file."""
    place = _next_line(stream, piece.start) if piece.start else 0
    stream.seek(place)
    block = b"\n"
    while place < piece.stop and (block := stream.read(min(_BLOCK, piece.stop - place))):
        place += len(block)
        advance(len(block))
        yield block
    while not block.endswith(b"\n") and (block := stream.read(_BLOCK)):  # the last line goes on behind the stretch
        block = block[: block.find(b"\n") + 1] or block
        advance(len(block))
        yield block


def _next_line(stream: BinaryIO, start: int) -> int:
    """Where the first line begins that does not begin before `start`."""
    place = start - 1
    stream.seek(place)
    while block := stream.read(_BLOCK):
        if end := block.find(b"\n") + 1:
            return place + end
        place += len(block)
    return place


def compressed_blocks(file: Input, raw: BinaryIO, advance: Callable[[int], None]) -> Iterator[bytes]:
    read = 0
    for block in _gzip_blocks(raw) if file.path.suffix.lower() == ".gz" else _zstandard_blocks(file, raw):
        advance(raw.tell() - read)
        read = raw.tell()
        yield block


def _gzip_blocks(raw: BinaryIO) -> Iterator[bytes]:
    with gzip.open(raw) as stream:
        while block := stream.read(_BLOCK):
            yield block


def _zstandard_blocks(file: Input, raw: BinaryIO) -> Iterator[bytes]:
    """Decompressed frame by frame: the library's own stream takes a file that was cut off for one that ends there."""
    try:
        import zstandard
    except ImportError as error:
        raise ConfigError(
            f"--input: {file.shown} needs zstandard; install it with: pip install 'jaxmnt[data]'"
        ) from error
    frame = None
    while block := raw.read(_ZSTANDARD_PIECE):
        while block:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(block)
            block = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("it ends in the middle of a frame")


def signs_of_damage() -> tuple[type[Exception], ...]:
    """What reading a damaged compressed file raises."""
    known: list[type[Exception]] = [EOFError, zlib.error, gzip.BadGzipFile]
    if "zstandard" in sys.modules:
        known.append(sys.modules["zstandard"].ZstdError)
    return tuple(known)
