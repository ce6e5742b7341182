"""Rows of one split: what a row number stands for. Windows of the stream, or whole documents packed together.

Shapes: R rows asked for, L length. Rows are aligned by their *targets*: every token is a target once, the end of
a document included, and the input at a place is the token before its target. Before the first token of a document
stands an end of document. Where documents have none (token arrays without an id for it) nothing is known before that
token: it is no target, unless the document before is seen.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jaxmnt.data.packing import Plan, plan_rows
from jaxmnt.data.store import TokenStream

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

    def read(self, rows: Sequence[int] | np.ndarray) -> Rows:
        """The rows of these numbers; one past the end is a row without targets."""

    def offsets(self, row: int) -> np.ndarray:
        """int64 [L]: where in the stream the targets of a row are; -1 where there is none. For people who look."""


class Windows:
    """The stream cut every L targets."""

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
        """The share of places that hold a token."""
        return self.plan.fill(self.length)

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
