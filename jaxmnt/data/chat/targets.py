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

UNCHECKED_FIELDS = ("id", "tool_call_id", "source", "model", "date", "timestamp", "version")
"""Fields that templates may read for other things, and that have no effect on the meaning of a text."""

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message that hold what the model thinks before it answers."""


class TargetsError(Exception):
    """Raised for a conversation whose targets cannot be found exactly. The text says why."""


class Targets(NamedTuple):
    """A rendered conversation and its targets."""

    segments: list[tuple[str, bool, bool]]
    """The parts of the text in order: text, True if it is a target, and True if it is markup, not a content."""
    end_tokens: list[str]
    """The tokens, or texts, that end the targets, without repetitions."""
    end_is_target: bool
    """True if the last target ends the text, but not with a token that ends a turn. What follows is then a target."""
    unprompted: int
    """Number of answers that do not begin where the template's generation prompt ends."""


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
    prompted: bool = True
    """True if the range begins where the generation prompt ends."""


class _Tokens(NamedTuple):
    """Names of the tokenizer's tokens."""

    ends: Sequence[str]
    """Tokens that end a turn or a text."""
    special: Sequence[str]
    """All special tokens. One that follows a content may end a turn, although no file says so."""


def find_targets(
    render: Render, messages: Sequence[Mapping[str, Any]], is_target: Sequence[bool], end_tokens: Sequence[str],
    special_tokens: Sequence[str] = (), *, everything: bool = False,
) -> Targets:  # fmt: skip
    """Returns the text of a conversation in segments.

    `is_target` says which messages are targets. With `everything`, the entire text is one instead. `end_tokens` are the
    names of the tokens that end a turn or a text, and `special_tokens` those of all special tokens. Raises
    `TargetsError` if the targets cannot be found exactly.
    """
    if len(messages) > _MAX_MESSAGES:
        raise TargetsError(f"has {len(messages)} messages; at most {_MAX_MESSAGES} can be marked")
    tokens = _Tokens(end_tokens, special_tokens)
    marked = _render_with_marks(render, messages)
    if everything:
        ranges = [_Range(0, len(marked.text), None)]
    elif marked.generated:
        ranges = _generated_ranges(marked, messages, is_target, tokens)
    else:
        ranges = _ranges_of_answers(render, messages, is_target, marked, tokens)
    seen = [token for token in end_tokens if token in marked.text] if everything else []
    ends = dict.fromkeys([*seen, *(entry.end_token for entry in ranges if entry.end_token is not None)])
    stop = ranges[-1].stop if ranges else 0
    target_text = marked.text[:stop].rstrip()
    closed = any(target_text.endswith(token) for token in (*end_tokens, *special_tokens))
    end_is_target = bool(ranges) and not closed and not marked.text[stop:].strip()
    unprompted = sum(not entry.prompted for entry in ranges)
    return Targets(_segments(marked, ranges), list(ends), end_is_target, unprompted)


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
    _check_fields(render, messages, whole)
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


