"""Finds which parts of a rendered conversation are targets. Runs in the sandbox, for it renders untrusted templates.

A template is a program, so its text says nothing about where a message is. Two kinds of marks, which are characters for
private use, show it:

- Marks around the contents of each message. The text without them must be the text that the template makes of the
  messages as they are. A template that drops, repeats, reorders or changes a content because of the marks is refused.
- Marks around `{% generation %}` blocks, with which a template itself says what the model generates.

Without such blocks, the targets of an answer begin where the generation prompt ends, if the generation prompt precedes
the content; else at the content. They end with the first token after the content that ends a turn.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

Render = Callable[[Sequence[Mapping[str, Any]], bool], str]
"""Function that returns the text of messages; with True, followed by the generation prompt."""

_FIRST_MARK = 0xF0000
_LAST_MARK = 0xFFFFD
"""The first and the last of the code points for private use that serve as marks (Unicode 16, section 23.5)."""

MARK = re.compile(f"[{chr(_FIRST_MARK)}-{chr(_LAST_MARK)}]")
"""Matches a mark. The messages must not contain any."""

GENERATION_BEGIN = chr(_FIRST_MARK)
GENERATION_END = chr(_FIRST_MARK + 1)
_MARKS_PER_MESSAGE = 4
"""The beginning and the end of the content, and of the reasoning before it."""
_MAX_MESSAGES = (_LAST_MARK - _FIRST_MARK) // _MARKS_PER_MESSAGE - 1

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message that hold what the model thinks before it answers."""


class TargetsError(Exception):
    """Raised for a conversation whose targets cannot be found exactly. The text says why."""


class Targets(NamedTuple):
    """A rendered conversation and its targets."""

    segments: list[tuple[str, bool, bool]]
    """The parts of the text in order: text, True if it is a target, and True if it is markup, not a content."""
    end_tokens: list[str]
    """The tokens that end the targets, without repetitions."""
    end_is_target: bool
    """True if the last target ends the text, but not with a token that ends a turn. What follows is then a target."""


class _Marked(NamedTuple):
    """A rendered conversation, and where the marks were in it."""

    text: str
    first: list[int | None]
    """Offset of the beginning of each message's contents; None if the template drops it."""
    last: list[int | None]
    """Offset of the end of each message's contents; None if there are none."""
    generated: list[tuple[int, int]]
    """Ranges of the generation blocks. Adjacent blocks are one range."""
    contents: list[tuple[int, int]]
    """Ranges of all contents."""


class _Range(NamedTuple):
    start: int
    stop: int
    end_token: str | None


def find_targets(
    render: Render, messages: Sequence[Mapping[str, Any]], is_target: Sequence[bool], end_tokens: Sequence[str],
    *, everything: bool = False,
) -> Targets:  # fmt: skip
    """Returns the text of a conversation in segments.

    `is_target` says which messages are targets. With `everything`, the entire text is one instead. `end_tokens` are the
    names of the tokens that end a turn or a text. Raises `TargetsError` if the targets cannot be found exactly.
    """
    if len(messages) > _MAX_MESSAGES:
        raise TargetsError(f"has {len(messages)} messages; at most {_MAX_MESSAGES} can be marked")
    marked = _render_with_marks(render, messages)
    if everything:
        ranges = [_Range(0, len(marked.text), None)]
    elif marked.generated:
        ranges = _generated_ranges(marked, messages, is_target, end_tokens)
    else:
        ranges = _ranges_of_answers(render, messages, is_target, marked, end_tokens)
    seen = [token for token in end_tokens if token in marked.text] if everything else []
    ends = dict.fromkeys([*seen, *(entry.end_token for entry in ranges if entry.end_token is not None)])
    stop = ranges[-1].stop if ranges else 0
    closed = any(marked.text[:stop].rstrip().endswith(token) for token in end_tokens)
    end_is_target = bool(ranges) and not closed and not marked.text[stop:].strip()
    return Targets(_segments(marked, ranges), list(ends), end_is_target)


# -- marks


