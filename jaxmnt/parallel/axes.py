"""Sizes of mesh axes, and the number of microbatches that follows from them. This module does not import JAX, because
launchers may run without it."""

import math
from collections.abc import Mapping

from jaxmnt.config.mesh import BATCH_AXES, GATHERING_AXES, Mesh, axes_that_split
from jaxmnt.config.schema import Config
from jaxmnt.errors import ConfigError, counted


def resolve_sizes(mesh: Mesh, device_count: int) -> dict[str, int]:
    """Returns the axis sizes, with -1 replaced by the number of devices that the other axes leave of `device_count`.

    Raises `ConfigError` if the product of the sizes is not the device count.
    """
    sizes = mesh.sizes()
    fixed_product = math.prod(size for size in sizes.values() if size != -1)
    listed_sizes = ", ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1) or "all axes 1"
    open_axis = next((axis for axis, size in sizes.items() if size == -1), None)
    if open_axis is None and fixed_product != device_count:
        raise ConfigError(
            f"mesh: the sizes ({listed_sizes}) multiply to {fixed_product}, but the number of devices is "
            f"{device_count}; change a size, or set one axis to -1 for the rest"
        )
    if device_count % fixed_product:
        axis_sizes = " × ".join(f"mesh.{axis}={size}" for axis, size in sizes.items() if size not in (1, -1))
        available_devices = counted(device_count, "device is available", "devices are available")
        command = f"python -m jaxmnt.launch local --processes 1 --devices-per-process {fixed_product} -- --config FILE"
        virtual_hint = f", or try virtual devices: {command}" if device_count < fixed_product else ""
        advice = f"choose sizes whose product divides {device_count}" if device_count > 1 else "set it to 1"
        raise ConfigError(
            f"{axis_sizes} needs a multiple of {fixed_product} devices, and {available_devices}; {advice}{virtual_hint}"
        )
    if open_axis is not None:
        sizes[open_axis] = device_count // fixed_product
    return sizes


def num_microbatches(config: Config, sizes: Mapping[str, int]) -> int:
    """Returns the number of microbatches per global batch, from `train.microbatch_size` and the number of batch shards.

    Raises `ConfigError` if the global batch cannot be split evenly; the message names global batch sizes that can.
    """
    rows = config.data.global_batch_size
    shards = math.prod(sizes[axis] for axis in BATCH_AXES)
    microbatch_size = config.train.microbatch_size or 1
    divisor = shards * microbatch_size
    if rows % divisor:
        smaller = rows // divisor * divisor
        larger = smaller + divisor
        possible_sizes = f"{smaller} or {larger}" if smaller else str(larger)
        per_microbatch = f" with {microbatch_size} rows per microbatch (train.microbatch_size)"
        shard_axes = " × ".join(f"{axis} {sizes[axis]}" for axis in BATCH_AXES if sizes[axis] > 1)
        mesh_text = f" (mesh {shard_axes})" if shard_axes else ""
        raise ConfigError(
            f"data.global_batch_size: {rows} rows cannot be split evenly among {shards} batch shards"
            f"{mesh_text}{per_microbatch if microbatch_size > 1 else ''}; use {possible_sizes}, or change the "
            "mesh"
        )
    shard_rows = rows // shards
    return shard_rows // (config.train.microbatch_size or shard_rows)


def microbatch_rows(config: Config, sizes: Mapping[str, int]) -> int:
    """Returns the number of rows in one microbatch on one batch shard. Raises `ConfigError` as `num_microbatches`
    does."""
    shards = math.prod(sizes[axis] for axis in BATCH_AXES)
    return config.data.global_batch_size // shards // num_microbatches(config, sizes)


def length_divisor(devices: int, pieces: int) -> int:
    """Returns the number of which the length of rows must be a multiple, if so many `devices` share a row and their
    parts are divided into so many `pieces` between layers. Devices that share rows have two chunks of each."""
    return (2 * devices if devices > 1 else 1) * pieces


def mesh_for_generation(mesh: Mesh, sizes: Mapping[str, int]) -> Mesh:
    """Returns a mesh of the same devices for generation, which needs whole rows and all layers on each device. The
    devices along the axes that split layers or the length move to an axis that splits weights."""
    gathering, emptied_axes = GATHERING_AXES[0], axes_that_split("layers", "length")
    moved_devices = math.prod(sizes[axis] for axis in emptied_axes)
    inference_sizes = {**sizes, gathering: sizes[gathering] * moved_devices, **dict.fromkeys(emptied_axes, 1)}
    return Mesh(allow_split_hosts=mesh.allow_split_hosts).model_copy(update=inference_sizes)
