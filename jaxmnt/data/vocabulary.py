"""Converts text to the tokens of a trained model, and back."""

from dataclasses import dataclass

from jaxmnt.data.chat.template import ChatFormat
from jaxmnt.data.tokenizer import Bytes, Form, HuggingFace, Tokenizer
from jaxmnt.errors import ConfigError


@dataclass(frozen=True)
class Vocabulary:
    """Converts text to a run's tokens and back."""

    tokenizer: Tokenizer
    size: int
    """Number of ids that the model has."""
    start_ids: list[int]
    """Ids that precede a text."""
    end_of_document: int | None
    """Id that ends a document. It also precedes an empty text if `start_ids` is empty."""
    stop_ids: frozenset[int]
    """Ids that end generation."""

    def encode(self, text: str, *, markup: bool = False, begins: bool = True, where: str = "--prompt") -> list[int]:
        """Returns the ids of a text, without `start_ids`.

        With `markup`, the names of special tokens are encoded as the tokens themselves. `begins` means that no other
        text precedes this one.
        """
        text = text.encode("utf-8", errors="replace").decode()  # an argument from the terminal may be invalid UTF-8
        ids: list[int] = self.tokenizer.encode_batch([text], Form(markup, begins))[0].tolist()
        if ids and max(ids) >= self.size:
            raise ConfigError(
                f"--tokenizer: it encodes {where} with id {max(ids)}, but the run has only ids below {self.size}; "
                "give the tokenizer that made its tokens"
            )
        return ids

    @property
    def is_bytes(self) -> bool:
        """True if tokens are bytes, which have no special tokens that a text could name."""
        return isinstance(self.tokenizer, Bytes)

    def id_of(self, token: str) -> int | None:
        """Returns the id of the token with this name; None if the tokenizer has no such token."""
        return self.tokenizer.ids.get(token) if isinstance(self.tokenizer, HuggingFace) else None

    def special_name_in(self, text: str) -> str | None:
        """Returns the first name of a special token in a text; None if there is none."""
        return self.tokenizer.special_name_in(text) if isinstance(self.tokenizer, HuggingFace) else None

    def with_start(self, ids: list[int]) -> list[int]:
        """Returns `start_ids` and the ids of a text. If both are empty, returns `end_of_document` alone, if there is
        one."""
        return self.start_ids + ids or ([] if self.end_of_document is None else [self.end_of_document])


def stop_ids(tokenizer: Tokenizer, end_of_document: int | None, chat: ChatFormat | None) -> set[int]:
    """Returns the ids that end a text: that of the end of a document, and those that end the turns of conversations."""
    ids = set() if end_of_document is None else {end_of_document}
    if chat is not None and isinstance(tokenizer, HuggingFace):
        ids |= {tokenizer.ids[token] for token in chat.end_tokens if token in tokenizer.ids}
    return ids
