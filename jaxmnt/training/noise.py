"""The inputs of the gradient noise scale (McCandlish et al. 2018, arXiv:1812.06162, appendix A): the squared norms of
the gradients of a small batch and of the whole batch.

The gradient of a small batch is computed anyway: it is the gradient of the first microbatch, or the gradient on each
replica before the sum over replicas. So the arrays to square are already in memory, and devices exchange only scalars.
"""

import math
from collections import Counter
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxmnt.config.mesh import TOKEN_AXES, axes_that_split
from jaxmnt.models.contract import Params
from jaxmnt.parallel.sharding import GATHERED, Axes, named_leaves
from jaxmnt.training.spec import StepSpec
from jaxmnt.training.trained import select_trained


class SmallBatches(NamedTuple):
    """The small batches whose gradients are squared."""

    share: float
    """The share of a step's rows that is in one small batch."""
    samples: int
    """The number of small batches, each on different devices."""
    from_first_microbatch: bool
    """True if the rows of the small batches come from the first microbatch, False if they come from all
    microbatches."""
    sample_axes: frozenset[str]
    """The mesh axes along which the small batches are on different devices. The few parameters for which these would be
    other axes are left out."""


def small_batches(spec: StepSpec) -> SmallBatches | None:
    """Returns the small batches of a step, or None if the noise scale is off or if no device ever has the gradient of
    only a part of the batch."""
    if not spec.config.telemetry.noise_scale:
        return None
    sizes: Counter[frozenset[str]] = Counter()
    leaves = named_leaves(select_trained(spec.definition.abstract, spec.trained_axes), spec.trained_axes)
    for _, leaf, names in leaves:
        leaf_axes = _sample_axes(spec, names)
        if leaf_axes is not None:
            sizes[leaf_axes] += leaf.size
    if not sizes:
        return None
    sample_axes = max(sizes, key=lambda axes: (sizes[axes], sorted(axes)))
    samples = math.prod(spec.placement.sizes[axis] for axis in sample_axes)
    from_first_microbatch = spec.placement.stages == 1 and spec.num_microbatches > 1
    share = 1 / (samples * (spec.num_microbatches if from_first_microbatch else 1))
    sampled_names = [names for _, _, names in leaves if _sample_axes(spec, names) == sample_axes]
    is_summed_early = any(map(spec.is_reduced_early, sampled_names))
    if share == 1 or (is_summed_early and not from_first_microbatch):
        return None
    return SmallBatches(share, samples, from_first_microbatch, sample_axes)


def squared_norm(spec: StepSpec, batches: SmallBatches, gradients: Params) -> Array:
    """Returns the squared norm, in float32, of one device's gradients or of global gradients. Only gradients whose
    rows are split along the axes of the small batches are included."""
    leaves = named_leaves(gradients, spec.trained_axes)
    sampled_leaves = [leaf for _, leaf, names in leaves if _sample_axes(spec, names) == batches.sample_axes]
    return sum((jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in sampled_leaves), jnp.zeros((), jnp.float32))


def _sample_axes(spec: StepSpec, names: Axes) -> frozenset[str] | None:
    """Returns the mesh axes along which devices have gradients of different rows until all microbatches are done, or
    None if devices hold gradients of parts of rows, or partial sums of the gradient. The parts of a row are not
    independent samples."""
    axes = _unsummed_axes(spec, names)
    return None if axes is None or axes & {*axes_that_split("length")} else axes


def _unsummed_axes(spec: StepSpec, names: Axes) -> frozenset[str] | None:
    """Returns the mesh axes along which devices have gradients of different tokens until all microbatches are done, or
    None if devices also hold partial sums of the gradient."""
    placement = spec.placement
    if not set(placement.replicated_axes(names)) <= set(TOKEN_AXES):
        return None
    # An expert's gradient is that of the tokens of all devices that share the experts.
    own_axes = {axis for name in names if name not in GATHERED for axis in placement.mesh_axes(name)}
    token_axes = frozenset(axis for axis in TOKEN_AXES if placement.sizes[axis] > 1) - own_axes
    gathered = placement.gathered_axes(names)
    if gathered is None:
        return token_axes
    if spec.zero == 1:  # gradients are summed over the gathered axes only at the end of the step
        return token_axes if set(gathered[1]) <= set(TOKEN_AXES) else None
    return token_axes - set(gathered[1])
