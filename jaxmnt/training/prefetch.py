"""Layers whose communication hides behind other layers: while a layer computes, the weights of the next one are
gathered and the gradients of the one before are reduced. A round of the loop waits for none of what it sends.

Shapes: B batch, S a device's piece of the length, D model.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxmnt.models.contract import Params
from jaxmnt.parallel import collectives
from jaxmnt.training.remat import Residuals, taken
from jaxmnt.training.stage import Layers, Rows, When
from jaxmnt.training.trained import select


class PrefetchedLayers(Layers):
    """Layers without empty slots: what is gathered ahead is so under no condition."""

    def _first(self, when: When) -> Params:
        first = lambda: self._weights.take(jnp.int32(0), 0)
        weights: Params = when(None, first, first)
        return weights

    def _next(self, ready: Params | None, unit: jax.Array, place: int) -> tuple[Params, Params]:
        assert self._full and ready is not None
        last = self.places - 1
        after = (unit, place + 1) if place < last else (jnp.minimum(unit + 1, self._depth - 1), 0)
        return ready, self._weights.take(*after)

    def backward(
        self,
        x_gradient_BSD: jax.Array,
        chunk: jax.Array,
        rows: Rows,
        residuals: Residuals,
        slot: jax.Array,
        gradients: Params,
        when: When,
        *,
        last: bool = False,
    ) -> tuple[jax.Array, Params]:
        """As in `Layers`. After the `last` microbatch some gradients are also summed over replicas, layer by layer
        (`StepSpec.is_reduced_early`)."""
        go = lambda: self._backward_in_rounds(x_gradient_BSD, rows, residuals, slot, gradients, last)
        end: tuple[jax.Array, Params] = when(None, go, go)
        return end

    def _backward_in_rounds(
        self,
        x_gradient_BSD: jax.Array,
        rows: Rows,
        residuals: Residuals,
        slot: jax.Array,
        gradients: Params,
        is_last_microbatch: bool,
    ) -> tuple[jax.Array, Params]:
        """A layer's gradients wait, whole, for the next round to reduce them. Those that wait for the first round are
        zeros, of a layer past the end: they are dropped."""
        end = self.places - 1

        def body(carry: Any, unit: jax.Array) -> tuple[Any, None]:
            x_gradient_BSD, gradients, ready, waiting = carry
            kept = taken(residuals, slot, unit)
            for place in range(end, -1, -1):
                before = (unit, place - 1) if place else (jnp.maximum(unit - 1, 0), end)
                weights, ready = ready, self._weights.take(*before)
                after = (place + 1, unit) if place < end else (0, unit + 1)
                gradients = self._with_waiting(gradients, *after, waiting, is_last_microbatch)
                own, kept = self._split(kept, place)
                new, x_gradient_BSD = self._layer_backward(place, own, unit, rows, weights, x_gradient_BSD)
                waiting = select(new, self._group.at(self._trained_axes, place))
            return (x_gradient_BSD, gradients, ready, waiting), None

        ready = self._weights.take(jnp.int32(self._depth - 1), end)
        shapes = jax.eval_shape(lambda: self._weights.take(jnp.int32(0), 0))
        trained = select(shapes, self._group.at(self._trained_axes, 0))
        waiting = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), trained)
        start = (x_gradient_BSD, gradients, ready, waiting)
        x_gradient_BSD, gradients, _, waiting = self._scan(body, start, reverse=True)
        return x_gradient_BSD, self._with_waiting(gradients, 0, jnp.int32(0), waiting, is_last_microbatch)

    def _with_waiting(
        self, total: Params, place: int, unit: jax.Array, waiting: Params, is_last_microbatch: bool
    ) -> Params:
        """Returns the total with the gradients of a layer that have waited."""
        axes = self._group.at(self._trained_axes, place)
        if not axes:
            return total
        own, reduced = self._group.at(total, place), self._weights.reduced(waiting, axes)
        new = jax.tree.map(lambda stack, new: stack[unit] + collectives.row_major(new), own, reduced)
        if is_last_microbatch:
            new = self._summed_over_replicas(new, place)
        added = jax.tree.map(lambda stack, new: stack.at[unit].set(new, mode="drop"), own, new)
        return added if self.places == 1 else total | {str(place): added}

    def _summed_over_replicas(self, gradients: Params, place: int) -> Params:
        spec = self._spec
        stacked = self._group.at(spec.trained_axes[self._group.name], place)
        return collectives.reduce_gradients(
            gradients, stacked, spec.placement, spec.reduce_dtype, spec.is_reduced_early
        )
