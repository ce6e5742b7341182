"""What the gradient noise scale is made of (McCandlish et al. 2018, arXiv:1812.06162, appendix A): the squared norm of
the gradient of a small batch, and that of the whole one.

The gradient of a small batch is there anyway: that of the first microbatch, or what each replica has before the
replicas are summed. So squares are taken of what lies in memory, and nothing is sent but single numbers.
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
    """Whose gradients are squared."""

    share: float
    """Of the rows of a step, that one has."""
    samples: int
    """How many there are at a time, on different devices."""
    of_first_microbatch: bool
    """Whether they are of the first microbatch; else of all."""
    apart: frozenset[str]
    """The mesh axes along which they lie. Gradients that lie otherwise are few, and are left out."""


def small_batches(spec: StepSpec) -> SmallBatches | None:
    """None where it is not asked for, and where the gradient of a part of the batch is nowhere."""
    if not spec.config.telemetry.noise_scale:
        return None
    sizes: Counter[frozenset[str]] = Counter()
    leaves = named_leaves(select(spec.definition.abstract, spec.trained_axes), spec.trained_axes)
    for _, leaf, names in leaves:
        if (apart := _apart(spec, names)) is not None:
            sizes[apart] += leaf.size
    if not sizes:
        return None
    apart = max(sizes, key=lambda one: (sizes[one], sorted(one)))
    samples = math.prod(spec.placement.sizes[axis] for axis in apart)
    first = spec.placement.stages == 1 and spec.num_microbatches > 1
    share = 1 / (samples * (spec.num_microbatches if first else 1))
    summed = any(spec.is_reduced_early(names) for _, _, names in leaves if _apart(spec, names) == apart)
    if share == 1 or (summed and not first):
        return None
    return SmallBatches(share, samples, first, apart)


def squares(spec: StepSpec, small: SmallBatches, gradients: Params) -> Array:
    """Of a device's gradients, or of all: the sum of their squares, in float32."""
    leaves = named_leaves(gradients, spec.trained_axes)
    chosen = [leaf for _, leaf, names in leaves if _apart(spec, names) == small.apart]
    return sum((jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in chosen), jnp.zeros((), jnp.float32))


def _apart(spec: StepSpec, names: Axes) -> frozenset[str] | None:
    """The axes of the batch along which devices have gradients of different rows, until all microbatches are done; None
    where they have parts of sums, too."""
    placement = spec.placement
    if not set(placement.replicated_axes(names)) <= set(TOKEN_AXES):
        return None
    batch = frozenset(axis for axis in TOKEN_AXES if placement.sizes[axis] > 1)
    gathered = placement.gathered_axes(names)
    if gathered is None:
        return batch
    if spec.zero == 1:  # which sums over all that are gathered at the end of the step
        return batch if set(gathered[1]) <= set(TOKEN_AXES) else None
    return batch - set(gathered[1])
