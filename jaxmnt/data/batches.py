"""Batches as a pure function of (data, seed, step): no iterator state to save or lose.

Shapes: R rows of this process, L length.

A split of N tokens is cut into ⌈N / L⌉ windows of L targets each, so that every token is a target once; the
input of a window is shifted by one token, and an end of document stands before the first. Row r of step s of
training is window number `order[s · G + r]`, where `order` is a seeded permutation that changes every epoch.
Which rows a process reads does not enter into what they contain.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np

from jaxmnt.data.store import PreparedData, TokenStream

Rows = dict[str, np.ndarray]
"""tokens, targets, segments, positions: int32 [R, L]; weights: float32 [R, L], 0 where there is no target."""


class Windows:
    """Windows of L targets over one split."""

    def __init__(self, stream: TokenStream, length: int, document_mask: bool):
        self.stream = stream
        self.length = length
        self.document_mask = document_mask
        self.whole = stream.tokens // length
        """Windows that are full; training uses these."""
        self.all = -(-stream.tokens // length)
        """Windows in all, the last perhaps padded; evaluation uses these."""

    def read(self, windows: Sequence[int]) -> Rows:
        """The rows of the given windows; a window past the end is a row without targets."""
        starts = [window * self.length for window in windows]
        tokens = self.stream.rows([start - 1 for start in starts], self.length + 1)
        offsets = np.asarray(starts, np.int64)[:, None] + np.arange(self.length)
        weights = (offsets < self.stream.tokens).astype(np.float32)
        segments, positions = self._documents(offsets)
        return {
            "tokens": np.ascontiguousarray(tokens[:, :-1]),
            "targets": np.ascontiguousarray(tokens[:, 1:]),
            "weights": weights,
            "segments": segments,
            "positions": positions,
        }

    def _documents(self, target_offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Segments and positions: a token belongs to the document of its *target*.

        So the end of a document, as an input, opens the next one at position 0.
        """
        if not self.document_mask:
            rows, length = target_offsets.shape
            ones = np.ones((rows, length), np.int32)
            return ones, np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length)).copy()
        document = np.searchsorted(self.stream.document_starts, target_offsets, side="right") - 1
        positions = target_offsets - self.stream.document_starts[document]
        within = np.minimum(positions, np.arange(target_offsets.shape[1]))  # a row may open inside a document
        segments = document - document[:, :1] + 1
        return segments.astype(np.int32), within.astype(np.int32)


class _StepRows(grain.MapDataset):
    """Element s is this process's rows of step s, read at once."""

    def __init__(self, order: Any, windows: Windows, rows: Sequence[int], global_rows: int):
        super().__init__(order)
        self._windows, self._rows, self._global_rows = windows, list(rows), global_rows

    def __len__(self) -> int:
        return len(self._parent) // self._global_rows

    def __getitem__(self, step: Any) -> Any:
        if isinstance(step, slice):
            return self.slice(step)
        first = step * self._global_rows
        return self._windows.read([int(self._parent[first + row]) for row in self._rows])


def training_rows(
    data: PreparedData,
    *,
    seed: int,
    rows: Sequence[int],
    global_rows: int,
    length: int,
    document_mask: bool,
    start_step: int,
    prefetch: int,
) -> Iterator[Rows]:
    """Endless batches from `start_step` (0 is the first), each holding the given global rows, read ahead.
    The split must hold at least one whole row.
    """
    windows = Windows(data.stream("train"), length, document_mask)
    assert windows.whole
    order = grain.MapDataset.range(windows.whole).seed(seed).shuffle().repeat()
    dataset = _StepRows(order, windows, rows, global_rows)
    options = grain.ReadOptions(num_threads=min(4, prefetch), prefetch_buffer_size=prefetch)
    iterator = iter(dataset.to_iter_dataset(options))
    grain.experimental.set_next_index(iterator, start_step)
    return iterator


def evaluation_rows(
    data: PreparedData,
    *,
    rows: Sequence[int],
    global_rows: int,
    length: int,
    document_mask: bool,
    prefetch: int,
) -> Iterator[Rows]:
    """Every held-out token once, in order; the last batch is filled up with rows without targets."""
    windows = Windows(data.stream("eval"), length, document_mask)
    batches = -(-windows.all // global_rows)
    dataset = _StepRows(grain.MapDataset.range(batches * global_rows), windows, rows, global_rows)
    options = grain.ReadOptions(num_threads=min(4, prefetch), prefetch_buffer_size=prefetch)
    return iter(dataset.to_iter_dataset(options))
