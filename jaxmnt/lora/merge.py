"""Merges adapters into their base, for an export that needs no adapters."""

import math
from collections.abc import Sequence

import numpy as np

from jaxmnt.checkpoint.arrays import Reader, Shape
from jaxmnt.checkpoint.commit import Committed
from jaxmnt.checkpoint.manifest import DamagedError
from jaxmnt.checkpoint.names import stored_name
from jaxmnt.errors import UserError
from jaxmnt.lora.base import other_base, usable_source
from jaxmnt.lora.host import HostBase
from jaxmnt.models.adapters import triples
from jaxmnt.models.contract import Definition
from jaxmnt.models.registry import define_model


class MergedArrays:
    """The arrays of a run with adapters as an export writes them (`export.ArraySource`): weight + scale · a · b, summed
    in float32.

    Raises `ConfigError` if the base is not there, and `DamagedError` for damaged adapters.
    """

    def __init__(self, checkpoint: Committed, definition: Definition, source: str, key: str):
        """`definition` has the adapters. `source` is where the base is, which `key` names in messages."""
        adapters, recorded = definition.adapters, checkpoint.manifest.base
        assert adapters is not None and recorded is not None
        self._scale, self._recorded = adapters.scale, recorded
        self._source, self._key = source, key
        self._own = checkpoint.manifest.arrays
        self._own_reader = Reader(checkpoint, [name for name in sorted(self._own) if name.startswith("params/")])
        self._base = HostBase(source, definition.base, recorded, key)
        read = lambda name: self._own_reader.read_verified(stored_name(name)).astype(np.float32)
        self._adapters = {stored_name(triple.weight): (read(triple.a), read(triple.b)) for triple in triples(adapters)}
        self._changed = self._lost = 0

    @property
    def lost_share(self) -> float:
        """The share of the numbers changed by adapters that are the same as before after rounding to the dtype of the
        export."""
        return self._lost / max(1, self._changed)

    def shape(self, name: str) -> Shape:
        return self._base.shape(name)

    def chunk_shape(self, name: str) -> Shape:
        return self._own_reader.chunk_shape(name) if name in self._own else self._base.chunk_shape(name)

    def read(self, name: str, index: Sequence[slice]) -> np.ndarray:
        return self._own_reader.read(name, index) if name in self._own else self._base.read(name, index)

    def finish(self, name: str, index: Sequence[slice], piece: np.ndarray, dtype: np.dtype) -> np.ndarray:
        if name not in self._adapters:
            return piece
        a, b = self._adapters[name]
        inputs = a.ndim - 2
        a_piece, b_piece = a[(*index[: 1 + inputs], slice(None))], b[(index[0], slice(None), *index[1 + inputs :])]
        rank, layers = a.shape[-1], len(a_piece)
        a_matrices = a_piece.reshape(layers, math.prod(a_piece.shape[1:-1]), rank)
        b_matrices = b_piece.reshape(layers, rank, math.prod(b_piece.shape[2:]))
        change = np.float32(self._scale) * (a_matrices @ b_matrices).reshape(piece.shape)
        merged = piece.astype(np.float32) + change
        is_changed = change != 0
        self._changed += int(is_changed.sum())
        self._lost += int((is_changed & (merged.astype(dtype) == piece.astype(dtype))).sum())
        return merged

    def content(self, name: str) -> str:
        return self._own[name].content if name in self._own else self._recorded.arrays[name].content

    def damage(self, name: str) -> UserError:
        if name in self._own:
            return DamagedError(f"array {name} is not what was saved: its digest differs")
        return other_base([name], self._source, self._key)


def merged_arrays(checkpoint: Committed, base: str | None) -> MergedArrays:
    """Returns the merged arrays of a checkpoint of a run with adapters. `base` is the place of the base if it has
    moved."""
    recorded = checkpoint.manifest.base
    assert recorded is not None
    config = checkpoint.config
    source = base or usable_source(recorded, config.run.init_from)
    return MergedArrays(checkpoint, define_model(config.model, config.lora), source, "--base")
