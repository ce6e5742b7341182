"""The loss over a large vocabulary, without ever holding all logits in memory.

Shapes: T tokens (B · L flattened), C tokens of a chunk, D model, V a device's part of the vocabulary.

Only the logits of one chunk of tokens exist at a time, in float32, and each device has its part of the vocabulary. A
loss is a differentiable function of one chunk's `Logits`, whose methods return results over the whole vocabulary. For
cross-entropy, devices exchange three numbers per token, once. The loss is a sum, so its gradient is known up to a
scalar as soon as the logits are, and is computed with them. Nothing is computed twice, and the head's gradient is one
array, so that the head is gathered and reduced once rather than once per chunk.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, get_type_hints

import jax
import jax.numpy as jnp
from jax import Array

from jaxmnt.config.mesh import Mesh
from jaxmnt.config.own_code import import_dotted, own_settings
from jaxmnt.config.schema import Train
from jaxmnt.errors import ConfigError, printable
from jaxmnt.models.layers import gradient_zeros
from jaxmnt.parallel.collectives import gather_over, index_along, max_over, share_of, sum_over, with_backward
from jaxmnt.parallel.sharding import Placement, build_mesh


class LossSums(NamedTuple):
    """Float32 sums over real tokens. They are divided by the sum of weights once, at the very end."""

    loss: Array
    """The sum of the loss that training minimises."""
    cross_entropy: Array
    """The sum of the cross-entropy that is reported, in nats."""
    reported: Mapping[str, tuple[Array, Array]] = {}
    """Further metrics of steps and evaluations, by name: a sum, and the sum by which it is divided at the very end,
    such as the numbers of correct tokens and of tokens that count. They have no gradient."""

    def plus(self, new: "LossSums") -> "LossSums":
        """Returns the sums over the tokens of `self` and of `new` together."""
        return jax.tree.map(jnp.add, self, new)

    @property
    def gradient_of_loss(self) -> "LossSums":
        """The gradient of `loss` with respect to these sums."""
        return jax.tree.map(jnp.zeros_like, self)._replace(loss=jnp.ones(()))

    @property
    def ratios(self) -> dict[str, Array]:
        """The metrics of `reported`; NaN if nothing counts."""
        return {name: total / weight for name, (total, weight) in self.reported.items()}


@dataclass(frozen=True)
class Logits:
    """The logits of a chunk of tokens, for the token ids that this device has.

    The results of its methods are replicated over the devices that share the vocabulary. These devices all compute the
    same loss from the results, and each device counts a share of it, so the gradient of the results is partial.
    """

    values_CV: Array
    """Float32 logits, with minus infinity for token ids outside of the data's vocabulary."""
    ids_V: Array
    """The token ids that this device has."""
    placement: Placement

    def log_sum_exp(self) -> Array:
        """Returns the logarithm of the partition function, [C]."""
        return _log_sum_exp(self.placement, self.values_CV)

    def pick(self, ids_C: Array) -> Array:
        """Returns, for each token, the logit of its id in `ids_C`, [C]."""
        # Compare and sum instead of indexing, because each device has only its part of the vocabulary.
        return self.weighted(ids_C[:, None] == self.ids_V)

    def is_largest(self, ids_C: Array) -> Array:
        """Returns, for each token, True if no id has a larger logit than its id in `ids_C`, bool [C]. It has no
        gradient."""
        fixed = replace(self, values_CV=jax.lax.stop_gradient(self.values_CV))
        return fixed.pick(ids_C) >= max_over("vocab", jnp.max(fixed.values_CV, axis=-1), self.placement)

    def weighted(self, weights_CV: Array) -> Array:
        """Returns, for each token, the sum of all logits times their weights, [C]. `weights_CV` has the weights for
        this device's `ids_V`. Logits of token ids outside of the data's vocabulary count as 0."""
        is_counted_CV = (weights_CV != 0) & (self.values_CV != -jnp.inf)
        product_CV = jnp.where(is_counted_CV, self.values_CV, 0) * weights_CV
        return sum_over("vocab", jnp.sum(product_CV, axis=-1), self.placement)


def logits_of(values_CV: Array, data_vocab_size: int, placement: Placement) -> Logits:
    """Returns `Logits` from the logits of this device's part of the vocabulary, masked to the data's vocabulary."""
    size = values_CV.shape[1]
    ids_V = index_along("vocab", placement) * size + jnp.arange(size)
    if data_vocab_size < size * placement.num_shards_in_use("vocab"):
        values_CV = jnp.where(ids_V < data_vocab_size, values_CV, -jnp.inf)
    return Logits(values_CV, ids_V, placement)


Tokens = dict[str, Array]
"""The batch fields tokens, targets, weights, segments and positions for the tokens of a chunk, each [C]."""

