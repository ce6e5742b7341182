"""Reads and checks the elements of a user's own `grain.MapDataset`, which are documents or complete rows.

Shapes: L tokens of a row, n tokens of a document.

An element is a mapping. A document has `tokens` (integers [n]) and optionally `weights` ([n], 0 where a token is not a
target). A row has `tokens` and `targets` (integers [L]), the fields of `data.fields`, and optionally `weights`,
`segments` and `positions` ([L], see `fields.FIELDS`). Other fields are ignored. Documents that are None or empty are
left out.
"""

import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxmnt.config.data import Data
from jaxmnt.data.fields import FIELDS, Field, batch_fields
from jaxmnt.data.rows import Rows
from jaxmnt.data.store import TokenStream
from jaxmnt.errors import ConfigError, UnreadableError, printable, summary

if TYPE_CHECKING:
    import grain

_INDEX_THREADS = 16
_INDEX_PREFETCH = 256
"""Threads that read elements for an index, and number of elements that they read ahead."""
_MAX_CACHED_TOKENS = 2**22
"""Maximum number of tokens in the cache of documents, unless one document has more."""

INDEX_COLUMNS = 3
"""Number of columns of the index that `measure_elements` returns."""

CHANGED_MESSAGE = (
    "is not what it was when the run indexed its documents; a dataset must return the same element each time: make it "
    "deterministic, or choose another run.dir for another dataset"
)

_DOCUMENT_FIELDS = ("tokens", "weights")
_OPTIONAL_FIELDS = ("weights", "segments", "positions")

Element = dict[str, np.ndarray]
"""Fields of an element by name: integers as int32, numbers and weights as float32, all of the same length."""


@dataclass(frozen=True)
class Elements:
    """Reads the elements of a dataset as validated arrays. Thread-safe, because reading from Grain is."""

    dataset: "grain.MapDataset[Any]"
    key: str
    """The config key that names the dataset."""
    path: str
    """Dotted path of the dataset."""
    kind: str
    """Either documents or rows."""
    vocab_size: int
    fields: tuple[Field, ...] = FIELDS
    """The fields of a row."""

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, number: int) -> Element | None:
        """Returns an element, or None for a document that is left out.

        Raises `ConfigError` for an element that cannot be trained on, and `UnreadableError` if the user's code fails,
        because that may be temporary.
        """
        try:
            raw = self.dataset[number]
        except Exception as error:  # the user's own code may raise anything
            raise UnreadableError(
                f"{self._describe(number)} cannot be read: {printable(summary(error))}; correct the dataset, or make "
                "the files that it reads available"
            ) from error
        has_rows = self.kind == "rows"
        if raw is None and not has_rows:
            return None
        if raw is None:
            raise self.error_at(
                number, "is None, as if a filter had removed an element; give a dataset without removed elements"
            )
        fields = [field for field in self.fields if has_rows or field.name in _DOCUMENT_FIELDS]
        required = [field.name for field in fields if field.name not in _OPTIONAL_FIELDS]
        if not isinstance(raw, Mapping) or any(name not in raw for name in required):
            actual = f"a value of type {type(raw).__name__}"
            if isinstance(raw, Mapping):
                actual = f"the fields {sorted(map(str, raw))}"
            raise self.error_at(
                number,
                f"is not a mapping with {' and '.join(required)}, but {printable(actual)}; return one by a map()",
            )
        present = [field for field in fields if raw.get(field.name) is not None]
        element = {field.name: self._array(number, field, raw[field.name]) for field in present}
        if different := [name for name in element if len(element[name]) != len(element["tokens"])]:
            raise self.error_at(
                number,
                f"has {len(element['tokens'])} tokens and {len(element[different[0]])} {different[0]}; "
                "give as many of each",
            )
        return element if len(element["tokens"]) or has_rows else None

    def error_at(self, number: int, problem: str) -> ConfigError:
        """Returns the error for an element of the dataset that cannot be used."""
        return ConfigError(f"{self._describe(number)} {problem}")

    def _describe(self, number: int) -> str:
        return f"{self.key}: element {number} of {self.path}"

    def _array(self, number: int, field: Field, value: Any) -> np.ndarray:
        """Returns one field as an array. Raises `ConfigError` if its type, shape or values are not allowed."""
        name = field.name
        try:
            array = np.asarray(value)
        except Exception as error:  # NumPy may raise any exception for a value that is not an array
            raise self.error_at(
                number,
                f"has {name} that are not an array ({printable(summary(error))}); give a vector of numbers",
            ) from error
        if name == "weights":
            if array.ndim != 1 or array.dtype.kind not in "biuf" or not np.isin(array, (0, 1)).all():
                raise self.error_at(number, "has weights that are not a vector of 0 and 1; correct them")
            return array.astype(np.float32)
        if field.dtype == "float32":
            if array.ndim != 1 or array.dtype.kind not in "iuf" or not np.isfinite(array).all():
                raise self.error_at(number, f"has {name} that are not a vector of finite numbers; correct them")
            return array.astype(np.float32)
        if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
            raise self.error_at(
                number,
                f"has {name} of type {array.dtype} and shape {list(array.shape)}; give a vector of integers",
            )
        minimum = 0 if field in FIELDS else -(2**31)
        maximum = (self.vocab_size if name in ("tokens", "targets") else 2**31) - 1
        if array.size and not minimum <= int(array.min()) <= int(array.max()) <= maximum:
            invalid = array[(array < minimum) | (array > maximum)][0]
            raise self.error_at(
                number, f"has {invalid} among its {name}, which must be from {minimum} to {maximum}; correct it"
            )
        return array.astype(np.int32)


