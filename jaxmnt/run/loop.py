"""A run from its config to its end: everything is made, then the steps, then the last checkpoint."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import jax

from jaxmnt.config.schema import Config
from jaxmnt.data.batches import TrainingData
from jaxmnt.data.feed import ControlFlags, Feed
from jaxmnt.data.run_tokenizer import keep, of_data
from jaxmnt.data.sources import fit_to_data
from jaxmnt.distributed.coordination import barrier, broadcast
from jaxmnt.distributed.identity import Identity
from jaxmnt.distributed.process_group import host_names
from jaxmnt.distributed.termination import ExitHandler
from jaxmnt.run import report
from jaxmnt.run.compile_cache import use_compile_cache
from jaxmnt.run.evaluate import Evaluator
from jaxmnt.run.failed_start import note_exit_reason
from jaxmnt.run.inputs import ready_data, training_feed
from jaxmnt.run.lock import RunLock
from jaxmnt.run.preemption import StopRequest
from jaxmnt.run.replicas import Replicas
from jaxmnt.run.report import BadStepMonitor
from jaxmnt.run.resume import starting_state
from jaxmnt.run.rundir import Say, Start, open_run, places, write_config
from jaxmnt.run.saves import Saves
from jaxmnt.run.watchdog import Watchdog
from jaxmnt.telemetry.events import Events, event_file, mend, peak_host_bytes, records
from jaxmnt.telemetry.metrics import Finished, TrainLog
from jaxmnt.telemetry.progress import StartClock, StatusLine
from jaxmnt.training.compile import Program, build_spec, compile_program

_A_DAY_SECONDS = 86400.0


@dataclass
class Training:
    """What a run under way consists of, and how far it is."""

    config: Config
    identity: Identity
    start: Start
    program: Program
    state: Any
    feed: Feed
    control: ControlFlags
    evaluator: Evaluator
    saves: Saves
    log: TrainLog
    events: Events
    status: StatusLine
    watchdog: Watchdog
    replicas: Replicas
    step: int
    """Steps that are done."""
    loss: float | None = None
    """Held out, after the last step if that was evaluated."""
    preempted: bool = False


def prepare(
    config: Config,
    identity: Identity,
    devices: Sequence[jax.Device] | None,
    locks: Sequence[RunLock],
    status: StatusLine,
    watchdog: Watchdog,
    exit_handler: ExitHandler,
    held: ExitStack,
    clock: StartClock,
    say: Say,
) -> Training | None:
    """Everything that a run needs, up to the first batch; None if it has finished already.

    What must be let go of when the run is over is entered into `held`.
    """
    limits = config.watchdog
    data = ready_data(config, identity, status)
    config = fit_to_data(config, data)
    training = TrainingData(config, data)
    start = open_run(config, data, identity, locks, status.line, say)
    report.run(status, start, identity)
    report.data(status, config, data, training)
    names = host_names(identity)
    if start.step == config.train.steps:
        build_spec(
            config, data.vocab_size, devices, lambda device: names[device.process_index]
        )  # or it would be too late
        report.already_finished(status, config, start)
        return None
    use_compile_cache(config.run.compile_cache, start.directory)
    clock.lap("data")
    events = _begun_events(start, identity, len(devices or jax.devices()))
    held.callback(events.close)
    held.enter_context(exit_handler.with_hook(lambda exit_reason: note_exit_reason(events, exit_reason)))
    with watchdog.during("compiling", limits.compile_seconds):
        program = compile_program(config, data.vocab_size, devices, lambda device: names[device.process_index])
        # Or those who found it in a cache would count the others' compiling as their own first step.
        barrier("every process has compiled", identity, limits.compile_seconds or _A_DAY_SECONDS)
    clock.lap("compile")
    report.program(status, program)
    events.write("compile", seconds=program.compile_seconds)
    with watchdog.during("restoring", limits.restore_seconds):
        start, state = starting_state(config, data, program, start, identity, events, status)
    clock.lap("restore")
    if identity.process_id == 0:
        write_config(start.directory, config)
        for where in places(config):
            keep(where, of_data(data.tokenizer, data.vocab_size, data.folder))
        for change in start.changes:
            events.write("config_change", **change._asdict())
    saves = Saves(config, start, program, data, identity, events, status, locks)
    saves.check_room()
    with watchdog.during("compiling", limits.compile_seconds):
        saves.prepare(state)
        replicas = Replicas(config.train.compare_replicas_every, names, events)
        replicated = replicas.prepare(start.step, state)
    if replicated is not None:
        status.line(f"note    {replicated:.0%} of the state is held by several devices, which are compared")
    clock.lap("compile")
    writer = identity.process_id == 0
    rows = BadStepMonitor(config, training, events, status, writer=writer)
    finished = _on_finished_steps(start.step, watchdog, rows, events, clock)
    log = report.train_log(config, program, start, training, status, writer=writer, finished=finished)
    held.callback(log.close)
    feed = training_feed(config, training, program, start.step)
    watchdog.reads = lambda: feed.reading
    events.write("data", digest=data.digest, **report.input_memory(status, config, training, feed.local_rows))
    evaluator, control = Evaluator(program, data), ControlFlags(program.control_sharding)
    return Training(
        config,
        identity,
        start,
        program,
        state,
        feed,
        control,
        evaluator,
        saves,
        log,
        events,
        status,
        watchdog,
        replicas,
        start.step,
    )


def _begun_events(start: Start, identity: Identity, devices: int) -> Events:
    """This process's events, with the start in them. From here on nobody else writes to their file."""
    mend(event_file(start.directory, identity.process_id))
    events = Events(start.directory, identity.process_id)
    for trouble in start.damaged if identity.process_id == 0 else []:
        events.write("checkpoint_damaged", why=trouble)
    events.write("start", run=start.run, step=start.step, jax=version("jax"), devices=devices)
    return events


