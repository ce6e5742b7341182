"""Parts of a decoder layer.

Shapes: B batch, L length, S a device's piece of the length, D model (hidden size), F MLP (intermediate size), H query
heads, G key/value heads, K head width. A name such as x_BLD carries its shape.

Between layers each device of the `model` axis has a piece of the length (sequence parallelism, Korthikanti et al. 2022,
arXiv:2205.05198); attention and MLP gather it, compute with their share of the heads or of the width, and scatter the
sum. F, H and G are a device's own.

Weights arrive whole over the axes that are gathered and in the compute dtype (`parallel.collectives.unshard`); norm
scales in float32. Each parameter carries its logical axes as metadata (`axes=`), see `parallel.sharding.RULES`.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxmnt.parallel.collectives import gather_sequence, index_along, scatter_sequence
from jaxmnt.parallel.sharding import Placement

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

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        return _normalise(x_BSD, self.scale[...], self.epsilon)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def _normalise(x_BSD: jax.Array, scale_D: jax.Array, epsilon: float) -> jax.Array:
    """Backward keeps x alone, and not its float32 copies: under every remat policy."""
    x32_BSD = x_BSD.astype(jnp.float32)
    inverse_BS1 = jax.lax.rsqrt(jnp.mean(jnp.square(x32_BSD), axis=-1, keepdims=True) + epsilon)
    return (x32_BSD * inverse_BS1 * scale_D).astype(x_BSD.dtype)


class GatedMLP(nnx.Module):
    """The SwiGLU feed-forward layer (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, hidden_size: int, intermediate_size: int, output_std: float, rngs: nnx.Rngs):
        self.gate = weight(rngs, (hidden_size, intermediate_size), ("embed", "mlp"))
        self.up = weight(rngs, (hidden_size, intermediate_size), ("embed", "mlp"))
        self.down = weight(rngs, (intermediate_size, hidden_size), ("mlp", "embed"), output_std)

    def __call__(self, x_BSD: jax.Array, placement: Placement) -> jax.Array:
        x_BLD = gather_sequence(x_BSD, placement)
        gate_BLF = checkpoint_name(x_BLD @ self.gate[...], "mlp_gate")
        up_BLF = checkpoint_name(x_BLD @ self.up[...], "mlp_up")
        m_BLD = _gated(gate_BLF, up_BLF) @ self.down[...]
        return checkpoint_name(scatter_sequence(m_BLD, placement, "mlp"), "mlp_output")


@functools.partial(jax.checkpoint, prevent_cse=False)
def _gated(gate_BLF: jax.Array, up_BLF: jax.Array) -> jax.Array:
    """Backward keeps the two factors alone."""
    return jax.nn.silu(gate_BLF) * up_BLF


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


def dropout(x_BSD: jax.Array, rate: float, keys_B: jax.Array | None, placement: Placement) -> jax.Array:
    """Inverted dropout with a key a row and position, so that the mask does not depend on how either is placed."""
    if keys_B is None:
        return x_BSD
    size, width = x_BSD.shape[1:]
    positions_S = index_along("sequence", placement) * size + jnp.arange(size)

    def keep(row: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.bernoulli(jax.random.fold_in(row, position), 1 - rate, (width,))

    keep_BSD = jax.vmap(lambda row: jax.vmap(lambda position: keep(row, position))(positions_S))(keys_B)
    return jnp.where(keep_BSD, x_BSD / (1 - rate), 0).astype(x_BSD.dtype)
