"""How a record of fields becomes a document: text, or a conversation."""

import hashlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import numpy as np

from jaxmnt.data.preparation.chat import conversation_of
from jaxmnt.data.preparation.documents import BadRecordError, Document, Report, Segment, kind_of
from jaxmnt.data.preparation.inputs import Input
from jaxmnt.errors import printable


def what_it_holds(fields: Collection[str]) -> str:
    """What to do about records without text that have these fields; empty where that is not known."""
    for shape in ({"messages"}, {"conversations"}, {"instruction", "output"}, {"prompt", "completion"}):
        if shape <= set(fields):
            return f"they hold conversations ({' and '.join(sorted(shape))}): give --chat to learn their answers"
    return ""


_NAMED_FIELDS = 12
"""Fields of a record that an error names."""


def documents_of(record: Any, number: int, file: Input, report: Report) -> Iterator[Document]:
    """The document of a record, or none if it is empty. Raises `BadRecordError`."""
    if report.reading.chat:
        segments, end_is_target = conversation_of(record, report.reading)
    else:
        segments, end_is_target = [Segment(_text_of(record, report))], True
    if not any(segment.content for segment in segments):
        report.empty += 1
        return
    if not any(segment.learn and segment.content for segment in segments):
        report.without_targets += 1
        return
    try:
        key = key_of(segments)
    except UnicodeEncodeError:  # JSON can spell halves of characters
        report.replace_invalid("holds half of a character (a lone surrogate)")
        segments = [segment._replace(content=_without_surrogates(segment.content)) for segment in segments]
        key = key_of(segments)
    yield Document(file, number, key, segments, end_is_target=end_is_target)


def names_of(fields: Iterable[Any]) -> str:
    """Names of fields, as an error shows them."""
    names = [printable(str(name)[:40]) for name in fields]
    return ", ".join(names[:_NAMED_FIELDS]) + (" …" if len(names) > _NAMED_FIELDS else "")


def key_of(segments: list[Segment]) -> bytes:
    """Returns the digest that decides whether a document is held out."""
    text = "".join(str(segment.content) for segment in segments)
    return hashlib.sha256(text.encode("utf-8")).digest()


def _without_surrogates(text: str | np.ndarray) -> str:
    assert isinstance(text, str)
    return text.encode("utf-16", errors="surrogatepass").decode("utf-16", errors="replace")


def _text_of(record: Any, report: Report) -> str:
    field = report.reading.text_field
    if not isinstance(record, dict):
        raise BadRecordError("a record must be an object with fields")
    if field not in record:
        lacks = f"has no field {printable(field)}; its fields: {names_of(sorted(record))} (--text-field names another)"
        raise BadRecordError(lacks, what_it_holds(record))
    text = record[field]
    if text is None:
        return ""
    if isinstance(text, bytes):
        return report.decoded(text, printable(field))
    if not isinstance(text, str):
        raise BadRecordError(f'field "{printable(field)}" is {kind_of(text)}; it must be a string')
    return text
