"""Reads the conversations in records, of which some messages are targets.

Nothing that changes the meaning of a conversation is dropped. Each field is rendered, marks targets, or is known to
have no effect on the meaning of the text. Otherwise the record is refused with an error that names the field. A chat
template renders the fields that it reads; ChatML renders roles and contents only.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from jaxmnt.data.chat.renderer import CHECKED_VARIABLES
from jaxmnt.data.chat.targets import REASONING_FIELDS
from jaxmnt.data.preparation.documents import BadRecordError, Segment, kind_of
from jaxmnt.data.preparation.inputs import ReadOptions
from jaxmnt.errors import printable, shortened

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

_EXTRA_VARIABLES = "chat_template_kwargs"
"""Field of a record that holds further variables of the template."""


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

_ROLES_OF_ALL_TEMPLATES = ("system", "user", "assistant")


class Conversation(NamedTuple):
    """A conversation, ready to be rendered."""

    messages: list[dict[str, Any]]
    """Messages with `role`, `content`, and the other fields that the template reads."""
    is_target: list[bool]
    """For each message, True if its contents and the end of its turn are targets."""
    variables: dict[str, Any]
    """Variables of the template in addition to the messages, such as tools."""


class PlainPair(NamedTuple):
    """A prompt and its completion as plain text, without markup."""

    prompt: str
    completion: str

    @property
    def segments(self) -> list[Segment]:
        return [Segment(self.prompt, learn=False), Segment(self.completion)]


class ConversationReader:
    """Reads conversations from records for one kind of markup."""

    def __init__(self, options: ReadOptions, words: Collection[str] | None):
        """`words` are the names and strings in the code of the chat template; None for ChatML."""
        self._options, self._words = options, words

    def read(self, record: Any) -> Conversation | PlainPair:
        """Returns the conversation in a record.

        Raises `BadRecordError` if the record has no known shape, or has a field that cannot be rendered.
        """
        if not isinstance(record, dict):
            raise BadRecordError(f"a record must be an object with {KNOWN_SHAPES}")
        fields = self._without_ignored(record)
        shape = next((name for name in SHAPES if fields.get(name) is not None), None)
        if shape == "prompt" and isinstance(fields["prompt"], str):
            return self._plain_pair(fields)
        turns: list[tuple[dict[str, Any], bool]]
        if shape in _TURN_SHAPES:
            rendered = [shape]
            turns = self._turns(fields, shape)
        elif shape == "instruction":
            rendered = ["instruction", "input", "output", "history"]
            turns = _instruction_turns(fields)
        elif shape == "prompt" and isinstance(fields.get("completion"), list):
            rendered = ["prompt", "completion"]
            prompt = [(message, False) for message, _ in self._turns(fields, "prompt")]
            turns = [*prompt, *self._turns(fields, "completion")]
        else:
            raise _missing_fields(fields)
        variables = {} if self._words is None else self._variables(fields)
        system = "" if _is_empty(fields.get("system")) else self._content(fields["system"], "system")
        turns = _add_system_prompt(system, turns)
        contents = [message["content"] for message, _ in turns if isinstance(message["content"], str)]
        self._refuse_other_fields(fields, [*rendered, "system", *variables], "the record", contents)
        messages = [message for message, _ in turns]
        extra = variables.pop(_EXTRA_VARIABLES, {})
        return Conversation(messages, _targets(turns, self._options.learn), variables | extra)

    def _without_ignored(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {name: entry for name, entry in fields.items() if name not in self._options.ignored_fields}

    def _plain_pair(self, fields: dict[str, Any]) -> PlainPair:
        prompt, completion = fields["prompt"], fields.get("completion")
        if not isinstance(completion, str):
            raise _missing_fields(fields)
        self._refuse_other_fields(fields, ["prompt", "completion"], "the record", [prompt, completion])
        return PlainPair(prompt, completion)

    def _turns(self, record: Mapping[str, Any], field: str) -> list[tuple[dict[str, Any], bool]]:
        """Returns the messages in a field of a record, each with True if it is a target.

        Raises `BadRecordError` if one of them is invalid.
        """
        messages = record[field]
        shape = _TURN_SHAPES.get(field, _MESSAGES)
        if not isinstance(messages, list):
            raise BadRecordError(f"{field} is {kind_of(messages)}; it must be a list")
        if not messages:
            raise BadRecordError(f"{field} must be a list with at least one {shape.turn}")
        return [self._turn(message, f"{shape.turn} {number}", shape) for number, message in enumerate(messages, 1)]

    def _turn(self, message: Any, where: str, shape: _Shape) -> tuple[dict[str, Any], bool]:
        if not isinstance(message, dict):
            raise BadRecordError(f"{where} is {kind_of(message)}; it must be an object")
        fields = self._without_ignored(message)
        role = self._role(fields.get(shape.role), where, shape)
        others = self._fields_for_template(fields, (shape.role, shape.content, *_TARGET_FIELDS))
        self._refuse_other_fields(fields, [shape.role, shape.content, *_TARGET_FIELDS, *others], where)
        content = fields.get(shape.content)
        if content is None and others.get("tool_calls"):
            assert self._words is not None
            # A template that tests for none gets it. Others would write the word None.
            content = None if "none" in self._words else ""
        else:
            content = self._content(content, f"{where}: {shape.content}")
        if "tool_calls" in others:
            others["tool_calls"] = self._calls(others["tool_calls"])
        has_text = content not in ("", [], None) or any(others.get(name) for name in ("tool_calls", *REASONING_FIELDS))
        is_target = _is_marked_as_target(fields, where, role) and has_text
        if self._options.learn == "all" and any(fields.get(name) in (0, False) for name in _TARGET_FIELDS):
            raise BadRecordError(f"{where} is marked as no target, which contradicts --learn all")
        return {"role": role, "content": content, **others}, is_target

    def _role(self, name: Any, where: str, shape: _Shape) -> str:
        """Returns the role of a message, under the name that the markup has for it."""
        if self._words is not None and shape is _MESSAGES and isinstance(name, str):
            if name in _ROLES_OF_ALL_TEMPLATES or name in self._words:
                return name
            if name in shape.roles:
                raise BadRecordError(f"{where}: the chat template does not know the role {name}")
        if not isinstance(name, str) or name not in shape.roles:
            *first_roles, last_role = shape.roles
            actual = f'"{shortened(name)}"' if isinstance(name, str) else kind_of(name)
            raise BadRecordError(
                f"{where}: {shape.role} is {actual}; it must be {', '.join(first_roles)} or {last_role}"
            )
        return shape.roles[name]

    def _fields_for_template(self, fields: Mapping[str, Any], others: Collection[str]) -> dict[str, Any]:
        """Returns the fields of a message that the template reads, without empty values and without `others`."""
        if self._words is None:
            return {}
        return {
            name: _without_nulls(entry)
            for name, entry in fields.items()
            if name not in others and name in self._words and not _is_empty(entry)
        }

    def _calls(self, calls: Any) -> Any:
        """Returns the calls of tools, with arguments in the form that the template reads.

        OpenAI's format has arguments as text. A template that does not test for text would write them as JSON of JSON.
        """
        assert self._words is not None
        if "string" in self._words or not isinstance(calls, list):
            return calls
        return [_with_parsed_arguments(call) for call in calls]

    def _content(self, content: Any, where: str) -> Any:
        """Returns the content of a message: its text, or, for a template, the parts as they are."""
        if self._words is None or not isinstance(content, list):
            return self._text_of(content, where)
        self._text_of(content, where)  # refuses parts that have no text
        return content

    def _text_of(self, content: Any, where: str) -> str:
        """Returns the text of a message, whose content is a text or a list of text parts."""
        if isinstance(content, str):
            return content
        if not isinstance(content, list):
            raise BadRecordError(f"{where} is {kind_of(content)}; it must be text, or a list of parts with text")
        return "".join(self._text_of_part(part, f"{where}: part {number}") for number, part in enumerate(content, 1))

    def _text_of_part(self, part: Any, where: str) -> str:
        if isinstance(part, str):
            return part
        if not isinstance(part, dict):
            raise BadRecordError(f"{where} is {kind_of(part)}; it must be an object with type and text")
        if part.get("type") not in _TEXT_PART_TYPES:
            raise BadRecordError(f"{where} has the type {shortened(str(part.get('type')))}; only text can be rendered")
        if not isinstance(part.get("text"), str):
            raise BadRecordError(f"{where}: text is {kind_of(part.get('text'))}; it must be text")
        self._refuse_other_fields(part, ["type", "text"], where)
        return part["text"]

    def _variables(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the variables in a record that the template reads. Raises `BadRecordError` if one is malformed."""
        assert self._words is not None
        variables: dict[str, Any] = {}
        for name in CHECKED_VARIABLES:
            objects = fields.get(name)
            if _is_empty(objects) or name not in self._words:
                continue
            if isinstance(objects, str):  # some datasets store them as JSON
                try:
                    objects = json.loads(objects)
                except (ValueError, RecursionError):
                    raise BadRecordError(f"{name} is text that is not JSON; it must be a list of objects") from None
            if not isinstance(objects, list) or not all(isinstance(entry, dict) for entry in objects):
                raise BadRecordError(f"{name} must be a list of objects")
            variables[name] = _without_nulls(objects)
        extra = fields.get(_EXTRA_VARIABLES)
        if not _is_empty(extra):
            if not isinstance(extra, dict):
                raise BadRecordError(f"{_EXTRA_VARIABLES} is {kind_of(extra)}; it must be an object")
            extra = {name: entry for name, entry in extra.items() if entry is not None}
            unread = sorted(name for name in extra if name not in self._words or name in _RESERVED_VARIABLES)
            if unread:
                raise BadRecordError(
                    f"{_EXTRA_VARIABLES} sets {shortened(unread[0])}, which the chat template does not read"
                )
            variables[_EXTRA_VARIABLES] = extra
        return variables

    def _refuse_other_fields(
        self, fields: Mapping[str, Any], rendered: Collection[str], where: str, texts: Collection[str] = ()
    ) -> None:
        """Raises `BadRecordError` for a field that is not rendered, although the meaning of the text may depend on
        it."""
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
            renderer = "--chat" if self._words is None else "the chat template"
            raise BadRecordError(
                f"{where} holds {field}, which {renderer} does not render: without it the text could mean something "
                "else",
                f"to train without the field: --ignore-fields {field}",
            )


