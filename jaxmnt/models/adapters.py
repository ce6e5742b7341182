"""Low-rank adapters beside frozen weights (LoRA, Hu et al. 2021, arXiv:2106.09685).

A weight [*in, *out] with an adapter has two neighbours in the tree of parameters: NAME_lora_a [*in, rank] and
NAME_lora_b [rank, *out]. Where a layer is called, the three become one `AdaptedWeight`, which the functions of
`models.projections` multiply with. Their result is x · weight + scale · x · a · b.
"""

import math
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jax import Array

from jaxmnt.config.lora import Lora
from jaxmnt.errors import ConfigError, listed, printable
from jaxmnt.models.huggingface import EXPERT, HuggingFace
from jaxmnt.parallel.sharding import (
    GATHERED,
    SCALES_AND_BIASES,
    Axes,
    is_axes,
    match_names,
    named_leaves,
    parameter_name,
)

A_SUFFIX, B_SUFFIX = "_lora_a", "_lora_b"
ALL_LINEAR = "all-linear"

Params = dict[str, Any]


class AdaptedWeight:
    """A weight and its adapter, in place of the weight's array in a layer's module.

    It is not an array: any use of it but in `models.projections` raises `ConfigError`, because the adapter would have
    no effect.
    """

    def __init__(self, name: str, weight: Array, a: Array, b: Array, scale: float):
        self.name, self.weight, self.a, self.b, self.scale = name, weight, a, b, scale

    def __getitem__(self, index: Any) -> "AdaptedWeight":
        if index is not Ellipsis:
            self._refuse()
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python and JAX ask for optional methods
            raise AttributeError(name)
        self._refuse()

    def __rmatmul__(self, operand: Any) -> NoReturn:
        self._refuse()

    __rmul__ = __radd__ = __matmul__ = __mul__ = __add__ = __rmatmul__

    def _refuse(self) -> NoReturn:
        raise ConfigError(
            f"lora.targets: {self.name} is not multiplied by a function of jaxmnt.models.projections, so it cannot "
            "have an adapter; leave it out, or call project"
        )


@contextmanager
def refusing_other_products() -> Iterator[None]:
    """Raises `ConfigError`, in its context, for a function of JAX that is called with an `AdaptedWeight`."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if AdaptedWeight.__name__ not in str(error):
            raise
        raise ConfigError(
            "lora.targets: a weight with an adapter is not multiplied by a function of jaxmnt.models.projections "
            f"({str(error).splitlines()[0]}); leave it out, or call project"
        ) from error


@dataclass(frozen=True)
class Adapters:
    """The adapters of a model."""

    names: tuple[str, ...]
    """The names of the weights with adapters, such as layers.attention.query."""
    left_out: tuple[str, ...]
    """The names of matrices that `lora.targets` matches and that have no adapters, such as those of experts."""
    also_trained: tuple[str, ...]
    """The names of parameters that train as a whole."""
    rank: int
    scale: float
    """The factor of an adapter's output."""

    def trains(self, name: str) -> bool:
        """Returns True if the parameter with this name trains."""
        return is_adapter(name) or name in self.also_trained


def is_adapter(name: str) -> bool:
    """Returns True if a parameter with this name, or the last part of a name, belongs to an adapter."""
    return name.endswith((A_SUFFIX, B_SUFFIX))


