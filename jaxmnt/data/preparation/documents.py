"""What a document is until it is encoded, and how the reading of documents is set up and reported."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from jaxmnt.data.preparation.inputs import Input, Reading
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

    file: Input
    record: int
    """From 1 within the part's stretch of the file."""
    key: bytes
    """What decides whether it is held out."""
    segments: Iterable[Segment]
    """Its contents, to be gone through once: a list, or, of what may be long, an iterator of stretches that are all
    targets, and all text unless it is `closed`."""
    closed: bool = False
    """Whether an end of document must not be added, because the tokens are given as they are."""
    end_is_target: bool = True
    """Whether the end of document that is added is a target."""
    continues: bool = False
    """Whether this is the rest of the document before, of which the part before has the beginning."""


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
    """How a part is read, and what happened meanwhile."""

    reading: Reading
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

    def replace_invalid(self, wrong: str) -> None:
        """Counts a document of which something is replaced. Raises `BadRecordError` unless that is wanted."""
        if not self.reading.replace_invalid:
            raise BadRecordError(wrong)
        self.replaced += 1

    def decoded(self, raw: bytes, where: str) -> str:
        """The text of a record. Raises `BadRecordError` for what is not UTF-8, unless that is to be replaced."""
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            self.replace_invalid(f"not valid UTF-8 at byte {error.start} of {where}")
            return raw.decode("utf-8", errors="replace")

    def leave_out_long(self, can_split: bool) -> None:
        """Counts a record that is too long and is not split, or raises `BadRecordError`; `can_split` says whether its
        format allows that."""
        reading = self.reading
        if reading.long_documents == "skip":
            self.long += 1
            return
        what = f"the record is longer than {reading.max_document / 2**20:g} MiB"
        if reading.long_documents == "error":
            ways = "split or skip" if can_split else "skip"
            raise BadRecordError(what, f"to allow for it: --max-document-mib, or --long-documents {ways}")
        if reading.chat:
            raise BadRecordError(f"{what}, and a conversation cannot be split")
        advice = "to allow for it: --max-document-mib, --long-documents skip, or its text in a plain text file"
        raise BadRecordError(f"{what}, and a JSON record cannot be split", advice)

    def leave_out_binary(self, name: str) -> None:
        self.binary += 1
        if self.binary <= _NAMED:
            self.binary_names.append(name)
