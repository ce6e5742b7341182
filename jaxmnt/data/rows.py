"""Reads the rows of a source, as windows of its text or as packed documents, and computes the digests of rows."""

import hashlib
from collections.abc import Sequence

import numpy as np

from jaxmnt.data.packing import Plan, damaged_index_error, expand_ranges, index_within_group
from jaxmnt.data.store import StoredTokens, TokenStream


def row_digests(tokens: np.ndarray) -> np.ndarray:
    """Returns uint8 [R, 32]: the SHA-256 of each row's token ids as little-endian int32. `tokens` is [R, L]."""
    digests = [hashlib.sha256(row.astype("<i4").tobytes()).digest() for row in tokens]
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32)


def batch_digest(digests: np.ndarray) -> str:
    """Returns the SHA-256, in hex, of the digests of all rows of the global batch in order."""
    return hashlib.sha256(digests.tobytes()).hexdigest()


Rows = dict[str, np.ndarray]
"""The fields of `fields.FIELDS` by name, [R, L] each. Arrays may be read-only views."""


class Windows:
    """Reads rows of L consecutive tokens of a stream as targets. Thread-safe.

    `Packed` has the same interface. `elements.DatasetRows` also has it, but without `stream` and `offsets`.
    """

    fill = 1.0
    """Share of positions in all rows that hold a token, not padding."""

    def __init__(self, stream: TokenStream, length: int, document_mask: bool):
        self.stream = stream
        self.length = length
        self.document_mask = document_mask
        self.rows = stream.tokens // length
        """Number of rows in a training epoch."""
        self.row_count_with_partial = -(-stream.tokens // length)
        """Number of rows that together hold every token once; the last row may be partial. Used for evaluation."""
        self._positions = np.arange(length, dtype=np.int32)[None]
        self._ones = np.ones((1, length), np.int32)

    def read(self, rows: Sequence[int] | np.ndarray) -> Rows:
        """Reads the rows with these numbers. A row past the end has no targets."""
        starts = np.asarray(rows, np.int64) * self.length
        tokens = np.empty((len(starts), self.length + 1), np.int32)
        last = int(starts.max(initial=0)) + self.length
        # Read one token more than there are targets, because the first input is the token before the first target.
        if starts.min(initial=1) > 0 and last <= self.stream.tokens:
            self.stream.read_all(starts - 1, list(tokens))
        else:
            for out, start in zip(tokens, starts.tolist(), strict=True):
                self._read_at_edge(start, out)
        if not self.stream.are_valid_ids(tokens):
            # Only now find the invalid id, because that is slow.
            self.stream.raise_invalid_id(starts[:, None] + np.arange(-1, self.length))
        # Without a document mask a row counts as one document, in which every token is a target.
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
                # Token arrays may lack ends of documents, but a document must not see the end of the one before.
                result["tokens"] = result["tokens"].copy()
                result["tokens"][opens] = self.stream.filler
        if last > self.stream.tokens:
            # Positions past the end of the stream are padding.
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
        """True if the data has a target mask. Some rows may then have no targets."""
        return self.stream.has_learn_mask

    @property
    def index_bytes(self) -> int:
        """Host memory of document boundaries, in bytes."""
        # Stored streams need document boundaries only for the document mask; other streams always do.
        needs_index = self.document_mask or not isinstance(self.stream, StoredTokens)
        return self.stream.index_bytes if needs_index else 0

    def offsets(self, row: int) -> np.ndarray:
        """Returns int64 [L]: the offset in the stream of each target of a row, or -1 for padding. For `jaxmnt.data`."""
        offsets = row * self.length + np.arange(self.length)
        return np.where(offsets < self.stream.tokens, offsets, -1)

    def _read_at_edge(self, start: int, out: np.ndarray) -> None:
        """Reads L + 1 tokens into `out`, beginning with the one before `start`. Reads the filler outside the stream."""
        stop = min(start + self.length, self.stream.tokens)
        out[:] = self.stream.filler
        if stop > start:
            skip = int(start == 0)
            self.stream.read(start - 1 + skip, out[skip : stop - start + 1])

    def _read_target_mask(self, starts: np.ndarray, weights: np.ndarray) -> None:
        """Replaces the weights of all tokens in the stream with the target mask."""
        lengths = np.clip(self.stream.tokens - starts, 0, self.length)
        rows = np.flatnonzero(lengths)
        self.stream.read_all(starts[rows], [weights[row, : lengths[row]] for row in rows.tolist()], "weights")
        self.stream.check_target_mask(weights)

    def _documents(self, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns segments, positions, and a mask of the first position of each document, [R, L] each.

        Each input belongs to the document of its target. So an end of document, as an input, is the first position of
        the next document.
        """
        target_RL = starts[:, None] + np.arange(self.length)
        document = self.stream.documents(target_RL)
        positions = target_RL - self.stream.document_starts[document]
        positions_in_row = np.minimum(positions, np.arange(self.length))  # a row may begin inside a document
        segments = document - document[:, :1] + 1
        return segments.astype(np.int32), positions_in_row.astype(np.int32), positions == 0


class Packed:
    """Reads rows of complete documents, packed by best fit. Documents that are longer than a row are cut, or left
    out."""

    def __init__(self, stream: TokenStream, length: int, *, skip_long: bool = False):
        self.stream = stream
        self.length = length
        self.plan: Plan = stream.plan(length, skip_long=skip_long)
        self.long_documents = self.plan.long_documents
        """Number of documents that are longer than a row."""
        self.rows = self.row_count_with_partial = self.plan.rows
        self._places = np.arange(length, dtype=np.int32)

    @property
    def fill(self) -> float:
        return self.plan.fill(self.length)

    @property
    def has_mask(self) -> bool:
        return self.stream.has_learn_mask

    @property
    def index_bytes(self) -> int:
        needs_starts = self.plan.folder is None
        return self.plan.host_bytes + (self.stream.index_bytes if needs_starts else 0)

    def read(self, rows: Sequence[int] | np.ndarray) -> Rows:
        row_numbers = np.asarray(rows, np.int64)
        pieces, row = self.plan.pieces(row_numbers)
        starts = self.plan.start[pieces]
        lengths = self.plan.length[pieces]
        opens = self.plan.opens[pieces]
        filled = np.bincount(row, weights=lengths, minlength=len(row_numbers)).astype(np.int64)
        self._check_pieces(starts, lengths, filled)
        # The column of a piece is the number of tokens in all pieces before it, less those in earlier rows.
        column = np.cumsum(lengths) - lengths - (np.cumsum(filled) - filled)[row]
        slices = [
            (index, slice(first, stop))
            for index, first, stop in zip(row.tolist(), column.tolist(), (column + lengths).tolist(), strict=True)
        ]
        # Read each piece directly into its place in the row. Padding holds the filler and has weight 0.
        is_padding = self._places >= filled[:, None]
        targets = np.empty(is_padding.shape, np.int32)
        targets[is_padding] = self.stream.filler
        self.stream.read_all(starts, [targets[piece_slice] for piece_slice in slices])
        weights = (~is_padding).astype(np.float32)
        if self.stream.has_learn_mask:
            self.stream.read_all(starts, [weights[piece_slice] for piece_slice in slices], "weights")
            self.stream.check_target_mask(weights)
        if self.stream.end_of_document is None:
            # Nothing precedes the first token of a document, so it is not a target, as in Windows.
            weights[row[opens], column[opens]] = 0
        tokens = self._inputs(targets, row, column, starts, opens)
        # Inputs are shifted targets, except the first input of a piece that continues a document.
        continuation_inputs = tokens[row[~opens], column[~opens]]
        if not (self.stream.are_valid_ids(targets) and self.stream.are_valid_ids(continuation_inputs)):
            offsets = np.concatenate([self.offsets(number) for number in row_numbers.tolist() if number < self.rows])
            self.stream.raise_invalid_id(np.concatenate([offsets - 1, offsets]))
        # Padding has segment 0, and positions from 0.
        segments = np.zeros(targets.shape, np.int32)
        positions = self._places - filled.astype(np.int32)[:, None]
        flat = expand_ranges(row * self.length + column, lengths)
        pieces_per_row = np.bincount(row, minlength=len(row_numbers))
        segments.flat[flat] = np.repeat(index_within_group(pieces_per_row) + 1, lengths)
        positions.flat[flat] = index_within_group(lengths)
        return {"tokens": tokens, "targets": targets, "weights": weights, "segments": segments, "positions": positions}

    def offsets(self, row: int) -> np.ndarray:
        pieces, _ = self.plan.pieces(np.array([row]))
        offsets = expand_ranges(self.plan.start[pieces], self.plan.length[pieces])
        return np.concatenate([offsets, np.full(self.length - len(offsets), -1)])

    def _check_pieces(self, starts: np.ndarray, lengths: np.ndarray, filled: np.ndarray) -> None:
        """Raises `ConfigError` if pieces of a mapped plan do not lie in the stream, or do not fit into their rows."""
        if self.plan.folder is None:
            return
        is_outside = (lengths < 1) | (starts < 0) | (starts + lengths > self.stream.tokens)
        if is_outside.any() or (filled > self.length).any():
            raise damaged_index_error(self.plan.folder, "a row holds tokens that are not in the data")

    def _inputs(
        self, targets: np.ndarray, row: np.ndarray, column: np.ndarray, starts: np.ndarray, opens: np.ndarray
    ) -> np.ndarray:
        """Returns the token before each target. Before the first target of a document, that is the filler."""
        tokens = np.empty_like(targets)
        tokens[:, 0] = self.stream.filler
        tokens[:, 1:] = targets[:, :-1]
        tokens[row, column] = self.stream.filler
        # A piece that continues a document follows the last token of the previous piece.
        continuing = np.flatnonzero(~opens)
        first_columns = zip(row[continuing].tolist(), column[continuing].tolist(), strict=True)
        outs = [tokens[index, first : first + 1] for index, first in first_columns]
        self.stream.read_all(starts[continuing] - 1, outs)
        return tokens


def make_reader(
    stream: TokenStream, kind: str, length: int, document_mask: bool, *, skip_long: bool = False
) -> Windows | Packed:
    """Returns the row reader for `kind`, a value of `data.rows`."""
    if kind == "packed":
        return Packed(stream, length, skip_long=skip_long)
    return Windows(stream, length, document_mask)
