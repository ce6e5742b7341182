"""Cross-entropy over a large vocabulary without ever holding all logits.

Shapes: T tokens (B · L flattened), C tokens of a chunk, D model, V vocabulary.

The logits of one chunk of tokens exist at a time, in float32. The loss is a sum, so its gradient is known up to
a scalar as soon as the logits are: the forward pass computes it chunk by chunk and the backward pass only
scales it. Nothing is computed twice, and the head's gradient leaves as one array, so that what is gathered or
reduced for the head is so once and not once a chunk.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxmnt.placement.rules import Placement


class LossSums(NamedTuple):
    """Float32 sums over real tokens; divide by the sum of weights once, at the very end."""

    loss: jax.Array  # cross-entropy in nats plus the z-loss term: what is minimised
    cross_entropy: jax.Array


class LossShape(NamedTuple):
    """The static part of the loss."""

    chunks: int
    real_vocab: int
    """Token ids from here on have no logit: the data does not contain them."""
    z_loss: float
    placement: Placement


def chunk_count(tokens: int, vocab_size: int, placement: Placement, limit_mib: int) -> int:
    """Chunks needed to keep a device's float32 logits of one chunk within `limit_mib` MiB."""
    bytes_each = vocab_size // placement.ways("vocab") * 4
    return max(1, min(tokens, -(-tokens * bytes_each // (limit_mib * 2**20))))


def cross_entropy_sums(
    x_BLD: jax.Array, head_DV: jax.Array, targets_BL: jax.Array, weights_BL: jax.Array, shape: LossShape
) -> LossSums:
    """Weighted sums of the cross-entropy of `x @ head` against `targets`.

    x and head are in the compute dtype; weights are float32, 0 where there is no real target. With z the log
    of the partition function, the minimised loss is ce + z_loss · z² (PaLM, arXiv:2204.02311, section 5).
    """
    tokens = targets_BL.size
    size = -(-tokens // shape.chunks)
    pad = shape.chunks * size - tokens

    def chunked(array: jax.Array) -> jax.Array:
        flat = array.reshape(tokens, *array.shape[2:])
        flat = jnp.pad(flat, ((0, pad),) + ((0, 0),) * (flat.ndim - 1)) if pad else flat
        return flat.reshape(shape.chunks, size, *flat.shape[1:])

    return _sums(chunked(x_BLD), head_DV, chunked(targets_BL), chunked(weights_BL), shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _sums(
    x_NCD: jax.Array, head_DV: jax.Array, targets_NC: jax.Array, weights_NC: jax.Array, shape: LossShape
) -> LossSums:
    def add(sums: LossSums, chunk: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[LossSums, None]:
        x_CD, targets_C, weights_C = chunk
        part, _ = _chunk(x_CD, head_DV, targets_C, weights_C, shape)
        return LossSums(*map(jnp.add, sums, part)), None

    return jax.lax.scan(add, _zeros(), (x_NCD, targets_NC, weights_NC))[0]


def _sums_forward(
    x_NCD: jax.Array, head_DV: jax.Array, targets_NC: jax.Array, weights_NC: jax.Array, shape: LossShape
) -> tuple[LossSums, tuple[jax.Array, jax.Array]]:
    def add(
        carry: tuple[LossSums, jax.Array], chunk: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[tuple[LossSums, jax.Array], jax.Array]:
        sums, head_gradient_DV = carry
        x_CD, targets_C, weights_C = chunk
        part, logit_gradient_CV = _chunk(x_CD, head_DV, targets_C, weights_C, shape)
        x_gradient_CD = logit_gradient_CV @ head_DV.T
        head_gradient_DV += jnp.dot(x_CD.T, logit_gradient_CV, preferred_element_type=jnp.float32)
        return (LossSums(*map(jnp.add, sums, part)), head_gradient_DV), x_gradient_CD

    start = (_zeros(), jnp.zeros(head_DV.shape, jnp.float32))
    chunks = (x_NCD, targets_NC, weights_NC)
    (sums, head_gradient_DV), x_gradient_NCD = jax.lax.scan(add, start, chunks)
    return sums, (x_gradient_NCD, head_gradient_DV)


def _sums_backward(
    shape: LossShape, saved: tuple[jax.Array, jax.Array], cotangent: LossSums
) -> tuple[jax.Array, jax.Array, None, None]:
    """The gradient of `loss` alone: `cross_entropy` is for reporting."""
    del shape
    x_gradient_NCD, head_gradient_DV = saved
    scale = cotangent.loss
    dtype = x_gradient_NCD.dtype
    return x_gradient_NCD * scale.astype(dtype), (head_gradient_DV * scale).astype(dtype), None, None


_sums.defvjp(_sums_forward, _sums_backward)


def _zeros() -> LossSums:
    return LossSums(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))


def _chunk(
    x_CD: jax.Array, head_DV: jax.Array, targets_C: jax.Array, weights_C: jax.Array, shape: LossShape
) -> tuple[LossSums, jax.Array]:
    """The sums of one chunk, and the gradient of its loss with respect to its logits, in x's dtype."""
    logits_CV = jnp.dot(x_CD, head_DV, preferred_element_type=jnp.float32)
    logits_CV = shape.placement.constrain(logits_CV, None, "vocab")
    ids_V = jnp.arange(head_DV.shape[1])
    if shape.real_vocab < head_DV.shape[1]:
        logits_CV = jnp.where(ids_V < shape.real_vocab, logits_CV, -jnp.inf)
    largest_C1 = jnp.max(logits_CV, axis=-1, keepdims=True)
    exponentials_CV = jnp.exp(logits_CV - largest_C1)
    partition_C1 = jnp.sum(exponentials_CV, axis=-1, keepdims=True)
    log_z_C = (largest_C1 + jnp.log(partition_C1))[:, 0]
    # A comparison and a sum instead of an index: each device looks only at its part of the vocabulary.
    is_target_CV = targets_C[:, None] == ids_V
    target_logits_C = jnp.sum(jnp.where(is_target_CV, logits_CV, 0), axis=-1)
    cross_entropy = jnp.sum((log_z_C - target_logits_C) * weights_C)
    penalty = shape.z_loss * jnp.sum(jnp.square(log_z_C) * weights_C)
    pull_C1 = (weights_C * (1 + 2 * shape.z_loss * log_z_C))[:, None] / partition_C1
    gradient_CV = exponentials_CV * pull_C1 - jnp.where(is_target_CV, weights_C[:, None], 0)
    return LossSums(cross_entropy + penalty, cross_entropy), gradient_CV.astype(x_CD.dtype)
