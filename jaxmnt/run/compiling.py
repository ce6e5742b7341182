"""Compiles the steps of a run, before the first batch is read."""

from collections.abc import Callable

from jaxmnt.config.schema import Config
from jaxmnt.distributed.coordination import barrier
from jaxmnt.plan.zero import resolve_zero
from jaxmnt.run import report
from jaxmnt.run.compile_cache import use_compile_cache
from jaxmnt.run.failed_start import note_exit_reason
from jaxmnt.run.spending import Spending
from jaxmnt.run.values import CompiledRun, OpenedRun, RunWithData
from jaxmnt.telemetry.events import FORMAT, Events, event_file, log_sizes, repair
from jaxmnt.training.compile import Program, compile_program
from jaxmnt.training.spec import StepSpec

_A_DAY_SECONDS = 86400.0


def compile_run(run: OpenedRun, opened: Callable[[], None]) -> CompiledRun:
    """Opens the run's event log and compiles its step. Calls `opened` just before the event log is opened."""
    use_compile_cache(run.config.run.compile_cache, run.directory)
    run.clock.lap("data")
    opened()
    spending = None
    price = run.config.launch.cost_per_gpu_hour
    if run.writes and price is not None:
        spending = Spending(price, run.config.run.budget, run.directory, len(run.devices), run.clock.elapsed)
    events = _begin_events(run)
    program = compile_steps(run)
    run.clock.lap("compile")
    events.write("compile", seconds=program.compile_seconds, **report.program_summary(program))
    return CompiledRun(**vars(run) | {"config": program.spec.config}, events=events, spending=spending, program=program)


def compile_steps(run: RunWithData) -> Program:
    """Compiles the steps in all processes together. The config of the program's spec has a number for `mesh.zero`."""
    limit = run.config.watchdog.compile_seconds
    zero_lines = []

    def resolve(spec: StepSpec) -> Config:
        config, zero = resolve_zero(spec)
        zero_lines.extend([] if zero is None else zero.lines(resumed=run.zero_is_auto and not zero.is_auto))
        return config

    with run.watchdog.during("compiling", limit):
        program = compile_program(run.config, run.data.vocab_size, run.devices, run.host_of, resolve=resolve)
        # Without the barrier, a process that finds the program in a cache would count the compile time of the others
        # as part of its first step.
        barrier("every process has compiled", run.identity, limit or _A_DAY_SECONDS)
    report.print_program(run.status, program, zero_lines)
    return program


def _begin_events(run: OpenedRun) -> Events:
    """Opens this process's event log and writes the start event. From now on nothing else writes to its file."""
    process = run.identity.process_id
    repair(event_file(run.directory, process))
    events = Events(run.directory, process)
    events.written = run.notifier
    for trouble in run.start.damaged if run.writes else []:
        events.write("checkpoint_damaged", why=trouble)
    environment = {"environment": report.environment(run.devices)} if run.writes else {}
    events.write(
        "start", format=FORMAT, run=run.start.run, step=run.start.step, processes=run.identity.processes,
        devices=len(run.devices), began=run.clock.began, cost_per_gpu_hour=run.config.launch.cost_per_gpu_hour,
        clock_ahead=run.heartbeat.clock, log_bytes=log_sizes(run.directory, process), **environment,
    )  # fmt: skip
    run.resources.callback(events.close)
    run.resources.enter_context(run.heartbeat.exit_handler.with_hook(lambda reason: note_exit_reason(events, reason)))
    return events
