"""Turns records into documents: a text, or a conversation of turns, some of which are targets.

Nothing that changes the meaning of a conversation is dropped. Each field is rendered, or marks targets, or is on the
list of fields without meaning for the text; otherwise the record is refused with an error that names the field.
"""

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxmnt.data.preparation.documents import BadRecordError, Document, Report, Segment, kind_of
from jaxmnt.data.preparation.inputs import Input, Reading
from jaxmnt.errors import printable, shortened


def conversation_advice(fields: Collection[str]) -> str:
    """Returns advice for records without text whose fields suggest a conversation; empty otherwise."""
    for shape in ({"messages"}, {"conversations"}, {"instruction", "output"}, {"prompt", "completion"}):
        if shape <= set(fields):
            return f"they hold conversations ({' and '.join(sorted(shape))}): give --chat to learn their answers"
    return ""


_NAMED_FIELDS = 12
"""Most fields of a record that an error names."""


def documents_of(record: Any, number: int, file: Input, report: Report) -> Iterator[Document]:
    """Yields the document of a record; none if it is empty or has no targets. Raises `BadRecordError`."""
    if report.reading.chat:
        segments, end_is_target = conversation_of(record, report.reading)
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
    yield Document(file, number, key, segments, end_is_target=end_is_target)


def names_of(fields: Iterable[Any]) -> str:
    """Returns the names of fields for an error message."""
    names = [printable(str(name)[:40]) for name in fields]
    return ", ".join(names[:_NAMED_FIELDS]) + (" …" if len(names) > _NAMED_FIELDS else "")


def key_of(segments: list[Segment]) -> bytes:
    """Returns the digest that decides whether a document is held out."""
    text = "".join(str(segment.content) for segment in segments)
    return hashlib.sha256(text.encode("utf-8")).digest()


def _without_surrogates(text: str | np.ndarray) -> str:
    assert isinstance(text, str)
    return text.encode("utf-16", errors="surrogatepass").decode("utf-16", errors="replace")


def _text_field_of(record: Any, report: Report) -> str:
    field = report.reading.text_field
    if not isinstance(record, dict):
        raise BadRecordError("a record must be an object with fields")
    if field not in record:
        lacks = f"has no field {printable(field)}; its fields: {names_of(sorted(record))} (--text-field names another)"
        raise BadRecordError(lacks, conversation_advice(record))
    text = record[field]
    if text is None:
        return ""
    if isinstance(text, bytes):
        return report.decoded(text, printable(field))
    if not isinstance(text, str):
        raise BadRecordError(f'field "{printable(field)}" is {kind_of(text)}; it must be a string')
    return text


# -- conversations

SHAPES = ("messages", "conversations", "instruction", "prompt")
"""Fields that each identify one shape of conversation records; the first that is present decides."""

KNOWN_SHAPES = "messages, conversations, instruction and output, or prompt and completion"

_METADATA_FIELDS = re.compile(
    r"""ids? | idx | index | uid | uuid | guid | hash | urls? | sources? | origin | dataset | subset | split | license
    | author | annotator | version | model | created | created_at | updated_at | timestamp | date | meta | metadata
    | category | categories | topics? | tags | domain | language | lang | locale | difficulty | quality | scores?
    | ratings? | length | cache_control
    | (num|score)_.* | .*_(ids?|idx|index|hash|url|scores?|count)""",
    re.VERBOSE | re.DOTALL,
)
"""Fields that describe a record or a message and are not part of its text, by name or by a part of the name."""

_EMPTY_TEXTS = ("", "[]", "{}", "null")
"""Texts that mean an empty value, such as no tools, in columns that must hold text."""

_TARGET_FIELDS = ("weight", "train", "loss")
"""Fields of a message that say whether it is a target: OpenAI's, Axolotl's and ms-swift's."""

_TEXT_PARTS = ("text", "input_text", "output_text")


class _Shape(NamedTuple):
    """The field names of a turn, and a mapping from the roles in records to ours."""

    turn: str
    role: str
    content: str
    roles: Mapping[str, str]


