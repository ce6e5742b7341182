"""The chat template that came with a model: which of its files has it, and the special tokens to which it refers."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxmnt.errors import ConfigError
from jaxmnt.storage import json_digest

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FILES = (TEMPLATE_FILE, "chat_template.json", "tokenizer_config.json")
"""Files of a model that may hold its chat template. The first file that has one is used."""

FORMAT_FILES = (*TEMPLATE_FILES, "special_tokens_map.json", "config.json", "generation_config.json")
"""Files of a model from which its `ChatFormat` is made."""

CHATML_TEMPLATE = """\
{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Renders conversations as `preparation.conversations` does without a template of a model."""

CHATML_END = "<|im_end|>"
"""The token that ends a turn of ChatML."""

_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True)
class ChatFormat:
    """A chat template, and what is needed to render conversations with it."""

    source: str
    """Where the template came from, for messages: `chatml`, or the name of a file."""
    template: str
    """The template, in the language of Jinja."""
    special_tokens: Mapping[str, str]
    """Special tokens to which the template refers by a name such as bos_token."""
    end_tokens: tuple[str, ...]
    """The tokens that end a turn or a text, without repetitions."""

    @property
    def digest(self) -> str:
        """SHA-256 of what determines the text of a conversation: the template and its special tokens."""
        return json_digest({"template": self.template, "special_tokens": dict(self.special_tokens)})

    def to_json(self) -> dict[str, Any]:
        """Returns the entry for a manifest. The template is stored in a file of its own."""
        return {
            "source": self.source,
            "special_tokens": dict(self.special_tokens),
            "end_tokens": list(self.end_tokens),
        }

    @staticmethod
    def from_json(entry: Mapping[str, Any], template: str) -> "ChatFormat":
        """Returns the format that `to_json` described."""
        return ChatFormat(
            str(entry["source"]), template, dict(entry["special_tokens"]), tuple(map(str, entry["end_tokens"]))
        )


def chat_template(files: Mapping[str, bytes]) -> tuple[str, str] | None:
    """Returns the chat template in the files that came with a model, and the name of its file; None if there is none.

    Raises `ConfigError` for a file with invalid contents.
    """
    if TEMPLATE_FILE in files:
        return decoded(files[TEMPLATE_FILE], TEMPLATE_FILE), TEMPLATE_FILE
    for name in TEMPLATE_FILES[1:]:
        template = object_in(files, name).get("chat_template")
        if isinstance(template, list):  # several named templates
            templates = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
            template = templates.get("default")
        if isinstance(template, str):
            return template, name
    return None


def chat_of_files(files: Mapping[str, bytes]) -> ChatFormat | None:
    """Returns the format of the conversations of a model, without end tokens; None if no file has a template."""
    template_and_source = chat_template(files)
    if template_and_source is None:
        return None
    template, source = template_and_source
    return ChatFormat(source, template, special_tokens(files, template), ())


def decoded(template: bytes, name: str) -> str:
    """Returns the text of a template. Raises `ConfigError` if it is not UTF-8."""
    try:
        return template.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"--chat: {name} is not UTF-8: {error}; copy it again") from error


def special_tokens(files: Mapping[str, bytes], template: str | None = None) -> dict[str, str]:
    """Returns the special tokens to which templates refer by a name such as bos_token; with `template`, only those
    whose names occur in it."""
    config = object_in(files, "special_tokens_map.json") | object_in(files, "tokenizer_config.json")
    tokens = {}
    for name in _SPECIAL_TOKENS:
        token = config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str) and (template is None or name in template):
            tokens[name] = token
    return tokens


def end_ids(files: Mapping[str, bytes]) -> list[int]:
    """Returns the ids that end a text or a turn, according to the configs that came with a model."""
    ids: list[int] = []
    for name in ("config.json", "generation_config.json"):
        config = object_in(files, name)
        section = config if "eos_token_id" in config else config.get("text_config", config)
        end = section.get("eos_token_id") if isinstance(section, dict) else None
        ends = end if isinstance(end, list) else [end]
        ids += [id for id in ends if isinstance(id, int) and id >= 0]
    return sorted(set(ids))


def object_in(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Returns the JSON object in one of the files that came with a model; an empty object if the file is missing.

    Raises `ConfigError` for a file that is not a JSON object.
    """
    try:
        content = json.loads(files.get(name, b"{}"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}, which came with the model, cannot be read: {error}; copy it again") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{name}, which came with the model, must be an object; copy it again")
    return content
