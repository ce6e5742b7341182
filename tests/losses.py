"""Losses by dotted path: the entropy, and two functions that are wrong."""

import jax.numpy as jnp

from jaxmnt.training.loss import Logits, LossSums


def entropy(logits: Logits, tokens, train) -> LossSums:
    """Returns the negative entropy of the model's own probabilities: the weights of `weighted` have a gradient, too."""
    log_z_C = logits.log_sum_exp()
    negative_C = logits.weighted(jnp.exp(logits.values_CV - log_z_C[:, None])) - log_z_C
    cross_entropy_C = log_z_C - logits.pick(tokens["targets"])
    return LossSums(jnp.sum(negative_C * tokens["weights"]), jnp.sum(cross_entropy_C * tokens["weights"]))


def with_metrics(logits: Logits, tokens, train) -> LossSums:
    """Returns the cross-entropy, the accuracy, and the mean target of tokens with a weight."""
    counts_C = tokens["weights"] > 0
    cross_entropy = jnp.sum((logits.log_sum_exp() - logits.pick(tokens["targets"])) * tokens["weights"])
    right = jnp.sum(logits.is_largest(tokens["targets"]) & counts_C)
    mean_target = (jnp.sum(tokens["targets"] * counts_C), jnp.sum(counts_C))
    return LossSums(cross_entropy, cross_entropy, {"accuracy": (right, jnp.sum(counts_C)), "target": mean_target})


def returns_mean(logits: Logits, tokens, train):
    """Returns one number where the contract asks for two sums."""
    return jnp.mean(logits.log_sum_exp())


def raising(logits: Logits, tokens, train) -> LossSums:
    """Raises, because the shapes of the product do not fit."""
    return jnp.zeros(3) @ logits.values_CV
