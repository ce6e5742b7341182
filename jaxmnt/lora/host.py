"""Reads the base of a run with adapters on the host, without devices: array by array, from files or a checkpoint."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxmnt.checkpoint import digest
from jaxmnt.checkpoint.arrays import Reader, Shape
from jaxmnt.checkpoint.manifest import Array, Base
from jaxmnt.checkpoint.names import arrays_by_name, parameter_of
from jaxmnt.errors import ConfigError
from jaxmnt.huggingface.folder import Folder, StoredTensor
from jaxmnt.huggingface.tensors import Part
from jaxmnt.lora.base import open_source
from jaxmnt.models.contract import Definition


class HostBase:
    """The arrays of a base, read on the host.

    Raises `ConfigError` if the source is not there, or has no such model.
    """

    def __init__(self, source: str, definition: Definition, recorded: Base | None, key: str):
        """`definition` is that of the model without adapters. `recorded` is the base of a run, whose arrays are read in
        the dtypes that its manifest has; None: in float32, and in bfloat16 if the source has no more digits. `key`
        names the setting or the option that gave the source."""
        self._shapes = {
            name: tuple(leaf.shape) for name, leaf in arrays_by_name({"params": definition.abstract}).items()
        }
        self._recorded = {} if recorded is None else recorded.arrays
        self._files: _FileArrays | Reader
        opened = open_source(source, key)
        if isinstance(opened, Path):
            self._files = _FileArrays(Folder(opened, key), definition, self._shapes)
            self._stored = {name: self._files.dtype(name) for name in self._shapes}
        else:
            arrays = opened.manifest.arrays
            for name, shape in self._shapes.items():
                if name not in arrays or arrays[name].shape != shape:
                    raise ConfigError(
                        f"{key}: {source} is another model: its {parameter_of(name)} must have the shape {list(shape)}"
                    )
            self._files = Reader(opened, sorted(self._shapes))
            self._stored = {name: np.dtype(arrays[name].dtype) for name in self._shapes}

    @property
    def names(self) -> list[str]:
        return sorted(self._shapes)

    def shape(self, name: str) -> Shape:
        return self._shapes[name]

    def dtype(self, name: str) -> np.dtype:
        """Returns the dtype in which an array is read."""
        if name in self._recorded:
            return np.dtype(self._recorded[name].dtype)
        return self._stored[name] if self._stored[name].name == "bfloat16" else np.dtype(np.float32)

    def chunk_shape(self, name: str) -> Shape:
        """Returns the shape of the smallest part of the array that is read at once."""
        return self._files.chunk_shape(name)

    def read(self, name: str, index: Sequence[slice]) -> np.ndarray:
        """Returns a part of an array."""
        return np.asarray(self._files.read(name, index)).astype(self.dtype(name))

    def describe(self, name: str) -> Array:
        """Reads an array, and returns its description for a manifest."""
        shape, total = self._shapes[name], digest.ZERO
        layers = range(shape[0]) if len(shape) > 1 else [None]
        for layer in layers:
            begin = slice(None) if layer is None else slice(layer, layer + 1)
            piece = self.read(name, [begin, *[slice(None)] * (len(shape) - 1)])
            total = digest.add(total, digest.block_digest(piece, [layer or 0, *[0] * (len(shape) - 1)], shape))
        return Array(shape, self.dtype(name).name, digest.to_text(total))


class _FileArrays:
    """The parameters in a folder of Hugging Face, as arrays."""

    def __init__(self, folder: Folder, definition: Definition, shapes: Mapping[str, Shape]):
        self._folder, self._shapes = folder, shapes
        self._parts: dict[str, list[Part]]
        self._tensors: dict[str, StoredTensor]
        self._parts, self._tensors = folder.match_tensors(definition)

    def dtype(self, name: str) -> np.dtype:
        return np.result_type(*{self._tensors[part.name].dtype for part in self._parts_of(name)})

    def chunk_shape(self, name: str) -> Shape:
        return (1, *self._shapes[name][1:])

    def read(self, name: str, index: Sequence[slice]) -> np.ndarray:
        parts, stack = self._parts_of(name), self._stack(name)
        numbers = np.arange(len(parts)).reshape(stack)[tuple(index[: len(stack)])]
        arrays = [self._part(parts[number])[tuple(index[len(stack) :])] for number in numbers.flat]
        return np.stack(arrays).reshape(*numbers.shape, *arrays[0].shape)

    def _part(self, part: Part) -> np.ndarray:
        """Returns a layer's or an expert's part of a parameter, as a view of the file."""
        matrix = self._folder.map_matrix(self._tensors[part.name])
        (first_row, first_column), (rows, columns) = part.offset, part.matrix_shape
        view: np.ndarray = part.to_parameter(
            matrix[first_row : first_row + rows, first_column : first_column + columns]
        )
        return view

    def _parts_of(self, name: str) -> list[Part]:
        return self._parts[name.removeprefix("params/")]

    def _stack(self, name: str) -> Shape:
        """Returns the sizes of the dimensions along which the parameter is a stack of layers or experts."""
        return self._shapes[name][: len(self._shapes[name]) - len(self._parts_of(name)[0].shape)]
