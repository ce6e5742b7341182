"""Writing a checkpoint of arrays that come piece by piece, without JAX and without devices: `reader.py` the other way.

Only what reading and a run that starts from it need is written: the arrays in the layout of Orbax, its marker, and the
sealed manifest. No array is in memory as a whole.
"""

import math
from typing import Any

import numpy as np
import tensorstore as ts

from jaxmnt.checkpoint import digest
from jaxmnt.checkpoint.commit import ORBAX_MARKER
from jaxmnt.checkpoint.manifest import Array
from jaxmnt.errors import UserError
from jaxmnt.storage import StoragePath, publish, url

_CHUNK_BYTES = 16 << 20


class Writer:
    """The arrays of a new step directory. Raises `UserError` if it cannot be written."""

    def __init__(self, path: StoragePath):
        self._path = path
        self._arrays: dict[str, tuple[Any, tuple[int, ...], np.dtype]] = {}
        self._digests: dict[str, digest.Lanes] = {}
        self._context = ts.Context()

    def create(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
        """Begins an array, in chunks of whole trailing dimensions: one layer of a stack can be read by itself."""
        part, _, rest = name.partition("/")
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "ocdbt", "base": f"{url(self._path)}/{part}/", "path": f"{rest.replace('/', '.')}/"},
            "metadata": {
                "shape": list(shape),
                "data_type": dtype.name,
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": _chunk(shape, dtype)}},
            },
        }
        store = self._tried(name, lambda: ts.open(spec, context=self._context, create=True, open=False).result())
        self._arrays[name], self._digests[name] = (store, shape, dtype), digest.ZERO

    def write(self, name: str, start: tuple[int, ...], piece: np.ndarray) -> None:
        """Writes a piece that begins at this index."""
        store, shape, dtype = self._arrays[name]
        assert piece.dtype == dtype
        index = tuple(slice(begin, begin + extent) for begin, extent in zip(start, piece.shape, strict=True))
        self._tried(name, lambda: store[index].write(piece).result())
        self._digests[name] = digest.add(self._digests[name], digest.block_digest(piece, start, shape))

    def finish(self) -> dict[str, Array]:
        """Marks the arrays as written, and says what a manifest says of them. The caller commits."""
        publish(self._path / ORBAX_MARKER, "")
        return {
            name: Array(shape, dtype.name, digest.to_text(self._digests[name]))
            for name, (_, shape, dtype) in sorted(self._arrays.items())
        }

    def _tried(self, name: str, action: Any) -> Any:
        try:
            return action()
        except Exception as error:
            summary = str(error).strip().splitlines()[0][:300]
            raise UserError(f"array {name} cannot be written to {self._path}: {summary}") from error


def _chunk(shape: tuple[int, ...], dtype: np.dtype) -> list[int]:
    """Along the first dimensions one, then as many as make a chunk, then all."""
    chunk = [max(1, extent) for extent in shape]
    for dimension in range(len(chunk)):
        inner = math.prod(chunk[dimension + 1 :]) * dtype.itemsize
        chunk[dimension] = min(chunk[dimension], max(1, _CHUNK_BYTES // inner))
        if chunk[dimension] > 1:
            break
    if len(shape) > 1:
        chunk[0] = 1
    return chunk