Loss = Callable[[Logits, Tokens, Train], LossSums]
"""A loss function. It returns the sums over the tokens of a chunk."""


def cross_entropy(logits: Logits, tokens: Tokens, train: Train) -> LossSums:
    """Returns the sum of the tokens' cross-entropies against `targets`, each times its weight. The weight is 0 where
    there is no real target.

    With z the logarithm of the partition function, the minimised loss is ce + z_loss · z² (PaLM, arXiv:2204.02311,
    section 5).
    """
    # The target of a token that does not count may be outside of the data's vocabulary.
    is_target_CV = (tokens["targets"][:, None] == logits.ids_V) & (logits.values_CV != -jnp.inf)
    log_z_C, target_logit_C = _log_z_and_target_logit(logits.placement, logits.values_CV, is_target_CV)
    cross_entropy_sum = jnp.sum((log_z_C - target_logit_C) * tokens["weights"])
    penalty = train.z_loss * jnp.sum(jnp.square(log_z_C) * tokens["weights"])
    return LossSums(cross_entropy_sum + penalty, cross_entropy_sum)


def load_loss(train: Train) -> Loss:
    """Returns the loss function that the config names, with its settings; cross-entropy by default. A function has
    settings if it has a parameter `settings` that is annotated with a dataclass.

    Raises `ConfigError` if there is no such function, or if it does not have the settings.
    """
    path, settings = train.loss, train.loss_settings
    if path is None:
        if settings:
            raise ConfigError("train.loss_settings: cross-entropy has none; remove it, or set train.loss")
        return cross_entropy
    loss = import_dotted(path, "train.loss", "a function")
    if not callable(loss):
        raise ConfigError(f"train.loss: {printable(path)} must be a function, but is a {type(loss).__name__}")
    kind = get_type_hints(loss).get("settings") if inspect.isfunction(loss) else None
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        if settings:
            raise ConfigError(
                f"train.loss_settings: {printable(path)} has none; give it a parameter settings that is annotated "
                "with a dataclass, or remove it"
            )
        return loss
    return functools.partial(loss, settings=own_settings(kind, settings, "train.loss_settings", printable(path)))


def _exchange_sums(placement: Placement, logits_CV: Array, *sums_C: Array) -> tuple[Array, list[Array], Array, Array]:
    """Returns, for each token, the logarithm of the partition function and the sums over all devices of `sums_C`, [C]
    each. Devices that share the vocabulary exchange their results once. N stands for these devices.

    The last two results are exponentials [C, V] and divisors [C]; their quotients are the probabilities.
    """
    # A device without ids of the data's vocabulary has logits of minus infinity alone.
    largest_C = jnp.maximum(jnp.max(logits_CV, axis=-1), jnp.finfo(logits_CV.dtype).min)
    exponentials_CV = jnp.exp(logits_CV - largest_C[:, None])
    own_results = jnp.stack([largest_C, jnp.sum(exponentials_CV, axis=-1), *sums_C])
    largest_NC, partition_NC, *sums_NC = jnp.moveaxis(gather_over("vocab", own_results, placement), 1, 0)
    largest_of_all_C = jnp.max(largest_NC, axis=0)
    partition_C = jnp.sum(partition_NC * jnp.exp(largest_NC - largest_of_all_C), axis=0)
    # The exponentials are relative to this device's largest logit.
    divisors_C = partition_C / jnp.exp(largest_C - largest_of_all_C)
    log_z_C = largest_of_all_C + jnp.log(partition_C)
    return log_z_C, [jnp.sum(sum_NC, axis=0) for sum_NC in sums_NC], exponentials_CV, divisors_C


def _log_sum_exp_gradient(placement: Placement, residuals: tuple[Array, Array], gradient_C: Array) -> tuple[Array]:
    exponentials_CV, divisors_C = residuals
    return (exponentials_CV * (sum_over("vocab", gradient_C, placement) / divisors_C)[:, None],)


@with_backward(_log_sum_exp_gradient, static=1)
def _log_sum_exp(placement: Placement, logits_CV: Array) -> tuple[Array, tuple[Array, Array]]:
    log_z_C, _, exponentials_CV, divisors_C = _exchange_sums(placement, logits_CV)
    return log_z_C, (exponentials_CV, divisors_C)


def _log_z_and_target_logit_gradient(
    placement: Placement, residuals: tuple[Array, Array, Array], gradients: tuple[Array, Array]
) -> tuple[Array, None]:
    exponentials_CV, divisors_C, is_target_CV = residuals
    # All devices that share the vocabulary have the same share of these gradients, so they need not be summed.
    log_z_gradient_C, logit_gradient_C = (placement.num_shards_in_use("vocab") * gradient_C for gradient_C in gradients)
    values_gradient_CV = exponentials_CV * (log_z_gradient_C / divisors_C)[:, None]
    return values_gradient_CV + jnp.where(is_target_CV, logit_gradient_C[:, None], 0), None


