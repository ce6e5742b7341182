"""Makes batches as a pure function of (data config with its skip list, seed, branch points, step), without iterator
state.

Shapes: G rows of a global batch, R rows of it that this process reads, L length.

Row r of step s is number s · G + r among the rows of the run that are not skipped; a branch continues from the row
where its origin stopped. `order.py` maps the number to a source and a row of that source, and `rows.py` reads that row.
The batch does not depend on which rows a process reads, or on the number of threads that read them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, SupportsIndex

import grain
import numpy as np

from jaxmnt.config.data import Data
from jaxmnt.config.schema import Config
from jaxmnt.data.elements import DatasetRows
from jaxmnt.data.grain_source import GrainData
from jaxmnt.data.index import IndexKey
from jaxmnt.data.manifest import SPLITS
from jaxmnt.data.order import BLOCK, BranchPoint, Located, Order, block_shares, check_shares
from jaxmnt.data.rows import Packed, Rows, Windows, make_reader
from jaxmnt.data.sources import Part, Sources, on_end, phases
from jaxmnt.data.store import PreparedData, StoredTokens
from jaxmnt.errors import ConfigError

_ENDLESS = 2**62

_SAMPLED_STORED_ROWS = 1024
"""Number of rows of prepared data whose target masks are read at the start."""
_SAMPLED_DATASET_ROWS = 64
"""Number of rows of a user's dataset, which may be slow, whose target masks are read at the start."""
_ROWS_PER_READ = 64

RowReader = Windows | Packed | DatasetRows
"""Readers with the interface that `Windows` documents."""


class WithoutTargets(NamedTuple):
    """Counts the rows of a source that have no target."""

    rows: int
    """Number of rows without a target among those that were read."""
    rows_read: int
    """Number of rows that were read."""
    is_sample: bool
    """True if the source has more rows than were read."""

    @property
    def share(self) -> float:
        """The share of the rows that have no target."""
        return self.rows / self.rows_read


class TrainingData:
    """The batches of a run, by step."""

    def __init__(self, config: Config, sources: Sources, branches: Sequence[BranchPoint] | None = ()):
        """`branches` lists the points where the run branched off, or is None until `branch_at` sets them."""
        self._config = config
        self.readers = {name: _reader(part, "train", config.data) for name, part in sources.parts.items()}
        self.names = list(self.readers)
        self._rows = {name: reader.rows for name, reader in self.readers.items()}
        """Number of rows per epoch of each source."""
        check_shares(self.names, phases(config.data))
        for name, count in self._rows.items():
            if not count:
                part, reader = sources.parts[name], self.readers[name]
                if config.data.long_documents == "skip" and isinstance(reader, Packed) and reader.long_documents:
                    raise ConfigError(
                        f"data.long_documents: all {reader.long_documents} documents of {part.path} are longer than a "
                        f"row of {config.data.sequence_length} tokens; raise data.sequence_length, or set it to cut"
                    )
                raise ConfigError(
                    f"data.sequence_length: {config.data.sequence_length} is more than the {part.tokens('train')} "
                    f"tokens of {part.path}; lower it or prepare more text"
                )
        self.order = order_of(config, self._rows, branches or ())
        if branches is not None:
            _check_enough_rows(self.order, self._rows, config)

    def branch_at(self, branches: Sequence[BranchPoint]) -> None:
        """Sets the points where the run branched off. Raises `ConfigError` if the sources have too few rows after
        them."""
        self.order = order_of(self._config, self._rows, branches)
        _check_enough_rows(self.order, self._rows, self._config)

    def batch(self, step: int, rows: Sequence[int] | np.ndarray) -> Rows:
        """Returns the rows numbered `rows` (of 0 … G-1) of the batch of `step` (from 0)."""
        located = self.order.locate(step, rows)
        if len(self.names) == 1:
            return self.readers[self.names[0]].read(located.row)
        return self._merge(located)

    @property
    def index_bytes(self) -> int:
        """Host memory of packing plans and document boundaries, in bytes."""
        return sum(reader.index_bytes for reader in self.readers.values())

    def without_targets(self) -> dict[str, WithoutTargets]:
        """Counts the rows without a target in each source that has a target mask.

        Only a sample of a large source is counted, always the same rows, because a mask has a byte per token.
        """
        return {name: _without_targets(reader) for name, reader in self.readers.items() if reader.has_mask}

    def empty_batches(self, without_targets: dict[str, WithoutTargets]) -> float:
        """Estimates the share of batches without a target, assuming that rows are drawn independently. If the weights
        of the sources change during the run, the estimate is for the first phase."""
        settings = self._config.data
        shares = zip(self.names, block_shares(phases(settings)[0].weights).tolist(), strict=True)
        share_of_rows = sum(
            share / BLOCK * without_targets[name].share for name, share in shares if name in without_targets
        )
        return share_of_rows**settings.global_batch_size

    def _merge(self, located: Located) -> Rows:
        """Reads all rows of a source together, and puts the rows of all sources into the order of the batch."""
        batch = {}
        for number, name in enumerate(self.names):
            rows_in_batch = np.flatnonzero(located.source == number)
            if not len(rows_in_batch):
                continue
            rows_of_source = self.readers[name].read(located.row[rows_in_batch])
            for field, array in rows_of_source.items():
                if field not in batch:
                    batch[field] = np.empty((len(located.source), *array.shape[1:]), array.dtype)
                batch[field][rows_in_batch] = array
        return batch