class DocumentStream(TokenStream):
    """The documents of a dataset, as one stream of tokens. The documents that were read last are cached."""

    def __init__(self, elements: Elements, index: np.ndarray, end_id: int | None):
        """`index` is the array that `measure_elements` returns."""
        self._elements, self._index = elements, index
        self._numbers = np.flatnonzero(index[:, 0])
        lengths = index[self._numbers, 0].astype(np.int64)
        starts = np.cumsum(lengths) - lengths
        super().__init__(lambda: starts, end_id)
        self.tokens = int(lengths.sum())
        self.has_learn_mask = bool(index[:, 2].any())
        self._cache = _DocumentCache(self._read_document)

    def read_all(self, starts: np.ndarray, outs: Sequence[np.ndarray], field: str = "tokens") -> None:
        documents = self.documents(starts)
        offsets = starts - self.document_starts[documents]
        for out, document, first in zip(outs, documents.tolist(), offsets.tolist(), strict=True):
            copied = 0
            while copied < len(out):
                piece = self._cache.get(document)[field][first : first + len(out) - copied]
                out[copied : copied + len(piece)] = piece
                copied += len(piece)
                # The range continues at the start of the next document.
                document += 1
                first = 0

    def _read_document(self, document: int) -> Element:
        number = int(self._numbers[document])
        element = document_of(self._elements, number, self.end_of_document)
        if element is None or fingerprint(element) != tuple(self._index[number].tolist()):
            raise self._elements.error_at(number, CHANGED_MESSAGE)
        return element

    @property
    def index_bytes(self) -> int:
        """Host memory of the index and the full cache of documents, in bytes."""
        cache_bytes = 2 * 4 * min(_MAX_CACHED_TOKENS, self.tokens)  # tokens and weights have 4 bytes each
        return self._index.nbytes + self._numbers.nbytes + self.document_starts.nbytes + cache_bytes


