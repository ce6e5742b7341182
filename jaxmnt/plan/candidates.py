"""The ways in which a run can be spread over a number of GPUs, and the rules by which some are left out unseen."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jaxmnt.config.schema import Config, Pipeline
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

    @property
    def mesh(self) -> dict[str, int]:
        return {"data": self.data, "pipeline": self.pipeline, "fsdp": self.fsdp, "model": self.model}

    @property
    def settings(self) -> dict[str, Any]:
        """By dotted keys of the config, as they are written into one."""
        found: dict[str, Any] = {f"mesh.{axis}": size for axis, size in self.mesh.items()}
        found |= {"mesh.zero": self.zero, "train.microbatch_size": self.rows, "train.remat": self.remat}
        if self.pipeline > 1:
            found |= {"pipeline.schedule": "interleaved" if self.chunks > 1 else "1f1b", "pipeline.chunks": self.chunks}
        return found

    def applied_to(self, config: Config) -> Config:
        """The config with this mesh. What does not divide is found when it is built."""
        mesh = config.mesh.model_copy(update=self.mesh | {"zero": self.zero, "prefetch": None})
        pipeline = Pipeline()
        if self.pipeline > 1:
            pipeline = Pipeline(schedule="interleaved" if self.chunks > 1 else "1f1b", chunks=self.chunks)
        train = config.train.model_copy(
            update={"microbatch_size": self.rows, "remat": self.remat, "remat_save": [], "remat_offload": []}
        )
        return config.model_copy(update={"mesh": mesh, "pipeline": pipeline, "train": train})


def candidates(config: Config, gpus: int, network: Network, *, pruned: bool = True) -> Iterator[Candidate]:
    """All that divide, in a fixed order. `pruned` leaves out what the rules below say cannot be best."""
    layers = config.model.num_layers
    for model in _divisors(gpus):
        if model > network.domain or config.model.num_heads % model or config.data.sequence_length % model:
            continue
        for pipeline in _divisors(gpus // model):
            if pipeline > min(layers, _MOST_STAGES):
                continue
            for fsdp in _divisors(gpus // (model * pipeline)):
                if config.model.hidden_size % fsdp:
                    continue
                yield from _with_batch(config, gpus // (model * pipeline * fsdp), pipeline, fsdp, model, pruned)


def _with_batch(config: Config, data: int, pipeline: int, fsdp: int, model: int, pruned: bool) -> Iterator[Candidate]:
    rows_of_shard, uneven = divmod(config.data.global_batch_size, data * fsdp)
    if uneven or not rows_of_shard:
        return
    for rows in ROWS:
        if rows_of_shard % rows:
            continue
        microbatches = rows_of_shard // rows
        for zero in (3, 2, 1) if fsdp > 1 else (3,):
            for chunks in CHUNKS if pipeline > 1 else (1,):
                if pipeline * chunks > config.model.num_layers:
                    continue
                for remat in REMATS:
                    found = Candidate(data, pipeline, fsdp, model, rows, microbatches, chunks, remat, zero)
                    if not (pruned and _is_hopeless(found)):
                        yield found


def _is_hopeless(one: Candidate) -> bool:
    """Whether another candidate is better for sure: the rules of the search.

    1. A pipeline with fewer microbatches than half of its stages is idle for most of the time.
    2. Without a pipeline and with one microbatch, ZeRO 1 and 2 gather once a step, as 3 does, and hide none of it.
    3. Interleaving needs microbatches that fill rounds of all stages.
    """
    if one.pipeline > 1 and 2 * one.microbatches < one.pipeline:
        return True
    if one.zero < 3 and one.pipeline == 1 and one.microbatches == 1:
        return True
    return one.chunks > 1 and one.microbatches % one.pipeline != 0


def _divisors(number: int) -> list[int]:
    """In rising order."""
    return [size for size in range(1, number + 1) if number % size == 0]


def numbers_of_gpus(per_host: int, most: int) -> Iterator[int]:
    """Whole hosts, in steps of a quarter or less, up to `most`."""
    hosts = 1
    while hosts * per_host <= most:
        yield hosts * per_host
        hosts += max(1, 2 ** (hosts.bit_length() - 3))
