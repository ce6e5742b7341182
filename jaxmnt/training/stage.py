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
from jaxmnt.models.adapters import refusing_other_products
from jaxmnt.models.cache import Cache
from jaxmnt.models.context_parallel import DividedRows
from jaxmnt.models.contract import LayerContext, LayerGroup, LayerOutput, Params
from jaxmnt.models.float8 import RecordedProduct, float8_products, record_products
from jaxmnt.models.rotary import Angles
from jaxmnt.parallel import collectives
from jaxmnt.parallel.chunks import whole_rows
from jaxmnt.parallel.sharding import without_stack_axis
from jaxmnt.training.remat import Backward, Residuals, read_slot, rematerialise, write_slot
from jaxmnt.training.spec import Batch, StepSpec
from jaxmnt.training.trained import select_trained
from jaxmnt.training.weights import LayerWeights, Weights

RunIfActive = Callable[[Array | None, Callable[[], Any], Callable[[], Any]], Any]
"""A function `run_if_active(extra_condition, compute, skip)`. It returns `compute()` if this tick has a microbatch and
`extra_condition` is true or None, else `skip()`."""


def always_run(extra_condition: Array | None, compute: Callable[[], Any], skip: Callable[[], Any]) -> Any:
    """Returns `compute()`. This is the `RunIfActive` of a program without a pipeline."""
    assert extra_condition is None
    return compute()


class Rows(NamedTuple):
    """The fields of a microbatch that all layers use."""

    positions: Array  # [B, L], or [1, L]
    segments: Array | None  # [B, L]
    row_segments: Array | None  # [B, L] of whole rows, if the mesh divides rows
    rotary: dict[str, Angles]
    row_keys: Array | None  # [B]
    is_real: Array  # [B, L]
    targets_per_token: Array  # a scalar


def microbatch_rows(
    spec: StepSpec, rows: Batch, row_keys_B: Array | None = None, targets_per_token: Array | None = None
) -> Rows:
    """Returns the fields that all layers use, from the rows of a microbatch. `row_keys_B` has a random key for each
    row, or is None without dropout. `targets_per_token` is 1 if it is None."""
    keeps_documents_apart = spec.config.data.keeps_documents_apart
    # Unless documents are kept apart, all rows have the same positions, so one row of positions is enough.
    positions = rows["positions"] if keeps_documents_apart else rows["positions"][:1]
    segments = rows["segments"] if keeps_documents_apart else None
    row_segments = None if segments is None else whole_rows(segments, spec.placement)
    rotary = spec.definition.family.rotary(positions)
    if targets_per_token is None:
        targets_per_token = jnp.ones((), jnp.float32)
    return Rows(positions, segments, row_segments, rotary, row_keys_B, rows["segments"] > 0, targets_per_token)


class Pass(NamedTuple):
    """A microbatch's pass through one chunk of a stage."""

    chunk: Array
    slot: Array
    """The slot in which forward stores what backward needs."""
    rows: Rows
    run_if_active: RunIfActive
    is_reversed: Array | None = None
    """1 if the slot has the last unit first (see `pipeline_schedule.Slot`), else 0; None without steady
    ticks."""


class ForwardCarry(NamedTuple):
    """The carry of a forward pass from one unit to the next."""

    x_BSD: Array
    sums: Any
    """The sums of this device's layers."""
    prefetched: Params | None
    """The weights that were gathered in advance for the next unit, or None if none are gathered in advance."""


class BackwardCarry(NamedTuple):
    """The carry of a backward pass from one unit to the next."""

    x_gradient_BSD: Array
    gradients: Params
    prefetched: Params | None = None
    """The weights that were gathered in advance for the next unit."""
    pending: Params | None = None
    """The gradients of the previous layer's weights, which have yet to be reduced and added."""


