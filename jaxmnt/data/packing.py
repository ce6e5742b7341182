"""Packs documents into rows by best fit. Documents that are longer than a row are cut first."""

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

WINDOW_DOCUMENTS = 2**20
"""Documents that are packed together."""


@dataclass(frozen=True)
class Plan:
    """Pieces of documents in the order of their rows. A piece is a contiguous range of the stream's tokens."""

    first_piece: np.ndarray
    """int64 [rows + 1]: the pieces of row r are first_piece[r] … first_piece[r + 1] - 1."""
    start: np.ndarray
    """int64 [pieces]: offset in the stream."""
    length: np.ndarray
    """int32 [pieces]."""
    opens: np.ndarray
    """bool [pieces]: True if the piece starts its document."""

    @property
    def rows(self) -> int:
        return len(self.first_piece) - 1

    @property
    def nbytes(self) -> int:
        return self.first_piece.nbytes + self.start.nbytes + self.length.nbytes + self.opens.nbytes

    def pieces(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the numbers of the pieces in `rows`, and for each the index of its row in `rows`. Rows past the end
        have none."""
        rows = np.minimum(rows, self.rows)
        first, stop = self.first_piece[rows], self.first_piece[np.minimum(rows + 1, self.rows)]
        index = np.repeat(np.arange(len(rows)), stop - first)
        return expand_ranges(first, stop - first), index

    def fill(self, row_length: int) -> float:
        """Returns the share of places that hold a token."""
        return float(self.length.sum()) / max(1, self.rows * row_length)


def plan_rows(document_starts: np.ndarray, tokens: int, row_length: int, window: int = WINDOW_DOCUMENTS) -> Plan:
    """Packs all documents of a split, with their end-of-document tokens, into rows of `row_length` tokens."""
    ends = np.append(document_starts[1:], tokens)
    planned = []
    rows = 0
    # Each window of documents is packed into rows of its own, which bounds time and memory.
    for first in range(0, max(1, len(document_starts)), window):
        begin = document_starts[first : first + window]
        start, length, opens = _cut(begin, ends[first : first + window] - begin, row_length)
        row = rows + _best_fit(length, row_length)
        planned.append((row, start, length, opens))
        rows = int(row.max(initial=rows - 1)) + 1
    row, start, length, opens = (np.concatenate(column) for column in zip(*planned, strict=True))
    # Store the pieces by row, so that the pieces of a row are a slice.
    order = np.argsort(row, kind="stable")
    first_piece = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=rows))]).astype(np.int64)
    return Plan(first_piece, start[order].astype(np.int64), length[order].astype(np.int32), opens[order])


def _cut(begin: np.ndarray, size: np.ndarray, row_length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cuts documents into pieces of at most a row. Returns start, length and opens, as in `Plan`."""
    pieces = -(-size // row_length)
    document = np.repeat(np.arange(len(size)), pieces)
    number = within_groups(pieces)
    start = begin[document] + number * row_length
    length = np.minimum(size[document] - number * row_length, row_length)
    return start, length, number == 0


def _best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Assigns each length to a bin, from 0, by best-fit decreasing: longest first, into the fullest bin with room."""
    bins = np.empty(len(lengths), np.int64)
    # All lengths of the same size are placed together, in whole groups of bins with the same room.
    by_length = np.argsort(-lengths, kind="stable")
    sizes, counts = np.unique(-lengths[by_length], return_counts=True)
    bins_with_room: dict[int, list[np.ndarray]] = defaultdict(list)
    rooms: list[int] = []  # the keys of bins_with_room that have bins, sorted
    opened = placed = 0
    for size, count in zip((-sizes).tolist(), counts.tolist(), strict=True):
        unplaced = count
        while unplaced:
            smallest = bisect_left(rooms, size)
            # Either open new bins or fill one group of bins with the same room; return the rest of the group.
            if smallest == len(rooms):
                per_bin = capacity // size
                needed = -(-unplaced // per_bin)
                new_bins = np.arange(opened, opened + needed)
                opened += needed
                assigned = np.repeat(new_bins, per_bin)[:unplaced]
                full, last = divmod(unplaced, per_bin)
                groups = [(new_bins[:full], capacity - per_bin * size), (new_bins[full:], capacity - last * size)]
            else:
                room = rooms[smallest]
                same_room = bins_with_room[room]
                group = same_room.pop()
                assigned = group[:unplaced]
                groups = [(assigned, room - size), (group[unplaced:], room)]
                if not same_room:
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


def expand_ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns start … start + length - 1 for each pair, one group after the other."""
    return np.repeat(starts, lengths) + within_groups(lengths)
