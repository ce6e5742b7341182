"""Rotary positions (Su et al. 2021, arXiv:2104.09864), and their scaling to longer texts than in training.

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
    """Returns the tables of the rotary embedding. Without `scaling`, wavelengths reach about 2π · `theta` tokens."""
    frequencies = rotary_frequencies(head_dim, theta, scaling)
    angles = positions_BL[:, :, None, None].astype(jnp.float32) * frequencies
    factor = _attention_factor(scaling)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotary_frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Returns the frequencies in radians per token, float32 [K/2], highest first; computed in float64.

    `linear` divides all frequencies (Chen et al. 2023, arXiv:2306.15595). `llama3` divides the low ones and keeps the
    high ones, with a transition (Llama 3.1's reference code). `yarn` does so with another transition (Peng et al. 2023,
    arXiv:2309.00071, section 3.2).
    """
    unscaled = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling.type == "none":
        scaled_share = np.zeros_like(unscaled)
    elif scaling.type == "linear":
        scaled_share = np.ones_like(unscaled)
    elif scaling.type == "llama3":
        turns = scaling.original_max_positions * unscaled / (2 * math.pi)
        span = scaling.high_frequency_factor - scaling.low_frequency_factor
        scaled_share = 1 - np.clip((turns - scaling.low_frequency_factor) / span, 0, 1)
    else:
        scaled_share = _yarn_share(head_dim, theta, scaling)
    return (unscaled * (1 - scaled_share) + unscaled / scaling.factor * scaled_share).astype(np.float32)


def _yarn_share(head_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Returns the share of each frequency that is scaled: 0 if it makes at least `beta_fast` turns in the original
    length, 1 if it makes at most `beta_slow` turns, and in between linear in the frequency's index."""

    def index_of_frequency(turns: float) -> float:
        """Returns the unrounded index of the frequency that makes `turns` turns in the original length."""
        return head_dim * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index_of_frequency(scaling.beta_fast), index_of_frequency(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # makes the ramp a step, as the reference code does
    return np.clip((np.arange(head_dim // 2) - low) / (high - low), 0, 1)


def _attention_factor(scaling: RopeScaling) -> float:
    """Returns the factor that multiplies queries and keys. It is 1 except for yarn, which uses it to sharpen attention
    (arXiv:2309.00071, section 3.4, where it is √(1/t))."""
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


def _rotate_back(angles: Angles, gradient_BLHK: Array) -> tuple[Array, None]:
    cos, sin = angles
    return _rotate(gradient_BLHK, (cos, -sin)), None


@with_backward(_rotate_back)
def rotate(x_BLHK: Array, angles: Angles) -> tuple[Array, Angles]:
    """Applies the rotary embedding, pairing the first half of a head with the second as Llama does.

    The transpose of a rotation rotates back, so only the angles are saved for the backward pass. They are not
    differentiated.
    """
    return _rotate(x_BLHK, angles), angles
