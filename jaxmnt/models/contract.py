"""The interface of a family of models, and the inputs that the step passes to a model's parts. See docs/models.md.

NNX modules *define* a model: its shapes, initial values and logical axes, and the maths of each part. Parameters are
passed as a plain nested dict. Where a part is used, its entry of the dict is merged back into its module.

Shapes: B batch, L length, S a device's piece of the length, D model, V a device's part of the vocabulary, C tokens.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxmnt.config.lora import Lora
from jaxmnt.config.model import Model
from jaxmnt.config.own_code import own_settings
from jaxmnt.errors import ConfigError
from jaxmnt.models.adapters import (
    Adapters,
    add_to_trees,
    find_adapters,
    join_adapters,
    with_initial_adapters,
    without_adapters,
)
from jaxmnt.models.cache import Cache
from jaxmnt.models.context_parallel import DividedRows, attend_across_devices
from jaxmnt.models.huggingface import HuggingFace
from jaxmnt.models.kernels import Kernel, attend
from jaxmnt.models.layers import Embedding, Head, RMSNorm
from jaxmnt.models.rotary import Angles, rotary_angles
from jaxmnt.parallel.collectives import index_along
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
"""Float32 sums, or metrics computed from them, by name."""


class Buffer(nnx.Variable[Array]):
    """Float32 state of a layer that has no gradient. `Family.update_buffers` changes it once per step. `axes=` works as
    for parameters, but axes that are stored in pieces and gathered for use (such as `embed`) are not allowed."""


SHARED_ROTARY = ""
"""Name of the rotary tables in a family whose layers all use the same tables."""


class LayerContext(NamedTuple):
    """The inputs of a layer other than its activations, for one microbatch."""

    positions_BL: Array
    """int32 positions, which count from 0 in each document; [1, L] if all rows have the same positions."""
    segments_BL: Array | None
    """int32 numbers, equal for tokens of the same document; None if documents need not be kept apart."""
    is_real_BL: Array
    """False for padding."""
    targets_per_token: Array
    """The sum of the weights of all targets in the step's batch, divided by the number of its tokens that are not
    padding. A term of the loss that is summed over tokens is on the scale of a sum over targets if it is multiplied by
    this number. It is 1 unless the family sets `uses_targets_per_token`."""
    rotary: dict[str, Angles]
    """Rotary tables for the positions, as returned by `Family.rotary`."""
    row_keys_B: Array | None
    """A random key for each row, for this layer and step; None without dropout and during evaluation."""
    kernel: Kernel
    placement: Placement
    divided_rows: DividedRows | None
    """The division of rows, if the mesh divides them; else None."""
    attention_calls: list[None]
    """A list to which each call of `attend` adds an entry. The step refuses layers without a call if the mesh divides
    rows."""
    cache: Cache | None = None
    """Keys and values of earlier tokens during generation."""

    def keys(self, count: int) -> list[Array | None]:
        """Returns `count` independent random keys for each row, [B] each."""
        if self.row_keys_B is None:
            return [None] * count
        return list(jnp.moveaxis(jax.vmap(lambda key: jax.random.split(key, count))(self.row_keys_B), 1, 0))

    def head_numbers(self, heads: int) -> Array:
        """Returns the numbers, among all `heads` of the model, of the query heads that this device computes, int32 in
        rising order. `models.attention.KVHeads` says which heads of keys and values these need."""
        device_heads = heads // self.placement.num_shards("heads")
        return index_along("heads", self.placement) * device_heads + jnp.arange(device_heads)

    def attend(self, q_BLHK: Array, k_BLGK: Array, v_BLGK: Array, **options: Any) -> Array:
        """Returns causal attention within documents; see `kernels.attend`. If the mesh divides rows, only this method
        knows of the tokens that other devices have."""
        self.attention_calls.append(None)
        if self.cache is not None:
            return self.cache.attend(q_BLHK, k_BLGK, v_BLGK, self.kernel, **options)
        if self.divided_rows is not None:
            return attend_across_devices(q_BLHK, k_BLGK, v_BLGK, self.divided_rows, self.kernel, **options)
        return attend(q_BLHK, k_BLGK, v_BLGK, self.segments_BL, self.kernel, **options)


class LayerOutput(NamedTuple):
    """The output of a layer.

    `loss` and `sums` are this device's part of a sum over all devices, so they must cover only its own rows and its own
    piece of the length. If all devices along the logical axis `sequence` have computed the same number,
    `collectives.share_of("sequence", …)` returns this device's share of it. Both must be additive over rows, because a
    layer may be called for half of a microbatch's rows at a time (`model.overlap`).
    """

    x_BSD: Array
    loss: Array | None = None
    """A float32 number that is added to the summed loss and contributes to the gradient. It must have the scale of a
    sum over targets, not of a mean, because the total is divided by the sum of the targets' weights."""
    sums: Mapping[str, Array] = MappingProxyType({})
    """Sums for metrics and `update_buffers`, added up over microbatches and devices for each layer separately."""


