"""Asks a trained model in a conversation, with the chat template with which it was trained, or that came with it."""

import functools
from collections.abc import Mapping
from typing import Any

from jaxmnt.data.chat.renderer import CHECKED_VARIABLES, Renderer, RenderError
from jaxmnt.data.chat.template import ChatFormat
from jaxmnt.data.vocabulary import Vocabulary
from jaxmnt.errors import ConfigError, printable
from jaxmnt.strict_json import json_text


class ModelChat:
    """Renders conversations for a model, and encodes them."""

    def __init__(self, chat: ChatFormat | None, vocabulary: Vocabulary, *, is_trained: bool):
        """`chat` is None if the model has no chat template. Its use then raises `ConfigError`. With `is_trained`, the
        run's own data has conversations in this format."""
        self._format, self._vocabulary, self._is_trained = chat, vocabulary, is_trained

    @functools.cached_property
    def _renderer(self) -> Renderer:
        """Renders conversations in a child process, which ends with this process."""
        if self._format is None:
            raise ConfigError(
                "--chat: the run has no chat template; leave it out, or train on data from prepare --chat, or begin "
                "with a model that has a template"
            )
        return Renderer(self._format)

    def check(self) -> None:
        """Raises `ConfigError` if the model has no chat template, or one that cannot be compiled."""
        _ = self._renderer

    def close(self) -> None:
        """Ends the child process, if there is one. Another `render` fails."""
        if "_renderer" in self.__dict__:
            self._renderer.close()

    def render(
        self, messages: Any, where: str, begins_turn: bool = True, variables: Mapping[str, Any] | None = None
    ) -> str:
        """Returns the text of a conversation. With `begins_turn`, it ends with the beginning of the model's next turn.

        `variables` are passed to the template in addition. Raises `ConfigError`, with `where`, if they are malformed.
        """
        renderer = self._renderer
        if not isinstance(messages, list) or not messages or not all(isinstance(entry, dict) for entry in messages):
            raise ConfigError(f'{where}: it must have "messages", a list of objects with "role" and "content"')
        for name in variables or {}:
            if name not in renderer.words:
                raise ConfigError(f"{where}: the chat template of the model does not read {printable(name)}; remove it")
        try:
            return renderer.render(messages, variables or {}, begins_turn)
        except RenderError as error:
            raise ConfigError(f"{where}: {error}") from error

    def ids(self, messages: Any, where: str, variables: Mapping[str, Any] | None = None) -> list[int]:
        """Returns the ids of a conversation up to the beginning of the model's next turn, as they are in training."""
        special = self._vocabulary.special_name_in(json_text([messages, variables or {}], ensure_ascii=False))
        if special is not None:
            raise ConfigError(f"{where}: it contains {printable(special)}, the name of a special token; remove it")
        text = self.render(messages, where, variables=variables)
        ids = self._vocabulary.encode(text, markup=True, where=where)
        # Training puts the end of a document before a conversation. A template cannot name it if tokens are bytes.
        needs_start = self._is_trained and self._vocabulary.is_bytes
        return self._vocabulary.start_ids + ids if needs_start else ids

    @functools.cached_property
    def stop_texts(self) -> tuple[str, ...]:
        """Texts that end an answer, because the tokenizer has no tokens for them."""
        names = () if self._format is None else self._format.end_tokens
        return tuple(name for name in names if self._vocabulary.id_of(name) is None)


def variables_of_line(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the variables that an input line passes to the chat template in addition to its messages.

    Raises `ConfigError` if they are malformed.
    """
    variables = {}
    for name in CHECKED_VARIABLES:
        objects = record.get(name)
        if objects is None:
            continue
        if not isinstance(objects, list) or not all(isinstance(entry, dict) for entry in objects):
            raise ConfigError(f'{where}: "{name}" must be a list of objects')
        variables[name] = objects
    extra = record.get("chat_template_kwargs")
    if extra is not None and not isinstance(extra, dict):
        raise ConfigError(f'{where}: "chat_template_kwargs" must be an object')
    for name in extra or {}:
        if name in ("messages", "add_generation_prompt") or name in variables:
            raise ConfigError(f'{where}: "chat_template_kwargs" must not set {name}, which the line already sets')
    return variables | (extra or {})
