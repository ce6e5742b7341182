"""What a row holds, and its digest."""

import hashlib
from collections.abc import Sequence

import numpy as np

from jaxmnt.data.packing import Plan, expanded, plan_rows, within_groups
from jaxmnt.data.store import StoredTokens, TokenStream


def row_digests(tokens: np.ndarray) -> np.ndarray:
    """uint8 [R, 32]: SHA-256 of each row's token ids as little-endian int32. `tokens`: [R, L]."""
    digests = [hashlib.sha256(row.astype("<i4").tobytes()).digest() for row in tokens]
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32)


def batch_digest(digests: np.ndarray) -> str:
    """SHA-256, in hex, over the digests of all rows of the global batch in order."""
    return hashlib.sha256(digests.tobytes()).hexdigest()


Rows = dict[str, np.ndarray]
"""By name, the fields of `fields.FIELDS`, [R, L] each. Arrays may be views that cannot be written to."""


class Windows:
    """The stream cut every L targets. Thread-safe.

    `Packed` offers the same, and so does `elements.GivenRows`, but for the stream and places in it.
    """

    fill = 1.0
    """The share of places that hold a token."""

    def __init__(self, stream: TokenStream, length: int, document_mask: bool):
        self.stream = stream
        self.length = length
        self.document_mask = document_mask
        self.rows = stream.tokens // length
        """Rows of an epoch of training."""
        self.all_rows = -(-stream.tokens // length)
        """Rows in which every token is a target once, the last perhaps not full; evaluation uses these."""
        self._positions = np.arange(length, dtype=np.int32)[None]
        self._ones = np.ones((1, length), np.int32)

    def read(self, rows: Sequence[int] | np.ndarray) -> Rows:
        """The rows of these numbers; one past the end is a row without targets."""
        starts = np.asarray(rows, np.int64) * self.length
        tokens = np.empty((len(starts), self.length + 1), np.int32)
        last = int(starts.max(initial=0)) + self.length
        if starts.min(initial=1) > 0 and last <= self.stream.tokens:
            self.stream.read_all(starts - 1, list(tokens))
        else:
            for line, start in zip(tokens, starts.tolist(), strict=True):
                self._read_at_an_end(start, line)
        if not self.stream.holds_ids(tokens):
            self.stream.refuse(starts[:, None] + np.arange(-1, self.length))
        ones = np.broadcast_to(self._ones, (len(starts), self.length))
        result = {
            "tokens": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "weights": ones.astype(np.float32),
            "segments": ones,
            "positions": np.broadcast_to(self._positions, ones.shape),
        }
        if self.document_mask:
            result["segments"], result["positions"], opens = self._documents(starts)
            if (result["tokens"][opens] != self.stream.filler).any():
                # Tokens given as arrays may lack ends; the last token of a document must not begin the next.
                result["tokens"] = result["tokens"].copy()
                result["tokens"][opens] = self.stream.filler
        if last > self.stream.tokens:
            result["segments"] = np.where(starts[:, None] + self._positions < self.stream.tokens, result["segments"], 0)
            result["weights"] = (result["segments"] > 0).astype(np.float32)
        if self.stream.has_learn_mask:
            self._read_learn(starts, result["weights"])
        if self.stream.end_of_document is None:
            unknown = opens if self.document_mask else (starts == 0)[:, None] & (self._positions == 0)
            result["weights"][unknown] = 0
        return result

    @property
    def has_mask(self) -> bool:
        """Returns whether the data says which tokens are targets, so that a row may have none."""
        return self.stream.has_learn_mask

    @property
    def index_bytes(self) -> int:
        """Host memory that plans and document boundaries take, in bytes."""
        # Stored documents are only looked for with the mask; other streams cannot do without their index.
        needed = self.document_mask or not isinstance(self.stream, StoredTokens)
        return self.stream.index_bytes if needed else 0

    def offsets(self, row: int) -> np.ndarray:
        """int64 [L]: where in the stream the targets of a row are; -1 where there is none. For people who look."""
        offsets = row * self.length + np.arange(self.length)
        return np.where(offsets < self.stream.tokens, offsets, -1)

    def _read_at_an_end(self, start: int, line: np.ndarray) -> None:
        """L + 1 tokens from the one before `start`; offset -1 and those past the end read as an end of document."""
        stop = min(start + self.length, self.stream.tokens)
        line[:] = self.stream.filler
        if stop > start:
            skip = int(start == 0)
            self.stream.read(start - 1 + skip, line[skip : stop - start + 1])

    def _read_learn(self, starts: np.ndarray, weights: np.ndarray) -> None:
        """Overwrites the weights of all tokens that the stream has."""
        real = np.clip(self.stream.tokens - starts, 0, self.length)
        some = np.flatnonzero(real)
        self.stream.read_all(starts[some], [weights[row, : real[row]] for row in some.tolist()], "weights")
        self.stream.check_learn(weights)

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
        row_numbers = np.asarray(rows, np.int64)
        pieces, row = self.plan.pieces(row_numbers)
        starts, lengths, opens = self.plan.start[pieces], self.plan.length[pieces], self.plan.opens[pieces]
        filled = np.bincount(row, weights=lengths, minlength=len(row_numbers)).astype(np.int64)
        # The pieces of a row stand one after another: tokens before this piece, less those of the rows before.
        column = np.cumsum(lengths) - lengths - (np.cumsum(filled) - filled)[row]
        stretches = [
            (index, slice(first, stop))
            for index, first, stop in zip(row.tolist(), column.tolist(), (column + lengths).tolist(), strict=True)
        ]
        is_padding = self._places >= filled[:, None]
        targets = np.empty(is_padding.shape, np.int32)
        targets[is_padding] = self.stream.filler
        self.stream.read_all(starts, [targets[stretch] for stretch in stretches])
        weights = (~is_padding).astype(np.float32)
        if self.stream.has_learn_mask:
            self.stream.read_all(starts, [weights[stretch] for stretch in stretches], "weights")
            self.stream.check_learn(weights)
        if self.stream.end_of_document is None:
            weights[row[opens], column[opens]] = 0
        tokens = self._inputs(targets, row, column, starts, opens)
        if not (self.stream.holds_ids(targets) and self.stream.holds_ids(tokens[row[~opens], column[~opens]])):
            offsets = np.concatenate([self.offsets(number) for number in row_numbers.tolist() if number < self.rows])
            self.stream.refuse(np.concatenate([offsets - 1, offsets]))
        segments, positions = np.zeros(targets.shape, np.int32), self._places - filled.astype(np.int32)[:, None]
        flat = expanded(row * self.length + column, lengths)
        segments.flat[flat] = np.repeat(within_groups(np.bincount(row, minlength=len(row_numbers))) + 1, lengths)
        positions.flat[flat] = within_groups(lengths)
        return {"tokens": tokens, "targets": targets, "weights": weights, "segments": segments, "positions": positions}

    def offsets(self, row: int) -> np.ndarray:
        pieces, _ = self.plan.pieces(np.array([row]))
        offsets = expanded(self.plan.start[pieces], self.plan.length[pieces])
        return np.concatenate([offsets, np.full(self.length - len(offsets), -1)])

    def _inputs(
        self, targets: np.ndarray, row: np.ndarray, column: np.ndarray, starts: np.ndarray, opens: np.ndarray
    ) -> np.ndarray:
        """Returns the token before each target: before the first of a document its end, never another document's."""
        tokens = np.empty_like(targets)
        tokens[:, 0] = self.stream.filler
        tokens[:, 1:] = targets[:, :-1]
        tokens[row, column] = self.stream.filler
        rests = np.flatnonzero(~opens)  # of long documents
        places = zip(row[rests].tolist(), column[rests].tolist(), strict=True)
        self.stream.read_all(starts[rests] - 1, [tokens[index, at : at + 1] for index, at in places])
        return tokens


def make_reader(stream: TokenStream, kind: str, length: int, document_mask: bool) -> Windows | Packed:
    """Rows of the kind that `data.rows` names."""
    return Packed(stream, length) if kind == "packed" else Windows(stream, length, document_mask)
