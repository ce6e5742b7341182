"""The cross-entropy of labels, and how many are right."""

from dataclasses import dataclass

import jax.numpy as jnp

from jaxmnt.training.loss import LossSums


@dataclass(frozen=True)
class Smoothing:
    """The settings of the loss, which `train.loss_settings` sets."""

    amount: float = 0.0
    """Share of the target's probability that is divided among all ids."""


def label(logits, tokens, train, settings: Smoothing):
    """Returns sums over the labels of a chunk, and the numbers from which the accuracy is computed."""
    log_z_C = logits.log_sum_exp()
    cross_entropy_C = log_z_C - logits.pick(tokens["targets"])
    mean_C = log_z_C - logits.weighted(jnp.full_like(logits.values_CV, 1 / 27))
    loss_C = (1 - settings.amount) * cross_entropy_C + settings.amount * mean_C
    counts_C = tokens["weights"]
    right = jnp.sum(logits.is_largest(tokens["targets"]) * counts_C)
    sums = (jnp.sum(losses_C * counts_C) for losses_C in (loss_C, cross_entropy_C))
    return LossSums(*sums, reported={"accuracy": (right, jnp.sum(counts_C))})