_RESERVED_VARIABLES = ("messages", "add_generation_prompt", *CHECKED_VARIABLES)


def fields_to_read(names: Iterable[str], options: ReadOptions) -> list[str]:
    """Returns, in order, the fields of a record that must be read, which are all except ignored fields and metadata."""
    return [
        name for name in names if name not in options.ignored_fields and not _METADATA_FIELDS.fullmatch(name.lower())
    ]


def conversation_advice(fields: Collection[str]) -> str:
    """Returns advice for records that have no text, but fields of a conversation; empty for other records."""
    for shape in ({"messages"}, {"conversations"}, {"instruction", "output"}, {"prompt", "completion"}):
        if shape <= set(fields):
            return f"they hold conversations ({' and '.join(sorted(shape))}): give --chat to train on their answers"
    return ""


def as_chatml(conversation: Conversation, *, everything: bool) -> list[Segment]:
    """Renders a conversation in the format ChatML, as `chat.template.CHATML_TEMPLATE` does."""
    segments = []
    for message, is_target in zip(conversation.messages, conversation.is_target, strict=True):
        learn = is_target or everything
        segments += [
            Segment(f"<|im_start|>{message['role']}\n", learn=everything, markup=True),
            Segment(message["content"], learn=learn),
            Segment("<|im_end|>", learn=learn, markup=True),
            Segment("\n", learn=everything),
        ]
    return segments


