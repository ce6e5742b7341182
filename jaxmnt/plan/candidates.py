"""Enumerates the ways to spread a run over a number of GPUs, and the rule that prunes some without an estimate."""

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
    """A mesh and the settings that depend on it; everything else comes from the config."""

    data: int
    pipeline: int
    fsdp: int
    model: int
    rows: int
    """Rows of a microbatch on one batch shard."""
    microbatches: int
    chunks: int
    remat: str
    zero: int
    splits_hosts: bool = False
    """True if `model` spans several hosts of a rack whose GPUs are all connected by NVLink."""
    precision: str | None = None
    """Precision to set; None keeps the config's."""

    @property
    def gpus(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def mesh(self) -> dict[str, int]:
        return {axis.name: getattr(self, axis.name) for axis in AVAILABLE_AXES}

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
        """Returns the config with these settings. Sizes that do not divide are reported when the spec is built."""
        return config.changed(self.settings)


def precision_setting(precision: str | None) -> dict[str, Any]:
    """Returns the precision setting by its key; empty for the config's own precision."""
    return {} if precision is None else {"train.precision": precision}


def candidates(
    config: Config, gpus: int, network: Network, *, precisions: Sequence[str | None] = (None,), pruned: bool = True
) -> Iterator[Candidate]:
    """Yields all candidates whose sizes divide, in a fixed order. `pruned` drops those that `_is_hopeless` rules
    out."""
    for mesh in _meshes(config, gpus, network):
        rows_of_shard, uneven = divmod(config.data.global_batch_size, math.prod(mesh[axis] for axis in BATCH_AXES))
        if uneven:
            continue
        zeros = (3, 2, 1) if any(mesh[axis] > 1 for axis in GATHERING_AXES) else (3,)
        stages = mesh[STAGE_AXIS]
        chunk_counts = CHUNKS if stages > 1 else (1,)
        for rows, zero, chunks, remat, precision in itertools.product(ROWS, zeros, chunk_counts, REMATS, precisions):
            if not rows_of_shard or rows_of_shard % rows or stages * chunks > config.model.num_layers:
                continue
            splits_hosts = any(
                axis.inside_host and mesh[axis.name] > network.devices_per_host for axis in AVAILABLE_AXES
            )
            candidate = Candidate(
                **mesh, rows=rows, microbatches=rows_of_shard // rows, chunks=chunks, remat=remat, zero=zero,
                splits_hosts=splits_hosts, precision=precision,
            )  # fmt: skip
            if not (pruned and _is_hopeless(candidate)):
                yield candidate


def _meshes(config: Config, gpus: int, network: Network) -> Iterator[dict[str, int]]:
    """Yields meshes as sizes by axis. Axes inside a host are split first; replicas take the remaining GPUs."""
    inner_first = lambda axis: (not axis.inside_host, axis.gathers_weights)
    searched = sorted((axis for axis in AVAILABLE_AXES if axis.name not in REPLICA_AXES), key=inner_first)
    yield from _splits(config, network, searched, gpus, {})


def _splits(
    config: Config, network: Network, axes: Sequence[Axis], remaining: int, sizes: dict[str, int]
) -> Iterator[dict[str, int]]:
    """Yields `sizes` extended by every allowed size of each of `axes` that divides the `remaining` GPUs."""
    if not axes:
        yield {REPLICA_AXES[0]: remaining} | sizes
        return
    for size in _divisors(remaining):
        if _can_split(config, network, axes[0], size):
            yield from _splits(config, network, axes[1:], remaining // size, sizes | {axes[0].name: size})


def _can_split(config: Config, network: Network, axis: Axis, size: int) -> bool:
    """Returns True if the dimensions that an axis splits divide into `size` parts."""
    model = config.model
    if axis.inside_host and size > network.domain:
        return False
    if axis.gathers_weights and model.hidden_size % size:
        return False
    if "features" in axis.splits and (model.num_heads % size or config.data.sequence_length % size):
        return False
    return "layers" not in axis.splits or size <= min(model.num_layers, _MOST_STAGES)


def _is_hopeless(candidate: Candidate) -> bool:
    """Returns True for a pipeline with fewer microbatches than half of its stages. It is idle most of the time, so
    another schedule of the same stages, or fewer stages, is better."""
    return candidate.pipeline > 1 and 2 * candidate.microbatches < candidate.pipeline


def _divisors(number: int) -> list[int]:
    """Returns the divisors of a number in ascending order."""
    return [size for size in range(1, number + 1) if number % size == 0]


def gpu_counts(per_host: int, most: int) -> Iterator[int]:
    """Yields numbers of GPUs that fill whole hosts, in steps of a quarter or less, up to `most`."""
    hosts = 1
    while hosts * per_host <= most:
        yield hosts * per_host
        hosts += max(1, 2 ** (hosts.bit_length() - 3))
