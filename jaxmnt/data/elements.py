"""The elements of a user's own `grain.MapDataset`: documents, or whole rows.

Shapes: L tokens of a row, n of a document.

An element is a mapping. Of a document it has `tokens` (integers [n]) and perhaps `weights` ([n], 0 where a token is no
target); of a row `tokens` and `targets` (integers [L]), the fields of `data.fields`, and perhaps `weights`, `segments`
and `positions` ([L], see `fields.FIELDS`). Others are ignored. Documents that are None or empty are left out.
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
_INDEX_AHEAD = 256
_CACHED_TOKENS = 2**22
INDEX_COLUMNS = 3
"""See `measured`."""

CHANGED = (
    "is not what it was when the run indexed its documents; a dataset must give the same each time it is read: make it "
    "deterministic, or choose another run.dir for another dataset"
)

_OF_DOCUMENTS = ("tokens", "weights")
_OPTIONAL = ("weights", "segments", "positions")

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
    fields: tuple[Field, ...] = FIELDS
    """Those of a row."""

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, number: int) -> Element | None:
        """An element; None for a document that is left out.

        Raises `ConfigError` for one that cannot be trained on, `UnreadableError` where the user's code fails: that may
        pass by itself.
        """
        try:
            raw = self.dataset[number]
        except Exception as error:  # it is the user's own code that runs
            raise UnreadableError(
                f"{self._name(number)} cannot be read: {printable(summary(error))}; correct the dataset, or make what "
                "it reads available"
            ) from error
        rows = self.kind == "rows"
        if raw is None and not rows:
            return None
        if raw is None:
            raise self.refusal(number, "is None, as where a filter leaves a hole; give a dataset of rows alone")
        fields = [field for field in self.fields if rows or field.name in _OF_DOCUMENTS]
        needed = [field.name for field in fields if field.name not in _OPTIONAL]
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
        present = [field for field in fields if raw.get(field.name) is not None]
        element = {field.name: self._array(number, field, raw[field.name]) for field in present}
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

    def _array(self, number: int, field: Field, value: Any) -> np.ndarray:
        """One field, checked."""
        name = field.name
        try:
            array = np.asarray(value)
        except Exception as error:  # NumPy raises what it likes for what is no array
            raise self.refusal(
                number, f"has {name} that are not an array ({printable(summary(error))}); give a vector of numbers"
            ) from error
        if name == "weights":
            if array.ndim != 1 or array.dtype.kind not in "biuf" or not np.isin(array, (0, 1)).all():
                raise self.refusal(number, "has weights that are not a vector of 0 and 1; correct them")
            return array.astype(np.float32)
        if field.dtype == "float32":
            if array.ndim != 1 or array.dtype.kind not in "iuf" or not np.isfinite(array).all():
                raise self.refusal(number, f"has {name} that are not a vector of finite numbers; correct them")
            return array.astype(np.float32)
        if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
            raise self.refusal(
                number, f"has {name} of type {array.dtype} and shape {list(array.shape)}; give a vector of integers"
            )
        limit = self.vocab_size if name in ("tokens", "targets") else 2**31
        least = 0 if field in FIELDS else -(2**31)
        if array.size and not least <= int(array.min()) <= int(array.max()) < limit:
            odd = array[(array < least) | (array >= limit)][0]
            raise self.refusal(
                number, f"has {odd} among its {name}, which must be from {least} to {limit - 1}; correct it"
            )
        return array.astype(np.int32)


class DocumentStream(TokenStream):
    """The documents of a dataset, one after another. Those that were read last are held in memory."""

    def __init__(self, elements: Elements, index: np.ndarray, end: int | None):
        """`index`: see `measured`."""
        self._elements, self._index = elements, index
        self._numbers = np.flatnonzero(index[:, 0])
        lengths = index[self._numbers, 0].astype(np.int64)
        starts = np.cumsum(lengths) - lengths
        super().__init__(lambda: starts, end)
        self.tokens, self.has_learn_mask = int(lengths.sum()), bool(index[:, 2].any())
        self._recent = _Recent(self._read_document)

    def read_all(self, starts: np.ndarray, outs: Sequence[np.ndarray], field: str = "tokens") -> None:
        documents = self.documents(starts)
        within = starts - self.document_starts[documents]
        for out, document, first in zip(outs, documents.tolist(), within.tolist(), strict=True):
            done = 0
            while done < len(out):
                piece = self._recent.get(document)[field][first : first + len(out) - done]
                out[done : done + len(piece)] = piece
                done, document, first = done + len(piece), document + 1, 0

    def _read_document(self, document: int) -> Element:
        number = int(self._numbers[document])
        element = document_of(self._elements, number, self.end_of_document)
        if element is None or fingerprint(element) != tuple(self._index[number].tolist()):
            raise self._elements.refusal(number, CHANGED)
        return element

    @property
    def index_bytes(self) -> int:
        """Of host memory, with the documents that are held."""
        held = 2 * 4 * min(_CACHED_TOKENS, self.tokens)
        return self._index.nbytes + self._numbers.nbytes + self.document_starts.nbytes + held


class GivenRows:
    """Rows as a dataset gives them."""

    fill, index_bytes, has_mask = 1.0, 0, True

    def __init__(self, elements: Elements, settings: Data):
        self._elements, self._length, self._apart = elements, settings.sequence_length, settings.keeps_documents_apart
        self.rows = self.all_rows = len(elements)
        self._places = np.arange(self._length, dtype=np.int32)
        self._fillers = {
            field.name: np.full(self._length, field.filler, field.dtype) for field in batch_fields(settings)
        }
        # What a row holds unless the dataset says otherwise: one document, in which every token is a target.
        ones = {name: np.ones_like(self._fillers[name]) for name in ("weights", "segments")}
        self._defaults = ones | {"positions": self._places}
        self._row(0)  # or what does not fit would be found after compiling

    def read(self, rows: Sequence[int] | np.ndarray) -> Rows:
        found = [self._row(int(number)) for number in rows]
        return {name: np.stack([row[name] for row in found]) for name in self._fillers}

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
            raise self._elements.refusal(
                number, f"has {len(row['tokens'])} tokens, and data.sequence_length is {self._length}; make them equal"
            )
        segments = row["segments"]
        if not self._apart and (segments.max() > 1 or (row["positions"] != self._places).any()):
            raise self._elements.refusal(
                number,
                "keeps documents apart by segments and positions; set data.document_mask: true, or leave these out",
            )
        if self._apart and np.count_nonzero(np.diff(segments)) + 1 > len(np.unique(segments)):
            raise self._elements.refusal(
                number, "has a segment in several places; the tokens of a document must stand together"
            )
        if ((segments == 0) & (row["weights"] != 0)).any():
            raise self._elements.refusal(
                number,
                "has targets in segment 0, which is padding; number documents from 1, or give weights of 0 there",
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
        element = self._read(document)  # without the lock: another thread may read the same, which does no harm
        with self._lock:
            if document not in self._held:
                self._held[document] = element
                self._tokens += len(element["tokens"])
            while self._tokens > _CACHED_TOKENS and len(self._held) > 1:
                self._tokens -= len(self._held.popitem(last=False)[1]["tokens"])
        return element


def document_of(elements: Elements, number: int, end: int | None) -> Element | None:
    """Tokens, with the end of document, and weights, which are 1 if it has none. The end counts as the token before."""
    element = elements.read(number)
    if element is None:
        return None
    tokens, weights = element["tokens"], element.get("weights", np.ones(len(element["tokens"]), np.float32))
    if end is not None and tokens[-1] != end:
        tokens, weights = np.append(tokens, np.int32(end)), np.append(weights, weights[-1])
    return {"tokens": tokens, "weights": weights}


def fingerprint(document: Element) -> tuple[int, int, int]:
    """Length, checksum, and whether a weight is 0."""
    check = zlib.crc32(document["tokens"].astype("<i4").tobytes())
    weights = document["weights"].astype(np.uint8)
    return len(document["tokens"]), zlib.crc32(weights.tobytes(), check), int(not weights.all())


def measured(elements: Elements, end: int | None, progress: Callable[[str], None]) -> np.ndarray:
    """Reads every element. "<u4" [elements, 3]: the fingerprint of each document; 0 of one that is left out, and of
    rows."""
    import grain

    def measure(number: int) -> tuple[int, int, int]:
        if elements.kind == "rows":
            elements.read(int(number))
            return 0, 0, 0
        document = document_of(elements, int(number), end)
        return (0, 0, 0) if document is None else fingerprint(document)

    options = grain.ReadOptions(num_threads=_INDEX_THREADS, prefetch_buffer_size=_INDEX_AHEAD)
    index = np.zeros((len(elements), INDEX_COLUMNS), "<u4")
    for number, entry in enumerate(grain.MapDataset.range(len(elements)).map(measure).to_iter_dataset(options)):
        index[number] = entry
        if number % 1000 == 0:
            progress(f"{elements.path}, element {number:,} of {len(elements):,}")
    return index
