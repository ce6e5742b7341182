"""Calls a trained model on a mesh: logits of whole rows, scores of texts, and generation token by token.

The mesh has no pipeline. Every device along `model` has whole rows and its share of the heads and of the MLP.

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

from jaxmnt.models.cache import Cache
from jaxmnt.models.contract import LayerGroup, Params
from jaxmnt.parallel.collectives import max_over
from jaxmnt.parallel.layout import map_with_axes
from jaxmnt.training.embed_head import EmbedAndHead
from jaxmnt.training.loss import chunk_count, in_chunks, logits_of
from jaxmnt.training.spec import Batch, StepSpec
from jaxmnt.training.stage import Layers, Pass, Rows, always, microbatch_rows
from jaxmnt.training.weights import Weights

_MIN_PADDED_LENGTH = 16
"""Lengths are rounded up to a power of two, at least this one, so that few programs are compiled."""


def row_logits(spec: StepSpec, params: Params, buffers: Params, tokens_BL: Array) -> Array:
    """Returns logits [B, L, V] in float32 for the token ids that the data has: at each position those of the next
    token, given the tokens up to that position. Each row is one document.

    `params` and `buffers` are in the checkpoint layout, on the shardings of `canonical_abstract`. B must be divisible
    by the number of batch shards. To be jitted.
    """

    def logits(params: Params, buffers: Params, tokens_BL: Array) -> Array:
        return EmbedAndHead(spec, Weights(spec, params)).logits(_last_layer(spec, params, buffers, tokens_BL))

    axes = (spec.definition.axes, spec.definition.buffer_axes)
    placed = map_with_axes(spec.layout.to_device_layout, (params, buffers), axes)
    logits_BLV = _on_mesh(spec, logits, [("batch", "length")], ("batch", "length", "vocab"), *placed, tokens_BL)
    return logits_BLV[..., : spec.data_vocab_size]


class Scores(NamedTuple):
    """Scores of each token given the tokens before it."""

    log_p_BL: Array
    likeliest_BL: Array
    """True where no other token is more likely."""


def row_scores(spec: StepSpec, params: Params, buffers: Params, tokens_BL: Array, targets_BL: Array) -> Scores:
    """Returns float32 log-likelihoods of `targets`, the tokens that follow `tokens`, one chunk of tokens at a time so
    that the logits of all tokens are never in memory. The weights are in the device layout (`Generator.place`). To be
    jitted."""

    def scores(params: Params, buffers: Params, tokens_BL: Array, targets_BL: Array) -> Scores:
        y_BLD = _last_layer(spec, params, buffers, tokens_BL)
        ends = EmbedAndHead(spec, Weights(spec, params))
        limit = spec.config.train.loss_chunk_mib
        chunks = chunk_count(targets_BL.size, spec.definition.vocab_size, spec.placement, limit)

        def score_chunk(chunk: tuple[Array, Array]) -> Scores:
            y_TD, targets_T = chunk
            logits = logits_of(ends.logits(y_TD[None])[0], spec.data_vocab_size, spec.placement)
            picked_T = logits.pick(targets_T)
            best_T = max_over("vocab", jnp.max(logits.values_CV, axis=-1), spec.placement)
            return Scores(picked_T - logits.log_sum_exp(), picked_T >= best_T)

        scores_NC = jax.lax.map(score_chunk, (in_chunks(y_BLD, chunks), in_chunks(targets_BL, chunks)))
        # The last chunk may end with padding.
        return Scores(*(field.reshape(-1)[: targets_BL.size].reshape(targets_BL.shape) for field in scores_NC))

    rows = ("batch", "length")
    return Scores(*_on_mesh(spec, scores, [rows, rows], rows, params, buffers, tokens_BL, targets_BL))


@dataclass(frozen=True)
class Sampling:
    """Settings for sampling a token from the logits."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the likeliest token."""
    top_k: int = 0
    """Samples from this many of the likeliest tokens; 0 means all."""
    top_p: float = 1.0
    """Samples from the smallest set of likeliest tokens that together have this probability (Holtzman et al. 2019,
    arXiv:1904.09751)."""
    seed: int = 0


