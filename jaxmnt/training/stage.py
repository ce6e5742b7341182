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
from jaxmnt.parallel.sharding import unstacked
from jaxmnt.training.remat import Backward, Residuals, read_slot, rematerialise, write_slot
from jaxmnt.training.spec import Batch, StepSpec
from jaxmnt.training.trained import select
from jaxmnt.training.weights import LayerWeights, Weights

When = Callable[[Array | None, Callable[[], Any], Callable[[], Any]], Any]
"""`when(also, go, idle)` is `go()` if this tick has a microbatch and `also` is true (None is), else `idle()`."""


def always(also: Array | None, go: Callable[[], Any], idle: Callable[[], Any]) -> Any:
    """The `When` of a program without a pipeline."""
    assert also is None
    return go()


class Rows(NamedTuple):
    """What all layers see of a microbatch."""

    positions: Array  # [B, L], or [1, L]
    segments: Array | None  # [B, L]
    rotary: dict[str, Angles]
    row_keys: Array | None  # [B]


def microbatch_rows(spec: StepSpec, rows: Batch, row_keys_B: Array | None) -> Rows:
    """Of a microbatch with these rows and a random key for each of them (None: no dropout)."""
    apart = spec.config.data.keeps_documents_apart
    positions = rows["positions"] if apart else rows["positions"][:1]  # all rows count alike
    rotary = spec.definition.family.rotary(positions)
    return Rows(positions, rows["segments"] if apart else None, rotary, row_keys_B)


class Pass(NamedTuple):
    """A microbatch's pass through one chunk of a stage."""

    chunk: Array
    slot: Array
    """Where forward leaves what backward needs."""
    rows: Rows
    when: When