class DatasetRows:
    """Reads the rows of a Grain dataset of rows. Has the interface that `rows.Windows` documents, but no stream."""

    fill = 1.0
    index_bytes = 0
    has_mask = True

    def __init__(self, elements: Elements, settings: Data):
        self._elements = elements
        self._length = settings.sequence_length
        self._keeps_documents_apart = settings.keeps_documents_apart
        self.rows = self.row_count_with_partial = len(elements)
        self._positions = np.arange(self._length, dtype=np.int32)
        self._fillers = {
            field.name: np.full(self._length, field.filler, field.dtype) for field in batch_fields(settings)
        }
        # By default a row counts as one document, in which every token is a target.
        ones = {name: np.ones_like(self._fillers[name]) for name in ("weights", "segments")}
        self._defaults = ones | {"positions": self._positions}
        self._row(0)  # to report errors before the step is compiled

    def read(self, rows: Sequence[int] | np.ndarray) -> Rows:
        elements = [self._row(int(number)) for number in rows]
        return {name: np.stack([element[name] for element in elements]) for name in self._fillers}

    def _row(self, number: int) -> Element:
        if number >= self.rows:
            return self._fillers
        element = self._elements.read(number)
        assert element is not None
        row = self._defaults | element
        self._check(number, row)
        return row

    def _check(self, number: int, row: Element) -> None:
        if len(row["tokens"]) != self._length:
            raise self._elements.error_at(
                number, f"has {len(row['tokens'])} tokens, but data.sequence_length is {self._length}; make them equal"
            )
        segments = row["segments"]
        if not self._keeps_documents_apart and (segments.max() > 1 or (row["positions"] != self._positions).any()):
            raise self._elements.error_at(
                number,
                "keeps documents apart by segments and positions; set data.document_mask: true, or leave these out",
            )
        if self._keeps_documents_apart and np.count_nonzero(np.diff(segments)) + 1 > len(np.unique(segments)):
            raise self._elements.error_at(
                number, "has a segment in several places; the tokens of a document must be contiguous"
            )
        if ((segments == 0) & (row["weights"] != 0)).any():
            raise self._elements.error_at(
                number,
                "has targets in segment 0, which is padding; number documents from 1, or give weights of 0 there",
            )


class _DocumentCache:
    """A least-recently-used cache of documents, limited by their number of tokens."""

    def __init__(self, read: Callable[[int], Element]):
        self._read = read
        self._lock = threading.Lock()
        self._documents: OrderedDict[int, Element] = OrderedDict()
        self._tokens = 0

    def get(self, document: int) -> Element:
        with self._lock:
            if document in self._documents:
                self._documents.move_to_end(document)
                return self._documents[document]
        # Two threads may read the same document here, which is harmless, so this needs no lock.
        element = self._read(document)
        with self._lock:
            if document not in self._documents:
                self._documents[document] = element
                self._tokens += len(element["tokens"])
            while self._tokens > _MAX_CACHED_TOKENS and len(self._documents) > 1:
                _, removed = self._documents.popitem(last=False)
                self._tokens -= len(removed["tokens"])
        return element


def document_of(elements: Elements, number: int, end_id: int | None) -> Element | None:
    """Returns the tokens and weights of a document, or None if the document is left out. Weights default to 1.

    If the document does not end with `end_id`, that is appended with the weight of the last token.
    """
    element = elements.read(number)
    if element is None:
        return None
    tokens = element["tokens"]
    weights = element.get("weights", np.ones(len(tokens), np.float32))
    if end_id is not None and tokens[-1] != end_id:
        tokens = np.append(tokens, np.int32(end_id))
        weights = np.append(weights, weights[-1])
    return {"tokens": tokens, "weights": weights}


def fingerprint(document: Element) -> tuple[int, int, int]:
    """Returns a document's length, its CRC-32 checksum, and 1 if any of its weights is 0, or else 0."""
    checksum_of_tokens = zlib.crc32(document["tokens"].astype("<i4").tobytes())
    weights = document["weights"].astype(np.uint8)
    return len(document["tokens"]), zlib.crc32(weights.tobytes(), checksum_of_tokens), int(not weights.all())


def measure_elements(elements: Elements, end_id: int | None, progress: Callable[[str], None]) -> np.ndarray:
    """Reads every element, and returns an index of dtype "<u4" [elements, 3].

    It holds the fingerprint of each document, and zeros for rows and for documents that are left out.
    """
    import grain

    def measure(number: int) -> tuple[int, int, int]:
        if elements.kind == "rows":
            elements.read(int(number))
            return 0, 0, 0
        document = document_of(elements, int(number), end_id)
        return (0, 0, 0) if document is None else fingerprint(document)

    options = grain.ReadOptions(num_threads=_INDEX_THREADS, prefetch_buffer_size=_INDEX_PREFETCH)
    index = np.zeros((len(elements), INDEX_COLUMNS), "<u4")
    fingerprints = grain.MapDataset.range(len(elements)).map(measure).to_iter_dataset(options)
    for number, entry in enumerate(fingerprints):
        index[number] = entry
        if number % 1000 == 0:
            progress(f"{elements.path}, element {number:,} of {len(elements):,}")
    return index
