"""A stage's layers, forward and backward.

Shapes: B batch, L length, S a device's piece of the length, D model.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxmnt.errors import ConfigError
from jaxmnt.models.cache import Cache
from jaxmnt.models.contract import LayerContext, LayerGroup, LayerOutput, Params
from jaxmnt.models.float8 import RecordedProduct, float8_products, record_products
from jaxmnt.models.rotary import Angles
from jaxmnt.parallel import collectives
from jaxmnt.parallel.sharding import without_stack_axis
from jaxmnt.training.remat import Backward, Residuals, read_slot, rematerialise, write_slot
from jaxmnt.training.spec import Batch, StepSpec
from jaxmnt.training.trained import select
from jaxmnt.training.weights import LayerWeights, Weights

When = Callable[[Array | None, Callable[[], Any], Callable[[], Any]], Any]
"""`when(extra_condition, active, idle)` returns `active()` if this tick has a microbatch and `extra_condition` is true
or None, else `idle()`."""


def always(extra_condition: Array | None, active: Callable[[], Any], idle: Callable[[], Any]) -> Any:
    """The `When` of a program without a pipeline: always returns `active()`."""
    assert extra_condition is None
    return active()


class Rows(NamedTuple):
    """The fields of a microbatch that all layers use."""

    positions: Array  # [B, L], or [1, L]
    segments: Array | None  # [B, L]
    rotary: dict[str, Angles]
    row_keys: Array | None  # [B]


def microbatch_rows(spec: StepSpec, rows: Batch, row_keys_B: Array | None) -> Rows:
    """Returns the fields that all layers use of a microbatch with these rows. `row_keys_B` has a random key for each
    row; None means no dropout."""
    keeps_documents_apart = spec.config.data.keeps_documents_apart
    # Unless documents are kept apart, all rows have the same positions: one row of them serves for all.
    positions = rows["positions"] if keeps_documents_apart else rows["positions"][:1]
    segments = rows["segments"] if keeps_documents_apart else None
    rotary = spec.definition.family.rotary(positions)
    return Rows(positions, segments, rotary, row_keys_B)


class Pass(NamedTuple):
    """A microbatch's pass through one chunk of a stage."""

    chunk: Array
    slot: Array
    """Where forward stores what backward needs."""
    rows: Rows
    when: When


