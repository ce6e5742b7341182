"""Opens the data sources of a config, copies them to local storage, and makes synthetic data."""

import fcntl
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from jaxmnt.config.data import Data
from jaxmnt.config.schema import Config
from jaxmnt.data.chat.template import ChatFormat
from jaxmnt.data.fields import batch_fields
from jaxmnt.data.grain_source import GrainData, open_grain
from jaxmnt.data.manifest import HOW_TO_REPAIR, MANIFEST, NAMELESS
from jaxmnt.data.order import MixturePhase
from jaxmnt.data.store import Origin, PreparedData, StoredTokens, TokenStream, open_prepared
from jaxmnt.errors import ConfigError, UnreadableError, UserError

_SYNTHETIC_TOKENS = {"train": 2**22, "eval": 2**14}
_MEAN_DOCUMENT_TOKENS = 1024
"""Mean number of tokens of a synthetic document."""


class SyntheticData:
    """Random tokens with the interface of `PreparedData`. They depend only on the vocabulary size."""

    path = "synthetic"

    def __init__(self, vocab_size: int):
        self.vocab_size = self.ids = vocab_size
        self.tokenizer = {"name": "synthetic", "end_of_document": vocab_size - 1}
        self.digest = hashlib.sha256(f"synthetic/{vocab_size}".encode()).hexdigest()

    def tokens(self, split: str) -> int:
        return _SYNTHETIC_TOKENS[split]

    def documents(self, split: str) -> int:
        return len(self.stream(split).document_starts)

    def unigram_nats(self, split: str) -> float | None:
        return None

    def bytes_per_target(self, split: str) -> float | None:
        return None

    def stream(self, split: str) -> TokenStream:
        return _stream(self.vocab_size, split)

    def origin(self, split: str, document: int) -> Origin:
        return Origin("synthetic", document + 1)

    def check(self) -> None:
        """Does nothing: there are no files."""

    def verify(self, progress: Any = None) -> None:
        """Does nothing: there are no files."""


@lru_cache(maxsize=2)
def _stream(vocab_size: int, split: str) -> TokenStream:
    generator = np.random.Generator(np.random.Philox(key=len(split)))
    tokens = generator.integers(0, vocab_size - 1, _SYNTHETIC_TOKENS[split], np.int32)
    ends = np.flatnonzero(generator.random(len(tokens)) < 1 / _MEAN_DOCUMENT_TOKENS)
    tokens[ends] = tokens[-1] = vocab_size - 1
    starts = np.concatenate([[0], ends[ends < len(tokens) - 1] + 1]).astype(np.int64)
    return StoredTokens([tokens], lambda: starts, vocab_size - 1)


_COPY_BYTES = 2**22
"""Number of bytes that are copied at a time."""


def stage(data: PreparedData, directory: Path, progress: Callable[[str], None] = lambda text: None) -> Path:
    """Copies data into a folder below `directory`, unless it is there already, and returns the folder.

    Every file is compared with its digest while it is copied. The manifest is copied last, so that an incomplete copy
    does not count as prepared data. Raises `ConfigError` for a damaged file, and `UserError` if the disk is full.
    """
    target = directory / data.digest[:16]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / f"{target.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the other processes of this host wait here and then use the copy
            if not _is_complete(target, data):
                _copy_all(data, target, progress)
    except OSError as error:
        raise UserError(
            f"data.stage_dir: {directory} cannot take the data: {error.strerror or error}; "
            "free space there, choose another folder, or leave data.stage_dir out"
        ) from error
    return target


def _is_complete(target: Path, data: PreparedData) -> bool:
    """Returns True if the copy exists with all of its files. Their contents are not checked; `data.verify` does
    that."""
    if not (target / MANIFEST).exists():
        return False
    try:
        copy = open_prepared(target, "data.stage_dir")
        copy.check()
    except ConfigError:
        return False
    return copy.digest == data.digest


def _copy_all(data: PreparedData, target: Path, progress: Callable[[str], None]) -> None:
    shutil.rmtree(target, ignore_errors=True)
    for name, expected in data.files():
        progress(name)
        source, copy = data.path / name, target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if _copy(source, copy) != expected:
            raise ConfigError(
                f"data.path: {source} is damaged: its SHA-256 differs from that in the manifest; {HOW_TO_REPAIR}"
            )
    temporary = target / f".{MANIFEST}"
    shutil.copyfile(data.path / MANIFEST, temporary)
    temporary.replace(target / MANIFEST)


