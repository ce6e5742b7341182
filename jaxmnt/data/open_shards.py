"""Opens the files of shards when they are first read, and keeps a bounded number of them open in the process.

A corpus of a trillion tokens has more shards than a process may open files. Each open array takes a descriptor.
"""

import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import overload

import numpy as np

_MAX_OPEN = 256
"""Maximum number of arrays that are open. More would not save time, because rows are read in random order."""


class OpenShards:
    """The open arrays of a process, the least recently used first. Thread-safe."""

    def __init__(self, limit: int | None = None):
        """`limit` is the maximum number of open arrays; None for a quarter of the files that the process may open."""
        self._limit = limit
        self._lock = threading.Lock()
        self._arrays: OrderedDict[tuple[int, int], np.ndarray] = OrderedDict()

    def get(self, key: tuple[int, int], open_array: Callable[[], np.ndarray]) -> np.ndarray:
        """Returns the array with this key, which `open_array` opens if it is not open."""
        with self._lock:
            array = self._arrays.get(key)
            if array is not None:
                self._arrays.move_to_end(key)
                return array
        array = open_array()  # without the lock, because storage may be slow; another thread may open the same array
        with self._lock:
            self._arrays[key] = array
            while len(self._arrays) > self._max_open:
                # The file is closed when no thread reads the array any more.
                self._arrays.popitem(last=False)
        return array

    def forget(self, owner: int) -> None:
        """Closes the arrays of an owner, which is the first part of their keys."""
        with self._lock:
            for key in [key for key in self._arrays if key[0] == owner]:
                del self._arrays[key]

    @property
    def count(self) -> int:
        """Number of open arrays."""
        return len(self._arrays)

    @property
    def _max_open(self) -> int:
        if self._limit is not None:
            return self._limit
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return max(1, min(_MAX_OPEN, soft // 4 if soft != resource.RLIM_INFINITY else _MAX_OPEN))


OPEN_SHARDS = OpenShards()
"""The open arrays of this process."""


class LazyShards(Sequence[np.ndarray]):
    """The arrays of a split, each of which is opened when it is first read."""

    def __init__(self, count: int, open_shard: Callable[[int], np.ndarray], open_shards: OpenShards = OPEN_SHARDS):
        """`open_shard` returns the array of a shard, given its number below `count`."""
        self._count, self._open_shard, self._open_shards = count, open_shard, open_shards

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, number: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[np.ndarray]: ...
    def __getitem__(self, number: int | slice) -> np.ndarray | Sequence[np.ndarray]:
        if isinstance(number, slice):
            return [self[index] for index in range(*number.indices(self._count))]
        return self._open_shards.get((id(self), number), lambda: self._open_shard(number))

    def __del__(self) -> None:
        self._open_shards.forget(id(self))
