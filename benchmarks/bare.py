"""The same decoder as a bare, hand-written JAX step: what jaxmnt's step is measured against.

No mesh, no shard_map, no NNX: a dict of weights, a scan over layers, the loss over chunks of tokens, and AdamW.
Shapes: B batch, L length, D model, H query heads, G key/value heads, K head width, V vocabulary, N chunks.
"""

import jax
import jax.numpy as jnp
import optax

from jaxmnt.config.schema import Config


def make_bare_step(config: Config, vocab: int, chunks: int):
    """(init, step): `step(state, tokens, targets)` returns (state, loss); jit it with the state donated."""
    model, chosen = config.model, config.optimizer
    depth, width, heads, kv, size = (
        model.num_layers, model.hidden_size, model.num_heads, model.num_kv_heads, model.head_dim,
    )  # fmt: skip
    mlp = model.intermediate_size
    schedule = optax.cosine_decay_schedule(chosen.learning_rate, config.train.steps, chosen.final_fraction)
    tx = optax.chain(
        optax.clip_by_global_norm(chosen.clip_norm),
        optax.adamw(schedule, chosen.beta1, chosen.beta2, chosen.epsilon, weight_decay=chosen.weight_decay),
    )

    def init(key):
        shapes = {
            "q": (depth, width, heads * size), "k": (depth, width, kv * size), "v": (depth, width, kv * size),
            "o": (depth, heads * size, width), "g": (depth, width, mlp), "u": (depth, width, mlp),
            "d": (depth, mlp, width), "embedding": (vocab, width), "head": (width, vocab),
        }  # fmt: skip
        keys = jax.random.split(key, len(shapes))
        params = {
            name: 0.02 * jax.random.normal(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        params |= {"n1": jnp.ones((depth, width)), "n2": jnp.ones((depth, width)), "norm": jnp.ones(width)}
        return params, tx.init(params)

    def normed(x, scale):
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + model.norm_epsilon) * scale

    def rotated(x, cos, sin):
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def loss(params, tokens, targets):
        batch, length = tokens.shape
        angles = jnp.arange(length)[:, None] * model.rope_theta ** (-jnp.arange(0, size, 2) / size)
        cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]

        def layer(x, w):
            h = normed(x, w["n1"])
            q = rotated((h @ w["q"]).reshape(batch, length, heads, size), cos, sin)
            k = rotated((h @ w["k"]).reshape(batch, length, kv, size), cos, sin)
            v = (h @ w["v"]).reshape(batch, length, kv, size)
            a = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")
            x = x + a.reshape(batch, length, heads * size) @ w["o"]
            h = normed(x, w["n2"])
            return x + (jax.nn.silu(h @ w["g"]) * (h @ w["u"])) @ w["d"], None

        stacked = {name: params[name] for name in ("q", "k", "v", "o", "g", "u", "d", "n1", "n2")}
        x, _ = jax.lax.scan(layer, params["embedding"][tokens], stacked, unroll=config.train.layer_unroll)
        x = normed(x, params["norm"]).reshape(chunks, -1, width)

        def chunk(total, part):
            x_part, targets_part = part
            logits = x_part @ params["head"]
            return total + optax.softmax_cross_entropy_with_integer_labels(logits, targets_part).sum(), None

        body = jax.checkpoint(chunk) if chunks > 1 else chunk
        total, _ = jax.lax.scan(body, jnp.zeros(()), (x, targets.reshape(chunks, -1)))
        return total / targets.size

    def step(state, tokens, targets):
        params, opt = state
        value, gradients = jax.value_and_grad(loss)(params, tokens, targets)
        updates, opt = tx.update(gradients, opt, params)
        return (optax.apply_updates(params, updates), opt), value

    return init, step
