"""What a document is in a record of fields: text, or a conversation."""

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import numpy as np

from jaxmnt.data.preparation.documents import BadRecordError, Document, Reading, Report, Segment
from jaxmnt.errors import printable

_ROLES = ("system", "user", "assistant", "tool")

_SPEAKERS = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "tool": "tool", "observation": "tool",
}  # fmt: skip
"""Roles by what ShareGPT's `from` calls them."""

CHAT_FIELDS = ("messages", "conversations", "instruction", "input", "output", "system", "prompt", "completion")
"""Fields of records that are looked at."""

KNOWN = "messages, conversations, instruction and output, or prompt and completion"


def segments_of_chat(record: Any) -> list[Segment]:
    """The segments of one record. Raises `BadRecordError` for one of another shape."""
    if not isinstance(record, dict):
        raise BadRecordError(f"a record must be an object with {KNOWN}")
    if record.get("messages") is not None:
        return _messages(record["messages"])
    if record.get("conversations") is not None:
        return _messages(_of_conversations(record["conversations"]))
    if record.get("instruction") is not None:
        return _messages(_of_instruction(record))
    prompt, completion = record.get("prompt"), record.get("completion")
    if not (isinstance(prompt, str) and isinstance(completion, str)):
        found = ", ".join(printable(str(name)[:40]) for name in sorted(record)[:12])
        raise BadRecordError(f"needs {KNOWN} as text; its fields: {found}")
    return [Segment(prompt, learn=False), Segment(completion)]


def what_it_holds(fields: Collection[str]) -> str:
    """What to do about records without text that have these fields; empty where that is not known."""
    for shape in ({"messages"}, {"conversations"}, {"instruction", "output"}, {"prompt", "completion"}):
        if shape <= set(fields):
            return f"they hold conversations ({' and '.join(sorted(shape))}): give --chat to learn their answers"
    return ""


def _of_conversations(turns: Any) -> list[Any]:
    if not isinstance(turns, list):
        raise BadRecordError("conversations must be a list")
    messages = []
    for number, turn in enumerate(turns, 1):
        speaker = turn.get("from") if isinstance(turn, dict) else None
        if not isinstance(speaker, str) or speaker not in _SPEAKERS:
            raise BadRecordError(f"turn {number} needs from ({', '.join(_SPEAKERS)}) and its value as text")
        messages.append({"role": _SPEAKERS[speaker], "content": turn.get("value")})
    return messages


def _of_instruction(record: dict[str, Any]) -> list[Any]:
    instruction, given, output = record["instruction"], record.get("input") or "", record.get("output")
    system = record.get("system") or ""
    if not all(isinstance(text, str) for text in (instruction, given, output, system)):
        raise BadRecordError("needs instruction, output and, if there are any, input and system as text")
    asked = f"{instruction}\n\n{given}" if given else instruction
    start = [{"role": "system", "content": system}] if system else []
    return [*start, {"role": "user", "content": asked}, {"role": "assistant", "content": output}]


def _messages(messages: Any) -> list[Segment]:
    if not isinstance(messages, list) or not messages:
        raise BadRecordError("messages must be a list with at least one message")
    segments = []
    for number, message in enumerate(messages, 1):
        role = message.get("role") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        if role not in _ROLES or not isinstance(content, str):
            raise BadRecordError(f"message {number} needs a role ({', '.join(_ROLES)}) and its content as text")
        answer = role == "assistant"
        segments += [
            Segment(f"<|im_start|>{role}\n", learn=False, markup=True),
            Segment(content, learn=answer),
            Segment("<|im_end|>", learn=answer, markup=True),
            Segment("\n", learn=False),
        ]
    return segments


_NAMED_FIELDS = 12
"""Fields of a record that an error names."""


def documents_of(
    record: Any, number: int, file: int, name: Callable[[int], str], reading: Reading, report: Report
) -> Iterator[Document]:
    """The document of a record, or none if it is empty or bad; `name` words where a record of a number is."""
    try:
        segments = segments_of_chat(record) if reading.chat else [Segment(_text_of(record, reading, report))]
    except BadRecordError as error:
        report.on_bad(BadRecordError(f"{name(number)}: {error}", error.advice))
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


def documents_of_pieces(
    pieces: Iterator[str], number: int, file: int, name: Callable[[int], str], report: Report
) -> Iterator[Document]:
    """A record that is too long, as several documents, all of them held out or none.

    What is found to be bad in its middle has given its beginning by then: to hold it back, all would have to be held.
    """
    key = b""
    try:
        for text in pieces:
            segments = [Segment(text)]
            report.split += not key
            key = key or _key(segments)
            yield Document(file, number, key, segments)
        report.empty += not key
    except BadRecordError as error:
        report.on_bad(BadRecordError(f"{name(number)}: {error}"))
        report.broken += bool(key)


def replacing(reading: Reading, report: Report) -> Callable[[], None] | None:
    """What a record that is split calls for every odd character that it replaces. None: they are not replaced."""
    counted = False

    def count() -> None:
        nonlocal counted
        report.replaced += not counted
        counted = True

    return count if reading.replace_invalid else None


def leave_out_long(where: str, reading: Reading, report: Report) -> None:
    """What becomes of a record that is too long and is not split."""
    if reading.long_documents == "skip":
        report.long += 1
        return
    what = f"{where}: the record is longer than {reading.max_document / 2**20:g} MiB"
    if reading.long_documents == "split":
        report.on_bad(BadRecordError(f"{what}, and a conversation cannot be split"))
    else:
        advice = "to allow for it: --max-document-mib, or --long-documents split or skip"
        report.on_bad(BadRecordError(what, advice))


def names_of(fields: Iterable[Any]) -> str:
    """Names of fields, as an error shows them."""
    names = [printable(str(name)[:40]) for name in fields]
    return ", ".join(names[:_NAMED_FIELDS]) + (" …" if len(names) > _NAMED_FIELDS else "")


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
        lacks = f"has no field {printable(field)}; its fields: {names_of(sorted(record))} (--text-field names another)"
        raise BadRecordError(lacks, what_it_holds(record))
    text = record[field]
    if text is None:
        return ""
    if isinstance(text, bytes):
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError as error:
            if not reading.replace_invalid:
                raise BadRecordError(f"not valid UTF-8 at byte {error.start} of {printable(field)}") from error
            report.replaced += 1
            return text.decode("utf-8", errors="replace")
    if not isinstance(text, str):
        raise BadRecordError(f"{printable(field)} is not text")
    return text
