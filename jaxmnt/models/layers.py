"""Parts of a decoder layer.

Shapes: B batch, L length, S a device's piece of the length, D model (hidden size), F MLP (intermediate size), H query
heads, G key/value heads, K head width. A name such as x_BLD includes the array's shape.

Between layers, each device of the `model` axis has a piece of the length (sequence parallelism, Korthikanti et al.
2022, arXiv:2205.05198). Attention and MLP gather the pieces, compute with the device's share of the heads or of the
MLP's width, and scatter the sum. F, H and G are the numbers on one device.

Layers receive weights that are gathered and in the compute dtype (`parallel.collectives.unshard`), and norm scales in
float32. Each parameter has its logical axes as metadata (`axes=`); see `parallel.sharding.RULES`.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxmnt.models.projections import project_gathered, project_scattered
from jaxmnt.parallel.chunks import places_in_row
from jaxmnt.parallel.collectives import index_along, with_backward
from jaxmnt.parallel.sharding import Placement

INIT_STD = 0.02
"""Standard deviation of initial weights, as in GPT-2 and Llama."""


def output_std(num_layers: int) -> float:
    """Returns the standard deviation of initial output weights. It is scaled as in GPT-2, which keeps the variance of
    the residual stream independent of depth."""
    return INIT_STD / (2 * num_layers) ** 0.5


def weight(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], std: float = INIT_STD) -> nnx.Param:
    """Returns a normally distributed float32 parameter."""
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32), axes=axes)


def zeros_after(x: Array, like: Array) -> Array:
    """Returns zeros with the shape and dtype of `like` that XLA allocates only after computing x. XLA merges all zeros
    of one shape into one early allocation, which for the gradient of a large table would occupy memory until the
    gradient is accumulated. These zeros appear to depend on x, so XLA cannot merge them with others."""
    always_false = x.reshape(-1)[0] > jnp.inf
    return jnp.broadcast_to(always_false.astype(like.dtype), like.shape)


def gradient_zeros(x: Array, like: Array, placement: Placement) -> Array:
    """Returns the zeros to which the gradient of a large table is added, which is computed from x. If stages divide
    tokens, these are plain zeros, so that XLA adds the gradient directly to the sum of other microbatches."""
    return jnp.zeros_like(like) if placement.divides_tokens else zeros_after(x, like)


class Embedding(nnx.Module):
    """A table with a row of D numbers for each token id, or for each position if `axis` is `positions`."""

    def __init__(self, rows: int, hidden_size: int, rngs: nnx.Rngs, axis: str = "vocab"):
        self.table = weight(rngs, (rows, hidden_size), (axis, "embed"))
        self.axis = axis

    def __call__(self, tokens_BL: Array, dtype: jnp.dtype, placement: Placement) -> Array:
        """Returns the rows of the tokens, [B, L, D] in `dtype`. Tokens outside of this device's part of the vocabulary
        have zeros, so the result must still be summed over the mesh axes that split the vocabulary."""
        table_VD = self.table[...]
        rows_BL = tokens_BL - index_along(self.axis, placement) * table_VD.shape[0]
        inside_BL = (rows_BL >= 0) & (rows_BL < table_VD.shape[0])
        # A negative index would count from the table's end.
        return _look_up(dtype, placement, table_VD, jnp.where(inside_BL, rows_BL, table_VD.shape[0]))


def _look_up_gradient(
    dtype: jnp.dtype, placement: Placement, saved: tuple[Array, Array], gradient_BLD: Array
) -> tuple[Array, None]:
    table_VD, rows_BL = saved
    zeros_VD = gradient_zeros(gradient_BLD, table_VD, placement)
    return zeros_VD.at[rows_BL].add(gradient_BLD.astype(table_VD.dtype), mode="drop"), None


@with_backward(_look_up_gradient, static=2)
def _look_up(
    dtype: jnp.dtype, placement: Placement, table_VD: Array, rows_BL: Array
) -> tuple[Array, tuple[Array, Array]]:
    """Returns rows of a table, and zeros for rows beyond its end. The gradient is accumulated in the table's dtype."""
    return table_VD.astype(dtype).at[rows_BL].get(mode="fill", fill_value=0), (table_VD, rows_BL)


