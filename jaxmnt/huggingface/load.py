"""Loads files of Hugging Face onto the devices of any mesh.

The processes together read each byte once, as whole rows of the files, on any mesh: a parameter's tensors are first
spread over all devices by rows, and the devices then exchange the pieces that they need. So the file system serves the
model once, not once for each replica, and no process reads parts of rows.

Shapes: U layers of a stack, R rows and C columns of a tensor.
"""

import functools
import itertools
import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmnt.checkpoint.arrays import aligned
from jaxmnt.checkpoint.names import named, unflatten_like
from jaxmnt.checkpoint.restore import raise_together
from jaxmnt.distributed.coordination import all_gather
from jaxmnt.distributed.identity import Identity
from jaxmnt.errors import ConfigError, UserError
from jaxmnt.huggingface.folder import Folder, StoredTensor
from jaxmnt.huggingface.tensors import Part
from jaxmnt.models.contract import Definition, Params


@dataclass(frozen=True)
class Loaded:
    """Loaded parameters, and the cost of loading them."""

    params: Params
    bytes: int
    """Number of bytes that this process has read."""
    seconds: float


def load_parameters(path: Path, definition: Definition, abstract: Params, identity: Identity) -> Loaded:
    """Returns the parameters of `abstract`, with its shardings and dtypes, from the files of the folder `path`.

    Either all processes return or all raise `UserError`, if the files belong to another model or cannot be read. Host
    memory holds at most two parameters (of all layers) in the dtypes of the files: the current one and the next, and
    only the rows for this process's devices.
    """
    started = time.perf_counter()
    targets = named(abstract)
    reader = None
    try:
        folder = Folder(path, "run.init_from")
        parts, stored = folder.check(definition)
        reader, failure = _Reader(folder, stored), None
    except UserError as error:
        failure = error
    raise_together(f"open {path.name}", failure, identity)
    assert reader is not None
    fingerprints = all_gather(f"files of {path.name}", folder.fingerprint(), identity)
    if differing := [process for process, fingerprint in enumerate(fingerprints) if fingerprint != fingerprints[0]]:
        raise ConfigError(
            f"run.init_from: process {differing[0]} has other files in {path} than process 0; give all hosts the same "
            "files, or put them on a shared file system"
        )
    arrays = {}
    # A thread reads the next parameter while the devices convert this one.
    with ThreadPoolExecutor(1) as prefetcher:
        begin = lambda name: prefetcher.submit(reader.read_spread, parts[name], targets[name].sharding)
        reading = {name: begin(name) for name in list(targets)[:1]}
        for name, following in itertools.zip_longest(targets, list(targets)[1:]):
            matrices_URC = reading.pop(name).result()
            if following is not None:
                reading[following] = begin(following)
            arrays[name] = _convert(matrices_URC, parts[name][0], targets[name])
            del matrices_URC  # its memory must be free before the next parameter is there
    folder.close()
    raise_together(f"load {path.name}", reader.failure, identity)
    return Loaded(unflatten_like(abstract, arrays), reader.bytes, time.perf_counter() - started)


class _Reader:
    """Reads the share of this process. It stores an error instead of raising it, because the other processes are about
    to exchange their shares with this one."""

    def __init__(self, folder: Folder, stored: dict[str, StoredTensor]):
        self._folder, self._stored = folder, stored
        self.bytes = 0
        self.failure: UserError | None = None

    def read_spread(self, parts: list[Part], sharding: NamedSharding) -> Array:
        """Returns the tensors [U, R, C] in the dtype of the files. Rows are divided among all devices, except along
        axes that split the stack, and padded to a multiple of the number of devices."""
        mesh = sharding.mesh
        first = sharding.spec[0] if len(sharding.spec) and len(parts) > 1 else None
        over_units = () if first is None else (first,) if isinstance(first, str) else tuple(first)
        over_rows = tuple(name for name in mesh.axis_names if name not in over_units)
        devices = math.prod(mesh.shape[name] for name in over_rows)
        rows, columns = parts[0].matrix
        shape = (len(parts), -(-rows // devices) * devices, columns)
        dtype = np.result_type(*{self._stored[part.name].dtype for part in parts})
        spread = NamedSharding(mesh, P(over_units or None, over_rows or None))

        def shard(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            ranges = [extent.indices(size)[:2] for extent, size in zip(index, shape, strict=True)]
            (begin, end), (top, bottom), _ = ranges
            memory = aligned((end - begin, bottom - top, columns), dtype)
            for part, matrix in zip(parts[begin:end], memory, strict=True):
                self._fill(part, top, matrix[: max(0, rows - top)])  # without padding
            return memory

        return jax.make_array_from_callback(shape, spread, shard)

    def _fill(self, part: Part, top: int, matrix: np.ndarray) -> None:
        """Fills the matrix with rows of a part, from row `top` on."""
        stored = self._stored[part.name]
        buffer = matrix if stored.dtype == matrix.dtype else np.empty(matrix.shape, stored.dtype)
        try:
            if matrix.size and self.failure is None:
                self.bytes += self._folder.read(stored, (part.offset[0] + top, part.offset[1]), buffer)
        except UserError as error:
            self.failure = error
        if buffer is not matrix:
            matrix[...] = buffer


def _convert(matrices_URC: Array, part: Part, target: Any) -> Array:
    """Returns the parameter with the shape, dtype and sharding of `target`."""
    nameless = Part(part.tensor._replace(name=""), part.shape)
    stacked = len(target.shape) > len(part.shape)
    array = _converter(nameless, stacked, target.dtype, target.sharding)(matrices_URC)
    return jax.block_until_ready(array)  # one conversion at a time, to save memory


@functools.lru_cache(maxsize=128)
def _converter(part: Part, stacked: bool, dtype: Any, sharding: NamedSharding) -> Any:
    """Returns the conversion, which is compiled once for all parameters with the same layout."""

    def convert(matrices_URC: Array) -> Array:
        layers = jax.vmap(part.to_parameter)(matrices_URC[:, : part.matrix[0]])
        return (layers if stacked else layers[0]).astype(dtype)

    return jax.jit(convert, out_shardings=sharding)