def find_adapters(
    lora: Lora, abstract: Params, axes: Params, group_names: Collection[str], hf_format: HuggingFace | None
) -> Adapters:
    """Returns the adapters that `lora` requests for a model with these parameters. `group_names` are the names of the
    groups of layers.

    Raises `ConfigError` for targets that match nothing, or nothing that can have an adapter, and for a rank that is as
    large as a side of a weight.
    """
    leaves = {name: (leaf, names) for name, leaf, names in named_leaves(abstract, axes)}
    obstacles = {name: _obstacle(name, names, group_names) for name, (_, names) in leaves.items()}
    peft_names = {} if hf_format is None else {name: _peft_module(name, group_names, hf_format) for name in leaves}
    targets: set[str] = set()
    left_out: set[str] = set()
    for pattern in lora.targets:
        matches = _matches(pattern, leaves, peft_names, group_names)
        if not matches:
            names = [name for name in sorted(leaves) if obstacles[name] is None]
            raise ConfigError(
                f"lora.targets: {printable(pattern)!r} matches no parameter; set {ALL_LINEAR}, or names of weights: "
                f"{', '.join(names)}"
            )
        possible = [name for name in matches if obstacles[name] is None]
        if not possible:
            name = matches[0]
            raise ConfigError(
                f"lora.targets: {name} {obstacles[name]}, so it cannot have an adapter; remove it, or name it in "
                "lora.also_train"
            )
        targets |= set(possible)
        left_out |= {name for name in matches if name not in possible and _is_matrix(leaves[name][1])}
    for name in sorted(targets):
        leaf, axes_of_leaf = leaves[name]
        sides = _sides(leaf.shape[1:], axes_of_leaf[1:])
        if lora.rank >= min(sides):
            raise ConfigError(
                f"lora.rank: {lora.rank} must be below the sides of {name} [{sides[0]}, {sides[1]}]; lower it, or "
                "leave that weight out of lora.targets"
            )
    also_trained = _also_trained(lora, leaves, targets)
    return Adapters(tuple(sorted(targets)), tuple(sorted(left_out)), also_trained, lora.rank, lora.scale)


def _also_trained(lora: Lora, leaves: Collection[str], targets: Collection[str]) -> tuple[str, ...]:
    """Returns the sorted names of the parameters that `lora.also_train` matches."""
    also_trained: set[str] = set()
    for pattern in lora.also_train:
        matches = match_names(pattern, leaves, "lora.also_train")
        if both := [name for name in matches if name in targets]:
            raise ConfigError(
                f"lora.also_train: {both[0]} has an adapter, too; take it out of lora.targets, or remove it here"
            )
        also_trained.update(matches)
    return tuple(sorted(also_trained))


def _matches(
    pattern: str, leaves: Mapping[str, Any], peft_names: Mapping[str, str | None], group_names: Collection[str]
) -> list[str]:
    """Returns the sorted names of the parameters that a pattern of `lora.targets` matches."""
    if pattern == ALL_LINEAR:
        in_layers = [name for name in leaves if name.partition(".")[0] in group_names]
        return sorted(name for name in in_layers if _is_matrix(leaves[name][1][1:]))
    matches = [name for name in leaves if fnmatchcase(name, pattern)]
    if not matches:
        is_suffix = lambda module: module is not None and f".{module}".endswith(f".{pattern}")
        matches = [name for name, module in peft_names.items() if is_suffix(module)]
    return sorted(matches)


def _peft_module(name: str, group_names: Collection[str], hf_format: HuggingFace) -> str | None:
    """Returns the name of the module in transformers whose weight is the parameter, with {} for the number of its
    layer; None if there is no such module."""
    group, _, in_group = name.partition(".")
    if group not in group_names:
        tensor = hf_format.ends.get(name)
    else:
        index, _, in_layer = in_group.partition(".")
        tensor = hf_format.layer.get(in_layer if index.isdecimal() else in_group)
    if tensor is None or EXPERT in tensor.name or not tensor.name.endswith(".weight"):
        return None
    return tensor.name.removesuffix(".weight")


def _is_matrix(names: Axes) -> bool:
    return len(names) > 1 and not SCALES_AND_BIASES & {*names}


def _obstacle(name: str, names: Axes, group_names: Collection[str]) -> str | None:
    """Returns why a parameter cannot have an adapter, or None if it can."""
    if name.partition(".")[0] not in group_names:
        return "is outside of the layers"
    own_names = names[1:]
    if "experts" in own_names:
        return "belongs to experts"
    if "router" in own_names:
        return "is a router"
    gathered = [index for index, axis in enumerate(own_names) if axis in GATHERED]
    if not _is_matrix(own_names) or len(gathered) != 1 or gathered[0] not in (0, len(own_names) - 1):
        return "is not a matrix that reads from or writes to the residual stream"
    return None


def _inputs(names: Axes) -> int:
    """Returns the number of leading dimensions of an unstacked weight that are its inputs. The model's width is the
    first dimension of a weight that reads from the residual stream, and the last of a weight that writes to it."""
    return 1 if names[0] in GATHERED else len(names) - 1