def order_of(config: Config, rows: Mapping[str, int], branches: Sequence[BranchPoint] = ()) -> Order:
    """Returns the global order of rows for a config whose sources have `rows[name]` rows per epoch."""
    settings = config.data
    return Order(
        rows,
        phases(settings),
        seed=config.seed,
        shuffle=settings.shuffle,
        global_rows=settings.global_batch_size,
        skip=skipped_ranges(settings),
        branches=branches,
    )


def _without_targets(reader: RowReader) -> WithoutTargets:
    is_stored = isinstance(getattr(reader, "stream", None), StoredTokens)
    limit = _SAMPLED_STORED_ROWS if is_stored else _SAMPLED_DATASET_ROWS
    is_sample = reader.rows > limit
    if is_sample:
        # The seed is fixed, so that every start reports the same numbers.
        rows = np.unique(np.random.Generator(np.random.Philox(key=0)).integers(0, reader.rows, limit))
    else:
        rows = np.arange(reader.rows)
    rows_without_targets = 0
    for first in range(0, len(rows), _ROWS_PER_READ):
        weights = reader.read(rows[first : first + _ROWS_PER_READ])["weights"]
        rows_without_targets += int((weights == 0).all(axis=1).sum())
    return WithoutTargets(rows_without_targets, len(rows), is_sample)


def skipped_ranges(settings: Data) -> list[tuple[int, int]]:
    """Returns the ranges of `data.skip` as (first row, first row after the range)."""
    return [(skip.from_row, skip.from_row + skip.rows) for skip in settings.skip]


def training_rows(
    data: TrainingData, rows: Sequence[int], start_step: int, *, prefetch: int, threads: int
) -> Iterator[Rows]:
    """Returns an endless iterator over the rows numbered `rows` within each batch, beginning with `start_step` (from
    0). It reads ahead."""
    row_numbers = np.asarray(rows, np.int64)
    dataset = grain.MapDataset.range(_ENDLESS).map(lambda step: data.batch(int(step), row_numbers))
    iterator = _read_ahead(dataset, prefetch, threads)
    grain.experimental.set_next_index(iterator, start_step)
    return iterator


class RowSource:
    """A Grain random-access source of single rows of a run. It has the rows `rows` of each global batch.

    Element *i* is row `rows[i % R]` of the batch of step `i // R`, counted from the run's own first step, where R is
    the length of `rows`. It is a dict of arrays [L] by the names of `fields.batch_fields`. Repeated reads give the same
    row.
    """

    def __init__(self, data: TrainingData, rows: Sequence[int], steps: int):
        self._data, self._rows = data, np.asarray(rows, np.int64)
        self._steps = max(0, steps - data.order.first_step)

    def __len__(self) -> int:
        return self._steps * len(self._rows)

    def __getitem__(self, index: SupportsIndex) -> Rows:
        steps_before, number = divmod(index.__index__(), len(self._rows))
        step = self._data.order.first_step + steps_before
        batch_of_one_row = self._data.batch(step, self._rows[number : number + 1])
        return {field: array[0] for field, array in batch_of_one_row.items()}

    def __repr__(self) -> str:
        return f"RowSource({len(self._rows)} rows of each of {self._steps} steps)"