def _on_finished_steps(
    start_step: int, watchdog: Watchdog, rows: BadStepMonitor, events: Events, clock: StartClock
) -> Finished:
    """What is done with each step that is found finished. The first one ends the start."""

    def finished(step: int, seconds: float, values: dict[str, Any]) -> None:
        watchdog.finished_step(seconds)
        rows.see(step, values)
        if step == start_step + 1:
            clock.lap("first_step")
            events.write("started", step=step, seconds=clock.seconds, compile_cache=clock.compile_cache)

    return finished


def run_steps(run: Training, stop: StopRequest, locks: Sequence[RunLock]) -> None:
    """Steps, evaluations and saves until the last step, or until somebody wants the run to stop."""
    settings, log, saves = run.config.train, run.log, run.saves
    last = min(settings.stop_after or settings.steps, settings.steps)
    run.feed.stage()
    if _due(run.step, settings.eval_every) and _was_not_evaluated(run):
        _evaluate(run, stop)
    log.restart_clock()
    stop.steps_begin()
    run.watchdog.steps_begin(run.step + 1)
    while run.step < last and not run.preempted:
        run.watchdog.begins(run.step + 1)
        batch, digest = run.feed.take()
        wished = run.control.array(stop=stop.wanted, save=saves.wished())
        run.state, metrics = run.program.step(run.state, batch | {"control": wished})
        run.step, run.loss = run.step + 1, None
        if run.step < last:
            run.feed.stage()  # reads and copies the next batch while the devices are busy
        log.push(run.step, metrics, run.feed.wait_seconds, digest)  # reads the metrics of the step before
        run.replicas.check()
        run.preempted = log.stop_seen  # on all processes after the same step: control are part of the metrics
        if _due(run.step, settings.eval_every) or run.step == settings.steps:
            run.loss = _evaluate(run, stop)
        saved = saves.due(run.step, log.save_seen) or run.step == last or run.preempted
        run.replicas.begin(run.step, run.state, saved=saved)
        if saved:
            log.flush()
            run.replicas.check()
            with run.watchdog.during("saving", run.config.watchdog.save_seconds):
                log.settle()
                log.pause(saves.save(run.step, run.state, log.tokens, run.loss))
        saves.poll()
        for lock in locks:
            lock.check()
    log.flush()


def conclude(run: Training, stop: StopRequest, started: float) -> bool:
    """Returns, when the last checkpoint is committed and all processes know, whether the run has finished."""
    with run.watchdog.during("waiting for the last checkpoint", run.config.watchdog.save_seconds):
        run.saves.finish(run.step, run.state, run.log.tokens, run.loss)
        barrier("the last checkpoint is committed", run.identity)
    finished = run.step == run.config.train.steps
    stop.obeyed()
    if run.preempted:
        run.events.write("preempted", step=run.step, asked_by=stop.reason)
    run.events.write("end", step=run.step, finished=finished, peak_host_bytes=peak_host_bytes())
    report.end(run.status, run.config, run.start, run.log, run.saves, run.step, time.perf_counter() - started)
    return finished


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _evaluate(run: Training, stop: StopRequest) -> float | None:
    """The mean held-out loss, if anything is held out. The last one is not cut short: no start would make up for it."""
    run.log.flush()
    started = time.perf_counter()
    final = run.step == run.config.train.steps
    with run.watchdog.during("evaluating", run.config.watchdog.evaluate_seconds):
        results = run.evaluator(run.state["params"], lambda: stop.wanted and not final, run.watchdog.got_further)
    seconds = time.perf_counter() - started
    run.log.pause(seconds)
    if results is None:
        run.preempted = True
    return run.log.write_eval(run.step, results, seconds) if results else None


def _was_not_evaluated(run: Training) -> bool:
    """Whether this run stopped in the middle of the evaluation after the step that it goes on from."""
    if run.start.kind != "own" or run.step == 0:
        return False
    told = None
    if run.identity.process_id == 0:
        lines = records(run.start.directory / "metrics.jsonl")
        told = str(not any(line["kind"] == "eval" and line["step"] == run.step for line in lines))
    return broadcast("an evaluation to make up for", told, run.identity) == str(True)
