"""What a run reads: its data made ready on every host, the rows planned, and the feed of its batches."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jaxmnt.config.schema import Config
from jaxmnt.data.batches import TrainingData, training_rows
from jaxmnt.data.feed import Feed, process_rows
from jaxmnt.data.grain_source import GrainData
from jaxmnt.data.sources import Sources, fit_to_data, open_sources, stage
from jaxmnt.data.store import PreparedData
from jaxmnt.distributed.coordination import barrier_or_raise
from jaxmnt.distributed.process_group import host_names
from jaxmnt.errors import UserError
from jaxmnt.run.rundir import known_run, unreadable_is_retryable
from jaxmnt.run.values import RunProcess, RunWithData
from jaxmnt.training.compile import Program

_READY_SECONDS = 12 * 3600.0
"""Copying or checking terabytes takes hours; the heartbeat finds a host that dies meanwhile."""


def read_data(run: RunProcess) -> RunWithData:
    """Opens the data that the config names, checked and copied to this host where the config asks for it.

    Raises `ConfigError` for data that is missing, damaged or does not fit together.
    """
    data = _ready_data(run)
    return RunWithData(
        **vars(run) | {"config": fit_to_data(run.config, data)}, data=data, hosts=host_names(run.identity)
    )


def plan_rows(run: RunWithData, *, keeps: bool) -> TrainingData:
    """Plans which rows there are. Documents of datasets are indexed for that. With `keeps`, which takes the run's lock,
    process 0 writes the indices into the run directory.

    Raises `ConfigError` for a dataset that cannot be trained on, and `PreflightError` if the run directory is not
    shared.
    """
    datasets = [part for part in run.data.parts.values() if isinstance(part, GrainData)]
    if datasets:
        with _all_together("process 0 has indexed the documents", run):
            for dataset in datasets if keeps and run.writes else []:
                dataset.make_index(_showing(run, "indexing"))
        with _all_together("every process has the index", run):
            for dataset in datasets:
                dataset.load_index(made_elsewhere=keeps and not run.writes)
                if run.config.data.verify:
                    dataset.verify(_showing(run, "checking"))
    return TrainingData(run.config, run.data, None if _may_be_branch(run.config) else ())


def training_feed(data: TrainingData, program: Program, start_step: int) -> Feed:
    """Makes the feed of this process's rows of every global batch from `start_step` on."""
    settings = program.spec.config.data
    rows = process_rows(program.batch_sharding, settings.global_batch_size, settings.sequence_length)
    source = training_rows(data, rows, start_step, prefetch=settings.prefetch, threads=settings.read_threads)
    return Feed(source, rows, settings.global_batch_size, program.batch_sharding, digest=settings.log_digest)


def begin_feed(run: RunProcess, data: TrainingData, program: Program, start_step: int) -> Feed:
    """A feed of which the watchdog knows when it is waited for."""
    feed = training_feed(data, program, start_step)
    run.watchdog.reads = lambda: feed.reading
    return feed


def _may_be_branch(config: Config) -> bool:
    """Whether only the run's directory tells, in all processes, where in the data the run goes on."""
    if config.run.fork_from is not None:
        return True
    with suppress(UserError, OSError):
        known = known_run(config)
        return known is not None and bool(known.lineage)
    return True


def _ready_data(run: RunProcess) -> Sources:
    settings = run.config.data
    with unreadable_is_retryable(run.config):
        data = open_sources(settings, run.config.run.dir)
    if not settings.verify and settings.stage_dir is None:
        return data
    with _all_together("the data is ready on every host", run):
        if settings.stage_dir is not None:
            folder = Path(settings.stage_dir)
            show = lambda name: run.status.update(f"data    copying {name} to {folder}")
            prepared = {name: part for name, part in data.parts.items() if isinstance(part, PreparedData)}
            data = data.at({name: stage(part, folder, show) for name, part in prepared.items()})
        for part in (*data.parts.values(), *data.eval_sets.values()) if settings.verify else []:
            if not isinstance(part, GrainData):
                part.verify(_showing(run, "checking"))
    return data


def _showing(run: RunProcess, doing: str) -> Callable[[str], None]:
    return lambda name: run.status.update(f"data    {doing} {name}")


@contextmanager
def _all_together(name: str, run: RunProcess) -> Iterator[None]:
    """What goes wrong inside in one process, goes wrong in all."""
    trouble = None
    try:
        with unreadable_is_retryable(run.config):
            yield
    except UserError as error:
        trouble = error
    barrier_or_raise(name, trouble, run.identity, _READY_SECONDS)