def _render_with_marks(render: Render, messages: Sequence[Mapping[str, Any]]) -> _Marked:
    whole = MARK.sub("", render(messages, False))
    text, offsets = _without_marks(render([_with_marks(message, n) for n, message in enumerate(messages)], False))
    if text != whole and any(isinstance(message.get("content"), list) for message in messages):
        raise TargetsError("the chat template does not read contents that are lists of parts; give them as text")
    if text != whole:
        raise TargetsError(
            "the chat template makes other text of it when contents are marked, so its targets cannot be found"
        )
    first: list[int | None] = []
    last: list[int | None] = []
    contents = []
    previous = 0
    for number, message in enumerate(messages):
        ranges = [_range_of_content(offsets, message, number, name) for name in ("reasoning", "content")]
        starts = [start for start, _ in ranges if start is not None]
        stops = [stop for _, stop in ranges if stop is not None]
        if any(at < previous for at in starts + stops):
            raise TargetsError(f"the chat template renders message {number + 1} before the message that precedes it")
        first.append(min(starts, default=None))
        last.append(max(stops, default=None))
        previous = max([previous, *stops])
        contents += [(start, stop) for start, stop in ranges if start is not None and stop is not None]
    begins, ends = (offsets.get(mark, []) for mark in (GENERATION_BEGIN, GENERATION_END))
    if len(begins) != len(ends):
        raise TargetsError("the chat template drops the beginning or the end of a {% generation %} block")
    return _Marked(text, first, last, _merged(list(zip(begins, ends, strict=True))), sorted(contents))


