"""What a run reads: the vocabulary that data and model must share, and the feed of training batches."""

from pathlib import Path

from jaxmnt.config.schema import Config
from jaxmnt.data.batches import TrainingData, training_rows
from jaxmnt.data.feed import Feed, process_rows
from jaxmnt.data.sources import Sources, open_sources, stage
from jaxmnt.data.store import PreparedData
from jaxmnt.distributed.coordination import barrier_or_raise
from jaxmnt.distributed.identity import Identity
from jaxmnt.errors import UserError
from jaxmnt.run.changes import nothing_wrong_with_the_config
from jaxmnt.telemetry.progress import StatusLine
from jaxmnt.training.compile import Program

_READY_SECONDS = 12 * 3600.0
"""Copying or checking terabytes takes hours; JAX's heartbeats find a host that dies meanwhile."""


def ready_data(config: Config, identity: Identity, status: StatusLine) -> Sources:
    """The data that the config names, checked and copied to this host where the config asks for it.

    Raises `ConfigError` for data that is missing, damaged or does not fit together.
    """
    settings = config.data
    with nothing_wrong_with_the_config(config):
        data = open_sources(config.data)
    if not settings.verify and settings.stage_dir is None:
        return data
    trouble = None
    try:
        with nothing_wrong_with_the_config(config):
            if settings.stage_dir is not None:
                data = _staged(data, Path(settings.stage_dir), status)
            if settings.verify:
                for part in data.parts.values():
                    part.verify(progress=lambda name: status.update(f"data    checking {name}"))
    except UserError as error:
        trouble = error
    barrier_or_raise("the data is ready on every host", trouble, identity, _READY_SECONDS)
    return data


def _staged(data: Sources, directory: Path, status: StatusLine) -> Sources:
    show = lambda name: status.update(f"data    copying {name} to {directory}")
    prepared = {name: part for name, part in data.parts.items() if isinstance(part, PreparedData)}
    return data.at({name: stage(part, directory, show) for name, part in prepared.items()})


def training_feed(config: Config, data: TrainingData, program: Program, start_step: int) -> Feed:
    """The feed of this process's rows of every global batch from `start_step` on."""
    settings = config.data
    rows = process_rows(program.batch_sharding, settings.global_batch_size, settings.sequence_length)
    source = training_rows(data, rows, start_step, prefetch=settings.prefetch, threads=settings.read_threads)
    return Feed(source, rows, settings.global_batch_size, program.batch_sharding, digest=settings.log_digest)
