"""The named device mesh."""

import math
from collections.abc import Callable, Sequence

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


Hosts = Callable[[jax.Device], str]
"""The name of the machine that a device is in."""


def host_of_process(device: jax.Device) -> str:
    """Takes each process for a machine of its own."""
    return str(device.process_index)


def build_mesh(
    mesh: Mesh, devices: Sequence[jax.Device] | None = None, hosts: Hosts | None = None
) -> jax.sharding.Mesh:
    """A mesh with all six axes over `devices` (default: all), in order of slice, host, process and device id.

    The last axes vary fastest, so `model` neighbours share a machine and `data` and `pipeline` span machines.
    Axis types are Auto. Raises `ConfigError` if `model` or `context` would span machines.
    """
    chosen = list(devices or jax.devices())
    host = hosts or (host_of_process if len({device.process_index for device in chosen}) > 1 else lambda _: "")
    place = lambda device: (device.process_index, device.id)
    first: dict[str, tuple[int, int]] = {}
    for device in sorted(chosen, key=place):
        first.setdefault(host(device), place(device))
    chosen.sort(key=lambda device: (getattr(device, "slice_index", None) or 0, first[host(device)], place(device)))
    sizes = resolve_sizes(mesh, len(chosen))
    grid = np.array(chosen, dtype=object).reshape([sizes[axis] for axis in AXES])
    for axis in ("context", "model"):
        if sizes[axis] > 1 and not mesh.allow_split_hosts:
            _check_inside_hosts(grid, axis, sizes[axis], host)
    return jax.sharding.Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _check_inside_hosts(grid: np.ndarray, axis: str, size: int, host: Hosts) -> None:
    for group in np.moveaxis(grid, AXES.index(axis), -1).reshape(-1, size):
        spanned = sorted({host(device) for device in group})
        if len(spanned) > 1:
            raise ConfigError(
                f"mesh.{axis}: {size} devices would span the hosts {', '.join(spanned[:4])}, over the slow network; "
                f"lower it to the devices of a host, or set mesh.allow_split_hosts: true"
            )
