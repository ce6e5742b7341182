"""Renders conversations for a preparation, in ChatML or with the chat template of a model."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxmnt import storage
from jaxmnt.data.chat.renderer import Renderer, RenderError
from jaxmnt.data.chat.template import (
    CHATML_END,
    CHATML_TEMPLATE,
    FORMAT_FILES,
    ChatFormat,
    chat_template,
    decoded,
    end_ids,
    object_in,
    special_tokens,
)
from jaxmnt.data.manifest import BYTES, CHATML, MANIFEST
from jaxmnt.data.preparation.conversations import Conversation, ConversationReader, PlainPair, as_chatml
from jaxmnt.data.preparation.documents import BadRecordError, RenderedRecord, Report, Segment
from jaxmnt.data.preparation.inputs import ReadOptions, Settings
from jaxmnt.data.tokenizer import Bytes, HuggingFace, Tokenizer, choose_tokenizer, file_of_tokenizer
from jaxmnt.errors import ConfigError, printable
from jaxmnt.strict_json import json_text

DATE_FUNCTION = "strftime_now"
"""The function with which a template writes the date of today."""


class ConversationMarkup:
    """Renders the conversations of records."""

    def __init__(self, options: ReadOptions, tokenizer: Tokenizer | None, renderer: Renderer | None):
        self._options, self._renderer = options, renderer
        self._reader = ConversationReader(options, None if renderer is None else renderer.words)
        self._tokenizer = tokenizer if isinstance(tokenizer, HuggingFace) else None
        self._special = [] if self._tokenizer is None else sorted(self._tokenizer.special)

    def render(self, record: Any, report: Report) -> RenderedRecord:
        """Returns the contents of a record. Raises `BadRecordError` if the record cannot be used, or if its targets
        cannot be found exactly."""
        conversation = self._reader.read(record)
        if isinstance(conversation, PlainPair):
            return RenderedRecord(conversation.segments, bool(conversation.completion), joined=False)
        everything = self._options.learn == "all"
        if self._renderer is None:
            if CHATML_END not in self._special and any(CHATML_END in m["content"] for m in conversation.messages):
                raise BadRecordError(
                    f"contains {CHATML_END}, which would end the turn there, because the tokenizer has no such token; "
                    "remove it"
                )
            segments = as_chatml(conversation, everything=everything)
            if any(segment.learn for segment in segments):
                report.conversations += 1
                report.note_end_tokens([CHATML_END])
            return RenderedRecord(segments, everything or conversation.is_target[-1], joined=False)
        return self._render_with_template(self._renderer, conversation, report, everything)

    def _render_with_template(
        self, renderer: Renderer, conversation: Conversation, report: Report, everything: bool
    ) -> RenderedRecord:
        messages, is_target, variables = conversation
        try:
            text = json_text([messages, variables], ensure_ascii=False)
        except TypeError as error:  # Parquet has dates and bytes
            raise BadRecordError(f"has a value that cannot be rendered: {error}") from error
        try:
            text.encode()
        except UnicodeEncodeError:  # JSON escapes can encode lone surrogates
            report.replace_invalid("holds half of a character (a lone surrogate)")
            text = text.encode("utf-16", errors="surrogatepass").decode("utf-16", errors="replace")
            messages, variables = json.loads(text)
        special = None if self._tokenizer is None else self._tokenizer.special_name_in(text)
        if special is not None:
            raise BadRecordError(
                f"contains {printable(special)}, the name of a special token, which would become that token; remove it"
            )
        if not everything and not any(is_target):
            # The text does not matter, because a conversation without targets is left out.
            return RenderedRecord([Segment(text, learn=False)], False, joined=True)
        try:
            targets = renderer.find_targets(messages, variables, is_target, everything, self._special)
        except RenderError as error:
            raise BadRecordError(str(error)) from error
        report.conversations += 1
        report.unprompted += targets.unprompted
        report.note_end_tokens(targets.end_tokens)
        segments = [Segment(text, learn, markup) for text, learn, markup in targets.segments]
        return RenderedRecord(segments, targets.end_is_target, joined=True)


@contextmanager
def open_markup(options: ReadOptions, tokenizer: Tokenizer | None) -> Iterator[ConversationMarkup | None]:
    """Provides the markup of a preparation; None if its records hold no conversations."""
    if not options.chat:
        yield None
    elif options.chat_format is None:
        yield ConversationMarkup(options, tokenizer, None)
    else:
        with Renderer(options.chat_format, options.chat_date) as renderer:
            yield ConversationMarkup(options, tokenizer, renderer)


def with_chat_format(settings: Settings, chat_template_argument: str | None) -> Settings:
    """Returns the settings with the chat template that `--chat-template` names, or that came with the tokenizer.

    Without a template, conversations become ChatML. Raises `ConfigError` if the template cannot be used.
    """
    options = settings.reading
    if not options.chat or chat_template_argument == CHATML:
        return settings
    files = _files_of_tokenizer(settings.tokenizer)
    recorded = _recorded_chat(files)
    if chat_template_argument is None and recorded.get("source") == CHATML:
        return settings
    template_and_source = _template_of_argument(chat_template_argument) or chat_template(files)
    if template_and_source is None:
        return settings
    template, source = template_and_source
    tokens = special_tokens(files, template) | recorded.get("special_tokens", {})
    ends = dict.fromkeys([*_end_tokens(settings, files), *recorded.get("end_tokens", [])])
    chat = ChatFormat(source, template, tokens, tuple(ends))
    with Renderer(chat) as renderer:
        if DATE_FUNCTION in renderer.words and options.chat_date is None:
            raise ConfigError(
                f"--chat-date: the chat template in {source} writes the date of today, so the same input would not "
                "always give the same data; give the date to write, such as --chat-date 2026-01-31"
            )
    return replace(settings, reading=replace(options, chat_format=chat))


def chat_format_of(options: ReadOptions, tokenizer: Tokenizer | None, end_tokens: list[str]) -> ChatFormat:
    """Returns the format in which a preparation rendered its conversations. `end_tokens` ended the targets."""
    trained = tuple(sorted(set(end_tokens)))
    if options.chat_format is not None:
        return replace(options.chat_format, end_tokens=trained)
    # A document follows the end of the one before it, so that is what precedes the first turn.
    end_token = tokenizer.end_token if isinstance(tokenizer, HuggingFace) else None
    tokens = {} if end_token is None else {"bos_token": end_token}
    return ChatFormat(CHATML, CHATML_TEMPLATE, tokens, trained)


def _recorded_chat(files: dict[str, bytes]) -> dict[str, Any]:
    """Returns what the manifest beside a tokenizer says about conversations, if the tokenizer is that of prepared data
    or of a run; empty if it is not."""
    manifest = object_in(files, MANIFEST)
    chat = manifest.get("chat") if str(manifest.get("format")).startswith("jaxmnt-") else None
    return chat if isinstance(chat, dict) else {}


def _files_of_tokenizer(tokenizer: str | None) -> dict[str, bytes]:
    """Returns the files beside a tokenizer.json that say how a model formats conversations."""
    if tokenizer is None or tokenizer == BYTES:
        return {}
    folder = file_of_tokenizer(tokenizer).parent
    return storage.read_all(folder, [name for name in (*FORMAT_FILES, MANIFEST) if (folder / name).is_file()])


def _template_of_argument(path: str | None) -> tuple[str, str] | None:
    if path is None:
        return None
    try:
        return decoded(storage.read(Path(path)), path), path
    except OSError as error:
        raise ConfigError(
            f"--chat-template: {path} cannot be read: {error.strerror}; give the path of a template, or chatml"
        ) from error


def _end_tokens(settings: Settings, files: dict[str, bytes]) -> tuple[str, ...]:
    """Returns the names of the tokens that end a turn or a text, according to the files beside the tokenizer."""
    if settings.tokenizer is None or settings.tokenizer == BYTES:
        return ()
    tokenizer = choose_tokenizer(settings.tokenizer, settings.end_token)
    assert not isinstance(tokenizer, Bytes)
    names = {id: name for name, id in tokenizer.ids.items()}
    ends = [names[id] for id in end_ids(files) if id in names]
    eos = special_tokens(files).get("eos_token")
    if eos in tokenizer.ids:
        ends.append(eos)
    if tokenizer.end_token is not None:
        ends.append(tokenizer.end_token)
    return tuple(dict.fromkeys(ends))
