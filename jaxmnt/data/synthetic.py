"""Random tokens in memory, in place of prepared data, for benchmarks that should not depend on a disk."""

import hashlib
from functools import lru_cache
from typing import Any

import numpy as np

from jaxmnt.data.store import Origin, TokenStream

_TOKENS = {"train": 2**22, "eval": 2**14}
_DOCUMENT = 1024
"""Tokens of a document on average."""


class SyntheticData:
    """Offers what `PreparedData` offers. The same tokens everywhere, for a vocabulary of the given size."""

    path = "synthetic"

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    @property
    def tokenizer(self) -> dict[str, Any]:
        return {"name": "synthetic", "end_of_document": self.vocab_size - 1}

    @property
    def digest(self) -> str:
        return hashlib.sha256(f"synthetic/{self.vocab_size}".encode()).hexdigest()

    def tokens(self, split: str) -> int:
        return _TOKENS[split]

    def documents(self, split: str) -> int:
        return len(self.stream(split).document_starts)

    def unigram_nats(self, split: str) -> float | None:
        return None

    def stream(self, split: str) -> TokenStream:
        return _stream(self.vocab_size, split)

    def origin(self, split: str, document: int) -> Origin:
        return Origin("synthetic", document + 1)

    def check(self) -> None:
        """There are no files."""

    def verify(self, progress: Any = None) -> None:
        """There is nothing on a disk."""


@lru_cache(maxsize=2)
def _stream(vocab_size: int, split: str) -> TokenStream:
    generator = np.random.Generator(np.random.Philox(key=len(split)))
    tokens = generator.integers(0, vocab_size - 1, _TOKENS[split], np.int32)
    ends = np.flatnonzero(generator.random(len(tokens)) < 1 / _DOCUMENT)
    tokens[ends] = tokens[-1] = vocab_size - 1
    starts = np.concatenate([[0], ends[ends < len(tokens) - 1] + 1]).astype(np.int64)
    return TokenStream([tokens], lambda: starts, vocab_size - 1)
