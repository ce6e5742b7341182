"""The way from a stored parameter to the weight that is multiplied, and of its gradient back.

A parameter is stored in pieces, usually in float32. On its way to a product it is cast to the compute dtype, perhaps
packed in float8, and gathered: each time that it is used (ZeRO 3), or once a step (ZeRO 2 and 1). The gradient is that
of a whole weight. It is scattered and added up in float32: after each microbatch (ZeRO 3 and 2), or once a step (ZeRO
1). Layers and the ends of the model take weights here and give gradients back; how they come does not concern them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxmnt.models.contract import LayerGroup, Params
from jaxmnt.models.float8 import FORWARD, pack, power_of_two_scale, unpack
from jaxmnt.parallel import collectives
from jaxmnt.parallel.sharding import Axes, is_axes, unstacked
from jaxmnt.training.spec import StepSpec
from jaxmnt.training.trained import select


class Weights:
    """The weights of a step, each gathered when it is used: ZeRO 3."""

    def __init__(self, spec: StepSpec, params: Params):
        """`params`: this device's pieces, as they are placed."""
        self._spec, self.params = spec, params
        self._summed_like = params
        """Gradients of all microbatches are added up in these shapes."""

    def ready(self, params: Params, axes: Any) -> Params:
        """Returns whole weights in the compute dtype from some of `params`."""
        return collectives.unshard(params, axes, self._spec.placement, self._spec.dtype)

    def ends(self, names: tuple[str, ...]) -> Params:
        """Returns the weights of these ends of the model, ready for use."""
        axes = self._spec.definition.axes
        return self.ready({name: self.params[name] for name in names}, {name: axes[name] for name in names})

    def no_gradients(self) -> Params:
        """Returns float32 zeros of the shapes in which the gradients of all microbatches are added up."""
        trained = select(self._summed_like, self._spec.trained_axes)
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), trained)

    def reduced(self, gradients: Params, axes: Any) -> Params:
        """Returns the gradients of whole weights, of one microbatch, as they are added up."""
        return collectives.reshard(gradients, axes, self._spec.placement, self._spec.reduce_dtype)

    def finished(self, gradients: Params) -> Params:
        """Returns the added gradients in the pieces of the stored parameters."""
        return gradients


class GatheredOnce(Weights):
    """The weights of a step, all gathered before it: ZeRO 2."""

    def __init__(self, spec: StepSpec, params: Params):
        super().__init__(spec, params)
        self.params = {name: self._gathered(name, stored) for name, stored in params.items()}

    def ready(self, params: Params, axes: Any) -> Params:
        return params

    def _gathered(self, name: str, stored: Params) -> Params:
        """Returns the whole weights of a group or an end. Layers are gathered one after another: a whole stack would
        come out with the dimension first along which it is gathered, and XLA would copy all of it into order."""
        spec, axes = self._spec, self._spec.definition.axes[name]
        is_gathered = any(map(spec.placement.gathered_axes, jax.tree.leaves(axes, is_leaf=is_axes)))
        if name not in spec.slots or not is_gathered:
            return super().ready(stored, axes)
        ready = super().ready
        layer = lambda _, stored: (None, jax.tree.map(collectives.row_major, ready(stored, unstacked(axes))))
        return jax.lax.scan(layer, None, stored, unroll=_GATHERED_IN_A_ROUND)[1]


class SummedWhole(GatheredOnce):
    """The weights of a step, all gathered before it, whose gradients are added up whole and scattered once: ZeRO 1."""

    def __init__(self, spec: StepSpec, params: Params):
        super().__init__(spec, params)
        self._summed_like = self.params

    def reduced(self, gradients: Params, axes: Any) -> Params:
        return jax.tree.map(lambda gradient: gradient.astype(jnp.float32), gradients)

    def finished(self, gradients: Params) -> Params:
        spec = self._spec
        return collectives.reshard(gradients, spec.trained_axes, spec.placement, spec.reduce_dtype)


_GATHERED_IN_A_ROUND = 4
"""Layers, of which one is put into the stack while the next one is gathered. Of 2, 4 and 8 no other was better over
five programs."""

BY_ZERO = {1: SummedWhole, 2: GatheredOnce, 3: Weights}
"""The class for each ZeRO stage."""


class LayerWeights:
    """The weights of one group of layers, by unit and place in the group's pattern."""

    def __init__(self, spec: StepSpec, group: LayerGroup, weights: Weights):
        self._spec, self._group, self._weights = spec, group, weights
        axes = unstacked(spec.definition.axes[group.name])
        self._axes = [jax.tree.leaves(group.at(axes, place), is_leaf=is_axes) for place in range(len(group.pattern))]
        self._scales: list[list[Array | None]] = [[None] * len(names) for names in self._axes]
        """By place in the pattern, of each weight that travels in float8 the scale, [units]; None of the others."""

    def pack(self, multiplied: list[list[bool]]) -> None:
        """From now on, weights that are multiplied in float8 alone, and that are gathered, travel in float8.

        `multiplied` says, by place in the pattern, which weights are multiplied in float8 alone.
        """
        self._scales = [self._scales_at(place, chosen) for place, chosen in enumerate(multiplied)]

    @property
    def packed(self) -> list[list[bool]]:
        """Which weights travel in float8, by place in the pattern."""
        return [[scale is not None for scale in scales] for scales in self._scales]

    def take(self, unit: Array, place: int) -> Params:
        """Returns a layer's weights, ready for use."""
        leaves, structure = jax.tree.flatten(self._stacked(place))
        pieces = [jax.lax.dynamic_index_in_dim(leaf, unit, keepdims=False) for leaf in leaves]
        whole = [
            self._weights.ready(piece, names) if scales is None else self._unpacked(piece, scales[unit], names)
            for piece, scales, names in zip(pieces, self._scales[place], self._axes[place], strict=True)
        ]
        return jax.tree.unflatten(structure, whole)

    def reduced(self, gradients: Params, axes: Any) -> Params:
        return self._weights.reduced(gradients, axes)

    def _stacked(self, place: int) -> Params:
        return self._group.at(self._weights.params[self._group.name], place)

    def _unpacked(self, weight: Array, scale: Array, names: Axes) -> Array:
        dtype = self._spec.dtype
        piece = pack(weight.astype(dtype), scale)
        return unpack(collectives.unshard_as_it_is(piece, names, self._spec.placement), scale, dtype)

    def _scales_at(self, place: int, multiplied: list[bool]) -> list[Array | None]:
        placement, axes = self._spec.placement, self._axes[place]
        is_packed = [
            yes and placement.gathered_axes(names) is not None for yes, names in zip(multiplied, axes, strict=True)
        ]
        chosen, leaves = np.flatnonzero(is_packed), jax.tree.leaves(self._stacked(place))
        weights = [leaves[index].astype(self._spec.dtype) for index in chosen]
        largest = collectives.largest_of_weights(weights, [axes[index] for index in chosen], placement)
        scales: list[Array | None] = [None] * len(axes)
        for index, number in zip(chosen, largest, strict=True):
            scales[index] = power_of_two_scale(number, FORWARD)
        return scales
