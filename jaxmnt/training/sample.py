"""Sampling a continuation from trained parameters on one device.

The whole window is computed again for each token, without a key/value cache: simple, and quick enough to look
at a model. It is no server.

Shapes: L window length, V vocabulary.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxmnt.models.decoder import Params
from jaxmnt.training.embed_head import EmbedAndHead
from jaxmnt.training.spec import StepSpec
from jaxmnt.training.stage import Layers, layer_context


def sample(
    spec: StepSpec, params: Params, prompt: np.ndarray, length: int, temperature: float, seed: int
) -> np.ndarray:
    """int32 token ids that continue `prompt`; both together are at most the window of the config.

    `temperature` divides the logits; 0 takes the likeliest token.
    """
    window = spec.config.data.sequence_length
    assert len(prompt) > 0 and len(prompt) + length <= window
    tokens = np.zeros((1, window), np.int32)
    tokens[0, : len(prompt)] = prompt
    run = jax.jit(functools.partial(_continue, spec, length, temperature))
    filled = run(params, tokens, jnp.int32(len(prompt)), jax.random.key(seed))
    return np.asarray(filled)[0, len(prompt) : len(prompt) + length]


def _continue(
    spec: StepSpec,
    length: int,
    temperature: float,
    params: Params,
    tokens_1L: jax.Array,
    start: jax.Array,
    key: jax.Array,
) -> jax.Array:
    def add_token(i: jax.Array, tokens_1L: jax.Array) -> jax.Array:
        logits_V = _logits(spec, params, tokens_1L, start + i - 1)
        if temperature == 0:
            token = jnp.argmax(logits_V)
        else:
            token = jax.random.categorical(jax.random.fold_in(key, i), logits_V / temperature)
        return tokens_1L.at[0, start + i].set(token.astype(jnp.int32))

    return jax.lax.fori_loop(0, length, add_token, tokens_1L)


def _logits(spec: StepSpec, params: Params, tokens_1L: jax.Array, position: jax.Array) -> jax.Array:
    """Logits of the token after `position`, of ids that the data has."""
    rows = {
        "tokens": tokens_1L,
        "positions": jnp.arange(tokens_1L.shape[1], dtype=jnp.int32)[None],
        "segments": jnp.ones_like(tokens_1L),
    }
    embed_head = EmbedAndHead(spec, params, whole=False)
    depth = spec.config.model.num_layers
    layers = Layers(spec, params["layers"], jnp.arange(depth), depth, whole=False)
    y_1LD = layers.evaluate(embed_head.embed(rows), jnp.int32(0), layer_context(spec, rows, None))
    y_11D = jax.lax.dynamic_slice_in_dim(y_1LD, position, 1, axis=1)
    return embed_head.logits(y_11D)[0, 0, : spec.real_vocab]
