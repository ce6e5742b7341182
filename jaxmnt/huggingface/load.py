"""From the files of Hugging Face onto the devices of any mesh.

All processes together read each byte once, in rows as they lie in the files, whatever the mesh: a parameter's tensors
are first spread over all devices by rows, and the devices then exchange what they need. So a file system serves the
model once, and not once for each replica, and no process reads pieces of rows.

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
from jaxmnt.checkpoint.names import like, named
from jaxmnt.checkpoint.restore import raise_together
from jaxmnt.distributed.coordination import all_gather
from jaxmnt.distributed.identity import Identity
from jaxmnt.errors import ConfigError, UserError
from jaxmnt.huggingface.folder import Folder, Stored
from jaxmnt.huggingface.tensors import Part
from jaxmnt.models.contract import Definition, Params


@dataclass(frozen=True)
class Loaded:
    """Parameters, and what it took to get them."""

    params: Params
    bytes: int
    """Read by this process."""
    seconds: float


def load_parameters(path: Path, definition: Definition, abstract: Params, identity: Identity) -> Loaded:
    """The parameters of `abstract`, on its shardings and in its dtypes, from the files of the folder `path`.

    All processes return, or all raise `UserError`, if the files are of another model or cannot be read. On the host a
    parameter of all layers is there at a time, and the next one, as it is in the files; only what the devices of this
    process take of it.
    """
    started = time.perf_counter()
    wanted = named(abstract)
    reader = None
    try:
        folder = Folder(path, "run.init_from")
        parts, stored = folder.check(definition)
        reader, trouble = _Reader(folder, stored), None
    except UserError as error:
        trouble = error
    raise_together(f"open {path.name}", trouble, identity)
    assert reader is not None
    seen = all_gather(f"files of {path.name}", folder.fingerprint(), identity)
    if others := [number for number, one in enumerate(seen) if one != seen[0]]:
        raise ConfigError(
            f"run.init_from: process {others[0]} has other files in {path} than process 0; give all hosts the same, or "
            "put them on a file system that all share"
        )
    arrays = {}
    with ThreadPoolExecutor(1) as ahead:
        begin = lambda name: ahead.submit(reader.spread, parts[name], wanted[name].sharding)
        reading = {name: begin(name) for name in list(wanted)[:1]}
        for name, following in itertools.zip_longest(wanted, list(wanted)[1:]):
            matrices_URC = reading.pop(name).result()
            if following is not None:
                reading[following] = begin(following)
            arrays[name] = _converted(matrices_URC, parts[name][0], wanted[name])
            del matrices_URC
    folder.close()
    raise_together(f"load {path.name}", reader.trouble, identity)
    return Loaded(like(abstract, arrays), reader.bytes, time.perf_counter() - started)


class _Reader:
    """Reads the share of this process. What cannot be read is noted and left as it is, since the others are about to
    exchange their shares with this one."""

    def __init__(self, folder: Folder, stored: dict[str, Stored]):
        self._folder, self._stored = folder, stored
        self.bytes = 0
        self.trouble: UserError | None = None

    def spread(self, parts: list[Part], sharding: NamedSharding) -> Array:
        """[U, R, C] in the dtype of the files, rows over all devices but for the axes that split the stack; rows are
        filled up to what the devices divide."""
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
            (begin, end), (top, bottom), _ = (one.indices(extent)[:2] for one, extent in zip(index, shape, strict=True))
            memory = aligned((end - begin, bottom - top, columns), dtype)
            for part, own in zip(parts[begin:end], memory, strict=True):
                self._fill(part, top, own[: max(0, rows - top)])
            return memory

        return jax.make_array_from_callback(shape, spread, shard)

    def _fill(self, part: Part, top: int, own: np.ndarray) -> None:
        """Rows of a part from `top` on."""
        stored = self._stored[part.name]
        read = own if stored.dtype == own.dtype else np.empty(own.shape, stored.dtype)
        try:
            if own.size and self.trouble is None:
                self.bytes += self._folder.read(stored, (part.offset[0] + top, part.offset[1]), read)
        except UserError as error:
            self.trouble = error
        if read is not own:
            own[...] = read


def _converted(matrices_URC: Array, part: Part, wanted: Any) -> Array:
    """The parameter as it is stored."""
    nameless = Part(part.tensor._replace(name=""), part.shape)
    stacked = len(wanted.shape) > len(part.shape)
    array = _converter(nameless, stacked, wanted.dtype, wanted.sharding)(matrices_URC)
    return jax.block_until_ready(array)  # one at a time, for the memory


@functools.lru_cache(maxsize=128)
def _converter(part: Part, stacked: bool, dtype: Any, sharding: NamedSharding) -> Any:
    """Compiled once for all parameters that lie alike."""

    def convert(matrices_URC: Array) -> Array:
        whole = jax.vmap(part.to_parameter)(matrices_URC[:, : part.matrix[0]])
        return (whole if stacked else whole[0]).astype(dtype)

    return jax.jit(convert, out_shardings=sharding)
