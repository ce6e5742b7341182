"""What a token costs in FLOPs, by the conventions of published figures, and what a device can do at most."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxmnt.models.contract import Definition, Params
from jaxmnt.parallel.sharding import SCALES_AND_BIASES, is_axes
from jaxmnt.telemetry.peaks import peaks_of


@dataclass(frozen=True)
class TokenFlops:
    """Forward and backward FLOPs of a token in a row of full length: 6 for each weight that multiplies it, and 12 for
    each number of a query and each key that it meets (Kaplan et al. 2020, arXiv:2001.08361)."""

    layers: int
    """Products with the layers' weights."""
    head: int
    all_parameters: int
    """As if every parameter multiplied, the input's embedding too."""
    attention: float
    """Scores and what they weigh, over the keys that a token sees: half of the length, or a window."""
    square: int
    """The same over the whole length."""
    softmax: int
    """Three for each score of the whole length, times three for forward and backward."""

    def recomputed(self, remat: str) -> float | None:
        """What backward computes again under this `train.remat`; None if that depends on names. What a kernel of
        attention computes again is not counted."""
        again = {"none": 0.0, "attention": 0.0, "dots": self.attention / 3, "full": (self.layers + self.attention) / 3}
        return again.get(remat)


CONVENTIONS: dict[str, Callable[[TokenFlops], float]] = {
    "causal": lambda flops: flops.layers + flops.head + flops.attention,
    "square": lambda flops: flops.layers + flops.head + flops.square,
    "parameters": lambda flops: flops.all_parameters + flops.square,
    "levanter": lambda flops: flops.layers + flops.head + flops.square + flops.softmax,
}
"""What `telemetry.flops` may be. `causal` is also that of Megatron-Bridge, and of MaxText since its pull request 1988;
`square` that of torchtitan, NeMo up to 24.12 and Narayanan et al. 2021 without recomputation; `parameters` that of
llm-foundry and of torchtitan's figures of 2024 for the A100."""


def token_flops(definition: Definition, length: int) -> TokenFlops:
    """Of a token in a row of `length`, read off the parameters and `Family.attention_shape`."""
    family = definition.family
    names = [group.name for group in definition.groups]
    multiplying = lambda part: _weights(definition.abstract[part], definition.axes[part])
    attention, square, softmax = 0.0, 0, 0
    for group in definition.groups:
        for kind in group.pattern:
            shape = family.attention_shape(kind)
            width, window = shape.heads * shape.head_dim, min(shape.window or length, length)
            attention += 12 * group.units * width * (window - window * window / (2 * length))
            square += 12 * group.units * width * length
            softmax += 9 * group.units * shape.heads * length
    return TokenFlops(
        layers=6 * sum(map(multiplying, names)),
        head=6 * sum(map(multiplying, definition.last)),
        all_parameters=6 * definition.parameter_count,
        attention=attention,
        square=square,
        softmax=softmax,
    )


def _weights(arrays: Params, axes: Params) -> int:
    """How many numbers the arrays have, without scales and biases."""
    leaves = zip(jax.tree.leaves(arrays), jax.tree.leaves(axes, is_leaf=is_axes), strict=True)
    return sum(leaf.size for leaf, names in leaves if not SCALES_AND_BIASES & {*names})


def peak_flops(device_kind: str, dtype: jnp.dtype) -> float | None:
    """Peak FLOP/s of one device, or None where it is not known."""
    return peaks_of(device_kind).get(jnp.dtype(dtype).name)