class Generator:
    """Generates continuations of prompts with a key/value cache, one token per prompt at a time.

    The random numbers of a prompt depend only on the seed and on its number, not on the other prompts in the batch.
    """

    def __init__(self, spec: StepSpec):
        self._spec = spec
        axes = (spec.definition.axes, spec.definition.buffer_axes)
        self._placed = jax.jit(lambda trees: map_with_axes(spec.layout.to_device_layout, trees, axes))
        self._next = jax.jit(functools.partial(_next_token, spec), static_argnums=(0, 1), donate_argnums=7)

    def place(self, params: Params, buffers: Params) -> tuple[Params, Params]:
        """Converts weights from the checkpoint layout to the device layout in which they are called."""
        if not self._spec.layout.dimensions:
            return params, buffers
        return self._placed((params, buffers))

    def generate(
        self,
        weights: tuple[Params, Params],
        prompts: Sequence[np.ndarray],
        max_tokens: int,
        sampling: Sampling,
        numbers: Sequence[int] | None = None,
    ) -> Iterator[np.ndarray]:
        """Yields the next token of each prompt, int32 [prompts], up to `max_tokens` times.

        `weights` come from `place`. Prompts must not be empty. `numbers` are the prompts' numbers (default: from 0).
        The next tokens are computed while the caller handles these.
        """
        assert prompts and all(len(prompt) for prompt in prompts)
        spec, count = self._spec, len(prompts)
        # Pad to whole batch shards: the padding rows are prompts of one token, whose output is dropped.
        rows = -(-count // spec.placement.batch_shards) * spec.placement.batch_shards
        longest = max(map(len, prompts))
        width = rounded_length(longest)
        tokens_BL = np.zeros((rows, width), np.int32)
        for row, prompt in zip(tokens_BL, prompts, strict=False):
            row[: len(prompt)] = prompt
        lengths_B = np.array([len(prompt) for prompt in prompts] + [1] * (rows - count), np.int32)
        numbers_B = np.array([*(numbers or range(count)), *range(rows - count)], np.int32)
        put = lambda array: jax.device_put(array, spec.placement.sharding(("batch", *[None] * (array.ndim - 1))))
        # The seed is an argument of the program, not a static part of it: another seed compiles nothing.
        static_sampling = replace(sampling, seed=0)
        sampling_keys = SamplingKeys(jax.random.key(sampling.seed), put(numbers_B))
        static = (max(width, rounded_length(longest + max_tokens)), static_sampling)
        lengths, zeros, ones = put(lengths_B), put(np.zeros_like(lengths_B)), put(np.ones_like(lengths_B))
        token_B1, caches = self._next(*static, *weights, put(tokens_BL), zeros, lengths, None, sampling_keys)
        for made in range(max_tokens):
            # Start the next token before this one is read, so that the device does not wait for the caller.
            following = None
            if made + 1 < max_tokens:
                following = self._next(*static, *weights, token_B1, lengths + made, ones, caches, sampling_keys)
            yield np.asarray(token_B1)[:count, 0]
            if following is not None:
                token_B1, caches = following


class SamplingKeys(NamedTuple):
    """The inputs of a token's random number besides its position."""

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
    """Returns the token [B, 1] that follows the first `counts` of these tokens, which have the positions from `starts`
    on, and the caches of keys and values, with room for `cache_length` tokens. `caches` hold the earlier tokens; None
    means that there are none."""

    def run(params: Params, buffers: Params, tokens_BQ: Array, starts_B: Array, counts_B: Array, caches: Any) -> Any:
        weights, new_caches = Weights(spec, params), {}
        positions_BQ = starts_B[:, None] + jnp.arange(tokens_BQ.shape[1], dtype=jnp.int32)
        layer_rows = Rows(positions_BQ, None, spec.definition.family.rotary(positions_BQ), None)
        x_BQD = EmbedAndHead(spec, weights).embed(_rows(tokens_BQ, positions_BQ))
        for group in spec.definition.groups:
            layers = _layers(spec, group, weights, buffers)

            def unit(x_BQD: Array, scanned: tuple[Array, Any], layers: Layers = layers) -> tuple[Array, Any]:
                index, earlier = scanned
                new = [Cache(cache_length, positions_BQ, cache) for cache in earlier or [None] * layers.layers_per_unit]
                for pattern_index, cache in enumerate(new):
                    x_BQD = layers.call(index, pattern_index, layer_rows, x_BQD, cache).x_BSD
                return x_BQD, [cache.entries for cache in new]

            units = (jnp.arange(group.units), None if caches is None else caches[group.name])
            x_BQD, new_caches[group.name] = jax.lax.scan(unit, x_BQD, units)
        y_B1D = jnp.take_along_axis(x_BQD, (counts_B - 1)[:, None, None], axis=1)
        return EmbedAndHead(spec, weights).logits(y_B1D)[:, 0], new_caches

    by_head = (None, "batch", None, "heads", None)
    arrays = (("batch", None), ("batch",), ("batch",), by_head)
    logits_BV, caches = _on_mesh(
        spec, run, arrays, (("batch", "vocab"), by_head), params, buffers, tokens_BQ, starts_B, counts_B, caches
    )
    return _sample(spec, sampling, logits_BV, starts_B + counts_B, sampling_keys)[:, None], caches


def _sample(
    spec: StepSpec, sampling: Sampling, logits_BV: Array, positions_B: Array, sampling_keys: SamplingKeys
) -> Array:
    """Samples the tokens [B] at these positions; they are replicated on all devices for the host to read."""
    logits_BV = logits_BV[:, : spec.data_vocab_size]
    # Replicated on all devices, so that the host can read the tokens.
    replicate = lambda token_B: jax.lax.with_sharding_constraint(token_B.astype(jnp.int32), spec.placement.sharding(()))
    if sampling.temperature == 0:
        return replicate(jnp.argmax(logits_BV, axis=-1))
    logits_BV = logits_BV / sampling.temperature
    if 0 < sampling.top_k < spec.data_vocab_size:
        least_B1 = jax.lax.top_k(logits_BV, sampling.top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV >= least_B1, logits_BV, -jnp.inf)
    if sampling.top_p < 1:
        # Keep a token if the likelier tokens together have less than `top_p`.
        sorted_BV = -jnp.sort(-logits_BV, axis=-1)
        shares_BV = jax.nn.softmax(sorted_BV, axis=-1)
        before_BV = jnp.cumsum(shares_BV, axis=-1) - shares_BV
        least_B1 = jnp.min(jnp.where(before_BV < sampling.top_p, sorted_BV, jnp.inf), axis=-1, keepdims=True)
        logits_BV = jnp.where(logits_BV >= least_B1, logits_BV, -jnp.inf)
    key_of = lambda number, position: jax.random.fold_in(jax.random.fold_in(sampling_keys.key, number), position)
    keys_B = jax.vmap(key_of)(sampling_keys.numbers_B, positions_B)
    return replicate(jax.vmap(jax.random.categorical)(keys_B, logits_BV))


# -- on one device of the mesh


def _on_mesh(spec: StepSpec, function: Callable[..., Any], arrays: Sequence[Any], out: Any, *arguments: Any) -> Any:
    """Calls the function on each device's pieces; see `StepSpec.on_mesh`."""
    with jax.default_matmul_precision(spec.matmul_precision):
        return spec.on_mesh(function, arrays, out)(*arguments)


def _rows(tokens_BL: Array, positions_BL: Array) -> Batch:
    """Returns the fields of rows of one document each."""
    return {"tokens": tokens_BL, "positions": positions_BL, "segments": jnp.ones_like(tokens_BL)}


def _last_layer(spec: StepSpec, params: Params, buffers: Params, tokens_BL: Array) -> Array:
    """Returns the output of the last layer for rows of one document each."""
    rows = _rows(tokens_BL, jnp.broadcast_to(jnp.arange(tokens_BL.shape[1], dtype=jnp.int32), tokens_BL.shape))
    weights, zero = Weights(spec, params), jnp.int32(0)
    whole_model = Pass(zero, zero, microbatch_rows(spec, rows, None), always)
    x_BLD = EmbedAndHead(spec, weights).embed(rows)
    for group in spec.definition.groups:
        x_BLD = _layers(spec, group, weights, buffers).evaluate(x_BLD, whole_model)
    return x_BLD


def _layers(spec: StepSpec, group: LayerGroup, weights: Weights, buffers: Params) -> Layers:
    """Returns all units of a group, on one stage."""
    return Layers(spec, group, weights, buffers, jnp.arange(group.units), group.units)


def rounded_length(length: int) -> int:
    """Rounds a length up to a power of two."""
    return max(_MIN_PADDED_LENGTH, 1 << (length - 1).bit_length())
