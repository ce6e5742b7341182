"""How parameters lie on a mesh, where that differs from how they are stored.

Checkpoints and initial values have every array in its *canonical* shape: layers in order, nothing padded. A mesh may
ask for something else: stages of unequal depth or of several chunks put layers into another order with empty slots
between, and a vocabulary or an MLP that does not divide gets zeros at its end. Zeros stay zeros: a layer of zeros adds
nothing to what passes through it, and nothing that is zero here has a gradient. So this is a matter of saving and
restoring only, and the same bits come back on any mesh.
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

EMPTY = -1
"""A slot for a layer that holds none."""


@dataclass(frozen=True)
class Dimension:
    """Which canonical index lies at each placed one; `EMPTY` where zeros do."""

    slots: tuple[int, ...]

    @property
    def canonical_slots(self) -> np.ndarray:
        """The placed index of each canonical one."""
        filled = [(index, slot) for slot, index in enumerate(self.slots) if index != EMPTY]
        return np.array([slot for _, slot in sorted(filled)])


def padded(size: int, num_shards: int) -> Dimension | None:
    """`size` indices with zeros after them up to a multiple of `num_shards`; None if it is one."""
    extra = -size % num_shards
    return Dimension((*range(size), *[EMPTY] * extra)) if extra else None


@dataclass(frozen=True)
class Layout:
    """The dimensions, by logical axis, that lie otherwise than they are stored."""

    placement: Placement
    dimensions: dict[str, Dimension]

    def moves(self, axes: Axes) -> bool:
        """Whether an array with these logical axes lies otherwise than it is stored."""
        return any(axis in self.dimensions for axis in axes)

    def canonical_sharding(self, shape: Sequence[int], axes: Axes) -> NamedSharding:
        """The canonical array's sharding: what splits a dimension that moves splits another one, if one divides."""
        placement = self.placement
        split = [() if axis in self.dimensions else placement.mesh_axes(axis) for axis in axes]
        freed = [name for axis in axes if axis in self.dimensions for name in placement.mesh_axes(axis)]
        for name in freed:
            num_shards = [math.prod(placement.sizes[one] for one in names) * placement.sizes[name] for names in split]
            fits = [i for i, axis in enumerate(axes) if axis not in self.dimensions and shape[i] % num_shards[i] == 0]
            if fits:
                best = max(fits, key=lambda i: shape[i] // num_shards[i])
                split[best] = (*split[best], name)
        return NamedSharding(placement.mesh, P(*(names or None for names in split)))

    def to_device_layout(self, array: Array, axes: Axes) -> Array:
        """Canonical to placed; inside jit. The move itself is local, the change of sharding an exchange."""
        if not self.moves(axes):
            return array
        between = self.canonical_sharding(array.shape, axes)
        array = jax.lax.with_sharding_constraint(array, between)
        for dimension, axis in enumerate(axes):
            if axis in self.dimensions:
                slots = np.array(self.dimensions[axis].slots)
                shape = [1] * array.ndim
                shape[dimension] = -1
                taken = jnp.take(array, np.maximum(slots, 0), axis=dimension)
                array = jnp.where((slots != EMPTY).reshape(shape), taken, jnp.zeros_like(taken))
        array = jax.lax.with_sharding_constraint(array, between)
        return jax.lax.with_sharding_constraint(array, self.placement.sharding(axes))

    def to_checkpoint_layout(self, array: Array, axes: Axes) -> Array:
        """Placed to canonical; inside jit."""
        if not self.moves(axes):
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
    """`function(leaf, axes)` for each leaf of a tree like the tree of axes."""
    return jax.tree.map(lambda names, leaf: function(leaf, names), axes, tree, is_leaf=is_axes)
