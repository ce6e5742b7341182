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
from jaxmnt.training.stage import Layers, Pass, When
from jaxmnt.training.trained import select


class PrefetchedLayers(Layers):
    """Layers without empty slots: what is gathered ahead is so under no condition."""

    def _first(self, when: When) -> Params:
        first = lambda: self._weights.take(jnp.int32(0), 0)
        return when(None, first, first)

    def _next(self, ready: Params | None, unit: jax.Array, place: int) -> tuple[Params, Params]:
        assert self._full and ready is not None
        last = self.places - 1
        after = (unit, place + 1) if place < last else (jnp.minimum(unit + 1, self._depth - 1), 0)
        return ready, self._weights.take(*after)

    def backward(
        self, x_gradient_BSD: jax.Array, of: Pass, residuals: Residuals, gradients: Params, *, last: bool
    ) -> tuple[jax.Array, Params]:
        """As in `Layers`. After the `last` microbatch some gradients are also summed over replicas, layer by layer
        (`StepSpec.is_reduced_early`).

        A layer's gradients wait, whole, for the next round to reduce them. Those that wait for the first round are
        zeros, of a layer past the end: they are dropped.
        """
        end = self.places - 1

        def body(carry: Any, unit: jax.Array) -> tuple[Any, None]:
            x_gradient_BSD, gradients, ready, waiting = carry
            kept = taken(residuals, of.slot, unit)
            for place in range(end, -1, -1):
                before = (unit, place - 1) if place else (jnp.maximum(unit - 1, 0), end)
                weights, ready = ready, self._weights.take(*before)
                after = (place + 1, unit) if place < end else (0, unit + 1)
                gradients = self._with_waiting(gradients, *after, waiting, last)
                own, kept = self._split(kept, place)
                new, x_gradient_BSD = self._layer_backward(place, own, unit, of.rows, weights, x_gradient_BSD)
                waiting = select(new, self._group.at(self._trained_axes, place))
            return (x_gradient_BSD, gradients, ready, waiting), None

        def rounds() -> tuple[jax.Array, Params]:
            ready = self._weights.take(jnp.int32(self._depth - 1), end)
            shapes = jax.eval_shape(lambda: self._weights.take(jnp.int32(0), 0))
            trained = select(shapes, self._group.at(self._trained_axes, 0))
            nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), trained)
            start = (x_gradient_BSD, gradients, ready, nothing)
            x_end_gradient_BSD, total, _, waiting = self._scan(body, start, reverse=True)
            return x_end_gradient_BSD, self._with_waiting(total, 0, jnp.int32(0), waiting, last)

        return of.when(None, rounds, rounds)

    def _with_waiting(self, total: Params, place: int, unit: jax.Array, waiting: Params, last: bool) -> Params:
        """Returns the total with the gradients of a layer that have waited."""
        axes = self._group.at(self._trained_axes, place)
        if not axes:
            return total
        own, reduced = self._group.at(total, place), self._weights.reduced(waiting, axes)
        new = jax.tree.map(lambda stack, new: stack[unit] + collectives.row_major(new), own, reduced)
        if last:
            spec = self._spec
            stacked = self._group.at(spec.trained_axes[self._group.name], place)
            new = collectives.reduce_gradients(new, stacked, spec.placement, spec.reduce_dtype, spec.is_reduced_early)
        added = jax.tree.map(lambda stack, new: stack.at[unit].set(new, mode="drop"), own, new)
        return added if self.places == 1 else total | {str(place): added}