class Layers:
    """The layers of one group in one chunk of a stage, forward and backward.

    `weights` and `buffers` are those of all groups and, as `gradients`, hold all of this device's units; `order` says
    which unit of the group lies in each slot (none: -1), and the chunk has `depth` slots.
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
        """`full` says that no slot of any stage is empty."""
        self._spec, self._group, self._order, self._depth = spec, group, order, depth
        self.weights, self._buffers = LayerWeights(spec, group, weights), buffers.get(group.name, {})
        self._full = full
        self._trained_axes = unstacked(spec.trained_axes[group.name])
        groups = spec.definition.groups
        self._number = sum(other.num_layers for other in groups[: groups.index(group)])
        self._backwards: dict[int, Backward] = {}
        """Of a layer by place in the pattern: known once forward is traced."""

    def gather_in_float8(self, x_BSD: Array, rows: Rows) -> None:
        """From now on, weights that layers multiply in float8 alone, and that are gathered."""
        multiplied = []
        for place in range(self.places):
            weights, noted = self._noted(place, x_BSD, rows)
            multiplied.append([any(leaf is one.weight for one in noted if one.in_float8) for leaf in weights])
        self.weights.pack(multiplied)

    def products(self, x_BSD: Array, rows: Rows) -> list[bool]:
        """Returns of each product of all layers whether it is in float8."""
        noted = [one.in_float8 for place in range(self.places) for one in self._noted(place, x_BSD, rows)[1]]
        return self._group.units * noted

    def _noted(self, place: int, x_BSD: Array, rows: Rows) -> tuple[list[Array], list[RecordedProduct]]:
        """The weights of a layer and its products, by trying the layer without computing anything."""
        leaves: list[Array] = []
        products: list[RecordedProduct] = []

        def look(weights: Params, x_BSD: Array) -> Array:
            with record_products() as noted:
                output = self._called(place, *self._arguments(jnp.int32(0), place, rows, weights), x_BSD)
            leaves.extend(jax.tree.leaves(weights))
            products.extend(noted)
            return output.x_BSD

        jax.eval_shape(look, jax.eval_shape(lambda: self.weights.take(jnp.int32(0), place)), x_BSD)
        return leaves, products

    def empty(self, slots: int, x_BSD: Array, rows: Rows) -> tuple[Residuals, Any]:
        """A place for what the forwards of `slots` microbatches leave for their backwards, [slots, depth, …], and for
        the sums of this device's layers, [units, …], stacked like its parameters."""
        forward = lambda x: self._unit_forward(x, jnp.int32(0), rows, self._first(always))[1:3]
        jaxpr, (kept, sums) = jax.make_jaxpr(forward, return_shape=True)(x_BSD)
        units = self._order.shape[0]
        spaces = [one.memory_space for one in jaxpr.out_avals[: len(kept)]]
        # Made where they are to be: a place in host memory that is filled on the device would need room there first.
        place = lambda one, space: jax.lax.broadcast(
            jax.device_put(jnp.zeros((), one.dtype), space), (slots, self._depth, *one.shape)
        )
        residuals = [place(one, space) for one, space in zip(kept, spaces, strict=True)]
        return residuals, jax.tree.map(lambda one: jnp.zeros((units, *one.shape), jnp.float32), sums)

    def forward(self, x_BSD: Array, of: Pass, residuals: Residuals, sums: Any) -> tuple[Array, Residuals, Any]:
        """The chunk's output; the residuals, which in this slot have what its backward needs besides weights and rows;
        and the sums with those of this pass added."""

        def body(carry: Any, offset: Array) -> tuple[Any, None]:
            x_BSD, residuals, sums, ready = carry
            unit = of.chunk * self._depth + offset
            go = lambda: self._unit_forward(x_BSD, unit, of.rows, ready)
            zeros = jax.tree.map(lambda one: jnp.zeros(one.shape[1:], one.dtype), sums)
            idle = lambda: (x_BSD, read_slot(residuals, of.slot, offset), zeros, ready)
            x_BSD, kept, new, ready = of.when(self._filled(unit), go, idle)
            residuals = write_slot(residuals, kept, of.slot, offset)
            return (x_BSD, residuals, jax.tree.map(lambda one, new: one.at[unit].add(new), sums, new), ready), None

        x_BSD, residuals, sums, _ = self._scan(body, (x_BSD, residuals, sums, self._first(of.when)))
        return x_BSD, residuals, sums

    def backward(
        self, x_gradient_BSD: Array, of: Pass, residuals: Residuals, gradients: Params, *, last: bool
    ) -> tuple[Array, Params]:
        """The gradient of the chunk's input, and `gradients` with those of its weights added. `last`: after this
        microbatch no other comes.

        Weights are gathered again: kept from forward to backward they would be whole for all layers at once. The sum is
        outside of the condition, through which XLA would carry a copy of all of it.
        """

        def body(carry: tuple[Array, Params], offset: Array) -> tuple[tuple[Array, Params], None]:
            x_gradient_BSD, gradients = carry
            unit = of.chunk * self._depth + offset
            go = lambda: self._unit_backward(x_gradient_BSD, unit, of.rows, read_slot(residuals, of.slot, offset))
            nothing = lambda: (x_gradient_BSD, jax.tree.map(lambda g: jnp.zeros(g.shape[1:], g.dtype), gradients))
            x_gradient_BSD, new = of.when(self._filled(unit), go, nothing)
            return (x_gradient_BSD, jax.tree.map(lambda total, one: total.at[unit].add(one), gradients, new)), None

        return self._scan(body, (x_gradient_BSD, gradients), reverse=True)

    def evaluate(self, x_BSD: Array, of: Pass) -> Array:
        """The chunk's output alone."""

        def body(x_BSD: Array, offset: Array) -> tuple[Array, None]:
            unit = of.chunk * self._depth + offset

            def go() -> Array:
                x_out_BSD = x_BSD
                for place in range(self.places):
                    arguments = self._arguments(unit, place, of.rows, self.weights.take(unit, place))
                    x_out_BSD = self._called(place, *arguments, x_out_BSD).x_BSD
                return x_out_BSD

            return of.when(self._filled(unit), go, lambda: x_BSD), None

        return self._scan(body, x_BSD)

    def call(self, unit: Array, place: int, rows: Rows, x_BSD: Array, cache: Cache) -> LayerOutput:
        """One layer's output for new tokens, with the keys and values of those before in `cache`."""
        return self._call(place, *self._arguments(unit, place, rows, self.weights.take(unit, place)), x_BSD, cache)

    @property
    def places(self) -> int:
        """How many layers a unit has."""
        return len(self._group.pattern)

    def _unit_forward(
        self, x_BSD: Array, unit: Array, rows: Rows, ready: Params | None
    ) -> tuple[Array, Residuals, Any, Params | None]:
        """`ready`: see `_first`."""
        kept: Residuals = []
        sums = {}
        for place in range(self.places):
            weights, ready = self._next(ready, unit, place)
            arguments = self._arguments(unit, place, rows, weights)
            (x_BSD, loss), backward, sums_of_layer = jax.vjp(
                rematerialise(self._apply(place), self._spec.config.train), *arguments, x_BSD, has_aux=True
            )
            self._backwards[place] = Backward(backward, (*arguments, x_BSD), loss=loss is not None)
            kept += self._backwards[place].kept(backward)
            sums[str(place)] = sums_of_layer | ({} if loss is None else {"loss": jax.lax.stop_gradient(loss)})
        return x_BSD, kept, self._joined(sums), ready

    def _first(self, when: When) -> Params | None:
        """Returns the weights that are there before the first unit: none, where each comes when it is used."""
        return None

    def _next(self, ready: Params | None, unit: Array, place: int) -> tuple[Params, Params | None]:
        """Returns the weights of a layer, and those that are there before the next one."""
        return self.weights.take(unit, place), None

    def _unit_backward(self, x_gradient_BSD: Array, unit: Array, rows: Rows, kept: Residuals) -> tuple[Array, Params]:
        found = {}
        for place in reversed(range(self.places)):
            own, kept = self._split(kept, place)
            weights = self.weights.take(unit, place)
            new, x_gradient_BSD = self._layer_backward(place, own, unit, rows, weights, x_gradient_BSD)
            if axes := self._group.at(self._trained_axes, place):
                found[str(place)] = self.weights.reduced(select(new, axes), axes)
        return x_gradient_BSD, self._joined(found)

    def _split(self, kept: Residuals, place: int) -> tuple[Residuals, Residuals]:
        """What the layer at this place, the last of those that are left, has kept; and what those before it have."""
        count = len(kept) - self._backwards[place].count
        return kept[count:], kept[:count]

    def _layer_backward(
        self, place: int, kept: Residuals, unit: Array, rows: Rows, weights: Params, x_gradient_BSD: Array
    ) -> tuple[Params, Array]:
        """The gradients of the layer's whole weights, and of its input."""
        arguments = self._arguments(unit, place, rows, weights)
        gradients, *_, x_gradient_BSD = self._backwards[place](kept, arguments, x_gradient_BSD)
        return gradients, x_gradient_BSD

    def _apply(self, place: int) -> Callable[..., Any]:
        """A layer as ((x, term of the loss), sums) of its weights, its buffers, its number, the rows and x."""

        def apply(*arguments: Any) -> Any:
            arguments = (*arguments[:-1], checkpoint_name(arguments[-1], "layer_input"))
            output = self._called(place, *arguments)
            float32 = lambda one: one.astype(jnp.float32)
            return (output.x_BSD, jax.tree.map(float32, output.loss)), jax.tree.map(float32, dict(output.sums))

        return apply

    def _called(self, place: int, *arguments: Any) -> LayerOutput:
        """The layer at this place of the pattern, as it is called in training."""
        by_halves = self._spec.placement.overlap == "rows"
        return self._call_by_halves(place, *arguments) if by_halves else self._call(place, *arguments)

    def _call_by_halves(
        self, place: int, weights: Params, buffers: Params, number: Array, rows: Rows, x_BSD: Array
    ) -> LayerOutput:
        """The layer of half of the rows, and of the others: what one half waits for, the other computes behind. Sums
        and terms of the loss add up over rows."""
        middle, whole = len(x_BSD) // 2, len(x_BSD)

        def half(first: int, stop: int) -> LayerOutput:
            cut = lambda one: one[first:stop] if len(one) == whole else one  # [1, L] if all rows count alike
            return self._call(place, weights, buffers, number, jax.tree.map(cut, rows), cut(x_BSD))

        a, b = half(0, middle), half(middle, whole)
        loss, sums = jax.tree.map(jnp.add, (a.loss, dict(a.sums)), (b.loss, dict(b.sums)))
        return LayerOutput(jnp.concatenate([a.x_BSD, b.x_BSD]), loss, sums)

    def _call(
        self,
        place: int,
        weights: Params,
        buffers: Params,
        number: Array,
        rows: Rows,
        x_BSD: Array,
        cache: Cache | None = None,
    ) -> LayerOutput:
        """The layer at this place of the pattern."""
        spec, keys = self._spec, rows.row_keys
        keys = None if keys is None else jax.vmap(lambda key: jax.random.fold_in(key, number))(keys)
        layer = spec.definition.layer(self._group, place, weights, buffers)
        context = LayerContext(rows.positions, rows.segments, rows.rotary, keys, spec.kernel, spec.placement, cache)
        with float8_products(spec.float8):
            return _checked(layer(x_BSD, context), x_BSD)

    def _arguments(self, unit: Array, place: int, rows: Rows, weights: Params) -> tuple[Params, Params, Array, Rows]:
        """What a layer is applied to besides x."""
        pick = lambda array: jax.lax.dynamic_index_in_dim(array, unit, keepdims=False)
        buffers = jax.tree.map(pick, self._group.at(self._buffers, place)) if self._buffers else {}
        number = self._number + self.places * jnp.maximum(pick(self._order), 0) + place
        return weights, buffers, number, rows

    def _joined(self, by_place: dict[str, Any]) -> Any:
        """A group's tree of what there is for each place of its pattern."""
        return by_place if self.places > 1 else by_place["0"]

    def _filled(self, unit: Array) -> Array | None:
        return None if self._full else self._order[unit] >= 0

    def _scan(self, body: Callable[[Any, Array], tuple[Any, None]], start: Any, *, reverse: bool = False) -> Any:
        unroll = min(self._spec.config.train.layer_unroll, self._depth)
        return jax.lax.scan(body, start, jnp.arange(self._depth), unroll=unroll, reverse=reverse)[0]


