"""The interface of a family of models, and the inputs that the step passes to its parts. See docs/models.md.

NNX modules *define* a model: shapes, initial values, logical axes, the maths of each part. Parameters are passed as a
plain nested dict, and each part's slice of it is merged back into its module where it is used.

Shapes: B batch, L length, S a device's piece of the length, D model, V a device's part of the vocabulary, C tokens.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxmnt.config.model import Model
from jaxmnt.errors import ConfigError
from jaxmnt.models.cache import Cache
from jaxmnt.models.huggingface import HuggingFace
from jaxmnt.models.kernels import Kernel, attend
from jaxmnt.models.layers import Embedding, Head, RMSNorm
from jaxmnt.models.rotary import Angles, rotary_angles
from jaxmnt.parallel.sharding import (
    GATHERED,
    RULES,
    SCALES_AND_BIASES,
    Placement,
    is_axes,
    named_leaves,
    parameter_name,
)

Params = dict[str, Any]

Sums = dict[str, Array]
"""Float32 sums by name."""


class Buffer(nnx.Variable[Array]):
    """State of a layer without gradients: `Family.update_buffers` changes it once a step. Float32; `axes=` as for
    parameters, except axes that are stored in pieces and gathered for use (`embed`)."""


class LayerContext(NamedTuple):
    """Inputs of every layer besides its activations, for one microbatch."""

    positions_BL: Array
    """int32, from 0 in each document; [1, L] if all rows have the same positions."""
    segments_BL: Array | None
    """int32, equal in one document; None if documents need not be kept apart."""
    rotary: dict[str, Angles]
    """Rotary tables of the positions, from `Family.rotary`."""
    row_keys_B: Array | None
    """Random keys of the rows for this layer and step; None without dropout and in evaluation."""
    kernel: Kernel
    placement: Placement
    cache: Cache | None = None
    """Keys and values of earlier tokens during generation."""

    def keys(self, count: int) -> list[Array | None]:
        """Returns `count` independent random keys for each row, [B] each."""
        if self.row_keys_B is None:
            return [None] * count
        return list(jnp.moveaxis(jax.vmap(lambda key: jax.random.split(key, count))(self.row_keys_B), 1, 0))

    def attend(self, q_BLHK: Array, k_BLGK: Array, v_BLGK: Array, **options: Any) -> Array:
        """Returns causal attention inside documents, see `kernels.attend`."""
        if self.cache is not None:
            return self.cache.attend(q_BLHK, k_BLGK, v_BLGK, self.kernel, **options)
        return attend(q_BLHK, k_BLGK, v_BLGK, self.segments_BL, self.kernel, **options)


class LayerOutput(NamedTuple):
    """The output of a layer.

    `loss` and `sums` are this device's part of a sum over all devices: over its own rows and its own piece of the
    length (`collectives.share_of("sequence", …)` divides a number that all devices of the sequence have computed
    alike). Both must be additive over rows: a layer may be called for half of a microbatch's rows at a time
    (`model.overlap`).
    """

    x_BSD: Array
    loss: Array | None = None
    """A float32 number that is added to the summed loss, with its gradient. Its scale is that of a sum over targets:
    the total is divided by the sum of their weights."""
    sums: Mapping[str, Array] = MappingProxyType({})
    """Sums for metrics and `update_buffers`, added up over microbatches and devices for each layer separately."""


class LayerGroup(NamedTuple):
    """Layers that are stacked and scanned unit by unit: a unit is one layer for each entry of the pattern."""

    name: str
    """Name of its parameters; `layers` in a model with one group."""
    pattern: tuple[str, ...]
    units: int

    @property
    def num_layers(self) -> int:
        return len(self.pattern) * self.units

    def at(self, tree: Params, index: int) -> Params:
        """Returns the part of the group's tree for the pattern's entry `index`; empty if that kind of layer has no
        parameters, or no buffers."""
        return tree if len(self.pattern) == 1 else tree.get(str(index), {})


class AttentionShape(NamedTuple):
    """The shape of a layer's attention, for counting its cost. A layer without attention has 0 heads."""

    heads: int
    head_dim: int
    window: int | None = None
    """Number of tokens that a token sees at most, including itself; None: all before it."""


class Product(NamedTuple):
    """A weight [inputs, outputs] that multiplies tokens."""

    inputs: int
    outputs: int
    split: str = ""
    """The side that tensor parallelism splits: `inputs`, `outputs`, or empty for neither."""
    share: float = 1
    """Share of the tokens that the weight multiplies: k / E for each of E experts if a token uses k of them; above 1
    for a weight that multiplies a token several times."""
    name: str = ""
    """The parameter's name in its layer, such as mlp.gate."""


