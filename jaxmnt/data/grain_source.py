"""A user's own `grain.MapDataset` as a source of training data: of documents, or of whole rows.

Shapes: L tokens of a row, n of a document.

An element is a mapping. Of a document it has `tokens` (integers [n]) and perhaps `weights` ([n], 0 where a token is no
target); of a row `tokens` and `targets` (integers [L]) and perhaps `weights`, `segments` and `positions` ([L], see
`rows.Rows`). Other fields are ignored. Documents that are None or empty are left out.

The same index must always give the same element. So at each start some elements are read twice, from two datasets
where a function makes them, and their digest is compared between processes and with that in a checkpoint. Documents,
whose lengths have to be known, are all read once for a run: an index keeps their lengths and checksums, and what is
read later is compared with it.
"""

import hashlib
import importlib
import json
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grain
import numpy as np

from jaxmnt.config.schema import Data, Grain
from jaxmnt.data.manifest import NAMELESS, SPLITS
from jaxmnt.data.rows import RowReader, Rows, make_reader
from jaxmnt.data.store import Origin, TokenStream
from jaxmnt.errors import ConfigError, UnreadableError, UserError, printable, summary
from jaxmnt.storage import publish_bytes

INDEX_FOLDER = "data_index"
"""In a run directory."""

_SAMPLED = 32
_ENDLESS = 2**60
_INDEX_THREADS = 16
_INDEX_AHEAD = 256
_CACHED_TOKENS = 2**22
_SHA256_BYTES = 32
_INTEGER_FIELDS = ("tokens", "targets", "segments", "positions")

Element = dict[str, np.ndarray]
"""Integers are int32, weights float32; all have one length."""


@dataclass(frozen=True)
class Elements:
    """The elements of a dataset, as arrays that are what they have to be. Thread-safe, as Grain's own reading is."""

    dataset: "grain.MapDataset[Any]"
    key: str
    """The setting that names it."""
    path: str
    """Its dotted path."""
    kind: str
    """documents or rows."""
    vocab_size: int

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, number: int) -> Element | None:
        """An element; None for a document that is left out.

        Raises `ConfigError` for one that cannot be trained on, `UserError` where reading it fails.
        """
        try:
            raw = self.dataset[number]
        except OSError as error:
            raise UserError(f"{self._name(number)} cannot be read: {summary(error)}; fix the access") from error
        except Exception as error:  # it is the user's own code that runs
            raise self.refusal(number, f"cannot be made: {printable(summary(error))}; correct the dataset") from error
        rows = self.kind == "rows"
        if raw is None and not rows:
            return None
        if raw is None:
            raise self.refusal(number, "is None, as where a filter leaves a hole; give a dataset of rows alone")
        needed = ("tokens", "targets") if rows else ("tokens",)
        if not isinstance(raw, Mapping) or any(name not in raw for name in needed):
            shown = (
                f"the fields {sorted(map(str, raw))}"
                if isinstance(raw, Mapping)
                else f"a value of type {type(raw).__name__}"
            )
            raise self.refusal(
                number,
                f"is not a mapping with {' and '.join(needed)}, but {printable(shown)}; add a map() that makes one",
            )
        names = (*_INTEGER_FIELDS, "weights") if rows else ("tokens", "weights")
        element = {name: self._array(number, name, raw[name]) for name in names if raw.get(name) is not None}
        if different := [name for name in element if len(element[name]) != len(element["tokens"])]:
            raise self.refusal(
                number,
                f"has {len(element['tokens'])} tokens and {len(element[different[0]])} {different[0]}; "
                "give as many of each",
            )
        return element if len(element["tokens"]) or rows else None

    def refusal(self, number: int, words: str) -> ConfigError:
        return ConfigError(f"{self._name(number)} {words}")

    def _name(self, number: int) -> str:
        return f"{self.key}: element {number} of {self.path}"

    def _array(self, number: int, name: str, value: Any) -> np.ndarray:
        """One field, checked."""
        array = np.asarray(value)
        if name == "weights":
            if array.ndim != 1 or array.dtype.kind not in "biuf" or not np.isin(array, (0, 1)).all():
                raise self.refusal(number, "has weights that are not a vector of 0 and 1; correct them")
            return array.astype(np.float32)
        if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
            raise self.refusal(
                number, f"has {name} of type {array.dtype} and shape {list(array.shape)}; give a vector of integers"
            )
        limit = self.vocab_size if name in ("tokens", "targets") else 2**31
        if array.size and not 0 <= int(array.min()) <= int(array.max()) < limit:
            odd = array[(array < 0) | (array >= limit)][0]
            raise self.refusal(number, f"has {odd} among its {name}, which must be from 0 to {limit - 1}; correct it")
        return array.astype(np.int32)


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

    def reader(self, split: str, settings: Data) -> RowReader:
        """Rows of a split."""
        if self.holds_rows:
            return GivenRows(self.elements[split], settings)
        return make_reader(self.stream(split), settings.rows, settings.sequence_length, settings.document_mask)

    def stream(self, split: str) -> TokenStream:
        assert not self.holds_rows
        return DocumentStream(self.elements[split], self.index(split), self.tokenizer["end_of_document"], self.weighted)

    def check(self) -> None:
        """What can be known without reading all of it was looked at when it was opened."""

    def verify(self, progress: Callable[[str], None] = lambda name: None) -> None:
        """Reads every element. Raises `ConfigError` for the first that cannot be trained on, or that has changed."""
        end = self.tokenizer["end_of_document"]
        for split, elements in self.elements.items():
            found = _measured(elements, end, self.weighted, progress)
            if not self.holds_rows and (changed := np.flatnonzero((found != self.index(split)).any(axis=1))).size:
                raise elements.refusal(int(changed[0]), _CHANGED)

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
                kept = _measured(elements, self.tokenizer["end_of_document"], self.weighted, progress)
            self._indices[split] = kept
        return self._indices[split]

    def _index_file(self, split: str) -> Path:
        assert self.index_folder is not None
        return self.index_folder / f"{self.digest[:16]}-{split}"


