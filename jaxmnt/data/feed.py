"""From this process's rows to global arrays on the devices, one batch ahead of the step."""

import time
from collections.abc import Iterator

import jax
import numpy as np
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from jaxmnt.data.rows import Rows, batch_digest, row_digests

Batch = dict[str, Array]


def process_rows(sharding: NamedSharding, global_rows: int, length: int) -> list[int]:
    """The global rows that this process's devices hold, in order.

    They follow from the sharding, not from the process's number: processes may share a batch shard.
    """
    index_map = sharding.addressable_devices_indices_map((global_rows, length))
    rows: set[int] = set()
    for index in index_map.values():
        assert index is not None
        rows.update(range(*index[0].indices(global_rows)))
    return sorted(rows)


def to_devices(local: Rows, rows: list[int], global_rows: int, sharding: NamedSharding) -> Batch:
    """Global arrays [global_rows, L] of which this process contributes `rows`. Copies overlap with computation."""
    place = {row: position for position, row in enumerate(rows)}

    def one(array: np.ndarray) -> Array:
        def piece(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            first, stop, _ = index[0].indices(global_rows)
            return array[(slice(place[first], place[first] + stop - first), *index[1:])]

        return jax.make_array_from_callback((global_rows, *array.shape[1:]), sharding, piece)

    return {name: one(array) for name, array in local.items()}


class Feed:
    """Hands out batches that are already on their way to the devices, and measures waiting for input."""

    def __init__(
        self,
        source: Iterator[Rows],
        rows: list[int],
        global_rows: int,
        sharding: NamedSharding,
        *,
        digest: bool,
    ):
        self._source, self._rows, self._global_rows, self._sharding = source, rows, global_rows, sharding
        self._digest = digest
        self._staged: tuple[Batch, str | None] | None = None
        self.local_rows = len(rows)
        """Rows of a batch that this process reads."""
        self.reading = False
        """Whether `stage` waits for input just now. For other threads to see."""
        self.wait_seconds = 0.0
        """How long the last `stage` waited for input to be read."""
        self.gather_seconds = 0.0
        """How long the last `stage` waited for the other processes' share of the digest."""

    def stage(self) -> None:
        """Reads the next batch and starts its copy. Call it while the devices are busy with a step."""
        started = time.perf_counter()
        self.reading = True
        local = next(self._source)
        self.reading = False
        self.wait_seconds = time.perf_counter() - started
        digest = self._batch_digest(local["tokens"]) if self._digest else None
        self._staged = to_devices(local, self._rows, self._global_rows, self._sharding), digest

    def take(self) -> tuple[Batch, str | None]:
        """The staged batch and, if asked for, its digest."""
        if self._staged is None:
            self.stage()
        assert self._staged is not None
        staged, self._staged = self._staged, None
        return staged

    def _batch_digest(self, tokens: np.ndarray) -> str:
        """The digest of the global batch, of whose rows other processes may hold the rest."""
        digests = row_digests(tokens)
        if len(self._rows) < self._global_rows:
            by_row = NamedSharding(self._sharding.mesh, PartitionSpec(self._sharding.spec[0]))
            shared = to_devices({"digests": digests}, self._rows, self._global_rows, by_row)["digests"]
            started = time.perf_counter()
            digests = np.asarray(multihost_utils.process_allgather(shared, tiled=True))
            self.gather_seconds = time.perf_counter() - started
        return batch_digest(digests)
