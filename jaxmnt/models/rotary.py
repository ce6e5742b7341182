"""Rotary positions (Su et al. 2021, arXiv:2104.09864), and what stretches them beyond the length of training.

Shapes: B batch, L length, H heads, K head width.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxmnt.config.model import RopeScaling
from jaxmnt.parallel.collectives import with_backward

UNSCALED = RopeScaling()

Angles = tuple[Array, Array]
"""Cosines and sines [B, L, 1, K/2] of the rotary embedding, in float32."""


def rotary_angles(positions_BL: Array, head_dim: int, theta: float, scaling: RopeScaling = UNSCALED) -> Angles:
    """The tables of the rotary embedding, for wavelengths up to about 2π · `theta`, stretched as `scaling` says."""
    frequencies = rotary_frequencies(head_dim, theta, scaling)
    angles = positions_BL[:, :, None, None].astype(jnp.float32) * frequencies
    factor = _attention_factor(scaling)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotary_frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Radians a token, float32 [K/2], the quickest first; computed in float64.

    `linear` divides all (Chen et al. 2023, arXiv:2306.15595). `llama3` divides the slow ones and leaves the quick
    ones, with a transition (Llama 3.1's reference code); `yarn` is that by another ramp (Peng et al. 2023,
    arXiv:2309.00071, section 3.2).
    """
    plain = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling.type == "none":
        share = np.zeros_like(plain)
    elif scaling.type == "linear":
        share = np.ones_like(plain)
    elif scaling.type == "llama3":
        turns = scaling.original_max_positions * plain / (2 * math.pi)
        span = scaling.high_frequency_factor - scaling.low_frequency_factor
        share = 1 - np.clip((turns - scaling.low_frequency_factor) / span, 0, 1)
    else:
        share = _yarn_share(head_dim, theta, scaling)
    return (plain * (1 - share) + plain / scaling.factor * share).astype(np.float32)


def _yarn_share(head_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """How much of each frequency is stretched: nothing of those that turn `beta_fast` times in the original length,
    all of those that turn `beta_slow` times, and linearly by their number in between."""

    def number(turns: float) -> float:
        return head_dim * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = number(scaling.beta_fast), number(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # as the reference has it: a step
    return np.clip((np.arange(head_dim // 2) - low) / (high - low), 0, 1)


def _attention_factor(scaling: RopeScaling) -> float:
    """What multiplies queries and keys: for yarn, which makes attention sharper (section 3.4), √t⁻¹ of the paper."""
    if scaling.type != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1 if scaling.factor > 1 else 1.0


def _rotate(x_BLHK: Array, angles: Angles) -> Array:
    cos, sin = angles
    first, second = jnp.split(x_BLHK.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BLHK.dtype)


@with_backward(lambda angles, gradient_BLHK: (_rotate(gradient_BLHK, (angles[0], -angles[1])), None))
def rotate(x_BLHK: Array, angles: Angles) -> tuple[Array, Angles]:
    """Applies the rotary embedding, pairing the first half of a head with the second as Llama does.

    Its transpose turns back, so that backward needs the angles alone, which are not differentiated.
    """
    return _rotate(x_BLHK, angles), angles
