"""One record of JSON lines or Parquet as a document."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jaxmnt.data.preparation.chat import segments_of_chat
from jaxmnt.data.preparation.document import BadRecordError, Document, Reading, Report, Segment


def documents_of(
    record: Any, number: int, file: int, name: Callable[[int], str], reading: Reading, report: Report
) -> Iterator[Document]:
    """The document of a record, or none if it is empty or bad; `name` words where a record of a number is."""
    try:
        segments = segments_of_chat(record) if reading.chat else [Segment(_text_of(record, reading, report))]
    except BadRecordError as error:
        report.on_bad(BadRecordError(f"{name(number)}: {error}"))
        return
    if not any(segment.content for segment in segments):
        report.empty += 1
        return
    try:
        key = _key(segments)
    except UnicodeEncodeError:  # JSON can spell halves of characters
        if not reading.replace_invalid:
            report.on_bad(BadRecordError(f"{name(number)}: holds half of a character (a lone surrogate)"))
            return
        report.replaced += 1
        segments = [segment._replace(content=_without_surrogates(segment.content)) for segment in segments]
        key = _key(segments)
    yield Document(file, number, key, segments)


def _key(segments: list[Segment]) -> bytes:
    digest = hashlib.sha256()
    for segment in segments:
        assert isinstance(segment.content, str)
        digest.update(segment.content.encode("utf-8"))
    return digest.digest()


def _without_surrogates(text: str | np.ndarray) -> str:
    assert isinstance(text, str)
    return text.encode("utf-16", errors="surrogatepass").decode("utf-16", errors="replace")


def _text_of(record: Any, reading: Reading, report: Report) -> str:
    field = reading.text_field
    if not isinstance(record, dict):
        raise BadRecordError("a record must be an object with fields")
    if field not in record:
        raise BadRecordError(
            f"has no field {field}; its fields: {', '.join(sorted(record))} (--text-field names another)"
        )
    text = record[field]
    if text is None:
        return ""
    if isinstance(text, bytes):
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError as error:
            if not reading.replace_invalid:
                raise BadRecordError(f"not valid UTF-8 at byte {error.start} of {field}") from error
            report.replaced += 1
            return text.decode("utf-8", errors="replace")
    if not isinstance(text, str):
        raise BadRecordError(f"{field} is no text")
    return text
