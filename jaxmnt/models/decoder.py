"""The decoder: embedding, stacked layers, final norm and output head.

NNX modules *define* the model: shapes, initial values, logical axes, the maths of each part. Parameters travel
as a plain nested dict, and each part's slice of it is merged back into its module where it is used.

Shapes: B batch, L length, S a device's piece of the length, D model, V a device's part of the vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmnt.config.schema import Model
from jaxmnt.models.attention import Attention, Kernel
from jaxmnt.models.layers import INIT_STD, GatedMLP, RMSNorm, dropout, weight
from jaxmnt.parallel.collectives import index_along
from jaxmnt.parallel.sharding import Placement, is_axes

Params = dict[str, Any]


class Embedding(nnx.Module):
    """A row of D numbers for each token id."""

    def __init__(self, vocab_size: int, hidden_size: int, rngs: nnx.Rngs):
        self.table = weight(rngs, (vocab_size, hidden_size), ("vocab", "embed"))


def look_up(table_VD: jax.Array, tokens_BL: jax.Array, placement: Placement) -> jax.Array:
    """[B, L, D] with the rows of this device's part of the vocabulary, and zeros for tokens of other parts."""
    if not placement.mesh_axes("vocab"):
        return table_VD[tokens_BL]
    rows_BL = _own_rows(tokens_BL, table_VD.shape[0], placement)
    return table_VD.at[rows_BL].get(mode="fill", fill_value=0)


def look_up_gradient(x_gradient_BLD: jax.Array, tokens_BL: jax.Array, size: int, placement: Placement) -> jax.Array:
    """The gradient [V, D] of a table of `size` rows, added up in float32."""
    rows_BL = _own_rows(tokens_BL, size, placement)
    start_VD = jnp.zeros((size, x_gradient_BLD.shape[-1]), jnp.float32)
    return start_VD.at[rows_BL].add(x_gradient_BLD.astype(jnp.float32), mode="drop")


def _own_rows(tokens_BL: jax.Array, size: int, placement: Placement) -> jax.Array:
    """Rows of this device's part of the table; out of range, and not negative, for other tokens."""
    rows_BL = tokens_BL - index_along("vocab", placement) * size
    return jnp.where((rows_BL >= 0) & (rows_BL < size), rows_BL, size)


class Head(nnx.Module):
    """The output projection onto the vocabulary; the loss applies it."""

    def __init__(self, vocab_size: int, hidden_size: int, rngs: nnx.Rngs):
        self.kernel = weight(rngs, (hidden_size, vocab_size), ("embed", "vocab"))


class Block(nnx.Module):
    """One pre-norm decoder layer."""

    def __init__(self, config: Model, rngs: nnx.Rngs):
        assert config.intermediate_size
        # GPT-2's scaling keeps the residual stream's variance independent of depth.
        output_std = INIT_STD / (2 * config.num_layers) ** 0.5
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_epsilon)
        self.attention = Attention(config, output_std, rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_epsilon)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, output_std, rngs)
        self.dropout = config.dropout

    def __call__(
        self,
        x_BSD: jax.Array,
        angles: tuple[jax.Array, jax.Array],
        mask_B1LL: jax.Array | None,
        keys_B: jax.Array | None,
        kernel: Kernel,
        recompute_attention: bool,
        placement: Placement,
    ) -> jax.Array:
        attention_keys, mlp_keys = (
            (None, None) if keys_B is None else jnp.moveaxis(jax.vmap(jax.random.split)(keys_B), 1, 0)
        )
        a_BSD = self.attention(self.attention_norm(x_BSD), angles, mask_B1LL, kernel, recompute_attention, placement)
        x_BSD = x_BSD + dropout(a_BSD, self.dropout, attention_keys, placement)
        m_BSD = self.mlp(self.mlp_norm(x_BSD), placement)
        return x_BSD + dropout(m_BSD, self.dropout, mlp_keys, placement)


class Decoder(nnx.Module):
    """All parameters of the model; layers are stacked on a leading axis."""

    def __init__(self, config: Model, vocab_size: int, rngs: nnx.Rngs):
        self.embedding = Embedding(vocab_size, config.hidden_size, rngs)
        self.layers = nnx.vmap(Block, in_axes=(None, 0))(config, rngs.split(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_epsilon)
        if not config.tie_embeddings:
            self.head = Head(vocab_size, config.hidden_size, rngs)


@dataclass(frozen=True)
class Definition:
    """The model without numbers: what each part computes, and each parameter's shape and logical axes."""

    config: Model
    vocab_size: int
    parts: dict[str, Any]  # name → NNX graph of the part
    abstract: Params  # of jax.ShapeDtypeStruct, float32
    axes: Params  # of logical axes

    def init(self, key: jax.Array) -> Params:
        """Initial float32 parameters; the same for any sharding."""
        return nnx.to_pure_dict(nnx.state(Decoder(self.config, self.vocab_size, nnx.Rngs(params=key)), nnx.Param))

    def part(self, name: str, params: Params) -> Any:
        """The module of one part with the given parameters."""
        return nnx.merge(self.parts[name], params)

    @property
    def layer_axes(self) -> Params:
        """The logical axes of one layer's parameters."""
        return jax.tree.map(lambda names: names[1:], self.axes["layers"], is_leaf=is_axes)

    @property
    def parameter_count(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.abstract))


def define(config: Model, vocab_size: int) -> Definition:
    """The definition for a config; touches no device."""
    decoder = nnx.eval_shape(lambda: Decoder(config, vocab_size, nnx.Rngs(params=0)))
    block = nnx.eval_shape(lambda: Block(config, nnx.Rngs(params=0)))
    modules = {"block": block, "norm": decoder.norm}
    state = nnx.state(decoder, nnx.Param)
    abstract = nnx.to_pure_dict(state)
    is_variable = lambda node: isinstance(node, nnx.Variable)
    axes = nnx.to_pure_dict(jax.tree.map(lambda v: v.replace(v.get_metadata("axes")), state, is_leaf=is_variable))
    axes["layers"] = jax.tree.map(lambda names: ("layers", *names), axes["layers"], is_leaf=is_axes)
    parts = {name: nnx.split(module)[0] for name, module in modules.items()}
    return Definition(config, vocab_size, parts, abstract, axes)
