"""Families of models as plain mathematics in float64: one row of tokens at a time, layer after layer, with a mask.

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


def attention(p, x, positions, segments, config, *, window=None, heads_norm=False):
    """x is [L, D]."""
    q, k, v = (jnp.tensordot(x, p[name], 1) for name in ("query", "key", "value"))
    if "query_bias" in p:
        q, k, v = q + p["query_bias"], k + p["key_bias"], v + p["value_bias"]
    if heads_norm:
        q = norm(q, p["query_norm"]["scale"], config.norm_epsilon)
        k = norm(k, p["key_norm"]["scale"], config.norm_epsilon)
    q, k = rotated(q, positions, config.rope_theta), rotated(k, positions, config.rope_theta)
    k, v = (jnp.repeat(one, q.shape[1] // k.shape[1], 1) for one in (k, v))
    scores = jnp.einsum("qhk,jhk->hqj", q, k) * (config.attention_scale or config.head_dim**-0.5)
    if cap := config.attention_soft_cap:
        scores = cap * jnp.tanh(scores / cap)
    back = np.arange(len(x))[:, None] - np.arange(len(x))
    seen = (back >= 0) & (back < (window or len(x))) & (segments[:, None] == segments)
    shares = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1)
    return jnp.tensordot(jnp.einsum("hqj,jhk->qhk", shares, v), p["output"], 2)


def mlp(p, x, activation=jax.nn.silu):
    return (activation(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def llama_layer(p, x, positions, segments, config, **options):
    x = x + attention(
        p["attention"],
        norm(x, p["attention_norm"]["scale"], config.norm_epsilon),
        positions,
        segments,
        config,
        **options,
    )
    return x + mlp(p["mlp"], norm(x, p["mlp_norm"]["scale"], config.norm_epsilon))


def gemma2_layer(p, x, positions, segments, config, window):
    around = lambda name, x: norm(x, 1 + p[name]["scale"], config.norm_epsilon)
    a = attention(p["attention"], around("attention_norm", x), positions, segments, config, window=window)
    x = x + around("after_attention_norm", a)
    gelu = lambda x: 0.5 * x * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return x + around("after_mlp_norm", mlp(p["mlp"], around("mlp_norm", x), gelu))


def logits_of_row(family, params, tokens, positions, segments, config):
    """[L, V]"""
    pick = lambda tree, index: jax.tree.map(lambda leaf: leaf[index], tree)
    x, layers = params["embedding"]["table"][tokens], params["layers"]
    gemma = family == "gemma2"
    if gemma:
        x = x * np.sqrt(config.hidden_size)
    for number in range(config.num_layers):
        if gemma:
            window = config.sliding_window if number % 2 == 0 else None
            x = gemma2_layer(pick(layers[str(number % 2)], number // 2), x, positions, segments, config, window)
        else:
            x = llama_layer(pick(layers, number), x, positions, segments, config, heads_norm=family == "qwen3")
    x = norm(x, params["norm"]["scale"] + gemma, config.norm_epsilon)
    logits = x @ (params["embedding"]["table"].T if config.tie_embeddings else params["head"]["kernel"])
    return config.logit_soft_cap * jnp.tanh(logits / config.logit_soft_cap) if config.logit_soft_cap else logits


def mean_loss(logits, rows, ids):
    """Over all targets of rows of logits [B, L, V], of which the data has the first `ids`."""
    log_p = jax.nn.log_softmax(logits[..., :ids], -1)
    entropy = -jnp.take_along_axis(log_p, rows["targets"][..., None], -1)[..., 0]
    return jnp.sum(entropy * rows["weights"]) / np.sum(rows["weights"])


def loss(family, params, rows, config, ids):
    of_row = lambda *row: logits_of_row(family, params, *row, config)
    return mean_loss(jax.vmap(of_row)(rows["tokens"], rows["positions"], rows["segments"]), rows, ids)


def value_and_gradients(function, params):
    """In float64, as NumPy arrays."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), params)
        value, gradients = jax.jit(jax.value_and_grad(function))(wide)
        return float(value), jax.device_get(gradients)
