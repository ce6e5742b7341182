"""Loads files of Hugging Face onto the devices of any mesh.

On any mesh, the processes together read each byte only once, and as whole rows of the files. The rows of a parameter's
tensors are first spread over all devices, and the devices then exchange the pieces that they need. The file system
therefore serves the model once, not once for each replica, and no process reads parts of rows.

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

from jaxmnt.checkpoint.arrays import aligned_array
from jaxmnt.checkpoint.names import arrays_by_name, unflatten_like
from jaxmnt.checkpoint.restore import raise_together
from jaxmnt.distributed.coordination import broadcast
from jaxmnt.distributed.identity import Identity
from jaxmnt.errors import ConfigError, UserError
from jaxmnt.huggingface.folder import Folder, StoredTensor
from jaxmnt.huggingface.tensors import Part
from jaxmnt.models.contract import Definition, Params


@dataclass(frozen=True)
class LoadedParameters:
    """Parameters from files, and the cost of reading them."""

    params: Params
    bytes: int
    """Number of bytes that this process has read."""
    seconds: float


def load_parameters(
    path: Path, definition: Definition, abstract: Params, identity: Identity, *, key: str = "run.init_from"
) -> LoadedParameters:
    """Returns the parameters of `abstract`, with its shardings and dtypes, from the files of the folder `path`.

    If the files belong to another model or cannot be read, all processes raise `UserError`. Host memory holds at most
    two parameters (of all layers) in the dtypes of the files, the current one and the next, and only the rows for this
    process's devices.
    """
    started = time.perf_counter()
    targets = arrays_by_name(abstract)
    reader = None
    try:
        folder = Folder(path, key)
        parts, stored = folder.match_tensors(definition)
        reader, failure = _Reader(folder, stored), None
    except UserError as error:
        failure = error
    raise_together(f"open {path.name}", failure, identity)
    assert reader is not None
    own_fingerprint = folder.fingerprint()
    if broadcast(f"files of {path.name}", own_fingerprint, identity) != own_fingerprint:
        failure = ConfigError(
            f"{key}: the files in {path} differ between process {identity.process_id} and process 0; give all "
            "hosts the same files, or put them on a shared file system"
        )
    raise_together(f"compare {path.name}", failure, identity)
    arrays = {}
    # A thread reads the next parameter while the devices convert this one.
    with ThreadPoolExecutor(1) as prefetcher:
        start_reading = lambda name: prefetcher.submit(reader.read_spread, parts[name], targets[name])
        reads = {name: start_reading(name) for name in list(targets)[:1]}
        for name, next_name in itertools.zip_longest(targets, list(targets)[1:]):
            matrices = reads.pop(name).result()
            if next_name is not None:
                reads[next_name] = start_reading(next_name)
            arrays[name] = _convert(matrices, parts[name][0], targets[name])
            del matrices  # frees its memory before the next parameter arrives
    folder.close()
    raise_together(f"load {path.name}", reader.failure, identity)
    return LoadedParameters(unflatten_like(abstract, arrays), reader.bytes, time.perf_counter() - started)


class _Reader:
    """Reads this process's share of the tensors. It stores an error instead of raising it, because the other processes
    are about to exchange their shares with this one."""

    def __init__(self, folder: Folder, stored: dict[str, StoredTensor]):
        self._folder, self._stored = folder, stored
        self.bytes = 0
        self.failure: UserError | None = None

    def read_spread(self, parts: list[Part], target: Any) -> Array:
        """Returns the tensors of a parameter, [*stack, R, C], in the dtype of the files. The stack is (layers,),
        (layers, experts), or empty. Mesh axes that split the stack in the sharding of `target` split it here. All other
        axes split the rows, which are padded to a multiple of the number of devices that share them."""
        mesh = target.sharding.mesh
        stack = target.shape[: len(target.shape) - len(parts[0].shape)]
        stack_spec = _stack_spec(target.sharding, len(stack))
        stack_axes = {axis for axes in stack_spec for axis in axes}
        row_axes = tuple(name for name in mesh.axis_names if name not in stack_axes)
        devices = math.prod(mesh.shape[name] for name in row_axes)
        rows, columns = parts[0].matrix_shape
        rows_per_device = -(-rows // devices)
        shape = (*stack, rows_per_device * devices, columns)
        dtype = np.result_type(*{self._stored[part.name].dtype for part in parts})
        spread = NamedSharding(mesh, P(*(axes or None for axes in stack_spec), row_axes or None))
        numbers = np.arange(len(parts)).reshape(stack)

        def read_shard(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            *_, (top, bottom), _ = [extent.indices(size)[:2] for extent, size in zip(index, shape, strict=True)]
            shard_numbers = numbers[index[: len(stack)]]
            matrices = aligned_array((shard_numbers.size, bottom - top, columns), dtype)
            for number, matrix in zip(shard_numbers.flat, matrices, strict=True):
                self._fill(parts[number], top, matrix[: max(0, rows - top)])  # without padding
            return matrices.reshape(*shard_numbers.shape, bottom - top, columns)

        return jax.make_array_from_callback(shape, spread, read_shard)

    def _fill(self, part: Part, first_row: int, matrix: np.ndarray) -> None:
        """Fills the matrix with rows of a part, beginning with `first_row`."""
        stored = self._stored[part.name]
        buffer = matrix if stored.dtype == matrix.dtype else np.empty(matrix.shape, stored.dtype)
        try:
            if matrix.size and self.failure is None:
                self.bytes += self._folder.read(stored, (part.offset[0] + first_row, part.offset[1]), buffer)
        except UserError as error:
            self.failure = error
        if buffer is not matrix:
            matrix[...] = buffer


def _stack_spec(sharding: NamedSharding, dimensions: int) -> list[tuple[str, ...]]:
    """Returns the mesh axes that split each of the first dimensions of an array."""
    spec = [*sharding.spec, *[None] * dimensions][:dimensions]
    return [() if axes is None else (axes,) if isinstance(axes, str) else tuple(axes) for axes in spec]


def _convert(matrices: Array, part: Part, target: Any) -> Array:
    """Returns a parameter with the shape, dtype and sharding of `target`, from its tensors."""
    # Without names, parameters with the same layout share one conversion.
    unnamed_part = Part(part.tensor._replace(name=""), part.shape)
    array = _converter(unnamed_part, target.shape, target.dtype, target.sharding)(matrices)
    return jax.block_until_ready(array)  # one conversion at a time, to save memory


@functools.lru_cache(maxsize=128)
def _converter(part: Part, shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> Any:
    """Returns the function that converts tensors to a parameter. It is compiled once for all parameters with the same
    layout."""

    def convert(matrices: Array) -> Array:
        to_parameter = part.to_parameter
        for _ in shape[: len(shape) - len(part.shape)]:
            to_parameter = jax.vmap(to_parameter)
        return to_parameter(matrices[..., : part.matrix_shape[0], :]).astype(dtype)

    return jax.jit(convert, out_shardings=sharding)
