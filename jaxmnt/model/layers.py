"""Parts of a decoder layer.

Shapes: B batch, L length, D model (hidden size), F MLP (intermediate size), H query heads, G key/value heads,
K head width. A name such as x_BLD carries its shape.

Weights arrive whole and in the compute dtype (`placement.collectives.unshard`); norm scales in float32.
Each parameter carries its logical axes as metadata (`axes=`), see `placement.rules`.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmnt.placement.rules import Placement

INIT_STD = 0.02
"""Standard deviation of initial weights, as in GPT-2 and Llama."""


def weight(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], std: float = INIT_STD) -> nnx.Param:
    """A normally distributed float32 parameter."""
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32), axes=axes)


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467), computed in float32."""

    def __init__(self, size: int, epsilon: float):
        self.scale = nnx.Param(jnp.ones(size, jnp.float32), axes=("norm",))
        self.epsilon = epsilon

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        x32_BLD = x_BLD.astype(jnp.float32)
        inverse_BL1 = jax.lax.rsqrt(jnp.mean(jnp.square(x32_BLD), axis=-1, keepdims=True) + self.epsilon)
        return (x32_BLD * inverse_BL1 * self.scale[...]).astype(x_BLD.dtype)


class GatedMLP(nnx.Module):
    """The SwiGLU feed-forward layer (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, hidden_size: int, intermediate_size: int, output_std: float, rngs: nnx.Rngs):
        self.gate = weight(rngs, (hidden_size, intermediate_size), ("embed", "mlp"))
        self.up = weight(rngs, (hidden_size, intermediate_size), ("embed", "mlp"))
        self.down = weight(rngs, (intermediate_size, hidden_size), ("mlp", "embed"), output_std)

    def __call__(self, x_BLD: jax.Array, placement: Placement) -> jax.Array:
        hidden_BLF = jax.nn.silu(x_BLD @ self.gate[...]) * (x_BLD @ self.up[...])
        hidden_BLF = placement.constrain(hidden_BLF, None, "length", "mlp")
        return hidden_BLF @ self.down[...]


def rotary_angles(positions_BL: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines [B, L, 1, K/2] of the rotary embedding (Su et al. 2021, arXiv:2104.09864)."""
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions_BL[:, :, None, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_BLHK: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Applies the rotary embedding, pairing the first half of a head with the second as Llama does."""
    cos, sin = angles
    first, second = jnp.split(x_BLHK.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BLHK.dtype)


def dropout(x_BLD: jax.Array, rate: float, keys_B: jax.Array | None) -> jax.Array:
    """Inverted dropout with one key a row, so that the mask does not depend on how rows are placed."""
    if keys_B is None:
        return x_BLD
    keep_BLD = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, x_BLD.shape[1:]))(keys_B)
    return jnp.where(keep_BLD, x_BLD / (1 - rate), 0).astype(x_BLD.dtype)
