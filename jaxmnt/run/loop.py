"""The steps of a run, and what comes between them: evaluations, saves, and the request to stop."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jaxmnt.distributed.coordination import barrier, broadcast, waited_seconds
from jaxmnt.errors import shortened
from jaxmnt.run import report
from jaxmnt.run.profiling import PROFILE_SECONDS
from jaxmnt.run.session import Session
from jaxmnt.telemetry.events import METRICS, peak_host_bytes, records


def train_steps(run: Session) -> None:
    """Steps, evaluations and saves until the last step, or until somebody wants the run to stop."""
    settings, log, saves, feed = run.config.train, run.log, run.saves, run.batches
    last = min(settings.stop_after or settings.steps, settings.steps)
    feed.stage()
    if _due(run.step, settings.eval_every) and was_not_evaluated(run):
        _evaluate(run)
    log.restart_clock()
    run.monitoring.timer.restart()
    run.stop.steps_begin()
    run.watchdog.steps_begin(run.step + 1)
    while run.step < last and not run.preempted:
        run.watchdog.begins(run.step + 1)
        batch, digest = feed.take()
        wishes = {"save": saves.wished(), "profile": run.profiler.wished(run.step + 1)}
        run.state, metrics = _take_step(run, batch | {"control": run.control.array(stop=run.stop.wanted, **wishes)})
        run.step, run.loss = run.step + 1, None
        if run.step < last:
            _stage(run)  # while the devices are busy
        log.push(run.step, metrics, feed.wait_seconds, digest)  # reads the metrics of the step before
        with run.monitoring.timer.during("device"):
            run.replicas.check()
        run.preempted = log.stop_seen  # on all processes after the same step: the metrics add up everyone's flags
        if _due(run.step, settings.eval_every) or run.step == settings.steps:
            run.loss = _evaluate(run)
        profile = run.profiler.due(log.profile_seen)
        saved = saves.due(run.step, log.save_seen) or run.step == last or run.preempted or profile
        run.replicas.begin(run.step, run.state, saved=saved)
        if saved:
            _save(run)
        saves.poll()
        if profile:
            _arm_profiler(run)
        for lock in run.locks:
            lock.check()
        log.pause(run.monitoring.probe(run.step, log.flush))
        run.monitoring.end_step(run.step, run.stop)
    log.flush()


def conclude(run: Session) -> None:
    """Returns when the last checkpoint is committed and all processes know."""
    with run.watchdog.during("waiting for the last checkpoint", run.config.watchdog.save_seconds):
        run.saves.finish(run.step, run.state, run.log.tokens, run.loss)
        barrier("the last checkpoint is committed", run.identity)
        run.monitoring.end(run.step)
    run.stop.obeyed()
    if run.preempted:
        run.events.write("preempted", step=run.step, asked_by=run.stop.reason)
    run.events.write("end", step=run.step, finished=run.finished, peak_host_bytes=peak_host_bytes())
    report.end(run.status, run.config, run.start, run.log, run.saves, run.step, run.seconds)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _arm_profiler(run: Session) -> None:
    """Once the checkpoint counts: the profiler may end the run."""
    with run.watchdog.during("saving", run.config.watchdog.save_seconds), _during(run, "save"):
        started = time.perf_counter()
        run.saves.poll(wait=True)
        run.log.pause(time.perf_counter() - started)
    run.profiler.arm(run.saves.succeeded, run.step)


def _take_step(run: Session, batch: dict[str, Any]) -> Any:
    """The state after a step, and its metrics. They are there later, unless the step is profiled."""
    take = lambda: run.program.step(run.state, batch)
    if not run.profiler.armed:
        with run.monitoring.timer.during("dispatch"):
            return take()
    run.log.flush()
    with run.watchdog.during("profiling", PROFILE_SECONDS), run.monitoring.timer.during("device"):
        started = time.perf_counter()
        taken = run.profiler.step(run.step + 1, take)
        run.log.pause(time.perf_counter() - started - run.profiler.step_seconds)
        return taken


def _stage(run: Session) -> None:
    """Reads and copies the next batch."""
    timer, feed = run.monitoring.timer, run.batches
    with timer.during("host_to_device"):
        feed.stage()
    timer.move(feed.wait_seconds, "host_to_device", "data")
    timer.move(feed.gather_seconds, "host_to_device", "peers")


@contextmanager
def _during(run: Session, phase: str) -> Iterator[None]:
    """Time in which the others are waited for is of another phase."""
    waited = lambda: waited_seconds() + run.saves.waited_seconds
    before = waited()
    with run.monitoring.timer.during(phase):
        yield
    run.monitoring.timer.move(waited() - before, phase, "peers")


def _save(run: Session) -> None:
    run.log.flush()
    with run.monitoring.timer.during("device"):
        run.replicas.check()
    timer, prepared = run.monitoring.timer, run.saves.prepared_seconds
    with run.watchdog.during("saving", run.config.watchdog.save_seconds):
        with timer.during("writing"):
            run.log.settle()
        with _during(run, "save"):
            run.log.pause(run.saves.save(run.step, run.state, run.log.tokens, run.loss))
    timer.move(run.saves.prepared_seconds - prepared, "save", "writing")


def _evaluate(run: Session) -> float | None:
    """The mean held-out loss, if anything is held out. The last one is not cut short: no start would make up for it."""
    run.log.flush()
    started = time.perf_counter()
    stop = lambda: run.stop.wanted and not run.finished
    limits = run.config.watchdog
    with run.watchdog.during("compiling", limits.compile_seconds), _during(run, "evaluation"):
        run.evaluator.compile()
        run.sampler.compile()
    with run.watchdog.during("evaluating", limits.evaluate_seconds), _during(run, "evaluation"):
        results = run.evaluator(run.state, stop, run.watchdog.got_further)
        if run.sampler.wanted and results is not None:
            samples = run.sampler(run.state, run.step, run.watchdog.got_further)
            if run.writes:
                run.events.write("samples", step=run.step, samples=samples)
            for one in samples:
                run.status.line(f"sample  {shortened(one['prompt'] + one['text'])}")
    seconds = time.perf_counter() - started
    run.log.pause(seconds)
    if results is None:
        run.preempted = True
    return run.log.write_eval(run.step, results, seconds, run.config.data.eval_sets) if results else None


def was_not_evaluated(run: Session) -> bool:
    """Whether this run stopped in the middle of the evaluation after the step that it goes on from."""
    if run.start.kind != "own" or run.step == 0:
        return False
    told = None
    if run.identity.process_id == 0:
        lines = records(run.directory / METRICS)
        told = str(not any(line["kind"] == "eval" and line["step"] == run.step for line in lines))
    return broadcast("an evaluation to make up for", told, run.identity) == str(True)
