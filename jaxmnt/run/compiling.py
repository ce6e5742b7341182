"""Compiles the training step of a run, before the first batch is read."""

from collections.abc import Callable
from typing import Any

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

_DEFAULT_TIMEOUT_SECONDS = 86400.0
"""Timeout for the other processes to compile, if `watchdog.compile_seconds` is not set."""


def compile_run(run: OpenedRun, before_events: Callable[[], None]) -> CompiledRun:
    """Opens the run's event log and compiles its step. Calls `before_events` just before it opens the event log."""
    use_compile_cache(run.config.run.compile_cache, run.directory)
    run.clock.lap("data")
    before_events()
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
    """Compiles the training step in all processes together.

    The config of the program's spec has a number for `mesh.zero`, even if the user's config has `auto`.
    """
    limit = run.config.watchdog.compile_seconds
    zero_lines: list[str] = []

    def resolve(spec: StepSpec) -> StepSpec:
        resolved_spec, zero = resolve_zero(spec)
        if zero is not None:
            zero_lines.extend(zero.lines(resumed=run.zero_is_auto and not zero.is_auto))
        return resolved_spec

    with run.watchdog.during("compiling", limit):
        program = compile_program(run.config, run.data.vocab_size, run.devices, run.host_of, resolve=resolve)
        # Without the barrier, a process that finds the program in a cache would wait in its first step for the others
        # to compile, and would count that as the time of the step.
        barrier("every process has compiled", run.identity, limit or _DEFAULT_TIMEOUT_SECONDS)
    report.print_program(run.status, program, zero_lines)
    return program


def _begin_events(run: OpenedRun) -> Events:
    """Opens this process's event log and writes the start event. From then on only the log writes to its file."""
    process = run.identity.process_id
    repair(event_file(run.directory, process))
    events = Events(run.directory, process)
    events.on_written = run.notifier
    for message in run.start.damage_remarks if run.writes else []:
        events.write("checkpoint_damaged", why=message)
    environment = {"environment": report.environment(run.devices)} if run.writes else {}
    events.write(
        "start", format=FORMAT, run=run.start.run_id, step=run.start.step, processes=run.identity.processes,
        devices=len(run.devices), began=run.clock.began, cost_per_gpu_hour=run.config.launch.cost_per_gpu_hour,
        clock_ahead=run.heartbeat.clock, log_bytes=log_sizes(run.directory, process), **environment,
    )  # fmt: skip
    run.resources.callback(events.close)
    record = lambda reason: note_exit_reason(events, reason, **_position_in_steps(run))
    run.resources.enter_context(run.heartbeat.exit_handler.with_hook(record))
    return events


def _position_in_steps(run: OpenedRun) -> dict[str, Any]:
    """Returns the step that this process is taking, with the numbers of the first and last row of its batch. Empty
    before the first step."""
    step = run.watchdog.position().step
    if not step:
        return {}
    last_row = run.config.data.global_batch_size - 1
    try:
        rows = run.training_data.order.numbers(step - 1, [0, last_row]).tolist()
    except Exception:  # the event must be written in any case
        return {"step": step}
    return {"step": step, "rows": rows}
