"""What a family of models says of itself, and what the step gives to its parts. docs/models.md is the page on it.

NNX modules *define* a model: shapes, initial values, logical axes, the maths of each part. Parameters travel as a plain
nested dict, and each part's slice of it is merged back into its module where it is used.

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
    """State of a layer that no gradient touches: `Family.update_buffers` changes it once a step. Float32; `axes=` as of
    a parameter, but for those that are stored in pieces and used whole (`embed`)."""


class LayerContext(NamedTuple):
    """What every layer is given of a microbatch besides its activations."""

    positions_BL: Array
    """int32, from 0 in each document; [1, L] if all rows count alike."""
    segments_BL: Array | None
    """int32, equal in one document; None if documents need not be kept apart."""
    rotary: dict[str, Angles]
    """What `Family.rotary` made of the positions."""
    row_keys_B: Array | None
    """Random keys of the rows, of this layer and step; None without dropout and in evaluation."""
    kernel: Kernel
    placement: Placement
    cache: Cache | None = None
    """While tokens are generated: the keys and values of those before."""

    def keys(self, count: int) -> list[Array | None]:
        """So many independent keys of each row, [B] each."""
        if self.row_keys_B is None:
            return [None] * count
        return list(jnp.moveaxis(jax.vmap(lambda key: jax.random.split(key, count))(self.row_keys_B), 1, 0))

    def attend(self, q_BLHK: Array, k_BLGK: Array, v_BLGK: Array, **options: Any) -> Array:
        """Causal attention inside documents, see `kernels.attend`."""
        if self.cache is not None:
            return self.cache.attend(q_BLHK, k_BLGK, v_BLGK, self.kernel, **options)
        return attend(q_BLHK, k_BLGK, v_BLGK, self.segments_BL, self.kernel, **options)


class LayerOutput(NamedTuple):
    """What a layer returns.

    `loss` and `sums` are this device's part of a sum over all devices: of its own rows, and of its own piece of the
    length (`collectives.share_of("sequence", …)` divides what the devices that split it have computed alike). Both must
    add up over rows: a layer may be called for half of a microbatch's rows at a time (`model.overlap`).
    """

    x_BSD: Array
    loss: Array | None = None
    """A float32 number that is added to the summed loss, with its gradient. Its scale is that of a sum over targets:
    the whole is divided by the sum of their weights."""
    sums: Mapping[str, Array] = MappingProxyType({})
    """For metrics and `update_buffers`: added up over microbatches and devices, for each layer by itself."""


class LayerGroup(NamedTuple):
    """Layers that are stacked, and scanned one unit after another: a unit is one layer of each kind in the pattern."""

    name: str
    """Of its parameters; `layers` in a model with one group."""
    pattern: tuple[str, ...]
    units: int

    @property
    def num_layers(self) -> int:
        return len(self.pattern) * self.units

    def at(self, tree: Params, place: int) -> Params:
        """What the group's tree has for one place of its pattern: not every kind has parameters, or buffers."""
        return tree if len(self.pattern) == 1 else tree.get(str(place), {})


class AttentionShape(NamedTuple):
    """Of the attention of a layer, for counting what it costs. A layer without has no heads."""

    heads: int
    head_dim: int
    window: int | None = None
    """How many tokens each sees at most, itself among them; None: all before it."""


class Product(NamedTuple):
    """A weight [inputs, outputs] that multiplies tokens."""

    inputs: int
    outputs: int
    split: str = ""
    """Which of the two tensor parallelism splits: `inputs`, `outputs`, or neither."""
    share: float = 1
    """The share of the tokens that the weight multiplies: k / E for each of E experts of which a token uses k; above 1
    for a weight that multiplies a token several times."""
    name: str = ""
    """The parameter's name in its layer, such as mlp.gate."""


class LayerCosts(NamedTuple):
    """What a layer multiplies. FLOPs, the planner's time and its memory are counted from it."""

    products: tuple[Product, ...]
    attention: AttentionShape

    @property
    def parameters(self) -> int:
        """Numbers in the weights of all products."""
        return sum(product.inputs * product.outputs for product in self.products)

    @property
    def used_parameters(self) -> float:
        """The numbers that multiply a token, on average over tokens."""
        return sum(product.share * product.inputs * product.outputs for product in self.products)


