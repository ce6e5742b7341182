"""The ways in which a run can be spread over a number of GPUs, and the rule by which some are left out unseen."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxmnt.config.mesh import AVAILABLE_AXES, BATCH_AXES, GATHERING_AXES, REPLICA_AXES, STAGE_AXIS, Axis
from jaxmnt.config.schema import Config
from jaxmnt.plan.chips import Network

REMATS = ("none", "dots", "full")
ROWS = (1, 2, 4, 8, 16, 32)
CHUNKS = (1, 2, 4)
_MOST_STAGES = 64


@dataclass(frozen=True)
class Candidate:
    """A mesh and what goes with it; everything else is the config's."""

    data: int
    pipeline: int
    fsdp: int
    model: int
    rows: int
    """Of a microbatch on a batch shard."""
    microbatches: int
    chunks: int
    remat: str
    zero: int
    splits_hosts: bool = False
    """Whether `model` is split over several hosts of a rack whose GPUs all reach each other by NVLink."""
    precision: str | None = None
    """None: the config's."""

    @property
    def gpus(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def mesh(self) -> dict[str, int]:
        return {axis.name: getattr(self, axis.name) for axis in AVAILABLE_AXES}

    @property
    def settings(self) -> dict[str, Any]:
        """By dotted keys of the config. What the mesh does not have is set back to its default."""
        several = self.pipeline > 1
        return {
            **{f"mesh.{axis}": size for axis, size in self.mesh.items()},
            "mesh.zero": self.zero,
            "mesh.prefetch": None,
            "mesh.allow_split_hosts": self.splits_hosts,
            "pipeline.schedule": "interleaved" if self.chunks > 1 else "1f1b",
            "pipeline.chunks": self.chunks if several else 1,
            "pipeline.layers": None,
            "train.microbatch_size": self.rows,
            "train.remat": self.remat,
            "train.remat_save": [],
            "train.remat_offload": [],
            **precision_setting(self.precision),
        }

    def applied_to(self, config: Config) -> Config:
        """The config with these settings. What does not divide is found when it is built."""
        return config.changed(self.settings)


def precision_setting(precision: str | None) -> dict[str, Any]:
    """Returns the setting by its key; none for the config's own precision."""
    return {} if precision is None else {"train.precision": precision}


def candidates(
    config: Config, gpus: int, network: Network, *, precisions: Sequence[str | None] = (None,), pruned: bool = True
) -> Iterator[Candidate]:
    """All that divide, in a fixed order. `pruned` leaves out what the rule below says cannot be best."""
    for mesh in _meshes(config, gpus, network):
        rows_of_shard, uneven = divmod(config.data.global_batch_size, math.prod(mesh[axis] for axis in BATCH_AXES))
        if uneven:
            continue
        zeros = (3, 2, 1) if any(mesh[axis] > 1 for axis in GATHERING_AXES) else (3,)
        stages = mesh[STAGE_AXIS]
        several = CHUNKS if stages > 1 else (1,)
        for rows, zero, chunks, remat, precision in itertools.product(ROWS, zeros, several, REMATS, precisions):
            if not rows_of_shard or rows_of_shard % rows or stages * chunks > config.model.num_layers:
                continue
            splits_hosts = any(
                axis.inside_host and mesh[axis.name] > network.devices_per_host for axis in AVAILABLE_AXES
            )
            found = Candidate(
                **mesh, rows=rows, microbatches=rows_of_shard // rows, chunks=chunks, remat=remat, zero=zero,
                splits_hosts=splits_hosts, precision=precision,
            )  # fmt: skip
            if not (pruned and _is_hopeless(found)):
                yield found


def _meshes(config: Config, gpus: int, network: Network) -> Iterator[dict[str, int]]:
    """Sizes by axis. The axes inside a host come first, and replicas are what is left."""
    by_kind = lambda axis: (not axis.inside_host, axis.gathers_weights)
    searched = sorted((axis for axis in AVAILABLE_AXES if axis.name not in REPLICA_AXES), key=by_kind)
    yield from _splits(config, network, searched, gpus, {})


def _splits(
    config: Config, network: Network, axes: Sequence[Axis], left: int, sizes: dict[str, int]
) -> Iterator[dict[str, int]]:
    """`sizes` with every size of each of `axes` that divides `left` and fits."""
    if not axes:
        yield {REPLICA_AXES[0]: left} | sizes
        return
    for size in _divisors(left):
        if _may_split(config, network, axes[0], size):
            yield from _splits(config, network, axes[1:], left // size, sizes | {axes[0].name: size})


def _may_split(config: Config, network: Network, axis: Axis, size: int) -> bool:
    """Whether what an axis splits divides into so many parts."""
    model = config.model
    if axis.inside_host and size > network.domain:
        return False
    if axis.gathers_weights and model.hidden_size % size:
        return False
    if "features" in axis.splits and (model.num_heads % size or config.data.sequence_length % size):
        return False
    return "layers" not in axis.splits or size <= min(model.num_layers, _MOST_STAGES)


def _is_hopeless(one: Candidate) -> bool:
    """The rule of the search: a pipeline with fewer microbatches than half of its stages is idle for most of the time,
    and another schedule of the same stages, or fewer stages, is better."""
    return one.pipeline > 1 and 2 * one.microbatches < one.pipeline


def _divisors(number: int) -> list[int]:
    """In rising order."""
    return [size for size in range(1, number + 1) if number % size == 0]


def numbers_of_gpus(per_host: int, most: int) -> Iterator[int]:
    """Whole hosts, in steps of a quarter or less, up to `most`."""
    hosts = 1
    while hosts * per_host <= most:
        yield hosts * per_host
        hosts += max(1, 2 ** (hosts.bit_length() - 3))
