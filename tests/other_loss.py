"""Losses outside of the package: a teacher's probabilities, smoothed, the entropy, and two that are wrong."""

import jax.numpy as jnp
import numpy as np

from jaxmnt.training.loss import Logits, LossSums

IDS, SHARE = 60, 0.1
TEACHER = np.random.default_rng(0).dirichlet(np.ones(IDS), IDS).astype(np.float32)
"""Probabilities of the next token after each."""


def distillation(logits: Logits, tokens, train) -> LossSums:
    """Cross-entropy against (1 - SHARE) · teacher + SHARE · even."""
    known = logits.ids_V < IDS
    teacher = jnp.asarray(TEACHER)[tokens["tokens"]][:, jnp.minimum(logits.ids_V, IDS - 1)]
    wanted = jnp.where(known, (1 - SHARE) * teacher + SHARE / IDS, 0)
    entropy = logits.log_sum_exp() - logits.weighted(wanted)
    plain = logits.log_sum_exp() - logits.pick(tokens["targets"])
    return LossSums(jnp.sum(entropy * tokens["weights"]), jnp.sum(plain * tokens["weights"]))


def entropy(logits: Logits, tokens, train) -> LossSums:
    """The negative entropy of the model's own probabilities: a weight of `weighted` may have a gradient, too."""
    log_z_C = logits.log_sum_exp()
    negative_C = logits.weighted(jnp.exp(logits.values_CV - log_z_C[:, None])) - log_z_C
    plain = log_z_C - logits.pick(tokens["targets"])
    return LossSums(jnp.sum(negative_C * tokens["weights"]), jnp.sum(plain * tokens["weights"]))


def mean(logits: Logits, tokens, train):
    return jnp.mean(logits.log_sum_exp())


def raising(logits: Logits, tokens, train) -> LossSums:
    return jnp.zeros(3) @ logits.values_CV  # of another shape
