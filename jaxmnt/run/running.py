"""Builds all that a run needs to take steps: the feed, the log, monitoring, profiling and evaluation."""

from dataclasses import dataclass
from typing import Any

from jaxmnt.data.feed import Feed
from jaxmnt.run import report
from jaxmnt.run.evaluate import Evaluator
from jaxmnt.run.input import begin_feed
from jaxmnt.run.monitoring import BadStepMonitor, Monitoring
from jaxmnt.run.profiling import Profiler
from jaxmnt.run.rundir import plain_config
from jaxmnt.run.sampling import Sampler
from jaxmnt.run.starting_state import ReadyRun
from jaxmnt.telemetry.flops import CONVENTIONS, peak_flops, token_flops
from jaxmnt.telemetry.metrics import Rates, TrainLog
from jaxmnt.telemetry.sinks import SinkRun, Sinks, packages_of, resolve_sinks
from jaxmnt.telemetry.status_server import serving
from jaxmnt.training.compile import Program
from jaxmnt.training.spec import ControlFlags


@dataclass(frozen=True, kw_only=True)
class Running(ReadyRun):
    """A run that is ready to take steps."""

    feed: Feed
    control: ControlFlags
    log: TrainLog
    monitoring: Monitoring
    profiler: Profiler
    evaluator: Evaluator
    sampler: Sampler | None
    """None if `telemetry.samples` is empty."""


def start_running(run: ReadyRun) -> Running:
    """Builds the objects that a run needs to take steps. Opens the log and starts to read rows."""
    monitoring = Monitoring(run)
    run.resources.callback(monitoring.close)
    log = _open_log(run, monitoring)
    run.resources.callback(log.close)
    profiler = Profiler(run)
    run.resources.enter_context(profiler.listen())
    _serve_status(run, log, monitoring)
    feed = begin_feed(run, run.training_data, run.program, run.start.step)
    run.events.write("data", digest=run.data.digest, **report.input_memory(run, feed.local_rows))
    return Running(
        **vars(run),
        feed=feed,
        control=ControlFlags(run.program.control_sharding),
        log=log,
        monitoring=monitoring,
        profiler=profiler,
        evaluator=Evaluator(run.program, run.data),
        sampler=Sampler(run.program, run.data) if run.config.telemetry.samples else None,
    )


def _open_log(run: ReadyRun, monitoring: Monitoring) -> TrainLog:
    bad_steps = BadStepMonitor(run)

    def check_finished_step(step: int, seconds: float, values: dict[str, Any]) -> None:
        run.watchdog.finished_step(seconds)
        bad_steps.see(step, values)
        monitoring.check_loss(step, values["loss"])
        monitoring.check_routers(step, values["model"])
        if step == run.start.step + 1:
            run.clock.lap("first_step")
            run.events.write("started", step=step, seconds=run.clock.seconds, compile_cache=run.clock.compile_cache)

    return TrainLog(
        run.directory,
        writer=run.writes,
        status=run.status,
        steps=run.config.train.steps,
        tokens=run.start.tokens,
        rates=rates(run.program),
        epochs=run.training_data.order.epochs,
        timer=monitoring.timer,
        attempt=run.events.attempt,
        log_every=run.config.train.log_every,
        cost=None if run.spending is None else run.spending.outlook,
        on_step_finished=check_finished_step,
        on_record_written=_open_sinks(run).put,
    )


def rates(program: Program) -> Rates:
    """Returns the FLOPs and tokens from which the rates of a step are computed, by the convention that
    `telemetry.flops` names."""
    spec, mesh = program.spec, program.placement.mesh
    config, data = spec.config, spec.config.data
    flops = token_flops(spec.definition, data.sequence_length)
    recomputed = flops.recomputed(config.train.remat)
    peak = peak_flops(mesh.devices.flat[0].device_kind, spec.dtype)
    return Rates(
        flops_per_token=CONVENTIONS[config.telemetry.flops](flops),
        hardware_flops_per_token=None if recomputed is None else CONVENTIONS["causal"](flops) + recomputed,
        peak_flops=None if peak is None else peak * mesh.size,
        padded_tokens=data.global_batch_size * data.sequence_length,
    )


def _open_sinks(run: ReadyRun) -> Sinks:
    """Opens the telemetry sinks in process 0. A run that fails does not wait for their last writes."""
    names = resolve_sinks(run.config.telemetry.sinks) if run.writes else []
    sinks = Sinks(
        names,
        SinkRun(
            run.start.run_id, run.directory, plain_config(run.config), run.config.telemetry.project, run.start.step,
            run.events.attempt,
        ),
    )  # fmt: skip
    run.heartbeat.may_fail = packages_of(names)

    def close_sinks(error: type[BaseException] | None, *_: object) -> None:
        if not sinks.close(patient=error is None):
            run.heartbeat.exit_handler.must_exit_now = True  # a thread of a sink could keep the process alive forever

    run.resources.push(close_sinks)
    return sinks


def _serve_status(run: ReadyRun, log: TrainLog, monitoring: Monitoring) -> None:
    settings = run.config.telemetry
    if settings.port is None or not run.writes:
        return
    run_fields = {"run": run.start.run_id, "steps": run.config.train.steps, "processes": run.identity.processes}
    get_status = lambda: {**log.latest, **monitoring.status(), **run_fields, "now": str(run.watchdog.position())}
    url = run.resources.enter_context(serving(settings.host, settings.port, get_status))
    if url is not None:
        run.status.line(f"status  {url}/status, /metrics, /healthz, /stacks")
