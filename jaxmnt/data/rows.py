"""Which documents share a row, what a row holds, and its digest."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxmnt.data.store import StoredTokens, TokenStream


def row_digests(tokens: np.ndarray) -> np.ndarray:
    """uint8 [R, 32]: SHA-256 of each row's token ids as little-endian int32. `tokens`: [R, L]."""
    digests = [hashlib.sha256(row.astype("<i4").tobytes()).digest() for row in tokens]
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32)


def batch_digest(digests: np.ndarray) -> str:
    """SHA-256, in hex, over the digests of all rows of the global batch in order."""
    return hashlib.sha256(digests.tobytes()).hexdigest()


WINDOW_DOCUMENTS = 2**20
"""Documents that are planned together."""


@dataclass(frozen=True)
class Plan:
    """Pieces of documents, in the order of their rows. A piece is a stretch of the stream's tokens."""

    first_piece: np.ndarray
    """int64 [rows + 1]: the pieces of row r are first_piece[r] … first_piece[r + 1] - 1."""
    start: np.ndarray
    """int64 [pieces]: offset in the stream."""
    length: np.ndarray
    """int32 [pieces]."""
    opens: np.ndarray
    """bool [pieces]: whether the document starts here."""

    @property
    def rows(self) -> int:
        return len(self.first_piece) - 1

    @property
    def nbytes(self) -> int:
        return self.first_piece.nbytes + self.start.nbytes + self.length.nbytes + self.opens.nbytes

    def fill(self, row_length: int) -> float:
        """The share of places that hold a token."""
        return float(self.length.sum()) / max(1, self.rows * row_length)


def plan_rows(document_starts: np.ndarray, tokens: int, row_length: int, window: int = WINDOW_DOCUMENTS) -> Plan:
    """Places all documents of a split, with their end-of-document tokens, into rows of `row_length` tokens."""
    row: list[np.ndarray] = []
    columns: tuple[list[np.ndarray], ...] = ([], [], [])
    rows = 0
    ends = np.append(document_starts[1:], tokens)
    for first in range(0, len(document_starts), window):
        chosen = slice(first, first + window)
        begin, size = document_starts[chosen], ends[chosen] - document_starts[chosen]
        cut = _cut(begin, size, row_length)
        bins = _best_fit(cut[1], row_length)
        row.append(bins + rows)
        for column, values in zip(columns, cut, strict=True):
            column.append(values)
        rows += int(bins.max(initial=-1)) + 1
    bins = np.concatenate(row) if row else np.zeros(0, np.int64)
    order = np.argsort(bins, kind="stable")
    start, length, opens = (np.concatenate(column)[order] if column else np.zeros(0, np.int64) for column in columns)
    first_piece = np.concatenate([[0], np.cumsum(np.bincount(bins, minlength=rows))]).astype(np.int64)
    return Plan(first_piece, start.astype(np.int64), length.astype(np.int32), opens.astype(bool))


