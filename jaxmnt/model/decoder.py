"""The decoder: embedding, stacked layers under one scan, final norm and output head.

NNX modules *define* the model: shapes, initial values, logical axes, the maths of each part. Parameters travel
as a plain nested dict, and `hidden_states` merges each part's slice of it back into its module where it is used.

Shapes: B batch, L length, D model, V vocabulary, N layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.extend.core
import jax.numpy as jnp
from flax import nnx

from jaxmnt.config.schema import Model
from jaxmnt.model.attention import Attention, Kernel
from jaxmnt.model.layers import INIT_STD, GatedMLP, RMSNorm, dropout, rotary_angles, weight
from jaxmnt.placement.collectives import GATHERED, unshard
from jaxmnt.placement.rules import Placement, is_axes

Params = dict[str, Any]
Remat = Literal["none", "dots", "full"]


class Embedding(nnx.Module):
    """A row of D numbers for each of V token ids."""

    def __init__(self, vocab_size: int, hidden_size: int, rngs: nnx.Rngs):
        self.table = weight(rngs, (vocab_size, hidden_size), ("vocab", "embed"))

    def __call__(self, tokens_BL: jax.Array) -> jax.Array:
        return self.table[...][tokens_BL]


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
        x_BLD: jax.Array,
        angles: tuple[jax.Array, jax.Array],
        mask_B1LL: jax.Array | None,
        keys_B: jax.Array | None,
        kernel: Kernel,
        placement: Placement,
    ) -> jax.Array:
        attention_keys, mlp_keys = (
            (None, None) if keys_B is None else jnp.moveaxis(jax.vmap(jax.random.split)(keys_B), 1, 0)
        )
        a_BLD = self.attention(self.attention_norm(x_BLD), angles, mask_B1LL, kernel, placement)
        x_BLD = x_BLD + dropout(a_BLD, self.dropout, attention_keys)
        m_BLD = self.mlp(self.mlp_norm(x_BLD), placement)
        return x_BLD + dropout(m_BLD, self.dropout, mlp_keys)


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
        """The module of one part with the given (whole) parameters."""
        return nnx.merge(self.parts[name], params)

    @property
    def parameter_count(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.abstract))


def define(config: Model, vocab_size: int) -> Definition:
    """The definition for a config; touches no device."""
    decoder = nnx.eval_shape(lambda: Decoder(config, vocab_size, nnx.Rngs(params=0)))
    block = nnx.eval_shape(lambda: Block(config, nnx.Rngs(params=0)))
    modules = {"embedding": decoder.embedding, "block": block, "norm": decoder.norm}
    state = nnx.state(decoder, nnx.Param)
    abstract = nnx.to_pure_dict(state)
    is_variable = lambda node: isinstance(node, nnx.Variable)
    axes = nnx.to_pure_dict(jax.tree.map(lambda v: v.replace(v.get_metadata("axes")), state, is_leaf=is_variable))
    axes["layers"] = jax.tree.map(lambda names: ("layers", *names), axes["layers"], is_leaf=is_axes)
    parts = {name: nnx.split(module)[0] for name, module in modules.items()}
    return Definition(config, vocab_size, parts, abstract, axes)


def hidden_states(
    definition: Definition,
    params: Params,
    batch: dict[str, jax.Array],
    row_keys_B: jax.Array | None,
    *,
    placement: Placement,
    dtype: jnp.dtype,
    kernel: Kernel,
    remat: Remat,
    unroll: int,
    document_mask: bool,
) -> tuple[jax.Array, jax.Array]:
    """The final hidden states [B, L, D] in `dtype`, and the head's weights [D, V], whole over fsdp.

    Runs inside the step's shard_map: `params` are this device's shards, `batch` its rows.
    """
    config = definition.config
    outer = {name: params[name] for name in params if name != "layers"}
    outer = unshard(outer, {name: definition.axes[name] for name in outer}, placement, dtype)
    layer_axes = jax.tree.map(lambda names: names[1:], definition.axes["layers"], is_leaf=is_axes)
    assert config.head_dim
    positions = batch["positions"] if document_mask else batch["positions"][:1]  # all rows count alike
    angles = rotary_angles(positions, config.head_dim, config.rope_theta)
    segments = batch["segments"]
    mask = (segments[:, None, :, None] == segments[:, None, None, :]) if document_mask else None

    def layer(x_BLD: jax.Array, scanned: tuple[Params, jax.Array]) -> tuple[jax.Array, None]:
        shards, index = scanned
        block = definition.part("block", unshard(shards, layer_axes, placement, dtype))
        keys = None if row_keys_B is None else jax.vmap(lambda key: jax.random.fold_in(key, index))(row_keys_B)
        return block(x_BLD, angles, mask, keys, kernel, placement), None

    keep_weights = not placement.gathers and dtype == jnp.float32  # whole weights are the parameters themselves
    body = _rematerialise(layer, remat, keep_weights=keep_weights, unrolled=unroll > 1)
    x_BLD = definition.part("embedding", outer["embedding"])(batch["tokens"])
    indices = jnp.arange(config.num_layers)
    x_BLD, _ = jax.lax.scan(body, x_BLD, (params["layers"], indices), unroll=min(unroll, config.num_layers))
    x_BLD = definition.part("norm", outer["norm"])(x_BLD)
    head_DV = outer["embedding"]["table"].T if config.tie_embeddings else outer["head"]["kernel"]
    return x_BLD, head_DV


def _rematerialise(
    layer: Callable[..., Any], remat: Remat, *, keep_weights: bool, unrolled: bool
) -> Callable[..., Any]:
    """Applies the remat policy of this name. Gathered or cast weights are always made again, never kept."""
    policies = jax.checkpoint_policies
    if remat == "none" and keep_weights:
        return layer
    policy = {
        "none": _all_but_weights,
        "dots": policies.dots_with_no_batch_dims_saveable,
        "full": policies.nothing_saveable,
    }[remat]
    # Inside a scan XLA cannot merge the recomputation with the first computation; unrolled, it could.
    return jax.checkpoint(layer, policy=policy, prevent_cse=unrolled)


def _all_but_weights(primitive: jax.extend.core.Primitive, *_: Any, **parameters: Any) -> bool:
    """A remat policy that keeps every value but gathered weights, and casts, which weights go through.

    JAX's policies by name do not do it: the value that goes into the name would be kept in its place.
    """
    if primitive.name == "name":
        return parameters["name"] != GATHERED
    return primitive.name not in ("all_gather", "convert_element_type")