class Family(ABC):
    """A family: what its layers are, and what lies before the first and after the last. By default one kind of layer,
    an embedding, a final RMSNorm, and a head, which is the embedding if tied.

    Its methods that take `ends` get the modules of `before` and `after` by name, with this device's parameters in
    float32; their gradients are JAX's, and activations that they return are cast to the compute dtype. They are called
    on one device's pieces inside the step's shard_map.
    """

    settings: Sequence[str] = ()
    """Settings of `model` that are not every family's, and that this one has; see `registry.OPTIONAL`."""
    finishing: Sequence[str] = ()
    """Names of the modules that `finish_logits` uses."""
    hugging_face: HuggingFace | None = None
    """How it is written in the files of Hugging Face; None: it is in none. It is not inherited: a family that computes
    something else is another one there."""

    def __init_subclass__(cls) -> None:
        cls.hugging_face = cls.__dict__.get("hugging_face")

    def __init__(self, config: Model, vocab_size: int):
        self.config, self.vocab_size = config, vocab_size

    # Its parts.

    def groups(self) -> list[LayerGroup]:
        """The layers in order: groups, each a repeated pattern of kinds; `model.num_layers` in all. Raises
        `ConfigError` if a pattern does not divide them."""
        return [LayerGroup("layers", ("layer",), self.config.num_layers)]

    @abstractmethod
    def layer(self, kind: str, rngs: nnx.Rngs) -> nnx.Module:
        """A layer, which is called as `layer(x_BSD, context)` and returns a `LayerOutput`."""

    def before(self, rngs: nnx.Rngs) -> dict[str, nnx.Module]:
        """The modules before the first layer."""
        return {"embedding": Embedding(self.vocab_size, self.config.hidden_size, rngs)}

    def after(self, rngs: nnx.Rngs) -> dict[str, nnx.Module]:
        """The modules after the last layer. If `tie_embeddings`, these see `embedding` as well."""
        modules: dict[str, nnx.Module] = {"norm": RMSNorm(self.config.hidden_size, self.config.norm_epsilon)}
        if not self.config.tie_embeddings:
            modules["head"] = Head(self.vocab_size, self.config.hidden_size, rngs)
        return modules

    def attention_shape(self, kind: str) -> AttentionShape:
        """Of a layer of this kind."""
        assert self.config.head_dim
        return AttentionShape(self.config.num_heads, self.config.head_dim)

    def costs(self, kind: str) -> LayerCosts:
        """Returns what a layer of this kind multiplies. By default each of its parameters but scales and biases
        multiplies every token, and attention is `attention_shape`. A family of which a token uses some weights alone
        overrides this, for example by changing the `share` of what this returns."""
        layer = nnx.eval_shape(lambda: self.layer(kind, nnx.Rngs(params=0)))
        return LayerCosts(products_of(_pure(layer, nnx.Param), _axes(layer, nnx.Param)), self.attention_shape(kind))

    # What they compute.

    def rotary(self, positions_BL: Array) -> dict[str, Angles]:
        """The rotary tables that layers look up in their context."""
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
        """[B, L, D] in `dtype`: partial over the axes that split the vocabulary. Positions count from 0 in each
        document; in each row, if documents are not kept apart."""
        return ends["embedding"](tokens_BL, dtype, placement)

    def final_norm(self, ends: dict[str, Any], y_BSD: Array) -> Array:
        """What the head multiplies, from the last layer's output."""
        return ends["norm"](y_BSD)

    def head_weight(self, ends: dict[str, Any]) -> Array:
        """[D, V]"""
        return ends["embedding"].table[...].T if self.config.tie_embeddings else ends["head"].kernel[...]

    def finish_logits(self, ends: dict[str, Any], logits_CV: Array) -> Array:
        """The logits, from the head's product, in float32. Called for one chunk of tokens after another."""
        return logits_CV

    # What becomes of the sums.

    def metrics(self, sums: dict[str, Any], tokens: Array) -> Sums:
        """Numbers of a step by name, from the sums of all layers over all `tokens` of the batch.

        `sums` has for each group what its layers returned, stacked: [units, …]; if the pattern has several kinds, by
        their place in it ("0", "1", …).
        """
        return {}

    def update_buffers(self, buffers: dict[str, Any], sums: dict[str, Any]) -> dict[str, Any]:
        """The buffers after a step, stacked like `sums`."""
        return buffers


