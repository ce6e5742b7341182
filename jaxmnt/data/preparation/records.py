"""Turns records into documents. A record holds a text, or a conversation of turns, some of which are targets.

Nothing that changes the meaning of a conversation is dropped. Each field is rendered, marks targets, or is known to
have no effect on the meaning of the text. Otherwise the record is refused with an error that names the field.
"""

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxmnt.data.preparation.documents import BadRecordError, Document, Report, Segment, kind_of
from jaxmnt.data.preparation.inputs import Input, ReadOptions
from jaxmnt.errors import printable, shortened


def conversation_advice(fields: Collection[str]) -> str:
    """Returns advice for records that have no text, but fields of a conversation; empty for other records."""
    for shape in ({"messages"}, {"conversations"}, {"instruction", "output"}, {"prompt", "completion"}):
        if shape <= set(fields):
            return f"they hold conversations ({' and '.join(sorted(shape))}): give --chat to train on their answers"
    return ""


_MAX_NAMED_FIELDS = 12
"""Maximum number of fields of a record that an error names."""


def documents_of(record: Any, number: int, file: Input, report: Report) -> Iterator[Document]:
    """Yields the document in a record, or nothing if it is empty or has no targets.

    Raises `BadRecordError` if the record cannot be used.
    """
    if report.read_options.chat:
        segments, end_is_target = conversation_of(record, report.read_options)
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


# -- conversations

SHAPES = ("messages", "conversations", "instruction", "prompt")
"""Fields each of which identifies a shape of conversation records. If a record has several, the first one counts."""

KNOWN_SHAPES = "messages, conversations, instruction and output, or prompt and completion"

_METADATA_FIELDS = re.compile(
    r"""ids? | idx | index | uid | uuid | guid | hash | urls? | sources? | origin | dataset | subset | split | license
    | author | annotator | version | model | created | created_at | updated_at | timestamp | date | meta | metadata
    | category | categories | topics? | tags | domain | language | lang | locale | difficulty | quality | scores?
    | ratings? | length | cache_control
    | (num|score)_.* | .*_(ids?|idx|index|hash|url|scores?|count)""",
    re.VERBOSE | re.DOTALL,
)
"""Names of fields that describe a record or a message, and are not part of its text."""

_EMPTY_TEXTS = ("", "[]", "{}", "null")
"""Texts that stand for an empty value, for example for no tools, in columns that must hold text."""

_TARGET_FIELDS = ("weight", "train", "loss")
"""Fields that say whether a message is a target, as named by OpenAI, Axolotl and ms-swift."""

_TEXT_PART_TYPES = ("text", "input_text", "output_text")


class _Shape(NamedTuple):
    """A format of the turns in a conversation record."""

    turn: str
    """Name for a turn in errors."""
    role: str
    """Field that holds the role."""
    content: str
    """Field that holds the content."""
    roles: Mapping[str, str]
    """Our name for each role in records."""


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
"""Fields that hold a complete conversation, with the shape of its turns."""


class Turn(NamedTuple):
    """One turn of a conversation."""

    role: str
    content: str
    learn: bool
    """True if the content and the end of the turn are targets."""


class Conversation(NamedTuple):
    """A conversation, ready to be encoded."""

    segments: list[Segment]
    end_is_target: bool
    """True if the end of the document is a target, which it is only after an answer that is a target."""


def conversation_of(record: Any, read_options: ReadOptions) -> Conversation:
    """Returns the conversation in a record.

    Raises `BadRecordError` if the record has no known shape, or has a field that cannot be rendered.
    """
    if not isinstance(record, dict):
        raise BadRecordError(f"a record must be an object with {KNOWN_SHAPES}")
    fields = {name: value for name, value in record.items() if name not in read_options.ignored_fields}
    shape = next((name for name in SHAPES if fields.get(name) is not None), None)
    if shape == "prompt" and isinstance(fields["prompt"], str):
        return _prompt_and_completion(fields)
    if shape in _TURN_SHAPES:
        rendered = [shape]
        turns = _turns(fields, shape, read_options)
    elif shape == "instruction":
        rendered = ["instruction", "input", "output", "history"]
        turns = _instruction_turns(fields)
    elif shape == "prompt" and isinstance(fields.get("completion"), list):
        prompt, completion = (_turns(fields, field, read_options) for field in ("prompt", "completion"))
        rendered = ["prompt", "completion"]
        turns = [*(turn._replace(learn=False) for turn in prompt), *completion]
    else:
        raise _missing_fields(fields)
    turns = _add_system_prompt(fields.get("system"), turns)
    _refuse_other_fields(fields, [*rendered, "system"], "the record", [turn.content for turn in turns])
    return Conversation(_as_chatml(turns), turns[-1].learn)


def fields_to_read(names: Iterable[str], read_options: ReadOptions) -> list[str]:
    """Returns, in order, the fields of a record that must be read, which are all except ignored fields and metadata."""
    return [
        name
        for name in names
        if name not in read_options.ignored_fields and not _METADATA_FIELDS.fullmatch(name.lower())
    ]


def _prompt_and_completion(fields: dict[str, Any]) -> Conversation:
    prompt, completion = fields["prompt"], fields.get("completion")
    if not isinstance(completion, str):
        raise _missing_fields(fields)
    _refuse_other_fields(fields, ["prompt", "completion"], "the record", [prompt, completion])
    return Conversation([Segment(prompt, learn=False), Segment(completion)], bool(completion))


def _missing_fields(fields: Mapping[str, Any]) -> BadRecordError:
    """Returns the error for a record that has no known shape."""
    names = ", ".join(printable(str(name)[:40]) for name in sorted(fields)[:12])
    return BadRecordError(f"needs {KNOWN_SHAPES} as text; its fields: {names}")


