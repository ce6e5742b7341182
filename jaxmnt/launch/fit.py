"""Whether a global batch divides over the hosts that a job asks for."""

from jaxmnt.config.schema import Config
from jaxmnt.errors import ConfigError


def check_batch(config: Config, devices: int) -> None:
    """Raises `ConfigError`, naming global batch sizes that do fit, if the mesh or the batch does not come out whole.

    The global batch stays whatever the number of devices; the passes that a step takes follow from it.
    """
    sizes = config.mesh.sizes()
    fixed = 1
    for size in sizes.values():
        fixed *= size if size and size > 0 else 1
    rest = [axis for axis, size in sizes.items() if size == -1]
    if devices % fixed or (not rest and devices != fixed):
        raise ConfigError(
            f"mesh: the fixed axes multiply to {fixed}, and the job would have {devices} devices; change an axis, "
            "launch.nodes or launch.gpus_per_node"
        )
    shards = 1
    for axis in ("data", "fsdp"):
        shards *= devices // fixed if axis in rest else sizes[axis] or 1
    unit = shards * (config.train.microbatch_size or 1)
    batch = config.data.global_batch_size
    if batch % unit:
        below, above = batch // unit * unit, (batch // unit + 1) * unit
        fitting = f"{below} or {above}" if below else str(above)
        rows = f" of {config.train.microbatch_size} rows a pass" if config.train.microbatch_size else ""
        raise ConfigError(
            f"data.global_batch_size: {batch} rows do not divide over {shards} batch shards{rows} on {devices} "
            f"devices; {fitting} would, or choose another number of nodes"
        )