_MESSAGES = _Shape(
    "message", "role", "content",
    {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"},
)  # fmt: skip
_CONVERSATIONS = _Shape(
    "turn", "from", "value",
    {
        "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
        "tool": "tool", "observation": "tool",
    },
)  # fmt: skip

_TURN_SHAPES = {"messages": _MESSAGES, "conversations": _CONVERSATIONS}
"""Fields that hold a whole conversation, with the shape of their turns."""


class Turn(NamedTuple):
    """One turn of a conversation."""

    role: str
    content: str
    learn: bool
    """True if its content and its end are targets."""


class Conversation(NamedTuple):
    """A conversation, ready to be encoded."""

    segments: list[Segment]
    end_is_target: bool
    """True if the end of the document is a target: only after an answer that is a target."""


def conversation_of(record: Any, reading: Reading) -> Conversation:
    """Returns the conversation in a record. Raises `BadRecordError` if the record has another shape, or a field
    that cannot be rendered."""
    if not isinstance(record, dict):
        raise BadRecordError(f"a record must be an object with {KNOWN_SHAPES}")
    fields = {name: value for name, value in record.items() if name not in reading.ignored_fields}
    shape = next((name for name in SHAPES if fields.get(name) is not None), None)
    if shape == "prompt" and isinstance(fields["prompt"], str):
        return _prompt_and_completion(fields)
    if shape in _TURN_SHAPES:
        rendered, turns = [shape], _turns(fields, shape, reading)
    elif shape == "instruction":
        rendered, turns = ["instruction", "input", "output", "history"], _instruction_turns(fields)
    elif shape == "prompt" and isinstance(fields.get("completion"), list):
        prompt, completion = (_turns(fields, field, reading) for field in ("prompt", "completion"))
        rendered, turns = ["prompt", "completion"], [*(turn._replace(learn=False) for turn in prompt), *completion]
    else:
        raise _missing_fields(fields)
    turns = _with_system(fields.get("system"), turns)
    _refuse_other_fields(fields, [*rendered, "system"], "the record", [turn.content for turn in turns])
    return Conversation(_as_chatml(turns), turns[-1].learn)


def fields_to_read(names: Iterable[str], reading: Reading) -> list[str]:
    """Returns the fields of a record that must be read, in order: all but ignored fields and metadata."""
    return [
        name for name in names if name not in reading.ignored_fields and not _METADATA_FIELDS.fullmatch(name.lower())
    ]


def _prompt_and_completion(fields: dict[str, Any]) -> Conversation:
    prompt, completion = fields["prompt"], fields.get("completion")
    if not isinstance(completion, str):
        raise _missing_fields(fields)
    _refuse_other_fields(fields, ["prompt", "completion"], "the record", [prompt, completion])
    return Conversation([Segment(prompt, learn=False), Segment(completion)], bool(completion))


def _missing_fields(fields: Mapping[str, Any]) -> BadRecordError:
    names = ", ".join(printable(str(name)[:40]) for name in sorted(fields)[:12])
    return BadRecordError(f"needs {KNOWN_SHAPES} as text; its fields: {names}")


def _turns(record: Mapping[str, Any], field: str, reading: Reading) -> list[Turn]:
    messages = record[field]
    shape = _TURN_SHAPES.get(field, _MESSAGES)
    if not isinstance(messages, list):
        raise BadRecordError(f"{field} is {kind_of(messages)}; it must be a list")
    if not messages:
        raise BadRecordError(f"{field} must be a list with at least one {shape.turn}")
    return [_turn(message, f"{shape.turn} {number}", shape, reading) for number, message in enumerate(messages, 1)]


def _turn(message: Any, where: str, shape: _Shape, reading: Reading) -> Turn:
    if not isinstance(message, dict):
        raise BadRecordError(f"{where} is {kind_of(message)}; it must be an object")
    fields = {name: value for name, value in message.items() if name not in reading.ignored_fields}
    name = fields.get(shape.role)
    if not isinstance(name, str) or name not in shape.roles:
        *others, last = shape.roles
        shown = f'"{shortened(name)}"' if isinstance(name, str) else kind_of(name)
        raise BadRecordError(f"{where}: {shape.role} is {shown}; it must be {', '.join(others)} or {last}")
    role = shape.roles[name]
    _refuse_other_fields(fields, [shape.role, shape.content, *_TARGET_FIELDS], where)
    content = _text_of(fields.get(shape.content), f"{where}: {shape.content}")
    return Turn(role, content, _is_target(fields, where, role) and content != "")


def _is_target(fields: Mapping[str, Any], where: str, role: str) -> bool:
    """Returns True if a turn is a target. Raises `BadRecordError` for a mark that is invalid."""
    marks = {name: fields[name] for name in _TARGET_FIELDS if fields.get(name) is not None}
    for name, value in marks.items():
        if value not in (0, 1):
            raise BadRecordError(f"{where}: {name} is {shortened(repr(value))}; it must be 0 or 1, or false or true")
        if value and role != "assistant":
            raise BadRecordError(f"{where}: {name} makes a target of a turn that is not the assistant's; remove it")
    if len({bool(value) for value in marks.values()}) > 1:
        raise BadRecordError(f"{where}: {' and '.join(marks)} contradict each other; remove one of them")
    return role == "assistant" and all(marks.values())


def _text_of(content: Any, where: str) -> str:
    """Returns the text of a turn's content, which is a text or a list of text parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRecordError(f"{where} is {kind_of(content)}; it must be text, or a list of parts with text")
    return "".join(_text_of_part(part, f"{where}: part {number}") for number, part in enumerate(content, 1))


def _text_of_part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise BadRecordError(f"{where} is {kind_of(part)}; it must be an object with type and text")
    if part.get("type") not in _TEXT_PARTS:
        raise BadRecordError(f"{where} has the type {shortened(str(part.get('type')))}; only text can be rendered")
    if not isinstance(part.get("text"), str):
        raise BadRecordError(f"{where}: text is {kind_of(part.get('text'))}; it must be text")
    _refuse_other_fields(part, ["type", "text"], where)
    return part["text"]


def _instruction_turns(fields: Mapping[str, Any]) -> list[Turn]:
    instruction = fields["instruction"]
    extra = fields.get("input") or ""
    output = fields.get("output")
    if not all(isinstance(text, str) for text in (instruction, extra, output)):
        raise BadRecordError("needs instruction, output and, if there is any, input as text")
    turns = []
    for pair in _pairs(fields.get("history")):
        turns += [Turn("user", pair[0], False), Turn("assistant", pair[1], False)]
    question = f"{instruction}\n\n{extra}" if extra else instruction
    return [*turns, Turn("user", question, False), Turn("assistant", str(output), output != "")]


def _pairs(history: Any) -> list[Any]:
    """Returns the earlier questions and answers of a record, which are context and not targets."""
    pairs = [] if _is_empty(history) else history
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in pairs
    ):
        raise BadRecordError("history must be a list of pairs, each a question and an answer as text")
    return pairs


def _with_system(system: Any, turns: list[Turn]) -> list[Turn]:
    """Returns the turns after the record's system prompt, if it has one. Raises `BadRecordError` for two prompts."""
    content = "" if _is_empty(system) else _text_of(system, "system")
    if not content:
        return turns
    if turns[0].role != "system":
        return [Turn("system", content, False), *turns]
    if turns[0].content != content:
        raise BadRecordError("has one system prompt in its field system and another in its first turn; remove one")
    return turns


def _refuse_other_fields(
    fields: Mapping[str, Any], rendered: Collection[str], where: str, texts: Collection[str] = ()
) -> None:
    """Raises `BadRecordError` if fields hold something that is neither rendered nor without meaning for the text."""
    for name in sorted(fields):
        value = fields[name]
        if (
            name in rendered
            or _METADATA_FIELDS.fullmatch(name.lower())
            or _is_empty(value)
            or _repeats(name, value, texts)
        ):
            continue
        shown = shortened(name)
        raise BadRecordError(
            f"{where} holds {shown}, which --chat does not render: without it the text could mean something else",
            f"to train without the field: --ignore-fields {shown}",
        )


def _is_empty(value: Any) -> bool:
    if isinstance(value, dict):  # in Parquet every record has the fields of all records
        return all(_is_empty(item) for item in value.values())
    return value is None or value == [] or (isinstance(value, str) and value.strip() in _EMPTY_TEXTS)


def _repeats(name: str, value: Any, texts: Collection[str]) -> bool:
    """Returns True if a field only repeats the turns: one of them, or, for `text`, all of them rendered."""
    if not isinstance(value, str):
        return False
    return value in texts or (name == "text" and bool(texts) and all(text in value for text in texts))


def _as_chatml(turns: Iterable[Turn]) -> list[Segment]:
    segments = []
    for turn in turns:
        segments += [
            Segment(f"<|im_start|>{turn.role}\n", learn=False, markup=True),
            Segment(turn.content, learn=turn.learn),
            Segment("<|im_end|>", learn=turn.learn, markup=True),
            Segment("\n", learn=False),
        ]
    return segments