class Layers:
    """The layers of one group in one chunk of a stage, forward and backward.

    `weights` and `buffers` are those of all groups. Like `gradients`, they hold all of this device's units. `order` is
    the unit of the group in each slot (-1 for an empty slot), and the chunk has `depth` slots.
    """

    def __init__(
        self,
        spec: StepSpec,
        group: LayerGroup,
        weights: Weights,
        buffers: Params,
        order: Array,
        depth: int,
        *,
        full: bool = True,
    ):
        """`full` is true if no slot of any stage is empty."""
        self._spec, self._group, self._order, self._depth = spec, group, order, depth
        self.weights, self._buffers = LayerWeights(spec, group, weights), buffers.get(group.name, {})
        self._full = full
        self._trained_axes = without_stack_axis(spec.trained_axes[group.name])
        groups = spec.definition.groups
        self._layers_before = sum(earlier.num_layers for earlier in groups[: groups.index(group)])
        self._backwards: dict[int, Backward] = {}
        """The backward function of each layer by index in the pattern, known once forward has been traced."""

    def gather_in_float8(self, x_BSD: Array, rows: Rows) -> None:
        """From now on, gathers in float8 the weights that layers multiply only in float8."""
        multiplied = []
        for pattern_index in range(self.layers_per_unit):
            weights, products = self._trace_products(pattern_index, x_BSD, rows)
            in_float8 = [product.weight for product in products if product.in_float8]
            multiplied.append([any(leaf is weight for weight in in_float8) for leaf in weights])
        self.weights.pack(multiplied)

    def products(self, x_BSD: Array, rows: Rows) -> list[bool]:
        """Returns, for each matrix product of all layers, whether it runs in float8."""
        in_float8: list[bool] = []
        for pattern_index in range(self.layers_per_unit):
            _, products = self._trace_products(pattern_index, x_BSD, rows)
            in_float8 += [product.in_float8 for product in products]
        return self._group.units * in_float8

    def _trace_products(
        self, pattern_index: int, x_BSD: Array, rows: Rows
    ) -> tuple[list[Array], list[RecordedProduct]]:
        """Returns a layer's weights and its matrix products, by tracing the layer without running it."""
        leaves: list[Array] = []
        products: list[RecordedProduct] = []

        def trace_layer(weights: Params, x_BSD: Array) -> Array:
            with record_products() as noted:
                output = self._call_in_training(
                    pattern_index, *self._arguments(jnp.int32(0), pattern_index, rows, weights), x_BSD
                )
            leaves.extend(jax.tree.leaves(weights))
            products.extend(noted)
            return output.x_BSD

        jax.eval_shape(trace_layer, jax.eval_shape(lambda: self.weights.take(jnp.int32(0), pattern_index)), x_BSD)
        return leaves, products

    def allocate(self, slots: int, x_BSD: Array, rows: Rows) -> tuple[Residuals, Any]:
        """Returns buffers for the residuals of `slots` microbatches, [slots, depth, …], and zeros for the sums of this
        device's layers, [units, …], stacked like its parameters."""
        forward = lambda x: self._unit_forward(x, jnp.int32(0), rows, self._first_weights(always))[1:3]
        jaxpr, (unit_residuals, sums) = jax.make_jaxpr(forward, return_shape=True)(x_BSD)
        units = self._order.shape[0]
        spaces = [aval.memory_space for aval in jaxpr.out_avals[: len(unit_residuals)]]

        def allocate_buffer(leaf: Any, space: Any) -> Array:
            # Moved before the broadcast: a host buffer filled on the device would first need memory there.
            zero = jax.device_put(jnp.zeros((), leaf.dtype), space)
            return jax.lax.broadcast(zero, (slots, self._depth, *leaf.shape))

        residuals = [allocate_buffer(leaf, space) for leaf, space in zip(unit_residuals, spaces, strict=True)]
        return residuals, jax.tree.map(lambda leaf: jnp.zeros((units, *leaf.shape), jnp.float32), sums)

    def forward(self, x_BSD: Array, chunk_pass: Pass, residuals: Residuals, sums: Any) -> tuple[Array, Residuals, Any]:
        """Returns the chunk's output, the residuals with this slot filled with what backward needs besides weights and
        rows, and the sums with those of this pass added."""

        def body(carry: Any, offset: Array) -> tuple[Any, None]:
            x_BSD, residuals, sums, ready = carry
            unit = chunk_pass.chunk * self._depth + offset
            active = lambda: self._unit_forward(x_BSD, unit, chunk_pass.rows, ready)
            zeros = jax.tree.map(lambda total: jnp.zeros(total.shape[1:], total.dtype), sums)
            idle = lambda: (x_BSD, read_slot(residuals, chunk_pass.slot, offset), zeros, ready)
            x_BSD, unit_residuals, new, ready = chunk_pass.when(self._is_filled(unit), active, idle)
            residuals = write_slot(residuals, unit_residuals, chunk_pass.slot, offset)
            sums = jax.tree.map(lambda total, new: total.at[unit].add(new), sums, new)
            return (x_BSD, residuals, sums, ready), None

        x_BSD, residuals, sums, _ = self._scan(body, (x_BSD, residuals, sums, self._first_weights(chunk_pass.when)))
        return x_BSD, residuals, sums

    def backward(
        self, x_gradient_BSD: Array, chunk_pass: Pass, residuals: Residuals, gradients: Params, *, last: bool
    ) -> tuple[Array, Params]:
        """Returns the gradient of the chunk's input, and `gradients` with those of its weights added. `last` is true
        for the last microbatch.

        Weights are gathered again: kept from forward to backward, the whole weights of all layers would be in memory at
        once. The sum is outside the condition, because XLA would copy all of `gradients` through it.
        """

        def body(carry: tuple[Array, Params], offset: Array) -> tuple[tuple[Array, Params], None]:
            x_gradient_BSD, gradients = carry
            unit = chunk_pass.chunk * self._depth + offset
            active = lambda: self._unit_backward(
                x_gradient_BSD, unit, chunk_pass.rows, read_slot(residuals, chunk_pass.slot, offset)
            )
            idle = lambda: (x_gradient_BSD, jax.tree.map(lambda g: jnp.zeros(g.shape[1:], g.dtype), gradients))
            x_gradient_BSD, new = chunk_pass.when(self._is_filled(unit), active, idle)
            gradients = jax.tree.map(lambda total, new: total.at[unit].add(new), gradients, new)
            return (x_gradient_BSD, gradients), None

        return self._scan(body, (x_gradient_BSD, gradients), reverse=True)

    def evaluate(self, x_BSD: Array, chunk_pass: Pass) -> Array:
        """Returns only the chunk's output."""

        def body(x_BSD: Array, offset: Array) -> tuple[Array, None]:
            unit = chunk_pass.chunk * self._depth + offset

            def active() -> Array:
                x_out_BSD = x_BSD
                for pattern_index in range(self.layers_per_unit):
                    arguments = self._arguments(
                        unit, pattern_index, chunk_pass.rows, self.weights.take(unit, pattern_index)
                    )
                    x_out_BSD = self._call_in_training(pattern_index, *arguments, x_out_BSD).x_BSD
                return x_out_BSD

            return chunk_pass.when(self._is_filled(unit), active, lambda: x_BSD), None

        return self._scan(body, x_BSD)

    def call(self, unit: Array, pattern_index: int, rows: Rows, x_BSD: Array, cache: Cache) -> LayerOutput:
        """Returns one layer's output for new tokens, with the keys and values of earlier tokens in `cache`."""
        return self._call(
            pattern_index,
            *self._arguments(unit, pattern_index, rows, self.weights.take(unit, pattern_index)),
            x_BSD,
            cache,
        )

    @property
    def layers_per_unit(self) -> int:
        """The number of layers in a unit, one repetition of the group's pattern."""
        return len(self._group.pattern)

    def _unit_forward(
        self, x_BSD: Array, unit: Array, rows: Rows, ready: Params | None
    ) -> tuple[Array, Residuals, Any, Params | None]:
        """Returns a unit's output, its residuals, its layers' sums, and the weights gathered for the next unit.
        `ready`: see `_first_weights`."""
        unit_residuals: Residuals = []
        sums = {}
        for pattern_index in range(self.layers_per_unit):
            weights, ready = self._next_weights(ready, unit, pattern_index)
            arguments = self._arguments(unit, pattern_index, rows, weights)
            (x_BSD, loss), backward, sums_of_layer = jax.vjp(
                rematerialise(self._apply(pattern_index), self._spec.config.train), *arguments, x_BSD, has_aux=True
            )
            self._backwards[pattern_index] = Backward(backward, (*arguments, x_BSD), loss=loss is not None)
            unit_residuals += self._backwards[pattern_index].residuals(backward)
            sums[str(pattern_index)] = sums_of_layer | ({} if loss is None else {"loss": jax.lax.stop_gradient(loss)})
        return x_BSD, unit_residuals, self._join_pattern(sums), ready

    def _first_weights(self, when: When) -> Params | None:
        """Returns the weights gathered before the first unit: None, because each layer's weights are gathered when it
        runs."""
        return None

    def _next_weights(self, ready: Params | None, unit: Array, pattern_index: int) -> tuple[Params, Params | None]:
        """Returns a layer's weights, and the weights gathered in advance for the next layer."""
        return self.weights.take(unit, pattern_index), None

    def _unit_backward(
        self, x_gradient_BSD: Array, unit: Array, rows: Rows, unit_residuals: Residuals
    ) -> tuple[Array, Params]:
        """Returns the gradient of a unit's input and those of its weights."""
        gradients = {}
        for pattern_index in reversed(range(self.layers_per_unit)):
            residuals, unit_residuals = self._split_residuals(unit_residuals, pattern_index)
            weights = self.weights.take(unit, pattern_index)
            new, x_gradient_BSD = self._layer_backward(pattern_index, residuals, unit, rows, weights, x_gradient_BSD)
            if axes := self._group.at(self._trained_axes, pattern_index):
                gradients[str(pattern_index)] = self.weights.reduce(select(new, axes), axes)
        return x_gradient_BSD, self._join_pattern(gradients)

    def _split_residuals(self, unit_residuals: Residuals, pattern_index: int) -> tuple[Residuals, Residuals]:
        """Splits off the residuals of the layer at this index, which are the last ones: returns them, and those of the
        layers before it."""
        count = len(unit_residuals) - self._backwards[pattern_index].count
        return unit_residuals[count:], unit_residuals[:count]

    def _layer_backward(
        self, pattern_index: int, residuals: Residuals, unit: Array, rows: Rows, weights: Params, x_gradient_BSD: Array
    ) -> tuple[Params, Array]:
        """Returns the gradients of the layer's whole weights and of its input."""
        arguments = self._arguments(unit, pattern_index, rows, weights)
        gradients, *_, x_gradient_BSD = self._backwards[pattern_index](residuals, arguments, x_gradient_BSD)
        return gradients, x_gradient_BSD

    def _apply(self, pattern_index: int) -> Callable[..., Any]:
        """Returns a layer as a function of its weights, its buffers, its index, the rows and x, which returns ((x, term
        of the loss), sums)."""

        def apply(*arguments: Any) -> Any:
            arguments = (*arguments[:-1], checkpoint_name(arguments[-1], "layer_input"))
            output = self._call_in_training(pattern_index, *arguments)
            to_float32 = lambda array: array.astype(jnp.float32)
            loss = jax.tree.map(to_float32, output.loss)
            return (output.x_BSD, loss), jax.tree.map(to_float32, dict(output.sums))

        return apply

    def _call_in_training(self, pattern_index: int, *arguments: Any) -> LayerOutput:
        """Calls the layer at this index of the pattern as training does."""
        in_halves = self._spec.placement.overlap == "rows"
        return self._call_in_halves(pattern_index, *arguments) if in_halves else self._call(pattern_index, *arguments)

    def _call_in_halves(
        self, pattern_index: int, weights: Params, buffers: Params, layer_index: Array, rows: Rows, x_BSD: Array
    ) -> LayerOutput:
        """Calls the layer on each half of the rows: while one half communicates, the other computes. Sums and terms of
        the loss add up over rows."""
        middle, whole = len(x_BSD) // 2, len(x_BSD)

        def half(first: int, stop: int) -> LayerOutput:
            # Fields that all rows share are [1, L] and stay whole.
            cut = lambda array: array[first:stop] if len(array) == whole else array
            return self._call(pattern_index, weights, buffers, layer_index, jax.tree.map(cut, rows), cut(x_BSD))

        upper, lower = half(0, middle), half(middle, whole)
        loss, sums = jax.tree.map(jnp.add, (upper.loss, dict(upper.sums)), (lower.loss, dict(lower.sums)))
        return LayerOutput(jnp.concatenate([upper.x_BSD, lower.x_BSD]), loss, sums)

    def _call(
        self,
        pattern_index: int,
        weights: Params,
        buffers: Params,
        layer_index: Array,
        rows: Rows,
        x_BSD: Array,
        cache: Cache | None = None,
    ) -> LayerOutput:
        """Calls the layer at this index of the pattern."""
        spec, keys = self._spec, rows.row_keys
        if keys is not None:
            keys = jax.vmap(lambda key: jax.random.fold_in(key, layer_index))(keys)
        layer = spec.definition.layer(self._group, pattern_index, weights, buffers)
        context = LayerContext(rows.positions, rows.segments, rows.rotary, keys, spec.kernel, spec.placement, cache)
        with float8_products(spec.float8):
            return _check_output(layer(x_BSD, context), x_BSD)

    def _arguments(
        self, unit: Array, pattern_index: int, rows: Rows, weights: Params
    ) -> tuple[Params, Params, Array, Rows]:
        """Returns the arguments of a layer except x: its weights, its buffers, its index in the model, and the rows."""
        pick = lambda array: jax.lax.dynamic_index_in_dim(array, unit, keepdims=False)
        buffers = jax.tree.map(pick, self._group.at(self._buffers, pattern_index)) if self._buffers else {}
        layer_index = self._layers_before + self.layers_per_unit * jnp.maximum(pick(self._order), 0) + pattern_index
        return weights, buffers, layer_index, rows

    def _join_pattern(self, by_index: dict[str, Any]) -> Any:
        """Returns a group's tree from one tree per index in its pattern."""
        return by_index if self.layers_per_unit > 1 else by_index["0"]

    def _is_filled(self, unit: Array) -> Array | None:
        """Returns whether a slot has a unit, or None if all slots do."""
        return None if self._full else self._order[unit] >= 0

    def _scan(self, body: Callable[[Any, Array], tuple[Any, None]], start: Any, *, reverse: bool = False) -> Any:
        """Runs `body` over the chunk's slots and returns the final carry."""
        unroll = min(self._spec.config.train.layer_unroll, self._depth)
        return jax.lax.scan(body, start, jnp.arange(self._depth), unroll=unroll, reverse=reverse)[0]


