"""FLOPs of a token, by the conventions of published figures, and the peak FLOP/s of a device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp

from jaxmnt.models.contract import Definition, products_of
from jaxmnt.telemetry.peaks import peaks_of


class RecomputeShare(NamedTuple):
    """Shares of a layer's forward pass that the backward pass recomputes."""

    products: float
    attention: float
    elementwise: float


RECOMPUTE_SHARES = {
    "none": RecomputeShare(0, 0, 0),
    "attention": RecomputeShare(0, 0, 0),
    "dots": RecomputeShare(0, 1, 1),
    "full": RecomputeShare(1, 1, 1),
}
"""Shares by `train.remat`. `names` is absent, as it depends on the names."""


@dataclass(frozen=True)
class TokenFlops:
    """Forward and backward FLOPs of a token in a row of full length: 6 for each weight that multiplies it, and 12 for
    each element of a query per key that it attends to (Kaplan et al. 2020, arXiv:2001.08361)."""

    layers: float
    """Products with the layers' weights."""
    head: int
    all_parameters: int
    """Products if every parameter multiplied the token, including the input embedding."""
    attention: float
    """Attention scores and the weighted sum of values, over the keys that a token sees: half of the length on average,
    or a window."""
    square: int
    """Like `attention`, but over the whole length."""
    softmax: int
    """Three for each score over the whole length, times three for forward and backward."""

    def recomputed(self, remat: str) -> float | None:
        """Returns the FLOPs that the backward pass recomputes under this `train.remat`; None if that depends on names.
        Recomputation inside attention kernels is not counted."""
        if (shares := RECOMPUTE_SHARES.get(remat)) is None:
            return None
        # A third of the FLOPs is the forward pass.
        return (shares.products * self.layers + shares.attention * self.attention) / 3


CONVENTIONS: dict[str, Callable[[TokenFlops], float]] = {
    "causal": lambda flops: flops.layers + flops.head + flops.attention,
    "square": lambda flops: flops.layers + flops.head + flops.square,
    "parameters": lambda flops: flops.all_parameters + flops.square,
    "levanter": lambda flops: flops.layers + flops.head + flops.square + flops.softmax,
}
"""Values of `telemetry.flops`. `causal` is also the convention of Megatron-Bridge, and of MaxText since its pull
request 1988; `square` that of torchtitan, NeMo up to 24.12 and Narayanan et al. 2021 without recomputation;
`parameters` that of llm-foundry and of torchtitan's figures of 2024 for the A100."""


def token_flops(definition: Definition, length: int) -> TokenFlops:
    """Returns the FLOPs of a token in a row of `length`, from `Family.costs`."""
    layers = definition.layer_costs()
    attention, square, softmax = 0.0, 0, 0
    for count, costs in layers:
        shape = costs.attention
        width = shape.heads * shape.head_dim
        window = min(shape.window or length, length)
        # The mean number of keys: `window` of most tokens, and 1, 2, … of the first `window` tokens.
        attention += 12 * count * width * (window - window * window / (2 * length))
        square += 12 * count * width * length
        softmax += 9 * count * shape.heads * length
    last = (products_of(definition.abstract[name], definition.axes[name]) for name in definition.last)
    return TokenFlops(
        layers=6 * sum(count * costs.used_parameters for count, costs in layers),
        head=6 * sum(product.inputs * product.outputs for products in last for product in products),
        all_parameters=6 * definition.parameter_count,
        attention=attention,
        square=square,
        softmax=softmax,
    )


def peak_flops(device_kind: str, dtype: jnp.dtype) -> float | None:
    """Returns the peak FLOP/s of one device, or None if it is not known."""
    return peaks_of(device_kind).get(jnp.dtype(dtype).name)