@with_backward(_log_z_and_target_logit_gradient, static=1)
def _log_z_and_target_logit(
    placement: Placement, logits_CV: Array, is_target_CV: Array
) -> tuple[tuple[Array, Array], tuple[Array, Array, Array]]:
    """Returns, for each token, the logarithm of the partition function and the logit of its target, [C] each. All
    devices that share the vocabulary must compute the same loss from them."""
    own_target_logit_C = jnp.sum(jnp.where(is_target_CV, logits_CV, 0), axis=-1)
    log_z_C, [target_logit_C], exponentials_CV, divisors_C = _exchange_sums(placement, logits_CV, own_target_logit_C)
    return (log_z_C, target_logit_C), (exponentials_CV, divisors_C, is_target_CV)


# -- chunk by chunk


class HeadWeights(NamedTuple):
    """The parameters of the head. The gradient of each has the parameter's dtype."""

    matrix_DV: Array
    rest: Any
    """The other parameters, such as a bias."""


@dataclass(frozen=True)
class LossChunks:
    """The static part of a chunked loss."""

    chunks: int
    """The number of chunks."""
    data_vocab_size: int
    """The size of the data's vocabulary. Token ids of at least this number have no logit."""
    dtype: jnp.dtype
    """The dtype in which x and the matrix are multiplied."""
    placement: Placement
    finish: Callable[[Any, Array], Array]
    """Maps (the head's other parameters, the float32 product [C, V] with the matrix) to logits."""
    loss: Callable[[Logits, Tokens], LossSums]
    reported: tuple[str, ...] = ()
    """The names of the loss's own metrics."""