def _copy(source: Path, target: Path) -> str:
    """Copies a file and returns the SHA-256 of what was read."""
    digest = hashlib.sha256()
    with target.open("wb") as writing:
        for piece in _pieces(source):
            digest.update(piece)
            writing.write(piece)
        writing.flush()
        os.fsync(writing.fileno())
    return digest.hexdigest()


def _pieces(source: Path) -> Iterator[bytes]:
    try:
        with source.open("rb") as reading:
            while piece := reading.read(_COPY_BYTES):
                yield piece
    except OSError as error:
        raise ConfigError(f"data.path: {source} cannot be read ({error.strerror}); copy or prepare it again") from error


Part = PreparedData | SyntheticData | GrainData


@dataclass(frozen=True)
class Sources:
    """The opened data sources of a config, by name and sorted by name."""

    parts: dict[str, Part]
    eval_sets: dict[str, PreparedData] = field(default_factory=dict)
    """Data sets that are only evaluated, by name."""

    @property
    def vocab_size(self) -> int:
        return self._first.vocab_size

    @property
    def ids(self) -> int:
        """Exclusive upper bound of the token ids that occur."""
        return max(part.ids for part in (*self.parts.values(), *self.eval_sets.values()))

    @property
    def tokenizer(self) -> dict[str, Any]:
        return self._first.tokenizer

    @functools.cached_property
    def chat(self) -> ChatFormat | None:
        """The format of the conversations in all sources; None if no source has any.

        Raises `ConfigError` if two sources were prepared with different chat templates.
        """
        formats = {name: part.chat for name, part in self.parts.items() if isinstance(part, PreparedData)}
        with_chat = {name: chat for name, chat in formats.items() if chat is not None}
        if not with_chat:
            return None
        first, *others = with_chat
        for name in others:
            if with_chat[name].digest != with_chat[first].digest:
                raise ConfigError(
                    f"data.sources: {first} and {name} were prepared with different chat templates, "
                    f"{with_chat[first].source} and {with_chat[name].source}; prepare both with the same "
                    "--chat-template"
                )
        end_tokens = sorted({token for chat in with_chat.values() for token in chat.end_tokens})
        return replace(with_chat[first], end_tokens=tuple(end_tokens))

    @property
    def is_text(self) -> bool:
        """True if a known tokenizer encoded the data, so that its tokens can be decoded."""
        return self.tokenizer["name"] not in (NAMELESS, "synthetic")

    @property
    def end_of_document(self) -> int | None:
        """The id that follows every document, or None if there is no such id."""
        return self.tokenizer["end_of_document"]

    @property
    def folder(self) -> Path:
        """The folder of the first prepared data, which has the tokenizer file; the current folder if there is none."""
        return next((part.path for part in self.parts.values() if isinstance(part, PreparedData)), Path())

    @property
    def digests(self) -> dict[str, str]:
        """Digest of each source's contents; stored in checkpoints."""
        return {name: part.digest for name, part in self.parts.items()}

    @functools.cached_property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.digests, sort_keys=True).encode()).hexdigest()

    def tokens(self, split: str) -> int:
        return sum(part.tokens(split) for part in self.parts.values())

    def at(self, paths: dict[str, Path]) -> "Sources":
        """Returns these sources with the prepared data of each name in `paths` read from that folder."""
        moved = {
            name: replace(part, path=paths[name]) for name, part in self.parts.items() if isinstance(part, PreparedData)
        }
        return replace(self, parts=self.parts | moved)

    @property
    def _first(self) -> Part:
        return next(iter(self.parts.values()))


