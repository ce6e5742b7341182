"""A stage's layers, forward and backward, and what they keep in between (remat policies)."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxmnt.models.decoder import Params
from jaxmnt.models.layers import rotary_angles
from jaxmnt.parallel.collectives import SCATTERED, unshard
from jaxmnt.training.spec import Batch, StepSpec

Remat = Literal["none", "attention", "dots", "names", "full"]

NAMES = ("query", "key", "value", "attention", "attention_output", "mlp_gate", "mlp_up", "mlp_output", "whole_sequence")
"""What `train.remat_save` may keep. All of these are bfloat16 or float32 activations of a layer:
query, key, value, attention [B, L, heads, head_dim], mlp_gate and mlp_up [B, L, mlp], split over `model`; the outputs
[B, L / model, D]; whole_sequence, the gathered inputs of attention and MLP [B, L, D]."""


def rematerialise(layer: Callable[..., Any], remat: Remat, save: list[str], *, unrolled: bool) -> Callable[..., Any]:
    """Applies the policy of this name to a layer. For `attention` the layer itself does it."""
    policies = jax.checkpoint_policies
    if remat in ("none", "attention"):
        return layer
    policy = {
        "dots": policies.save_from_both_policies(
            policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(SCATTERED)
        ),
        "names": policies.save_only_these_names(*save),
        "full": policies.nothing_saveable,
    }[remat]
    # Inside a scan XLA cannot merge the recomputation with the first computation; unrolled, it could.
    return jax.checkpoint(layer, policy=policy, prevent_cse=unrolled)


Residuals = list[jax.Array]
"""What forward leaves for backward."""

When = Callable[[Callable[[], Any], Callable[[], Any]], Any]
"""`when(go, idle)` is `go()` if this tick has a microbatch, else `idle()`."""


class LayerContext(NamedTuple):
    """What every layer sees of a microbatch besides its activations."""

    angles: tuple[jax.Array, jax.Array]
    mask: jax.Array | None  # [B, 1, L, L]
    row_keys: jax.Array | None  # [B]


def layer_context(spec: StepSpec, rows: Batch, row_keys_B: jax.Array | None) -> LayerContext:
    """The context of a microbatch with these rows and a random key for each of them (None: no dropout)."""
    model, apart = spec.config.model, spec.config.data.keeps_documents_apart
    assert model.head_dim
    positions = rows["positions"] if apart else rows["positions"][:1]  # all rows count alike
    segments = rows["segments"]
    mask = (segments[:, None, :, None] == segments[:, None, None, :]) if apart else None
    return LayerContext(rotary_angles(positions, model.head_dim, model.rope_theta), mask, row_keys_B)


class Layers:
    """The layers of one chunk, forward and backward.

    `params` and `gradients` hold all of this device's layers, of which the chunk is `depth` from `first` on; `order`
    says which layer of the model lies in each slot. Weights are gathered layer by layer unless they are `whole`
    already.
    """

    def __init__(self, spec: StepSpec, params: Params, order: jax.Array, depth: int, *, whole: bool):
        self._spec, self._params, self._order, self._depth, self._whole = spec, params, order, depth, whole
        train = spec.config.train
        self._block = rematerialise(self._apply, train.remat, train.remat_save, unrolled=train.layer_unroll > 1)
        self._structure: Any = None  # of a layer's backward function: the same for all, known once forward is traced

    def empty_residuals(self, slots: int, x_BSD: jax.Array, context: LayerContext) -> Residuals:
        """A place for what the forwards of `slots` microbatches leave for their backwards: [slots, depth, …]."""
        shapes = jax.eval_shape(lambda x: self._layer_forward(x, jnp.int32(0), context)[1], x_BSD)
        return [jnp.zeros((slots, self._depth, *one.shape), one.dtype) for one in shapes]

    def forward(
        self,
        x_BSD: jax.Array,
        first: jax.Array,
        context: LayerContext,
        residuals: Residuals,
        slot: jax.Array,
        when: When,
    ) -> tuple[jax.Array, Residuals]:
        """The chunk's output, and the residuals, which in this slot have what its backward needs besides weights and
        context."""

        def body(carry: tuple[jax.Array, Residuals], offset: jax.Array) -> tuple[tuple[jax.Array, Residuals], None]:
            x_BSD, residuals = carry
            go = lambda: self._layer_forward(x_BSD, first + offset, context)
            x_BSD, kept = when(go, lambda: (x_BSD, [one[slot, offset] for one in residuals]))
            return (
                x_BSD,
                [one.at[slot, offset].set(new) for one, new in zip(residuals, kept, strict=True)],
            ), None

        return self._scan(body, (x_BSD, residuals))

    def backward(
        self,
        x_gradient_BSD: jax.Array,
        first: jax.Array,
        context: LayerContext,
        residuals: Residuals,
        slot: jax.Array,
        gradients: Params,
        reduce: Callable[[Params], Params],
        when: When,
    ) -> tuple[jax.Array, Params]:
        """The gradient of the chunk's input, and `gradients` with those of its weights, through `reduce`, added.

        Weights are gathered again: kept from forward to backward they would be whole for all layers at once. The sum is
        outside of the condition, through which XLA would carry a copy of all of it.
        """

        def body(carry: tuple[jax.Array, Params], offset: jax.Array) -> tuple[tuple[jax.Array, Params], None]:
            x_gradient_BSD, gradients = carry

            def go() -> tuple[Params, jax.Array]:
                weights, layer = self._slot(first + offset)
                backward = self._join_residuals([one[slot, offset] for one in residuals], (weights, layer, context))
                weight_gradients, new = backward(x_gradient_BSD)
                return reduce(weight_gradients), new

            nothing = lambda: (jax.tree.map(lambda g: jnp.zeros(g.shape[1:], g.dtype), gradients), x_gradient_BSD)
            new, x_gradient_BSD = when(go, nothing)
            add = lambda total, one: total.at[first + offset].add(one)
            return (x_gradient_BSD, jax.tree.map(add, gradients, new)), None

        return self._scan(body, (x_gradient_BSD, gradients), reverse=True)

    def evaluate(self, x_BSD: jax.Array, first: jax.Array, context: LayerContext) -> jax.Array:
        """The chunk's output alone."""

        def body(x_BSD: jax.Array, offset: jax.Array) -> tuple[jax.Array, None]:
            weights, layer = self._slot(first + offset)
            return self._apply(weights, x_BSD, layer, context), None

        return self._scan(body, x_BSD)

    def _layer_forward(self, x_BSD: jax.Array, slot: jax.Array, context: LayerContext) -> tuple[jax.Array, Residuals]:
        weights, layer = self._slot(slot)
        x_BSD, backward = jax.vjp(lambda w, x: self._block(w, x, layer, context), weights, x_BSD)
        return x_BSD, self._split_residuals(backward, (weights, layer, context))

    def _apply(self, weights: Params, x_BSD: jax.Array, layer: jax.Array, context: LayerContext) -> jax.Array:
        spec, keys = self._spec, context.row_keys
        keys = None if keys is None else jax.vmap(lambda key: jax.random.fold_in(key, layer))(keys)
        block = spec.definition.part("block", weights)
        recompute = spec.config.train.remat == "attention"
        return block(x_BSD, context.angles, context.mask, keys, spec.kernel, recompute, spec.placement)

    def _slot(self, slot: jax.Array) -> tuple[Params, jax.Array]:
        """A slot's weights, ready for use, and which layer they are."""
        pick = lambda array: jax.lax.dynamic_index_in_dim(array, slot, keepdims=False)
        weights, layer = jax.tree.map(pick, self._params), pick(self._order)
        if not self._whole:
            spec = self._spec
            weights = unshard(weights, spec.definition.layer_axes, spec.placement, spec.dtype)
        return weights, layer

    def _scan(self, body: Callable[[Any, jax.Array], tuple[Any, None]], start: Any, *, reverse: bool = False) -> Any:
        unroll = min(self._spec.config.train.layer_unroll, self._depth)
        return jax.lax.scan(body, start, jnp.arange(self._depth), unroll=unroll, reverse=reverse)[0]

    def _split_residuals(self, backward: Any, known: Any) -> Residuals:
        """The arrays that a layer's backward function holds, but for those that are `known` when it will be called."""
        arrays, tree = jax.tree.flatten(backward)
        places = {id(array): index for index, array in enumerate(jax.tree.leaves(known))}
        sources = [places.get(id(array)) for array in arrays]
        structure = (tree, sources, [(array.shape, array.dtype) for array in arrays])
        assert self._structure is None or self._structure[1:] == structure[1:], "all layers are alike"
        self._structure = structure
        return [array for array, source in zip(arrays, sources, strict=True) if source is None]

    def _join_residuals(self, kept: Residuals, known: Any) -> Any:
        tree, sources, _ = self._structure
        leaves, rest = jax.tree.leaves(known), iter(kept)
        return jax.tree.unflatten(tree, [next(rest) if source is None else leaves[source] for source in sources])
