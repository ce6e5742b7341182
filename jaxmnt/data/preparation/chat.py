"""Conversations and instructions as segments, of which only the answers are targets.

Records are `{"messages": [{"role": …, "content": …}, …]}` or `{"prompt": …, "completion": …}`. Messages are written in
ChatML; where the tokenizer knows <|im_start|> and <|im_end|> as special tokens, those are used.
"""

from typing import Any

from jaxmnt.data.preparation.document import BadRecordError, Segment

_ROLES = ("system", "user", "assistant", "tool")


def segments_of_chat(record: Any) -> list[Segment]:
    """The segments of one record. Raises `BadRecordError` for one of another shape."""
    if not isinstance(record, dict):
        raise BadRecordError("a record must be an object with messages, or with prompt and completion")
    if record.get("messages") is not None:
        return _messages(record["messages"])
    prompt, completion = record.get("prompt"), record.get("completion")
    if not (isinstance(prompt, str) and isinstance(completion, str)):
        found = ", ".join(sorted(record))
        raise BadRecordError(f"needs messages, or prompt and completion as text; its fields: {found}")
    return [Segment(prompt, learn=False), Segment(completion)]


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
