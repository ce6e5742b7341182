"""Conversations and instructions as segments, of which only the answers are targets.

Records are `{"messages": [{"role": …, "content": …}, …]}`, `{"conversations": [{"from": …, "value": …}, …]}` as in
ShareGPT, `{"instruction": …, "input": …, "output": …}` as in Alpaca, or `{"prompt": …, "completion": …}`. All but the
last become messages. Messages are written in ChatML; where the tokenizer knows <|im_start|> and <|im_end|> as special
tokens, those are used.
"""

from collections.abc import Collection
from typing import Any

from jaxmnt.data.preparation.document import BadRecordError, Segment
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