class Layers:
    """The layers of one group in one chunk of a stage, forward and backward.

    `weights` and `buffers` are those of all groups. Like `gradients`, they hold all of this device's units. `order` has
    the unit of the group in each slot (-1 in an empty slot), and the chunk has `depth` slots.
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
        all_filled: bool = True,
    ):
        """Stores the group's part of the weights and buffers. `all_filled` is True if no slot of any stage is empty."""
        self._spec, self._group, self._order, self.depth = spec, group, order, depth
        self.weights, self._buffers = LayerWeights(spec, group, weights), buffers.get(group.name, {})
        self._all_filled = all_filled
        self._trained_axes = without_stack_axis(spec.trained_axes[group.name])
        groups = spec.definition.groups
        groups_before = groups[: groups.index(group)]
        self._layers_before = sum(group_before.num_layers for group_before in groups_before)
        self._backwards: dict[int, Backward] = {}
        """The backward function of each layer, by index in the pattern. It is known once forward has been traced."""

    def enable_float8_gather(self, x_BSD: Array, rows: Rows) -> None:
        """Makes later gathers use float8 for the weights that layers multiply only in float8."""
        multiplied_in_float8 = []
        for pattern_index in range(self.layers_per_unit):
            weights, products = self._trace_products(pattern_index, x_BSD, rows)
            in_float8 = [product.weight for product in products if product.in_float8]
            multiplied_in_float8.append([any(leaf is weight for weight in in_float8) for leaf in weights])
        self.weights.enable_float8_gather(multiplied_in_float8)

    def products(self, x_BSD: Array, rows: Rows) -> list[bool]:
        """Returns, for each matrix product in all layers of the group, whether it runs in float8."""
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
            with record_products() as recorded_products:
                output = self._call_without_cache(
                    pattern_index, *self._arguments(jnp.int32(0), pattern_index, rows, weights), x_BSD
                )
            leaves.extend(jax.tree.leaves(weights))
            products.extend(recorded_products)
            return output.x_BSD

        abstract_weights = jax.eval_shape(lambda: self.weights.take(jnp.int32(0), pattern_index))
        jax.eval_shape(trace_layer, abstract_weights, x_BSD)
        return leaves, products

    def allocate(self, slots: int, x_BSD: Array, rows: Rows) -> tuple[Residuals, Any]:
        """Returns buffers for the residuals of `slots` microbatches, [slots, depth, …], and zeros for the sums of this
        device's layers, [units, …], stacked like its parameters."""
        forward = lambda x: self._unit_forward(x, jnp.int32(0), rows, self._first_weights(always_run))[1:3]
        jaxpr, (unit_residuals, sums) = jax.make_jaxpr(forward, return_shape=True)(x_BSD)
        units = self._order.shape[0]
        memory_spaces = [aval.memory_space for aval in jaxpr.out_avals[: len(unit_residuals)]]

        def allocate_buffer(leaf: Any, memory_space: Any) -> Array:
            # Broadcast after the move: a host buffer that is filled on the device would first need memory there.
            zero = jax.device_put(jnp.zeros((), leaf.dtype), memory_space)
            return jax.lax.broadcast(zero, (slots, self.depth, *leaf.shape))

        residuals = [
            allocate_buffer(leaf, memory_space)
            for leaf, memory_space in zip(unit_residuals, memory_spaces, strict=True)
        ]
        return residuals, jax.tree.map(lambda leaf: jnp.zeros((units, *leaf.shape), jnp.float32), sums)

    def forward(self, x_BSD: Array, chunk_pass: Pass, residuals: Residuals, sums: Any) -> tuple[Array, Residuals, Any]:
        """Returns the chunk's output, the residuals, and the sums. In the residuals, the slot of this pass holds what
        backward needs in addition to weights and rows. The sums include those of this pass."""

        def body(state: tuple[ForwardCarry, Residuals], offset: Array) -> tuple[tuple[ForwardCarry, Residuals], None]:
            carry, residuals = state
            carry, unit_residuals = self.forward_at(offset, chunk_pass, carry, residuals)
            return (carry, self.write(residuals, unit_residuals, offset, chunk_pass)), None

        start = self.start_forward(chunk_pass, x_BSD, sums)
        carry, residuals = self.scan(body, (start, residuals), self.depth)
        return carry.x_BSD, residuals, carry.sums

    def start_forward(self, chunk_pass: Pass, x_BSD: Array, sums: Any) -> ForwardCarry:
        """Returns the carry before the chunk's first unit."""
        return ForwardCarry(x_BSD, sums, self._first_weights(chunk_pass.run_if_active))

    def forward_at(
        self, offset: Array, chunk_pass: Pass, carry: ForwardCarry, residuals: Residuals
    ) -> tuple[ForwardCarry, Residuals]:
        """Runs the unit at `offset` in the chunk. Returns the carry after it, and the unit's residuals, which the
        caller writes into the slot. If the unit is skipped, they are those in the slot."""
        x_BSD, sums, prefetched = carry
        unit = chunk_pass.chunk * self.depth + offset
        compute = lambda: self._unit_forward(x_BSD, unit, chunk_pass.rows, prefetched)
        zeros = jax.tree.map(lambda total: jnp.zeros(total.shape[1:], total.dtype), sums)
        skip = lambda: (x_BSD, self.read(residuals, offset, chunk_pass), zeros, prefetched)
        x_BSD, unit_residuals, unit_sums, prefetched = chunk_pass.run_if_active(self._is_filled(unit), compute, skip)
        sums = jax.tree.map(lambda total, addend: total.at[unit].add(addend), sums, unit_sums)
        return ForwardCarry(x_BSD, sums, prefetched), unit_residuals

    def backward(
        self, x_gradient_BSD: Array, chunk_pass: Pass, residuals: Residuals, gradients: Params, *, last: bool
    ) -> tuple[Array, Params]:
        """Returns the gradient of the chunk's input, and `gradients` with the gradients of the chunk's weights added.
        `last` is True for the last microbatch.

        Weights are gathered again. If they were kept from forward to backward, the whole weights of all layers would be
        in memory at once. Gradients are added outside the condition, because XLA would copy all of `gradients` through
        it.
        """

        def body(carry: BackwardCarry, offset: Array) -> tuple[BackwardCarry, None]:
            read = lambda: self.read(residuals, offset, chunk_pass)
            return self.backward_at(offset, chunk_pass, read, carry, last=last), None

        start = self.start_backward(chunk_pass, x_gradient_BSD, gradients)
        carry = self.scan(body, start, self.depth, reverse=True)
        return carry.x_gradient_BSD, self.finish_backward(chunk_pass, carry, last=last)

    def start_backward(self, chunk_pass: Pass, x_gradient_BSD: Array, gradients: Params) -> BackwardCarry:
        """Returns the carry before the chunk's last unit, which runs first."""
        return BackwardCarry(x_gradient_BSD, gradients)

    def backward_at(
        self,
        offset: Array,
        chunk_pass: Pass,
        read_residuals: Callable[[], Residuals],
        carry: BackwardCarry,
        *,
        last: bool = False,
    ) -> BackwardCarry:
        """Runs the unit at `offset` in the chunk, whose residuals `read_residuals` returns. Returns the carry after
        it."""
        x_gradient_BSD, gradients, *_ = carry
        unit = chunk_pass.chunk * self.depth + offset
        compute = lambda: self._unit_backward(x_gradient_BSD, unit, chunk_pass.rows, read_residuals())
        skip = lambda: (x_gradient_BSD, jax.tree.map(lambda g: jnp.zeros(g.shape[1:], g.dtype), gradients))
        x_gradient_BSD, unit_gradients = chunk_pass.run_if_active(self._is_filled(unit), compute, skip)
        gradients = jax.tree.map(lambda total, addend: total.at[unit].add(addend), gradients, unit_gradients)
        return BackwardCarry(x_gradient_BSD, gradients)

    def finish_backward(self, chunk_pass: Pass, carry: BackwardCarry, *, last: bool = False) -> Params:
        """Returns the gradients after the chunk's first unit, which runs last."""
        return carry.gradients

    def evaluate(self, x_BSD: Array, chunk_pass: Pass) -> Array:
        """Returns the chunk's output without storing residuals."""

        def body(x_BSD: Array, offset: Array) -> tuple[Array, None]:
            unit = chunk_pass.chunk * self.depth + offset

            def compute() -> Array:
                y_BSD = x_BSD
                for pattern_index in range(self.layers_per_unit):
                    weights = self.weights.take(unit, pattern_index)
                    arguments = self._arguments(unit, pattern_index, chunk_pass.rows, weights)
                    y_BSD = self._call_without_cache(pattern_index, *arguments, y_BSD).x_BSD
                return y_BSD

            return chunk_pass.run_if_active(self._is_filled(unit), compute, lambda: x_BSD), None

        return self.scan(body, x_BSD, self.depth)

    def call(self, unit: Array, pattern_index: int, rows: Rows, x_BSD: Array, cache: Cache) -> LayerOutput:
        """Returns one layer's output for new tokens. `cache` has the keys and values of earlier tokens."""
        arguments = self._arguments(unit, pattern_index, rows, self.weights.take(unit, pattern_index))
        return self._call(pattern_index, *arguments, x_BSD, cache)

    def read(self, residuals: Residuals, offset: Array, chunk_pass: Pass) -> Residuals:
        """Returns the residuals of the unit at `offset` in the chunk, from the slot of a pass."""
        return read_slot(residuals, chunk_pass.slot, self._position(offset, chunk_pass))

    def write(self, residuals: Residuals, unit_residuals: Residuals, offset: Array, chunk_pass: Pass) -> Residuals:
        """Returns the buffers with the residuals of the unit at `offset` in the chunk, in the slot of a pass."""
        return write_slot(residuals, unit_residuals, chunk_pass.slot, self._position(offset, chunk_pass))

    def _position(self, offset: Array, chunk_pass: Pass) -> Array:
        """Returns the position of a unit's residuals in the slot of a pass."""
        if chunk_pass.is_reversed is None:
            return offset
        return jnp.where(chunk_pass.is_reversed == 1, self.depth - 1 - offset, offset)

    @property
    def layers_per_unit(self) -> int:
        """The number of layers in a unit, which is one repetition of the group's pattern."""
        return len(self._group.pattern)

    def _unit_forward(
        self, x_BSD: Array, unit: Array, rows: Rows, prefetched: Params | None
    ) -> tuple[Array, Residuals, Any, Params | None]:
        """Returns a unit's output, its residuals, its layers' sums, and the weights that were gathered in advance for
        the next unit. `prefetched` has those that were gathered for this unit, or is None if none are gathered in
        advance."""
        unit_residuals: Residuals = []
        sums = {}
        for pattern_index in range(self.layers_per_unit):
            weights, prefetched = self._next_weights(prefetched, unit, pattern_index)
            arguments = self._arguments(unit, pattern_index, rows, weights)
            layer = rematerialise(self._layer_function(pattern_index), self._spec.config.train)
            (x_BSD, loss), backward, layer_sums = jax.vjp(layer, *arguments, x_BSD, has_aux=True)
            self._backwards[pattern_index] = Backward(backward, (*arguments, x_BSD), has_loss=loss is not None)
            unit_residuals += self._backwards[pattern_index].residuals(backward)
            loss_sums = {} if loss is None else {"loss": jax.lax.stop_gradient(loss)}
            sums[str(pattern_index)] = layer_sums | loss_sums
        return x_BSD, unit_residuals, self._join_pattern(sums), prefetched

    def _first_weights(self, run_if_active: RunIfActive) -> Params | None:
        """Returns the weights that are gathered in advance for the first unit, or None if each layer's weights are
        gathered only when the layer runs, as in this class."""
        return None

    def _next_weights(self, prefetched: Params | None, unit: Array, pattern_index: int) -> tuple[Params, Params | None]:
        """Returns a layer's weights, and the weights that are gathered in advance for the next layer or None."""
        return self.weights.take(unit, pattern_index), None

    def _unit_backward(
        self, x_gradient_BSD: Array, unit: Array, rows: Rows, unit_residuals: Residuals
    ) -> tuple[Array, Params]:
        """Returns the gradients of a unit's input and of its weights."""
        gradients = {}
        for pattern_index in reversed(range(self.layers_per_unit)):
            residuals, unit_residuals = self._split_residuals(unit_residuals, pattern_index)
            weights = self.weights.take(unit, pattern_index)
            layer_gradients, x_gradient_BSD = self._layer_backward(
                pattern_index, residuals, unit, rows, weights, x_gradient_BSD
            )
            axes = self._group.at(self._trained_axes, pattern_index)
            if axes:
                gradients[str(pattern_index)] = self.weights.reduce(select_trained(layer_gradients, axes), axes)
        return x_gradient_BSD, self._join_pattern(gradients)

    def _split_residuals(self, unit_residuals: Residuals, pattern_index: int) -> tuple[Residuals, Residuals]:
        """Returns the residuals of the layer at this index, which are the last ones, and those of the layers before
        it."""
        start = len(unit_residuals) - self._backwards[pattern_index].residual_count
        return unit_residuals[start:], unit_residuals[:start]

    def _layer_backward(
        self, pattern_index: int, residuals: Residuals, unit: Array, rows: Rows, weights: Params, x_gradient_BSD: Array
    ) -> tuple[Params, Array]:
        """Returns the gradients of the layer's whole weights and of its input."""
        arguments = self._arguments(unit, pattern_index, rows, weights)
        gradients, *_, x_gradient_BSD = self._backwards[pattern_index](residuals, arguments, x_gradient_BSD)
        return gradients, x_gradient_BSD

    def _layer_function(self, pattern_index: int) -> Callable[..., Any]:
        """Returns a layer as a function of its weights, its buffers, its index, the rows and x. The function returns
        ((x, the layer's term of the loss), sums)."""

        def apply(*arguments: Any) -> Any:
            *other_arguments, x_BSD = arguments
            output = self._call_without_cache(pattern_index, *other_arguments, checkpoint_name(x_BSD, "layer_input"))
            to_float32 = lambda array: array.astype(jnp.float32)
            loss = jax.tree.map(to_float32, output.loss)
            return (output.x_BSD, loss), jax.tree.map(to_float32, dict(output.sums))

        return apply

    def _call_without_cache(self, pattern_index: int, *arguments: Any) -> LayerOutput:
        """Calls the layer at this index of the pattern, on halves of the rows if the placement's overlap is `rows`."""
        in_halves = self._spec.placement.overlap == "rows"
        return self._call_in_halves(pattern_index, *arguments) if in_halves else self._call(pattern_index, *arguments)

    def _call_in_halves(
        self, pattern_index: int, weights: Params, buffers: Params, layer_index: Array, rows: Rows, x_BSD: Array
    ) -> LayerOutput:
        """Calls the layer on each half of the rows, so that one half can compute while the other communicates. The sums
        and the loss terms of the two halves are added."""
        row_count = len(x_BSD)
        middle = row_count // 2

        def call_half(start: int, stop: int) -> LayerOutput:
            # Fields that all rows share are scalars or have the shape [1, L], and are not cut.
            cut = lambda array: array[start:stop] if array.ndim and len(array) == row_count else array
            return self._call(pattern_index, weights, buffers, layer_index, jax.tree.map(cut, rows), cut(x_BSD))

        halves = [call_half(0, middle), call_half(middle, row_count)]
        loss, sums = jax.tree.map(jnp.add, *((half.loss, dict(half.sums)) for half in halves))
        return LayerOutput(jnp.concatenate([half.x_BSD for half in halves]), loss, sums)

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
        divided_rows = None
        if spec.placement.num_shards("length") > 1:
            divided_rows = DividedRows(spec.placement, spec.reduce_dtype, rows.row_segments)
        context = LayerContext(
            rows.positions, rows.segments, rows.is_real, rows.targets_per_token, rows.rotary, keys, spec.kernel,
            spec.placement, divided_rows, [], cache,
        )  # fmt: skip
        with float8_products(spec.float8), refusing_other_products():
            output = _check_output(layer(x_BSD, context), x_BSD)
        if divided_rows is not None and not context.attention_calls:
            raise ConfigError(
                f"mesh.context: a layer of {spec.config.model.family} does not call LayerContext.attend, which alone "
                "reaches the tokens of other devices; set mesh.context=1, or call it in each layer"
            )
        return output

    def _arguments(
        self, unit: Array, pattern_index: int, rows: Rows, weights: Params
    ) -> tuple[Params, Params, Array, Rows]:
        """Returns the arguments of a layer except x: its weights, its buffers, its index in the model, and the rows."""
        pick = lambda array: jax.lax.dynamic_index_in_dim(array, unit, keepdims=False)
        buffers = jax.tree.map(pick, self._group.at(self._buffers, pattern_index)) if self._buffers else {}
        layer_index = self._layers_before + self.layers_per_unit * jnp.maximum(pick(self._order), 0) + pattern_index
        return weights, buffers, layer_index, rows

    def _join_pattern(self, trees: dict[str, Any]) -> Any:
        """Returns a group's tree, from one tree for each index in the group's pattern."""
        return trees if self.layers_per_unit > 1 else trees["0"]

    def _is_filled(self, unit: Array) -> Array | None:
        """Returns whether this slot has a unit, or None if all slots have one."""
        return None if self._all_filled else self._order[unit] >= 0

    def scan(
        self, body: Callable[[Any, Array], tuple[Any, None]], start: Any, length: int, *, reverse: bool = False
    ) -> Any:
        """Runs `body` with the numbers below `length`, each for a unit, and returns the final carry."""
        unroll = min(self._spec.config.train.layer_unroll, length)
        return jax.lax.scan(body, start, jnp.arange(length), unroll=unroll, reverse=reverse)[0]


