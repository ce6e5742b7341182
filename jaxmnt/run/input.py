"""Prepares a run's data on every host, plans its rows, and makes the feed that reads its batches."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jaxmnt.config.schema import Config
from jaxmnt.data.batches import TrainingData, index_keys, training_rows
from jaxmnt.data.feed import Feed, process_rows
from jaxmnt.data.grain_source import GrainData
from jaxmnt.data.index import FOLDER as INDEX_FOLDER
from jaxmnt.data.index_files import how_to_index, missing_indices, write_indices
from jaxmnt.data.sources import Sources, fit_to_data, open_sources, stage
from jaxmnt.data.store import PreparedData
from jaxmnt.distributed.coordination import barrier_or_raise
from jaxmnt.distributed.process_group import host_names
from jaxmnt.errors import PreflightError, UserError, remark
from jaxmnt.run.data_copies import blaming_this_host, check_own_copy, compare_copies
from jaxmnt.run.rundir import run_file_of, unreadable_is_retryable
from jaxmnt.run.values import RunProcess, RunWithData
from jaxmnt.training.compile import Program

_INDEX_TIMEOUT_SECONDS = 60.0
"""Maximum time until a network file system shows an index that another host wrote."""
_POLL_SECONDS = 0.5
_DATA_TIMEOUT_SECONDS = 12 * 3600.0
"""Timeout for all processes to prepare the data. Copying or checking terabytes takes hours. The heartbeat detects dead
hosts earlier."""


def read_data(run: RunProcess) -> RunWithData:
    """Opens the data that the config names. Verifies it, or copies it to this host, if the config says so.

    Raises `ConfigError` for data that is missing, damaged or inconsistent.
    """
    data = _prepare_data(run)
    return RunWithData(
        **vars(run) | {"config": fit_to_data(run.config, data)}, data=data, hosts=host_names(run.identity)
    )


def plan_rows(run: RunWithData, *, write_index: bool) -> TrainingData:
    """Plans the rows of the training data. For that, indexes the documents of Grain datasets.

    With `write_index`, process 0 writes the indices into the run directory, which requires the run's lock. Raises
    `ConfigError` for a dataset that cannot be trained on, and `PreflightError` if the run directory is not shared.
    """
    datasets = [part for part in run.data.parts.values() if isinstance(part, GrainData)]
    if datasets:
        with _fail_together("process 0 has indexed the documents", run):
            if write_index and run.writes:
                for dataset in datasets:
                    dataset.make_index(_progress_callback(run, "indexing"))
        with _fail_together("every process has the index", run):
            for dataset in datasets:
                dataset.load_index(made_elsewhere=write_index and not run.writes)
                if run.config.data.verify:
                    dataset.verify(_progress_callback(run, "checking"))
    return TrainingData(run.config, run.data, None if _may_be_branch(run.config) else ())


def training_feed(data: TrainingData, program: Program, start_step: int) -> Feed:
    """Makes the feed that reads this process's rows of every global batch after step `start_step`."""
    settings = program.spec.config.data
    rows = process_rows(program.batch_sharding, settings.global_batch_size, settings.sequence_length)
    source = training_rows(data, rows, start_step, prefetch=settings.prefetch, threads=settings.read_threads)
    return Feed(source, rows, settings.global_batch_size, program.batch_sharding, digest=settings.log_digest)


def begin_feed(run: RunProcess, data: TrainingData, program: Program, start_step: int) -> Feed:
    """Makes the feed, and tells the watchdog how to see that the main thread waits for it."""
    feed = training_feed(data, program, start_step)
    run.watchdog.is_reading = lambda: feed.is_reading
    return feed


def _may_be_branch(config: Config) -> bool:
    """True if the run may be a branch. Its position in the data is not known until its lineage is read."""
    if config.run.fork_from is not None:
        return True
    with suppress(UserError, OSError):
        run_file = run_file_of(config)
        return run_file is not None and bool(run_file.lineage)
    return True


