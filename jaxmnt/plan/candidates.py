"""The ways in which a run can be spread over a number of GPUs, and the rule by which some are left out unseen."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxmnt.config.schema import Config
from jaxmnt.plan.networks import Network

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
        return self.data * self.pipeline * self.fsdp * self.model

    @property
    def mesh(self) -> dict[str, int]:
        return {"data": self.data, "pipeline": self.pipeline, "fsdp": self.fsdp, "model": self.model}

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
            **({} if self.precision is None else {"train.precision": self.precision}),
        }

    def applied_to(self, config: Config) -> Config:
        """The config with these settings. What does not divide is found when it is built."""
        for section in ("mesh", "pipeline", "train"):
            own = {
                key.partition(".")[2]: value for key, value in self.settings.items() if key.startswith(f"{section}.")
            }
            config = config.model_copy(update={section: getattr(config, section).model_copy(update=own)})
        return config


def candidates(
    config: Config, gpus: int, network: Network, *, precisions: Sequence[str | None] = (None,), pruned: bool = True
) -> Iterator[Candidate]:
    """All that divide, in a fixed order. `pruned` leaves out what the rule below says cannot be best."""
    for data, pipeline, fsdp, model in _meshes(config, gpus, network):
        rows_of_shard, uneven = divmod(config.data.global_batch_size, data * fsdp)
        if uneven:
            continue
        stages = (3, 2, 1) if fsdp > 1 else (3,)
        several = CHUNKS if pipeline > 1 else (1,)
        for rows, zero, chunks, remat, precision in itertools.product(ROWS, stages, several, REMATS, precisions):
            if not rows_of_shard or rows_of_shard % rows or pipeline * chunks > config.model.num_layers:
                continue
            splits_hosts = model > network.devices_per_host
            found = Candidate(
                data, pipeline, fsdp, model, rows, rows_of_shard // rows, chunks, remat, zero, splits_hosts, precision
            )
            if not (pruned and _is_hopeless(found)):
                yield found


def _meshes(config: Config, gpus: int, network: Network) -> Iterator[tuple[int, int, int, int]]:
    """(data, pipeline, fsdp, model)"""
    for model in _divisors(gpus):
        if model > network.domain or config.model.num_heads % model or config.data.sequence_length % model:
            continue
        for pipeline in _divisors(gpus // model):
            if pipeline > min(config.model.num_layers, _MOST_STAGES):
                continue
            for fsdp in _divisors(gpus // (model * pipeline)):
                if config.model.hidden_size % fsdp == 0:
                    yield gpus // (model * pipeline * fsdp), pipeline, fsdp, model


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
