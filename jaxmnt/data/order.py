"""Maps global row numbers to rows of sources, by arithmetic and without state.

Rows of the run are numbered g = step · G + r. Row g belongs to a *phase*, a range of steps with fixed weights, and
within it to a block of 1,000 rows. Every block of a phase has the same number of rows of each source (its weight, by
largest remainder), spread evenly over the block. So the number of rows that a source supplies before row g follows by
arithmetic, and it is the index of the row in the source's own endless, shuffled sequence of epochs.

Rows can be skipped. Row r of step s is then row number s · G + r among those that are not skipped.

A branch continues at the row where its origin stopped, even with another G: the rows that its origin has read, in all
and from each source, precede its first step.
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
"""Rows over which the shares of a mixture are exact."""

_ROUNDS = 6
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class MixturePhase(NamedTuple):
    """The weights from a step (0 is the first) on, in the order of the sources."""

    from_step: int
    weights: tuple[float, ...]


class BranchPoint(NamedTuple):
    """The point in the data where a branch continues."""

    step: int
    """Steps that its origin has taken."""
    row: int
    """Rows that these steps took, without skipped rows."""
    used: Mapping[str, int]
    """Rows that each source supplied for them, including skipped rows. Other sources start at 0."""


class Located(NamedTuple):
    """For each requested row: the index of its source, the epoch of that source (0 is the first), and the row in it."""

    source: np.ndarray
    epoch: np.ndarray
    row: np.ndarray


class Order:
    """The global order of rows over sources with `rows[name]` rows per epoch. Thread-safe."""

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
        """`skip` lists the skipped ranges of rows as (first, first after the range). `branches` lists where the run and
        its origins branched off, newest first."""
        assert list(rows) == sorted(rows) and phases[0].from_step == 0
        self.names = list(rows)
        self._rows = np.array(list(rows.values()), np.int64)
        self._keys = [_key(f"{seed}/{name}") for name in self.names]
        self._shuffle = shuffle
        self._skipped = SkippedRanges(skip)
        begin = BranchPoint(0, 0, {})
        newest = branches[0] if branches else begin
        # Newest first. Between two points every step takes the same number of rows; the first point extrapolates.
        self._points = [BranchPoint(newest.step + 1, newest.row + global_rows, {}), *branches, begin]
        self._first_rows = np.array([self.rows_taken(phase.from_step) for phase in phases], np.int64)
        self._shares = [block_shares(phase.weights) for phase in phases]
        self._layouts = [_spread(shares) for shares in self._shares]
        # Rows of each source before each phase.
        self._before = [np.zeros(len(rows), np.int64)]
        for number, (first, after) in enumerate(pairwise(self._first_rows.tolist())):
            self._before.append(self._before[-1] + self._used_in_phase(number, after - first))
        self._surplus = np.zeros(len(rows), np.int64)
        """Rows of each source that the origins have read beyond the share by the present weights."""
        if branches:
            used = np.array([newest.used.get(name, 0) for name in self.names], np.int64)
            self._surplus = used - self._used_by_weights(newest.step)
        # Cached, because consecutive steps read the same block.
        self._block = functools.lru_cache(maxsize=64)(self._make_block)

    def locate(self, step: int, rows: Sequence[int] | np.ndarray) -> Located:
        """Returns the sources and rows of the given rows (0 … G-1) of the batch of `step` (0 is the first)."""
        numbers = self.numbers(step, rows)
        phases = np.searchsorted(self._first_rows, numbers, side="right") - 1
        blocks, places = np.divmod(numbers - self._first_rows[phases], BLOCK)
        out = np.empty((3, len(numbers)), np.int64)
        for phase, block in set(zip(phases.tolist(), blocks.tolist(), strict=True)):
            in_block = (phases == phase) & (blocks == block)
            out[:, in_block] = self._block(phase, block)[:, places[in_block]]
        return Located(*out)

    def numbers(self, step: int, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """Returns the numbers in the run of the given rows of the batch of `step`, counting skipped rows."""
        return self._skipped.row_numbers(np.asarray(rows, np.int64) + self.rows_taken(step))

    @property
    def first_step(self) -> int:
        """The first step of the run itself. Earlier steps belong to the run that it branched off from."""
        return self._points[1].step

    def rows_taken(self, step: int) -> int:
        """Returns the number of rows that the steps before `step` take, without skipped rows."""
        # Interpolate between the two branch points around the step.
        after, before = next(pair for pair in pairwise(self._points) if step >= pair[1].step)
        return before.row + (step - before.step) * (after.row - before.row) // (after.step - before.step)

    def rows_skipped(self, step: int) -> int:
        """Returns the number of rows skipped before the last row of the batch of `step`."""
        last = self.rows_taken(step + 1) - 1
        return int(self._skipped.row_numbers(np.array([last]))[0]) - last

    def used(self, step: int) -> dict[str, int]:
        """Returns the rows that each source has supplied before the batch of `step`, including skipped rows."""
        return dict(zip(self.names, (self._used_by_weights(step) + self._surplus).tolist(), strict=True))

    def epochs(self, step: int) -> dict[str, float]:
        """Returns the epochs of each source that are read before the batch of `step`."""
        rows = self._rows.tolist()
        return {name: used / count for (name, used), count in zip(self.used(step).items(), rows, strict=True)}

    def last_step(self, name: str, limit: int) -> int:
        """Returns the number of steps, at most `limit`, that fit into one epoch of the source."""
        rows = int(self._rows[self.names.index(name)])
        # The rows used grow with the step, so bisect for the last step that stays within the epoch.
        after = min(self.first_step, limit) + 1
        return bisect_right(range(limit + 1), rows, after, key=lambda step: self.used(step)[name]) - 1

    def _used_by_weights(self, step: int) -> np.ndarray:
        """Returns the rows of each source before the batch of `step`, as divided by the present weights."""
        number = int(self.numbers(step, [0])[0])
        phase = int(np.searchsorted(self._first_rows, number, side="right")) - 1
        return self._before[phase] + self._used_in_phase(phase, number - int(self._first_rows[phase]))

    def _used_in_phase(self, phase: int, rows: int) -> np.ndarray:
        blocks, rest = divmod(rows, BLOCK)
        shares = self._shares[phase]
        return blocks * shares + np.bincount(self._layouts[phase][0][:rest], minlength=len(shares))

    def _make_block(self, phase: int, block: int) -> np.ndarray:
        """Returns [3, BLOCK]: source, epoch and row of each place of a block."""
        source, rank = self._layouts[phase]
        index = (self._before[phase] + self._surplus)[source] + block * self._shares[phase][source] + rank
        epoch, row = np.divmod(index, self._rows[source])
        if self._shuffle:
            for number, (size, key) in enumerate(zip(self._rows.tolist(), self._keys, strict=True)):
                is_from = source == number
                keys = _mix(key + epoch[is_from].astype(np.uint64) * _GOLDEN)  # another shuffle each epoch
                row[is_from] = permute(row[is_from], size, keys)
        return np.stack([source, epoch, row])


class SkippedRanges:
    """Ranges of rows that are skipped. Overlapping and adjacent ranges are merged."""

    def __init__(self, ranges: Sequence[tuple[int, int]]):
        self.ranges: list[tuple[int, int]] = []
        for first, after in sorted(ranges):
            if self.ranges and first <= self.ranges[-1][1]:
                first, end = self.ranges.pop()
                after = max(end, after)
            self.ranges.append((first, after))
        begins, ends = np.array(self.ranges, np.int64).reshape(-1, 2).T
        self._skipped_before = np.concatenate([[0], np.cumsum(ends - begins)])
        self._begins = begins - self._skipped_before[:-1]

    def row_numbers(self, index: np.ndarray) -> np.ndarray:
        """Returns the numbers of the rows at these indices (from 0) among the rows that are not skipped; int64."""
        return index + self._skipped_before[np.searchsorted(self._begins, index, side="right")]

    def ranges_below(self, number: int) -> list[tuple[int, int]]:
        """Returns the skipped ranges among the rows before this row number."""
        return [(first, min(after, number)) for first, after in self.ranges if first < number]


def block_shares(weights: Sequence[float]) -> np.ndarray:
    """Returns the rows of each source in a block of 1,000: the weights by largest remainder; int64 with sum 1,000."""
    total = math.fsum(weights)
    exact = np.array([weight / total * BLOCK for weight in weights])
    shares = np.floor(exact).astype(np.int64)
    # The sources with the largest remainders get the rows that rounding down left over.
    by_remainder = np.argsort(shares - exact, kind="stable")
    shares[by_remainder[: BLOCK - int(shares.sum())]] += 1
    return shares


def check_shares(names: Sequence[str], phases: Sequence[MixturePhase]) -> None:
    """Raises `ConfigError` for a weight so small that its source would never be read."""
    for phase in phases:
        for name, weight, share in zip(names, phase.weights, block_shares(phase.weights).tolist(), strict=True):
            if weight > 0 and share == 0:
                raise ConfigError(
                    f"data.sources.{name}.weight: {weight:g} of {math.fsum(phase.weights):g} is less than one row in "
                    f"{BLOCK}, the block over which shares are exact; raise it or set it to 0"
                )


def permute(index: np.ndarray, size: int, key: np.ndarray) -> np.ndarray:
    """Evaluates a pseudo-random permutation of 0 … size-1 at `index`; int64. `key` is uint64, one for each index.

    It is a Feistel network on two digits of base ⌈√size⌉ (Black and Rogaway 2002, "Ciphers with arbitrary finite
    domains"), applied again while the result is not below `size`. Its values define the order of existing runs and must
    never change.
    """
    base = np.uint64(math.isqrt(max(size - 1, 0)) + 1)
    keys = [_mix(key + np.uint64(number + 1)) for number in range(_ROUNDS)]

    def once(value: np.ndarray, keys: list[np.ndarray]) -> np.ndarray:
        high: np.ndarray = value // base
        low: np.ndarray = value % base
        for round_key in keys:
            high, low = low, (high + _mix(low ^ round_key) % base) % base
        return high * base + low

    value = once(index.astype(np.uint64), keys)
    # base² may exceed size: values outside are mapped again until they are inside (cycle walking).
    while (outside := value >= np.uint64(size)).any():
        value[outside] = once(value[outside], [round_key[outside] for round_key in keys])
    return value.astype(np.int64)


def _mix(value: np.ndarray) -> np.ndarray:
    """Hashes uint64 with Stafford's variant 13 of MurmurHash3's finalizer, as in SplitMix64 (Steele et al. 2014)."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _key(text: str) -> np.ndarray:
    """Returns the first 8 bytes of a SHA-256 as uint64 [1]. An array, because scalars warn on overflow."""
    return np.frombuffer(hashlib.sha256(text.encode()).digest()[:8], "<u8").astype(np.uint64)


def _spread(shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the source of each place of a block, and its rank within that source. Sources are spread evenly."""
    source = np.repeat(np.arange(len(shares)), shares)
    rank = np.concatenate([np.arange(share) for share in shares.tolist()])
    # Row k of n rows of a source belongs in the middle of the k-th of n equal intervals.
    position = (2 * rank + 1) / (2 * shares[source])
    order = np.argsort(position, kind="stable")
    return source[order], rank[order]
