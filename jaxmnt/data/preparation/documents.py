"""Documents before they are encoded, and the report of what happened while they were read."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxmnt.data.preparation.inputs import Input, ReadOptions
from jaxmnt.errors import ConfigError

_MAX_NAMED = 20
"""Maximum number of unusable records, and of binary files, of a part that are named. All of them are counted."""


class Segment(NamedTuple):
    """A part of the contents of a document."""

    content: str | np.ndarray
    """Text, or the tokens of a token array."""
    learn: bool = True
    """True if the tokens of the segment are targets."""
    markup: bool = False
    """True if names of special tokens in the text stand for those tokens. Only text that we generate has markup."""


class BadRecordError(Exception):
    """Raised for a record that cannot be used. The text describes the problem."""

    def __init__(self, text: str, advice: str = ""):
        super().__init__(text)
        self.advice = advice
        """Advice to solve the problem without skipping such records; empty if there is none."""


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
    """Number of the record, counted from 1 in the part's range of the file."""
    key: bytes
    """Digest that decides whether the document is held out."""
    segments: Iterable[Segment]
    """The contents: a list, or, if they may be long, an iterator, which can be used only once. All segments of an
    iterator are targets. They are text, unless the document is `closed`."""
    closed: bool = False
    """True if no end of document must be added, because the input is a token array."""
    end_is_target: bool = True
    """True if the end of document that will be added is a target."""
    continues: bool = False
    """True if this continues a document that began in the previous part."""
    joined: bool = False
    """True if the segments are one text, which is encoded at once, with names of special tokens as those tokens."""


class RenderedRecord(NamedTuple):
    """The contents of a record with a conversation."""

    segments: list[Segment]
    end_is_target: bool
    """True if the end of the document is a target."""
    joined: bool
    """True if the segments are one text, which is encoded at once."""


@dataclass
class Counts:
    """Counts of records and documents that were left out or changed."""

    skipped: int = 0
    """Number of records skipped because they cannot be used."""
    remarks: list[str] = field(default_factory=list)
    """Descriptions of the first skipped records and their problems."""
    empty: int = 0
    """Number of empty documents, which are left out."""
    without_targets: int = 0
    """Number of conversations left out because they have no targets."""
    conversations: int = 0
    """Number of conversations that were rendered with markup."""
    end_tokens: list[str] = field(default_factory=list)
    """The tokens that end the targets of conversations. Those of several parts may repeat."""
    crossing: int = 0
    """Number of tokens that cross the boundary between a target and text that is not a target."""
    unprompted: int = 0
    """Number of answers that do not begin where the generation prompt of the template ends."""
    replaced: int = 0
    """Number of documents in which invalid bytes were replaced."""
    long: int = 0
    """Number of documents left out because they are too long."""
    split: int = 0
    """Number of documents split because they are too long."""
    binary: int = 0
    """Number of binary files, which are left out."""
    binary_names: list[str] = field(default_factory=list)
    """Names of the first binary files."""


class Markup(Protocol):
    """Renders the conversations of records."""

    def render(self, record: Any, report: "Report") -> RenderedRecord:
        """Returns the contents of a record. Raises `BadRecordError` if the record cannot be used."""


@dataclass(kw_only=True)
class Report(Counts):
    """The settings for reading a part, and counts of what happened while it was read."""

    read_options: ReadOptions
    skip_bad: bool
    """True if records that cannot be used are skipped."""
    advance: Callable[[int], None]
    """Function to call with the number of bytes read since the last call."""
    records: dict[int, int] = field(default_factory=dict)
    """Number of records read from each file, including those left out."""
    markup: "Markup | None" = None
    """Renders conversations; None if the records hold none."""
    lengths: Counter[int] = field(default_factory=Counter)
    """Number of documents in token arrays, by their length in tokens."""

    def note_end_tokens(self, tokens: Iterable[str]) -> None:
        """Notes tokens that ended targets."""
        self.end_tokens += [token for token in tokens if token not in self.end_tokens]

    def refuse(self, error: BadRecordError, where: str) -> None:
        """Skips the record at `where`, which cannot be used. Raises `ConfigError` if such records must stop the
        preparation."""
        if not self.skip_bad:
            advice = error.advice and f"{error.advice}; "
            raise ConfigError(f"--input: {where}: {error}; {advice}to leave such records out: --on-error skip")
        self.skipped += 1
        if self.skipped <= _MAX_NAMED:
            self.remarks.append(f"{where}: {error}")

    def replace_invalid(self, problem: str) -> None:
        """Counts a document in which invalid bytes are replaced. Raises `BadRecordError` if the settings do not allow
        it."""
        if not self.read_options.replace_invalid:
            raise BadRecordError(problem)
        self.replaced += 1

    def decoded(self, raw: bytes, where: str) -> str:
        """Decodes UTF-8. Raises `BadRecordError` for invalid bytes, unless the settings allow replacing them."""
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            self.replace_invalid(f"not valid UTF-8 at byte {error.start} of {where}")
            return raw.decode("utf-8", errors="replace")

    def leave_out_long(self, can_split: bool) -> None:
        """Counts a record that is left out because it is too long.

        Raises `BadRecordError` if the settings do not allow leaving it out. `can_split` is True if records of this
        format can be split.
        """
        read_options = self.read_options
        if read_options.long_documents == "skip":
            self.long += 1
            return
        problem = f"the record is longer than {read_options.max_document / 2**20:g} MiB"
        if read_options.long_documents == "error":
            ways = "split or skip" if can_split else "skip"
            raise BadRecordError(problem, f"to allow for it: --max-document-mib, or --long-documents {ways}")
        if read_options.chat:
            raise BadRecordError(f"{problem}, and a conversation cannot be split")
        advice = "to allow for it: --max-document-mib, --long-documents skip, or its text in a plain text file"
        raise BadRecordError(f"{problem}, and a JSON record cannot be split", advice)

    def leave_out_binary(self, name: str) -> None:
        self.binary += 1
        if self.binary <= _MAX_NAMED:
            self.binary_names.append(name)
