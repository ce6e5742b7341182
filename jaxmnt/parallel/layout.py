"""Layouts of parameters: the device layout on a mesh, if it differs from the checkpoint layout.

Checkpoints and initial values have every array in its *canonical* shape: layers in order, without padding. A mesh may
need another layout: stages of unequal depth or with several chunks reorder layers and leave empty slots between them,
and a vocabulary or an MLP whose size cannot be split evenly is padded with zeros at its end. Zeros stay zeros, because
a layer of zeros adds nothing to its input and the padding has no gradient. So only saving and restoring convert
layouts, and any mesh restores the same bits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmnt.parallel.sharding import Axes, Placement, is_axes

EMPTY_SLOT = -1
"""Marks a slot without a layer, or an index in the padding."""


@dataclass(frozen=True)
class Dimension:
    """A dimension whose device layout differs from the checkpoint layout."""

    slots: tuple[int, ...]
    """The canonical index at each index of the device layout, or `EMPTY_SLOT` where the device layout has zeros."""

    @property
    def canonical_slots(self) -> np.ndarray:
        """The index in the device layout for each canonical index."""
        filled_slots = [(index, slot) for slot, index in enumerate(self.slots) if index != EMPTY_SLOT]
        return np.array([slot for _, slot in sorted(filled_slots)])


def pad_dimension(size: int, num_shards: int) -> Dimension | None:
    """Returns a dimension of `size` indices, padded to a multiple of `num_shards`, or None if it needs no padding."""
    padding = -size % num_shards
    return Dimension((*range(size), *[EMPTY_SLOT] * padding)) if padding else None


@dataclass(frozen=True)
class Layout:
    """The difference between the device layout on a mesh and the checkpoint layout."""

    placement: Placement
    dimensions: dict[str, Dimension]
    """The dimensions whose layouts differ, by logical axis."""

    def changes(self, axes: Axes) -> bool:
        """Returns True if the device layout of an array with these logical axes differs from its checkpoint layout."""
        return any(axis in self.dimensions for axis in axes)

    def canonical_sharding(self, shape: Sequence[int], axes: Axes) -> NamedSharding:
        """Returns the sharding of an array with this shape in the checkpoint layout. Dimensions whose layouts differ
        are not split. Each mesh axis that splits such a dimension on the devices splits another dimension instead, if
        one is divisible."""
        placement = self.placement
        partition = [() if axis in self.dimensions else placement.mesh_axes(axis) for axis in axes]
        moved_axes = [name for axis in axes if axis in self.dimensions for name in placement.mesh_axes(axis)]
        for moved_axis in moved_axes:
            # The number of pieces of each dimension, if the moved axis split it as well.
            num_shards = [math.prod(placement.sizes[name] for name in (*names, moved_axis)) for names in partition]
            divisible_dimensions = [
                dimension
                for dimension, axis in enumerate(axes)
                if axis not in self.dimensions and shape[dimension] % num_shards[dimension] == 0
            ]
            if divisible_dimensions:
                best_dimension = max(
                    divisible_dimensions, key=lambda dimension: shape[dimension] // num_shards[dimension]
                )
                partition[best_dimension] = (*partition[best_dimension], moved_axis)
        return NamedSharding(placement.mesh, P(*(names or None for names in partition)))

    def to_device_layout(self, array: Array, axes: Axes) -> Array:
        """Converts an array from the checkpoint layout to the device layout, inside jit. Devices reorder their pieces
        locally, and then communicate to change the sharding."""
        if not self.changes(axes):
            return array
        canonical_sharding = self.canonical_sharding(array.shape, axes)
        array = jax.lax.with_sharding_constraint(array, canonical_sharding)
        for dimension, axis in enumerate(axes):
            if axis in self.dimensions:
                # Reorder the canonical indices into their slots, and fill empty slots and padding with zeros.
                slots = np.array(self.dimensions[axis].slots)
                shape = [1] * array.ndim
                shape[dimension] = -1
                gathered = jnp.take(array, np.maximum(slots, 0), axis=dimension)
                array = jnp.where((slots != EMPTY_SLOT).reshape(shape), gathered, jnp.zeros_like(gathered))
        array = jax.lax.with_sharding_constraint(array, canonical_sharding)
        return jax.lax.with_sharding_constraint(array, self.placement.sharding(axes))

    def to_checkpoint_layout(self, array: Array, axes: Axes) -> Array:
        """Converts an array from the device layout to the checkpoint layout, inside jit."""
        if not self.changes(axes):
            return array
        slots = {axis: self.dimensions[axis].canonical_slots for axis in axes if axis in self.dimensions}
        shape = [len(slots[axis]) if axis in slots else size for size, axis in zip(array.shape, axes, strict=True)]
        canonical_sharding = self.canonical_sharding(shape, axes)
        array = jax.lax.with_sharding_constraint(array, canonical_sharding)
        for dimension, axis in enumerate(axes):
            if axis in slots:
                array = jnp.take(array, slots[axis], axis=dimension)
        return jax.lax.with_sharding_constraint(array, canonical_sharding)


def map_with_axes(function: Any, tree: Any, axes: Any) -> Any:
    """Returns the tree of `function(leaf, leaf_axes)` for the leaves of a tree and of the tree of their axes, which
    have the same structure."""
    return jax.tree.map(lambda names, leaf: function(leaf, names), axes, tree, is_leaf=is_axes)