def _with_marks(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Returns a message with marks around its content and its reasoning."""
    marked = dict(message)
    content = message.get("content")
    if isinstance(content, str):
        marked["content"] = _around(content, *_marks(number, "content"))
    elif isinstance(content, list):
        marked["content"] = _mark_parts(content, *_marks(number, "content"))
    for name in _reasoning_fields(message)[:1]:
        marked[name] = _around(message[name], *_marks(number, "reasoning"))
    return marked


def _around(text: str, begin: str, end: str) -> str:
    """Returns a text with marks. White space at its ends stays outside, because templates remove it."""
    core = text.strip()
    if not core:
        return text
    start = text.index(core)
    return f"{text[:start]}{begin}{core}{end}{text[start + len(core) :]}"


def _mark_parts(parts: Sequence[Any], begin: str, end: str) -> list[Any]:
    """Returns the parts of a content with marks in the first and the last part that has text."""
    with_text = [number for number, part in enumerate(parts) if _text_of_part(part).strip()]
    marked = list(parts)
    for number in with_text[:1] + with_text[-1:]:
        text = _text_of_part(marked[number])
        text = _around(text, begin if number == with_text[0] else "", "") if number == with_text[0] else text
        text = _around(text, "", end) if number == with_text[-1] else text
        marked[number] = text if isinstance(marked[number], str) else {**marked[number], "text": text}
    return marked


def _text_of_part(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    return text if isinstance(text, str) else ""


def _reasoning_fields(message: Mapping[str, Any]) -> list[str]:
    return [name for name in REASONING_FIELDS if isinstance(message.get(name), str) and message[name].strip()]


def _marks(number: int, name: str) -> tuple[str, str]:
    code = _FIRST_MARK + _MARKS_PER_MESSAGE * (number + 1) + (0 if name == "content" else 2)
    return chr(code), chr(code + 1)


def _without_marks(text: str) -> tuple[str, dict[str, list[int]]]:
    """Returns a text without marks, and the offsets in it at which each mark was."""
    offsets: dict[str, list[int]] = {}
    for count, match in enumerate(MARK.finditer(text)):
        offsets.setdefault(match[0], []).append(match.start() - count)
    return MARK.sub("", text), offsets


def _range_of_content(
    offsets: Mapping[str, list[int]], message: Mapping[str, Any], number: int, name: str
) -> tuple[int | None, int | None]:
    """Returns the range of a content in the text. Its start is None if the template drops the beginning of an answer,
    which holds what the model thought; both are None if there is no content."""
    begin, end = (offsets.get(mark, []) for mark in _marks(number, name))
    if name == "content" and not end and _has_content(message):
        raise TargetsError(f"the chat template does not render the content of message {number + 1}")
    if len(begin) > 1 or len(end) > 1:
        raise TargetsError(f"the chat template renders message {number + 1} more than once")
    if name == "content" and end and not begin and message.get("role") != "assistant":
        raise TargetsError(f"the chat template drops the beginning of message {number + 1}")
    return (begin[0] if begin else None), (end[0] if end else None)


def _has_content(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    if isinstance(content, str):
        return bool(content.strip())
    return isinstance(content, list) and any(_text_of_part(part).strip() for part in content)


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the ranges that are not empty, with adjacent ranges as one."""
    merged: list[tuple[int, int]] = []
    for start, stop in ranges:
        if start == stop:
            continue
        if merged and merged[-1][1] == start:
            merged[-1] = merged[-1][0], stop
        else:
            merged.append((start, stop))
    return merged


# -- ranges


def _generated_ranges(
    marked: _Marked, messages: Sequence[Mapping[str, Any]], is_target: Sequence[bool], end_tokens: Sequence[str]
) -> list[_Range]:
    """Returns the ranges of the generation blocks that belong to answers that are targets."""
    answers = [number for number, message in enumerate(messages) if message.get("role") == "assistant"]
    if len(marked.generated) != len(answers):
        raise TargetsError(
            f"the chat template marks {len(marked.generated)} generated parts, but there are {len(answers)} answers"
        )
    ranges = []
    for (start, stop), number in zip(marked.generated, answers, strict=True):
        if is_target[number]:
            text = marked.text[start:stop].rstrip()
            end_token = next((token for token in end_tokens if text.endswith(token)), None)
            ranges.append(_Range(start, stop, end_token))
    return ranges


def _ranges_of_answers(
    render: Render,
    messages: Sequence[Mapping[str, Any]],
    is_target: Sequence[bool],
    marked: _Marked,
    end_tokens: Sequence[str],
) -> list[_Range]:
    """Returns the ranges of the answers that are targets, found by the marks around contents."""
    prompt = _generation_prompt(render, messages, is_target)
    ranges = []
    previous = 0
    for number in range(len(messages)):
        own_last = marked.last[number]
        if is_target[number]:
            limit = _start_of_next_content(marked, number)
            start = _start_of_answer(marked, number, prompt, previous, limit)
            after = start if own_last is None else own_last
            ranges.append(_end_of_answer(render, messages, marked.text, number, start, after, limit, end_tokens))
        previous = previous if own_last is None else own_last
    return ranges


def _start_of_next_content(marked: _Marked, number: int) -> int:
    """Returns where the contents after those of message `number` begin, or the end of the text."""
    for first, last in zip(marked.first[number + 1 :], marked.last[number + 1 :], strict=True):
        if last is not None:
            return last if first is None else first
    return len(marked.text)


def _generation_prompt(render: Render, messages: Sequence[Mapping[str, Any]], is_target: Sequence[bool]) -> str:
    """Returns the text with which the template begins an answer; empty if it has none."""
    first = next((number for number, target in enumerate(is_target) if target), 0)
    if first == 0:
        return ""
    before = render(messages[:first], False)
    with_prompt = render(messages[:first], True)
    return with_prompt[len(before) :] if with_prompt.startswith(before) else ""


def _start_of_answer(marked: _Marked, number: int, prompt: str, previous: int, limit: int) -> int:
    """Returns where the targets of an answer begin, which is after `previous` and before `limit`."""
    own_first, own_last = marked.first[number], marked.last[number]
    stop = next(offset for offset in (own_first, own_last, limit) if offset is not None)
    at = -1
    if prompt:
        # If the template shortens the content, its beginning is unknown. The prompt is then the first that occurs.
        find = marked.text.find if own_first is None else marked.text.rfind
        at = find(prompt, previous, stop)
    if at >= 0:
        return at + len(prompt)
    if own_first is None:
        raise TargetsError(
            f"the chat template does not begin message {number + 1} with its generation prompt, and drops the "
            "beginning of its content"
        )
    return own_first


def _end_of_answer(
    render: Render, messages: Sequence[Mapping[str, Any]], text: str, number: int,
    start: int, after: int, limit: int, end_tokens: Sequence[str],
) -> _Range:  # fmt: skip
    """Returns the range of an answer whose content ends at `after`, before the next content at `limit`."""
    ends = [(at, token) for token in end_tokens if (at := text.find(token, after, limit)) >= 0]
    if ends:
        at, token = min(ends, key=lambda entry: (entry[0], -len(entry[1])))
        return _Range(start, at + len(token), token)
    if number == len(messages) - 1:
        return _Range(start, max(after, len(text.rstrip())), None)
    upto = render(messages[: number + 1], False)
    if text.startswith(upto) and after <= len(upto) <= limit:
        return _Range(start, max(after, len(upto.rstrip())), None)
    raise TargetsError(
        f"no token that ends a turn follows the content of message {number + 1}; the files of the tokenizer must name "
        "it as an end token (eos_token_id in generation_config.json)"
    )


def _segments(marked: _Marked, ranges: Sequence[_Range]) -> list[tuple[str, bool, bool]]:
    """Cuts the text where targets or contents begin or end."""
    edges = {0, len(marked.text)}
    for entry in ranges:
        edges |= {entry.start, entry.stop}
    for begin, end in marked.contents:
        edges |= {begin, end}
    cuts = sorted(edges)
    segments = []
    for start, stop in pairwise(cuts):
        is_target = any(entry.start <= start < entry.stop for entry in ranges)
        is_content = any(begin <= start < end for begin, end in marked.contents)
        segments.append((marked.text[start:stop], is_target, not is_content))
    return segments
