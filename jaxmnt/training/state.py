"""The train state: what is in it, and the shapes, dtypes and shardings of it as it is placed and as it is stored.

Its parts have names (params, optimizer, counters, bad_steps, and buffers if the model has some). A later part is one
more name: checkpoints that lack it are still read, and what it holds begins as in a new run.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from jaxmnt.parallel.layout import map_with_axes
from jaxmnt.parallel.sharding import Axes, is_axes
from jaxmnt.training.spec import State, StepSpec
from jaxmnt.training.trained import select

HOST_MEMORY = "pinned_host"


@dataclass(frozen=True)
class OneLeaf:
    """Logical axes that tree functions take for one leaf."""

    axes: Axes


def initial_state(spec: StepSpec) -> State:
    definition, place = spec.definition, spec.layout.to_device_layout
    params, buffers = definition.init(jax.random.key(spec.config.seed))
    params = jax.tree.map(lambda leaf: leaf.astype(spec.params_dtype), params)
    params = map_with_axes(place, params, definition.axes)
    state = {
        "params": params,
        "optimizer": spec.optimizer.init(select(params, spec.trained_axes)),
        "counters": {"step": jnp.int32(0)},
        "bad_steps": {"total": jnp.int32(0), "in_a_row": jnp.int32(0)},
    }
    return state | ({"buffers": map_with_axes(place, buffers, definition.buffer_axes)} if buffers else {})


def abstract_state(spec: StepSpec) -> State:
    """Shapes, dtypes and shardings of the state; optimizer state is sharded like its parameter."""
    abstract = jax.eval_shape(lambda: initial_state(spec))
    state = with_axes(spec, abstract, lambda leaf, axes: shaped(leaf, spec.placement.sharding(axes)))
    if spec.config.optimizer.offload:
        to_host = lambda leaf: shaped(leaf, leaf.sharding.with_memory_kind(HOST_MEMORY)) if leaf.ndim else leaf
        state["optimizer"] = jax.tree.map(to_host, state["optimizer"])
    return state


def canonical_abstract(spec: StepSpec, state: State) -> State:
    """The abstract state as it is stored, from the one as it is placed."""
    layout = spec.layout

    def one(leaf: Any, axes: Axes) -> Any:
        if not layout.moves(axes):
            return leaf
        plain = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        canonical = jax.eval_shape(lambda array: layout.to_checkpoint_layout(array, axes), plain)
        sharding = layout.canonical_sharding(canonical.shape, axes)
        return shaped(canonical, sharding.with_memory_kind(leaf.sharding.memory_kind))

    return with_axes(spec, state, one)


def model_state(state: State) -> State:
    """The parts of the state that the model is: without what only training needs."""
    return {part: state[part] for part in ("params", "buffers") if part in state}


def moving_bytes(spec: StepSpec, state: State) -> int:
    """Extra bytes on a device during a save: arrays whose layout in a checkpoint is another than on the device."""
    stored = canonical_abstract(spec, state)
    pairs = zip(jax.tree.leaves(stored), jax.tree.leaves(state), strict=True)
    return sum(bytes_a_device(new) for new, placed in pairs if new is not placed)


def with_axes(spec: StepSpec, state: State, function: Callable[[Any, Axes], Any]) -> State:
    """`function(leaf, axes)` for each leaf of the state; optimizer state has the axes of its parameter."""
    is_masked = lambda node: isinstance(node, optax.MaskedNode)  # a parameter of another kind of optimizer
    axes = jax.tree.map(OneLeaf, spec.trained_axes, is_leaf=is_axes)
    optimizer = optax.tree_map_params(
        spec.optimizer,
        lambda leaf, named: leaf if is_masked(leaf) else function(leaf, named.axes),
        state["optimizer"],
        axes,
        transform_non_params=lambda leaf: function(leaf, ()),
        is_leaf=is_masked,
    )
    arrays = {"params": spec.definition.axes, "buffers": spec.definition.buffer_axes}
    return {
        **{part: map_with_axes(function, state[part], axes) for part, axes in arrays.items() if part in state},
        "optimizer": optimizer,
        **{part: jax.tree.map(lambda leaf: function(leaf, ()), state[part]) for part in ("counters", "bad_steps")},
    }


def numbers_a_device(leaf: Any) -> int:
    """How many numbers of an array are on a device."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape))


def bytes_a_device(tree: Any) -> int:
    return sum(leaf.dtype.itemsize * numbers_a_device(leaf) for leaf in jax.tree.leaves(tree))


def float32_bytes(tree: Any) -> int:
    """Of a tree of float32 arrays like this one on a device, such as gradients."""
    return 4 * sum(map(numbers_a_device, jax.tree.leaves(tree)))


def stored_bytes(canonical: State) -> int:
    """Bytes of the whole state as it is stored."""
    return sum(leaf.dtype.itemsize * math.prod(leaf.shape) for leaf in jax.tree.leaves(canonical))


def shaped(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
