"""The train state: its parts, and their shapes, dtypes and shardings in the device layout and the checkpoint layout.

Each part has a name: params, optimizer, counters, bad_steps, buffers if the model has some, and average if the
parameters are averaged. A part that is added later gets a new name. Checkpoints without that part can still be read,
and it then starts as in a new run.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from jaxmnt.models.contract import Params
from jaxmnt.parallel.layout import map_with_axes
from jaxmnt.parallel.sharding import Axes, is_axes
from jaxmnt.training.spec import State, StepSpec
from jaxmnt.training.trained import replace_trained, select_trained

HOST_MEMORY = "pinned_host"
"""JAX's name for the memory of a device's host."""


@dataclass(frozen=True)
class AxesLeaf:
    """Logical axes, wrapped so that tree functions treat them as one leaf."""

    axes: Axes


def initial_state(spec: StepSpec) -> State:
    """Returns the state before the first step, in the device layout."""
    definition, to_device_layout = spec.definition, spec.layout.to_device_layout
    params, buffers = definition.init(jax.random.key(spec.config.seed))
    params = map_with_axes(to_device_layout, _in_stored_dtypes(spec, params), definition.axes)
    state = {
        "params": params,
        "optimizer": spec.optimizer.init(select_trained(params, spec.trained_axes)),
        "counters": {"step": jnp.int32(0)},
        "bad_steps": {"total": jnp.int32(0), "in_a_row": jnp.int32(0)},
    }
    if buffers:
        state["buffers"] = map_with_axes(to_device_layout, buffers, definition.buffer_axes)
    if spec.config.optimizer.average is not None:
        state["average"] = first_average(spec, params)
    return state


def _in_stored_dtypes(spec: StepSpec, params: Params) -> Params:
    """Returns the parameters in the dtypes in which devices store them."""
    trained = jax.tree.map(lambda leaf: leaf.astype(spec.params_dtype), params)
    if spec.config.lora is None:
        return trained
    base = map_with_axes(lambda leaf, names: leaf.astype(spec.base_dtype(names)), params, spec.definition.axes)
    return replace_trained(base, trained, spec.trained_axes)


def first_average(spec: StepSpec, params: Params) -> Params:
    """Returns the average that begins with these parameters: copies, float32, of those that train."""
    return jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32, copy=True), select_trained(params, spec.trained_axes))


def abstract_state(spec: StepSpec) -> State:
    """Returns the shapes, dtypes and shardings of the state in the device layout. The optimizer state of a parameter is
    sharded like the parameter."""
    abstract = jax.eval_shape(lambda: initial_state(spec))
    state = map_state_with_axes(spec, abstract, lambda leaf, axes: shape_struct(leaf, spec.placement.sharding(axes)))
    if spec.config.optimizer.offload:
        to_host = lambda leaf: shape_struct(leaf, leaf.sharding.with_memory_kind(HOST_MEMORY)) if leaf.ndim else leaf
        state["optimizer"] = jax.tree.map(to_host, state["optimizer"])
    return state


def canonical_abstract(spec: StepSpec, state: State) -> State:
    """Converts the abstract state from the device layout to the checkpoint layout."""
    layout = spec.layout

    def canonical_leaf(leaf: Any, axes: Axes) -> Any:
        if not layout.changes(axes):
            return leaf
        without_sharding = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        canonical = jax.eval_shape(lambda array: layout.to_checkpoint_layout(array, axes), without_sharding)
        sharding = layout.canonical_sharding(canonical.shape, axes)
        return shape_struct(canonical, sharding.with_memory_kind(leaf.sharding.memory_kind))

    return map_state_with_axes(spec, state, canonical_leaf)


def model_state(state: State) -> State:
    """Returns the parts of the state that belong to the model, without those that only training needs."""
    return {part: state[part] for part in ("params", "buffers") if part in state}


def saved_state(spec: StepSpec, state: State) -> State:
    """Returns the part of the state that checkpoints contain, with None in place of the frozen parameters of a run with
    adapters."""
    if spec.config.lora is None:
        return state
    return state | {"params": select_trained(state["params"], spec.trained_axes)}


def relayout_bytes(spec: StepSpec, state: State) -> int:
    """Returns the number of extra bytes that a save needs on a device for copies of the arrays whose checkpoint layout
    differs from the device layout."""
    canonical_state = saved_state(spec, canonical_abstract(spec, state))
    pairs = zip(jax.tree.leaves(canonical_state), jax.tree.leaves(saved_state(spec, state)), strict=True)
    return sum(bytes_per_device(new_leaf) for new_leaf, old_leaf in pairs if new_leaf is not old_leaf)


def map_state_with_axes(spec: StepSpec, state: State, function: Callable[[Any, Axes], Any]) -> State:
    """Returns the tree of `function(leaf, leaf_axes)` for the leaves of the state. The optimizer state of a parameter
    has the parameter's axes."""
    is_masked = lambda node: isinstance(node, optax.MaskedNode)  # a parameter that another optimizer updates
    trained_axes = jax.tree.map(AxesLeaf, spec.trained_axes, is_leaf=is_axes)
    optimizer = optax.tree_map_params(
        spec.optimizer,
        lambda leaf, axes_leaf: leaf if is_masked(leaf) else function(leaf, axes_leaf.axes),
        state["optimizer"],
        trained_axes,
        transform_non_params=lambda leaf: function(leaf, ()),
        is_leaf=is_masked,
    )
    axes_of_parts = {
        "params": spec.definition.axes,
        "buffers": spec.definition.buffer_axes,
        "average": spec.trained_axes,
    }
    return {
        **{part: map_with_axes(function, state[part], axes) for part, axes in axes_of_parts.items() if part in state},
        "optimizer": optimizer,
        **{part: jax.tree.map(lambda leaf: function(leaf, ()), state[part]) for part in ("counters", "bad_steps")},
    }


def elements_per_device(leaf: Any) -> int:
    """Returns the number of elements of an array that are on one device."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape))


def bytes_per_device(tree: Any) -> int:
    """Returns the size in bytes of one device's part of a tree of arrays."""
    return sum(leaf.dtype.itemsize * elements_per_device(leaf) for leaf in jax.tree.leaves(tree))


def float32_bytes(tree: Any) -> int:
    """Returns the size in bytes of one device's part of a tree of arrays, such as gradients, if they are float32."""
    return 4 * sum(map(elements_per_device, jax.tree.leaves(tree)))


def stored_bytes(canonical: State) -> int:
    """Returns the size in bytes of the whole state in the checkpoint layout."""
    return sum(leaf.dtype.itemsize * math.prod(leaf.shape) for leaf in jax.tree.leaves(canonical))


def shape_struct(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    """Returns an abstract array with the shape and dtype of `leaf` and with this sharding."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