def _cut(begin: np.ndarray, size: np.ndarray, row_length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Start, length and whether it opens its document, of each piece of at most a row."""
    pieces = -(-size // row_length)
    document = np.repeat(np.arange(len(size)), pieces)
    number = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = begin[document] + number * row_length
    length = np.minimum(size[document] - number * row_length, row_length)
    return start, length, number == 0


def _best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """The bin of each length: longest first, each into the fullest bin that has room; bins numbered from 0."""
    bins = np.empty(len(lengths), np.int64)
    by_length = np.argsort(-lengths, kind="stable")
    sizes, counts = np.unique(-lengths[by_length], return_counts=True)
    bins_with_room: list[list[np.ndarray]] = [[] for _ in range(capacity + 1)]
    rooms = _Rooms()
    opened = placed = 0
    for size, count in zip((-sizes).tolist(), counts.tolist(), strict=True):
        left = count
        while left:
            room = rooms.smallest_from(size)
            if room is None:
                each = capacity // size
                new = -(-left // each)
                fresh = np.arange(opened, opened + new)
                opened += new
                taken = np.repeat(fresh, each)[:left]
                full, last = divmod(left, each)
                groups = [(fresh[:full], capacity - each * size), (fresh[full:], capacity - last * size)]
            else:
                waiting = bins_with_room[room]
                group = waiting.pop()
                taken = group[:left]
                groups = [(taken, room - size), (group[left:], room)]
                if not waiting:
                    rooms.discard(room)
            bins[by_length[placed : placed + len(taken)]] = taken
            placed += len(taken)
            left -= len(taken)
            for group, remaining in groups:
                if len(group) and remaining:
                    bins_with_room[remaining].append(group)
                    rooms.add(remaining)
    return bins


class _Rooms:
    """A set of small numbers that finds its smallest member from some number on: bits of one integer."""

    def __init__(self) -> None:
        self._bits = 0

    def add(self, number: int) -> None:
        self._bits |= 1 << number

    def discard(self, number: int) -> None:
        self._bits &= ~(1 << number)

    def smallest_from(self, number: int) -> int | None:
        above = self._bits >> number
        return number + (above & -above).bit_length() - 1 if above else None


Rows = dict[str, np.ndarray]
"""tokens, targets, segments, positions: int32 [R, L]; weights: float32 [R, L], 0 where there is no target.

Segments number the documents of a row from 1; 0 is where nothing is. Arrays may be views that cannot be written to.
"""


class RowReader(Protocol):
    """Random access to rows by number. Thread-safe."""

    rows: int
    """Rows of an epoch of training."""
    all_rows: int
    """Rows in which every token is a target once, the last perhaps not full; evaluation uses these."""

    @property
    def fill(self) -> float:
        """The share of places that hold a token."""

    @property
    def has_mask(self) -> bool:
        """Returns whether the data says which tokens are targets, so that a row may have none."""

    @property
    def index_bytes(self) -> int:
        """Host memory that plans and document boundaries take, in bytes."""

    def read(self, rows: Sequence[int] | np.ndarray) -> Rows:
        """The rows of these numbers; one past the end is a row without targets."""

    def offsets(self, row: int) -> np.ndarray:
        """int64 [L]: where in the stream the targets of a row are; -1 where there is none. For people who look."""


class Windows:
    """The stream cut every L targets."""

    fill = 1.0

    def __init__(self, stream: TokenStream, length: int, document_mask: bool):
        self.stream = stream
        self.length = length
        self.document_mask = document_mask
        self.rows = stream.tokens // length
        self.all_rows = -(-stream.tokens // length)
        self._positions = np.arange(length, dtype=np.int32)[None]
        self._ones = np.ones((1, length), np.int32)
        self._weights = np.ones((1, length), np.float32)

    def read(self, rows: Sequence[int] | np.ndarray) -> Rows:
        starts = np.asarray(rows, np.int64) * self.length
        shape = (len(starts), self.length)
        tokens = np.empty((len(starts), self.length + 1), np.int32)
        last = int(starts.max(initial=0)) + self.length
        if starts.min(initial=1) > 0 and last <= self.stream.tokens:
            self.stream.read_all(starts - 1, list(tokens))
        else:
            for line, start in zip(tokens, starts.tolist(), strict=True):
                self._read_at_an_end(start, line)
        if not self.stream.holds_ids(tokens):
            self.stream.refuse(starts[:, None] + np.arange(-1, self.length))
        result = {
            "tokens": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "weights": np.broadcast_to(self._weights, shape),
            "segments": np.broadcast_to(self._ones, shape),
            "positions": np.broadcast_to(self._positions, shape),
        }
        if self.stream.has_learn_mask or last > self.stream.tokens:
            result["weights"] = self._read_weights(starts)
        if self.document_mask:
            result["segments"], result["positions"], opens = self._documents(starts)
            if (result["tokens"][opens] != self.stream.filler).any():
                # Tokens given as arrays may lack ends; the last token of a document must not begin the next.
                result["tokens"] = result["tokens"].copy()
                result["tokens"][opens] = self.stream.filler
        if self.stream.end_of_document is None:
            unknown = opens if self.document_mask else (starts == 0)[:, None] & (self._positions == 0)
            result["weights"] = np.where(unknown, np.float32(0), result["weights"])
        return result

    @property
    def has_mask(self) -> bool:
        return self.stream.has_learn_mask

    @property
    def index_bytes(self) -> int:
        # Stored documents are only looked for with the mask; other streams cannot do without their index.
        needed = self.document_mask or not isinstance(self.stream, StoredTokens)
        return self.stream.index_bytes if needed else 0

    def offsets(self, row: int) -> np.ndarray:
        offsets = row * self.length + np.arange(self.length)
        return np.where(offsets < self.stream.tokens, offsets, -1)

    def _read_at_an_end(self, start: int, line: np.ndarray) -> None:
        """L + 1 tokens from the one before `start`; offset -1 and those past the end read as an end of document."""
        stop = min(start + self.length, self.stream.tokens)
        line[:] = self.stream.filler
        if stop > start:
            skip = int(start == 0)
            self.stream.read(start - 1 + skip, line[skip : stop - start + 1])

    def _read_weights(self, starts: np.ndarray) -> np.ndarray:
        real = np.clip(self.stream.tokens - starts, 0, self.length)
        weights = (np.arange(self.length) < real[:, None]).astype(np.float32)
        if self.stream.has_learn_mask:
            some = np.flatnonzero(real)
            outs = [weights[line, : real[line]] for line in some.tolist()]
            self.stream.read_all_learn(starts[some], outs)
            self.stream.check_learn(weights)
        return weights

    def _documents(self, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Segments, positions, and where a document opens: a place belongs to the document of its target.

        So the end of a document, as an input, opens the next one at position 0.
        """
        target_RL = starts[:, None] + np.arange(self.length)
        document = self.stream.documents(target_RL)
        positions = target_RL - self.stream.document_starts[document]
        within = np.minimum(positions, np.arange(self.length))  # a row may open inside a document
        return (document - document[:, :1] + 1).astype(np.int32), within.astype(np.int32), positions == 0


class Packed:
    """Whole documents placed into rows by best fit; those longer than a row are cut."""

    def __init__(self, stream: TokenStream, length: int):
        self.stream = stream
        self.length = length
        self.plan: Plan = plan_rows(stream.document_starts, stream.tokens, length)
        self.rows = self.all_rows = self.plan.rows
        self._places = np.arange(length, dtype=np.int32)
        self._weights = np.ones((1, length), np.float32)

    @property
    def fill(self) -> float:
        return self.plan.fill(self.length)

    @property
    def has_mask(self) -> bool:
        return self.stream.has_learn_mask

    @property
    def index_bytes(self) -> int:
        return self.plan.nbytes + self.stream.index_bytes

    def read(self, rows: Sequence[int] | np.ndarray) -> Rows:
        wanted = np.asarray(rows, np.int64)
        piece, line = self._pieces(wanted)
        starts, lengths, opens = self.plan.start[piece], self.plan.length[piece], self.plan.opens[piece]
        filled = np.bincount(line, weights=lengths, minlength=len(wanted)).astype(np.int64)
        # Pieces of a row stand one after another: places before this piece, less those in rows before.
        place = np.cumsum(lengths) - lengths - (np.cumsum(filled) - filled)[line]
        targets = np.empty((len(wanted), self.length), np.int32)
        for row in np.flatnonzero(filled < self.length).tolist():
            targets[row, filled[row] :] = self.stream.filler
        stretches = list(zip(line.tolist(), place.tolist(), (place + lengths).tolist(), strict=True))
        self.stream.read_all(starts, [targets[row, first:stop] for row, first, stop in stretches])
        weights = np.broadcast_to(self._weights, targets.shape)
        if self.stream.has_learn_mask or (filled < self.length).any():
            weights = (self._places < filled[:, None]).astype(np.float32)
        if self.stream.has_learn_mask:
            self.stream.read_all_learn(starts, [weights[row, first:stop] for row, first, stop in stretches])
            self.stream.check_learn(weights)
        if self.stream.end_of_document is None:
            weights = weights.copy()
            weights[line[opens], place[opens]] = 0
        tokens = self._inputs(targets, line, place, starts, opens)
        if not (self.stream.holds_ids(targets) and self.stream.holds_ids(tokens[line[~opens], place[~opens]])):
            offsets = np.concatenate([self.offsets(row) for row in wanted.tolist() if row < self.rows])
            self.stream.refuse(np.concatenate([offsets - 1, offsets]))
        segments, positions = self._documents(line, place, lengths, filled)
        return {
            "tokens": tokens,
            "targets": targets,
            "weights": weights,
            "segments": segments,
            "positions": positions,
        }

    def offsets(self, row: int) -> np.ndarray:
        pieces = slice(int(self.plan.first_piece[row]), int(self.plan.first_piece[row + 1]))
        places = [
            np.arange(start, start + length)
            for start, length in zip(self.plan.start[pieces].tolist(), self.plan.length[pieces].tolist(), strict=True)
        ]
        found = np.concatenate(places)
        return np.concatenate([found, np.full(self.length - len(found), -1)])

    def _pieces(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of the pieces in these rows, and for each the line of the batch that it is in."""
        known = np.minimum(rows, self.rows)
        first, stop = self.plan.first_piece[known], self.plan.first_piece[np.minimum(known + 1, self.rows)]
        counts = stop - first
        line = np.repeat(np.arange(len(rows)), counts)
        return first[line] + np.arange(len(line)) - (np.cumsum(counts) - counts)[line], line

    def _inputs(
        self, targets: np.ndarray, line: np.ndarray, place: np.ndarray, starts: np.ndarray, opens: np.ndarray
    ) -> np.ndarray:
        """The token before each target: before the first of a document its end, never another document's."""
        tokens = np.empty_like(targets)
        tokens[:, 0] = self.stream.filler
        tokens[:, 1:] = targets[:, :-1]
        tokens[line, place] = self.stream.filler
        for number in np.flatnonzero(~opens).tolist():  # the rest of a long document
            row, at = line[number], place[number]
            self.stream.read(int(starts[number]) - 1, tokens[row, at : at + 1])
        return tokens

    def _documents(
        self, line: np.ndarray, place: np.ndarray, lengths: np.ndarray, filled: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Segments and positions [R, L]. What is left of a row counts as one more piece, of segment 0."""
        rows, pieces = len(filled), len(line)
        counts = np.bincount(line, minlength=rows)
        of_piece = np.arange(pieces) + line  # where the pieces and, after those of each row, its rest come
        of_rest = np.cumsum(counts) + np.arange(rows)
        number, opening, length = (np.zeros(pieces + rows, np.int32) for _ in range(3))
        number[of_piece] = np.arange(pieces) - (np.cumsum(counts) - counts)[line] + 1
        opening[of_piece], opening[of_rest] = place, filled
        length[of_piece], length[of_rest] = lengths, self.length - filled
        segments = np.repeat(number, length).reshape(rows, self.length)
        return segments, self._places - np.repeat(opening, length).reshape(rows, self.length)


def make_reader(stream: TokenStream, kind: str, length: int, document_mask: bool) -> RowReader:
    """Rows of the kind that `data.rows` names."""
    return Packed(stream, length) if kind == "packed" else Windows(stream, length, document_mask)
