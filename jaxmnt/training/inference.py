"""Inference with a trained model on a mesh: logits of whole rows, scores of texts, and generation token by token.

The mesh has no pipeline. Each device along `model` has the same tokens, and its share of the heads and of the MLP.
Generation needs whole rows. For logits and scores, the mesh may divide rows along `context`.

Shapes: B rows, L length, Q new tokens, T tokens of a chunk, D model, V vocabulary.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxmnt.errors import ConfigError
from jaxmnt.models.cache import Cache
from jaxmnt.models.contract import LayerGroup, Params
from jaxmnt.parallel.chunks import device_order, places_in_row, row_order
from jaxmnt.parallel.collectives import max_over
from jaxmnt.parallel.layout import map_with_axes
from jaxmnt.parallel.sharding import Axes
from jaxmnt.training.embed_head import EmbedAndHead
from jaxmnt.training.loss import chunk_count, logits_of, split_into_chunks
from jaxmnt.training.spec import Batch, StepSpec
from jaxmnt.training.stage import Layers, Pass, Rows, always_run, microbatch_rows
from jaxmnt.training.weights import Weights

_MIN_PADDED_LENGTH = 16
"""The minimum padded length. Lengths are rounded up to a power of two, so that few programs are compiled."""


def row_logits(spec: StepSpec, params: Params, buffers: Params, tokens_BL: Array) -> Array:
    """Returns float32 logits [B, L, V] for the token ids of the data's vocabulary.

    At each position they are those of the next token, given the tokens up to that position. Each row is one document.

    `params` and `buffers` are in the checkpoint layout, with the shardings of `canonical_abstract`. B must be divisible
    by the number of batch shards. Callers jit this function.
    """

    def logits(params: Params, _buffers: Params, y_BLD: Array) -> Array:
        return EmbedAndHead(spec, Weights(spec, params)).logits(y_BLD)

    axes = (spec.definition.axes, spec.definition.buffer_axes)
    weights = map_with_axes(spec.layout.to_device_layout, (params, buffers), axes)
    order, output_axes = _ColumnOrder(spec, tokens_BL.shape[1]), ("batch", "length", None)
    tokens_BL = order.of_devices(tokens_BL)
    layers = functools.partial(_last_layer_output, spec)
    y_BLD = _on_mesh(spec, layers, [("batch", "length")], output_axes, *weights, tokens_BL)
    # The columns are put in order before the head, because XLA moves them through whole rows on each device.
    y_BLD = order.of_rows(y_BLD, output_axes)
    logits_BLV = _on_mesh(spec, logits, [output_axes], ("batch", "length", "vocab"), *weights, y_BLD)
    return logits_BLV[..., : spec.data_vocab_size]


class _ColumnOrder:
    """Puts the columns of rows in the order in which devices hold them (`parallel.chunks`), and back."""

    def __init__(self, spec: StepSpec, length: int):
        self._placement, self._length = spec.placement, length
        self._devices = spec.placement.num_shards("length")

    def of_devices(self, x_BL: Array) -> Array:
        """Returns rows for the devices."""
        return x_BL if self._devices == 1 else x_BL[:, device_order(self._length, self._devices)]

    def of_rows(self, x_BL: Array, axes: Axes) -> Array:
        """Returns rows from the devices in their own order, sharded like those that the devices return."""
        if self._devices == 1:
            return x_BL
        ordered_BL = x_BL[:, row_order(self._length, self._devices)]
        return jax.lax.with_sharding_constraint(ordered_BL, self._placement.sharding(axes))


class Scores(NamedTuple):
    """Scores of each token, given the tokens before it."""

    log_p_BL: Array
    is_likeliest_BL: Array
    """True where no other token is more likely."""


def row_scores(spec: StepSpec, params: Params, buffers: Params, tokens_BL: Array, targets_BL: Array) -> Scores:
    """Returns scores of the targets, which are the tokens that follow `tokens_BL`. The log-likelihoods are float32.
    They are computed one chunk of tokens at a time, so that the logits of all tokens are never in memory at once. The
    weights are in the device layout (see `Generator.place`). Callers jit this function."""

    def scores(params: Params, buffers: Params, tokens_BL: Array, targets_BL: Array) -> Scores:
        y_BLD = _last_layer_output(spec, params, buffers, tokens_BL)
        ends = EmbedAndHead(spec, Weights(spec, params))
        limit_mib = spec.config.train.loss_chunk_mib
        chunks = chunk_count(targets_BL.size, spec.definition.vocab_size, spec.placement, limit_mib)

        def score_chunk(chunk: tuple[Array, Array]) -> Scores:
            y_TD, targets_T = chunk
            logits = logits_of(ends.logits(y_TD[None])[0], spec.data_vocab_size, spec.placement)
            target_logit_T = logits.pick(targets_T)
            max_logit_T = max_over("vocab", jnp.max(logits.values_CV, axis=-1), spec.placement)
            return Scores(target_logit_T - logits.log_sum_exp(), target_logit_T >= max_logit_T)

        chunk_scores = jax.lax.map(
            score_chunk, (split_into_chunks(y_BLD, chunks), split_into_chunks(targets_BL, chunks))
        )
        # The last chunk may end with padding.
        return Scores(*(field.reshape(-1)[: targets_BL.size].reshape(targets_BL.shape) for field in chunk_scores))

    row_axes, order = ("batch", "length"), _ColumnOrder(spec, tokens_BL.shape[1])
    rows = map(order.of_devices, (tokens_BL, targets_BL))
    device_scores = _on_mesh(spec, scores, [row_axes, row_axes], row_axes, params, buffers, *rows)
    return Scores(*(order.of_rows(scores_BL, row_axes) for scores_BL in device_scores))


@dataclass(frozen=True)
class Sampling:
    """Settings for sampling a token from the logits."""

    temperature: float = 1.0
    """The number by which the logits are divided. With 0, the likeliest token is taken."""
    top_k: int = 0
    """The number of likeliest tokens from which one is sampled. 0 means all tokens."""
    top_p: float = 1.0
    """Minimum total probability of the candidates: a token is sampled from the smallest set of likeliest tokens that
    reaches it (Holtzman et al. 2019, arXiv:1904.09751)."""
    seed: int = 0


class Generator:
    """Generates continuations of prompts with a key/value cache, one token per prompt at a time.

    The random numbers for a prompt depend only on the seed and on the prompt's number, not on the other prompts in the
    batch.
    """

    def __init__(self, spec: StepSpec):
        self._spec = spec
        axes = (spec.definition.axes, spec.definition.buffer_axes)
        self._to_device_layout = jax.jit(lambda trees: map_with_axes(spec.layout.to_device_layout, trees, axes))
        self._next_token = jax.jit(functools.partial(_next_token, spec), static_argnums=(0, 1), donate_argnums=7)

    def place(self, params: Params, buffers: Params) -> tuple[Params, Params]:
        """Converts weights from the checkpoint layout to the device layout, in which `generate` takes them."""
        if not self._spec.layout.dimensions:
            return params, buffers
        return self._to_device_layout((params, buffers))

    def generate(
        self,
        weights: tuple[Params, Params],
        prompts: Sequence[np.ndarray],
        max_tokens: int,
        sampling: Sampling,
        numbers: Sequence[int] | None = None,
    ) -> Iterator[np.ndarray]:
        """Yields the next token of each prompt, int32 [prompts], up to `max_tokens` times.

        `weights` come from `place`. Prompts must not be empty. `numbers` has the number of each prompt (default: 0, 1,
        2, …). While the caller handles the yielded tokens, the device computes the tokens that follow.
        """
        assert prompts and all(len(prompt) for prompt in prompts)
        check_generation(self._spec.placement.num_shards("length"))
        spec, count, batch_shards = self._spec, len(prompts), self._spec.placement.batch_shards
        # Pad to a multiple of the batch shards. Padding rows are prompts of one token, and their output is dropped.
        rows_per_shard = -(-count // batch_shards)
        rows = rows_per_shard * batch_shards
        max_length = max(map(len, prompts))
        width = rounded_length(max_length)
        tokens_BL = np.zeros((rows, width), np.int32)
        for row, prompt in zip(tokens_BL, prompts, strict=False):
            row[: len(prompt)] = prompt
        lengths_B = np.array([len(prompt) for prompt in prompts] + [1] * (rows - count), np.int32)
        numbers_B = np.array([*(numbers or range(count)), *range(rows - count)], np.int32)
        place_rows = lambda array: jax.device_put(array, spec.placement.sharding(("batch", *[None] * (array.ndim - 1))))
        # The seed is an argument of the program, not a static part of it, so that another seed compiles nothing.
        static_sampling = replace(sampling, seed=0)
        sampling_keys = SamplingKeys(jax.random.key(sampling.seed), place_rows(numbers_B))
        cache_length = max(width, rounded_length(max_length + max_tokens))
        next_token = functools.partial(self._next_token, cache_length, static_sampling, *weights)
        lengths = place_rows(lengths_B)
        zeros, ones = place_rows(np.zeros_like(lengths_B)), place_rows(np.ones_like(lengths_B))
        token_B1, caches = next_token(place_rows(tokens_BL), zeros, lengths, None, sampling_keys)
        for index in range(max_tokens):
            # Start the next token before this one is read, so that the device does not wait for the caller.
            next_result = None
            if index + 1 < max_tokens:
                starts = lengths + index
                next_result = next_token(token_B1, starts, ones, caches, sampling_keys)
            yield np.asarray(token_B1)[:count, 0]
            if next_result is not None:
                token_B1, caches = next_result


def check_generation(devices_per_row: int) -> None:
    """Raises `ConfigError` if devices share rows, because generation needs whole rows."""
    if devices_per_row != 1:
        raise ConfigError("mesh.context: generation needs whole rows; set mesh.context=1, and mesh.fsdp instead")


class SamplingKeys(NamedTuple):
    """The inputs, other than its position, from which a token's random number is derived."""

    key: Array
    numbers_B: Array
    """The numbers of the prompts."""


