"""Prepares a run's data on every host, plans its rows, and makes the feed of its batches."""

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
from jaxmnt.run.rundir import run_file_of, unreadable_is_retryable
from jaxmnt.run.values import RunProcess, RunWithData
from jaxmnt.training.compile import Program

_READY_SECONDS = 12 * 3600.0
"""Timeout for the data to be ready. Copying or checking terabytes takes hours; the heartbeat detects dead hosts."""


def read_data(run: RunProcess) -> RunWithData:
    """Opens the data that the config names, and verifies it or copies it to this host if the config says so.

    Raises `ConfigError` for data that is missing, damaged or inconsistent.
    """
    data = _prepare_data(run)
    return RunWithData(
        **vars(run) | {"config": fit_to_data(run.config, data)}, data=data, hosts=host_names(run.identity)
    )


def plan_rows(run: RunWithData, *, write_index: bool) -> TrainingData:
    """Plans the rows of the training data, and indexes the documents of Grain datasets for that.

    With `write_index`, which requires the run's lock, process 0 writes the indices into the run directory. Raises
    `ConfigError` for a dataset that cannot be trained on, and `PreflightError` if the run directory is not shared.
    """
    datasets = [part for part in run.data.parts.values() if isinstance(part, GrainData)]
    if datasets:
        with _fail_together("process 0 has indexed the documents", run):
            for dataset in datasets if write_index and run.writes else []:
                dataset.make_index(_show_progress(run, "indexing"))
        with _fail_together("every process has the index", run):
            for dataset in datasets:
                dataset.load_index(made_elsewhere=write_index and not run.writes)
                if run.config.data.verify:
                    dataset.verify(_show_progress(run, "checking"))
    return TrainingData(run.config, run.data, None if _may_be_branch(run.config) else ())


def training_feed(data: TrainingData, program: Program, start_step: int) -> Feed:
    """Makes the feed of this process's rows of every global batch from `start_step` on."""
    settings = program.spec.config.data
    rows = process_rows(program.batch_sharding, settings.global_batch_size, settings.sequence_length)
    source = training_rows(data, rows, start_step, prefetch=settings.prefetch, threads=settings.read_threads)
    return Feed(source, rows, settings.global_batch_size, program.batch_sharding, digest=settings.log_digest)


def begin_feed(run: RunProcess, data: TrainingData, program: Program, start_step: int) -> Feed:
    """Makes the feed, and lets the watchdog see when the main thread waits for it."""
    feed = training_feed(data, program, start_step)
    run.watchdog.reads = lambda: feed.reading
    return feed


def _may_be_branch(config: Config) -> bool:
    """True if the run may be a branch, whose position in the data is only known once its lineage is."""
    if config.run.fork_from is not None:
        return True
    with suppress(UserError, OSError):
        run_file = run_file_of(config)
        return run_file is not None and bool(run_file.lineage)
    return True


def _prepare_data(run: RunProcess) -> Sources:
    settings = run.config.data
    with unreadable_is_retryable(run.config):
        data = open_sources(settings, run.config.run.dir)
    if not settings.verify and settings.stage_dir is None:
        return data
    with _fail_together("the data is ready on every host", run):
        if settings.stage_dir is not None:
            folder = Path(settings.stage_dir)
            show = lambda name: run.status.update(f"data    copying {name} to {folder}")
            prepared = {name: part for name, part in data.parts.items() if isinstance(part, PreparedData)}
            data = data.at({name: stage(part, folder, show) for name, part in prepared.items()})
        for part in (*data.parts.values(), *data.eval_sets.values()) if settings.verify else []:
            if not isinstance(part, GrainData):
                part.verify(_show_progress(run, "checking"))
    return data


def _show_progress(run: RunProcess, doing: str) -> Callable[[str], None]:
    return lambda name: run.status.update(f"data    {doing} {name}")


@contextmanager
def _fail_together(name: str, run: RunProcess) -> Iterator[None]:
    """Raises an error that one process has in this context in all processes."""
    trouble = None
    try:
        with unreadable_is_retryable(run.config):
            yield
    except UserError as error:
        trouble = error
    barrier_or_raise(name, trouble, run.identity, _READY_SECONDS)