class LayerCosts(NamedTuple):
    """The products and the attention of a layer. FLOPs, the planner's time and its memory are derived from them."""

    products: tuple[Product, ...]
    attention: AttentionShape

    @property
    def parameters(self) -> int:
        """The number of parameters in the weights of all products."""
        return sum(product.inputs * product.outputs for product in self.products)

    @property
    def used_parameters(self) -> float:
        """The number of parameters that multiply a token, on average over tokens."""
        return sum(product.share * product.inputs * product.outputs for product in self.products)


class Family(ABC):
    """A family of models: its layers, and the modules before the first and after the last. The defaults are one kind of
    layer, an embedding, a final RMSNorm, and a head, which is the embedding if tied.

    Methods with the argument `ends` receive the modules of `before` and `after` by name, with this device's parameters
    in float32. JAX computes their gradients, and activations that they return are cast to the compute dtype. They are
    called on one device's pieces inside the step's shard_map.
    """

    settings: Sequence[str] = ()
    """Settings of `model` that this family has and not every family has; see `registry.OPTIONAL`."""
    finishing: Sequence[str] = ()
    """Names of the modules that `finish_logits` uses."""
    hugging_face: HuggingFace | None = None
    """The family's format in files of Hugging Face; None: it has none. It is not inherited, because a family that
    computes something else is a different one there."""

    def __init_subclass__(cls) -> None:
        cls.hugging_face = cls.__dict__.get("hugging_face")

    def __init__(self, config: Model, vocab_size: int):
        self.config, self.vocab_size = config, vocab_size

    # Its parts.

    def groups(self) -> list[LayerGroup]:
        """Returns the layers in order, as groups, each a repeated pattern of kinds; `model.num_layers` in all. Raises
        `ConfigError` if a pattern does not divide them."""
        return [LayerGroup("layers", ("layer",), self.config.num_layers)]

    @abstractmethod
    def layer(self, kind: str, rngs: nnx.Rngs) -> nnx.Module:
        """Returns a layer. It is called as `layer(x_BSD, context)` and returns a `LayerOutput`."""

    def before(self, rngs: nnx.Rngs) -> dict[str, nnx.Module]:
        """Returns the modules before the first layer."""
        return {"embedding": Embedding(self.vocab_size, self.config.hidden_size, rngs)}

    def after(self, rngs: nnx.Rngs) -> dict[str, nnx.Module]:
        """Returns the modules after the last layer. With `tie_embeddings`, `embedding` is used there as well."""
        modules: dict[str, nnx.Module] = {"norm": RMSNorm(self.config.hidden_size, self.config.norm_epsilon)}
        if not self.config.tie_embeddings:
            modules["head"] = Head(self.vocab_size, self.config.hidden_size, rngs)
        return modules

    def attention_shape(self, kind: str) -> AttentionShape:
        """Returns the shape of attention in a layer of this kind."""
        assert self.config.head_dim
        return AttentionShape(self.config.num_heads, self.config.head_dim)

    def costs(self, kind: str) -> LayerCosts:
        """Returns the products and attention of a layer of this kind. By default every parameter except scales and
        biases multiplies every token, and attention is `attention_shape`. A family whose tokens use only some of the
        weights overrides this, for example by changing the `share` of the products."""
        layer = nnx.eval_shape(lambda: self.layer(kind, nnx.Rngs(params=0)))
        return LayerCosts(products_of(_pure(layer, nnx.Param), _axes(layer, nnx.Param)), self.attention_shape(kind))

    # The maths of its parts.

    def rotary(self, positions_BL: Array) -> dict[str, Angles]:
        """Returns the rotary tables that layers look up in their context."""
        config = self.config
        assert config.head_dim
        return {"": rotary_angles(positions_BL, config.head_dim, config.rope_theta, config.rope_scaling)}

    def embed(
        self,
        ends: dict[str, Any],
        tokens_BL: Array,
        positions_BL: Array,
        dtype: jnp.dtype,
        placement: Placement,
    ) -> Array:
        """Returns the embedded tokens [B, L, D] in `dtype`, partial over the axes that split the vocabulary. Positions
        count from 0 in each document, or in each row if documents are not kept apart."""
        return ends["embedding"](tokens_BL, dtype, placement)

    def final_norm(self, ends: dict[str, Any], y_BSD: Array) -> Array:
        """Returns the input of the head from the last layer's output."""
        return ends["norm"](y_BSD)

    def head_weight(self, ends: dict[str, Any]) -> Array:
        """Returns the weight [D, V] of the head."""
        return ends["embedding"].table[...].T if self.config.tie_embeddings else ends["head"].kernel[...]

    def finish_logits(self, ends: dict[str, Any], logits_CV: Array) -> Array:
        """Returns the logits from the head's product, in float32. It is called for one chunk of tokens at a time."""
        return logits_CV

    # The use of the layers' sums.

    def metrics(self, sums: dict[str, Any], tokens: Array) -> Sums:
        """Returns metrics of a step by name, from the sums of all layers over all `tokens` of the batch.

        `sums` has the sums of each group's layers, stacked: [units, …]; for a pattern of several layers, they are under
        the index in the pattern ("0", "1", …).
        """
        return {}

    def update_buffers(self, buffers: dict[str, Any], sums: dict[str, Any]) -> dict[str, Any]:
        """Returns the buffers after a step, stacked like `sums`."""
        return buffers


