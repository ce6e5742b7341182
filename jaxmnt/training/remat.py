"""Residuals: the remat policies that decide what a layer keeps from forward to backward, and the slots that store it.

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
"""The names of activations that `train.remat_save` can keep on the device, and that `train.remat_offload` can keep in
host memory. All are bfloat16 or float32 activations of a layer. layer_input [B, L / model, D] is kept under every
policy. query, key, value and attention are [B, L, heads, head_dim], and mlp_gate and mlp_up are [B, L, mlp], split over
`model`. attention includes its softmax statistics, so that backward does not recompute attention. With mesh.context,
its rows are longer in layers with a window (`models.context_parallel`). The outputs are [B, L / model, D].
whole_sequence are the gathered inputs of attention and MLP, [B, L, D]."""


def recomputes_layers(remat: str) -> bool:
    """Returns True if backward computes parts of layers again under this policy. Attention kernels keep no scores under
    any policy, so `attention` equals `none`."""
    return remat not in ("none", "attention")


class LayerHalf(NamedTuple):
    """A half of a layer. Its forward gathers the input over the length and scatters the output, and its backward runs
    the transposes."""

    output_is_used_inside: bool
    """True if the layer itself uses the half's output, so that recomputing the layer scatters the output again."""

    def collectives(self, remat: str) -> tuple[int, int]:
        """Returns how often each microbatch gathers and scatters in this half under a remat policy. For `names` the
        counts are upper bounds."""
        gathers_again = recomputes_layers(remat)
        scatters_again = gathers_again and remat != "dots" and self.output_is_used_inside
        return 2 + gathers_again, 2 + scatters_again


HALVES = {"attention": LayerHalf(True), "mlp": LayerHalf(False)}
"""The two halves of a layer."""


EXPERT_EXCHANGES = (3, 2)
"""The numbers of gathers and scatters of a group's tokens in a layer of experts, for each microbatch and under every
remat policy: x and the output forward, and x again, the output's gradient and x's gradient backward."""


def layer_collectives(remat: str, *, has_mlp: bool = True) -> tuple[int, int]:
    """Returns how often each microbatch gathers and scatters the activations of a layer over the length. A layer of
    experts has no MLP, and exchanges tokens instead (`EXPERT_EXCHANGES`)."""
    halves = [half.collectives(remat) for name, half in HALVES.items() if has_mlp or name != "mlp"]
    gathers, scatters = zip(*halves, strict=True)
    return sum(gathers), sum(scatters)


def rematerialise(layer: Callable[..., Any], train: Train) -> Callable[..., Any]:
    """Applies the policy of `train.remat` to a layer, and keeps the activations named in `train.remat_offload` in host
    memory. No attention kernel keeps the scores, so the policy `attention` equals `none`."""
    policies, remat = jax.checkpoint_policies, train.remat
    if not recomputes_layers(remat):
        return layer
    is_offloaded = _save_names_policy(train.remat_offload)
    saved_names = {"dots": [PROJECTED, SCATTERED, ATTENTION], "names": train.remat_save, "full": []}[remat]
    is_kept = _save_names_policy(saved_names)
    if remat == "dots":
        is_kept = policies.save_from_both_policies(is_kept, policies.dots_with_no_batch_dims_saveable)

    def policy(primitive: Any, *values: Any, **parameters: Any) -> Any:
        if is_offloaded(primitive, *values, **parameters):
            return _offload_to_host()
        return is_kept(primitive, *values, **parameters)

    # Inside a scan XLA cannot merge the recomputation with the first computation. In an unrolled scan it could.
    return jax.checkpoint(layer, policy=policy, prevent_cse=train.layer_unroll > 1)


def _offload_to_host() -> Any:
    """Returns the value with which a remat policy says that a result is kept in host memory. JAX has policies that
    offload matrix products or named results, but no public constructor for this value."""
    offload_products = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", HOST_MEMORY)
    return offload_products(jax.lax.dot_general_p, dimension_numbers=(((0,), (0,)), ((), ())))


def _save_names_policy(names: list[str]) -> Callable[..., bool]:
    """Returns a checkpoint policy that saves results with these names. If `attention` is one of them, it also saves the
    results of cuDNN's attention primitive, which have no name."""
    has_saved_name = jax.checkpoint_policies.save_only_these_names(*names)
    return lambda primitive, *values, **parameters: bool(
        has_saved_name(primitive, *values, **parameters) or (ATTENTION in names and is_cudnn_attention(primitive))
    )


Residuals = list[Array]
"""The arrays that forward stores for backward."""


def read_slot(residuals: Residuals, slot: Array, offset: Array) -> Residuals:
    """Returns a unit's residuals from a slot. `offset` is the unit's index in its chunk. The residuals are read as
    slices, because slices also work on arrays in host memory."""

    def read(buffer: Array) -> Array:
        return jax.lax.dynamic_slice(buffer, (slot, offset, *[0] * (buffer.ndim - 2)), (1, 1, *buffer.shape[2:]))

    return [_row_major_rows(read(buffer).reshape(buffer.shape[2:])) for buffer in residuals]


def write_slot(residuals: Residuals, unit_residuals: Residuals, slot: Array, offset: Array) -> Residuals:
    """Returns the buffers with a unit's residuals written to a slot. `offset` is the unit's index in its chunk."""

    def write(buffer: Array, array: Array) -> Array:
        return jax.lax.dynamic_update_slice(buffer, array[None, None], (slot, offset, *[0] * array.ndim))

    return [write(buffer, _row_major_rows(array)) for buffer, array in zip(residuals, unit_residuals, strict=True)]


def _row_major_rows(array: Array) -> Array:
    """Constrains an array [rows, length, …] to row-major order if it has several rows. With one row there is only one
    order of the rows, and a constraint would keep XLA from simplifying the program."""
    return row_major(array) if array.ndim > 2 and array.shape[0] > 1 else array


class Backward:
    """A layer's backward function without the arrays that it holds. JAX separates held arguments from other held arrays
    (`args_res` and `opaque_residuals` of jax.vjp). Callers pass all arguments but the last again."""

    def __init__(self, backward: Any, arguments: tuple[Any, ...], *, has_loss: bool):
        """`backward` is a result of `jax.vjp` with these `arguments`. `has_loss` is True if the layer has a loss
        term."""
        self._structure, self._has_loss = jax.tree.structure(backward), has_loss
        # For each argument that the function does not hold, `args_res` has an object that is not an array.
        is_entry = lambda node: node is not None and not isinstance(node, tuple | list | dict)
        entries = jax.tree.leaves(backward.args_res, is_leaf=is_entry)
        assert len(entries) == len(jax.tree.leaves(arguments)), "there is one entry for each argument"
        passed_again_count = len(jax.tree.leaves(arguments[:-1]))
        self._argument_indices = [index for index in range(passed_again_count) if isinstance(entries[index], Array)]
        self.residual_count = len(jax.tree.leaves(backward)) - len(self._argument_indices)

    def residuals(self, backward: Any) -> Residuals:
        """Returns the arrays that `backward` holds, except the arguments that are passed again."""
        return jax.tree.leaves(backward)[len(self._argument_indices) :]

    def __call__(self, residuals: Residuals, arguments: tuple[Any, ...], x_gradient_BSD: Array) -> Any:
        """Returns the gradients of all arguments, of which x is the last. `arguments` has all but x."""
        leaves = jax.tree.leaves(arguments)
        held_arguments = [leaves[index] for index in self._argument_indices]
        backward = jax.tree.unflatten(self._structure, held_arguments + residuals)
        return backward((x_gradient_BSD, jnp.ones(()) if self._has_loss else None))