def products_of(arrays: Params, axes: Params) -> tuple[Product, ...]:
    """Returns the products that parameters with these logical axes are the weights of: all but scales and biases.

    One side of a weight is the model's width (an axis of `GATHERED`). The other side is split by tensor parallelism if
    `RULES` split one of its axes as they split features. A weight without the model's width is split nowhere.
    """
    products = []
    for parameter, leaf, names in named_leaves(arrays, axes):
        if SCALES_AND_BIASES & {*names}:
            continue
        place = next((place for place, name in enumerate(names) if name in GATHERED), None)
        is_split = any({*RULES["sequence"]} & {*RULES.get(name or "", ())} for name in names)
        side = "" if place is None or not is_split else "inputs" if place else "outputs"
        width = leaf.shape[place or 0]
        sizes = (leaf.size // width, width) if place else (width, leaf.size // width)
        products.append(Product(*sizes, side, name=parameter))
    return tuple(products)


@dataclass(frozen=True)
class Definition:
    """The model without numbers: what each part computes, and each array's shape and logical axes."""

    family: Family
    groups: tuple[LayerGroup, ...]
    graphs: dict[str, Any]
    """NNX graphs: of the ends by name, of groups a list by place in the pattern."""
    first: tuple[str, ...]
    """Names of the parameters before the first layer."""
    last: tuple[str, ...]
    """Names of the parameters after the last layer."""
    abstract: Params = field(repr=False)
    """Parameters, of jax.ShapeDtypeStruct, float32."""
    axes: Params = field(repr=False)
    """Their logical axes."""
    abstract_buffers: Params = field(repr=False)
    buffer_axes: Params = field(repr=False)

    @property
    def vocab_size(self) -> int:
        return self.family.vocab_size

    def init(self, key: Array) -> tuple[Params, Params]:
        """Initial float32 parameters and buffers; the same for any sharding."""
        decoder = _Decoder(self.family, nnx.Rngs(params=key))
        return _pure(decoder, nnx.Param), _pure(decoder, Buffer)

    def layer(self, group: LayerGroup, place: int, params: Params, buffers: Params) -> Any:
        """The module of the kind at this place of the pattern, with the parameters and buffers of one layer."""
        return nnx.merge(self.graphs[group.name][place], params, buffers)

    def ends(self, params: Params) -> dict[str, Any]:
        """The modules outside of the layers for which there are parameters."""
        return {name: nnx.merge(self.graphs[name], params[name]) for name in params}

    @property
    def parameter_count(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.abstract))

    def layer_costs(self) -> list[tuple[int, LayerCosts]]:
        """Returns for each kind of layer how many there are, and what each of them costs."""
        counts = Counter[str]()
        for group in self.groups:
            for kind in group.pattern:
                counts[kind] += group.units
        return [(count, self.family.costs(kind)) for kind, count in counts.items()]


class _Decoder(nnx.Module):
    """All parts of a model under their names; layers are stacked on a leading axis. It has no attributes besides, which
    a part's name could replace."""

    def __init__(self, family: Family, rngs: nnx.Rngs):
        before = family.before(rngs)
        stacks = {group.name: _stack(family, group, rngs) for group in family.groups()}
        after = family.after(rngs)
        for name, module in {**before, **stacks, **after}.items():
            setattr(self, name, module)


def _stack(family: Family, group: LayerGroup, rngs: nnx.Rngs) -> nnx.Module:
    """The layers of a group; of several kinds, by their place in the pattern."""

    def stack(kind: str) -> nnx.Module:
        return nnx.vmap(lambda rngs: family.layer(kind, rngs))(rngs.split(group.units))

    stacks = [stack(kind) for kind in group.pattern]
    return stacks[0] if len(stacks) == 1 else nnx.Dict({str(place): one for place, one in enumerate(stacks)})


