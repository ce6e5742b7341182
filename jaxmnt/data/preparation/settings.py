"""How to prepare."""

from dataclasses import dataclass, field

from jaxmnt.data.preparation.document import Reading
from jaxmnt.data.preparation.shards import SHARD_TOKENS


@dataclass(frozen=True)
class Settings:
    """How to prepare. Everything but `workers` is part of what comes out."""

    tokenizer: str | None = "bytes"
    """bytes, the path of a tokenizer.json, or None for token arrays of a vocabulary of their own."""
    end_token: str | None = None
    train_tokenizer: int | None = None
    """Train a BPE of so many tokens on the input instead."""
    reading: Reading = field(default_factory=Reading)
    vocab_size: int | None = None
    """Of token arrays, where no tokenizer says it."""
    eval_fraction: float | None = 0.02
    """None: as much as is usual with these inputs."""
    skip_bad: bool = False
    workers: int = 1
    shard_tokens: int = SHARD_TOKENS
    part_bytes: int | None = None
    """Bytes of input a part; default by the size of the whole."""
