"""Packs documents into rows by best fit. Documents that are longer than a row are cut first, or left out."""

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

WINDOW_DOCUMENTS = 2**20
"""Number of consecutive documents that share rows; documents of different windows are never packed together."""


@dataclass(frozen=True)
class Plan:
    """The pieces of documents that each row holds. A piece is a contiguous range of the tokens of the stream."""

    first_piece: np.ndarray
    """int64 [rows + 1]: the pieces of row r are first_piece[r] … first_piece[r + 1] - 1."""
    start: np.ndarray
    """int64 [pieces]: offset of the piece in the stream."""
    length: np.ndarray
    """int32 [pieces]: number of tokens of the piece."""
    opens: np.ndarray
    """bool [pieces]: True if the piece starts its document."""

    @property
    def rows(self) -> int:
        return len(self.first_piece) - 1

    @property
    def nbytes(self) -> int:
        return self.first_piece.nbytes + self.start.nbytes + self.length.nbytes + self.opens.nbytes

    def pieces(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the numbers of the pieces in these rows, and for each piece the index of its row in `rows`.

        Rows past the end have no pieces.
        """
        rows = np.minimum(rows, self.rows)
        first = self.first_piece[rows]
        counts = self.first_piece[np.minimum(rows + 1, self.rows)] - first
        index = np.repeat(np.arange(len(rows)), counts)
        return expand_ranges(first, counts), index

    def fill(self, row_length: int) -> float:
        """Returns the share of positions in all rows that hold a token, not padding."""
        return float(self.length.sum()) / max(1, self.rows * row_length)


def plan_rows(
    document_starts: np.ndarray,
    tokens: int,
    row_length: int,
    window: int = WINDOW_DOCUMENTS,
    *,
    skip_long: bool = False,
) -> Plan:
    """Packs all documents of a split, with their end-of-document tokens, into rows of `row_length` tokens.

    With `skip_long`, documents that are longer than a row are left out.
    """
    ends = np.append(document_starts[1:], tokens)
    planned = []
    rows = 0
    # Pack each window of documents into separate rows, which limits time and memory.
    for first in range(0, max(1, len(document_starts)), window):
        begin = document_starts[first : first + window]
        size = ends[first : first + window] - begin
        if skip_long:
            begin, size = begin[size <= row_length], size[size <= row_length]
        start, length, opens = _cut_documents(begin, size, row_length)
        row = rows + _best_fit(length, row_length)
        planned.append((row, start, length, opens))
        rows = int(row.max(initial=rows - 1)) + 1
    row, start, length, opens = (np.concatenate(column) for column in zip(*planned, strict=True))
    # Store the pieces by row, so that the pieces of a row are a slice.
    order = np.argsort(row, kind="stable")
    first_piece = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=rows))]).astype(np.int64)
    return Plan(first_piece, start[order].astype(np.int64), length[order].astype(np.int32), opens[order])


def _cut_documents(begin: np.ndarray, size: np.ndarray, row_length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cuts documents into pieces that fit into a row. Returns `start`, `length` and `opens` as in `Plan`."""
    piece_counts = -(-size // row_length)
    document = np.repeat(np.arange(len(size)), piece_counts)
    number = index_within_group(piece_counts)
    start = begin[document] + number * row_length
    length = np.minimum(size[document] - number * row_length, row_length)
    return start, length, number == 0


def _best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Returns the bin (from 0) of each length, by best-fit decreasing.

    Lengths are placed from the longest to the shortest, each into the fullest bin that has room for it. The sum of the
    lengths in a bin is at most `capacity`.
    """
    bins = np.empty(len(lengths), np.int64)
    # Equal lengths are placed together, into a group of bins that all have the same room.
    by_length = np.argsort(-lengths, kind="stable")
    sizes, counts = np.unique(-lengths[by_length], return_counts=True)
    bins_with_room: dict[int, list[np.ndarray]] = defaultdict(list)
    rooms: list[int] = []  # the rooms for which bins_with_room has bins, in increasing order
    opened = 0  # number of bins opened so far
    placed = 0  # number of lengths placed so far
    for size, count in zip((-sizes).tolist(), counts.tolist(), strict=True):
        unplaced = count
        while unplaced:
            smallest = bisect_left(rooms, size)
            # Fill the group of bins with the smallest sufficient room, or open new bins if no bin has enough room.
            if smallest == len(rooms):
                max_per_bin = capacity // size
                bins_to_open = -(-unplaced // max_per_bin)
                new_bins = np.arange(opened, opened + bins_to_open)
                opened += bins_to_open
                assigned = np.repeat(new_bins, max_per_bin)[:unplaced]
                full_bins, in_last_bin = divmod(unplaced, max_per_bin)
                changed_groups = [
                    (new_bins[:full_bins], capacity - max_per_bin * size),
                    (new_bins[full_bins:], capacity - in_last_bin * size),
                ]
            else:
                room = rooms[smallest]
                same_room = bins_with_room[room]
                group = same_room.pop()
                assigned = group[:unplaced]
                changed_groups = [(assigned, room - size), (group[unplaced:], room)]
                if not same_room:
                    rooms.pop(smallest)
            bins[by_length[placed : placed + len(assigned)]] = assigned
            placed += len(assigned)
            unplaced -= len(assigned)
            for group, remaining_room in changed_groups:
                if len(group) and remaining_room:
                    if not bins_with_room[remaining_room]:
                        insort(rooms, remaining_room)
                    bins_with_room[remaining_room].append(group)
    return bins


def index_within_group(counts: np.ndarray) -> np.ndarray:
    """Returns the concatenation of 0 … n - 1 for each n in `counts`."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def expand_ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns the concatenation of start … start + length - 1 for each pair of a start and a length."""
    return np.repeat(starts, lengths) + index_within_group(lengths)
