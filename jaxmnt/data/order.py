"""Maps global row numbers to rows of sources. The mapping is a pure function without state.

The rows of a run are numbered g = step · G + r. Row g belongs to a *phase*, which is a range of steps with fixed
weights, and in the phase to a block of 1,000 rows. Every block of a phase has the same number of rows from each source
(its weight, rounded by largest remainder), spread evenly over the block. So the number of rows that a source supplies
before row g can be computed. This number is the index of the row in the source's endless, shuffled sequence of epochs.

Rows can be skipped. Row r of step s is then row number s · G + r among the rows that are not skipped.

A branch continues at the row where its origin stopped, even if its G differs, because the rows that its origin has
read, in total and from each source, count as read before its first step.
"""

import functools
import hashlib
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from jaxmnt.errors import ConfigError

BLOCK = 1000
"""Number of rows in a block, in which each source has exactly its share."""

_FEISTEL_ROUNDS = 6
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class MixturePhase(NamedTuple):
    """A range of steps with fixed weights of the sources."""

    from_step: int
    """First step of the phase, from 0."""
    weights: tuple[float, ...]
    """Weight of each source, in the order of the sources."""


class BranchPoint(NamedTuple):
    """The point in the data from which a branch continues."""

    step: int
    """Number of steps that the origin took before this point."""
    row: int
    """Number of rows that these steps took, without skipped rows."""
    used: Mapping[str, int]
    """Number of rows that each source supplied for these steps, including skipped rows. Sources that are missing here
    start at 0."""


class Located(NamedTuple):
    """For each requested row: the index of its source, the epoch of that source (from 0), and the row in that epoch."""

    source: np.ndarray
    epoch: np.ndarray
    row: np.ndarray


