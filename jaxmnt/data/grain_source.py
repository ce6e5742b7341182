"""A user's own `grain.MapDataset` as a source of training data.

The same index must always give the same element. So at each start some elements are read twice, from two datasets
where a function makes them, and their digest is compared between processes and with that in a checkpoint. Documents,
whose lengths have to be known, are all read once for a run: an index keeps their lengths and checksums, and what is
read later is compared with it.
"""

import hashlib
import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxmnt.config.schema import Grain
from jaxmnt.data.elements import CHANGED, DocumentStream, Element, Elements, measured
from jaxmnt.data.manifest import NAMELESS, SPLITS
from jaxmnt.data.store import Origin, TokenStream
from jaxmnt.errors import ConfigError, UnreadableError, UserError, printable, summary
from jaxmnt.storage import publish_bytes

if TYPE_CHECKING:
    import grain

INDEX_FOLDER = "data_index"
"""In a run directory."""

_SAMPLED = 32
_ENDLESS = 2**60
_SHA256_BYTES = 32


@dataclass(frozen=True)
class GrainData:
    """Offers what `PreparedData` offers, except for streams of whole rows. Made by `open_grain`."""

    elements: dict[str, Elements]
    """By split; a split that there is not is left out."""
    tokenizer: dict[str, Any]
    weighted: bool
    """Whether documents have weights."""
    row_length: int
    """Tokens of the first element."""
    digest: str
    """Of what was sampled."""
    index_folder: Path | None
    """Where indices of documents are kept; None: nowhere."""
    _indices: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return self.elements["train"].path

    @property
    def vocab_size(self) -> int:
        return self.elements["train"].vocab_size

    @property
    def holds_rows(self) -> bool:
        return self.elements["train"].kind == "rows"

    def tokens(self, split: str) -> int:
        if split not in self.elements:
            return 0
        return len(self.elements[split]) * self.row_length if self.holds_rows else self.stream(split).tokens

    def documents(self, split: str) -> int:
        """How many there are; of a dataset of rows, the rows."""
        if split not in self.elements:
            return 0
        return len(self.elements[split]) if self.holds_rows else len(self.stream(split).document_starts)

    def unigram_nats(self, split: str) -> float | None:
        return None

    def origin(self, split: str, document: int) -> Origin:
        number = document if self.holds_rows else int(np.flatnonzero(self.index(split)[:, 0])[document])
        return Origin(self.elements[split].path, number + 1)

    def stream(self, split: str) -> TokenStream:
        assert not self.holds_rows
        return DocumentStream(self.elements[split], self.index(split), self.tokenizer["end_of_document"], self.weighted)

    def check(self) -> None:
        """What can be known without reading all of it was looked at when it was opened."""

    def verify(self, progress: Callable[[str], None] = lambda name: None) -> None:
        """Reads every element. Raises `ConfigError` for the first that cannot be trained on, or that has changed."""
        end = self.tokenizer["end_of_document"]
        for split, elements in self.elements.items():
            found = measured(elements, end, self.weighted, progress)
            if not self.holds_rows and (changed := np.flatnonzero((found != self.index(split)).any(axis=1))).size:
                raise elements.refusal(int(changed[0]), CHANGED)

    def make_index(self, progress: Callable[[str], None]) -> None:
        """Writes the index of each split into the folder, unless it is there."""
        for split in [] if self.holds_rows else self.elements:
            found = self.index(split, progress)
            if self.index_folder is not None and _kept(self._index_file(split), len(found)) is None:
                self.index_folder.mkdir(parents=True, exist_ok=True)
                content = found.astype("<u4").tobytes()
                publish_bytes(self._index_file(split), hashlib.sha256(content).digest() + content)

    def load_index(self) -> None:
        """Holds the index of each split in memory, from here on independent of the folder."""
        for split in [] if self.holds_rows else self.elements:
            self.index(split)

    def index(self, split: str, progress: Callable[[str], None] = lambda name: None) -> np.ndarray:
        """uint32 [documents, 2]: length, with the end, and checksum of each; 0 of those that are left out."""
        if split not in self._indices:
            elements, kept = self.elements[split], None
            if self.index_folder is not None:
                kept = _kept(self._index_file(split), len(elements))
            if kept is None:
                kept = measured(elements, self.tokenizer["end_of_document"], self.weighted, progress)
            self._indices[split] = kept
        return self._indices[split]

    def _index_file(self, split: str) -> Path:
        assert self.index_folder is not None
        return self.index_folder / f"{self.digest[:16]}-{split}"


