"""What a layer keeps from forward to backward (remat policies), and in which places.

Shapes: B batch, L length, D model.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxmnt.config.schema import Train
from jaxmnt.models.blockwise import ATTENTION
from jaxmnt.models.cudnn import is_cudnn_attention
from jaxmnt.parallel.collectives import PROJECTED, SCATTERED, row_major
from jaxmnt.training.state import HOST_MEMORY

NAMES = (
    "layer_input", "query", "key", "value", ATTENTION, "attention_output", "mlp_gate", "mlp_up", "mlp_output",
    "whole_sequence",
)  # fmt: skip
"""What `train.remat_save` may keep, and `train.remat_offload` in host memory. All of these are bfloat16 or float32
activations of a layer: layer_input [B, L / model, D], which is kept under every policy; query, key, value, attention
[B, L, heads, head_dim] (with its softmax statistics, so that backward does not attend again), mlp_gate and mlp_up
[B, L, mlp], split over `model`; the outputs [B, L / model, D]; whole_sequence, the gathered inputs of attention and MLP
[B, L, D]."""


class LayerHalf(NamedTuple):
    """A half of a layer: forward gathers its input over the length and scatters its output, and backward does the
    transposes."""

    output_is_used_inside: bool
    """Whether the layer itself goes on from the output, so that a layer that is computed again scatters it again."""

    def collectives(self, remat: str) -> tuple[int, int]:
        """Returns how often a microbatch gathers and scatters here under a policy; `names` does at most so much."""
        again = remat not in ("none", "attention")
        return 2 + again, 2 + (again and remat != "dots" and self.output_is_used_inside)


HALVES = {"attention": LayerHalf(True), "mlp": LayerHalf(False)}
"""Of a layer."""


def layer_collectives(remat: str) -> tuple[int, int]:
    """Returns how often a microbatch gathers and scatters the activations of a layer over the length."""
    gathers, scatters = zip(*(half.collectives(remat) for half in HALVES.values()), strict=True)
    return sum(gathers), sum(scatters)


def rematerialise(layer: Callable[..., Any], train: Train) -> Callable[..., Any]:
    """Applies the policy of `train.remat` to a layer, with what `train.remat_offload` names kept in host memory. No
    kernel keeps attention's scores, so `attention` is `none`."""
    policies, remat = jax.checkpoint_policies, train.remat
    if remat in ("none", "attention"):
        return layer
    is_offloaded = _is_named(train.remat_offload)
    is_kept = _is_named({"dots": [PROJECTED, SCATTERED, ATTENTION], "names": train.remat_save, "full": []}[remat])
    if remat == "dots":
        is_kept = policies.save_from_both_policies(is_kept, policies.dots_with_no_batch_dims_saveable)

    def policy(primitive: Any, *values: Any, **parameters: Any) -> Any:
        if is_offloaded(primitive, *values, **parameters):
            return _to_host()
        return is_kept(primitive, *values, **parameters)

    # Inside a scan XLA cannot merge the recomputation with the first computation; unrolled, it could.
    return jax.checkpoint(layer, policy=policy, prevent_cse=train.layer_unroll > 1)


def _to_host() -> Any:
    """What a policy returns for what is kept in host memory. JAX has policies that offload products, or names, and no
    public word for this."""
    offload_products = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", HOST_MEMORY)
    return offload_products(jax.lax.dot_general_p, dimension_numbers=(((0,), (0,)), ((), ())))


def _is_named(names: list[str]) -> Callable[..., bool]:
    """A policy for what has one of these names; of what cuDNN gives, attention's."""
    named = jax.checkpoint_policies.save_only_these_names(*names)
    return lambda primitive, *values, **parameters: bool(
        named(primitive, *values, **parameters) or (ATTENTION in names and is_cudnn_attention(primitive))
    )


Residuals = list[Array]
"""What forward leaves for backward."""


def read_slot(residuals: Residuals, slot: Array, offset: Array) -> Residuals:
    """What a unit has left in a slot. By slices, which arrays in host memory have too."""
    cut = lambda one: jax.lax.dynamic_slice(one, (slot, offset, *[0] * (one.ndim - 2)), (1, 1, *one.shape[2:]))
    return [_in_order(cut(one).reshape(one.shape[2:])) for one in residuals]


def write_slot(residuals: Residuals, kept: Residuals, slot: Array, offset: Array) -> Residuals:
    """With what a unit leaves."""
    put = lambda one, new: jax.lax.dynamic_update_slice(one, new[None, None], (slot, offset, *[0] * new.ndim))
    return [put(one, _in_order(new)) for one, new in zip(residuals, kept, strict=True)]


def _in_order(array: Array) -> Array:
    """[rows, length, …] of several rows. Of one there is only one order, and to ask for it would keep XLA from
    simplifying."""
    return row_major(array) if array.ndim > 2 and array.shape[0] > 1 else array


class Backward:
    """A layer's backward function without arrays. JAX keeps apart which of its arguments it holds and what else
    (jax.vjp's `args_res` and `opaque_residuals`): all arguments but the last are given again when it is called."""

    def __init__(self, backward: Any, arguments: tuple[Any, ...], *, loss: bool):
        self._tree, self._loss = jax.tree.structure(backward), loss
        # In place of an argument that it does not hold there is an object that is no array.
        is_entry = lambda node: node is not None and not isinstance(node, tuple | list | dict)
        entries = jax.tree.leaves(backward.args_res, is_leaf=is_entry)
        assert len(entries) == len(jax.tree.leaves(arguments)), "an entry for each argument"
        given = len(jax.tree.leaves(arguments[:-1]))
        self._given = [index for index in range(given) if isinstance(entries[index], Array)]
        self.count = len(jax.tree.leaves(backward)) - len(self._given)

    def kept(self, backward: Any) -> Residuals:
        """The arrays that it holds, but for those that will be given again."""
        return jax.tree.leaves(backward)[len(self._given) :]

    def __call__(self, kept: Residuals, arguments: tuple[Any, ...], x_gradient_BSD: Array) -> Any:
        """The gradients of all arguments and of x."""
        given = jax.tree.leaves(arguments)
        backward = jax.tree.unflatten(self._tree, [given[index] for index in self._given] + kept)
        return backward((x_gradient_BSD, jnp.ones(()) if self._loss else None))
