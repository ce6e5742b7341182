"""Which documents share a row: whole documents are placed into rows by best fit, and longer ones are cut first."""

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

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

    def pieces(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the numbers of the pieces in `rows`, and for each the index of its row in `rows`. A row past the end
        has none."""
        rows = np.minimum(rows, self.rows)
        first, stop = self.first_piece[rows], self.first_piece[np.minimum(rows + 1, self.rows)]
        index = np.repeat(np.arange(len(rows)), stop - first)
        return expanded(first, stop - first), index

    def fill(self, row_length: int) -> float:
        """The share of places that hold a token."""
        return float(self.length.sum()) / max(1, self.rows * row_length)


def plan_rows(document_starts: np.ndarray, tokens: int, row_length: int, window: int = WINDOW_DOCUMENTS) -> Plan:
    """Places all documents of a split, with their end-of-document tokens, into rows of `row_length` tokens."""
    ends = np.append(document_starts[1:], tokens)
    planned, rows = [], 0
    for first in range(0, max(1, len(document_starts)), window):
        begin = document_starts[first : first + window]
        start, length, opens = _cut(begin, ends[first : first + window] - begin, row_length)
        row = rows + _best_fit(length, row_length)
        planned.append((row, start, length, opens))
        rows = int(row.max(initial=rows - 1)) + 1
    row, start, length, opens = (np.concatenate(column) for column in zip(*planned, strict=True))
    order = np.argsort(row, kind="stable")
    first_piece = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=rows))]).astype(np.int64)
    return Plan(first_piece, start[order].astype(np.int64), length[order].astype(np.int32), opens[order])


def _cut(begin: np.ndarray, size: np.ndarray, row_length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Start, length and whether it opens its document, of each piece of at most a row."""
    pieces = -(-size // row_length)
    document = np.repeat(np.arange(len(size)), pieces)
    number = within_groups(pieces)
    start = begin[document] + number * row_length
    length = np.minimum(size[document] - number * row_length, row_length)
    return start, length, number == 0


def _best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """The bin of each length: longest first, each into the fullest bin that has room; bins numbered from 0."""
    bins = np.empty(len(lengths), np.int64)
    by_length = np.argsort(-lengths, kind="stable")
    sizes, counts = np.unique(-lengths[by_length], return_counts=True)
    bins_with_room: dict[int, list[np.ndarray]] = defaultdict(list)
    rooms: list[int] = []
    """In order, those of which there are bins."""
    opened = placed = 0
    for size, count in zip((-sizes).tolist(), counts.tolist(), strict=True):
        unplaced = count
        while unplaced:
            smallest = bisect_left(rooms, size)
            if smallest == len(rooms):
                per_bin = capacity // size
                new = -(-unplaced // per_bin)
                fresh = np.arange(opened, opened + new)
                opened += new
                assigned = np.repeat(fresh, per_bin)[:unplaced]
                full, last = divmod(unplaced, per_bin)
                groups = [(fresh[:full], capacity - per_bin * size), (fresh[full:], capacity - last * size)]
            else:
                room = rooms[smallest]
                waiting = bins_with_room[room]
                group = waiting.pop()
                assigned = group[:unplaced]
                groups = [(assigned, room - size), (group[unplaced:], room)]
                if not waiting:
                    rooms.pop(smallest)
            bins[by_length[placed : placed + len(assigned)]] = assigned
            placed += len(assigned)
            unplaced -= len(assigned)
            for group, remaining in groups:
                if len(group) and remaining:
                    if not bins_with_room[remaining]:
                        insort(rooms, remaining)
                    bins_with_room[remaining].append(group)
    return bins


def within_groups(counts: np.ndarray) -> np.ndarray:
    """Returns 0 … n - 1 for each n of `counts`, one group after the other."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def expanded(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns start … start + length - 1 for each pair, one group after the other."""
    return np.repeat(starts, lengths) + within_groups(lengths)
