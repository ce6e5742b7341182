"""Sharding of arrays: the order of devices in the mesh, and one table that maps logical axes to mesh axes."""

import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmnt.config.mesh import (
    AXES,
    BATCH_AXES,
    GATHERING_AXES,
    MESH_AXES,
    REPLICA_AXES,
    STAGE_AXIS,
    Mesh,
    axes_that_split,
)
from jaxmnt.errors import ConfigError, printable
from jaxmnt.parallel.axes import length_divisor, resolve_sizes

HostOf = Callable[[jax.Device], str]
"""A function that returns the name of a device's machine."""


def host_of_process(device: jax.Device) -> str:
    """Returns the process index as the host name: each process counts as a separate machine."""
    return str(device.process_index)


def build_mesh(
    mesh: Mesh, devices: Sequence[jax.Device] | None = None, host_of: HostOf | None = None
) -> jax.sharding.Mesh:
    """Returns a mesh with all six axes over `devices` (default: all), in order of slice, host, process and device id.

    The last axes vary fastest, so `model` neighbours share a machine and `data` and `pipeline` span machines. Axis
    types are Auto. Raises `ConfigError` if an axis that should stay inside a machine would span several.
    """
    mesh_devices = list(devices or jax.devices())
    several_processes = len({device.process_index for device in mesh_devices}) > 1
    host_of = host_of or (host_of_process if several_processes else lambda _: "")
    process_and_id = lambda device: (device.process_index, device.id)
    # Hosts are ordered by their first device.
    first_devices: dict[str, tuple[int, int]] = {}
    for device in sorted(mesh_devices, key=process_and_id):
        first_devices.setdefault(host_of(device), process_and_id(device))
    slice_of = lambda device: getattr(device, "slice_index", None) or 0
    mesh_devices.sort(key=lambda device: (slice_of(device), first_devices[host_of(device)], process_and_id(device)))
    sizes = resolve_sizes(mesh, len(mesh_devices))
    grid = np.array(mesh_devices, dtype=object).reshape([sizes[axis] for axis in AXES])
    for axis in MESH_AXES:
        if axis.inside_host and sizes[axis.name] > 1 and not mesh.allow_split_hosts:
            _check_inside_hosts(grid, axis.name, sizes[axis.name], host_of)
    return jax.sharding.Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _check_inside_hosts(grid: np.ndarray, axis: str, size: int, host_of: HostOf) -> None:
    """Raises `ConfigError` if a group of devices along the axis spans several hosts."""
    for group in np.moveaxis(grid, AXES.index(axis), -1).reshape(-1, size):
        hosts = sorted({host_of(device) for device in group})
        if len(hosts) > 1:
            raise ConfigError(
                f"mesh.{axis}: {size} devices would span the hosts {', '.join(hosts[:4])}, which communicate over the "
                f"slow network; lower mesh.{axis} to at most the number of devices per host, or set "
                "mesh.allow_split_hosts: true (--dry-run shows for how long devices would then wait)"
            )


_FEATURES_OVER_STAGES = (*axes_that_split("features"), *axes_that_split("layers"))
"""The mesh axes of the tables at the ends of the model. Stages come last, so that a device's part of a table is
contiguous once it is gathered from them."""

RULES: dict[str, tuple[str, ...]] = {
    "batch": BATCH_AXES,
    "devices": AXES,
    "length": axes_that_split("length"),
    "sequence": axes_that_split("features"),  # the length between layers, that is, in norms and on the residual stream
    "layers": axes_that_split("layers"),
    "embed": GATHERING_AXES,
    "kv_embed": GATHERING_AXES,
    "vocab": _FEATURES_OVER_STAGES,
    "positions": _FEATURES_OVER_STAGES,  # the rows of a table of learned positions
    "heads": axes_that_split("features"),
    "kv_heads": axes_that_split("features"),
    "head_dim": (),
    "mlp": axes_that_split("features"),
    "router": (),  # the scores of experts
    "experts": axes_that_split("experts", "features"),
    "expert_embed": tuple(axis for axis in GATHERING_AXES if axis not in axes_that_split("experts")),
    "expert_mlp": (),
    "norm": (),  # scales of norms, which are whole on every device and used in float32
    "bias": (),
    "buffer": (),
}
"""The mesh axes that split each logical axis."""