def _check_fields(render: Render, messages: Sequence[Mapping[str, Any]], whole: str) -> None:
    """Raises `TargetsError` for a field that the template reads but does not render, such as calls of tools next to a
    content. Calls must be rendered by name."""
    names = sorted({name for message in messages for name in message} - {"role", "content", *UNCHECKED_FIELDS})
    for name in names:
        without = [{key: entry for key, entry in message.items() if key != name} for message in messages]
        try:
            is_rendered = MARK.sub("", render(without, False)) != whole
        except Exception:  # a template may require the field, for example with a null content
            is_rendered = True
        if not is_rendered:
            raise TargetsError(f"the chat template does not render {name}, although it reads a field of that name")
    for number, message in enumerate(messages):
        for call in message.get("tool_calls") or []:
            function = call.get("function", call) if isinstance(call, Mapping) else {}
            if isinstance(function, Mapping) and str(function.get("name", "")) not in whole:
                raise TargetsError(f"the chat template does not render the calls of tools in message {number + 1}")


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
    for number in dict.fromkeys(with_text[:1] + with_text[-1:]):
        text = _around(
            _text_of_part(marked[number]),
            begin if number == with_text[0] else "",
            end if number == with_text[-1] else "",
        )
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
        hint = "" if isinstance(message["content"], list) else "; it may read only contents that are lists of parts"
        raise TargetsError(f"the chat template does not render the content of message {number + 1}{hint}")
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
    marked: _Marked, messages: Sequence[Mapping[str, Any]], is_target: Sequence[bool], tokens: _Tokens
) -> list[_Range]:
    """Returns the ranges of the generation blocks that belong to answers that are targets."""
    answers = [number for number, message in enumerate(messages) if message.get("role") == "assistant"]
    if len(marked.generated) != len(answers):
        raise TargetsError(
            f"the chat template marks {len(marked.generated)} generated parts, but there are {len(answers)} answers"
        )
    ranges = []
    for (start, stop), number in zip(marked.generated, answers, strict=True):
        last = marked.last[number]
        if last is not None and not start <= last <= stop:
            raise TargetsError(f"the generated part that the chat template marks is not message {number + 1}")
        if is_target[number]:
            ranges.append(_Range(start, stop, _end_of(marked.text[start:stop].rstrip(), tokens)))
    return ranges


def _ranges_of_answers(
    render: Render,
    messages: Sequence[Mapping[str, Any]],
    is_target: Sequence[bool],
    marked: _Marked,
    tokens: _Tokens,
) -> list[_Range]:
    """Returns the ranges of the answers that are targets, found by the marks around contents."""
    prompt = _generation_prompt(render, messages)
    limits = _starts_of_next_contents(marked)
    ranges = []
    previous = 0
    for number, message in enumerate(messages):
        own_last = marked.last[number]
        # An answer without a content, such as a call of a tool, must be found even if it is not a target, because the
        # next answer begins after it.
        if is_target[number] or (message.get("role") == "assistant" and own_last is None):
            answer = _Answer(number, previous, limits[number])
            start, prompted = _start_of_answer(render, messages, marked, answer, prompt)
            after = start if own_last is None else own_last
            stop, end_token = _end_of_answer(render, messages, marked, answer, after, tokens)
            if is_target[number]:
                ranges.append(_Range(start, stop, end_token, prompted))
            previous = stop
        elif own_last is not None:
            previous = own_last
    return ranges


class _Answer(NamedTuple):
    number: int
    """Index of the message."""
    previous: int
    """Offset at which the answer or content before it ends."""
    limit: int
    """Offset at which the next content begins, or the end of the text."""


def _starts_of_next_contents(marked: _Marked) -> list[int]:
    """Returns, for each message, where the contents after its own begin, or the end of the text."""
    limits = [0] * len(marked.last)
    limit = len(marked.text)
    for number in reversed(range(len(marked.last))):
        limits[number] = limit
        first, last = marked.first[number], marked.last[number]
        if last is not None:
            limit = last if first is None else first
    return limits


def _generation_prompt(render: Render, messages: Sequence[Mapping[str, Any]]) -> str:
    """Returns the text with which the template begins an answer; empty if it has none."""
    answers = (number for number, message in enumerate(messages) if message.get("role") == "assistant")
    first = next((number for number in answers if number > 0), 0)
    before = messages[:first] or [{"role": "user", "content": "x"}]
    try:
        text = render(before, False)
        with_prompt = render(before, True)
    except Exception:  # a template may refuse the part of a conversation
        return ""
    return with_prompt[len(text) :] if with_prompt.startswith(text) else ""


def _start_of_answer(
    render: Render, messages: Sequence[Mapping[str, Any]], marked: _Marked, answer: _Answer, prompt: str
) -> tuple[int, bool]:
    """Returns where the targets of an answer begin, and True if the generation prompt ends there."""
    number, previous, limit = answer
    own_first, own_last = marked.first[number], marked.last[number]
    stop = next(offset for offset in (own_first, own_last, limit) if offset is not None)
    if prompt:
        # If the template shortens the content, its beginning is unknown. The prompt is then the first that occurs.
        find = marked.text.find if own_first is None else marked.text.rfind
        at = find(prompt, previous, stop)
        if at >= 0:
            return at + len(prompt), True
    elif number > 0:
        # The template has no generation prompt, so the model is asked after the messages before.
        before = render(messages[:number], True)
        if marked.text.startswith(before) and previous <= len(before) <= stop:
            return len(before), True
    if own_first is None:
        raise TargetsError(
            f"the chat template does not begin message {number + 1} with its generation prompt, and drops the "
            "beginning of its content"
        )
    return own_first, False


