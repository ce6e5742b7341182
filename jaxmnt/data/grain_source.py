"""Uses a user's own `grain.MapDataset` as a source of training data.

A dataset must always return the same element for an index. Each start checks this: it reads a sample of elements twice
(from two datasets, if a function makes them), and the digest of the sample is compared between processes and with the
checkpoint. The lengths of documents must be known, so a run reads all documents once and stores their lengths and
checksums in an index. Later reads are compared with the index.
"""

import functools
import hashlib
import importlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxmnt.config.data import Grain
from jaxmnt.data.elements import CHANGED_MESSAGE, INDEX_COLUMNS, DocumentStream, Element, Elements, measure_elements
from jaxmnt.data.fields import Field
from jaxmnt.data.manifest import NAMELESS, SPLITS
from jaxmnt.data.store import Origin, TokenStream
from jaxmnt.errors import ConfigError, PreflightError, UnreadableError, printable, summary
from jaxmnt.storage import publish_bytes

if TYPE_CHECKING:
    import grain

INDEX_FOLDER = "data_index"
"""Folder in a run directory that stores the indices."""

_SAMPLED_ELEMENTS = 32
_ENDLESS_LENGTH = 2**60
_SHA256_BYTES = 32
_INDEX_TIMEOUT_SECONDS = 60.0
"""Maximum time until an index that another host wrote can be read from a network file system."""
_POLL_SECONDS = 0.5

Progress = Callable[[str], None]


