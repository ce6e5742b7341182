"""Sizes of mesh axes, and the number of microbatches that follows from them. Does not import JAX, because launchers may
run without it."""

import math
from collections.abc import Mapping

from jaxmnt.config.mesh import BATCH_AXES, GATHERING_AXES, STAGE_AXIS, Mesh
from jaxmnt.config.schema import Config
from jaxmnt.errors import ConfigError, counted


def resolve_sizes(mesh: Mesh, device_count: int) -> dict[str, int]:
    """Returns the axis sizes with -1 replaced by the remaining devices of `device_count`.

    Raises `ConfigError` when the sizes do not multiply to the device count.
    """
    sizes = mesh.sizes()
    fixed = math.prod(size for size in sizes.values() if size != -1)
    shape = ", ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1) or "all axes 1"
    rest = next((axis for axis, size in sizes.items() if size == -1), None)
    if rest is None and fixed != device_count:
        raise ConfigError(
            f"mesh: the sizes ({shape}) multiply to {fixed}, but the number of devices is {device_count}; change a "
            "size, or set one axis to -1 for the rest"
        )
    if device_count % fixed:
        axes = " × ".join(f"mesh.{axis}={size}" for axis, size in sizes.items() if size not in (1, -1))
        available = counted(device_count, "device is available", "devices are available")
        command = f"python -m jaxmnt.launch local --processes 1 --devices-per-process {fixed} -- --config FILE"
        virtual = f", or try virtual devices: {command}" if device_count < fixed else ""
        fix = f"choose sizes whose product divides {device_count}" if device_count > 1 else "set it to 1"
        raise ConfigError(f"{axes} needs a multiple of {fixed} devices, and {available}; {fix}{virtual}")
    if rest is not None:
        sizes[rest] = device_count // fixed
    return sizes


def num_microbatches(config: Config, sizes: Mapping[str, int]) -> int:
    """Returns the number of microbatches per global batch, from `train.microbatch_size` and the number of batch shards.

    Raises `ConfigError`, naming global batch sizes that do fit, when the global batch does not divide.
    """
    rows, shards = config.data.global_batch_size, math.prod(sizes[axis] for axis in BATCH_AXES)
    size = config.train.microbatch_size or 1
    if rows % (shards * size):
        below, above = rows - rows % (shards * size), rows + -rows % (shards * size)
        fitting = f"{below} or {above}" if below else str(above)
        per_microbatch = f", {size} of them per microbatch (train.microbatch_size)" if size > 1 else ""
        split = " × ".join(f"{axis} {sizes[axis]}" for axis in BATCH_AXES)
        raise ConfigError(
            f"data.global_batch_size: {rows} rows do not divide among {shards} batch shards (mesh {split})"
            f"{per_microbatch}; use {fitting}, or change the mesh"
        )
    local = rows // shards
    return local // (config.train.microbatch_size or local)


def without_stages(mesh: Mesh, sizes: Mapping[str, int]) -> Mesh:
    """Returns a mesh of the same devices for inference: the pipeline axis, which splits layers, becomes part of an axis
    that splits weights."""
    gathering = GATHERING_AXES[0]
    changed = {**sizes, gathering: sizes[gathering] * sizes[STAGE_AXIS], STAGE_AXIS: 1}
    return Mesh(allow_split_hosts=mesh.allow_split_hosts).model_copy(update=changed)
