"""Llama as plain mathematics in float64: one row of tokens at a time, layer after layer, with a mask.

Written from the papers, and not from the package.
"""

import jax
import jax.numpy as jnp
import numpy as np


def norm(x, scale, epsilon):
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + epsilon) * scale


def rotated(x, positions, theta):
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * theta ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * jnp.cos(angles) - b * jnp.sin(angles), b * jnp.cos(angles) + a * jnp.sin(angles)], -1)


def attention(p, x, positions, segments, config):
    """x is [L, D]."""
    q, k, v = (jnp.tensordot(x, p[name], 1) for name in ("query", "key", "value"))
    q, k = rotated(q, positions, config.rope_theta), rotated(k, positions, config.rope_theta)
    k, v = (jnp.repeat(one, q.shape[1] // k.shape[1], 1) for one in (k, v))
    scores = jnp.einsum("qhk,jhk->hqj", q, k) * config.head_dim**-0.5
    seen = (np.arange(len(x))[:, None] >= np.arange(len(x))) & (segments[:, None] == segments)
    shares = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1)
    return jnp.tensordot(jnp.einsum("hqj,jhk->qhk", shares, v), p["output"], 2)


def llama_layer(p, x, positions, segments, config):
    h = norm(x, p["attention_norm"]["scale"], config.norm_epsilon)
    x = x + attention(p["attention"], h, positions, segments, config)
    h, mlp = norm(x, p["mlp_norm"]["scale"], config.norm_epsilon), p["mlp"]
    return x + (jax.nn.silu(h @ mlp["gate"]) * (h @ mlp["up"])) @ mlp["down"]


def logits_of_row(params, tokens, positions, segments, config):
    """[L, V], of a Llama"""
    x = params["embedding"]["table"][tokens]
    for number in range(config.num_layers):
        layer = jax.tree.map(lambda leaf, n=number: leaf[n], params["layers"])
        x = llama_layer(layer, x, positions, segments, config)
    return norm(x, params["norm"]["scale"], config.norm_epsilon) @ params["head"]["kernel"]


def mean_loss(logits, rows, ids):
    """Over all targets of rows of logits [B, L, V], of which the data has the first `ids`."""
    log_p = jax.nn.log_softmax(logits[..., :ids], -1)
    entropy = -jnp.take_along_axis(log_p, rows["targets"][..., None], -1)[..., 0]
    return jnp.sum(entropy * rows["weights"]) / np.sum(rows["weights"])


def value_and_gradients(function, params):
    """In float64, as NumPy arrays."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), params)
        value, gradients = jax.jit(jax.value_and_grad(function))(wide)
        return float(value), jax.device_get(gradients)
