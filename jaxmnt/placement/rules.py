"""One table says how everything is sharded.

Parameters and activations name their dimensions with logical axes; `RULES` maps those to mesh axes; nothing
else in the code names a mesh axis, except code that communicates along one.

The step runs inside one `jax.shard_map` that is *manual* over every mesh axis but `model`: batches and
fsdp-sharded parameters are seen as local pieces, and what crosses devices there is written out
(`collectives.py`). `model` is left to XLA's partitioner, steered by `Placement.constrain`; where its size is 1
it is manual, too, and the partitioner has nothing to decide.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmnt.config.schema import AXES, Config
from jaxmnt.errors import ConfigError

BATCH_AXES = ("data", "fsdp")
"""Mesh axes that split the rows of a batch."""

RULES: dict[str, str | tuple[str, ...] | None] = {
    "batch": BATCH_AXES,
    "devices": AXES,
    "length": None,
    "layers": None,
    "embed": "fsdp",
    "vocab": "model",
    "heads": "model",
    "kv_heads": "model",
    "head_dim": None,
    "mlp": "model",
    "norm": None,
}

Axes = tuple[str | None, ...]
"""Logical axis names of an array's dimensions."""


@dataclass(frozen=True)
class Placement:
    """The mesh with the rules applied to it."""

    mesh: jax.sharding.Mesh
    sizes: dict[str, int] = field(init=False)
    auto_axes: frozenset[str] = field(init=False)
    manual_axes: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        sizes = {str(axis): size for axis, size in self.mesh.shape.items()}
        auto = frozenset(axis for axis in ("model",) if sizes[axis] > 1)
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "auto_axes", auto)
        object.__setattr__(self, "manual_axes", frozenset(sizes) - auto)

    @property
    def gathers(self) -> bool:
        """Whether parameters have to be gathered before they can be used."""
        return self.sizes["fsdp"] > 1

    def ways(self, axis: str) -> int:
        """Into how many pieces a logical axis is split."""
        rule = RULES[axis]
        names = () if rule is None else (rule,) if isinstance(rule, str) else rule
        return math.prod(self.sizes[name] for name in names)

    @property
    def batch_shards(self) -> int:
        """Into how many pieces the rows of a batch are split."""
        return self.ways("batch")

    def spec(self, axes: Axes) -> P:
        """The partition of an array over the whole mesh."""
        return self._spec(axes, frozenset(self.sizes))

    def manual_spec(self, axes: Axes) -> P:
        """The part of the partition that shard_map takes apart."""
        return self._spec(axes, self.manual_axes)

    def sharding(self, axes: Axes) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec(axes))

    def shardings(self, axes_tree: Any) -> Any:
        """`sharding` for each leaf of a tree of axes."""
        return jax.tree.map(self.sharding, axes_tree, is_leaf=is_axes)

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Fixes how a value inside the step is split over the axes that XLA partitions."""
        spec = self._spec(axes, self.auto_axes)
        return jax.lax.with_sharding_constraint(x, spec) if any(spec) else x

    def _spec(self, axes: Axes, over: frozenset[str]) -> P:
        return P(*(self._mesh_axes(axis, over) for axis in axes))

    def _mesh_axes(self, axis: str | None, over: frozenset[str]) -> str | tuple[str, ...] | None:
        rule = RULES[axis] if axis is not None else None
        if rule is None:
            return None
        kept = tuple(name for name in ((rule,) if isinstance(rule, str) else rule) if name in over)
        return None if not kept else kept[0] if len(kept) == 1 else kept


def is_axes(leaf: Any) -> bool:
    """Whether a node of a tree is the axes of one array."""
    return isinstance(leaf, tuple) and all(name is None or isinstance(name, str) for name in leaf)


def check_divides(config: Config, vocab_size: int, placement: Placement) -> None:
    """Raises `ConfigError` for the first model or batch size that its mesh axes do not divide."""
    model = config.model
    assert model.num_kv_heads and model.intermediate_size
    for key, size, axis in (
        ("model.num_heads", model.num_heads, "heads"),
        ("model.num_kv_heads", model.num_kv_heads, "kv_heads"),
        ("model.intermediate_size", model.intermediate_size, "mlp"),
        ("model.vocab_size", vocab_size, "vocab"),
        ("model.hidden_size", model.hidden_size, "embed"),
    ):
        mesh_axis = RULES[axis]
        assert isinstance(mesh_axis, str)
        ways = placement.ways(axis)
        if size % ways:
            raise ConfigError(f"{key}: {size} is not divisible by mesh.{mesh_axis} {ways}; change one of them")
    accumulation_passes(config, placement)


def accumulation_passes(config: Config, placement: Placement) -> int:
    """How many passes make up the global batch, from `train.microbatch_size` and the batch shards.

    Raises `ConfigError` when the global batch does not divide.
    """
    rows, shards = config.data.global_batch_size, placement.batch_shards
    if rows % shards:
        raise ConfigError(
            f"data.global_batch_size: {rows} rows do not divide among {shards} batch shards "
            f"(mesh data {placement.sizes['data']} × fsdp {placement.sizes['fsdp']}); use a multiple of {shards}"
        )
    local = rows // shards
    size = config.train.microbatch_size or local
    if local % size:
        raise ConfigError(
            f"train.microbatch_size: {size} does not divide the {local} rows of a batch shard "
            f"({rows} rows over {shards} shards); choose a divisor of {local}"
        )
    return local // size