def _turns(record: Mapping[str, Any], field: str, read_options: ReadOptions) -> list[Turn]:
    """Returns the turns in a field of a record. Raises `BadRecordError` if one of them is invalid."""
    messages = record[field]
    shape = _TURN_SHAPES.get(field, _MESSAGES)
    if not isinstance(messages, list):
        raise BadRecordError(f"{field} is {kind_of(messages)}; it must be a list")
    if not messages:
        raise BadRecordError(f"{field} must be a list with at least one {shape.turn}")
    return [_turn(message, f"{shape.turn} {number}", shape, read_options) for number, message in enumerate(messages, 1)]


def _turn(message: Any, where: str, shape: _Shape, read_options: ReadOptions) -> Turn:
    if not isinstance(message, dict):
        raise BadRecordError(f"{where} is {kind_of(message)}; it must be an object")
    fields = {name: value for name, value in message.items() if name not in read_options.ignored_fields}
    role_name = fields.get(shape.role)
    if not isinstance(role_name, str) or role_name not in shape.roles:
        *first_roles, last_role = shape.roles
        actual = f'"{shortened(role_name)}"' if isinstance(role_name, str) else kind_of(role_name)
        raise BadRecordError(f"{where}: {shape.role} is {actual}; it must be {', '.join(first_roles)} or {last_role}")
    role = shape.roles[role_name]
    _refuse_other_fields(fields, [shape.role, shape.content, *_TARGET_FIELDS], where)
    content = _text_of(fields.get(shape.content), f"{where}: {shape.content}")
    return Turn(role, content, _is_target(fields, where, role) and content != "")


def _is_target(fields: Mapping[str, Any], where: str, role: str) -> bool:
    """Returns True if a turn is a target. Raises `BadRecordError` if a field that marks targets is invalid."""
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
    """Returns the text of a turn, whose content is a text or a list of text parts."""
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
    if part.get("type") not in _TEXT_PART_TYPES:
        raise BadRecordError(f"{where} has the type {shortened(str(part.get('type')))}; only text can be rendered")
    if not isinstance(part.get("text"), str):
        raise BadRecordError(f"{where}: text is {kind_of(part.get('text'))}; it must be text")
    _refuse_other_fields(part, ["type", "text"], where)
    return part["text"]


def _instruction_turns(fields: Mapping[str, Any]) -> list[Turn]:
    instruction = fields["instruction"]
    question_input = fields.get("input") or ""
    output = fields.get("output")
    if not all(isinstance(text, str) for text in (instruction, question_input, output)):
        raise BadRecordError("needs instruction, output and, if it is present, input as text")
    turns = []
    for earlier_question, answer in _history_pairs(fields.get("history")):
        turns += [Turn("user", earlier_question, False), Turn("assistant", answer, False)]
    question = f"{instruction}\n\n{question_input}" if question_input else instruction
    return [*turns, Turn("user", question, False), Turn("assistant", str(output), output != "")]


def _history_pairs(history: Any) -> list[Any]:
    """Returns pairs of the earlier questions and answers in a record. They are context, and not targets."""
    pairs = [] if _is_empty(history) else history
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in pairs
    ):
        raise BadRecordError("history must be a list of pairs, each a question and an answer as text")
    return pairs


def _add_system_prompt(system: Any, turns: list[Turn]) -> list[Turn]:
    """Returns the turns, preceded by the record's system prompt if it has one.

    Raises `BadRecordError` if the first turn is a different system prompt.
    """
    content = "" if _is_empty(system) else _text_of(system, "system")
    if not content:
        return turns
    if turns[0].role != "system":
        return [Turn("system", content, False), *turns]
    if turns[0].content != content:
        raise BadRecordError(
            "has one system prompt in its field 'system' and another in its first turn; remove one of them"
        )
    return turns


def _refuse_other_fields(
    fields: Mapping[str, Any], rendered: Collection[str], where: str, texts: Collection[str] = ()
) -> None:
    """Raises `BadRecordError` for a field that is not rendered, although the meaning of the text may depend on it."""
    for name in sorted(fields):
        value = fields[name]
        if (
            name in rendered
            or _METADATA_FIELDS.fullmatch(name.lower())
            or _is_empty(value)
            or _repeats(name, value, texts)
        ):
            continue
        field = shortened(name)
        raise BadRecordError(
            f"{where} holds {field}, which --chat does not render: without it the text could mean something else",
            f"to train without the field: --ignore-fields {field}",
        )


def _is_empty(value: Any) -> bool:
    """Returns True if the value of a field stands for no value."""
    if isinstance(value, dict):  # in Parquet, every record has the fields of all records
        return all(_is_empty(item) for item in value.values())
    return value is None or value == [] or (isinstance(value, str) and value.strip() in _EMPTY_TEXTS)


def _repeats(name: str, value: Any, texts: Collection[str]) -> bool:
    """Returns True if a field only repeats the text of one turn, or is named `text` and contains the texts of all
    turns."""
    if not isinstance(value, str):
        return False
    return value in texts or (name == "text" and bool(texts) and all(text in value for text in texts))


def _as_chatml(turns: Iterable[Turn]) -> list[Segment]:
    """Renders turns in the format ChatML."""
    segments = []
    for turn in turns:
        segments += [
            Segment(f"<|im_start|>{turn.role}\n", learn=False, markup=True),
            Segment(turn.content, learn=turn.learn),
            Segment("<|im_end|>", learn=turn.learn, markup=True),
            Segment("\n", learn=False),
        ]
    return segments
