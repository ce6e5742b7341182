"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon), with each matrix orthogonalised by one device.

A step of Muon replaces the momentum of a matrix by the nearest matrix with orthogonal rows or columns, which takes the
whole matrix. A device stores a piece of each matrix of its pipeline stage. So one all-to-all gives each of these
devices whole matrices, it orthogonalises them, and a second all-to-all gives the pieces back. That is the least that
can be sent if no device has a whole matrix: twice a device's own pieces, but for the matrices that fill up the last
round. Devices along `data` hold the same pieces and compute the same updates.

Shapes: N matrices of a group on a device, R and C a device's piece of their rows and columns, D devices that share each
matrix.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from jaxmnt.config.schema import Muon
from jaxmnt.parallel.collectives import exchange
from jaxmnt.parallel.sharding import GATHERED, Axes, Placement, is_axes

COEFFICIENTS = {
    "jordan": ((3.4445, -4.7750, 2.0315),),
    # Amsel et al. 2025 (arXiv:2505.16932), for five steps with a margin of 2 %, as nanochat uses them.
    "polar_express": (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
}
"""The coefficients (a, b, c) of each step of the iteration. The last ones are used for all further steps."""

_MARGINS = {"jordan": 1.0, "polar_express": 1.02}
"""The factor by which a matrix's norm must be below 1 before the first step."""

_MIN_NORM = 1e-7

_RMS_OF_ADAMW = 0.2
"""The root mean square of AdamW's updates in practice (Liu et al. 2025, arXiv:2502.16982, section 2.2)."""


@dataclass(frozen=True)
class MatrixForm:
    """The matrices in a parameter. Its other dimensions, such as the layers and the experts, number the matrices."""

    residual: int
    """The dimension along the residual stream: the inputs or the outputs of each matrix."""
    others: tuple[int, ...]
    """The dimensions that together are the other side of each matrix."""

    @property
    def reads_residual(self) -> bool:
        """True if the matrices read from the residual stream, False if they write to it."""
        return self.residual < max(self.others)

    def order(self, dimensions: int) -> list[int]:
        """Returns the dimensions in the order (numbers of the matrices, residual stream, others)."""
        numbers = [index for index in range(dimensions) if index != self.residual and index not in self.others]
        return [*numbers, self.residual, *self.others]

    def size(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Returns the inputs and the outputs of each matrix in a parameter of this shape."""
        sides = shape[self.residual], math.prod(shape[index] for index in self.others)
        return sides if self.reads_residual else (sides[1], sides[0])


def matrix_form(names: Axes, *, stacked: bool) -> MatrixForm | None:
    """Returns the matrices in a parameter with these logical axes, or None if it has none that read from or write to
    the residual stream. The first axis of a `stacked` parameter numbers layers."""
    residual = [index for index, axis in enumerate(names) if axis in GATHERED]
    numbers = [index for index, axis in enumerate(names) if axis == "experts" or (stacked and index == 0)]
    others = [index for index in range(len(names)) if index not in residual + numbers]
    return MatrixForm(residual[0], tuple(others)) if len(residual) == 1 and others else None


def scale_of(kind: str, inputs: int, outputs: int) -> float:
    """Returns the factor of a matrix's orthogonalised update. `rms` gives it the root mean square of AdamW's updates,
    so that both have the same learning rate and weight decay (Liu et al. 2025). `spectral` gives it the spectral norm
    sqrt(max(1, outputs / inputs)) of Jordan et al."""
    if kind == "rms":
        return _RMS_OF_ADAMW * math.sqrt(max(inputs, outputs))
    return math.sqrt(max(1.0, outputs / inputs)) if kind == "spectral" else 1.0


class MuonState(NamedTuple):
    """The state of Muon. Its name in checkpoints is that of Optax's Muon, whose runs can be continued."""

    mu: Any
    """The momentum of each parameter."""


def scale_by_muon(
    settings: Muon, placement: Placement, axes: Any, shapes: Any, stacks: Collection[str], dtype: jnp.dtype
) -> optax.GradientTransformation:
    """Returns Muon without learning rate and weight decay, for parameters that all have matrices.

    The momentum is m = β m + (1 - β) g, and the update is that of (1 - β) g + β m, as in torch.optim.Muon. `axes` and
    `shapes` are the parameters' logical axes and their shapes in the checkpoint layout, which a mesh may pad. Matrices
    are sent and multiplied in `dtype`. The updates are float32 and sharded like the parameters.
    """
    beta = settings.momentum
    is_masked = lambda node: isinstance(node, optax.MaskedNode)
    average = lambda old, new: jax.tree.map(lambda a, b: beta * a + (1 - beta) * b, old, new)

    def init(params: Any) -> MuonState:
        return MuonState(jax.tree.map(jnp.zeros_like, params))

    def update(gradients: Any, state: MuonState, params: Any = None) -> tuple[Any, MuonState]:
        momentum = average(state.mu, gradients)
        # A parameter that another optimizer updates is masked, and has no leaf here.
        leaves, structure = jax.tree.flatten(average(momentum, gradients), is_leaf=is_masked)
        axes_of_leaves, shapes_of_leaves = jax.tree.leaves(axes, is_leaf=is_axes), jax.tree.leaves(shapes)
        pieces = {
            index: Pieces(leaf, names, names[0] in stacks, tuple(shape.shape))
            for index, (leaf, names, shape) in enumerate(zip(leaves, axes_of_leaves, shapes_of_leaves, strict=True))
            if not is_masked(leaf)
        }
        updates = _orthogonalize(pieces, settings, placement, dtype)
        leaves = [updates.get(index, leaf) for index, leaf in enumerate(leaves)]
        return jax.tree.unflatten(structure, leaves), MuonState(momentum)

    return optax.GradientTransformation(init, update)


class Pieces(NamedTuple):
    """A parameter, of which each device has a piece."""

    array: Array
    names: Axes
    stacked: bool
    shape: tuple[int, ...]
    """The shape in the checkpoint layout."""

    @property
    def form(self) -> MatrixForm:
        form = matrix_form(self.names, stacked=self.stacked)
        assert form is not None
        return form


def _orthogonalize(
    parameters: Mapping[int, Pieces], settings: Muon, placement: Placement, dtype: jnp.dtype
) -> dict[int, Array]:
    """Returns the scaled updates of parameters, by the same keys."""
    specs = {key: placement.spec(pieces.names) for key, pieces in parameters.items()}

    def run(arrays: dict[int, Array]) -> dict[int, Array]:
        matrices = {key: _LocalMatrices(array, parameters[key], placement) for key, array in arrays.items()}
        keys_of_groups: dict[Group, list[int]] = {}
        for key, local in matrices.items():
            keys_of_groups.setdefault(local.group, []).append(key)
        updates = {}
        for group, keys in keys_of_groups.items():
            pieces_NRC = jnp.concatenate([matrices[key].pieces_NRC for key in keys])
            updates_NRC = _update_group(group, pieces_NRC, settings, placement, dtype)
            ends = np.cumsum([matrices[key].pieces_NRC.shape[0] for key in keys])[:-1]
            for key, part_NRC in zip(keys, jnp.split(updates_NRC, ends), strict=True):
                updates[key] = matrices[key].restore(part_NRC)
        return updates

    # JAX does not check replication, because devices along an axis that splits nothing compute the same.
    on_devices = jax.shard_map(run, mesh=placement.mesh, in_specs=(specs,), out_specs=specs, check_vma=False)
    updates = on_devices({key: pieces.array for key, pieces in parameters.items()})
    return {
        key: updates[key] * scale_of(settings.scale, *pieces.form.size(pieces.shape))
        for key, pieces in parameters.items()
    }


class Group(NamedTuple):
    """Matrices that are exchanged together, because devices have equal pieces of them."""

    over_rows: tuple[str, ...]
    """The mesh axes that divide the rows, which run along the residual stream."""
    over_columns: tuple[str, ...]
    rows: int
    """The rows of a device's piece of a matrix."""
    columns: int

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes along which devices share a matrix."""
        return (*self.over_rows, *self.over_columns)

    def rounds(self, matrices: int, placement: Placement) -> int:
        """Returns the number of matrices that a device orthogonalises if it has pieces of `matrices`."""
        return -(-matrices // _count(self.axes, placement))

    def sent_elements(self, matrices: int, placement: Placement) -> int:
        """Returns the number of elements that a device sends to others: pieces of matrices, and of updates."""
        others = _count(self.axes, placement) - 1
        return 2 * others * self.rounds(matrices, placement) * self.rows * self.columns


def group_of(form: MatrixForm, names: Axes, local_shape: tuple[int, ...], placement: Placement) -> tuple[Group, int]:
    """Returns the group of a parameter's matrices, and their number. `local_shape` is that of a device's piece of the
    parameter."""
    over_rows = placement.mesh_axes(names[form.residual])
    over_columns = tuple(axis for index in form.others for axis in placement.mesh_axes(names[index]))
    group = Group(over_rows, over_columns, local_shape[form.residual], math.prod(local_shape[i] for i in form.others))
    return group, math.prod(local_shape) // (group.rows * group.columns)


def _count(axes: tuple[str, ...], placement: Placement) -> int:
    """Returns the number of devices along mesh axes."""
    return math.prod(placement.sizes[axis] for axis in axes)


class _LocalMatrices:
    """A device's piece of a parameter, as pieces of matrices [N, R, C]. Rows run along the residual stream even if it
    is the output, because a transposed matrix has a transposed update. So the matrices of parameters with equal sides
    form a group."""

    def __init__(self, array: Array, parameter: Pieces, placement: Placement):
        self._order = parameter.form.order(array.ndim)
        self._transposed = array.transpose(self._order)
        self.group, count = group_of(parameter.form, parameter.names, array.shape, placement)
        self.pieces_NRC = self._transposed.reshape(count, self.group.rows, self.group.columns)

    def restore(self, pieces_NRC: Array) -> Array:
        """Returns pieces of matrices in the parameter's own form."""
        return pieces_NRC.reshape(self._transposed.shape).transpose(np.argsort(self._order))


def _update_group(group: Group, pieces_NRC: Array, settings: Muon, placement: Placement, dtype: jnp.dtype) -> Array:
    """Gives each device whole matrices, orthogonalises them, and gives the pieces back. Returns a device's pieces of
    the updates, float32, without scale.

    Each device sends its pieces of matrix i to device i mod D. There, a matrix is put together in the order of the
    devices, which may not be that of its rows and columns. A matrix with its rows or columns in another order has the
    same update, in that order.
    """
    if not group.axes:
        return newton_schulz(pieces_NRC, settings, dtype)
    over_rows, over_columns = (_count(axes, placement) for axes in (group.over_rows, group.over_columns))
    devices, count = over_rows * over_columns, pieces_NRC.shape[0]
    rounds, rows, columns = group.rounds(count, placement), group.rows, group.columns
    # Matrices of zeros fill up the last round. Their updates are zeros, too.
    filled_NRC = jnp.pad(pieces_NRC.astype(dtype), ((0, rounds * devices - count), (0, 0), (0, 0)))
    sent = filled_NRC.reshape(rounds, devices, rows, columns).swapaxes(0, 1)
    received = exchange(sent, group.axes)
    pieces = received.reshape(over_rows, over_columns, rounds, rows, columns)
    whole = pieces.transpose(2, 0, 3, 1, 4).reshape(rounds, over_rows * rows, over_columns * columns)
    updates = newton_schulz(whole, settings, dtype).astype(dtype)
    cut = updates.reshape(rounds, over_rows, rows, over_columns, columns).transpose(1, 3, 0, 2, 4)
    returned = exchange(cut.reshape(devices, rounds, rows, columns), group.axes)
    return returned.swapaxes(0, 1).reshape(-1, rows, columns)[:count].astype(jnp.float32)


def newton_schulz(matrices: Array, settings: Muon, dtype: jnp.dtype) -> Array:
    """Returns approximations, float32, of the nearest orthogonal matrices of a batch [N, rows, columns], by the
    iteration X ← a X + (b A + c A²) X with A = X Xᵀ. Products are in `dtype`. Zeros stay zeros."""
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = jnp.swapaxes(matrices, -1, -2) if is_tall else matrices
    x = x.astype(jnp.float32)
    norms = jnp.sqrt(jnp.sum(jnp.square(x), axis=(-2, -1), keepdims=True)) * _MARGINS[settings.coefficients]
    x = (x / jnp.maximum(norms, _MIN_NORM)).astype(dtype)
    coefficients = COEFFICIENTS[settings.coefficients]
    for step in range(settings.steps):
        a, b, c = coefficients[min(step, len(coefficients) - 1)]
        gram = x @ jnp.swapaxes(x, -1, -2)
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    x = x.astype(jnp.float32)
    return jnp.swapaxes(x, -1, -2) if is_tall else x
