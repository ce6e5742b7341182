"""Layouts of parameters: the device layout on a mesh, where it differs from the checkpoint layout.

Checkpoints and initial values have every array in its *canonical* shape: layers in order, without padding. A mesh may
need another layout: stages of unequal depth or with several chunks reorder layers and leave empty slots between them,
and a vocabulary or an MLP whose size is not divisible is padded with zeros at its end. Zeros stay zeros: a layer of
zeros adds nothing to its input, and the padding has no gradient. So only saving and restoring convert layouts, and any
mesh restores the same bits.
"""

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
"""Marks a slot without a layer, or padding."""


@dataclass(frozen=True)
class Dimension:
    """The canonical index at each index of the device layout; `EMPTY_SLOT` where there are zeros."""

    slots: tuple[int, ...]

    @property
    def canonical_slots(self) -> np.ndarray:
        """The index in the device layout of each canonical index."""
        filled = [(index, slot) for slot, index in enumerate(self.slots) if index != EMPTY_SLOT]
        return np.array([slot for _, slot in sorted(filled)])


def pad_dimension(size: int, num_shards: int) -> Dimension | None:
    """Returns `size` indices padded to a multiple of `num_shards`, or None if no padding is needed."""
    extra = -size % num_shards
    return Dimension((*range(size), *[EMPTY_SLOT] * extra)) if extra else None


@dataclass(frozen=True)
class Layout:
    """The dimensions, by logical axis, whose device layout differs from the checkpoint layout."""

    placement: Placement
    dimensions: dict[str, Dimension]

    def changes(self, axes: Axes) -> bool:
        """Returns True if the device layout of an array with these logical axes differs from its checkpoint layout."""
        return any(axis in self.dimensions for axis in axes)

    def canonical_sharding(self, shape: Sequence[int], axes: Axes) -> NamedSharding:
        """Returns the canonical array's sharding: mesh axes that split a changed dimension split another dimension, if
        one is divisible."""
        placement = self.placement
        split = [() if axis in self.dimensions else placement.mesh_axes(axis) for axis in axes]
        # Mesh axes that split a changed dimension, and may split another one instead.
        freed = [name for axis in axes if axis in self.dimensions for name in placement.mesh_axes(axis)]
        for name in freed:
            num_shards = [math.prod(placement.sizes[axis] for axis in names) * placement.sizes[name] for names in split]
            fits = [i for i, axis in enumerate(axes) if axis not in self.dimensions and shape[i] % num_shards[i] == 0]
            if fits:
                best = max(fits, key=lambda i: shape[i] // num_shards[i])
                split[best] = (*split[best], name)
        return NamedSharding(placement.mesh, P(*(names or None for names in split)))

    def to_device_layout(self, array: Array, axes: Axes) -> Array:
        """Converts an array from the checkpoint layout to the device layout, inside jit. The reordering is local; the
        change of sharding communicates."""
        if not self.changes(axes):
            return array
        between = self.canonical_sharding(array.shape, axes)
        array = jax.lax.with_sharding_constraint(array, between)
        for dimension, axis in enumerate(axes):
            if axis in self.dimensions:
                # Reorder the canonical indices into their slots, and fill empty slots and padding with zeros.
                slots = np.array(self.dimensions[axis].slots)
                shape = [1] * array.ndim
                shape[dimension] = -1
                gathered = jnp.take(array, np.maximum(slots, 0), axis=dimension)
                array = jnp.where((slots != EMPTY_SLOT).reshape(shape), gathered, jnp.zeros_like(gathered))
        array = jax.lax.with_sharding_constraint(array, between)
        return jax.lax.with_sharding_constraint(array, self.placement.sharding(axes))

    def to_checkpoint_layout(self, array: Array, axes: Axes) -> Array:
        """Converts an array from the device layout to the checkpoint layout, inside jit."""
        if not self.changes(axes):
            return array
        slots = {axis: self.dimensions[axis].canonical_slots for axis in axes if axis in self.dimensions}
        shape = [len(slots[axis]) if axis in slots else size for size, axis in zip(array.shape, axes, strict=True)]
        between = self.canonical_sharding(shape, axes)
        array = jax.lax.with_sharding_constraint(array, between)
        for dimension, axis in enumerate(axes):
            if axis in slots:
                array = jnp.take(array, slots[axis], axis=dimension)
        return jax.lax.with_sharding_constraint(array, between)


def map_with_axes(function: Any, tree: Any, axes: Any) -> Any:
    """Returns `function(leaf, axes)` for each leaf of a tree that has the structure of the tree of axes."""
    return jax.tree.map(lambda names, leaf: function(leaf, names), axes, tree, is_leaf=is_axes)