class PrefetchedLayers(Layers):
    """Layers whose communication overlaps with other layers. While a layer computes, the weights of the next layer are
    gathered and the gradients of the previous one are reduced. No iteration of the loop waits for its own
    communication.

    Requires `all_filled`, because prefetching is unconditional and no slot may be empty.
    """

    def _first_weights(self, run_if_active: RunIfActive) -> Params:
        """Returns the first layer's weights."""
        gather = lambda: self.weights.take(jnp.int32(0), 0)
        return run_if_active(None, gather, gather)

    def _next_weights(self, prefetched: Params | None, unit: Array, pattern_index: int) -> tuple[Params, Params]:
        """Returns a layer's weights, which were gathered in advance, and the weights of the next layer."""
        assert self._all_filled and prefetched is not None
        if pattern_index < self.layers_per_unit - 1:
            return prefetched, self.weights.take(unit, pattern_index + 1)
        next_unit = jnp.minimum(unit + 1, self.depth - 1)
        return prefetched, self.weights.take(next_unit, 0)

    def start_backward(self, chunk_pass: Pass, x_gradient_BSD: Array, gradients: Params) -> BackwardCarry:
        """Returns the carry with the last layer's weights, and zeros for the gradients of a layer past the end, which
        the out-of-range scatter drops."""

        def start() -> BackwardCarry:
            prefetched = self.weights.take(jnp.int32(self.depth - 1), self.layers_per_unit - 1)
            shapes = jax.eval_shape(lambda: self.weights.take(jnp.int32(0), 0))
            trained_shapes = select_trained(shapes, self._group.at(self._trained_axes, 0))
            zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), trained_shapes)
            return BackwardCarry(x_gradient_BSD, gradients, prefetched, zeros)

        return chunk_pass.run_if_active(None, start, start)

    def backward_at(
        self,
        offset: Array,
        chunk_pass: Pass,
        read_residuals: Callable[[], Residuals],
        carry: BackwardCarry,
        *,
        last: bool = False,
    ) -> BackwardCarry:
        """Returns the same as `Layers.backward_at`. A layer's gradients stay unreduced until the next layer runs. For
        the last microbatch, some gradients are also summed over replicas, layer by layer (see
        `StepSpec.is_reduced_early`)."""
        last_index = self.layers_per_unit - 1

        def run() -> BackwardCarry:
            x_gradient_BSD, gradients, prefetched, pending = carry
            assert prefetched is not None and pending is not None
            unit_residuals = read_residuals()
            for pattern_index in range(last_index, -1, -1):
                # Gather the weights of the layer whose backward comes next, and reduce the gradients of the layer whose
                # backward came last. Neither depends on this layer's computation, so both can overlap with it.
                is_first = pattern_index == 0
                next_layer = (jnp.maximum(offset - 1, 0), last_index) if is_first else (offset, pattern_index - 1)
                weights, prefetched = prefetched, self.weights.take(*next_layer)
                pending_layer = (pattern_index + 1, offset) if pattern_index < last_index else (0, offset + 1)
                gradients = self._add_pending(gradients, *pending_layer, pending, last)
                layer_residuals, unit_residuals = self._split_residuals(unit_residuals, pattern_index)
                layer_gradients, x_gradient_BSD = self._layer_backward(
                    pattern_index, layer_residuals, offset, chunk_pass.rows, weights, x_gradient_BSD
                )
                pending = select_trained(layer_gradients, self._group.at(self._trained_axes, pattern_index))
            return BackwardCarry(x_gradient_BSD, gradients, prefetched, pending)

        return chunk_pass.run_if_active(None, run, run)

    def finish_backward(self, chunk_pass: Pass, carry: BackwardCarry, *, last: bool = False) -> Params:
        """Returns the gradients with those of the first layer, which are still pending."""
        pending = carry.pending
        assert pending is not None
        finish = lambda: self._add_pending(carry.gradients, 0, jnp.int32(0), pending, last)
        return chunk_pass.run_if_active(None, finish, finish)

    def _add_pending(self, total: Params, pattern_index: int, unit: Array, pending: Params, last: bool) -> Params:
        """Returns the `total` gradients plus the `pending` gradients of a layer, after reducing the latter."""
        axes = self._group.at(self._trained_axes, pattern_index)
        if not axes:
            return total
        stacks = self._group.at(total, pattern_index)
        reduced_gradients = self.weights.reduce(pending, axes)
        sums = jax.tree.map(
            lambda stack, addend: stack[unit] + collectives.row_major(addend), stacks, reduced_gradients
        )
        if last:
            spec = self._spec
            stacked_axes = self._group.at(spec.trained_axes[self._group.name], pattern_index)
            sums = collectives.reduce_gradients(
                sums, stacked_axes, spec.placement, spec.reduce_dtype, spec.is_reduced_early
            )
        # Past the last unit the scatter is out of range and drops the zeros.
        new_stacks = jax.tree.map(lambda stack, layer_sum: stack.at[unit].set(layer_sum, mode="drop"), stacks, sums)
        return new_stacks if self.layers_per_unit == 1 else total | {str(pattern_index): new_stacks}


def _check_output(output: Any, x_BSD: Array) -> LayerOutput:
    """Returns a layer's output after checking it. Raises `ConfigError` if it violates the contract."""
    if not isinstance(output, LayerOutput):
        raise ConfigError(f"model.family: a layer must return a LayerOutput, but returns a {type(output).__name__}")
    x, loss = output.x_BSD, output.loss
    if (x.shape, x.dtype) != (x_BSD.shape, x_BSD.dtype):
        raise ConfigError(
            f"model.family: a layer must return activations with the dtype and shape of its input, "
            f"{x_BSD.dtype}{list(x_BSD.shape)}, but returns {x.dtype}{list(x.shape)}"
        )
    if loss is not None and jnp.shape(loss) != ():
        raise ConfigError(f"model.family: a layer's loss must be a scalar, but has the shape {list(jnp.shape(loss))}")
    if "loss" in output.sums:
        raise ConfigError("model.family: a layer's sum must not be named loss, the name of its loss term; rename it")
    return output._replace(loss=None if loss is None else jnp.asarray(loss))