class LayerGroup(NamedTuple):
    """Layers that are stacked and scanned unit by unit. A unit has one layer for each entry of the pattern."""

    name: str
    """Name of the group, under which its parameters are stored; `layers` in a model with one group."""
    pattern: tuple[str, ...]
    """The kind of each layer of a unit, as passed to `Family.layer`."""
    units: int

    @property
    def num_layers(self) -> int:
        return len(self.pattern) * self.units

    def at(self, tree: Params, index: int) -> Params:
        """Returns the part of `tree`, the group's parameters or buffers, for entry `index` of the pattern. It is empty
        if that kind of layer has none."""
        return tree if len(self.pattern) == 1 else tree.get(str(index), {})


class AttentionShape(NamedTuple):
    """The shape of a layer's attention, from which its cost is computed. A layer without attention has 0 heads."""

    heads: int
    head_dim: int
    window: int | None = None
    """Maximum number of tokens that a token sees, including itself; None: itself and all before it."""
    kv_heads: int | None = None
    """Number of heads of keys and values; None: as many as `heads`."""


class Product(NamedTuple):
    """A weight [inputs, outputs] that multiplies tokens."""

    inputs: int
    outputs: int
    split: str = ""
    """The side that tensor parallelism splits: `inputs`, `outputs`, or empty for neither."""
    share: float = 1
    """Share of the tokens that the weight multiplies. It is k / E for each of E experts if a token uses k of them, and
    above 1 for a weight that multiplies each token several times."""
    name: str = ""
    """The parameter's name in its layer, such as mlp.gate."""
    experts: int = 1
    """Number of experts among which the inputs or the outputs, whichever are not the model's width, are divided."""

    @property
    def expert_sides(self) -> tuple[int, int]:
        """The inputs and the outputs of one expert's weight."""
        of = lambda side: self.experts if self.split == side else 1
        return self.inputs // of("inputs"), self.outputs // of("outputs")

    @property
    def expert_size(self) -> int:
        """The width of one expert, which is the side that is divided among experts."""
        return self.expert_sides[0 if self.split == "inputs" else 1]


class LayerCosts(NamedTuple):
    """The products and the attention of a layer. FLOPs and the planner's time and memory are computed from them."""

    products: tuple[Product, ...]
    attention: AttentionShape

    @property
    def parameters(self) -> int:
        """The number of parameters in the weights of all products."""
        return sum(product.inputs * product.outputs for product in self.products)

    @property
    def expert_parameters(self) -> int:
        """The number of those parameters that belong to experts."""
        return sum(product.inputs * product.outputs for product in self.expert_products)

    @property
    def expert_products(self) -> list[Product]:
        """The products with the weights of experts."""
        return [product for product in self.products if product.experts > 1]

    @property
    def used_parameters(self) -> float:
        """The number of parameters that multiply a token, averaged over tokens."""
        return sum(product.share * product.inputs * product.outputs for product in self.products)