def _prepare_data(run: RunProcess) -> Sources:
    """Opens the data, checks it on hosts that have a copy of their own, and writes or awaits its indices."""
    settings = run.config.data
    with unreadable_is_retryable(run.config):
        data = open_sources(settings, run.config.run.dir, check_files=run.identity.alone)
    with _fail_together("process 0 has the indices of the data", run):
        if run.identity.process_id == 0:
            _write_indices(run, data, may_fail=settings.stage_dir is not None)
    has_indices = run.identity.process_id == 0 and not _missing_indices(run.config, data)
    first_copy = compare_copies(data, has_indices, run.identity)
    with _fail_together("the data is ready on every host", run):
        if not first_copy.is_own:
            check_own_copy(data, run.identity)
            _write_indices(run, data, may_fail=settings.stage_dir is not None)
        elif first_copy.has_indices:
            _await_indices(run, data)
        if settings.stage_dir is not None:
            folder = Path(settings.stage_dir)
            show_copying = lambda name: run.status.update(f"data    copying {name} to {folder}")
            prepared_parts = {name: part for name, part in data.parts.items() if isinstance(part, PreparedData)}
            data = data.at({name: stage(part, folder, show_copying) for name, part in prepared_parts.items()})
            _write_indices(run, data)
        if settings.verify:
            for part in (*data.parts.values(), *data.eval_sets.values()):
                if not isinstance(part, GrainData):
                    part.verify(_progress_callback(run, "checking"))
    return data


def _write_indices(run: RunProcess, sources: Sources, *, may_fail: bool = False) -> None:
    """Writes the indices that the rows of the config need and that the data does not have yet.

    If that is not possible, a remark says that each process computes their contents in memory. `may_fail` is True if
    they are written to a local copy later; then there is no remark.
    """
    show = lambda text: run.status.update(f"data    {text}")
    for part, keys in index_keys(run.config, sources):
        try:
            written = write_indices(part, keys, show)
        except OSError as error:
            if may_fail:
                continue
            remark(
                f"data.path: the index in {part.path} cannot be written ({error.strerror or error}), so every process "
                f"computes it in its memory at every start; write it with: {how_to_index(part.path, keys)}"
            )
            continue
        for path in written:
            run.status.line(f"data    wrote the index {path}")


def _missing_indices(config: Config, sources: Sources) -> list[str]:
    """Returns the names of the indices that the rows of the config need and that the data does not have."""
    return [
        f"{part.path}/{INDEX_FOLDER}/{key.name}.json"
        for part, keys in index_keys(config, sources)
        for key in missing_indices(part, keys)
    ]


def _await_indices(run: RunProcess, sources: Sources) -> None:
    """Waits until this host sees all indices, which process 0 has seen. Raises `PreflightError` if it never does."""
    deadline = time.monotonic() + _INDEX_TIMEOUT_SECONDS
    while missing := _missing_indices(run.config, sources):
        if time.monotonic() > deadline:
            problem = f"process 0 reads {missing[0]}, but {socket.gethostname()} does not see it"
            error = PreflightError(f"data.path: {problem}; check that both have mounted the same file system")
            raise blaming_this_host(error, run.identity)
        time.sleep(_POLL_SECONDS)


def _progress_callback(run: RunProcess, activity: str) -> Callable[[str], None]:
    """Returns a function that shows on the status line that `activity` is in progress for the data of a name."""
    return lambda name: run.status.update(f"data    {activity} {name}")


@contextmanager
def _fail_together(name: str, run: RunProcess) -> Iterator[None]:
    """Context manager that raises a `UserError` of one process in all processes.

    `name` names the barrier at its end.
    """
    trouble = None
    try:
        with unreadable_is_retryable(run.config):
            yield
    except UserError as error:
        trouble = error
    barrier_or_raise(name, trouble, run.identity, _DATA_TIMEOUT_SECONDS)