def _next_token(
    spec: StepSpec,
    cache_length: int,
    sampling: Sampling,
    params: Params,
    buffers: Params,
    tokens_BQ: Array,
    starts_B: Array,
    counts_B: Array,
    caches: Any,
    sampling_keys: SamplingKeys,
) -> tuple[Array, Any]:
    """Returns the token [B, 1] that follows the first `counts_B` of each row's new tokens, and the caches of keys and
    values, which have room for `cache_length` tokens. The positions of the new tokens begin at `starts_B`. `caches` has
    the keys and values of earlier tokens, or is None if there are none."""

    def run(params: Params, buffers: Params, tokens_BQ: Array, starts_B: Array, counts_B: Array, caches: Any) -> Any:
        weights, new_caches = Weights(spec, params), {}
        positions_BQ = starts_B[:, None] + jnp.arange(tokens_BQ.shape[1], dtype=jnp.int32)
        is_real_BQ = jnp.arange(tokens_BQ.shape[1]) < counts_B[:, None]
        rotary, targets_per_token = spec.definition.family.rotary(positions_BQ), jnp.ones((), jnp.float32)
        layer_rows = Rows(positions_BQ, None, None, rotary, None, is_real_BQ, targets_per_token)
        x_BQD = EmbedAndHead(spec, weights).embed(_document_rows(tokens_BQ, positions_BQ))
        for group in spec.definition.groups:
            layers = _layers(spec, group, weights, buffers)

            def run_unit(
                x_BQD: Array, index_and_caches: tuple[Array, Any], layers: Layers = layers
            ) -> tuple[Array, Any]:
                unit_index, old_entries = index_and_caches
                old_entries = old_entries or [None] * layers.layers_per_unit
                unit_caches = [Cache(cache_length, positions_BQ, entries) for entries in old_entries]
                for pattern_index, cache in enumerate(unit_caches):
                    x_BQD = layers.call(unit_index, pattern_index, layer_rows, x_BQD, cache).x_BSD
                return x_BQD, [cache.entries for cache in unit_caches]

            units = (jnp.arange(group.units), None if caches is None else caches[group.name])
            x_BQD, new_caches[group.name] = jax.lax.scan(run_unit, x_BQD, units)
        y_B1D = jnp.take_along_axis(x_BQD, (counts_B - 1)[:, None, None], axis=1)
        return EmbedAndHead(spec, weights).logits(y_B1D)[:, 0], new_caches

    cache_axes = (None, "batch", None, "heads", None)
    array_axes = (("batch", None), ("batch",), ("batch",), cache_axes)
    logits_BV, caches = _on_mesh(
        spec, run, array_axes, (("batch", "vocab"), cache_axes), params, buffers, tokens_BQ, starts_B, counts_B, caches
    )
    return _sample(spec, sampling, logits_BV, starts_B + counts_B, sampling_keys)[:, None], caches


