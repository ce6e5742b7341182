"""Communication between the stages of a pipeline, for use inside the step's shard_map. A single stage costs nothing.

A step needs the embedding of a microbatch on the first stage, and its loss from the output of the last stage. All
stages share this work, in one of two ways (`Placement.divides_tokens`):

- Each stage has a part of the vocabulary, and computes all tokens. The last stage's output is broadcast, and the
  embeddings of all stages are summed.
- Each stage has the whole vocabulary, and computes a share of the tokens. The last stage's output is scattered, and the
  embeddings are gathered, which sends half of the bytes. A step begins by gathering the tables, of which each stage
  stores a piece, and ends by summing and scattering their gradients.

Shapes: B rows of a microbatch, L length, S a device's piece of the length, N pieces of a row, T tokens of a stage's
share of a piece, D model. If stages divide the vocabulary, [1, T] stands for [B, S], and [1, N · T] for [B, L].
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxmnt.config.mesh import STAGE_AXIS
from jaxmnt.parallel import collectives
from jaxmnt.parallel.sharding import Axes, Placement, is_axes


def stage_index() -> Array:
    """Returns the index of this device's pipeline stage."""
    return jax.lax.axis_index(STAGE_AXIS)


def shift_stage(x: Array, placement: Placement, *, forward: bool, circular: bool) -> Array:
    """Sends x to the next stage if `forward`, else to the previous one. If `circular`, the stages form a ring;
    otherwise the stage at one end receives zeros. The transpose sends in the other direction."""
    stages = placement.stages
    pairs = [(stage, (stage + 1) % stages) for stage in range(stages if circular else stages - 1)]
    reverse_pairs = [(target, source) for source, target in pairs]
    if not forward:
        pairs, reverse_pairs = reverse_pairs, pairs
    send = lambda x: jax.lax.ppermute(x, STAGE_AXIS, pairs)
    send_back = lambda gradient: jax.lax.ppermute(gradient, STAGE_AXIS, reverse_pairs)
    return collectives.with_transpose(send, send_back)(x)


# -- a stage's share of a microbatch


def sum_over_shares(tree: Any, placement: Placement) -> Any:
    """Sums each leaf of a tree over the stages if each has computed it for its share of tokens. It has no gradient."""
    return jax.lax.psum(tree, STAGE_AXIS) if placement.divides_tokens else tree


def share_of_tokens(field_BL: Array, placement: Placement) -> Array:
    """Returns this stage's share of a field of rows, [1, N · T], which may end with zeros. It is in the order in which
    `gather_sequence` returns the activations of the share."""
    if not placement.divides_tokens:
        return field_BL
    pieces = collectives.cut_into_pieces(field_BL, placement).reshape(placement.num_shards("sequence"), -1)
    padded = _pad_for_stages(pieces, placement, dimension=1)
    size = padded.shape[1] // placement.stages
    share_NT = jax.lax.dynamic_slice_in_dim(padded, stage_index() * size, size, axis=1)
    return share_NT.reshape(1, -1)


def distribute_from_stage(x_BSD: Array, stage: int, placement: Placement) -> Array:
    """Returns what this stage needs of the activations of `stage`, [1, T, D]: all of them, or its share. The transpose
    is `collect_on_stage`."""
    if placement.stages == 1:
        return x_BSD
    # The other stages add zeros, so each sum has one term.
    masked_BSD = _mask_other_stages(x_BSD, stage)
    if not placement.divides_tokens:
        return collectives.sum_over_axes(masked_BSD, _STAGES)
    x_TD = _pad_for_stages(masked_BSD.reshape(-1, x_BSD.shape[-1]), placement, dimension=0)
    return _SCATTER(x_TD)[None]


def collect_on_stage(x_1TD: Array, stage: int, shape: tuple[int, int], placement: Placement) -> Array:
    """Returns activations [B, S, D] on `stage` from what all stages have computed, parts of sums or shares of tokens,
    and zeros on the other stages. `shape` is (B, S). The transpose is `distribute_from_stage`."""
    if placement.stages == 1:
        return x_1TD
    if not placement.divides_tokens:
        return _mask_other_stages(collectives.sum_over_axes(x_1TD, _STAGES), stage)
    rows, length = shape
    x_TD = _GATHER(x_1TD[0])[: rows * length]
    return _mask_other_stages(x_TD.reshape(rows, length, -1), stage)


_STAGES = (STAGE_AXIS,)
_GATHER, _SCATTER = collectives.gather_and_scatter(_STAGES, dimension=0)


def _mask_other_stages(x: Array, stage: int) -> Array:
    """Returns x on `stage` and zeros on the other stages."""
    return jnp.where(stage_index() == stage, x, jnp.zeros_like(x))


def _pad_for_stages(x: Array, placement: Placement, dimension: int) -> Array:
    """Returns x with zeros at the end of a dimension, so that the stages can divide it."""
    padding = -x.shape[dimension] % placement.stages
    widths = [(0, padding if index == dimension else 0) for index in range(x.ndim)]
    return jnp.pad(x, widths) if padding else x


# -- the tables at the ends of the model


def unshard_over_stages(params: Any, axes: Any, placement: Placement, dtype: jnp.dtype) -> Any:
    """Gathers from the stages, in the compute dtype, those of the parameters of which each stage stores a piece. Norm
    scales and routers become float32."""

    def unshard(piece: Array, names: Axes) -> Array:
        dimension = placement.dimension_over_stages(names)
        if dimension is None:
            return piece
        return collectives.gather_weight(piece.astype(collectives.dtype_in_use(names, dtype)), _STAGES, dimension)

    return jax.tree.map(unshard, params, axes, is_leaf=is_axes)


def reshard_over_stages(gradients: Any, axes: Any, placement: Placement, reduce_dtype: jnp.dtype) -> Any:
    """Sums over the stages the gradients of the parameters that `unshard_over_stages` gathers, in `reduce_dtype`.
    Returns this stage's pieces of the sums, in float32."""

    def reshard(gradient: Array, names: Axes) -> Array:
        dimension = placement.dimension_over_stages(names)
        if dimension is None:
            return gradient
        return collectives.scatter_gradient(gradient, _STAGES, dimension, reduce_dtype)

    return jax.tree.map(reshard, gradients, axes, is_leaf=is_axes)
