"""The loss over a large vocabulary, without ever holding all logits in memory.

Shapes: T tokens (B · L flattened), C tokens of a chunk, D model, V a device's part of the vocabulary.

Only the logits of one chunk of tokens exist at a time, in float32, and each device has its part of the vocabulary. A
loss is a differentiable function of one chunk's `Logits`, whose methods return results over the whole vocabulary: per
token, devices exchange one maximum and four sums. The loss is a sum, so its gradient is known up to a scalar as soon as
the logits are, and is computed with them. Nothing is computed twice, and the head's gradient is one array, so that the
head is gathered and reduced once rather than once per chunk.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxmnt.config.own_code import import_dotted
from jaxmnt.config.schema import Train
from jaxmnt.errors import ConfigError, printable
from jaxmnt.models.layers import zeros_after
from jaxmnt.parallel.collectives import index_along, max_over, share_of, sum_over, with_backward
from jaxmnt.parallel.sharding import Placement


class LossSums(NamedTuple):
    """Float32 sums over real tokens; divide by the sum of weights once, at the very end."""

    loss: Array
    """The minimised loss."""
    cross_entropy: Array
    """The reported cross-entropy in nats."""

    def plus(self, new: "LossSums") -> "LossSums":
        """Returns the sums over the tokens of both."""
        return LossSums(*map(jnp.add, self, new))


@dataclass(frozen=True)
class Logits:
    """The logits of a chunk of tokens, for the token ids that this device has.

    The results of its methods are replicated over the devices that share the vocabulary. These devices all compute the
    same loss from them and each counts a share of it, so the gradient that comes back is partial.
    """

    values_CV: Array
    """Float32 logits; minus infinity for token ids that do not occur in the data."""
    ids_V: Array
    """The token ids that this device has."""
    placement: Placement

    def log_sum_exp(self) -> Array:
        """Returns the logarithm of the partition function, [C]."""
        return _log_sum_exp(self.placement, self.values_CV)

    def pick(self, ids_C: Array) -> Array:
        """Returns the logit of one id for each token, [C]."""
        # A comparison and a sum instead of an index: each device looks only at its part of the vocabulary.
        return self.weighted(ids_C[:, None] == self.ids_V)

    def weighted(self, weights_CV: Array) -> Array:
        """Returns the sum of all logits times weights, [C]; `weights_CV` are those of this device's `ids_V`. Logits of
        token ids that do not occur in the data count as 0."""
        counts_CV = (weights_CV != 0) & (self.values_CV != -jnp.inf)
        product_CV = jnp.where(counts_CV, self.values_CV, 0) * weights_CV
        return sum_over("vocab", jnp.sum(product_CV, axis=-1), self.placement)


def logits_of(values_CV: Array, data_vocab_size: int, placement: Placement) -> Logits:
    """Returns the `Logits` of this device's part of the vocabulary, masked to the token ids in the data."""
    size = values_CV.shape[1]
    ids_V = index_along("vocab", placement) * size + jnp.arange(size)
    if data_vocab_size < size * placement.num_shards("vocab"):
        values_CV = jnp.where(ids_V < data_vocab_size, values_CV, -jnp.inf)
    return Logits(values_CV, ids_V, placement)


Tokens = dict[str, Array]
"""The fields of a batch for the tokens of a chunk, [C] each: tokens, targets, weights, segments, positions."""

Loss = Callable[[Logits, Tokens, Train], LossSums]


def cross_entropy(logits: Logits, tokens: Tokens, train: Train) -> LossSums:
    """Returns the cross-entropy against `targets`, each times its weight, which is 0 where there is no real target.

    With z the logarithm of the partition function, the minimised loss is ce + z_loss · z² (PaLM, arXiv:2204.02311,
    section 5).
    """
    log_z_C = logits.log_sum_exp()
    entropy = jnp.sum((log_z_C - logits.pick(tokens["targets"])) * tokens["weights"])
    penalty = train.z_loss * jnp.sum(jnp.square(log_z_C) * tokens["weights"])
    return LossSums(entropy + penalty, entropy)


def load_loss(path: str | None) -> Loss:
    """Returns the loss at a dotted path; cross-entropy by default. Raises `ConfigError` if the path has no function."""
    if path is None:
        return cross_entropy
    loss = import_dotted(path, "train.loss", "a function")
    if not callable(loss):
        raise ConfigError(f"train.loss: {printable(path)} must be a function, but is a {type(loss).__name__}")
    return loss


def _log_sum_exp_gradient(placement: Placement, saved: tuple[Array, Array], gradient_C: Array) -> tuple[Array]:
    exponentials_CV, partition_C = saved
    return (exponentials_CV * (sum_over("vocab", gradient_C, placement) / partition_C)[:, None],)


@with_backward(_log_sum_exp_gradient, static=1)
def _log_sum_exp(placement: Placement, logits_CV: Array) -> tuple[Array, tuple[Array, Array]]:
    largest_C1 = max_over("vocab", jnp.max(logits_CV, axis=-1, keepdims=True), placement)
    exponentials_CV = jnp.exp(logits_CV - largest_C1)
    partition_C = sum_over("vocab", jnp.sum(exponentials_CV, axis=-1), placement)
    return largest_C1[:, 0] + jnp.log(partition_C), (exponentials_CV, partition_C)


# -- chunk by chunk


class HeadWeights(NamedTuple):
    """Parameters of the head: the matrix, and its other parameters, such as a bias. Their gradients have their own
    dtype."""

    matrix_DV: Array
    rest: Any


