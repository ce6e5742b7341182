"""Which tensors of Hugging Face a model's parameters are, and how one becomes the other.

A tensor is looked at as a matrix, rows before columns as they lie in the file; a vector has one column. Several
parameters may share one: then each is a part of its outputs.
"""

import math
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np

from jaxmnt.errors import ConfigError
from jaxmnt.models.contract import Definition
from jaxmnt.models.huggingface import Tensor
from jaxmnt.parallel.sharding import parameter_name


class Part(NamedTuple):
    """What one tensor has of a parameter: all of it, or one layer of a stack."""

    tensor: Tensor
    shape: tuple[int, ...]
    """Of the parameter, or of one layer's."""

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of the parameter's part of the tensor."""
        if self.tensor.inputs == 0:
            return math.prod(self.shape), 1
        inputs = math.prod(self.shape[: self.tensor.inputs])
        outputs = math.prod(self.shape[self.tensor.inputs :])
        return (outputs, inputs) if self.tensor.transposed else (inputs, outputs)

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape of the whole tensor in its file."""
        rows, columns = self.matrix
        if self.tensor.inputs == 0:
            return (rows * self.tensor.parts,)
        return (rows * self.tensor.parts, columns) if self.tensor.transposed else (rows, columns * self.tensor.parts)

    @property
    def offset(self) -> tuple[int, int]:
        """The row and column of the tensor at which the part begins; of a vector, the place and 0."""
        rows, columns = self.matrix
        part = self.tensor.part
        by_rows = self.tensor.transposed or self.tensor.inputs == 0
        return (part * rows, 0) if by_rows else (0, part * columns)

    def to_parameter(self, matrix: Any) -> Any:
        """Our array from rows and columns, in NumPy or JAX."""
        turned = self.tensor.transposed and self.tensor.inputs > 0
        return (matrix.T if turned else matrix).reshape(self.shape)


Parts = dict[str, list[Part]]
"""Of each parameter, such as layers.attention.query: one, or one for each layer of its stack."""


def parts_of(definition: Definition) -> Parts:
    """For each parameter, such as layers.attention.query, its tensors: one, or one for each layer of its stack.

    Raises `ConfigError` for a family that is not in the files of Hugging Face.
    """
    written = definition.family.hugging_face
    if written is None:
        raise ConfigError(
            f"model.family: {definition.family.config.family} says nothing of Hugging Face's names; add hugging_face "
            "to the class (docs/models.md)"
        )
    numbers = _layer_numbers(definition)
    found = {}
    for path, leaf in jax.tree.leaves_with_path(definition.abstract):
        name = parameter_name(path)
        group, _, rest = name.partition(".")
        tensors, key, shape, layers = written.ends, name, leaf.shape, range(1)
        if group in numbers:
            place, _, inner = rest.partition(".")
            tensors, shape = written.layer, leaf.shape[1:]
            key, layers = (inner, numbers[group][int(place)]) if place.isdecimal() else (rest, numbers[group][0])
        if key not in tensors:
            raise ConfigError(f"model.family: its hugging_face says nothing of {key} (of {name}); add its tensor")
        tensor = tensors[key]
        found[name] = [Part(tensor._replace(name=tensor.name.format(layer)), shape) for layer in layers]
    return found


def _layer_numbers(definition: Definition) -> dict[str, list[range]]:
    """For each group and each place of its pattern, which of the model's layers its units are."""
    numbers, first = {}, 0
    for group in definition.groups:
        length = len(group.pattern)
        numbers[group.name] = [range(first + place, first + group.num_layers, length) for place in range(length)]
        first += group.num_layers
    return numbers


def rounded(array: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """Returns the array in another dtype. Raises `ConfigError` if a finite number is not finite there."""
    with np.errstate(over="ignore"):
        rounded = array.astype(dtype)
    lost = np.isfinite(array) & ~np.isfinite(rounded)
    if not lost.any():
        return rounded
    wider = "bfloat16" if dtype == np.float16 else "float32"
    largest = float(ml_dtypes.finfo(dtype).max)
    raise ConfigError(
        f"--dtype: {name} holds {float(array[lost][0]):g}, and {dtype.name} ends at {largest:g}; choose {wider}"
    )
