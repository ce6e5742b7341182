"""Attention in a short row, written out as two halves, each against all its keys at once: on a CPU that is quickest.

Shapes as in `blockwise.py`.
"""

import jax
import jax.numpy as jnp

from jaxmnt.models.blockwise import (
    BlockRange,
    Keys,
    Queries,
    Scores,
    Softmax,
    Sums,
    attend_block,
    differentiate_block,
    no_gradients,
)


def forward(options: Scores, q_NRLK: jax.Array, keys: Keys, sinks_H: jax.Array | None, length: int) -> list[jax.Array]:
    """Returns the outputs and the logarithms of the sums of their softmax."""
    outputs = []
    for block in _halves(length, options.window):
        q_NRQK = block.of_queries(q_NRLK)
        seen = attend_block(options, block, q_NRQK, keys, Softmax.before(q_NRQK, sinks_H))
        outputs.append(seen.output(q_NRQK.dtype))
    return [jnp.concatenate(halves, axis=2) for halves in zip(*outputs, strict=True)]


def backward(options: Scores, queries: Queries, keys: Keys, length: int) -> Sums:
    """Returns the gradients, that of queries in their own dtype."""
    sums, q_gradients = no_gradients(queries.q_NRLK, keys), []
    for block in _halves(length, options.window):
        own = Queries(*map(block.of_queries, queries))
        start = sums._replace(q_NRQK=jnp.zeros(own.q_NRLK.shape, jnp.float32))
        sums = differentiate_block(options, block, own, keys, start)
        q_gradients.append(sums.q_NRQK.astype(own.gradient_NRLK.dtype))
    return sums._replace(q_NRQK=jnp.concatenate(q_gradients, axis=2))


def _halves(length: int, window: int | None) -> list[BlockRange]:
    """Returns each half with the keys that its queries may see."""
    middle = -(-length // 2) if length >= 64 else length
    ranges = [(0, middle), (middle, length)] if middle < length else [(0, length)]
    keys = [0 if window is None else max(0, query - window + 1) for query, _ in ranges]
    return [BlockRange(query, end - query, key, end - key) for (query, end), key in zip(ranges, keys, strict=True)]
