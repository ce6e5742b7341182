"""Copies the rows that this process reads into global arrays on the devices, one batch ahead of the step."""

import math
import time
from collections.abc import Iterator

import jax
import numpy as np
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from jaxmnt.data.rows import Rows, batch_digest, row_digests
from jaxmnt.parallel.chunks import device_order

Batch = dict[str, Array]


def process_rows(sharding: NamedSharding, global_rows: int, length: int) -> list[int]:
    """Returns the rows of the global batch that the devices of this process hold, in increasing order.

    The rows depend on the sharding, not on the index of the process, because several processes may share a batch shard.
    """
    index_map = sharding.addressable_devices_indices_map((global_rows, length))
    rows: set[int] = set()
    for index in index_map.values():
        assert index is not None
        rows.update(range(*index[0].indices(global_rows)))
    return sorted(rows)


def to_devices(local: Rows, rows: list[int], global_rows: int, sharding: NamedSharding) -> Batch:
    """Returns global arrays [global_rows, L], to which this process contributes `rows`. The copies overlap with
    computation. If the sharding divides rows, their columns are in the order of `chunks.device_order`."""
    local_index = {row: index for index, row in enumerate(rows)}
    devices_per_row = _devices_per_row(sharding)

    def global_array(array: np.ndarray) -> Array:
        columns = device_order(array.shape[1], devices_per_row) if devices_per_row > 1 else None

        def shard(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            first, stop, _ = index[0].indices(global_rows)
            begin = local_index[first]
            shard_rows = array[begin : begin + stop - first]
            return shard_rows if columns is None else shard_rows[:, columns[index[1]]]

        return jax.make_array_from_callback((global_rows, *array.shape[1:]), sharding, shard)

    return {name: global_array(array) for name, array in local.items()}


def _devices_per_row(sharding: NamedSharding) -> int:
    """Returns the number of devices among which a sharding of arrays [rows, length] divides each row."""
    axes = sharding.spec[1] if len(sharding.spec) > 1 else None
    names = (axes,) if isinstance(axes, str) else axes or ()
    return math.prod(sharding.mesh.shape[name] for name in names)


class Feed:
    """Returns batches whose copies to the devices have already begun, and measures the time spent waiting for input."""

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
        """Number of rows of a batch that this process reads."""
        self.is_reading = False
        """True while `stage` waits for input. Other threads read it."""
        self.wait_seconds = 0.0
        """Seconds that the last `stage` waited for input."""
        self.gather_seconds = 0.0
        """Seconds that the last `stage` waited for the digests of the other processes."""

    def stage(self) -> None:
        """Reads the next batch and starts copying it. To be called while the devices compute a step."""
        started = time.perf_counter()
        self.is_reading = True
        local = next(self._source)
        self.is_reading = False
        self.wait_seconds = time.perf_counter() - started
        digest = self._batch_digest(local["tokens"]) if self._digest else None
        self._staged = to_devices(local, self._rows, self._global_rows, self._sharding), digest

    def take(self) -> tuple[Batch, str | None]:
        """Returns the staged batch, and its digest or None without `digest`. Stages a batch first if there is none."""
        if self._staged is None:
            self.stage()
        assert self._staged is not None
        staged, self._staged = self._staged, None
        return staged

    def _batch_digest(self, tokens: np.ndarray) -> str:
        """Returns the digest of the global batch. Gathers the digests of the rows that other processes hold."""
        digests = row_digests(tokens)
        if len(self._rows) < self._global_rows:
            by_row = NamedSharding(self._sharding.mesh, PartitionSpec(self._sharding.spec[0]))
            shared = to_devices({"digests": digests}, self._rows, self._global_rows, by_row)["digests"]
            started = time.perf_counter()
            digests = np.asarray(multihost_utils.process_allgather(shared, tiled=True))
            self.gather_seconds = time.perf_counter() - started
        return batch_digest(digests)
