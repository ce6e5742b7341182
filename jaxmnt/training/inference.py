"""Calling a trained model: the logits of whole rows on a mesh, and sampling a continuation on one device.

Sampling computes the whole window again for each token, without a key/value cache: simple, and quick enough to look
at a model. It is not a server.

Shapes: B rows, L length, D model, V vocabulary.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxmnt.models.contract import Params
from jaxmnt.parallel.layout import map_with_axes
from jaxmnt.parallel.sharding import is_axes
from jaxmnt.training.embed_head import EmbedAndHead
from jaxmnt.training.spec import StepSpec
from jaxmnt.training.stage import Layers, always, microbatch_rows


def row_logits(spec: StepSpec, params: Params, buffers: Params, tokens_BL: jax.Array) -> jax.Array:
    """[B, L, V] in float32, of ids that the data has: at each position those of the next token, given the tokens up to
    it, all of one document.

    `params` and `buffers` are as they are stored, on the shardings of `canonical_abstract`. B must divide among the
    batch shards, and L among the devices of `model`. To be jitted; the mesh has no pipeline.
    """
    axes, placement = (spec.definition.axes, spec.definition.buffer_axes), spec.placement
    placed = map_with_axes(spec.layout.to_device_layout, (params, buffers), axes)
    call = jax.shard_map(
        lambda *arguments: _local_logits(spec, *arguments),
        mesh=placement.mesh,
        in_specs=(*jax.tree.map(placement.spec, axes, is_leaf=is_axes), placement.spec(("batch", "length"))),
        out_specs=placement.spec(("batch", "length", "vocab")),
        check_vma=False,
    )
    # float32 means float32, as in training.
    with jax.default_matmul_precision("highest" if spec.dtype == jnp.float32 else "default"):
        return call(*placed, tokens_BL)[..., : spec.data_vocab_size]


def sample(
    spec: StepSpec, params: Params, buffers: Params, prompt: np.ndarray, length: int, temperature: float, seed: int
) -> np.ndarray:
    """int32 token ids that continue `prompt`; both together are at most the window of the config.

    `temperature` divides the logits; 0 takes the likeliest token.
    """
    window = spec.config.data.sequence_length
    assert len(prompt) > 0 and len(prompt) + length <= window
    tokens = np.zeros((1, window), np.int32)
    tokens[0, : len(prompt)] = prompt
    run = jax.jit(functools.partial(_continue, spec, length, temperature))
    filled = run(params, buffers, tokens, jnp.int32(len(prompt)), jax.random.key(seed))
    return np.asarray(filled)[0, len(prompt) : len(prompt) + length]


def _continue(
    spec: StepSpec,
    length: int,
    temperature: float,
    params: Params,
    buffers: Params,
    tokens_1L: jax.Array,
    start: jax.Array,
    key: jax.Array,
) -> jax.Array:
    def add_token(i: jax.Array, tokens_1L: jax.Array) -> jax.Array:
        y_1LD = _last_layer(spec, params, buffers, tokens_1L)
        y_11D = jax.lax.dynamic_slice_in_dim(y_1LD, start + i - 1, 1, axis=1)
        logits_V = EmbedAndHead(spec, params, whole=False).logits(y_11D)[0, 0, : spec.data_vocab_size]
        if temperature == 0:
            token = jnp.argmax(logits_V)
        else:
            token = jax.random.categorical(jax.random.fold_in(key, i), logits_V / temperature)
        return tokens_1L.at[0, start + i].set(token.astype(jnp.int32))

    return jax.lax.fori_loop(0, length, add_token, tokens_1L)


def _local_logits(spec: StepSpec, params: Params, buffers: Params, tokens_BL: jax.Array) -> jax.Array:
    """On one device of the mesh."""
    return EmbedAndHead(spec, params, whole=False).logits(_last_layer(spec, params, buffers, tokens_BL))


def _last_layer(spec: StepSpec, params: Params, buffers: Params, tokens_BL: jax.Array) -> jax.Array:
    """The output of the last layer for rows of one document each."""
    positions_BL = jnp.broadcast_to(jnp.arange(tokens_BL.shape[1], dtype=jnp.int32), tokens_BL.shape)
    rows = {"tokens": tokens_BL, "positions": positions_BL, "segments": jnp.ones_like(tokens_BL)}
    x_BSD = EmbedAndHead(spec, params, whole=False).embed(rows)
    seen = microbatch_rows(spec, rows, None)
    for group in spec.definition.groups:
        order = jnp.arange(group.units)
        own = (params[group.name], buffers.get(group.name, {}))
        x_BSD = Layers(spec, group, *own, order, group.units, whole=False).evaluate(x_BSD, jnp.int32(0), seen, always)
    return x_BSD
