"""Packs documents into rows by best fit. Documents that are longer than a row are cut first, or left out."""

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxmnt.errors import ConfigError

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
    tokens: int
    """Number of tokens in all rows."""
    long_documents: int
    """Number of documents that are longer than a row."""
    folder: Path | None = None
    """Folder of the index from which the arrays are mapped; None if they are in memory."""

    @property
    def rows(self) -> int:
        return len(self.first_piece) - 1

    @property
    def host_bytes(self) -> int:
        """Host memory of the plan, in bytes. Mapped files take none."""
        if self.folder is not None:
            return 0
        return self.first_piece.nbytes + self.start.nbytes + self.length.nbytes + self.opens.nbytes

    def pieces(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the numbers of the pieces in these rows, and for each piece the index of its row in `rows`.

        Rows past the end have no pieces. Raises `ConfigError` if the files of the plan are damaged.
        """
        rows = np.minimum(rows, self.rows)
        first = self.first_piece[rows]
        counts = self.first_piece[np.minimum(rows + 1, self.rows)] - first
        if self.folder is not None and ((counts < 0) | (first < 0) | (first + counts > len(self.start))).any():
            raise damaged_index_error(self.folder, "the pieces of its rows do not follow one another")
        index = np.repeat(np.arange(len(rows)), counts)
        return expand_ranges(first, counts), index

    def fill(self, row_length: int) -> float:
        """Returns the share of positions in all rows that hold a token, not padding."""
        return self.tokens / max(1, self.rows * row_length)


def damaged_index_error(folder: Path, problem: str) -> ConfigError:
    """Returns the error for an index whose contents are wrong."""
    return ConfigError(f"data.path: {folder} cannot be used: {problem}; remove that folder, and it is written again")


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
    windows = [
        plan_window(document_starts, tokens, row_length, first, window, skip_long=skip_long)
        for first in range(0, max(1, len(document_starts)), window)
    ]
    pieces_before = np.cumsum([0, *(len(plan.start) for plan in windows)])
    first_pieces = [plan.first_piece[:-1] + before for plan, before in zip(windows, pieces_before, strict=False)]
    return Plan(
        np.concatenate([*first_pieces, pieces_before[-1:]]).astype(np.int64),
        np.concatenate([plan.start for plan in windows]),
        np.concatenate([plan.length for plan in windows]),
        np.concatenate([plan.opens for plan in windows]),
        tokens=sum(plan.tokens for plan in windows),
        long_documents=sum(plan.long_documents for plan in windows),
    )


def plan_window(
    document_starts: np.ndarray,
    tokens: int,
    row_length: int,
    first: int,
    window: int = WINDOW_DOCUMENTS,
    *,
    skip_long: bool = False,
) -> Plan:
    """Packs the window of documents that begins with number `first`. The other arguments are those of `plan_rows`.

    Each window has rows of its own, which limits time and memory.
    """
    begin = np.asarray(document_starts[first : first + window])
    end = int(document_starts[first + window]) if first + window < len(document_starts) else tokens
    size = np.diff(np.append(begin, end)) if len(begin) else np.zeros(0, np.int64)
    is_long = size > row_length
    if skip_long:
        begin, size = begin[~is_long], size[~is_long]
    start, length, opens = _cut_documents(begin, size, row_length)
    row = _best_fit(length, row_length)
    # Store the pieces by row, so that the pieces of a row are a slice.
    order = np.argsort(row, kind="stable")
    return Plan(
        np.concatenate([[0], np.cumsum(np.bincount(row))]).astype(np.int64),
        start[order].astype(np.int64),
        length[order].astype(np.int32),
        opens[order],
        tokens=int(length.sum()),
        long_documents=int(np.count_nonzero(is_long)),
    )


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