GATHERED = ("embed", "kv_embed", "expert_embed")
"""Logical axes that are stored in pieces and gathered for use."""

TABLE_AXES = ("vocab", "positions")
"""Logical axes along which the tables at the ends of the model are split."""

FLOAT32_AXES = {"norm", "router"}
"""Logical axes of parameters that are used in float32, whatever the compute dtype."""

SCALES_AND_BIASES = {"norm", "bias"}
"""Logical axes of scales and biases, which have few parameters and no weight decay."""

MAX_REPLICATED_SHARE = 0.02
"""The maximum share of a model's parameters that may be whole on every device although a mesh axis could split them."""

Axes = tuple[str | None, ...]
"""The logical axis of each dimension of an array; None for a dimension that is never split."""


Overlap = Literal["off", "ring", "rows"]
"""Work that a device does while activations travel along `model`: none (`off`), pieces of the sequence that have
already arrived (`ring`), or the other half of the microbatch's rows (`rows`)."""


@dataclass(frozen=True)
class Placement:
    """A mesh, and the rules that shard arrays over it."""

    mesh: jax.sharding.Mesh
    rules: dict[str, tuple[str, ...]] = field(default_factory=lambda: RULES)
    overlap: Overlap = "off"
    overlaps_microbatches: bool = False
    """True if a step runs the forward of a microbatch beside the backward of another wherever its schedule allows."""
    divides_tokens: bool = False
    """True if the stages of a pipeline divide the tokens of embedding and loss among them, and gather the tables from
    each other once a step; False if they divide the vocabulary."""

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """The number of devices along each mesh axis."""
        return dict(self.mesh.shape)

    def mesh_axes(self, axis: str | None) -> tuple[str, ...]:
        """Returns the mesh axes that split a logical axis, leaving out mesh axes of size 1."""
        return () if axis is None else tuple(name for name in self.rules[axis] if self.sizes[name] > 1)

    def num_shards(self, axis: str | None) -> int:
        """Returns the number of pieces into which a logical axis is split."""
        return math.prod(self.sizes[name] for name in self.mesh_axes(axis))

    def axes_in_use(self, axis: str | None) -> tuple[str, ...]:
        """Returns the mesh axes that split a logical axis inside a step. They are those of `mesh_axes`, without the
        stages if a step begins by gathering the axis from them."""
        mesh_axes = self.mesh_axes(axis)
        is_gathered = self.divides_tokens and axis in TABLE_AXES
        return tuple(name for name in mesh_axes if name != STAGE_AXIS) if is_gathered else mesh_axes

    def num_shards_in_use(self, axis: str | None) -> int:
        """Returns the number of pieces into which a logical axis is split inside a step."""
        return math.prod(self.sizes[name] for name in self.axes_in_use(axis))

    @property
    def on_cpu(self) -> bool:
        """True if the devices are CPUs."""
        return self.mesh.devices.flat[0].platform == "cpu"

    @property
    def spans_cpu_processes(self) -> bool:
        """True if the devices are CPUs of more than one process."""
        return self.on_cpu and len({device.process_index for device in self.mesh.devices.flat}) > 1

    @property
    def stages(self) -> int:
        """The number of pipeline stages."""
        return self.sizes[STAGE_AXIS]

    @property
    def num_layer_axes(self) -> int:
        """The number of mesh axes along which layers or stages communicate."""
        return sum(size > 1 for axis, size in self.sizes.items() if axis not in REPLICA_AXES)

    def local_length(self, length: int) -> int:
        """Returns the number of tokens of each row, of `length` tokens, that a device holds between layers, where the
        length is split further."""
        # The logical axis `length` divides rows everywhere; `sequence` divides each piece again between layers.
        return length // self.num_shards("length") // self.num_shards("sequence")

    @property
    def row_divisor(self) -> int:
        """The number of which a row's length must be a multiple, so that each device has two chunks of the row."""
        return length_divisor(self.num_shards("length"), 1)

    @property
    def batch_shards(self) -> int:
        """The number of pieces into which the rows of a batch are split."""
        return self.num_shards("batch")

    def gathered_axes(self, axes: Axes) -> tuple[int, tuple[str, ...]] | None:
        """Returns the dimension along which a weight with these logical axes is gathered before use, and the mesh axes
        over which it is gathered, or None if it is not gathered."""
        for dimension, axis in enumerate(axes):
            if axis in GATHERED and self.mesh_axes(axis):
                return dimension, self.mesh_axes(axis)
        return None

    def dimension_over_stages(self, axes: Axes) -> int | None:
        """Returns the dimension along which a step gathers a weight with these logical axes from the stages, or None if
        it does not gather it."""
        is_gathered = lambda axis: self.axes_in_use(axis) != self.mesh_axes(axis)
        return next((dimension for dimension, axis in enumerate(axes) if is_gathered(axis)), None)

    def replicated_axes(self, axes: Axes) -> tuple[str, ...]:
        """Returns the mesh axes over which an array with these logical axes is replicated."""
        splitting_axes = {name for axis in axes for name in self.mesh_axes(axis)}
        return tuple(name for name, size in self.sizes.items() if size > 1 and name not in splitting_axes)

    def spec(self, axes: Axes) -> P:
        """Returns the partition over the mesh of an array with these logical axes."""
        return P(*(self.mesh_axes(axis) or None for axis in axes))

    def sharding(self, axes: Axes) -> NamedSharding:
        """Returns the sharding of an array with these logical axes."""
        return NamedSharding(self.mesh, self.spec(axes))