class EvaluationData:
    """The held-out rows of one source, in order and each once: all rows, or as many as `limit_rows` sets.

    The last batch is padded with rows that have no targets.
    """

    def __init__(self, config: Config, source_data: Part, split: str = "eval"):
        self._reader = _reader(source_data, split, config.data)
        self.row_count = self._reader.row_count_with_partial
        """Number of rows to read."""
        self.bytes_per_target: float | None = source_data.bytes_per_target(split)
        """Mean UTF-8 bytes of text per target over the whole split; None if unknown."""

    def limit_rows(self, count: int) -> None:
        """Limits evaluation to `count` rows, which are spaced evenly over the split and always the same."""
        self.row_count = min(count, self._reader.row_count_with_partial)

    def batches(self, rows: Sequence[int], global_rows: int, *, prefetch: int, threads: int) -> Iterator[Rows]:
        """Returns an iterator over the rows numbered `rows` within each batch; a batch has `global_rows` rows. It reads
        ahead."""
        batch_count = -(-self.row_count // global_rows)
        read = lambda batch: self._reader.read([self._row(int(batch) * global_rows + row) for row in rows])
        return _read_ahead(grain.MapDataset.range(batch_count).map(read), prefetch, threads)

    def _row(self, index: int) -> int:
        """Returns the number, within the split, of the `index`-th row to read. An index past the last row gives a
        padding row."""
        rows_in_split = self._reader.row_count_with_partial
        return index * rows_in_split // self.row_count if index < self.row_count else rows_in_split + index


def _read_ahead(dataset: Any, prefetch: int, threads: int) -> Iterator[Rows]:
    options = grain.ReadOptions(num_threads=min(threads, prefetch), prefetch_buffer_size=prefetch if threads else 0)
    return iter(dataset.to_iter_dataset(options))


def _reader(source_data: Part, split: str, settings: Data) -> RowReader:
    if isinstance(source_data, GrainData) and source_data.holds_rows:
        return DatasetRows(source_data.elements[split], settings)
    if settings.fields:
        raise ConfigError(
            f"data.fields: {source_data.path} does not provide {', '.join(sorted(settings.fields))}; only Grain "
            "datasets of rows do (grain.elements: rows)"
        )
    stream, skip_long = source_data.stream(split), settings.long_documents == "skip"
    return make_reader(stream, settings.rows, settings.sequence_length, settings.document_mask, skip_long=skip_long)


def index_keys(config: Config, sources: Sources) -> list[tuple[PreparedData, list[IndexKey]]]:
    """Returns the prepared data of a config, each with the indices that its rows are read with."""
    settings = config.data
    if not settings.keeps_documents_apart:
        return []
    row_length = settings.sequence_length if settings.rows == "packed" else None
    keys = [IndexKey(split, row_length, settings.long_documents == "skip") for split in SPLITS]
    parts = (*sources.parts.values(), *sources.eval_sets.values())
    by_path = {part.path: part for part in parts if isinstance(part, PreparedData)}
    return [(part, keys) for part in by_path.values()]


def _check_enough_rows(order: Order, rows: dict[str, int], config: Config) -> None:
    """Raises `ConfigError` if a batch needs more rows of a source than an epoch has, or if a source that must not
    repeat ends before the run."""
    settings, steps = config.data, config.train.steps
    shares = np.max([block_shares(phase.weights) for phase in phases(settings)], axis=0)
    for (name, count), share in zip(rows.items(), shares.tolist(), strict=True):
        rows_per_batch = -(-share * settings.global_batch_size // BLOCK)
        if count < rows_per_batch:
            raise ConfigError(
                f"data.global_batch_size: a batch takes {rows_per_batch} rows of {name}, which has only {count} rows "
                f"(of {settings.sequence_length} tokens each); lower data.global_batch_size, or prepare more text"
            )
        if on_end(settings, name) == "stop" and (last := order.last_step(name, steps)) < steps:
            raise ConfigError(
                f"train.steps: {name} ends after step {last} and must not repeat; lower train.steps to {last}, "
                "or set on_end: repeat"
            )