@dataclass(frozen=True)
class GrainData:
    """A Grain source, which `open_grain` makes. It has the interface of `PreparedData`, except that rows have no
    stream."""

    path: str
    """Dotted path of the training dataset."""
    vocab_size: int
    elements: dict[str, Elements]
    """The elements of each split that has a dataset."""
    tokenizer: dict[str, Any]
    sample_digest: str
    """Digest of the sampled elements."""
    index_folder: Path | None
    """Folder that stores the indices of documents; None if they are not stored."""
    _indices: dict[str, "_Index"] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Digest of the sampled elements. When all documents are indexed, the digest of the indices is appended."""
        if self.holds_rows or len(self._indices) < len(self.elements):
            return self.sample_digest
        indices = "".join(self._indices[split].digest.hex() for split in sorted(self._indices))
        return self.sample_digest + hashlib.sha256(indices.encode()).hexdigest()

    @property
    def ids(self) -> int:
        """Exclusive upper bound of the token ids that occur."""
        return self.vocab_size

    @property
    def holds_rows(self) -> bool:
        """True if the elements are rows, and False if they are documents."""
        return self.elements["train"].kind == "rows"

    def tokens(self, split: str) -> int:
        if split not in self.elements:
            return 0
        if self.holds_rows:
            row = self.elements[split].read(0)
            assert row is not None
            return len(self.elements[split]) * len(row["tokens"])
        return self.stream(split).tokens

    def documents(self, split: str) -> int:
        """Returns the number of documents, or the number of rows if the dataset holds rows."""
        if split not in self.elements:
            return 0
        return len(self.elements[split]) if self.holds_rows else len(self.stream(split).document_starts)

    def unigram_nats(self, split: str) -> float | None:
        return None

    def bytes_per_target(self, split: str) -> float | None:
        return None

    def origin(self, split: str, document: int) -> Origin:
        number = document if self.holds_rows else int(np.flatnonzero(self._index(split).table[:, 0])[document])
        return Origin(self.elements[split].path, number + 1)

    def stream(self, split: str) -> TokenStream:
        assert not self.holds_rows
        return DocumentStream(self.elements[split], self._index(split).table, self.tokenizer["end_of_document"])

    def check(self) -> None:
        """Does nothing, because `open_grain` has already checked everything that does not require reading all
        elements."""

    def verify(self, progress: Progress = lambda name: None) -> None:
        """Reads every element. Raises `ConfigError` for the first element that has changed or cannot be trained on."""
        for split, elements in self.elements.items():
            index = None if self.holds_rows else self._index(split, progress)
            if index is not None and index.is_new:
                continue  # building the index has just read every element
            table = measure_elements(elements, self.tokenizer["end_of_document"], progress)
            if index is None:
                continue
            changed_elements = np.flatnonzero((table != index.table).any(axis=1))
            if changed_elements.size:
                raise elements.error_at(int(changed_elements[0]), CHANGED_MESSAGE)

    def make_index(self, progress: Progress) -> None:
        """Writes the index of each split into the folder, unless it exists. Raises `UnreadableError` if writing
        fails."""
        for split in [] if self.holds_rows else self.elements:
            index = self._index(split, progress)
            file = self._index_file(split)
            if file is None or not index.is_new:
                continue
            with _index_access(file.parent):
                file.parent.mkdir(parents=True, exist_ok=True)
                publish_bytes(file, index.digest + index.table.tobytes())

    def load_index(self, *, made_elsewhere: bool) -> None:
        """Loads the index of each split into memory, so that later reads do not need the folder.

        `made_elsewhere` is True if another process wrote the index. Raises `PreflightError` if this host cannot read
        an index in time.
        """
        for split in [] if self.holds_rows else self.elements:
            file = self._index_file(split)
            deadline = time.monotonic() + _INDEX_TIMEOUT_SECONDS
            while made_elsewhere and file is not None and _read_index(file, len(self.elements[split])) is None:
                if time.monotonic() > deadline:
                    raise PreflightError(
                        f"run.dir: process 0 has written {file}, but {socket.gethostname()} cannot read all of it; put "
                        "the run directory on a file system that all hosts share"
                    )
                time.sleep(_POLL_SECONDS)
            self._index(split)

    def _index(self, split: str, progress: Progress = lambda name: None) -> "_Index":
        """Returns the index from memory or from the folder, or else builds it by reading all documents."""
        if split not in self._indices:
            elements = self.elements[split]
            file = self._index_file(split)
            index = None if file is None else _read_index(file, len(elements))
            if index is None:
                table = measure_elements(elements, self.tokenizer["end_of_document"], progress)
                index = _Index(table, is_new=True)
            if not index.table[:, 0].any():
                raise ConfigError(f"{elements.key}: {elements.path} has no documents; give a dataset with documents")
            self._indices[split] = index
        return self._indices[split]

    def _index_file(self, split: str) -> Path | None:
        return None if self.index_folder is None else self.index_folder / f"{self.sample_digest[:16]}-{split}"


@dataclass(frozen=True)
class _Index:
    """Lengths and checksums of all documents of a split."""

    table: np.ndarray
    """The array that `elements.measure_elements` returned."""
    is_new: bool
    """True if this process has just built the index by reading all documents."""

    @functools.cached_property
    def digest(self) -> bytes:
        return hashlib.sha256(self.table).digest()


def open_grain(
    settings: Grain, key: str, prepared: Any, run_dir: str | Path | None, fields: tuple[Field, ...]
) -> GrainData:
    """Opens the datasets that the config section `key` names.

    `prepared` is the prepared data of another source, whose vocabulary the datasets share, or None. Indices of
    documents are stored in `run_dir`. `fields` are the fields of rows. Raises `ConfigError` for data that cannot be
    trained on, and `UnreadableError` if reading fails.
    """
    vocab_size, tokenizer = _vocabulary(settings, key, prepared)
    digest = hashlib.sha256(json.dumps([settings.elements, vocab_size, tokenizer["end_of_document"]]).encode())
    elements = {}
    for split in SPLITS:
        name = f"{key}.{split}"
        path = getattr(settings, split)
        if path is None:
            continue
        first, second = (
            Elements(_dataset(path, name), name, path, settings.elements, vocab_size, fields) for _ in range(2)
        )
        elements[split] = first
        # The digest covers the length and a sample, so that processes and later starts can compare their data.
        digest.update(f"{split} {len(first)}".encode())
        for element in _sample_twice(first, second):
            for name, array in sorted((element or {}).items()):
                digest.update(f"{name} {len(array)}".encode() + array.astype(array.dtype.newbyteorder("<")).tobytes())
    folder = None if run_dir is None else Path(run_dir, INDEX_FOLDER)
    return GrainData(elements["train"].path, vocab_size, elements, tokenizer, digest.hexdigest(), folder)


def _vocabulary(settings: Grain, key: str, prepared: Any) -> tuple[int, dict[str, Any]]:
    """Returns the vocabulary size and the tokenizer description: those of the prepared data, or else of the settings.

    Raises `ConfigError` if the two contradict each other.
    """
    if prepared is None:
        if settings.vocab_size is None:
            raise ConfigError(f"{key}.vocab_size: not set; give the number of token ids of {settings.train}")
        return settings.vocab_size, {"name": NAMELESS, "end_of_document": settings.end_of_document}
    expected = {"vocab_size": prepared.vocab_size, "end_of_document": prepared.tokenizer["end_of_document"]}
    for name, number in expected.items():
        setting = getattr(settings, name)
        if setting is not None and setting != number:
            raise ConfigError(
                f"{key}.{name}: {setting} differs from that of the prepared data in the same config ({number}); leave "
                "it out if both have the same tokenizer"
            )
    return prepared.vocab_size, prepared.tokenizer


def _dataset(path: str, key: str) -> "grain.MapDataset[Any]":
    """Returns the dataset at a dotted path, or the dataset that a function at that path returns."""
    import grain

    module, _, name = path.rpartition(".")
    try:
        dataset = getattr(importlib.import_module(module), name)
        if callable(dataset) and not isinstance(dataset, grain.MapDataset):
            dataset = dataset()
    except OSError as error:
        raise UnreadableError(
            f"{key}: {path} cannot be made: {printable(summary(error))}; check that it is mounted and readable"
        ) from error
    except Exception as error:  # the user's own code may raise anything
        raise ConfigError(
            f"{key}: {path} cannot be made: {printable(summary(error))}; it must be a grain.MapDataset, or a function "
            "without arguments that returns one, in a module that can be imported where the run is started"
        ) from error
    if isinstance(dataset, grain.IterDataset):
        raise ConfigError(f"{key}: {path} is an IterDataset, which has no random access; give a grain.MapDataset")
    if not isinstance(dataset, grain.MapDataset):
        raise ConfigError(
            f"{key}: {path} is a {type(dataset).__name__}, not a grain.MapDataset; convert it with "
            "grain.MapDataset.source(), which takes any object with __len__ and __getitem__"
        )
    try:
        count = len(dataset)
    except Exception as error:
        raise ConfigError(
            f"{key}: the length of {path} is unknown ({printable(summary(error))}); give its source a __len__"
        ) from error
    if count >= _ENDLESS_LENGTH:
        raise ConfigError(f"{key}: {path} is endless; leave out repeat(), because the run itself repeats epochs")
    if count == 0:
        raise ConfigError(f"{key}: {path} is empty; give a dataset with elements")
    return dataset


def _sample_twice(first: Elements, second: Elements) -> list[Element | None]:
    """Returns a sample of elements from all parts of a dataset.

    Raises `ConfigError` if `second`, which is the same dataset made again, has different elements.
    """
    if len(first) != len(second):
        raise ConfigError(
            f"{first.key}: {first.path} has {len(first)} elements, and {len(second)} when it is made again; make it "
            "deterministic"
        )
    elements = []
    for number in np.unique(np.linspace(0, len(first) - 1, _SAMPLED_ELEMENTS).astype(np.int64)).tolist():
        element = first.read(number)
        if not _equal(element, second.read(number)):
            raise first.error_at(
                number,
                "differs when it is read twice; make the dataset deterministic: seed() it, and use no other randomness",
            )
        elements.append(element)
    return elements


def _equal(first: Element | None, second: Element | None) -> bool:
    first = first or {}  # a document that is left out is None
    second = second or {}
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


def _read_index(file: Path, count: int) -> _Index | None:
    """Returns the index in a file; None if the file is missing or damaged, so that the index is built again."""
    with _index_access(file):
        try:
            content = memoryview(file.read_bytes())
        except FileNotFoundError:
            return None
    digest = content[:_SHA256_BYTES]
    table_bytes = content[_SHA256_BYTES:]
    if len(table_bytes) != count * INDEX_COLUMNS * 4:
        return None
    index = _Index(np.frombuffer(table_bytes, "<u4").reshape(count, INDEX_COLUMNS), is_new=False)
    return index if index.digest == digest else None


@contextmanager
def _index_access(path: Path) -> Iterator[None]:
    """Turns an `OSError` from reading or writing an index into an `UnreadableError`."""
    try:
        yield
    except OSError as error:
        raise UnreadableError(
            f"run.dir: {path} cannot be used: {error.strerror or error}; fix that, or choose another run.dir"
        ) from error
