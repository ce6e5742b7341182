"""The training loop: takes steps, and between them evaluates, saves and handles the request to stop."""

import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jaxmnt.checkpoint.refs import CHECKPOINTS
from jaxmnt.distributed.coordination import barrier, broadcast, waited_seconds
from jaxmnt.errors import ExitCode, shortened
from jaxmnt.run.profiling import PROFILE_TIMEOUT_SECONDS
from jaxmnt.run.rundir import checkpoint_root
from jaxmnt.run.running import Running
from jaxmnt.run.sampling import exact_match
from jaxmnt.telemetry.events import METRICS, peak_host_bytes, records
from jaxmnt.units import count, duration


def train_steps(run: Running) -> ExitCode:
    """Trains, evaluates and saves until the last step, or until the run is asked to stop.

    Returns once the last checkpoint is committed and all processes know that it is.
    """
    settings, log, saves, feed, progress = run.config.train, run.log, run.saves, run.feed, run.progress
    last_step = min(settings.stop_after or settings.steps, settings.steps)
    feed.stage()
    # An earlier start may have been stopped during the evaluation after its last step.
    if _is_due(progress.step, settings.eval_every) and is_evaluation_missing(run):
        saves.add_loss(progress.step, _evaluate(run))
    log.restart_clock()
    run.monitoring.timer.restart()
    run.stop.begin_steps()
    run.watchdog.begin_steps(progress.step + 1)
    while progress.step < last_step and not progress.preempted:
        run.watchdog.begin_step(progress.step + 1)
        batch, digest = feed.take()
        # The batch carries the requests of this process, and the step's metrics tell all processes of them.
        requests = {"save": saves.wants_save(), "profile": run.profiler.wants_profile(progress.step + 1)}
        metrics = _take_step(run, batch | {"control": run.control.array(stop=run.stop.wanted, **requests)})
        step = progress.step
        if step < last_step:
            _stage_batch(run)  # while the devices are busy
        log.push(step, metrics, feed.wait_seconds, digest)  # reads the metrics of the previous step
        with run.monitoring.timer.during("device"):
            run.replicas.check()
        # This is set in all processes after the same step, because the metrics add up the requests of all processes.
        progress.preempted = log.stop_seen
        if _is_due(step, settings.eval_every) or step == settings.steps:
            progress.loss = _evaluate(run)
        must_profile = run.profiler.is_due(log.profile_seen)
        must_save = saves.is_due(step, log.save_seen) or step == last_step or progress.preempted or must_profile
        run.replicas.begin(step, progress.state, will_be_saved=must_save)
        if must_save:
            _save(run)
        saves.poll()
        if must_profile:
            _arm_profiler(run)
        for lock in run.locks:
            lock.check()
        log.pause(run.monitoring.probe(step, log.flush))
        run.monitoring.end_step(step, run.stop)
    log.flush()
    return _conclude(run)


def _conclude(run: Running) -> ExitCode:
    """Waits until the last checkpoint is committed, records the end of this start and reports it."""
    step = run.progress.step
    finished = step == run.config.train.steps
    with run.watchdog.during("waiting for the last checkpoint", run.config.watchdog.save_seconds):
        run.saves.finish(step, run.progress.state, run.log.tokens, run.progress.loss)
        barrier("the last checkpoint is committed", run.identity)
        run.monitoring.end(step)
    run.stop.mark_done()
    if run.progress.preempted:
        run.events.write("preempted", step=step, asked_by=run.stop.reason)
    run.events.write("end", step=step, finished=finished, peak_host_bytes=peak_host_bytes())
    _report_end(run, step)
    return ExitCode.FINISHED if finished else ExitCode.STOPPED


def _report_end(run: Running, step: int) -> None:
    """Prints where the results are, and how to continue."""
    settings, print_line, directory = run.config.train, run.status.line, run.directory
    outcome = "finished" if step == settings.steps else f"stopped after step {step} of {settings.steps}"
    print_line(f"{outcome} in {duration(time.perf_counter() - run.began)}, {count(run.log.tokens)} tokens in all")
    print_line(
        f"metrics {directory}/metrics.jsonl, config {directory}/config.yaml, "
        f"checkpoints {checkpoint_root(run.config) / CHECKPOINTS}"
    )
    checkpoints = f"{run.saves.count} checkpoint{'' if run.saves.count == 1 else 's'}"
    print_line(f"saved   {checkpoints}, for which training waited {run.saves.blocked_seconds:.1f} s")
    steps_without_targets = run.log.without_targets
    if steps_without_targets:
        steps = f"{steps_without_targets} step{'' if steps_without_targets == 1 else 's'}"
        print_line(f"note    {steps} of this start had no targets and changed nothing")
    quoted_directory = shlex.quote(str(directory))
    print_line(f"report  python -m jaxmnt.report {quoted_directory}")
    if run.data.is_text:
        chat = "--chat " if run.data.chat else ""
        print_line(f"prompt  python -m jaxmnt.generate --run {quoted_directory} {chat}--prompt 'Once'")
    if step == settings.stop_after and step < settings.steps:
        print_line("to continue, raise train.stop_after or leave it out")
    elif step < settings.steps:
        print_line(f"run the same command again{' without --fresh' if run.start.fresh else ''} to continue")


