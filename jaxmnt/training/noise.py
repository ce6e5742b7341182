"""The inputs of the gradient noise scale (McCandlish et al. 2018, arXiv:1812.06162, appendix A): the squared norms of
the gradients of a small batch and of the whole batch.

The gradient of a small batch is computed anyway: it is that of the first microbatch, or that of each replica before the
sum over replicas. So the squares are of arrays already in memory, and only scalars are communicated.
"""

import math
from collections import Counter
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxmnt.config.mesh import TOKEN_AXES
from jaxmnt.models.contract import Params
from jaxmnt.parallel.sharding import Axes, named_leaves
from jaxmnt.training.spec import StepSpec
from jaxmnt.training.trained import select


class SmallBatches(NamedTuple):
    """The small batches whose gradients are squared."""

    share: float
    """The share of a step's rows in one small batch."""
    samples: int
    """The number of small batches at a time, on different devices."""
    of_first_microbatch: bool
    """True if they are taken from the first microbatch, else from all microbatches."""
    sample_axes: frozenset[str]
    """The mesh axes along which the small batches are split. The few gradients that are split along other axes are left
    out."""


def small_batches(spec: StepSpec) -> SmallBatches | None:
    """Returns the small batches of a step, or None if the noise scale is off or no device ever has the gradient of a
    part of the batch."""
    if not spec.config.telemetry.noise_scale:
        return None
    sizes: Counter[frozenset[str]] = Counter()
    leaves = named_leaves(select(spec.definition.abstract, spec.trained_axes), spec.trained_axes)
    for _, leaf, names in leaves:
        if (sample_axes := _sample_axes(spec, names)) is not None:
            sizes[sample_axes] += leaf.size
    if not sizes:
        return None
    sample_axes = max(sizes, key=lambda axes: (sizes[axes], sorted(axes)))
    samples = math.prod(spec.placement.sizes[axis] for axis in sample_axes)
    first = spec.placement.stages == 1 and spec.num_microbatches > 1
    share = 1 / (samples * (spec.num_microbatches if first else 1))
    summed = any(spec.is_reduced_early(names) for _, _, names in leaves if _sample_axes(spec, names) == sample_axes)
    if share == 1 or (summed and not first):
        return None
    return SmallBatches(share, samples, first, sample_axes)


def squares(spec: StepSpec, small: SmallBatches, gradients: Params) -> Array:
    """Returns the sum of squares, in float32, of a device's gradients or of global ones."""
    leaves = named_leaves(gradients, spec.trained_axes)
    sampled = [leaf for _, leaf, names in leaves if _sample_axes(spec, names) == small.sample_axes]
    return sum((jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in sampled), jnp.zeros((), jnp.float32))


def _sample_axes(spec: StepSpec, names: Axes) -> frozenset[str] | None:
    """Returns the batch axes along which devices have gradients of different rows until all microbatches are done, or
    None if devices also hold partial sums of the gradient."""
    placement = spec.placement
    if not set(placement.replicated_axes(names)) <= set(TOKEN_AXES):
        return None
    batch = frozenset(axis for axis in TOKEN_AXES if placement.sizes[axis] > 1)
    gathered = placement.gathered_axes(names)
    if gathered is None:
        return batch
    if spec.zero == 1:  # sums over the gathered axes only at the end of the step
        return batch if set(gathered[1]) <= set(TOKEN_AXES) else None
    return batch - set(gathered[1])