class Family(ABC):
    """A family of models: its layers, and the modules before the first layer and after the last. By default there is
    one kind of layer, an embedding, a final RMSNorm and a head. If embeddings are tied, the embedding is also the head.

    Methods with the argument `ends` receive the modules that `before` and `after` return, by name, with this device's
    parameters in float32. They are called on one device's pieces inside the step's shard_map. JAX differentiates them,
    and the activations that they return are cast to the compute dtype.
    """

    settings: Sequence[str] = ()
    """The optional settings of `model` (`registry.OPTIONAL_SETTINGS`) that this family supports."""
    Options: type[Any] | None = None
    """A dataclass of the family's own settings, whose values `model.options` sets. The attribute `options` has them."""
    uses_targets_per_token: bool = False
    """True if layers use `LayerContext.targets_per_token`, for which devices exchange two numbers at the start of a
    step."""
    finishing: Sequence[str] = ()
    """Names of the modules that `finish_logits` uses."""
    hugging_face: HuggingFace | None = None
    """The family's format in Hugging Face's files; None if it has none. Subclasses do not inherit it, because a family
    that computes something else is a different family in Hugging Face."""

    def __init_subclass__(cls) -> None:
        cls.hugging_face = cls.__dict__.get("hugging_face")

    def __init__(self, config: Model, vocab_size: int):
        """Raises `ConfigError` if `model.options` does not fit the family's `Options`."""
        self.config, self.vocab_size = config, vocab_size
        name = type(self).__name__
        if self.Options is not None:
            self.options = own_settings(self.Options, config.options, "model.options", name)
        elif config.options:
            raise ConfigError(f"model.options: {name} has none; remove it")

    @classmethod
    def with_defaults(cls, config: Model) -> Model:
        """Returns the config with this family's values of settings that are None."""
        return config

    # The parts of a model.

    def groups(self) -> list[LayerGroup]:
        """Returns the groups of layers in order. Each group repeats a pattern of kinds of layers, and together they
        have `model.num_layers` layers. Raises `ConfigError` if these cannot be divided into whole patterns."""
        return [LayerGroup("layers", ("layer",), self.config.num_layers)]

    @abstractmethod
    def layer(self, kind: str, rngs: nnx.Rngs) -> nnx.Module:
        """Returns a layer of this kind. It is called as `layer(x_BSD, context)` and returns a `LayerOutput`."""

    def before(self, rngs: nnx.Rngs) -> dict[str, nnx.Module]:
        """Returns the modules before the first layer, by name."""
        return {"embedding": Embedding(self.vocab_size, self.config.hidden_size, rngs)}

    def after(self, rngs: nnx.Rngs) -> dict[str, nnx.Module]:
        """Returns the modules after the last layer, by name. With `tie_embeddings`, `embedding` is used there as
        well."""
        modules: dict[str, nnx.Module] = {"norm": RMSNorm(self.config.hidden_size, self.config.norm_epsilon)}
        if not self.config.tie_embeddings:
            modules["head"] = Head(self.vocab_size, self.config.hidden_size, rngs)
        return modules

    def attention_shape(self, kind: str) -> AttentionShape:
        """Returns the shape of attention in a layer of this kind."""
        assert self.config.head_dim
        return AttentionShape(self.config.num_heads, self.config.head_dim, kv_heads=self.config.num_kv_heads)

    def costs(self, kind: str) -> LayerCosts:
        """Returns the products and attention of a layer of this kind. By default, every parameter except scales and
        biases multiplies every token, and attention has the shape `attention_shape(kind)`. A family whose tokens use
        only some of the weights overrides this method, for example by changing the `share` of the products."""
        layer = _abstract_layer(self, kind)
        products = products_of(_pure_dict(layer, nnx.Param), _logical_axes(layer, nnx.Param))
        return LayerCosts(products, self.attention_shape(kind))

    # The maths of these parts.

    def rotary(self, positions_BL: Array) -> dict[str, Angles]:
        """Returns the rotary tables, by the names under which layers look them up in their context."""
        config = self.config
        assert config.head_dim
        return {SHARED_ROTARY: rotary_angles(positions_BL, config.head_dim, config.rope_theta, config.rope_scaling)}

    def embed(
        self,
        ends: dict[str, Any],
        tokens_BL: Array,
        positions_BL: Array,
        dtype: jnp.dtype,
        placement: Placement,
    ) -> Array:
        """Returns the embedded tokens [B, L, D] in `dtype`, as this device's part of a sum over the mesh axes that
        split the vocabulary. Positions count from 0 in each document, or in each row if documents are not kept
        apart. Each token must be treated on its own: neighbours in the arrays may not be neighbours in a row, because
        a stage of a pipeline may embed a share of the tokens, and `context` divides rows."""
        return ends["embedding"](tokens_BL, dtype, placement)

    def final_norm(self, ends: dict[str, Any], y_BSD: Array) -> Array:
        """Returns the input of the head, computed from the last layer's output, each token on its own."""
        return ends["norm"](y_BSD)

    def head_weight(self, ends: dict[str, Any]) -> Array:
        """Returns the weight [D, V] of the head."""
        return ends["embedding"].table[...].T if self.config.tie_embeddings else ends["head"].kernel[...]

    def finish_logits(self, ends: dict[str, Any], logits_CV: Array) -> Array:
        """Returns the float32 logits, computed from the head's product. It is called for one chunk of tokens at a
        time."""
        return logits_CV

    # The use of the layers' sums.

    def metrics(self, sums: dict[str, Any], tokens: Array) -> Sums:
        """Returns the metrics of a step by name, computed from the layers' sums over the batch, which has `tokens`
        tokens.

        `sums` has the stacked sums, [units, …], of the layers in each group. For a pattern of several layers, they are
        in a dict by the layer's index in the pattern ("0", "1", …).
        """
        return {}

    def update_buffers(self, buffers: dict[str, Any], sums: dict[str, Any]) -> dict[str, Any]:
        """Returns the buffers after a step. Buffers and sums are stacked as in `metrics`."""
        return buffers


