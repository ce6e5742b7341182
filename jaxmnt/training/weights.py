"""Conversion of stored parameters to the weights that are multiplied, and of gradients to the stored pieces.

A parameter is stored in pieces, usually in float32. Before a matrix product it is cast to the compute dtype, perhaps
packed in float8, and gathered, either each time it is used (ZeRO 3) or once per step (ZeRO 2 and 1). The gradient is
that of the whole weight. It is scattered and added up in float32, either after each microbatch (ZeRO 3 and 2) or once
per step (ZeRO 1). Layers and the ends of the model (embedding, final norm and head) take weights from here and return
gradients, and need not know the ZeRO stage.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxmnt.models.contract import LayerGroup, Params
from jaxmnt.models.float8 import FORWARD, pack, power_of_two_scale, unpack
from jaxmnt.parallel import collectives
from jaxmnt.parallel.sharding import Axes, is_axes, without_stack_axis
from jaxmnt.parallel.stages import reshard_over_stages, unshard_over_stages
from jaxmnt.training.spec import StepSpec
from jaxmnt.training.trained import select_trained


class Weights:
    """The weights of a step, each gathered when it is used: ZeRO 3."""

    def __init__(self, spec: StepSpec, params: Params):
        """`params` has this device's pieces of the parameters, in the device layout. Tables that the step needs whole
        are gathered from the stages here."""
        self._spec = spec
        self.params = unshard_over_stages(params, spec.definition.axes, spec.placement, spec.dtype)
        self._gradients_like = self.params
        """Arrays with the shapes in which the gradients of all microbatches are added up."""

    def prepare(self, params: Params, axes: Any) -> Params:
        """Returns whole weights in the compute dtype from some of `params`."""
        return collectives.unshard(params, axes, self._spec.placement, self._spec.dtype)

    def ends(self, names: tuple[str, ...]) -> Params:
        """Returns the weights of the ends of the model with these names, ready for use."""
        axes = self._spec.definition.axes
        return self.prepare({name: self.params[name] for name in names}, {name: axes[name] for name in names})

    def zero_gradients(self) -> Params:
        """Returns float32 zeros in the shapes in which the gradients of all microbatches are added up."""
        trained = select_trained(self._gradients_like, self._spec.trained_axes)
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), trained)

    def reduce(self, gradients: Params, axes: Any) -> Params:
        """Reduces one microbatch's gradients of whole weights to the shapes and dtype in which gradients are added
        up."""
        return collectives.reshard(gradients, axes, self._spec.placement, self._spec.reduce_dtype)

    def reduce_over_stages(self, gradients: Params) -> Params:
        """Returns gradients in which those of tables that were gathered from the stages are summed over the stages and
        scattered among them."""
        spec = self._spec
        return reshard_over_stages(gradients, spec.trained_axes, spec.placement, spec.reduce_dtype)

    def finish(self, gradients: Params) -> Params:
        """Returns the accumulated gradients as `Weights.reduce` returns those of a microbatch with ZeRO 3."""
        return gradients


class GatheredOnce(Weights):
    """The weights of a step, all gathered before the step: ZeRO 2."""

    def __init__(self, spec: StepSpec, params: Params):
        super().__init__(spec, params)
        self.params = {name: self._gather_all(name, stored_params) for name, stored_params in self.params.items()}

    def prepare(self, params: Params, axes: Any) -> Params:
        return params

    def _gather_all(self, name: str, stored_params: Params) -> Params:
        """Returns the whole weights of a group of layers, or of one end of the model (embedding, or final norm and
        head).

        Layers are gathered one after another, because XLA would gather a whole stack into a layout whose leading
        dimension is the gathered one, and would then have to copy it into row-major order.
        """
        spec, axes = self._spec, self._spec.definition.axes[name]
        is_gathered = any(map(spec.placement.gathered_axes, jax.tree.leaves(axes, is_leaf=is_axes)))
        is_layer_group = name in spec.slots
        if not is_layer_group or not is_gathered:
            return super().prepare(stored_params, axes)
        prepare = super().prepare

        def gather_layer(_: None, stored_params: Params) -> tuple[None, Params]:
            return None, jax.tree.map(collectives.row_major, prepare(stored_params, without_stack_axis(axes)))

        return jax.lax.scan(gather_layer, None, stored_params, unroll=_GATHER_UNROLL)[1]


class SummedWhole(GatheredOnce):
    """The weights of a step, all gathered before the step. Gradients of whole weights are added up, and are scattered
    once: ZeRO 1."""

    def __init__(self, spec: StepSpec, params: Params):
        super().__init__(spec, params)
        self._gradients_like = self.params

    def reduce(self, gradients: Params, axes: Any) -> Params:
        return jax.tree.map(lambda gradient: gradient.astype(jnp.float32), gradients)

    def finish(self, gradients: Params) -> Params:
        spec = self._spec
        return collectives.reshard(gradients, spec.trained_axes, spec.placement, spec.reduce_dtype)


_GATHER_UNROLL = 4
"""The number of layers in each iteration of the gather. One layer is written to the stack while the next one is
gathered. Over five programs, 4 was no slower than 2 or 8."""

WEIGHTS_BY_ZERO = {1: SummedWhole, 2: GatheredOnce, 3: Weights}
"""The class for each ZeRO stage."""


class LayerWeights:
    """The weights of one group of layers, by unit and index in the group's pattern."""

    def __init__(self, spec: StepSpec, group: LayerGroup, weights: Weights):
        self._spec, self._group, self._weights = spec, group, weights
        axes = without_stack_axis(spec.definition.axes[group.name])
        self._axes = [
            jax.tree.leaves(group.at(axes, pattern_index), is_leaf=is_axes)
            for pattern_index in range(len(group.pattern))
        ]
        self._scales: list[list[Array | None]] = [[None] * len(names) for names in self._axes]
        """The scales, [units], of each weight gathered in float8, by index in the pattern; None for other weights."""

    def enable_float8_gather(self, multiplied_in_float8: list[list[bool]]) -> None:
        """Makes later gathers use float8 for some weights.

        `multiplied_in_float8` says, by index in the pattern, which weights are multiplied only in float8.
        """
        self._scales = [
            self._scales_at(pattern_index, flags) for pattern_index, flags in enumerate(multiplied_in_float8)
        ]

    @property
    def gathered_in_float8(self) -> list[list[bool]]:
        """Flags that say for each weight whether it is gathered in float8, by index in the pattern."""
        return [[scale is not None for scale in scales] for scales in self._scales]

    def take(self, unit: Array, pattern_index: int) -> Params:
        """Returns a layer's weights, ready for use."""
        leaves, structure = jax.tree.flatten(self._stacked(pattern_index))
        pieces = [jax.lax.dynamic_index_in_dim(leaf, unit, keepdims=False) for leaf in leaves]
        whole_weights = [
            self._weights.prepare(piece, names) if scales is None else self._gather_packed(piece, scales[unit], names)
            for piece, scales, names in zip(pieces, self._scales[pattern_index], self._axes[pattern_index], strict=True)
        ]
        return jax.tree.unflatten(structure, whole_weights)

    def reduce(self, gradients: Params, axes: Any) -> Params:
        """Reduces gradients as `Weights.reduce` does."""
        return self._weights.reduce(gradients, axes)

    def _stacked(self, pattern_index: int) -> Params:
        """Returns the stored pieces of the layers at this index of the pattern, stacked by unit."""
        return self._group.at(self._weights.params[self._group.name], pattern_index)

    def _gather_packed(self, weight: Array, scale: Array, names: Axes) -> Array:
        """Gathers a weight in float8 and returns it whole in the compute dtype."""
        dtype = self._spec.dtype
        piece = pack(weight.astype(dtype), scale)
        return unpack(collectives.unshard_without_cast(piece, names, self._spec.placement), scale, dtype)

    def _scales_at(self, pattern_index: int, multiplied_in_float8: list[bool]) -> list[Array | None]:
        """Returns the float8 scale of each weight at this index of the pattern, or None for a weight that is not
        gathered in float8."""
        placement, axes = self._spec.placement, self._axes[pattern_index]
        is_packed = [
            is_float8 and placement.gathered_axes(names) is not None
            for is_float8, names in zip(multiplied_in_float8, axes, strict=True)
        ]
        packed_indices = np.flatnonzero(is_packed)
        leaves = jax.tree.leaves(self._stacked(pattern_index))
        weights = [leaves[index].astype(self._spec.dtype) for index in packed_indices]
        max_abs_of_weights = collectives.max_abs_per_unit(weights, [axes[index] for index in packed_indices], placement)
        scales: list[Array | None] = [None] * len(axes)
        for index, max_abs in zip(packed_indices, max_abs_of_weights, strict=True):
            scales[index] = power_of_two_scale(max_abs, FORWARD)
        return scales