class DocumentStream(TokenStream):
    """The documents of a dataset, one after another. Those that were read last are held in memory."""

    def __init__(self, elements: Elements, index: np.ndarray, end: int | None, weighted: bool):
        self._elements, self._index, self._weighted = elements, index, weighted
        self._numbers = np.flatnonzero(index[:, 0])
        lengths = index[self._numbers, 0].astype(np.int64)
        super().__init__(lambda: np.cumsum(lengths) - lengths, end)
        self.tokens, self.has_learn_mask = int(lengths.sum()), weighted
        self._recent = _Recent(self._read_document)

    def read_all(self, starts: np.ndarray, outs: Sequence[np.ndarray]) -> None:
        self._copy(starts, outs, "tokens")

    def read_all_learn(self, starts: np.ndarray, outs: Sequence[np.ndarray]) -> None:
        self._copy(starts, outs, "weights")

    def _copy(self, starts: np.ndarray, outs: Sequence[np.ndarray], name: str) -> None:
        documents = self.documents(starts)
        within = starts - self.document_starts[documents]
        for out, document, first in zip(outs, documents.tolist(), within.tolist(), strict=True):
            done = 0
            while done < len(out):
                piece = self._recent.get(document)[name][first : first + len(out) - done]
                out[done : done + len(piece)] = piece
                done, document, first = done + len(piece), document + 1, 0

    def _read_document(self, document: int) -> Element:
        number = int(self._numbers[document])
        found = _document(self._elements, number, self.end_of_document, self._weighted)
        if found is None or _fingerprint(found) != tuple(self._index[number].tolist()):
            raise self._elements.refusal(number, _CHANGED)
        return found


_CHANGED = (
    "is not what it was when the run indexed its documents; a dataset must give the same each time it is read: make it "
    "deterministic, or choose another run.dir for another dataset"
)


