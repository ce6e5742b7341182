"""Reads rows, as windows or packed documents, and computes their digests."""

import hashlib
from collections.abc import Sequence

import numpy as np

from jaxmnt.data.packing import Plan, expand_ranges, plan_rows, within_groups
from jaxmnt.data.store import StoredTokens, TokenStream


def row_digests(tokens: np.ndarray) -> np.ndarray:
    """Returns uint8 [R, 32]: SHA-256 of each row's token ids as little-endian int32. `tokens` is [R, L]."""
    digests = [hashlib.sha256(row.astype("<i4").tobytes()).digest() for row in tokens]
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32)


def batch_digest(digests: np.ndarray) -> str:
    """Returns the SHA-256, in hex, of the digests of all rows of the global batch in order."""
    return hashlib.sha256(digests.tobytes()).hexdigest()


Rows = dict[str, np.ndarray]
"""The fields of `fields.FIELDS` by name, [R, L] each. Arrays may be read-only views."""


class Windows:
    """Rows of L consecutive targets of a stream. Thread-safe.

    `Packed` has the same interface, and so does `elements.DatasetRows`, except for `stream` and `offsets`.
    """

    fill = 1.0
    """Share of places that hold a token."""

    def __init__(self, stream: TokenStream, length: int, document_mask: bool):
        self.stream = stream
        self.length = length
        self.document_mask = document_mask
        self.rows = stream.tokens // length
        """Rows in a training epoch."""
        self.all_rows = -(-stream.tokens // length)
        """Rows that cover every token once, the last one possibly partial; used for evaluation."""
        self._positions = np.arange(length, dtype=np.int32)[None]
        self._ones = np.ones((1, length), np.int32)

    def read(self, rows: Sequence[int] | np.ndarray) -> Rows:
        """Reads the rows with these numbers. A row past the end has no targets."""
        starts = np.asarray(rows, np.int64) * self.length
        tokens = np.empty((len(starts), self.length + 1), np.int32)
        last = int(starts.max(initial=0)) + self.length
        # Read one token more than targets: the first input is the token before the first target.
        if starts.min(initial=1) > 0 and last <= self.stream.tokens:
            self.stream.read_all(starts - 1, list(tokens))
        else:
            for out, start in zip(tokens, starts.tolist(), strict=True):
                self._read_at_edge(start, out)
        if not self.stream.are_valid_ids(tokens):
            # Locate the invalid id only now, because that is slow.
            self.stream.raise_invalid_id(starts[:, None] + np.arange(-1, self.length))
        # Without a document mask a row is one document, in which every token is a target.
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
                # Token arrays may lack ends of documents; a document must not see the last token of the one before.
                result["tokens"] = result["tokens"].copy()
                result["tokens"][opens] = self.stream.filler
        if last > self.stream.tokens:
            # Places past the end of the stream are padding.
            result["segments"] = np.where(starts[:, None] + self._positions < self.stream.tokens, result["segments"], 0)
            result["weights"] = (result["segments"] > 0).astype(np.float32)
        if self.stream.has_learn_mask:
            self._read_target_mask(starts, result["weights"])
        if self.stream.end_of_document is None:
            # Without an end-of-document id, nothing precedes the first token of a document, so it is not a target.
            without_context = opens if self.document_mask else (starts == 0)[:, None] & (self._positions == 0)
            result["weights"][without_context] = 0
        return result

    @property
    def has_mask(self) -> bool:
        """True if the data says which tokens are targets, so that a row may have none."""
        return self.stream.has_learn_mask

    @property
    def index_bytes(self) -> int:
        """Host memory of plans and document boundaries, in bytes."""
        # Stored streams need document boundaries only for the document mask; other streams always need their index.
        needed = self.document_mask or not isinstance(self.stream, StoredTokens)
        return self.stream.index_bytes if needed else 0

    def offsets(self, row: int) -> np.ndarray:
        """Returns int64 [L]: the offsets in the stream of the targets of a row, -1 for none. Used by `jaxmnt.data`."""
        offsets = row * self.length + np.arange(self.length)
        return np.where(offsets < self.stream.tokens, offsets, -1)

    def _read_at_edge(self, start: int, out: np.ndarray) -> None:
        """Reads L + 1 tokens from the one before `start`; offset -1 and offsets past the end read as the filler."""
        stop = min(start + self.length, self.stream.tokens)
        out[:] = self.stream.filler
        if stop > start:
            skip = int(start == 0)
            self.stream.read(start - 1 + skip, out[skip : stop - start + 1])

    def _read_target_mask(self, starts: np.ndarray, weights: np.ndarray) -> None:
        """Overwrites the weights of all tokens within the stream with its target mask."""
        lengths = np.clip(self.stream.tokens - starts, 0, self.length)
        rows = np.flatnonzero(lengths)
        self.stream.read_all(starts[rows], [weights[row, : lengths[row]] for row in rows.tolist()], "weights")
        self.stream.check_target_mask(weights)

    def _documents(self, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns segments, positions, and a mask of the places that open a document, [R, L] each.

        A place belongs to the document of its target, so an end of document, as an input, opens the next document at
        position 0.
        """
        target_RL = starts[:, None] + np.arange(self.length)
        document = self.stream.documents(target_RL)
        positions = target_RL - self.stream.document_starts[document]
        within = np.minimum(positions, np.arange(self.length))  # a row may begin inside a document
        return (document - document[:, :1] + 1).astype(np.int32), within.astype(np.int32), positions == 0


class Packed:
    """Rows of whole documents, packed by best fit. Documents that are longer than a row are cut."""

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
        starts = self.plan.start[pieces]
        lengths = self.plan.length[pieces]
        opens = self.plan.opens[pieces]
        filled = np.bincount(row, weights=lengths, minlength=len(row_numbers)).astype(np.int64)
        # Pieces of a row are consecutive: the tokens before a piece, less the tokens of earlier rows, give its column.
        column = np.cumsum(lengths) - lengths - (np.cumsum(filled) - filled)[row]
        stretches = [
            (index, slice(first, stop))
            for index, first, stop in zip(row.tolist(), column.tolist(), (column + lengths).tolist(), strict=True)
        ]
        # Read all pieces straight into their places; padding keeps the filler, with weight 0.
        is_padding = self._places >= filled[:, None]
        targets = np.empty(is_padding.shape, np.int32)
        targets[is_padding] = self.stream.filler
        self.stream.read_all(starts, [targets[stretch] for stretch in stretches])
        weights = (~is_padding).astype(np.float32)
        if self.stream.has_learn_mask:
            self.stream.read_all(starts, [weights[stretch] for stretch in stretches], "weights")
            self.stream.check_target_mask(weights)
        if self.stream.end_of_document is None:
            # As in Windows: nothing precedes the first token of a document.
            weights[row[opens], column[opens]] = 0
        tokens = self._inputs(targets, row, column, starts, opens)
        # Inputs are shifted targets, except at the beginning of later pieces of a document.
        if not (self.stream.are_valid_ids(targets) and self.stream.are_valid_ids(tokens[row[~opens], column[~opens]])):
            offsets = np.concatenate([self.offsets(number) for number in row_numbers.tolist() if number < self.rows])
            self.stream.raise_invalid_id(np.concatenate([offsets - 1, offsets]))
        # Padding has segment 0, and positions of its own from 0.
        segments = np.zeros(targets.shape, np.int32)
        positions = self._places - filled.astype(np.int32)[:, None]
        flat = expand_ranges(row * self.length + column, lengths)
        segments.flat[flat] = np.repeat(within_groups(np.bincount(row, minlength=len(row_numbers))) + 1, lengths)
        positions.flat[flat] = within_groups(lengths)
        return {"tokens": tokens, "targets": targets, "weights": weights, "segments": segments, "positions": positions}

    def offsets(self, row: int) -> np.ndarray:
        pieces, _ = self.plan.pieces(np.array([row]))
        offsets = expand_ranges(self.plan.start[pieces], self.plan.length[pieces])
        return np.concatenate([offsets, np.full(self.length - len(offsets), -1)])

    def _inputs(
        self, targets: np.ndarray, row: np.ndarray, column: np.ndarray, starts: np.ndarray, opens: np.ndarray
    ) -> np.ndarray:
        """Returns the token before each target. The first target of a document follows the filler."""
        tokens = np.empty_like(targets)
        tokens[:, 0] = self.stream.filler
        tokens[:, 1:] = targets[:, :-1]
        tokens[row, column] = self.stream.filler
        # Later pieces of a long document begin after the last token of the piece before.
        later = np.flatnonzero(~opens)
        places = zip(row[later].tolist(), column[later].tolist(), strict=True)
        self.stream.read_all(starts[later] - 1, [tokens[index, at : at + 1] for index, at in places])
        return tokens


def make_reader(stream: TokenStream, kind: str, length: int, document_mask: bool) -> Windows | Packed:
    """Returns the reader of rows for the value of `data.rows`."""
    return Packed(stream, length) if kind == "packed" else Windows(stream, length, document_mask)