class PrefetchedLayers(Layers):
    """Layers whose communication overlaps with other layers: while a layer computes, the weights of the next layer are
    gathered and the gradients of the previous one are reduced. No iteration of the loop waits for what it sends.

    Requires `full`: prefetching is unconditional, so no slot may be empty.
    """

    def _first_weights(self, when: When) -> Params:
        """Returns the first layer's weights."""
        first = lambda: self.weights.take(jnp.int32(0), 0)
        return when(None, first, first)

    def _next_weights(self, ready: Params | None, unit: Array, pattern_index: int) -> tuple[Params, Params]:
        """Returns a layer's weights, gathered in advance, and gathers those of the next layer."""
        assert self._full and ready is not None
        last = self.layers_per_unit - 1
        following = (unit, pattern_index + 1) if pattern_index < last else (jnp.minimum(unit + 1, self._depth - 1), 0)
        return ready, self.weights.take(*following)

    def backward(
        self, x_gradient_BSD: Array, chunk_pass: Pass, residuals: Residuals, gradients: Params, *, last: bool
    ) -> tuple[Array, Params]:
        """As in `Layers`. After the `last` microbatch, some gradients are also summed over replicas, layer by layer
        (`StepSpec.is_reduced_early`).

        A layer's gradients stay unreduced until the next iteration reduces them. The first iteration receives zeros for
        a layer past the end, which the out-of-range scatter drops.
        """
        end = self.layers_per_unit - 1

        def body(carry: Any, unit: Array) -> tuple[Any, None]:
            x_gradient_BSD, gradients, ready, pending = carry
            unit_residuals = read_slot(residuals, chunk_pass.slot, unit)
            for pattern_index in range(end, -1, -1):
                # Gather the weights of the layer whose backward comes next, and reduce the gradients of the layer whose
                # backward came last. Neither depends on this layer's computation, so both can overlap with it.
                before = (unit, pattern_index - 1) if pattern_index else (jnp.maximum(unit - 1, 0), end)
                weights, ready = ready, self.weights.take(*before)
                after = (pattern_index + 1, unit) if pattern_index < end else (0, unit + 1)
                gradients = self._add_pending(gradients, *after, pending, last)
                residuals_of_layer, unit_residuals = self._split_residuals(unit_residuals, pattern_index)
                new, x_gradient_BSD = self._layer_backward(
                    pattern_index, residuals_of_layer, unit, chunk_pass.rows, weights, x_gradient_BSD
                )
                pending = select(new, self._group.at(self._trained_axes, pattern_index))
            return (x_gradient_BSD, gradients, ready, pending), None

        def scan_units() -> tuple[Array, Params]:
            ready = self.weights.take(jnp.int32(self._depth - 1), end)
            shapes = jax.eval_shape(lambda: self.weights.take(jnp.int32(0), 0))
            trained = select(shapes, self._group.at(self._trained_axes, 0))
            no_pending = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), trained)
            start = (x_gradient_BSD, gradients, ready, no_pending)
            x_end_gradient_BSD, total, _, pending = self._scan(body, start, reverse=True)
            return x_end_gradient_BSD, self._add_pending(total, 0, jnp.int32(0), pending, last)

        return chunk_pass.when(None, scan_units, scan_units)

    def _add_pending(self, total: Params, pattern_index: int, unit: Array, pending: Params, last: bool) -> Params:
        """Returns the total plus the pending gradients of a layer, reduced."""
        axes = self._group.at(self._trained_axes, pattern_index)
        if not axes:
            return total
        stacks = self._group.at(total, pattern_index)
        reduced = self.weights.reduce(pending, axes)
        new = jax.tree.map(lambda stack, new: stack[unit] + collectives.row_major(new), stacks, reduced)
        if last:
            spec = self._spec
            stacked_axes = self._group.at(spec.trained_axes[self._group.name], pattern_index)
            new = collectives.reduce_gradients(
                new, stacked_axes, spec.placement, spec.reduce_dtype, spec.is_reduced_early
            )
        # Past the last unit the scatter is out of range and drops the zeros.
        updated = jax.tree.map(lambda stack, new: stack.at[unit].set(new, mode="drop"), stacks, new)
        return updated if self.layers_per_unit == 1 else total | {str(pattern_index): updated}


def _check_output(output: Any, x_BSD: Array) -> LayerOutput:
    """Returns a layer's output, checked. Raises `ConfigError` if it violates the contract."""
    if not isinstance(output, LayerOutput):
        raise ConfigError(f"model.family: a layer must return a LayerOutput, but returns a {type(output).__name__}")
    x, loss = output.x_BSD, output.loss
    if (x.shape, x.dtype) != (x_BSD.shape, x_BSD.dtype):
        raise ConfigError(
            f"model.family: a layer must return activations like its input, {x_BSD.dtype}{list(x_BSD.shape)}, but "
            f"returns {x.dtype}{list(x.shape)}"
        )
    if loss is not None and jnp.shape(loss) != ():
        raise ConfigError(f"model.family: a layer's loss must be a scalar, but has the shape {list(jnp.shape(loss))}")
    if "loss" in output.sums:
        raise ConfigError("model.family: a layer's sum must not be named loss, the name of its loss term; rename it")
    return output._replace(loss=None if loss is None else jnp.asarray(loss))