def _end_of_answer(
    render: Render, messages: Sequence[Mapping[str, Any]], marked: _Marked, answer: _Answer, after: int, tokens: _Tokens
) -> tuple[int, str | None]:
    """Returns where an answer ends whose content ends at `after`, and the token that ends it."""
    text, number, limit = marked.text, answer.number, answer.limit
    is_last = number == len(messages) - 1
    ends = [(at, token) for token in tokens.ends if (at := text.find(token, after, limit)) >= 0]
    if ends:
        at, token = min(ends, key=lambda entry: (entry[0], -len(entry[1])))
        between = text[after:at]
        # The token may belong to the header of the next turn, unless it follows the content directly.
        if is_last or not between.strip() or _ends_before(render, messages, number, text, at, token):
            return at + len(token), token
    upto = text if is_last else render(messages[: number + 1], False)
    if is_last:
        # What follows the content belongs to the turn if it stays when another turn follows.
        more = render([*messages, {"role": "user", "content": "x"}], False) if text[after:].strip() else text
        is_end_of_turn = more.startswith(text.rstrip())
    else:
        is_end_of_turn = text.startswith(upto) and after <= len(upto) <= limit
    if not is_end_of_turn:
        raise TargetsError(
            f"no token that ends a turn follows the content of message {number + 1}; the files of the tokenizer must "
            "name it as an end token (eos_token_id in generation_config.json)"
        )
    tail = text[after : len(upto)].strip()
    if not tail:
        # Only white space ends the turn. It must be learned, because what follows it ends the answer.
        return max(after, len(upto)), None
    return len(upto.rstrip()), _end_of(tail, tokens) or tail


def _ends_before(
    render: Render, messages: Sequence[Mapping[str, Any]], number: int, text: str, at: int, token: str
) -> bool:
    """Returns True if the end token at this offset ends the turn of a message, or begins the next turn."""
    upto = render(messages[: number + 1], False)
    if text.startswith(upto):
        return at + len(token) <= len(upto) or (at >= len(upto) and not text[len(upto) : at].strip())
    # The template writes this turn differently if it is the last. Only calls of tools may follow the content then.
    return bool(messages[number].get("tool_calls"))


def _end_of(text: str, tokens: _Tokens) -> str | None:
    """Returns the longest token with which a text ends; None if it ends with none."""
    endings = [token for token in (*tokens.ends, *tokens.special) if text.endswith(token)]
    return max(endings, key=len, default=None)


def _segments(marked: _Marked, ranges: Sequence[_Range]) -> list[tuple[str, bool, bool]]:
    """Cuts the text where targets or contents begin or end."""
    targets = [(entry.start, entry.stop) for entry in ranges]
    if any(stop > start for (_, stop), (start, _) in pairwise(targets)):
        raise TargetsError("two of its answers overlap in the text of the chat template")
    edges = {0, len(marked.text)}.union(*targets, *marked.contents)
    is_target, is_content = _Membership(targets), _Membership(marked.contents)
    return [
        (marked.text[start:stop], is_target(start), not is_content(start)) for start, stop in pairwise(sorted(edges))
    ]


class _Membership:
    """Says for increasing offsets whether they are in one of some ranges, which are sorted."""

    def __init__(self, ranges: Sequence[tuple[int, int]]):
        self._ranges, self._next = ranges, 0

    def __call__(self, offset: int) -> bool:
        while self._next < len(self._ranges) and self._ranges[self._next][1] <= offset:
            self._next += 1
        return self._next < len(self._ranges) and self._ranges[self._next][0] <= offset
