"""Turning text into token ids and back."""

from typing import Any, Protocol

import numpy as np

from jaxmnt.errors import ConfigError, nearest


class Tokenizer(Protocol):
    """What preparing data and sampling need of a tokenizer."""

    name: str
    vocab_size: int
    end_of_document: int
    """The id that follows every document, and that stands before the first."""

    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text` without the end of document, in the smallest unsigned dtype that fits."""

    def decode(self, tokens: np.ndarray) -> str:
        """Text of token ids; ids that are no text (such as the end of document) are left out."""


class Bytes:
    """UTF-8 bytes as ids 0–255, and 256 for the end of a document."""

    name = "bytes"
    vocab_size = 257
    end_of_document = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8", errors="replace"), np.uint8)

    def decode(self, tokens: np.ndarray) -> str:
        kept = np.asarray(tokens)[np.asarray(tokens) < 256]
        return kept.astype(np.uint8).tobytes().decode("utf-8", errors="replace")


TOKENIZERS: dict[str, type[Bytes]] = {"bytes": Bytes}


def make_tokenizer(description: dict[str, Any]) -> Tokenizer:
    """The tokenizer that a manifest or the command line describes. Raises `ConfigError` for an unknown one."""
    name = str(description.get("name"))
    if name not in TOKENIZERS:
        raise ConfigError(f"tokenizer {name!r} is unknown; {nearest(name, sorted(TOKENIZERS))}")
    return TOKENIZERS[name]()
