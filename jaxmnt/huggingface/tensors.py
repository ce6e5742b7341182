"""The mapping between a model's parameters and the tensors in files of Hugging Face.

A tensor is treated as a matrix with the rows and columns that it has in the file. A vector has one column. If several
parameters share a tensor, each of them is a part of the tensor's outputs.
"""

import math
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np

from jaxmnt.errors import ConfigError
from jaxmnt.models.contract import Definition
from jaxmnt.models.huggingface import EXPERT, Tensor
from jaxmnt.parallel.sharding import parameter_name


class Part(NamedTuple):
    """The part of a parameter that one tensor stores: the whole parameter, or that of one layer, or of one expert."""

    tensor: Tensor
    shape: tuple[int, ...]
    """Shape of the parameter, without the dimensions along which it is a stack of layers or experts."""
    experts: int = 1
    """Number of tensors of the parameter in each layer."""

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """The number of rows and the number of columns of the tensor that belong to the parameter."""
        if self.tensor.inputs == 0:
            return math.prod(self.shape), 1
        inputs = math.prod(self.shape[: self.tensor.inputs])
        outputs = math.prod(self.shape[self.tensor.inputs :])
        return (outputs, inputs) if self.tensor.transposed else (inputs, outputs)

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor in its file."""
        rows, columns = self.matrix_shape
        if self.tensor.inputs == 0:
            return (rows * self.tensor.parts,)
        return (rows * self.tensor.parts, columns) if self.tensor.transposed else (rows, columns * self.tensor.parts)

    @property
    def offset(self) -> tuple[int, int]:
        """The row and column of the tensor at which the part begins; for a vector, the index and 0."""
        rows, columns = self.matrix_shape
        part = self.tensor.part
        by_rows = self.tensor.transposed or self.tensor.inputs == 0
        return (part * rows, 0) if by_rows else (0, part * columns)

    def to_parameter(self, matrix: Any) -> Any:
        """Converts this part of the tensor to the array of the parameter. Takes arrays of NumPy or JAX."""
        is_transposed = self.tensor.transposed and self.tensor.inputs > 0
        return (matrix.T if is_transposed else matrix).reshape(self.shape)


Parts = dict[str, list[Part]]
"""For each parameter name, such as layers.attention.query, the parts of tensors that store it: one part, or one for
each layer if the parameter is a stack over layers, or one for each expert of each layer, layer by layer."""


def parts_of(definition: Definition) -> Parts:
    """Returns the tensors of each parameter, by its name, such as layers.attention.query. A stack has one for each of
    its layers, or of their experts.

    Raises `ConfigError` for a family that Hugging Face does not have.
    """
    hf_format = definition.family.hugging_face
    if hf_format is None:
        raise ConfigError(
            f"model.family: {definition.family.config.family} does not define its tensors in files of Hugging Face; "
            "add hugging_face to the class (docs/models.md)"
        )
    layer_numbers = _layer_numbers(definition)
    parts = {}
    for path, leaf in jax.tree.leaves_with_path(definition.abstract):
        name = parameter_name(path)
        group, _, in_group = name.partition(".")
        if group not in layer_numbers:
            tensors, shape = hf_format.ends, leaf.shape
            key, layers = name, range(1)
        else:
            tensors, shape = hf_format.layer, leaf.shape[1:]
            key, layers = in_group, layer_numbers[group][0]
            # A group whose pattern has several layers has a subtree for each position in it, named by the index.
            index, _, in_layer = in_group.partition(".")
            if index.isdecimal():
                key, layers = in_layer, layer_numbers[group][int(index)]
        if key not in tensors:
            raise ConfigError(f"model.family: its hugging_face lacks {key} (parameter {name}); add its tensor")
        parts[name] = [part for layer in layers for part in _parts_of_layer(tensors[key], layer, shape)]
    return parts


def _parts_of_layer(tensor: Tensor, layer: int, shape: tuple[int, ...]) -> list[Part]:
    """Returns the parts of one layer's parameter: one, or one for each expert."""
    if EXPERT not in tensor.name:
        return [Part(tensor._replace(name=tensor.name.format(layer)), shape)]
    names = [tensor.name.format(layer, expert=expert) for expert in range(shape[0])]
    return [Part(tensor._replace(name=name), shape[1:], shape[0]) for name in names]


def _layer_numbers(definition: Definition) -> dict[str, list[range]]:
    """Returns, for each group, the numbers in the model of the layers that belong to each entry of its pattern."""
    numbers, first = {}, 0
    for group in definition.groups:
        length = len(group.pattern)
        numbers[group.name] = [range(first + index, first + group.num_layers, length) for index in range(length)]
        first += group.num_layers
    return numbers


def round_to(array: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """Returns the array in another dtype. Raises `ConfigError` if a finite number overflows."""
    with np.errstate(over="ignore"):
        rounded = array.astype(dtype)
    overflowed = np.isfinite(array) & ~np.isfinite(rounded)
    if not overflowed.any():
        return rounded
    wider = "bfloat16" if dtype == np.float16 else "float32"
    largest = float(ml_dtypes.finfo(dtype).max)
    raise ConfigError(
        f"--dtype: {name} holds {float(array[overflowed][0]):g}, but the largest number of {dtype.name} is "
        f"{largest:g}; choose {wider}"
    )
