"""Enumerates the ways to spread a run over a number of GPUs, and prunes those that need no estimate to be ruled out."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxmnt.config.mesh import (
    BATCH_AXES,
    GATHERING_AXES,
    MESH_AXES,
    REPLICA_AXES,
    STAGE_AXIS,
    Axis,
    axes_that_split,
)
from jaxmnt.config.schema import Config
from jaxmnt.parallel.axes import length_divisor
from jaxmnt.plan.chips import Network

REMATS = ("none", "dots", "full")
ROW_COUNTS = (1, 2, 4, 8, 16, 32)
CHUNKS = (1, 2, 4)
_MAX_STAGES = 64


@dataclass(frozen=True)
class Candidate:
    """A mesh and the settings that depend on it. All other settings come from the config."""

    data: int
    pipeline: int
    fsdp: int
    model: int
    rows: int
    """Rows of a microbatch on one batch shard."""
    microbatches: int
    chunks: int
    """Chunks of the model per stage."""
    remat: str
    zero: int
    splits_hosts: bool = False
    """True if the axes `context`, `expert` and `model` span several hosts of a rack whose GPUs are all connected by
    NVLink."""
    context: int = 1
    expert: int = 1
    precision: str | None = None
    """Precision to set; None to keep that of the config."""

    @property
    def gpus(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def mesh(self) -> dict[str, int]:
        return {axis.name: getattr(self, axis.name) for axis in MESH_AXES}

    @property
    def settings(self) -> dict[str, Any]:
        """Settings by dotted config key. Settings that the mesh does not use are reset to their defaults."""
        has_stages = self.pipeline > 1
        return {
            **{f"mesh.{axis}": size for axis, size in self.mesh.items()},
            "mesh.zero": self.zero,
            "mesh.prefetch": None,
            "mesh.allow_split_hosts": self.splits_hosts,
            "pipeline.schedule": "interleaved" if self.chunks > 1 else "1f1b",
            "pipeline.chunks": self.chunks if has_stages else 1,
            "pipeline.layers": None,
            "train.microbatch_size": self.rows,
            "train.remat": self.remat,
            "train.remat_save": [],
            "train.remat_offload": [],
            **precision_setting(self.precision),
        }

    def applied_to(self, config: Config) -> Config:
        """Returns the config with these settings. Building its spec reports sizes that cannot be split evenly."""
        return config.changed(self.settings)


def precision_setting(precision: str | None) -> dict[str, Any]:
    """Returns the setting of `train.precision`, by its key; empty if `precision` is None."""
    return {} if precision is None else {"train.precision": precision}


def candidates(
    config: Config, gpus: int, network: Network, *, precisions: Sequence[str | None] = (None,), pruned: bool = True
) -> Iterator[Candidate]:
    """Yields all candidates whose sizes can be split evenly, in a fixed order. `pruned` leaves out those that
    `_is_mostly_idle` rules out."""
    for mesh in _all_meshes(config, gpus, network):
        rows_of_shard, remainder = divmod(config.data.global_batch_size, math.prod(mesh[axis] for axis in BATCH_AXES))
        if remainder:
            continue
        zero_stages = (3, 2, 1) if any(mesh[axis] > 1 for axis in GATHERING_AXES) else (3,)
        stages = mesh[STAGE_AXIS]
        chunk_counts = CHUNKS if stages > 1 else (1,)
        for rows, zero, chunks, remat, precision in itertools.product(
            ROW_COUNTS, zero_stages, chunk_counts, REMATS, precisions
        ):
            if not rows_of_shard or rows_of_shard % rows or stages * chunks > config.model.num_layers:
                continue
            splits_hosts = _extent_inside_host(mesh) > network.devices_per_host
            candidate = Candidate(
                **mesh, rows=rows, microbatches=rows_of_shard // rows, chunks=chunks, remat=remat, zero=zero,
                splits_hosts=splits_hosts, precision=precision,
            )  # fmt: skip
            if not (pruned and _is_mostly_idle(candidate)):
                yield candidate


def _all_meshes(config: Config, gpus: int, network: Network) -> Iterator[dict[str, int]]:
    """Yields meshes as sizes by axis. Axes inside a host come first, and replicas take the remaining GPUs."""
    order = lambda axis: (not axis.inside_host, axis.gathers_weights)
    split_axes = sorted((axis for axis in MESH_AXES if axis.name not in REPLICA_AXES), key=order)
    yield from _extend_mesh(config, network, split_axes, gpus, {})


def _extend_mesh(
    config: Config, network: Network, axes: Sequence[Axis], remaining: int, sizes: dict[str, int]
) -> Iterator[dict[str, int]]:
    """Yields `sizes` with sizes for `axes` added, in every allowed way to split the `remaining` GPUs."""
    if not axes:
        yield {REPLICA_AXES[0]: remaining} | sizes
        return
    for size in _divisors(remaining):
        if _can_split(config, network, axes[0], size, sizes):
            yield from _extend_mesh(config, network, axes[1:], remaining // size, sizes | {axes[0].name: size})


def _extent_inside_host(sizes: dict[str, int]) -> int:
    """Returns the number of devices in a group along all axes that should stay inside a host."""
    return math.prod(sizes.get(axis.name, 1) for axis in MESH_AXES if axis.inside_host)


def _can_split(config: Config, network: Network, axis: Axis, size: int, sizes: dict[str, int]) -> bool:
    """Returns True if the dimensions that an axis splits can be split evenly into `size` parts, on a mesh that has the
    `sizes` of other axes."""
    model = config.model
    if axis.inside_host and size * _extent_inside_host(sizes) > network.domain:
        return False
    if "experts" in axis.splits and (size > 1 if model.num_experts is None else model.num_experts % size):
        return False
    if axis.gathers_weights and model.hidden_size % size:
        return False
    if {"length", "features"} & {*axis.splits} and not _can_split_length(config, sizes | {axis.name: size}):
        return False
    if "features" in axis.splits and model.num_heads % size:
        return False
    return "layers" not in axis.splits or size <= min(model.num_layers, _MAX_STAGES)


_MIN_PART_OF_ROW = 4096
"""Minimum number of tokens of a row on each of the devices that share it. Shorter rows are not worth dividing."""


def _can_split_length(config: Config, sizes: dict[str, int]) -> bool:
    """Returns True if rows can be divided, and are long enough for it, on a mesh with these sizes."""
    length = config.data.sequence_length
    parts, pieces = (
        math.prod(sizes.get(axis, 1) for axis in axes_that_split(dimension)) for dimension in ("length", "features")
    )
    is_long_enough = parts == 1 or length >= parts * _MIN_PART_OF_ROW
    return length % length_divisor(parts, pieces) == 0 and is_long_enough


def _is_mostly_idle(candidate: Candidate) -> bool:
    """Returns True for a pipeline that has fewer microbatches than half of its stages. Such a pipeline is idle most of
    the time, so another schedule of the same stages, or fewer stages, is better."""
    return candidate.pipeline > 1 and 2 * candidate.microbatches < candidate.pipeline


def _divisors(number: int) -> list[int]:
    """Returns the divisors of a number in ascending order."""
    return [size for size in range(1, number + 1) if number % size == 0]


def gpu_counts(per_host: int, max_gpus: int) -> Iterator[int]:
    """Yields increasing numbers of GPUs that fill their hosts, up to `max_gpus`. From four hosts on, each number is at
    most a quarter larger than the previous one."""
    hosts = 1
    while hosts * per_host <= max_gpus:
        yield hosts * per_host
        hosts += max(1, 2 ** (hosts.bit_length() - 3))
