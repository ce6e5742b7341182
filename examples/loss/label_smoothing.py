"""Cross-entropy with label smoothing (Szegedy et al. 2016, arXiv:1512.00567, section 7)."""

import jax.numpy as jnp

from jaxmnt.config.schema import Train
from jaxmnt.training.loss import Logits, LossSums, Tokens

SMOOTHING = 0.1
IDS = 257
"""Ids of the data's vocabulary: those of bytes."""


def loss(logits: Logits, tokens: Tokens, train: Train) -> LossSums:
    """Returns sums over the targets of a chunk.

    The target distribution is (1 - SMOOTHING) on the next token plus SMOOTHING spread evenly over the vocabulary.
    """
    log_normaliser_C = logits.log_sum_exp()
    next_token_C = logits.pick(tokens["targets"])
    # This device may have ids that only pad the vocabulary to the mesh. They get no share.
    even_V = jnp.where(logits.ids_V < IDS, 1 / IDS, 0.0)
    mean_logit_C = logits.weighted(even_V[None, :])
    smoothed_C = log_normaliser_C - (1 - SMOOTHING) * next_token_C - SMOOTHING * mean_logit_C
    cross_entropy_C = log_normaliser_C - next_token_C
    weights_C = tokens["weights"]
    return LossSums(jnp.sum(smoothed_C * weights_C), jnp.sum(cross_entropy_C * weights_C))