def with_whole_rows(placement: Placement) -> Placement:
    """Returns the placement, changed so that devices have whole rows between layers. Generating one token at a time
    requires this."""
    return replace(placement, rules=placement.rules | {"sequence": ()}, overlap="off")


def parameter_name(path: Any) -> str:
    """Returns a parameter's name, such as layers.attention.query, from its path in a tree."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def match_names(pattern: str, names: Collection[str], key: str) -> list[str]:
    """Returns the sorted names of parameters that a pattern matches, in which `*` stands for any text. `key` is the
    setting that has the pattern.

    Raises `ConfigError` if there are none.
    """
    matches = sorted(name for name in names if fnmatchcase(name, pattern))
    if not matches:
        raise ConfigError(
            f"{key}: {printable(pattern)!r} matches no parameter; the parameters are {', '.join(sorted(names))}"
        )
    return matches


def without_stack_axis(axes: Any) -> Any:
    """Returns the tree of logical axes of stacked layers, without each array's first axis, the stack."""
    return jax.tree.map(lambda names: names[1:], axes, is_leaf=is_axes)


def is_axes(leaf: Any) -> bool:
    """Returns True if a node in a tree of logical axes holds the axes of one array."""
    return isinstance(leaf, tuple) and all(name is None or isinstance(name, str) for name in leaf)


def named_leaves(tree: Any, axes: Any) -> list[tuple[str, Any, Axes]]:
    """Returns the name, the leaf and the logical axes of each array in a tree of parameters or buffers."""
    paths_and_axes = jax.tree.leaves_with_path(axes, is_leaf=is_axes)
    pairs = zip(jax.tree.leaves(tree), paths_and_axes, strict=True)
    return [(parameter_name(path), leaf, names) for leaf, (path, names) in pairs]


def check_replicated_share(
    abstract: Any, axes: Any, placement: Placement, is_exempt: Callable[[str], bool] = lambda name: False
) -> None:
    """Raises `ConfigError` if over 2 % of the parameters are whole on every device although an axis could split them.

    `abstract` is the tree of the parameters' shapes, and `axes` the tree of their logical axes. `is_exempt` accepts the
    names of parameters that do not count.
    """
    leaves = [(name, leaf, names) for name, leaf, names in named_leaves(abstract, axes) if not is_exempt(name)]
    total = sum(leaf.size for _, leaf, _ in leaves)
    for mesh_axis in (*GATHERING_AXES, *axes_that_split("features", "layers")):
        if placement.sizes[mesh_axis] == 1:
            continue
        replicated_parameters = [
            (name, leaf.size) for name, leaf, names in leaves if mesh_axis in placement.replicated_axes(names)
        ]
        share = sum(size for _, size in replicated_parameters) / total
        if share > MAX_REPLICATED_SHARE:
            largest_parameters = sorted(
                replicated_parameters, key=lambda name_and_size: (-name_and_size[1], name_and_size[0])
            )[:4]
            raise ConfigError(
                f"mesh.{mesh_axis}: {share:.0%} of the parameters would stay whole on every device along the axis, "
                f"the largest of them {', '.join(name for name, _ in largest_parameters)}; change mesh.rules, or set "
                f"mesh.{mesh_axis} to 1"
            )