class PrefetchedLayers(Layers):
    """Layers whose communication hides behind other layers: while a layer computes, the weights of the next one are
    gathered and the gradients of the one before are reduced. A round of the loop waits for none of what it sends.

    No slot is empty: what is gathered ahead is so under no condition.
    """

    def _first(self, when: When) -> Params:
        first = lambda: self.weights.take(jnp.int32(0), 0)
        return when(None, first, first)

    def _next(self, ready: Params | None, unit: Array, place: int) -> tuple[Params, Params]:
        assert self._full and ready is not None
        last = self.places - 1
        after = (unit, place + 1) if place < last else (jnp.minimum(unit + 1, self._depth - 1), 0)
        return ready, self.weights.take(*after)

    def backward(
        self, x_gradient_BSD: Array, of: Pass, residuals: Residuals, gradients: Params, *, last: bool
    ) -> tuple[Array, Params]:
        """As in `Layers`. After the `last` microbatch some gradients are also summed over replicas, layer by layer
        (`StepSpec.is_reduced_early`).

        A layer's gradients wait, whole, for the next round to reduce them. Those that wait for the first round are
        zeros, of a layer past the end: they are dropped.
        """
        end = self.places - 1

        def body(carry: Any, unit: Array) -> tuple[Any, None]:
            x_gradient_BSD, gradients, ready, waiting = carry
            kept = read_slot(residuals, of.slot, unit)
            for place in range(end, -1, -1):
                before = (unit, place - 1) if place else (jnp.maximum(unit - 1, 0), end)
                weights, ready = ready, self.weights.take(*before)
                after = (place + 1, unit) if place < end else (0, unit + 1)
                gradients = self._with_waiting(gradients, *after, waiting, last)
                own, kept = self._split(kept, place)
                new, x_gradient_BSD = self._layer_backward(place, own, unit, of.rows, weights, x_gradient_BSD)
                waiting = select(new, self._group.at(self._trained_axes, place))
            return (x_gradient_BSD, gradients, ready, waiting), None

        def rounds() -> tuple[Array, Params]:
            ready = self.weights.take(jnp.int32(self._depth - 1), end)
            shapes = jax.eval_shape(lambda: self.weights.take(jnp.int32(0), 0))
            trained = select(shapes, self._group.at(self._trained_axes, 0))
            nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), trained)
            start = (x_gradient_BSD, gradients, ready, nothing)
            x_end_gradient_BSD, total, _, waiting = self._scan(body, start, reverse=True)
            return x_end_gradient_BSD, self._with_waiting(total, 0, jnp.int32(0), waiting, last)

        return of.when(None, rounds, rounds)

    def _with_waiting(self, total: Params, place: int, unit: Array, waiting: Params, last: bool) -> Params:
        """Returns the total with the gradients of a layer that have waited."""
        axes = self._group.at(self._trained_axes, place)
        if not axes:
            return total
        own, reduced = self._group.at(total, place), self.weights.reduced(waiting, axes)
        new = jax.tree.map(lambda stack, new: stack[unit] + collectives.row_major(new), own, reduced)
        if last:
            spec = self._spec
            stacked = self._group.at(spec.trained_axes[self._group.name], place)
            new = collectives.reduce_gradients(new, stacked, spec.placement, spec.reduce_dtype, spec.is_reduced_early)
        added = jax.tree.map(lambda stack, new: stack.at[unit].set(new, mode="drop"), own, new)
        return added if self.places == 1 else total | {str(place): added}


def _checked(output: Any, x_BSD: Array) -> LayerOutput:
    """What a layer has returned. Raises `ConfigError` for what the contract does not allow."""
    if not isinstance(output, LayerOutput):
        raise ConfigError(f"model.family: a layer must return a LayerOutput, and returns a {type(output).__name__}")
    x, loss = output.x_BSD, output.loss
    if (x.shape, x.dtype) != (x_BSD.shape, x_BSD.dtype):
        raise ConfigError(
            f"model.family: a layer must return activations like its input, {x_BSD.dtype}{list(x_BSD.shape)}, and "
            f"returns {x.dtype}{list(x.shape)}"
        )
    if loss is not None and jnp.shape(loss) != ():
        raise ConfigError(f"model.family: a layer's loss must be one number, and has the shape {list(jnp.shape(loss))}")
    if "loss" in output.sums:
        raise ConfigError("model.family: a layer's sum is named loss, as its term of the loss is; rename it")
    return output._replace(loss=None if loss is None else jnp.asarray(loss))
