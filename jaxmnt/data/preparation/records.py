"""Turns records into documents. A record holds a text, or a conversation of turns, some of which are targets."""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from jaxmnt.data.preparation.conversations import conversation_advice
from jaxmnt.data.preparation.documents import BadRecordError, Document, Report, Segment, kind_of
from jaxmnt.data.preparation.inputs import Input
from jaxmnt.errors import printable

_MAX_NAMED_FIELDS = 12
"""Maximum number of fields of a record that an error names."""


def documents_of(record: Any, number: int, file: Input, report: Report) -> Iterator[Document]:
    """Yields the document in a record, or nothing if it is empty or has no targets.

    Raises `BadRecordError` if the record cannot be used.
    """
    joined = False
    if report.markup is not None:
        segments, end_is_target, joined = report.markup.render(record, report)
    else:
        segments, end_is_target = [Segment(_text_field_of(record, report))], True
    if not any(segment.content for segment in segments):
        report.empty += 1
        return
    if not any(segment.learn and segment.content for segment in segments):
        report.without_targets += 1
        return
    try:
        key = key_of(segments)
    except UnicodeEncodeError:  # JSON escapes can encode lone surrogates
        report.replace_invalid("holds half of a character (a lone surrogate)")
        segments = [segment._replace(content=_without_surrogates(segment.content)) for segment in segments]
        key = key_of(segments)
    yield Document(file, number, key, segments, end_is_target=end_is_target, joined=joined)


def names_of(fields: Iterable[Any]) -> str:
    """Returns the names of fields for an error message."""
    names = [printable(str(name)[:40]) for name in fields]
    return ", ".join(names[:_MAX_NAMED_FIELDS]) + (" …" if len(names) > _MAX_NAMED_FIELDS else "")


def key_of(segments: list[Segment]) -> bytes:
    """Returns the digest that decides whether a document is held out."""
    text = "".join(str(segment.content) for segment in segments)
    return hashlib.sha256(text.encode("utf-8")).digest()


def _without_surrogates(text: str | np.ndarray) -> str:
    assert isinstance(text, str)
    return text.encode("utf-16", errors="surrogatepass").decode("utf-16", errors="replace")


def _text_field_of(record: Any, report: Report) -> str:
    field = report.read_options.text_field
    if not isinstance(record, dict):
        raise BadRecordError("a record must be an object with fields")
    if field not in record:
        problem = (
            f"has no field {printable(field)}; its fields: {names_of(sorted(record))} (--text-field names another)"
        )
        raise BadRecordError(problem, conversation_advice(record))
    text = record[field]
    if text is None:
        return ""
    if isinstance(text, bytes):
        return report.decoded(text, printable(field))
    if not isinstance(text, str):
        raise BadRecordError(f'field "{printable(field)}" is {kind_of(text)}; it must be a string')
    return text