def _sample(
    spec: StepSpec, sampling: Sampling, logits_BV: Array, positions_B: Array, sampling_keys: SamplingKeys
) -> Array:
    """Samples the tokens [B] at these positions. They are replicated on all devices, so that the host can read them."""
    logits_BV = logits_BV[:, : spec.data_vocab_size]
    replicate = lambda token_B: jax.lax.with_sharding_constraint(token_B.astype(jnp.int32), spec.placement.sharding(()))
    if sampling.temperature == 0:
        return replicate(jnp.argmax(logits_BV, axis=-1))
    logits_BV = logits_BV / sampling.temperature
    if 0 < sampling.top_k < spec.data_vocab_size:
        min_logit_B1 = jax.lax.top_k(logits_BV, sampling.top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV >= min_logit_B1, logits_BV, -jnp.inf)
    if sampling.top_p < 1:
        # Keep a token if the likelier tokens together have a probability below `top_p`.
        sorted_BV = -jnp.sort(-logits_BV, axis=-1)
        probabilities_BV = jax.nn.softmax(sorted_BV, axis=-1)
        likelier_BV = jnp.cumsum(probabilities_BV, axis=-1) - probabilities_BV
        min_logit_B1 = jnp.min(jnp.where(likelier_BV < sampling.top_p, sorted_BV, jnp.inf), axis=-1, keepdims=True)
        logits_BV = jnp.where(logits_BV >= min_logit_B1, logits_BV, -jnp.inf)
    key_of = lambda number, position: jax.random.fold_in(jax.random.fold_in(sampling_keys.key, number), position)
    keys_B = jax.vmap(key_of)(sampling_keys.numbers_B, positions_B)
    return replicate(jax.vmap(jax.random.categorical)(keys_B, logits_BV))