def _targets(turns: list[tuple[dict[str, Any], bool]], learn: str) -> list[bool]:
    """Returns which messages are targets, given which may be."""
    is_target = [target for _, target in turns]
    if learn != "last":
        return is_target
    last = max((number for number, target in enumerate(is_target) if target), default=-1)
    return [number == last for number in range(len(turns))]


def _missing_fields(fields: Mapping[str, Any]) -> BadRecordError:
    """Returns the error for a record that has no known shape."""
    names = ", ".join(printable(str(name)[:40]) for name in sorted(fields)[:12])
    return BadRecordError(f"needs {KNOWN_SHAPES} as text; its fields: {names}")


def _is_marked_as_target(fields: Mapping[str, Any], where: str, role: str) -> bool:
    """Returns True if a turn is a target. Raises `BadRecordError` if a field that marks targets is invalid."""
    marks = {name: fields[name] for name in _TARGET_FIELDS if fields.get(name) is not None}
    for name, mark in marks.items():
        if mark not in (0, 1):
            raise BadRecordError(f"{where}: {name} is {shortened(repr(mark))}; it must be 0 or 1, or false or true")
        if mark and role != "assistant":
            raise BadRecordError(f"{where}: {name} makes a target of a turn that is not the assistant's; remove it")
    if len({bool(mark) for mark in marks.values()}) > 1:
        raise BadRecordError(f"{where}: {' and '.join(marks)} contradict each other; remove one of them")
    return role == "assistant" and all(marks.values())


