"""The FLOPs of a token, according to the conventions of published figures, and the peak FLOP/s of a device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp

from jaxmnt.models.contract import Definition, products_of
from jaxmnt.telemetry.peaks import peaks_of


class RecomputeShare(NamedTuple):
    """The share of each part of a layer's forward pass that the backward pass recomputes, from 0 to 1."""

    products: float
    attention: float
    elementwise: float


RECOMPUTE_SHARES = {
    "none": RecomputeShare(0, 0, 0),
    "attention": RecomputeShare(0, 0, 0),
    "dots": RecomputeShare(0, 0, 1),
    "full": RecomputeShare(1, 1, 1),
}
"""Shares for each value of `train.remat`, except `names`, whose shares depend on the names."""


@dataclass(frozen=True)
class TokenFlops:
    """Forward and backward FLOPs of a token in a row of full length: 6 for each weight that multiplies the token, and
    12 for each element of its query and each key that it attends to (Kaplan et al. 2020, arXiv:2001.08361). It is 4 for
    a weight that is frozen beside adapters, because backward does not compute its gradient."""

    layers: float
    """FLOPs of products with the weights of the layers and of adapters."""
    forward_layers: float
    """The part of these FLOPs that forward computes."""
    head: int
    """FLOPs of products with the weights of the head."""
    all_parameters: int
    """FLOPs of products if every parameter, including the input embedding, multiplied the token."""
    attention: float
    """FLOPs of attention scores and of the weighted sum of values, over the keys that a token sees. On average these
    are half of the length, or a window."""
    square: int
    """FLOPs like those of `attention`, but over the full length."""
    softmax: int
    """FLOPs of the softmax over the full length: three for each score, times three for forward and backward."""

    def recomputed(self, remat: str) -> float | None:
        """Returns the FLOPs that the backward pass recomputes under this `train.remat`; None if that depends on names.
        Recomputation inside attention kernels is not counted."""
        if (shares := RECOMPUTE_SHARES.get(remat)) is None:
            return None
        # A third of the FLOPs of attention is the forward pass.
        return shares.products * self.forward_layers + shares.attention * self.attention / 3


CONVENTIONS: dict[str, Callable[[TokenFlops], float]] = {
    "causal": lambda flops: flops.layers + flops.head + flops.attention,
    "square": lambda flops: flops.layers + flops.head + flops.square,
    "parameters": lambda flops: flops.all_parameters + flops.square,
    "levanter": lambda flops: flops.layers + flops.head + flops.square + flops.softmax,
}
"""FLOPs of a token for each value of `telemetry.flops`. `causal` is also the convention of Megatron-Bridge, and of
MaxText since its pull request 1988; `square` that of torchtitan, NeMo up to 24.12 and Narayanan et al. 2021 without
recomputation; `parameters` that of llm-foundry and of torchtitan's figures of 2024 for the A100."""


def token_flops(definition: Definition, length: int) -> TokenFlops:
    """Returns the FLOPs of a token in a row of `length`, from `Family.costs`."""
    layers = definition.layer_costs()
    attention, square, softmax = 0.0, 0, 0
    for count, costs in layers:
        shape = costs.attention
        width = shape.heads * shape.head_dim
        window = min(shape.window or length, length)
        # The mean number of keys: the first `window` tokens see 1, 2, … keys, and all later ones see `window`.
        attention += 12 * count * width * (window - window * window / (2 * length))
        square += 12 * count * width * length
        softmax += 9 * count * shape.heads * length
    adapters, base = definition.adapters, definition.base

    def times(name: str) -> int:
        """Returns the FLOPs for each weight of the product with this name, or this end of a name."""
        is_frozen = adapters is not None and not any(
            f".{trained_name}".endswith(f".{name}") for trained_name in adapters.also_trained
        )
        return 4 if is_frozen else 6

    adapter_parameters = definition.parameter_count - base.parameter_count
    products = [(count, product) for count, costs in layers for product in costs.products]
    weights_of = lambda product: product.share * product.inputs * product.outputs
    forward = sum(2 * count * weights_of(product) for count, product in products)
    head_products = (products_of(base.abstract[name], base.axes[name]) for name in definition.modules_after)
    head = sum(
        times(f"{name}.{product.name}") * product.inputs * product.outputs
        for name, own_products in zip(definition.modules_after, head_products, strict=True)
        for product in own_products
    )
    return TokenFlops(
        layers=sum(times(product.name) * count * weights_of(product) for count, product in products)
        + 6 * adapter_parameters,
        forward_layers=forward + 2 * adapter_parameters,
        head=head,
        all_parameters=(6 if adapters is None else 4) * base.parameter_count + 6 * adapter_parameters,
        attention=attention,
        square=square,
        softmax=softmax,
    )


def peak_flops(device_kind: str, dtype: jnp.dtype) -> float | None:
    """Returns the peak FLOP/s of one device, or None if it is not known."""
    return peaks_of(device_kind).get(jnp.dtype(dtype).name)
