"""Carries out a training run in one process, from start to end."""

from collections.abc import Callable

from jaxmnt.data.grain_source import GrainData
from jaxmnt.distributed.process_group import reporting_failures
from jaxmnt.errors import ExitCode
from jaxmnt.run import report
from jaxmnt.run.branch import branch_points
from jaxmnt.run.changes import inherit_choices, refuse_other_data
from jaxmnt.run.compiling import compile_run
from jaxmnt.run.input import plan_rows, read_data
from jaxmnt.run.lock import RunLock
from jaxmnt.run.loop import train_steps
from jaxmnt.run.resume import ResumeFlags, resume_point
from jaxmnt.run.rundir import run_directories, unreadable_is_retryable
from jaxmnt.run.running import start_running
from jaxmnt.run.spending import check_price
from jaxmnt.run.starting_state import restore_run
from jaxmnt.run.values import OpenedRun, RunProcess
from jaxmnt.telemetry.notify import Notifier
from jaxmnt.telemetry.sinks import resolve_sinks
from jaxmnt.training.build import build_spec


def train_in(process: RunProcess, flags: ResumeFlags, before_events: Callable[[], None] = lambda: None) -> ExitCode:
    """Trains in this process of a run. Calls `before_events` just before the run opens its event log."""
    with reporting_failures(process.heartbeat), unreadable_is_retryable(process.config):
        run = open_run(process, flags)
        if run.finished:
            return ExitCode.FINISHED
        return train_steps(start_running(restore_run(compile_run(run, before_events))))


def open_run(process: RunProcess, flags: ResumeFlags) -> OpenedRun:
    """Opens a run: reads its data, takes its locks, and finds the point to resume from.

    The config is also checked if the run is finished and there is nothing more to do.
    """
    notifier = Notifier(process.config.run.notify, process.identity.process_id, str(process.directory.absolute()))
    check_price(process.config)
    resolve_sinks(process.config.telemetry.sinks)  # raises an error for unknown sinks
    locks = []
    for directory in run_directories(process.config):
        lock = process.resources.enter_context(RunLock(directory))
        process.resources.enter_context(process.heartbeat.exit_handler.with_hook(lock.release))
        locks.append(lock)
    process.clock.watch_compile_cache()
    run = read_data(process)
    # Indexing reads all documents of a dataset, which takes long, so do it once the run has its locks and may start.
    must_index = any(isinstance(part, GrainData) and not part.holds_rows for part in run.data.parts.values())
    if not must_index:
        training_data = plan_rows(run, write_index=True)
    start = resume_point(run.config, run.data, run.identity, locks, run.status.line, flags)
    if must_index:
        training_data = plan_rows(run, write_index=True)
    config = run.config
    if start.kind == "own" and start.checkpoint is not None:
        refuse_other_data(config, run.data.digests, start.checkpoint)  # indexed datasets now have full digests
        config = inherit_choices(config, start.checkpoint.config)
    else:
        config = config.changed({"train.eval_tokens": config.eval_limit})
    training_data.branch_at(branch_points(start.lineage))
    opened = OpenedRun(
        **vars(run) | {"config": config}, training_data=training_data, notifier=notifier, locks=locks, start=start
    )
    report.print_run(opened)
    report.print_data(opened)
    if opened.finished:
        build_spec(config, run.data.vocab_size, run.devices, run.host_of)
        report.print_finished(opened)
    return opened
