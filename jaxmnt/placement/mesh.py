"""The named device mesh."""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType

from jaxmnt.config.schema import AXES, Mesh
from jaxmnt.errors import ConfigError


def resolve_sizes(mesh: Mesh, device_count: int) -> dict[str, int]:
    """Axis sizes with -1 replaced by what is left of `device_count`.

    Raises `ConfigError` when the sizes do not multiply to the device count.
    """
    sizes = mesh.sizes()
    fixed = math.prod(size for size in sizes.values() if size != -1)
    shape = ", ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1) or "all axes 1"
    rest = next((axis for axis, size in sizes.items() if size == -1), None)
    if rest is None and fixed != device_count:
        raise ConfigError(
            f"mesh: {shape} needs {fixed} devices, and there are {device_count}; "
            "change a size, or set one axis to -1 for the rest"
        )
    if device_count % fixed:
        raise ConfigError(
            f"mesh: {shape} does not divide {device_count} devices; the fixed axes multiply to {fixed}, "
            f"choose sizes whose product divides {device_count}"
        )
    if rest is not None:
        sizes[rest] = device_count // fixed
    return sizes


def build_mesh(mesh: Mesh, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """A mesh with all six axes over `devices` (default: all), in order of process, then device id.

    The last axes vary fastest, so `model` neighbours share a process and `data` spans processes.
    Axis types are Auto.
    """
    chosen = sorted(devices or jax.devices(), key=lambda device: (device.process_index, device.id))
    sizes = resolve_sizes(mesh, len(chosen))
    grid = np.array(chosen, dtype=object).reshape([sizes[axis] for axis in AXES])
    return jax.sharding.Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))