def chunk_count(tokens: int, vocab_size: int, placement: Placement, limit_mib: int) -> int:
    """Returns the minimum number of chunks with which a device's float32 logits of one chunk take at most `limit_mib`
    MiB."""
    vocab_per_device = -(-vocab_size // placement.num_shards_in_use("vocab"))
    logit_bytes = tokens * vocab_per_device * 4
    chunks = -(-logit_bytes // (limit_mib * 2**20))
    return max(1, min(tokens, chunks))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def chunked_loss(chunks: LossChunks, x_BLD: Array, head: HeadWeights, rows: Tokens) -> LossSums:
    """Returns the loss sums for all tokens of the rows [B, L], with the logits from `x @ matrix`. x is in the compute
    dtype.

    Only `loss` has a gradient. The gradient of x is partial over the axes that split the vocabulary.
    """

    matrix_DV = head.matrix_DV.astype(chunks.dtype)

    def add_chunk(sums: LossSums, chunk: tuple[Array, Tokens]) -> tuple[LossSums, None]:
        x_CD, tokens = chunk
        product_CV = _matmul(x_CD, matrix_DV)
        return sums.plus(_chunk_loss(chunks, head.rest, product_CV, tokens)), None

    return jax.lax.scan(add_chunk, no_loss(chunks.reported), _cut_rows(chunks, x_BLD, rows))[0]


def _loss_and_gradients(
    chunks: LossChunks, x_BLD: Array, head: HeadWeights, rows: Tokens
) -> tuple[LossSums, tuple[Array, HeadWeights]]:
    """Returns the sums of `chunked_loss`, and the gradients of their loss with respect to x and the head."""
    matrix_DV = head.matrix_DV.astype(chunks.dtype)

    def add_chunk(
        carry: tuple[LossSums, Array, Any], chunk: tuple[Array, Tokens]
    ) -> tuple[tuple[LossSums, Array, Any], Array]:
        sums, matrix_gradient_DV, rest_gradient = carry
        x_CD, tokens = chunk
        chunk_loss = lambda rest, product_CV: _chunk_loss(chunks, rest, product_CV, tokens)
        chunk_sums, backward = jax.vjp(chunk_loss, head.rest, _matmul(x_CD, matrix_DV))
        # All devices that share the vocabulary compute the same loss, so each starts from its share of the gradient 1.
        seed = chunk_sums.gradient_of_loss
        seed = seed._replace(loss=share_of("vocab", seed.loss, chunks.placement))
        chunk_rest_gradient, gradient_CV = backward(seed)
        gradient_CV = gradient_CV.astype(chunks.dtype)
        x_gradient_CD = gradient_CV @ matrix_DV.T
        matrix_gradient_DV += _matmul(x_CD.T, gradient_CV).astype(matrix_gradient_DV.dtype)
        rest_gradient = jax.tree.map(jnp.add, rest_gradient, chunk_rest_gradient)
        return (sums.plus(chunk_sums), matrix_gradient_DV, rest_gradient), x_gradient_CD

    zeros = jax.tree.map(lambda weight: gradient_zeros(x_BLD, weight, chunks.placement), head)
    start = (no_loss(chunks.reported), *zeros)
    (sums, *gradients), x_gradient_NCD = jax.lax.scan(add_chunk, start, _cut_rows(chunks, x_BLD, rows))
    token_count = x_BLD.shape[0] * x_BLD.shape[1]
    x_gradient_TD = x_gradient_NCD.reshape(-1, x_BLD.shape[-1])[:token_count]
    return sums, (x_gradient_TD.reshape(x_BLD.shape), HeadWeights(*gradients))


def _scale_gradients(
    chunks: LossChunks, gradients: tuple[Array, HeadWeights], sums_gradient: LossSums
) -> tuple[Array, HeadWeights, None]:
    """Multiplies the gradients that forward computed by the gradient of the summed loss."""
    x_gradient_BLD, head = jax.tree.map(lambda g: (g * sums_gradient.loss).astype(g.dtype), gradients)
    return x_gradient_BLD, head, None


chunked_loss.defvjp(_loss_and_gradients, _scale_gradients)


def no_loss(reported: Sequence[str] = ()) -> LossSums:
    """Returns the sums over no tokens, which are zeros. `reported` has the names of the loss's own metrics."""
    zero = jnp.zeros((), jnp.float32)
    return LossSums(zero, zero, dict.fromkeys(reported, (zero, zero)))


def _matmul(x_CD: Array, matrix_DV: Array) -> Array:
    """Multiplies two matrices. The accumulation and the result are in float32."""
    return jnp.dot(x_CD, matrix_DV, preferred_element_type=jnp.float32)


def _chunk_loss(chunks: LossChunks, rest: Any, product_CV: Array, tokens: Tokens) -> LossSums:
    """Returns a chunk's loss sums from the product of the head's input and matrix. Raises `ConfigError` if the loss
    function returns anything but `LossSums` of scalars."""
    logits = logits_of(chunks.finish(rest, product_CV), chunks.data_vocab_size, chunks.placement)
    sums = chunks.loss(logits, tokens)
    _check_sums(sums)
    to_float32 = lambda total: jax.lax.stop_gradient(jnp.asarray(total, jnp.float32))
    return sums._replace(reported=jax.tree.map(to_float32, dict(sums.reported)))


def _check_sums(sums: Any) -> None:
    """Raises `ConfigError` if a loss function has returned anything but `LossSums` of scalars."""
    if not (isinstance(sums, LossSums) and all(jnp.shape(total) == () for total in jax.tree.leaves(sums))):
        raise ConfigError(
            "train.loss: the function must return jaxmnt.training.loss.LossSums(loss, cross_entropy), two sums over "
            f"the tokens of a chunk, not {type(sums).__name__}; docs/models.md has an example"
        )
    for name, pair in sums.reported.items():
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise ConfigError(f"train.loss: reported[{name!r}] must be a pair of sums, (total, weight)")


def reported_names(loss: Loss, train: Train, fields: Sequence[str], device: jax.Device) -> tuple[str, ...]:
    """Returns the names of a loss's own metrics, by calling it for a token on one `device`, without computing anything.
    `fields` are those of a batch. Raises `ConfigError` if the loss does not return `LossSums`."""
    if loss is cross_entropy:
        return ()
    placement = Placement(build_mesh(Mesh(data=1), [device]))

    def call() -> LossSums:
        logits = Logits(jnp.zeros((1, 2)), jnp.arange(2), placement)
        tokens = {name: jnp.zeros(1, jnp.float32 if name == "weights" else jnp.int32) for name in fields}
        sums = loss(logits, tokens, train)
        _check_sums(sums)
        return sums

    return tuple(sorted(jax.eval_shape(call).reported))


def _cut_rows(chunks: LossChunks, x_BLD: Array, rows: Tokens) -> tuple[Array, Tokens]:
    """Splits the head's input and each field of the rows into chunks, [chunks, C, …]."""
    return jax.tree.map(lambda array: split_into_chunks(array, chunks.chunks), (x_BLD, rows))


def split_into_chunks(array_BL: Array, chunks: int) -> Array:
    """Reshapes an array [B, L, …] to [chunks, C, …], with zeros after the last token."""
    flat = array_BL.reshape(-1, *array_BL.shape[2:])
    chunk_tokens = -(-len(flat) // chunks)
    padding = chunks * chunk_tokens - len(flat)
    if padding:
        flat = jnp.pad(flat, ((0, padding),) + ((0, 0),) * (flat.ndim - 1))
    return flat.reshape(chunks, chunk_tokens, *flat.shape[1:])