# -- the parts that run on each device of the mesh


def _on_mesh(
    spec: StepSpec, function: Callable[..., Any], array_axes: Sequence[Any], out_axes: Any, *arguments: Any
) -> Any:
    """Calls the function on each device's pieces of the arguments (see `StepSpec.on_mesh`)."""
    with jax.default_matmul_precision(spec.matmul_precision):
        return spec.on_mesh(function, array_axes, out_axes)(*arguments)


def _document_rows(tokens_BL: Array, positions_BL: Array) -> Batch:
    """Returns the batch fields of rows that each have one document."""
    return {"tokens": tokens_BL, "positions": positions_BL, "segments": jnp.ones_like(tokens_BL)}


def _last_layer_output(spec: StepSpec, params: Params, buffers: Params, tokens_BL: Array) -> Array:
    """Returns the output of the last layer, for rows that each have one document."""
    positions_BL = jnp.broadcast_to(places_in_row(tokens_BL.shape[1], spec.placement), tokens_BL.shape)
    rows = _document_rows(tokens_BL, positions_BL)
    weights, zero = Weights(spec, params), jnp.int32(0)
    whole_model = Pass(zero, zero, microbatch_rows(spec, rows), always_run)
    x_BLD = EmbedAndHead(spec, weights).embed(rows)
    for group in spec.definition.groups:
        x_BLD = _layers(spec, group, weights, buffers).evaluate(x_BLD, whole_model)
    return x_BLD


def _layers(spec: StepSpec, group: LayerGroup, weights: Weights, buffers: Params) -> Layers:
    """Returns the layers of a group, with all of its units on one stage."""
    return Layers(spec, group, weights, buffers, jnp.arange(group.units), group.units)


def rounded_length(length: int) -> int:
    """Rounds a length up to a power of two, which is at least `_MIN_PADDED_LENGTH`."""
    return max(_MIN_PADDED_LENGTH, 1 << (length - 1).bit_length())