@dataclass(frozen=True)
class LossChunks:
    """The static part of a chunked loss."""

    chunks: int
    data_vocab_size: int
    """Token ids from here on have no logit, because the data does not contain them."""
    dtype: jnp.dtype
    """The dtype in which x and the matrix are multiplied."""
    placement: Placement
    finish: Callable[[Any, Array], Array]
    """Maps (other parameters of the head, product [C, V] in float32) to logits."""
    loss: Callable[[Logits, Tokens], LossSums]


def chunk_count(tokens: int, vocab_size: int, placement: Placement, limit_mib: int) -> int:
    """Returns the number of chunks that keeps a device's float32 logits of one chunk within `limit_mib` MiB."""
    bytes_per_token = -(-vocab_size // placement.num_shards("vocab")) * 4
    return max(1, min(tokens, -(-tokens * bytes_per_token // (limit_mib * 2**20))))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def chunked_loss(chunks: LossChunks, x_BLD: Array, head: HeadWeights, rows: Tokens) -> LossSums:
    """Returns the sums of the loss of `x @ matrix` for all tokens of the rows [B, L]; x is in the compute dtype.

    Only `loss` has a gradient. The gradient of x is partial over the axes that split the vocabulary.
    """

    def add(sums: LossSums, chunk: tuple[Array, Tokens]) -> tuple[LossSums, None]:
        x_CD, tokens = chunk
        product_CV = _matmul(x_CD, matrix_DV)
        return sums.plus(_chunk_loss(chunks, head.rest, product_CV, tokens)), None

    matrix_DV = head.matrix_DV.astype(chunks.dtype)
    return jax.lax.scan(add, no_loss(), _cut_rows(chunks, x_BLD, rows))[0]


def _with_gradients(
    chunks: LossChunks, x_BLD: Array, head: HeadWeights, rows: Tokens
) -> tuple[LossSums, tuple[Array, HeadWeights]]:
    """Returns `chunked_loss` and the gradients of its loss with respect to x and the head."""
    matrix_DV = head.matrix_DV.astype(chunks.dtype)

    def add(
        carry: tuple[LossSums, Array, Any], chunk: tuple[Array, Tokens]
    ) -> tuple[tuple[LossSums, Array, Any], Array]:
        sums, matrix_gradient_DV, rest_gradient = carry
        x_CD, tokens = chunk
        part, backward = jax.vjp(
            lambda rest, product_CV: _chunk_loss(chunks, rest, product_CV, tokens), head.rest, _matmul(x_CD, matrix_DV)
        )
        # All devices of the vocabulary compute the same loss: each starts from its share of it.
        new_rest, gradient_CV = backward(LossSums(share_of("vocab", jnp.ones(()), chunks.placement), jnp.zeros(())))
        gradient_CV = gradient_CV.astype(chunks.dtype)
        x_gradient_CD = gradient_CV @ matrix_DV.T
        matrix_gradient_DV += _matmul(x_CD.T, gradient_CV).astype(matrix_gradient_DV.dtype)
        return (sums.plus(part), matrix_gradient_DV, jax.tree.map(jnp.add, rest_gradient, new_rest)), x_gradient_CD

    start = (no_loss(), *jax.tree.map(lambda weight: zeros_after(x_BLD, weight), head))
    (sums, *gradients), x_gradient_NCD = jax.lax.scan(add, start, _cut_rows(chunks, x_BLD, rows))
    x_gradient_TD = x_gradient_NCD.reshape(-1, x_BLD.shape[-1])[: x_BLD.shape[0] * x_BLD.shape[1]]
    return sums, (x_gradient_TD.reshape(x_BLD.shape), HeadWeights(*gradients))


def _scale_gradients(
    chunks: LossChunks, gradients: tuple[Array, HeadWeights], outer: LossSums
) -> tuple[Array, HeadWeights, None]:
    """Scales the gradients that forward computed by the gradient of the loss."""
    x_gradient_BLD, head = jax.tree.map(lambda g: (g * outer.loss).astype(g.dtype), gradients)
    return x_gradient_BLD, head, None


chunked_loss.defvjp(_with_gradients, _scale_gradients)


def no_loss() -> LossSums:
    """Returns the sums over no tokens."""
    return LossSums(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))


def _matmul(x_CD: Array, matrix_DV: Array) -> Array:
    """Multiplies with float32 accumulation and result."""
    return jnp.dot(x_CD, matrix_DV, preferred_element_type=jnp.float32)


def _chunk_loss(chunks: LossChunks, rest: Any, product_CV: Array, tokens: Tokens) -> LossSums:
    """Returns a chunk's loss from the head's product. Raises `ConfigError` if the loss function returns anything but
    `LossSums` of scalars."""
    logits = logits_of(chunks.finish(rest, product_CV), chunks.data_vocab_size, chunks.placement)
    sums = chunks.loss(logits, tokens)
    if not (isinstance(sums, LossSums) and all(jnp.shape(total) == () for total in sums)):
        raise ConfigError(
            "train.loss: the function must return jaxmnt.training.loss.LossSums(loss, cross_entropy), two sums over "
            f"the tokens of a chunk, not {type(sums).__name__}; docs/models.md has an example"
        )
    return sums


def _cut_rows(chunks: LossChunks, x_BLD: Array, rows: Tokens) -> tuple[Array, Tokens]:
    """Splits each array into chunks, [chunks, C, …]."""
    return jax.tree.map(lambda array: in_chunks(array, chunks.chunks), (x_BLD, rows))


def in_chunks(array_BL: Array, chunks: int) -> Array:
    """Reshapes [B, L, …] to [chunks, C, …], with zeros after the last token."""
    flat = array_BL.reshape(-1, *array_BL.shape[2:])
    size = -(-len(flat) // chunks)
    if pad := chunks * size - len(flat):
        flat = jnp.pad(flat, ((0, pad),) + ((0, 0),) * (flat.ndim - 1))
    return flat.reshape(chunks, size, *flat.shape[1:])