def products_of(arrays: Params, axes: Params) -> tuple[Product, ...]:
    """Returns the products whose weights are parameters with these logical axes: all except scales and biases.

    One side of a weight is the model's width (an axis of `GATHERED`). Tensor parallelism splits the other side if
    `RULES` split one of its axes as they split features. A weight without the model's width is not split.
    """
    products = []
    for parameter, leaf, names in named_leaves(arrays, axes):
        if SCALES_AND_BIASES & {*names}:
            continue
        width_dimension = next((dimension for dimension, name in enumerate(names) if name in GATHERED), None)
        is_split = any({*RULES["sequence"]} & {*RULES.get(name or "", ())} for name in names)
        width = leaf.shape[width_dimension or 0]
        if width_dimension:
            sizes, split_side = (leaf.size // width, width), "inputs"
        else:
            sizes, split_side = (width, leaf.size // width), "outputs"
        side = split_side if is_split and width_dimension is not None else ""
        products.append(Product(*sizes, side, name=parameter))
    return tuple(products)


@dataclass(frozen=True)
class Definition:
    """The model without values: the maths of each part, and each array's shape and logical axes."""

    family: Family
    groups: tuple[LayerGroup, ...]
    graphs: dict[str, Any]
    """NNX graphs: one for each end by name, and for each group a list with one for each entry of its pattern."""
    first: tuple[str, ...]
    """Names of the parameters before the first layer."""
    last: tuple[str, ...]
    """Names of the parameters after the last layer."""
    abstract: Params = field(repr=False)
    """Parameters as float32 jax.ShapeDtypeStructs."""
    axes: Params = field(repr=False)
    """Logical axes of the parameters."""
    abstract_buffers: Params = field(repr=False)
    buffer_axes: Params = field(repr=False)

    @property
    def vocab_size(self) -> int:
        return self.family.vocab_size

    def init(self, key: Array) -> tuple[Params, Params]:
        """Returns initial float32 parameters and buffers, the same for any sharding."""
        decoder = _Decoder(self.family, nnx.Rngs(params=key))
        return _pure(decoder, nnx.Param), _pure(decoder, Buffer)

    def layer(self, group: LayerGroup, index: int, params: Params, buffers: Params) -> Any:
        """Returns the module of the pattern's entry `index`, with the parameters and buffers of one layer."""
        return nnx.merge(self.graphs[group.name][index], params, buffers)

    def ends(self, params: Params) -> dict[str, Any]:
        """Returns the modules outside of the layers whose parameters are in `params`."""
        return {name: nnx.merge(self.graphs[name], params[name]) for name in params}

    @property
    def parameter_count(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.abstract))

    def layer_costs(self) -> list[tuple[int, LayerCosts]]:
        """Returns the number of layers of each kind, and the costs of one of them."""
        counts = Counter[str]()
        for group in self.groups:
            for kind in group.pattern:
                counts[kind] += group.units
        return [(count, self.family.costs(kind)) for kind, count in counts.items()]


class _Decoder(nnx.Module):
    """All parts of a model as attributes; layers are stacked on a leading axis. It has no other attributes, which a
    part's name could overwrite."""

    def __init__(self, family: Family, rngs: nnx.Rngs):
        before = family.before(rngs)
        stacks = {group.name: _stack(family, group, rngs) for group in family.groups()}
        after = family.after(rngs)
        for name, module in {**before, **stacks, **after}.items():
            setattr(self, name, module)


def _stack(family: Family, group: LayerGroup, rngs: nnx.Rngs) -> nnx.Module:
    """Returns the stacked layers of a group: for a pattern of several layers, a dict by index in the pattern."""

    def stack(kind: str) -> nnx.Module:
        return nnx.vmap(lambda rngs: family.layer(kind, rngs))(rngs.split(group.units))

    stacks = [stack(kind) for kind in group.pattern]
    return stacks[0] if len(stacks) == 1 else nnx.Dict({str(index): module for index, module in enumerate(stacks)})


def define(family: Family) -> Definition:
    """Returns the definition of a family with its config, without using a device.

    Raises `ConfigError` for groups, axes and buffers that the contract does not allow.
    """
    groups = tuple(family.groups())
    first, last = _names_of_ends(family)
    _check_groups(family, groups, first + last)
    decoder = nnx.eval_shape(lambda: _Decoder(family, nnx.Rngs(params=0)))
    graph = lambda module: nnx.split(module)[0]
    abstract_layer = lambda kind: nnx.eval_shape(lambda: family.layer(kind, nnx.Rngs(params=0)))
    graphs: dict[str, Any] = {name: graph(getattr(decoder, name)) for name in first + last}
    for group in groups:
        graphs[group.name] = [graph(abstract_layer(kind)) for kind in group.pattern]
    tied = ("embedding",) if family.config.tie_embeddings else ()
    names = [group.name for group in groups]
    axes = _axes(decoder, nnx.Param, names)
    buffer_axes = _axes(decoder, Buffer, names)
    _check_axes(axes, buffer_axes, names)
    return Definition(
        family, groups, graphs, first, last + tied,
        _pure(decoder, nnx.Param), axes, _pure(decoder, Buffer), buffer_axes,
    )  # fmt: skip


def _names_of_ends(family: Family) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the names of the modules before the first layer, and of those after the last."""
    names: list[tuple[str, ...]] = []

    def collect_names() -> None:  # a side effect, since eval_shape sorts the keys of the mappings that it returns
        names.extend(tuple(make(nnx.Rngs(params=0))) for make in (family.before, family.after))

    nnx.eval_shape(collect_names)
    before, after = names
    return before, after


def _check_groups(family: Family, groups: Sequence[LayerGroup], ends: Sequence[str]) -> None:
    """Raises `ConfigError` for invalid groups. Their names name parameters and logical axes, so they must be unique."""
    names = [group.name for group in groups]
    layers = sum(group.num_layers for group in groups)
    reserved = (RULES.keys() - {"layers"}) | {*ends}
    for name in names:
        if name in reserved or names.count(name) > 1:
            raise ConfigError(f"model.family: the name {name} of a group of layers is taken; choose another")
    empty = next((group.name for group in groups if not group.pattern or group.units < 1), None)
    if empty is not None:
        raise ConfigError(f"model.family: the group {empty} has no layers; remove it, or raise model.num_layers")
    if layers != family.config.num_layers:
        raise ConfigError(
            f"model.family: groups() has {layers} layers, but model.num_layers is {family.config.num_layers}; "
            "they must be equal"
        )


def _check_axes(axes: Params, buffer_axes: Params, groups: Sequence[str]) -> None:
    """Raises `ConfigError` for unknown axes, and for buffers outside of layers or along gathered axes."""
    known_axes = {*RULES, *groups, None}
    for path, names in jax.tree.leaves_with_path((axes, buffer_axes), is_leaf=is_axes):
        name = parameter_name(path[1:])
        if unknown := [axis for axis in names if axis not in known_axes]:
            raise ConfigError(
                f"model.family: {name} has the unknown axis {unknown[0]!r}; use one of {', '.join(sorted(RULES))}"
            )
        is_buffer = path[0].idx == 1
        if is_buffer and (path[1].key not in groups or set(names) & set(GATHERED)):
            raise ConfigError(
                f"model.family: the buffer {name} must belong to a layer and must not have the axes "
                f"{', '.join(GATHERED)}"
            )


def _pure(module: nnx.Module, kind: type[nnx.Variable[Any]]) -> Params:
    return nnx.to_pure_dict(nnx.state(module, kind))


def _axes(decoder: nnx.Module, kind: type[nnx.Variable[Any]], groups: Sequence[str] = ()) -> Params:
    """Returns the logical axes of all variables of a kind; those of a group are stacked along the axis of its name."""
    is_variable = lambda node: isinstance(node, nnx.Variable)
    state = nnx.state(decoder, kind)
    axes = nnx.to_pure_dict(jax.tree.map(lambda v: v.replace(v.get_metadata("axes")), state, is_leaf=is_variable))
    stacked = lambda name: jax.tree.map(lambda names: (name, *names), axes[name], is_leaf=is_axes)
    return {name: stacked(name) if name in groups else axes[name] for name in axes}
