"""An optimizer: steps of equal size in the direction of the momentum's sign."""

import optax


def signed(momentum: float = 0.9) -> optax.GradientTransformation:
    """Returns a direction. The learning rate, its schedule and the weight decay come from the config."""
    return optax.chain(optax.trace(momentum), optax.scale_by_sign())