def products_of(arrays: Params, axes: Params) -> tuple[Product, ...]:
    """Returns a product for each parameter in `arrays` except scales and biases. `axes` has the logical axes of each.

    One side of a weight is the model's width (an axis of `GATHERED`). Tensor parallelism splits the other side if
    `RULES` split one of the weight's axes along the mesh axis that also splits the sequence. A weight without the
    model's width is not split. The weights of several experts count as a single weight, of their total size.
    """
    products = []
    for parameter, leaf, names in named_leaves(arrays, axes):
        if SCALES_AND_BIASES & {*names}:
            continue
        width_dimension = next((dimension for dimension, name in enumerate(names) if name in GATHERED), None)
        is_split = any({*RULES["sequence"]} & {*RULES.get(name or "", ())} for name in names)
        width = leaf.shape[width_dimension or 0]
        # The width is the inputs if it is the first dimension of an expert or a layer. Otherwise it is the outputs.
        is_output = width_dimension is not None and width_dimension > names.count("experts")
        sizes = (leaf.size // width, width) if is_output else (width, leaf.size // width)
        other_side = "inputs" if is_output else "outputs"
        side = other_side if is_split and width_dimension is not None else ""
        experts = leaf.shape[names.index("experts")] if "experts" in names else 1
        products.append(Product(*sizes, side, name=parameter, experts=experts))
    return tuple(products)


@dataclass(frozen=True)
class Definition:
    """A model without the values of its arrays: the maths of each part, and the shape and logical axes of each
    array."""

    family: Family
    groups: tuple[LayerGroup, ...]
    graphs: dict[str, Any]
    """NNX graphs by name. A module outside of the layers has one graph, and a group of layers has a list of graphs, one
    for each entry of its pattern."""
    modules_before: tuple[str, ...]
    """Names of the modules with parameters that are used before the first layer."""
    modules_after: tuple[str, ...]
    """Names of the modules with parameters that are used after the last layer, including a tied embedding."""
    abstract: Params = field(repr=False)
    """Parameters as float32 jax.ShapeDtypeStructs."""
    axes: Params = field(repr=False)
    """Logical axes of the parameters."""
    abstract_buffers: Params = field(repr=False)
    buffer_axes: Params = field(repr=False)
    adapters: Adapters | None = None
    """The adapters, whose parameters `abstract` and `axes` have; None if there are none."""

    @property
    def base(self) -> "Definition":
        """The definition without adapters."""
        if self.adapters is None:
            return self
        abstract, axes = without_adapters(self.abstract), without_adapters(self.axes)
        return replace(self, abstract=abstract, axes=axes, adapters=None)

    @property
    def vocab_size(self) -> int:
        return self.family.vocab_size

    def init(self, key: Array) -> tuple[Params, Params]:
        """Returns initial float32 parameters and buffers, which are the same for any sharding."""
        decoder = _Decoder(self.family, nnx.Rngs(params=key))
        params = _pure_dict(decoder, nnx.Param)
        if self.adapters is not None:
            params = with_initial_adapters(key, params, self.abstract)
        return params, _pure_dict(decoder, Buffer)

    def initial_buffers(self) -> Params:
        """Returns the buffers of a new run, without making its parameters."""
        return jax.jit(lambda: self.init(jax.random.key(0))[1])()

    def layer(self, group: LayerGroup, index: int, params: Params, buffers: Params) -> Any:
        """Returns the module for entry `index` of the group's pattern, with the parameters and buffers of one layer."""
        if self.adapters is not None:
            params = join_adapters(params, self.adapters.scale)
        return nnx.merge(self.graphs[group.name][index], params, buffers)

    def ends(self, params: Params) -> dict[str, Any]:
        """Returns the modules before and after the layers, by name. `params` has the parameters of the requested
        ones."""
        return {name: nnx.merge(self.graphs[name], params[name]) for name in params}

    @property
    def parameter_count(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.abstract))

    def layer_costs(self) -> list[tuple[int, LayerCosts]]:
        """Returns, for each kind of layer, the number of layers of that kind and the costs of one of them."""
        counts = Counter[str]()
        for group in self.groups:
            for kind in group.pattern:
                counts[kind] += group.units
        return [(count, self.family.costs(kind)) for kind, count in counts.items()]