def _sides(shape: tuple[int, ...], names: Axes) -> tuple[int, int]:
    inputs = _inputs(names)
    return math.prod(shape[:inputs]), math.prod(shape[inputs:])


def add_to_trees(adapters: Adapters, abstract: Params, axes: Params) -> tuple[Params, Params]:
    """Returns the trees of shapes and of logical axes with the parameters of the adapters. Their ranks are whole on
    every device."""

    def walk(shapes: Params, names: Params, path: tuple[str, ...]) -> tuple[Params, Params]:
        new_shapes: Params = {}
        new_names: Params = {}
        for key, leaf in shapes.items():
            if not is_axes(names[key]):
                new_shapes[key], new_names[key] = walk(leaf, names[key], (*path, key))
                continue
            new_shapes[key], new_names[key] = leaf, names[key]
            if ".".join((*path, key)) in adapters.names:
                stack, *weight_axes = names[key]
                units, *sizes = leaf.shape
                inputs, rank = _inputs(tuple(weight_axes)), adapters.rank
                shape_of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
                new_shapes[key + A_SUFFIX] = shape_of(units, *sizes[:inputs], rank)
                new_names[key + A_SUFFIX] = (stack, *weight_axes[:inputs], None)
                new_shapes[key + B_SUFFIX] = shape_of(units, rank, *sizes[inputs:])
                new_names[key + B_SUFFIX] = (stack, None, *weight_axes[inputs:])
        return new_shapes, new_names

    return walk(abstract, axes, ())


def without_adapters(tree: Params) -> Params:
    """Returns a tree of parameters, or of what belongs to them, without those of adapters."""
    return {
        key: without_adapters(leaf) if isinstance(leaf, dict) else leaf
        for key, leaf in tree.items()
        if not is_adapter(key)
    }


def with_initial_adapters(key: Array, params: Params, abstract: Params) -> Params:
    """Returns the parameters with the initial values of the adapters that `abstract` has. Outputs of new adapters are
    zero, because b is. A number of a is uniform, with the bound 1 / sqrt(inputs), as in PEFT and in torch.nn.Linear.
    The values depend on the key and on the adapter's name alone."""

    def initial(path: Any, leaf: jax.ShapeDtypeStruct) -> Array:
        name = parameter_name(path)
        if name.endswith(B_SUFFIX):
            return jnp.zeros(leaf.shape, jnp.float32)
        if name.endswith(A_SUFFIX):
            bound = 1 / math.sqrt(math.prod(leaf.shape[1:-1]))
            own_key = jax.random.fold_in(key, zlib.crc32(name.encode()))
            return jax.random.uniform(own_key, leaf.shape, jnp.float32, -bound, bound)
        node: Any = params
        for entry in path:
            node = node[entry.key]
        return node

    return jax.tree.map_with_path(initial, abstract)


def join_adapters(params: Params, scale: float, path: tuple[str, ...] = ()) -> Params:
    """Returns a layer's parameters with an `AdaptedWeight` in place of each weight that has an adapter."""
    joined: Params = {}
    for key, leaf in params.items():
        if isinstance(leaf, dict):
            joined[key] = join_adapters(leaf, scale, (*path, key))
        elif key + A_SUFFIX in params:
            name = ".".join((*path, key))
            joined[key] = AdaptedWeight(name, leaf, params[key + A_SUFFIX], params[key + B_SUFFIX], scale)
        elif not is_adapter(key):
            joined[key] = leaf
    return joined


class Triple(NamedTuple):
    """The names of a weight and of its adapter's parameters."""

    weight: str
    a: str
    b: str


def triples(adapters: Adapters) -> Iterator[Triple]:
    """Yields the names of each weight with an adapter and of the adapter's parameters."""
    for name in adapters.names:
        yield Triple(name, name + A_SUFFIX, name + B_SUFFIX)


def describe_left_out(adapters: Adapters) -> str | None:
    """Returns a note about the matrices that `lora.targets` matches and that have no adapters; None if there are
    none."""
    if not adapters.left_out:
        return None
    names = listed(list(adapters.left_out), 4)
    return f"lora.targets: {names}: no adapters, because experts, routers and the ends of the model cannot have any"