class Order:
    """The global order of rows from sources that have `rows[name]` rows per epoch. Thread-safe."""

    def __init__(
        self,
        rows: Mapping[str, int],
        phases: Sequence[MixturePhase],
        *,
        seed: int,
        shuffle: bool,
        global_rows: int,
        skip: Sequence[tuple[int, int]] = (),
        branches: Sequence[BranchPoint] = (),
    ):
        """`skip` lists the ranges of rows to skip as (first row, first row after the range). `branches` lists the
        points where the run and its origins branched off, newest first."""
        assert list(rows) == sorted(rows) and phases[0].from_step == 0
        self.names = list(rows)
        self._rows = np.array(list(rows.values()), np.int64)
        self._keys = [_key(f"{seed}/{name}") for name in self.names]
        self._shuffle = shuffle
        self._skipped = SkippedRanges(skip)
        begin = BranchPoint(0, 0, {})
        newest = branches[0] if branches else begin
        # Newest first. Between two points every step takes the same number of rows. The first point is one step after
        # the newest branch point, so that later steps can be extrapolated from the two.
        self._points = [BranchPoint(newest.step + 1, newest.row + global_rows, {}), *branches, begin]
        self._first_rows = np.array([self.rows_taken(phase.from_step) for phase in phases], np.int64)
        self._shares = [block_shares(phase.weights) for phase in phases]
        self._layouts = [_spread(shares) for shares in self._shares]
        # Rows that each source supplies before each phase.
        self._used_before_phase = [np.zeros(len(rows), np.int64)]
        for number, (first, first_of_next) in enumerate(pairwise(self._first_rows.tolist())):
            used_in_phase = self._used_in_phase(number, first_of_next - first)
            self._used_before_phase.append(self._used_before_phase[-1] + used_in_phase)
        self._surplus = np.zeros(len(rows), np.int64)
        """Rows of each source that the origins have read in excess of its share according to the present weights."""
        if branches:
            used = np.array([newest.used.get(name, 0) for name in self.names], np.int64)
            self._surplus = used - self._share_by_weights(newest.step)
        # Cached, because consecutive steps read the same block.
        self._block = functools.lru_cache(maxsize=64)(self._make_block)

    def locate(self, step: int, rows: Sequence[int] | np.ndarray) -> Located:
        """Returns the source, epoch and row of each of these rows (of 0 … G-1) of the batch of `step` (from 0)."""
        numbers = self.numbers(step, rows)
        phases = np.searchsorted(self._first_rows, numbers, side="right") - 1
        blocks, rows_in_block = np.divmod(numbers - self._first_rows[phases], BLOCK)
        located = np.empty((3, len(numbers)), np.int64)
        for phase, block in set(zip(phases.tolist(), blocks.tolist(), strict=True)):
            in_block = (phases == phase) & (blocks == block)
            located[:, in_block] = self._block(phase, block)[:, rows_in_block[in_block]]
        return Located(*located)

    def numbers(self, step: int, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """Returns the numbers of these rows of the batch of `step` among all rows of the run, including skipped
        rows."""
        return self._skipped.row_numbers(np.asarray(rows, np.int64) + self.rows_taken(step))

    @property
    def first_step(self) -> int:
        """The first step of the run itself. Earlier steps belong to the run from which it branched off."""
        return self._points[1].step

    def rows_taken(self, step: int) -> int:
        """Returns the number of rows that all steps before `step` take, without skipped rows."""
        # Interpolate between the two branch points around the step.
        end, begin = next(pair for pair in pairwise(self._points) if step >= pair[1].step)
        return begin.row + (step - begin.step) * (end.row - begin.row) // (end.step - begin.step)

    def rows_skipped(self, step: int) -> int:
        """Returns the number of rows skipped before the last row of the batch of `step`."""
        last = self.rows_taken(step + 1) - 1
        return int(self._skipped.row_numbers(np.array([last]))[0]) - last

    def used(self, step: int) -> dict[str, int]:
        """Returns the number of rows that each source has supplied before the batch of `step`, with skipped rows."""
        used = self._share_by_weights(step) + self._surplus
        return dict(zip(self.names, used.tolist(), strict=True))

    def epochs(self, step: int) -> dict[str, float]:
        """Returns the number of epochs, with fractions, that each source has supplied before the batch of `step`."""
        rows_per_epoch = self._rows.tolist()
        return {name: used / rows for (name, used), rows in zip(self.used(step).items(), rows_per_epoch, strict=True)}

    def last_step(self, name: str, limit: int) -> int:
        """Returns the number of steps, at most `limit`, that one epoch of the source is enough for."""
        rows = int(self._rows[self.names.index(name)])
        # The number of used rows increases with the step, so bisect for the last step that does not exceed the epoch.
        lower = min(self.first_step, limit) + 1
        return bisect_right(range(limit + 1), rows, lower, key=lambda step: self.used(step)[name]) - 1

    def _share_by_weights(self, step: int) -> np.ndarray:
        """Returns each source's share of the rows before the batch of `step` according to the present weights."""
        number = int(self.numbers(step, [0])[0])
        phase = int(np.searchsorted(self._first_rows, number, side="right")) - 1
        return self._used_before_phase[phase] + self._used_in_phase(phase, number - int(self._first_rows[phase]))

    def _used_in_phase(self, phase: int, rows: int) -> np.ndarray:
        """Returns the number of rows from each source among the first `rows` rows of a phase."""
        blocks, rows_of_last_block = divmod(rows, BLOCK)
        shares = self._shares[phase]
        sources, _ = self._layouts[phase]
        return blocks * shares + np.bincount(sources[:rows_of_last_block], minlength=len(shares))

    def _make_block(self, phase: int, block: int) -> np.ndarray:
        """Returns [3, BLOCK]: the source, epoch and row of each row of a block."""
        source, rank = self._layouts[phase]
        first = self._used_before_phase[phase] + self._surplus + block * self._shares[phase]
        index = first[source] + rank
        epoch, row = np.divmod(index, self._rows[source])
        if self._shuffle:
            for number, (size, key) in enumerate(zip(self._rows.tolist(), self._keys, strict=True)):
                in_source = source == number
                keys = _mix(key + epoch[in_source].astype(np.uint64) * _GOLDEN)  # a different shuffle for each epoch
                row[in_source] = permute(row[in_source], size, keys)
        return np.stack([source, epoch, row])


class SkippedRanges:
    """Ranges of rows that are skipped. Overlapping and adjacent ranges are merged."""

    def __init__(self, ranges: Sequence[tuple[int, int]]):
        self.ranges: list[tuple[int, int]] = []
        for first, stop in sorted(ranges):
            if self.ranges and first <= self.ranges[-1][1]:
                first, previous_stop = self.ranges.pop()
                stop = max(previous_stop, stop)
            self.ranges.append((first, stop))
        begins, ends = np.array(self.ranges, np.int64).reshape(-1, 2).T
        self._skipped_before = np.concatenate([[0], np.cumsum(ends - begins)])
        self._begins = begins - self._skipped_before[:-1]

    def row_numbers(self, index: np.ndarray) -> np.ndarray:
        """Returns the numbers of the rows that have these indices (from 0) among the rows that are not skipped;
        int64."""
        return index + self._skipped_before[np.searchsorted(self._begins, index, side="right")]

    def ranges_below(self, number: int) -> list[tuple[int, int]]:
        """Returns the parts of the skipped ranges that are before this row number."""
        return [(first, min(stop, number)) for first, stop in self.ranges if first < number]


def block_shares(weights: Sequence[float]) -> np.ndarray:
    """Returns the number of rows from each source in a block of 1,000 rows; int64 with sum 1,000.

    The weights are rounded by the method of largest remainders.
    """
    total = math.fsum(weights)
    exact = np.array([weight / total * BLOCK for weight in weights])
    shares = np.floor(exact).astype(np.int64)
    # The sources with the largest remainders get the rows that remain after rounding down.
    by_remainder = np.argsort(shares - exact, kind="stable")
    shares[by_remainder[: BLOCK - int(shares.sum())]] += 1
    return shares


def check_shares(names: Sequence[str], phases: Sequence[MixturePhase]) -> None:
    """Raises `ConfigError` if a weight is above 0 but so small that its source would never be read."""
    for phase in phases:
        for name, weight, share in zip(names, phase.weights, block_shares(phase.weights).tolist(), strict=True):
            if weight > 0 and share == 0:
                raise ConfigError(
                    f"data.sources.{name}.weight: {weight:g} of {math.fsum(phase.weights):g} is less than one row in "
                    f"{BLOCK}, the size of the blocks in which shares are exact; raise it or set it to 0"
                )


def permute(index: np.ndarray, size: int, key: np.ndarray) -> np.ndarray:
    """Evaluates a pseudo-random permutation of 0 … size-1 at `index`; int64. `key` is uint64, with one key per index.

    The permutation is a Feistel network on two digits of base ⌈√size⌉ (Black and Rogaway 2002, "Ciphers with arbitrary
    finite domains"), which is applied again until the result is below `size`. Its values define the order of rows in
    existing runs and must never change.
    """
    base = np.uint64(math.isqrt(max(size - 1, 0)) + 1)
    keys = [_mix(key + np.uint64(number + 1)) for number in range(_FEISTEL_ROUNDS)]

    def encrypt(value: np.ndarray, keys: list[np.ndarray]) -> np.ndarray:
        high: np.ndarray = value // base
        low: np.ndarray = value % base
        for round_key in keys:
            high, low = low, (high + _mix(low ^ round_key) % base) % base
        return high * base + low

    value = encrypt(index.astype(np.uint64), keys)
    # base² may exceed size, so results of at least `size` are mapped again (cycle walking).
    while (outside := value >= np.uint64(size)).any():
        value[outside] = encrypt(value[outside], [round_key[outside] for round_key in keys])
    return value.astype(np.int64)


def _mix(value: np.ndarray) -> np.ndarray:
    """Hashes uint64 numbers with variant 13 by Stafford of MurmurHash3's finalizer, as SplitMix64 does (Steele et al.
    2014)."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _key(text: str) -> np.ndarray:
    """Returns the first 8 bytes of a text's SHA-256 as uint64 [1], not as a scalar, because scalars warn of
    overflow."""
    return np.frombuffer(hashlib.sha256(text.encode()).digest()[:8], "<u8").astype(np.uint64)


def _spread(shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the source of each row of a block, and the number of earlier rows in the block from the same source.

    The rows of each source are spread evenly over the block.
    """
    source = np.repeat(np.arange(len(shares)), shares)
    rank = np.concatenate([np.arange(share) for share in shares.tolist()])
    # Row k of the n rows from a source belongs in the middle of the k-th of n equal intervals of the block.
    position = (2 * rank + 1) / (2 * shares[source])
    order = np.argsort(position, kind="stable")
    return source[order], rank[order]