class _Decoder(nnx.Module):
    """A module with each part of a model as an attribute. Layers are stacked along a leading axis. There are no other
    attributes that a part with the same name could overwrite."""

    def __init__(self, family: Family, rngs: nnx.Rngs):
        before = family.before(rngs)
        stacks = {group.name: _stack(family, group, rngs) for group in family.groups()}
        after = family.after(rngs)
        for name, module in {**before, **stacks, **after}.items():
            setattr(self, name, module)


def _stack(family: Family, group: LayerGroup, rngs: nnx.Rngs) -> nnx.Module:
    """Returns the stacked layers of a group. If its pattern has several layers, they are in a dict by index in it."""

    def stack(kind: str) -> nnx.Module:
        return nnx.vmap(lambda rngs: family.layer(kind, rngs))(rngs.split(group.units))

    stacks = [stack(kind) for kind in group.pattern]
    return stacks[0] if len(stacks) == 1 else nnx.Dict({str(index): module for index, module in enumerate(stacks)})


def define(family: Family) -> Definition:
    """Returns the definition of the model that a family and its config describe, without using a device.

    Raises `ConfigError` for groups, axes and buffers that the contract does not allow.
    """
    groups = tuple(family.groups())
    first, last = _names_of_ends(family)
    _check_groups(family, groups, first + last)
    decoder = nnx.eval_shape(lambda: _Decoder(family, nnx.Rngs(params=0)))
    graph_of = lambda module: nnx.split(module)[0]
    graphs: dict[str, Any] = {name: graph_of(getattr(decoder, name)) for name in first + last}
    for group in groups:
        graphs[group.name] = [graph_of(_abstract_layer(family, kind)) for kind in group.pattern]
    tied_names = ("embedding",) if family.config.tie_embeddings else ()
    group_names = [group.name for group in groups]
    axes = _logical_axes(decoder, nnx.Param, group_names)
    buffer_axes = _logical_axes(decoder, Buffer, group_names)
    _check_axes(axes, buffer_axes, group_names)
    return Definition(
        family, groups, graphs, first, last + tied_names,
        _pure_dict(decoder, nnx.Param), axes, _pure_dict(decoder, Buffer), buffer_axes,
    )  # fmt: skip


