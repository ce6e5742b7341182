"""Cross-entropy over a large vocabulary without ever holding all logits.

Shapes: T tokens (B · L flattened), C tokens of a chunk, D model, V a device's part of the vocabulary.

The logits of one chunk of tokens exist at a time, in float32, and of the vocabulary each device of the axes that split
it has a part: what crosses devices is a maximum and two sums a token. The loss is a sum, so its gradient is known up to
a scalar as soon as the logits are, and is computed with it. Nothing is computed twice, and the head's gradient leaves
as one array, so that the head is gathered and reduced once, and not once a chunk.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxmnt.parallel.collectives import index_along, max_over, sum_over
from jaxmnt.parallel.sharding import Placement


class LossSums(NamedTuple):
    """Float32 sums over real tokens; divide by the sum of weights once, at the very end."""

    loss: jax.Array  # cross-entropy in nats plus the z-loss term: what is minimised
    cross_entropy: jax.Array


class LossShape(NamedTuple):
    """The static part of the loss."""

    chunks: int
    data_vocab_size: int
    """Token ids from here on have no logit: the data does not contain them."""
    z_loss: float
    placement: Placement


def chunk_count(tokens: int, vocab_size: int, placement: Placement, limit_mib: int) -> int:
    """Chunks needed to keep a device's float32 logits of one chunk within `limit_mib` MiB."""
    bytes_each = -(-vocab_size // placement.num_shards("vocab")) * 4
    return max(1, min(tokens, -(-tokens * bytes_each // (limit_mib * 2**20))))


class LossGradients(NamedTuple):
    """Of the summed loss, before the parts of the vocabulary are added up."""

    x: jax.Array  # [B, L, D] in x's dtype
    head: jax.Array  # [D, V] in float32


def cross_entropy(
    x_BLD: jax.Array, head_DV: jax.Array, targets_BL: jax.Array, weights_BL: jax.Array, shape: LossShape
) -> LossSums:
    """Weighted sums of the cross-entropy of `x @ head` against `targets`.

    x and head are in the compute dtype; weights are float32, 0 where there is no real target. With z the log
    of the partition function, the minimised loss is ce + z_loss · z² (PaLM, arXiv:2204.02311, section 5).
    """

    def add(sums: LossSums, chunk: tuple[jax.Array, ...]) -> tuple[LossSums, None]:
        x_CD, targets_C, weights_C = chunk
        part, _ = _chunk(x_CD, head_DV, targets_C, weights_C, shape)
        return LossSums(*map(jnp.add, sums, part)), None

    chunks = tuple(_chunked(array, shape.chunks) for array in (x_BLD, targets_BL, weights_BL))
    return jax.lax.scan(add, no_loss(), chunks)[0]


def cross_entropy_and_gradients(
    x_BLD: jax.Array, head_DV: jax.Array, targets_BL: jax.Array, weights_BL: jax.Array, shape: LossShape
) -> tuple[LossSums, LossGradients]:
    """`cross_entropy` and its gradients with respect to x and this device's part of the head."""

    def add(
        carry: tuple[LossSums, jax.Array], chunk: tuple[jax.Array, ...]
    ) -> tuple[tuple[LossSums, jax.Array], jax.Array]:
        sums, head_gradient_DV = carry
        x_CD, targets_C, weights_C = chunk
        part, logit_gradient_CV = _chunk(x_CD, head_DV, targets_C, weights_C, shape)
        x_gradient_CD = logit_gradient_CV @ head_DV.T
        head_gradient_DV += jnp.dot(x_CD.T, logit_gradient_CV, preferred_element_type=jnp.float32)
        return (LossSums(*map(jnp.add, sums, part)), head_gradient_DV), x_gradient_CD

    start = (no_loss(), jnp.zeros(head_DV.shape, jnp.float32))
    chunks = tuple(_chunked(array, shape.chunks) for array in (x_BLD, targets_BL, weights_BL))
    (sums, head_gradient_DV), x_gradient_NCD = jax.lax.scan(add, start, chunks)
    x_gradient_TD = x_gradient_NCD.reshape(-1, x_BLD.shape[-1])[: targets_BL.size]
    return sums, LossGradients(x_gradient_TD.reshape(x_BLD.shape), head_gradient_DV)


def no_loss() -> LossSums:
    """Sums over nothing."""
    return LossSums(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))


def _chunked(array: jax.Array, chunks: int) -> jax.Array:
    """[B, L, …] → [chunks, C, …], with zeros after the last token."""
    tokens = array.shape[0] * array.shape[1]
    size = -(-tokens // chunks)
    flat = array.reshape(tokens, *array.shape[2:])
    if pad := chunks * size - tokens:
        flat = jnp.pad(flat, ((0, pad),) + ((0, 0),) * (flat.ndim - 1))
    return flat.reshape(chunks, size, *flat.shape[1:])


def _chunk(
    x_CD: jax.Array, head_DV: jax.Array, targets_C: jax.Array, weights_C: jax.Array, shape: LossShape
) -> tuple[LossSums, jax.Array]:
    """The sums of one chunk, and the gradient of its loss with respect to its logits, in x's dtype."""
    placement = shape.placement
    logits_CV = jnp.dot(x_CD, head_DV, preferred_element_type=jnp.float32)
    size = head_DV.shape[1]
    ids_V = index_along("vocab", placement) * size + jnp.arange(size)
    if shape.data_vocab_size < size * placement.num_shards("vocab"):
        logits_CV = jnp.where(ids_V < shape.data_vocab_size, logits_CV, -jnp.inf)
    largest_C1 = max_over("vocab", jnp.max(logits_CV, axis=-1, keepdims=True), placement)
    exponentials_CV = jnp.exp(logits_CV - largest_C1)
    # A comparison and a sum instead of an index: each device looks only at its part of the vocabulary.
    is_target_CV = targets_C[:, None] == ids_V
    both_2C = jnp.stack([jnp.sum(exponentials_CV, axis=-1), jnp.sum(jnp.where(is_target_CV, logits_CV, 0), axis=-1)])
    partition_C, target_logits_C = sum_over("vocab", both_2C, placement)
    log_z_C = largest_C1[:, 0] + jnp.log(partition_C)
    cross_entropy = jnp.sum((log_z_C - target_logits_C) * weights_C)
    penalty = shape.z_loss * jnp.sum(jnp.square(log_z_C) * weights_C)
    scale_C1 = (weights_C * (1 + 2 * shape.z_loss * log_z_C) / partition_C)[:, None]
    gradient_CV = exponentials_CV * scale_C1 - jnp.where(is_target_CV, weights_C[:, None], 0)
    return LossSums(cross_entropy + penalty, cross_entropy), gradient_CV.astype(x_CD.dtype)
