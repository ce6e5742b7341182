"""What a document is until it is encoded, and how the reading of documents is set up and reported."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxmnt.errors import ConfigError

_NAMED = 20
"""Bad records and binary files of a part that are named; all are counted."""


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

    def __init__(self, text: str, advice: str = ""):
        super().__init__(text)
        self.advice = advice
        """What there is to do about it besides leaving such records out."""


def kind_of(value: Any) -> str:
    """Returns what a value of JSON is, in words."""
    if value is None:
        return "null or missing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return "NaN, a number" if value != value else "a number"
    kinds: dict[type, str] = {str: "text", list: "a list", dict: "an object"}
    return kinds.get(type(value), f"a {type(value).__name__}")


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
    end_is_target: bool = True
    """Whether the end of document that is added is a target."""
    continues: bool = False
    """Whether this is the rest of the document before, of which the part before has the beginning."""


@dataclass(frozen=True)
class Reading:
    """How records are read."""

    text_field: str = "text"
    chat: bool = False
    ignored_fields: tuple[str, ...] = ()
    """Fields of conversations and of their messages that are left out, although they may change the meaning."""
    replace_invalid: bool = False
    token_bytes: int = 2
    end_id: int | None = None
    """What separates documents in token arrays. None: a file is one document."""
    vocab_size: int = 0
    max_document: int = 64 * 2**20
    """Bytes of a record that is held in memory at most. Text files and token arrays are read in stretches."""
    long_documents: Literal["error", "split", "skip"] = "error"
    """What becomes of longer ones."""


@dataclass
class Counts:
    """What was left out or changed while documents were read."""

    skipped: int = 0
    remarks: list[str] = field(default_factory=list)
    """What was wrong with the first records that were skipped."""
    empty: int = 0
    without_targets: int = 0
    """Conversations left out because nothing of them is a target."""
    replaced: int = 0
    long: int = 0
    """Documents left out because they are too long."""
    split: int = 0
    """Documents that were split because they are too long."""
    binary: int = 0
    binary_names: list[str] = field(default_factory=list)
    """Some of the files that are no text."""


@dataclass(kw_only=True)
class Report(Counts):
    """What happened while a part was read."""

    skip_bad: bool
    """Whether records that cannot be used are left out."""
    advance: Callable[[int], None]
    """Called with the bytes that were read."""
    records: dict[int, int] = field(default_factory=dict)
    """Records seen by file, those left out included."""
    lengths: Counter[int] = field(default_factory=Counter)
    """How many documents of token arrays have so many tokens."""

    def refuse(self, error: BadRecordError, where: str) -> None:
        """Leaves out the record at a place. Raises `ConfigError` if that is to stop the work."""
        if not self.skip_bad:
            advice = error.advice and f"{error.advice}; "
            raise ConfigError(f"--input: {where}: {error}; {advice}to leave such records out: --on-error skip")
        self.skipped += 1
        if self.skipped <= _NAMED:
            self.remarks.append(f"{where}: {error}")

    def replace_invalid(self, wrong: str, reading: Reading) -> None:
        """Counts a document of which something is replaced. Raises `BadRecordError` unless that is wanted."""
        if not reading.replace_invalid:
            raise BadRecordError(wrong)
        self.replaced += 1

    def leave_out_binary(self, name: str) -> None:
        self.binary += 1
        if self.binary <= _NAMED:
            self.binary_names.append(name)