def with_adapters(definition: Definition, lora: Lora) -> Definition:
    """Returns the definition with the adapters that `lora` requests. Raises `ConfigError` if the model cannot have
    them."""
    family, groups = definition.family, {group.name for group in definition.groups}
    adapters = find_adapters(lora, definition.abstract, definition.axes, groups, family.hugging_face)
    abstract, axes = add_to_trees(adapters, definition.abstract, definition.axes)
    return replace(definition, abstract=abstract, axes=axes, adapters=adapters)


def _abstract_layer(family: Family, kind: str) -> nnx.Module:
    """Returns a layer whose arrays have shapes but no values."""
    return nnx.eval_shape(lambda: family.layer(kind, nnx.Rngs(params=0)))


def _names_of_ends(family: Family) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the names of the modules before the first layer, and those of the modules after the last layer."""
    names: list[tuple[str, ...]] = []

    # The names are collected as a side effect, because eval_shape sorts the keys of the mappings that it returns.
    def collect_names() -> None:
        names.extend(tuple(make(nnx.Rngs(params=0))) for make in (family.before, family.after))

    nnx.eval_shape(collect_names)
    before, after = names
    return before, after


def _check_groups(family: Family, groups: Sequence[LayerGroup], ends: Sequence[str]) -> None:
    """Raises `ConfigError` for invalid groups. Parameters and logical axes use their names, which must be unique."""
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


def _check_axes(axes: Params, buffer_axes: Params, group_names: Sequence[str]) -> None:
    """Raises `ConfigError` for unknown axes, and for buffers outside of layers or along gathered axes."""
    known_axes = {*RULES, *group_names, None}
    for path, names in jax.tree.leaves_with_path((axes, buffer_axes), is_leaf=is_axes):
        name = parameter_name(path[1:])
        if unknown := [axis for axis in names if axis not in known_axes]:
            raise ConfigError(
                f"model.family: {name} has the unknown axis {unknown[0]!r}; use one of {', '.join(sorted(RULES))}"
            )
        is_buffer = path[0].idx == 1  # the second tree of (axes, buffer_axes)
        if is_buffer and (path[1].key not in group_names or set(names) & set(GATHERED)):
            raise ConfigError(
                f"model.family: the buffer {name} must belong to a layer and must not have the axes "
                f"{', '.join(GATHERED)}"
            )


def _pure_dict(module: nnx.Module, kind: type[nnx.Variable[Any]]) -> Params:
    """Returns the arrays of all variables of a kind, as a nested dict."""
    return nnx.to_pure_dict(nnx.state(module, kind))


def _logical_axes(module: nnx.Module, kind: type[nnx.Variable[Any]], group_names: Sequence[str] = ()) -> Params:
    """Returns the logical axes of all variables of a kind. Variables of a group of layers are stacked along a first
    axis that has the group's name."""
    is_variable = lambda node: isinstance(node, nnx.Variable)
    state = nnx.state(module, kind)
    axes = nnx.to_pure_dict(jax.tree.map(lambda v: v.replace(v.get_metadata("axes")), state, is_leaf=is_variable))

    def with_group_axis(name: str) -> Params:
        return jax.tree.map(lambda names: (name, *names), axes[name], is_leaf=is_axes)

    return {name: with_group_axis(name) if name in group_names else axes[name] for name in axes}
