"""Documents before they are encoded, and the settings and report of reading them."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from jaxmnt.data.preparation.inputs import Input, Reading
from jaxmnt.errors import ConfigError

_MOST_NAMED = 20
"""Most bad records and binary files of a part that are named; all are counted."""


class Segment(NamedTuple):
    """A part of a document's contents."""

    content: str | np.ndarray
    """Text, or tokens that are already encoded."""
    learn: bool = True
    """True if its tokens are targets."""
    markup: bool = False
    """True if names of special tokens in the text stand for those tokens. Only for text that we generate."""


class BadRecordError(Exception):
    """A record that cannot be used. The text names the problem."""

    def __init__(self, text: str, advice: str = ""):
        super().__init__(text)
        self.advice = advice
        """Ways to solve the problem other than skipping such records."""


def kind_of(value: Any) -> str:
    """Describes the type of a JSON value for an error message."""
    if value is None:
        return "null or missing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return "NaN, a number" if value != value else "a number"
    kinds: dict[type, str] = {str: "text", list: "a list", dict: "an object"}
    return kinds.get(type(value), f"a {type(value).__name__}")


class Document(NamedTuple):
    """A document before it is encoded."""

    file: Input
    record: int
    """Number of the record, from 1 within the part's range of the file."""
    key: bytes
    """Digest that decides whether the document is held out."""
    segments: Iterable[Segment]
    """The contents, which are iterated once: a list, or an iterator for contents that may be long. All segments of an
    iterator are targets, and text unless the document is `closed`."""
    closed: bool = False
    """True if no end of document is added, because the input is a token array."""
    end_is_target: bool = True
    """True if the end of document that is added is a target."""
    continues: bool = False
    """True if this continues a document that began in the previous part."""


@dataclass
class Counts:
    """Counts of records and documents that were left out or changed."""

    skipped: int = 0
    remarks: list[str] = field(default_factory=list)
    """Problems of the first records that were skipped."""
    empty: int = 0
    without_targets: int = 0
    """Conversations left out because they have no targets."""
    replaced: int = 0
    long: int = 0
    """Documents left out because they are too long."""
    split: int = 0
    """Documents split because they are too long."""
    binary: int = 0
    binary_names: list[str] = field(default_factory=list)
    """Names of some of the binary files."""


@dataclass(kw_only=True)
class Report(Counts):
    """The settings for reading a part, and the counts of what happened."""

    reading: Reading
    skip_bad: bool
    """True if records that cannot be used are skipped."""
    advance: Callable[[int], None]
    """Called with the number of bytes read since the last call."""
    records: dict[int, int] = field(default_factory=dict)
    """Records read in each file, including those left out."""
    lengths: Counter[int] = field(default_factory=Counter)
    """Number of documents of token arrays by length in tokens."""

    def refuse(self, error: BadRecordError, where: str) -> None:
        """Skips the record at `where`. Raises `ConfigError` if bad records must stop the preparation."""
        if not self.skip_bad:
            advice = error.advice and f"{error.advice}; "
            raise ConfigError(f"--input: {where}: {error}; {advice}to leave such records out: --on-error skip")
        self.skipped += 1
        if self.skipped <= _MOST_NAMED:
            self.remarks.append(f"{where}: {error}")

    def replace_invalid(self, problem: str) -> None:
        """Counts a document with replaced bytes. Raises `BadRecordError` unless `replace_invalid` is set."""
        if not self.reading.replace_invalid:
            raise BadRecordError(problem)
        self.replaced += 1

    def decoded(self, raw: bytes, where: str) -> str:
        """Decodes UTF-8. Raises `BadRecordError` for invalid bytes unless `replace_invalid` is set."""
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            self.replace_invalid(f"not valid UTF-8 at byte {error.start} of {where}")
            return raw.decode("utf-8", errors="replace")

    def leave_out_long(self, can_split: bool) -> None:
        """Counts a record that is too long and not split, or raises `BadRecordError`. `can_split` is True if its format
        can be split."""
        reading = self.reading
        if reading.long_documents == "skip":
            self.long += 1
            return
        problem = f"the record is longer than {reading.max_document / 2**20:g} MiB"
        if reading.long_documents == "error":
            ways = "split or skip" if can_split else "skip"
            raise BadRecordError(problem, f"to allow for it: --max-document-mib, or --long-documents {ways}")
        if reading.chat:
            raise BadRecordError(f"{problem}, and a conversation cannot be split")
        advice = "to allow for it: --max-document-mib, --long-documents skip, or its text in a plain text file"
        raise BadRecordError(f"{problem}, and a JSON record cannot be split", advice)

    def leave_out_binary(self, name: str) -> None:
        self.binary += 1
        if self.binary <= _MOST_NAMED:
            self.binary_names.append(name)