def open_sources(settings: Data, run_dir: str | Path | None = None, *, check_files: bool = True) -> Sources:
    """Opens the sources of a config. Raises `ConfigError` if data is missing or damaged, or if vocabularies differ.

    The indices of Grain datasets, which take long to build, are stored in `run_dir`. Without `check_files`, only
    manifests of prepared data are read; `check_sources` checks the other files.
    """
    named = settings.named_sources
    if settings.synthetic is not None:
        return Sources(dict.fromkeys(named, SyntheticData(settings.synthetic)))
    keys = {name: f"data.sources.{name}" if settings.sources else "data" for name in named}
    # Open prepared data first, because Grain datasets take their vocabulary from it.
    prepared = {
        name: _open(source.path, f"{keys[name]}.path") for name, source in named.items() if source.grain.train is None
    }
    first_prepared = next(iter(prepared.values()), None)
    fields = batch_fields(settings)
    parts: dict[str, Part] = {
        name: prepared.get(name) or open_grain(source.grain, f"{keys[name]}.grain", first_prepared, run_dir, fields)
        for name, source in named.items()
    }
    eval_sets = {
        name: _open(entry.path, f"data.eval_sets.{name}.path") for name, entry in sorted(settings.eval_sets.items())
    }
    sources = Sources(parts, eval_sets)
    # All sources must share one tokenizer.
    expected = sources.vocab_size, sources.tokenizer
    for name, eval_set in eval_sets.items():
        if (eval_set.vocab_size, eval_set.tokenizer) != expected:
            raise ConfigError(
                f"data.eval_sets.{name}: it was prepared with a different tokenizer than the training data; prepare it "
                "with the same tokenizer"
            )
    for name, part in parts.items():
        if (part.vocab_size, part.tokenizer) != expected:
            problem = (
                "have different vocabularies; set the same grain.vocab_size and grain.end_of_document in both"
                if first_prepared is None
                else "were prepared with different tokenizers, or have different numbers of ids; prepare all sources "
                "with the same tokenizer"
            )
            raise ConfigError(f"data.sources: {next(iter(parts))} and {name} {problem}")
    if check_files:
        check_sources(sources)
    _ = sources.chat  # raises an error if the sources have different chat templates
    return sources


def check_sources(sources: Sources) -> None:
    """Checks the files of all sources. Raises `UnreadableError` if one is missing or damaged."""
    for part in (*sources.eval_sets.values(), *sources.parts.values()):
        with _reading(part.path):
            part.check()


@contextmanager
def _reading(path: str | Path) -> Iterator[None]:
    """Turns an error about missing, incomplete or damaged data into an `UnreadableError`."""
    try:
        yield
    except ConfigError as error:
        raise UnreadableError(str(error)) from error
    except OSError as error:
        raise UnreadableError(
            f"data.path: {error.filename or path} cannot be read ({error.strerror or error}); check that it is "
            "mounted and readable"
        ) from error


def phases(settings: Data) -> list[MixturePhase]:
    """Returns the phases of the mixture, with the weights of the sources sorted by name."""
    weights = {name: source.weight for name, source in settings.named_sources.items()}
    mixture = [MixturePhase(0, tuple(weights.values()))]
    for change in settings.weight_changes:
        weights |= change.weights
        mixture.append(MixturePhase(change.from_step, tuple(weights.values())))
    return mixture


def on_end(settings: Data, name: str) -> str:
    """Returns `repeat` or `stop`, which says what happens after an epoch of this source."""
    return settings.named_sources[name].on_end or settings.on_end


def _open(path: str | None, key: str) -> PreparedData:
    if path is None:
        raise ConfigError(
            f"{key}: not set; prepare data with python -m jaxmnt.prepare --input TEXT --output DIR, and give its folder"
        )
    with _reading(path):
        return open_prepared(path, key)


def fit_to_data(config: Config, data: Sources) -> Config:
    """Returns the config with `model.vocab_size` filled in from the data if it is not set.

    The embedding may have more rows than the vocabulary has ids, because the logits of the other rows are masked. It
    may have fewer rows if the missing ids do not occur; for example, Gemma 3 has no row for its image token. Raises
    `ConfigError` if the data has an id without a row.
    """
    size = config.model.vocab_size
    if size is None:
        return config.changed({"model.vocab_size": -(-data.vocab_size // 64) * 64})
    if data.ids > size:
        fix = f"raise it to {data.vocab_size} or more, or leave it out"
        if config.run.init_from or config.run.fork_from:
            fix = "the data was prepared with another tokenizer; prepare it again with that of the model"
        raise ConfigError(
            f"model.vocab_size: the data has ids up to {data.ids - 1}, and the model only {size} rows; {fix}"
        )
    return config
