"""What a document is until it is encoded, and how the reading of documents is set up and reported."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


class Segment(NamedTuple):
    """A stretch of a document."""

    content: str | np.ndarray
    """Text, or tokens as they are."""
    learn: bool = True
    """Whether its tokens are targets."""
    markup: bool = False
    """Whether names of special tokens in the text stand for those tokens. Only for text of our own."""


class BadRecordError(Exception):
    """A record that cannot be used. The text says which and why."""


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