class GivenRows:
    """Rows as a dataset gives them."""

    def __init__(self, elements: Elements, settings: Data):
        self._elements, self._length, self._apart = elements, settings.sequence_length, settings.keeps_documents_apart
        self.rows = self.all_rows = len(elements)
        self._places = np.arange(self._length, dtype=np.int32)

    def read(self, rows: Sequence[int] | np.ndarray) -> Rows:
        found = [self._row(int(number)) for number in rows]
        return {name: np.stack([row[name] for row in found]) for name in (*_INTEGER_FIELDS, "weights")}

    def offsets(self, row: int) -> np.ndarray:
        return row * self._length + np.arange(self._length)

    def _row(self, number: int) -> Element:
        zeros, ones = np.zeros(self._length, np.int32), np.ones(self._length, np.int32)
        row = {"tokens": zeros, "targets": zeros, "segments": ones, "positions": self._places}
        if number >= self.rows:
            return row | {"weights": zeros.astype(np.float32)}
        given = self._elements.read(number)
        assert given is not None
        self._check(number, given)
        return row | {"weights": ones.astype(np.float32)} | given

    def _check(self, number: int, row: Element) -> None:
        if len(row["tokens"]) != self._length:
            raise self._elements.refusal(
                number, f"has {len(row['tokens'])} tokens, and data.sequence_length is {self._length}; make them equal"
            )
        several = row.get("segments", self._places[:0]).max(initial=0) > 1
        if not self._apart and (several or (row.get("positions", self._places) != self._places).any()):
            raise self._elements.refusal(
                number,
                "keeps documents apart by segments and positions; set data.document_mask: true, or leave these out",
            )


class _Recent:
    """A cache of documents that is bounded by their tokens."""

    def __init__(self, read: Callable[[int], Element]):
        self._read, self._lock = read, threading.Lock()
        self._held: OrderedDict[int, Element] = OrderedDict()
        self._tokens = 0

    def get(self, document: int) -> Element:
        with self._lock:
            if document in self._held:
                self._held.move_to_end(document)
                return self._held[document]
        found = self._read(document)  # without the lock: another thread may read the same, which does no harm
        with self._lock:
            if document not in self._held:
                self._held[document] = found
                self._tokens += len(found["tokens"])
            while self._tokens > _CACHED_TOKENS and len(self._held) > 1:
                self._tokens -= len(self._held.popitem(last=False)[1]["tokens"])
        return found


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
        raise ConfigError(f"{key}.train: {settings.train} has no document in its first elements; give one that has")
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
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
        if callable(found) and not isinstance(found, grain.MapDataset):
            found = found()
    except OSError as error:
        raise UnreadableError(f"{key}: {path} cannot be made: {printable(summary(error))}; fix the access") from error
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
                "differs when it is read twice; make the dataset deterministic: seed() it, and use no other chance",
            )
        found.append(element)
    return found


def _equal(one: Element | None, other: Element | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def _document(elements: Elements, number: int, end: int | None, weighted: bool) -> Element | None:
    """Tokens, with the end of document, and weights if documents have them. The end counts as the token before it."""
    found = elements.read(number)
    if found is None:
        return None
    if "weights" in found and not weighted:
        raise elements.refusal(number, "has weights, and the others that were sampled have none; give all of them some")
    tokens, weights = found["tokens"], found.get("weights", np.ones(len(found["tokens"]), np.float32))
    if end is not None and tokens[-1] != end:
        tokens, weights = np.append(tokens, np.int32(end)), np.append(weights, weights[-1])
    return {"tokens": tokens, "weights": weights}


def _fingerprint(document: Element) -> tuple[int, int]:
    """Length and checksum."""
    check = zlib.crc32(document["tokens"].astype("<i4").tobytes())
    return len(document["tokens"]), zlib.crc32(document["weights"].astype(np.uint8).tobytes(), check)


def _measured(elements: Elements, end: int | None, weighted: bool, progress: Callable[[str], None]) -> np.ndarray:
    """Length and checksum of every element, see `GrainData.index`; of rows no more than that they can be read."""

    def measure(number: int) -> tuple[int, int]:
        if elements.kind == "rows":
            elements.read(int(number))
            return 0, 0
        document = _document(elements, int(number), end, weighted)
        return (0, 0) if document is None else _fingerprint(document)

    options = grain.ReadOptions(num_threads=_INDEX_THREADS, prefetch_buffer_size=_INDEX_AHEAD)
    found = np.zeros((len(elements), 2), np.uint32)
    for number, pair in enumerate(grain.MapDataset.range(len(elements)).map(measure).to_iter_dataset(options)):
        found[number] = pair
        if number % 1000 == 0:
            progress(f"{elements.path}, element {number:,} of {len(elements):,}")
    return found


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