def define(family: Family) -> Definition:
    """The definition of a family with its config; touches no device.

    Raises `ConfigError` for groups, axes and buffers that the contract does not allow.
    """
    groups = tuple(family.groups())
    first, last = _names_of_ends(family)
    _check_groups(family, groups, first + last)
    decoder = nnx.eval_shape(lambda: _Decoder(family, nnx.Rngs(params=0)))
    graph = lambda module: nnx.split(module)[0]
    one_layer = lambda kind: nnx.eval_shape(lambda: family.layer(kind, nnx.Rngs(params=0)))
    graphs: dict[str, Any] = {name: graph(getattr(decoder, name)) for name in first + last}
    for group in groups:
        graphs[group.name] = [graph(one_layer(kind)) for kind in group.pattern]
    tied = ("embedding",) if family.config.tie_embeddings else ()
    names = [group.name for group in groups]
    axes, buffer_axes = _axes(decoder, nnx.Param, names), _axes(decoder, Buffer, names)
    _check_axes(axes, buffer_axes, names)
    return Definition(
        family, groups, graphs, first, last + tied,
        _pure(decoder, nnx.Param), axes, _pure(decoder, Buffer), buffer_axes,
    )  # fmt: skip


def _names_of_ends(family: Family) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the names of the modules before the first layer, and of those after the last."""
    names: list[tuple[str, ...]] = []

    def note() -> None:  # eval_shape would return mappings in another order than theirs
        names.extend(tuple(make(nnx.Rngs(params=0))) for make in (family.before, family.after))

    nnx.eval_shape(note)
    before, after = names
    return before, after


def _check_groups(family: Family, groups: Sequence[LayerGroup], ends: Sequence[str]) -> None:
    """Their names are those of parameters and of logical axes, so they must be their own."""
    names, layers = [group.name for group in groups], sum(group.num_layers for group in groups)
    taken = (RULES.keys() - {"layers"}) | {*ends}
    for name in names:
        if name in taken or names.count(name) > 1:
            raise ConfigError(f"model.family: the name {name} of a group of layers is taken; choose another")
    empty = next((group.name for group in groups if not group.pattern or group.units < 1), None)
    if empty is not None:
        raise ConfigError(f"model.family: the group {empty} has no layers; leave it out, or raise model.num_layers")
    if layers != family.config.num_layers:
        raise ConfigError(
            f"model.family: groups() has {layers} layers, and model.num_layers is {family.config.num_layers}; "
            "they must be the same"
        )


def _check_axes(axes: Params, buffer_axes: Params, groups: Sequence[str]) -> None:
    known = {*RULES, *groups, None}
    for path, names in jax.tree.leaves_with_path((axes, buffer_axes), is_leaf=is_axes):
        name = parameter_name(path[1:])
        if unknown := [axis for axis in names if axis not in known]:
            raise ConfigError(
                f"model.family: {name} has the unknown axis {unknown[0]!r}; known are {', '.join(sorted(RULES))}"
            )
        if path[0].idx == 1 and (path[1].key not in groups or set(names) & set(GATHERED)):
            raise ConfigError(
                f"model.family: the buffer {name} must be one of a layer, without the axes {', '.join(GATHERED)}"
            )


def _pure(module: nnx.Module, kind: type[nnx.Variable[Any]]) -> Params:
    return nnx.to_pure_dict(nnx.state(module, kind))


def _axes(decoder: nnx.Module, kind: type[nnx.Variable[Any]], groups: Sequence[str] = ()) -> Params:
    """The logical axes of all variables of a kind; those of a group are stacked along the axis of its name."""
    is_variable = lambda node: isinstance(node, nnx.Variable)
    state = nnx.state(decoder, kind)
    axes = nnx.to_pure_dict(jax.tree.map(lambda v: v.replace(v.get_metadata("axes")), state, is_leaf=is_variable))
    stacked = lambda name: jax.tree.map(lambda names: (name, *names), axes[name], is_leaf=is_axes)
    return {name: stacked(name) if name in groups else axes[name] for name in axes}
