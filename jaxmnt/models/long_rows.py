"""Attention in a long row: loops over blocks of queries, and over the blocks of keys that some of these may see.

Shapes as in `blockwise.py`. The arrays have whole blocks; a row's own length may be less.
"""

from collections.abc import Callable
from typing import Any

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

BLOCK = 512
"""Queries, and keys, of a block."""


def forward(options: Scores, q_NRLK: jax.Array, keys: Keys, sinks_H: jax.Array | None, length: int) -> list[jax.Array]:
    """Returns the outputs and the logarithms of the sums of their softmax."""

    def attend_queries(_: None, index: jax.Array) -> tuple[None, tuple[jax.Array, jax.Array]]:
        block = BlockRange(index * BLOCK, BLOCK, 0, BLOCK)
        q_NRQK = block.of_queries(q_NRLK)
        add = lambda number, seen: attend_block(options, block._replace(key=number * BLOCK), q_NRQK, keys, seen)
        seen = _over_keys(options.window, length, index, add, Softmax.before(q_NRQK, sinks_H))
        return None, seen.output(q_NRQK.dtype)

    _, outputs = jax.lax.scan(attend_queries, None, jnp.arange(-(-length // BLOCK)))
    return [_joined(x) for x in outputs]


def backward(options: Scores, queries: Queries, keys: Keys, length: int) -> Sums:
    """Returns the gradients, that of queries in their own dtype."""

    def differentiate_queries(carry: Any, index: jax.Array) -> Any:
        block = BlockRange(index * BLOCK, BLOCK, 0, BLOCK)
        own = Queries(*map(block.of_queries, queries))
        add = lambda number, sums: differentiate_block(options, block._replace(key=number * BLOCK), own, keys, sums)
        start = Sums(jnp.zeros(own.q_NRLK.shape, jnp.float32), *carry)
        q_gradient_NRQK, *carry = _over_keys(options.window, length, index, add, start)
        return tuple(carry), q_gradient_NRQK.astype(own.gradient_NRLK.dtype)

    _, *nothing = no_gradients(queries.q_NRLK, keys)
    carry, q_gradients = jax.lax.scan(differentiate_queries, tuple(nothing), jnp.arange(-(-length // BLOCK)))
    return Sums(_joined(q_gradients), *carry)


def _over_keys(
    window: int | None, length: int, index: jax.Array, add: Callable[[jax.Array, Any], Any], start: Any
) -> Any:
    """Folds `add` over the numbers of the blocks of keys that some of these queries see."""
    first = 0 if window is None else jnp.maximum(0, index * BLOCK - window + 1) // BLOCK
    reach = length if window is None else min(length, window + BLOCK)
    mean = (reach - reach**2 / (2 * length)) / BLOCK + 0.5  # of the blocks of keys, for the plan
    with jax.named_scope(f"about_{mean:.1f}_rounds"):
        return jax.lax.fori_loop(first, index + 1, add, start)


def _joined(x: jax.Array) -> jax.Array:
    """Puts the outputs of blocks together, [N, R, L, …]."""
    return jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1, *x.shape[4:])