def _instruction_turns(fields: Mapping[str, Any]) -> list[tuple[dict[str, Any], bool]]:
    instruction = fields["instruction"]
    question_input = fields.get("input") or ""
    output = fields.get("output")
    if not all(isinstance(text, str) for text in (instruction, question_input, output)):
        raise BadRecordError("needs instruction, output and, if it is present, input as text")
    turns = []
    for earlier_question, answer in _history_pairs(fields.get("history")):
        turns += [(_message("user", earlier_question), False), (_message("assistant", answer), False)]
    question = f"{instruction}\n\n{question_input}" if question_input else instruction
    return [*turns, (_message("user", question), False), (_message("assistant", str(output)), output != "")]


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _history_pairs(history: Any) -> list[Any]:
    """Returns pairs of the earlier questions and answers in a record. They are context, and not targets."""
    pairs = [] if _is_empty(history) else history
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in pairs
    ):
        raise BadRecordError("history must be a list of pairs, each a question and an answer as text")
    return pairs


def _add_system_prompt(system: Any, turns: list[tuple[dict[str, Any], bool]]) -> list[tuple[dict[str, Any], bool]]:
    """Returns the turns, preceded by the record's system prompt if it has one.

    Raises `BadRecordError` if the first turn is a different system prompt.
    """
    if not system:
        return turns
    first = turns[0][0]
    if first["role"] != "system":
        return [(_message("system", system), False), *turns]
    if first["content"] != system:
        raise BadRecordError(
            "has one system prompt in its field 'system' and another in its first turn; remove one of them"
        )
    return turns


def _is_empty(value: Any) -> bool:
    """Returns True if the value of a field stands for no value."""
    if isinstance(value, dict):  # in Parquet, every record has the fields of all records
        return all(_is_empty(item) for item in value.values())
    return value is None or value == [] or (isinstance(value, str) and value.strip() in _EMPTY_TEXTS)


def _without_nulls(value: Any) -> Any:
    """Returns a value without the null fields that Parquet adds to objects."""
    if isinstance(value, dict):
        return {name: _without_nulls(entry) for name, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value


def _with_parsed_arguments(call: Any) -> Any:
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        return {**call, "function": _with_parsed_arguments(call["function"])}
    if not isinstance(call, dict) or not isinstance(call.get("arguments"), str):
        return call
    try:
        return {**call, "arguments": json.loads(call["arguments"])}
    except (ValueError, RecursionError):
        return call


def _repeats(name: str, value: Any, texts: Collection[str]) -> bool:
    """Returns True if a field only repeats the text of one turn, or is named `text` and contains the texts of all
    turns."""
    if not isinstance(value, str):
        return False
    return value in texts or (name == "text" and bool(texts) and all(text in value for text in texts))