def open_grain(settings: Grain, key: str, like: Any = None, run_dir: Path | None = None) -> GrainData:
    """The datasets that a section `key` of the config names.

    `like` is prepared data beside it, whose vocabulary it shares; `run_dir` keeps indices of documents. Raises
    `ConfigError` for what cannot be trained on, and `UnreadableError` where reading fails.
    """
    vocab_size, tokenizer = _vocabulary(settings, key, like)
    paths = {"train": settings.train, "eval": settings.eval}
    elements, samples = {}, {}
    for split in SPLITS:
        if (path := paths[split]) is None:
            continue
        name = f"{key}.{split}"
        first, again = (Elements(_dataset(path, name), name, path, settings.elements, vocab_size) for _ in range(2))
        elements[split] = first
        try:
            samples[split] = _sampled(first, again)
        except ConfigError:
            raise
        except UserError as error:
            raise UnreadableError(str(error)) from error
    digest = hashlib.sha256(json.dumps([settings.elements, vocab_size, tokenizer["end_of_document"]]).encode())
    for split, found in samples.items():
        digest.update(f"{split} {len(elements[split])}".encode())
        for element in found:
            for name, array in sorted((element or {}).items()):
                digest.update(f"{name} {len(array)}".encode() + array.astype(array.dtype.newbyteorder("<")).tobytes())
    known = [element for found in samples.values() for element in found if element is not None]
    if not known:
        raise ConfigError(
            f"{key}.train: none of the sampled elements of {settings.train} is a document; give a "
            "dataset that has documents"
        )
    weighted = any("weights" in element for element in known)
    folder = None if run_dir is None else run_dir / INDEX_FOLDER
    return GrainData(elements, tokenizer, weighted, len(known[0]["tokens"]), digest.hexdigest(), folder)


def _vocabulary(settings: Grain, key: str, like: Any) -> tuple[int, dict[str, Any]]:
    """How many ids there are, and which tokenizer they are of."""
    if like is None:
        if settings.vocab_size is None:
            raise ConfigError(f"{key}.vocab_size: not set; give the number of token ids of {settings.train}")
        return settings.vocab_size, {"name": NAMELESS, "end_of_document": settings.end_of_document}
    own = {"vocab_size": settings.vocab_size, "end_of_document": settings.end_of_document}
    theirs = {"vocab_size": like.vocab_size, "end_of_document": like.tokenizer["end_of_document"]}
    for name, value in own.items():
        if value is not None and value != theirs[name]:
            raise ConfigError(
                f"{key}.{name}: {value} is not that of the prepared data beside it ({theirs[name]}); leave it out if "
                "both have the same tokenizer"
            )
    return like.vocab_size, like.tokenizer


def _dataset(path: str, key: str) -> "grain.MapDataset[Any]":
    """The dataset at a dotted path, or what the function there returns."""
    import grain

    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
        if callable(found) and not isinstance(found, grain.MapDataset):
            found = found()
    except OSError as error:
        raise UnreadableError(
            f"{key}: {path} cannot be made: {printable(summary(error))}; check that it is mounted and readable"
        ) from error
    except Exception as error:  # it is the user's own code that runs
        raise ConfigError(
            f"{key}: {path} cannot be made: {printable(summary(error))}; it must be a grain.MapDataset, or a function "
            "without arguments that returns one, in a module that can be imported where the run is started"
        ) from error
    if isinstance(found, grain.IterDataset):
        raise ConfigError(f"{key}: {path} is an IterDataset, which has no random access; give a grain.MapDataset")
    if not isinstance(found, grain.MapDataset):
        raise ConfigError(
            f"{key}: {path} is a {type(found).__name__}, not a grain.MapDataset; make it one: "
            "grain.MapDataset.source() takes what has a length and items"
        )
    return _of_known_length(found, path, key)


def _of_known_length(dataset: "grain.MapDataset[Any]", path: str, key: str) -> "grain.MapDataset[Any]":
    try:
        count = len(dataset)
    except Exception as error:
        raise ConfigError(
            f"{key}: the length of {path} is unknown ({printable(summary(error))}); give its source a __len__"
        ) from error
    if count >= _ENDLESS:
        raise ConfigError(f"{key}: {path} is endless; leave out repeat(), since epochs are repeated by the run")
    if count == 0:
        raise ConfigError(f"{key}: {path} is empty; give a dataset with elements")
    return dataset


def _sampled(first: Elements, again: Elements) -> list[Element | None]:
    """Elements from all over a dataset, read twice. Raises `ConfigError` where that makes a difference."""
    if len(first) != len(again):
        raise ConfigError(
            f"{first.key}: {first.path} has {len(first)} elements, and {len(again)} when it is made again; make it "
            "deterministic"
        )
    found = []
    for number in np.unique(np.linspace(0, len(first) - 1, _SAMPLED).astype(np.int64)).tolist():
        element, other = first.read(number), again.read(number)
        if not _equal(element, other):
            raise first.refusal(
                number,
                (
                    "differs when it is read twice; make the dataset deterministic: seed() it, and use no other "
                    "randomness"
                ),
            )
        found.append(element)
    return found


def _equal(one: Element | None, other: Element | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def _kept(file: Path, count: int) -> np.ndarray | None:
    """The index in a file; None if it is not there or not whole, in which case it is made anew."""
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return None
    digest, values = content[:_SHA256_BYTES], content[_SHA256_BYTES:]
    if hashlib.sha256(values).digest() != digest or len(values) != count * 8:
        return None
    return np.frombuffer(values, "<u4").reshape(count, 2)