class Head(nnx.Module):
    """The output projection onto the vocabulary, which the loss applies."""

    def __init__(self, vocab_size: int, hidden_size: int, rngs: nnx.Rngs):
        self.kernel = weight(rngs, (hidden_size, vocab_size), ("embed", "vocab"))


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467), computed in float32."""

    def __init__(self, size: int, epsilon: float, *, offset: float = 0.0):
        """The norm multiplies by `scale` + `offset`, which is 1 initially."""
        self.scale = nnx.Param(jnp.full(size, 1 - offset, jnp.float32), axes=("norm",))
        self.epsilon, self.offset = epsilon, offset

    def __call__(self, x_BSD: Array) -> Array:
        scale_D = self.scale[...]
        return _normalise(x_BSD, scale_D + self.offset if self.offset else scale_D, self.epsilon)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def _normalise(x_BSD: Array, scale_D: Array, epsilon: float) -> Array:
    """Returns x normalised. With every remat policy, only x is saved for the backward pass, and no float32 copies."""
    x32_BSD = x_BSD.astype(jnp.float32)
    inverse_BS1 = jax.lax.rsqrt(jnp.mean(jnp.square(x32_BSD), axis=-1, keepdims=True) + epsilon)
    return (x32_BSD * inverse_BS1 * scale_D).astype(x_BSD.dtype)


class LayerNorm(nnx.Module):
    """Layer normalisation (Ba et al. 2016, arXiv:1607.06450) with scale and bias, computed in float32."""

    def __init__(self, size: int, epsilon: float):
        self.scale = nnx.Param(jnp.ones(size, jnp.float32), axes=("norm",))
        self.bias = nnx.Param(jnp.zeros(size, jnp.float32), axes=("norm",))
        self.epsilon = epsilon

    def __call__(self, x_BSD: Array) -> Array:
        return _standardise(x_BSD, self.scale[...], self.bias[...], self.epsilon)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=3)
def _standardise(x_BSD: Array, scale_D: Array, bias_D: Array, epsilon: float) -> Array:
    """Returns x standardised. Only x is saved for the backward pass, as in `_normalise`."""
    x32_BSD = x_BSD.astype(jnp.float32)
    centred_BSD = x32_BSD - jnp.mean(x32_BSD, axis=-1, keepdims=True)
    inverse_BS1 = jax.lax.rsqrt(jnp.mean(jnp.square(centred_BSD), axis=-1, keepdims=True) + epsilon)
    return (centred_BSD * inverse_BS1 * scale_D + bias_D).astype(x_BSD.dtype)


Activation = Callable[[Array], Array]


class GatedMLP(nnx.Module):
    """The gated feed-forward layer (Shazeer 2020, arXiv:2002.05202): SwiGLU, or a variant with another activation."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        output_std: float,
        rngs: nnx.Rngs,
        activation: Activation = jax.nn.silu,
    ):
        self.activation = activation
        self.gate = weight(rngs, (hidden_size, intermediate_size), ("embed", "mlp"))
        self.up = weight(rngs, (hidden_size, intermediate_size), ("embed", "mlp"))
        self.down = weight(rngs, (intermediate_size, hidden_size), ("mlp", "embed"), output_std)

    def __call__(self, x_BSD: Array, placement: Placement) -> Array:
        gate_BLF, up_BLF = project_gathered(x_BSD, (self.gate[...], self.up[...]), placement)
        gate_BLF, up_BLF = checkpoint_name(gate_BLF, "mlp_gate"), checkpoint_name(up_BLF, "mlp_up")
        h_BLF = _apply_gate(gate_BLF, up_BLF, self.activation)
        return checkpoint_name(project_scattered(h_BLF, self.down[...], placement, "mlp"), "mlp_output")


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def _apply_gate(gate_BLF: Array, up_BLF: Array, activation: Activation) -> Array:
    """Returns the product of the activated gate and `up`. Only these two arguments are saved for the backward pass."""
    return activation(gate_BLF) * up_BLF


def dropout(x_BSD: Array, rate: float, keys_B: Array | None, placement: Placement) -> Array:
    """Applies inverted dropout. It derives a key for each row and place, so the mask does not depend on how rows are
    divided among devices."""
    if keys_B is None:
        return x_BSD
    piece_length, width = x_BSD.shape[1:]
    places_S = places_in_row(piece_length, placement)

    def keep(row: Array, place: Array) -> Array:
        return jax.random.bernoulli(jax.random.fold_in(row, place), 1 - rate, (width,))

    keep_BSD = jax.vmap(jax.vmap(keep, (None, 0)), (0, None))(keys_B, places_S)
    return jnp.where(keep_BSD, x_BSD / (1 - rate), 0).astype(x_BSD.dtype)