def _is_due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def _arm_profiler(run: Running) -> None:
    """Arms the profiler, once the checkpoint is committed, because a profiler may crash the run."""
    started = time.perf_counter()
    with run.watchdog.during("saving", run.config.watchdog.save_seconds), _timed_phase(run, "save"):
        run.saves.poll(wait=True)
    run.log.pause(time.perf_counter() - started)
    run.profiler.arm(run.saves.succeeded, run.progress.step)


def _take_step(run: Running, batch: dict[str, Any]) -> Any:
    """Takes a step. Returns its metrics, which the devices may still be computing unless the step is profiled."""
    progress = run.progress
    take_step = lambda: run.program.step(progress.state, batch)
    if not run.profiler.is_armed:
        with run.monitoring.timer.during("dispatch"):
            progress.state, metrics = take_step()
    else:
        run.log.flush()
        with run.watchdog.during("profiling", PROFILE_TIMEOUT_SECONDS), run.monitoring.timer.during("device"):
            started = time.perf_counter()
            progress.state, metrics = run.profiler.step(progress.step + 1, take_step)
            run.log.pause(time.perf_counter() - started - run.profiler.step_seconds)
    progress.step += 1
    progress.loss = None
    return metrics


def _stage_batch(run: Running) -> None:
    """Reads the next batch and starts to copy it to the devices."""
    timer, feed = run.monitoring.timer, run.feed
    with timer.during("host_to_device"):
        feed.stage()
    timer.move(feed.wait_seconds, "host_to_device", "data")
    timer.move(feed.gather_seconds, "host_to_device", "peers")


@contextmanager
def _timed_phase(run: Running, phase: str) -> Iterator[None]:
    """Context manager that times a phase, but counts the time spent waiting for other processes as the phase
    "peers"."""
    total_wait_seconds = lambda: waited_seconds() + run.saves.saver.waited_seconds
    wait_before = total_wait_seconds()
    with run.monitoring.timer.during(phase):
        yield
    run.monitoring.timer.move(total_wait_seconds() - wait_before, phase, "peers")


def _save(run: Running) -> None:
    """Starts a save, once the metrics of the last step and the result of its comparison of replicas are known."""
    run.log.flush()
    timer, saves, progress = run.monitoring.timer, run.saves, run.progress
    with timer.during("device"):
        run.replicas.check()
    preparation_before = saves.saver.preparation_seconds
    with run.watchdog.during("saving", run.config.watchdog.save_seconds):
        with timer.during("writing"):
            run.log.settle()
        with _timed_phase(run, "save"):
            run.log.pause(saves.save(progress.step, progress.state, run.log.tokens, progress.loss))
    timer.move(saves.saver.preparation_seconds - preparation_before, "save", "writing")


def _evaluate(run: Running) -> float | None:
    """Evaluates and samples. Returns the mean held-out loss; None if no data is held out or the run stops in the
    meantime.

    A request to stop does not interrupt the evaluation after the last step, since no later start would repeat it.
    """
    run.log.flush()
    limits, progress = run.config.watchdog, run.progress
    started = time.perf_counter()
    should_stop = lambda: run.stop.wanted and progress.step < run.config.train.steps
    with run.watchdog.during("compiling", limits.compile_seconds), _timed_phase(run, "evaluation"):
        run.evaluator.compile()
        if run.sampler is not None:
            run.sampler.compile()
    matches = None
    with run.watchdog.during("evaluating", limits.evaluate_seconds), _timed_phase(run, "evaluation"):
        results, of_average = run.evaluator(progress.state, should_stop, run.watchdog.note_progress), None
        if "average" in progress.state and results is not None:
            of_average = run.evaluator(progress.state, should_stop, run.watchdog.note_progress, averaged=True)
            results = None if of_average is None else results
        if run.sampler is not None and results is not None:
            samples = run.sampler(progress.state, progress.step, run.watchdog.note_progress)
            if run.writes:
                run.events.write("samples", step=progress.step, samples=samples)
            for sample in samples:
                separator = " → " if "expect" in sample or sample.get("chat") else ""
                run.status.line(f"sample  {shortened(sample['prompt'] + separator + sample['text'])}")
            matches = exact_match(samples)
    seconds = time.perf_counter() - started
    run.log.pause(seconds)
    if results is None:
        progress.preempted = True
    if not results and matches is None:
        return None
    sets = run.config.data.eval_sets
    return run.log.write_eval(progress.step, results or {}, seconds, sets, matches, of_average)


def is_evaluation_missing(run: Running) -> bool:
    """Returns True if this run stopped during the evaluation after the step that it resumes from."""
    step = run.start.step
    if run.start.kind != "own" or step == 0:
        return False
    message = None
    if run.identity.process_id == 0:
        lines = records(run.directory / METRICS)
        message = str(not any(line["kind"] == "eval" and line["step"] == step for line in lines))
    return broadcast("an evaluation to make up for", message, run.identity) == str(True)
