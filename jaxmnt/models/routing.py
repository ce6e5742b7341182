"""Routing of tokens to experts: which experts a token uses, their shares, and the losses that keep the loads even.

All of it is computed in float32, because ties between bfloat16 logits would be frequent. Padding is not routed.

Shapes: B batch, S a device's piece of the length, E experts, K experts of a token.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxmnt.config.model import Model
from jaxmnt.parallel.collectives import sum_over
from jaxmnt.parallel.sharding import Placement


class Routes(NamedTuple):
    """The experts of each token."""

    ids_BSK: Array
    """int32 ids of the token's experts, the best first; E (no expert) for padding."""
    shares_BSK: Array
    """float32 factors of the experts' outputs; 0 for padding."""
    scores_BSE: Array
    """float32 scores of all experts, whose sum is 1; 0 for padding. The balance loss uses them."""


def choose_experts(config: Model, logits_BSE: Array, bias_E: Array, is_real_BS: Array) -> Routes:
    """Returns the experts of each token, by the rule `model.router_score`. Of equal scores, the expert with the lower
    id wins on every backend.

    `bias_E` takes part in the choice alone (Wang et al. 2024, arXiv:2408.15664), so neither it nor the choice has a
    gradient. The shares have.
    """
    assert config.experts_per_token
    rule = config.router_score
    scores_BSE = jax.nn.sigmoid(logits_BSE) if rule == "sigmoid" else jax.nn.softmax(logits_BSE, axis=-1)
    ranked_BSE = (logits_BSE if rule == "chosen_softmax" else scores_BSE) + bias_E
    ids_BSK = jax.lax.top_k(jax.lax.stop_gradient(ranked_BSE), config.experts_per_token)[1].astype(jnp.int32)
    if rule == "chosen_softmax":
        shares_BSK = jax.nn.softmax(jnp.take_along_axis(logits_BSE, ids_BSK, axis=-1), axis=-1)
    else:
        shares_BSK = jnp.take_along_axis(scores_BSE, ids_BSK, axis=-1)
        if config.router_renormalise:
            shares_BSK /= jnp.sum(shares_BSK, axis=-1, keepdims=True) + 1e-20
    if rule == "sigmoid":
        scores_BSE /= jnp.sum(scores_BSE, axis=-1, keepdims=True) + 1e-20
    is_real_BS1 = is_real_BS[..., None]
    return Routes(
        jnp.where(is_real_BS1, ids_BSK, logits_BSE.shape[-1]),
        jnp.where(is_real_BS1, shares_BSK, 0),
        jnp.where(is_real_BS1, scores_BSE, 0),
    )


def loads_of_rows(ids_BSK: Array, experts: int) -> Array:
    """Returns, for each row of a device's piece, how many tokens use each expert, float32 [B, E]."""
    is_chosen_BSKE = ids_BSK[..., None] == jnp.arange(experts, dtype=jnp.int32)
    return jnp.sum(is_chosen_BSKE, axis=(1, 2), dtype=jnp.float32)


def balance_loss(config: Model, routes: Routes, last_shares_E: Array, is_real_BL: Array, placement: Placement) -> Array:
    """Returns this device's part of the sum, over the real tokens of its rows, of the balance loss (Fedus et al. 2021,
    arXiv:2101.03961). Its mean over tokens is 1 if all experts have the same load and the same mean score.

    For T tokens, it is E / (K · T) · Σ_i C_i · S_i, where C_i of the tokens use expert i and S_i is the sum of their
    scores. C has no gradient. So the loss of a row, and its gradient, are exact once the counts of the row's pieces are
    summed, whatever the mesh and the microbatches. With `model.balance_over: batch`, the shares C_i / T are those of
    the step before, in `last_shares_E`, because those of this step are not known before its last microbatch.
    """
    assert config.experts_per_token
    factor = len(last_shares_E) / config.experts_per_token
    scores_BE = jnp.sum(routes.scores_BSE, axis=1)
    if config.balance_over == "batch":
        return factor * jnp.sum(last_shares_E * scores_BE)
    counts_BE = jax.lax.stop_gradient(loads_of_rows(routes.ids_BSK, len(last_shares_E)))
    counts_BE = sum_over("length", sum_over("sequence", counts_BE, placement), placement)
    tokens_B1 = sum_over("length", jnp.sum(is_real_BL, axis=1, keepdims=True, dtype=jnp.float32), placement)
    return factor * jnp.sum(counts_BE / jnp.maximum(tokens_B1, 1) * scores_BE)


def router_z_loss(logits_BSE: Array, is_real_BS: Array) -> Array:
    """Returns this device's sum, over real tokens, of the squared log-sum-exp of the router's logits (Zoph et al. 2022,
    arXiv:2202.08906)."""
    return jnp.sum(jnp.where(is_real_BS, jnp.square(jax.nn.logsumexp(logits_BSE, axis=-1)), 0))
