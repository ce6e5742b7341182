"""python -m jaxmnt.train --config FILE [key=value …]

Trains a language model, from the start or from where it stopped. One such process runs on each host.
"""

import argparse
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from jaxmnt.cluster.environment import Identity, identify
from jaxmnt.config import Config, load_config
from jaxmnt.errors import ExitCode, report, run_command
from jaxmnt.plan.command import add_arguments, check_arguments, dry_run

if TYPE_CHECKING:
    import jax


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    check_arguments(options)
    config = load_config(options.config, options.overrides)
    if options.dry_run:
        return report(lambda: dry_run(config, options), debug=options.debug)
    identity = identify(config.cluster)

    from jaxmnt.cluster.runtime import joined, leave
    from jaxmnt.data.sources import open_sources

    def run() -> int:
        with joined(identity, config, lambda: open_sources(config.data).digest):
            return train(config, identity)

    return leave(identity, report(run, debug=options.debug, where=identity.label))


def train(config: Config, identity: Identity | None = None, devices: "Sequence[jax.Device] | None" = None) -> int:
    """Trains as `config` says on `devices` (default: all of all processes) and returns an exit code."""
    from jaxmnt.cluster.runtime import barrier, hosts
    from jaxmnt.data.batches import TrainingData
    from jaxmnt.data.feed import Wishes
    from jaxmnt.program.compiled import compile_program
    from jaxmnt.runtime import announce
    from jaxmnt.runtime.compile_cache import use_compile_cache
    from jaxmnt.runtime.evaluate import Evaluator
    from jaxmnt.runtime.inputs import fit_to_data, ready_data, training_feed
    from jaxmnt.runtime.lock import RunLock
    from jaxmnt.runtime.resume import starting_state
    from jaxmnt.runtime.rundir import home, open_run, write_config
    from jaxmnt.runtime.saves import Saves
    from jaxmnt.runtime.stop import stop_request
    from jaxmnt.telemetry.events import Events, peak_host_bytes
    from jaxmnt.telemetry.progress import status_line

    started = time.perf_counter()
    identity = identity or Identity()
    main_process = identity.process_id == 0
    with (
        stop_request() as stop,
        status_line(quiet=not main_process) as status,
        RunLock(home(config)) as lock,
    ):
        data = ready_data(config, identity, status)
        config = fit_to_data(config, data)
        training = TrainingData(config, data)
        start = open_run(config, data, identity, lock, status.line)
        announce.run(status, start, identity)
        announce.data(status, config, data, training)
        if start.step == config.train.steps:
            announce.already_finished(status, config, start)
            return ExitCode.FINISHED
        use_compile_cache(config.run.compile_cache)
        names = hosts(identity)
        program = compile_program(config, data.vocab_size, devices, lambda device: names[device.process_index])
        announce.program(status, program)
        events = Events(start.directory, identity.process_id)
        events.write("start", run=start.run, step=start.step, jax=version("jax"), devices=program.placement.mesh.size)
        events.write("compile", seconds=program.compile_seconds)
        start, state = starting_state(config, data, program, start, identity, events, status)
        if main_process:
            write_config(start.directory, config)
            for change in start.changes:
                events.write("config_change", **change._asdict())

        saves = Saves(config, start, program, data, identity, events, status)
        saves.check_room()
        saves.prepare(state)
        log = announce.train_log(config, program, start, training, status, writer=main_process)
        feed = training_feed(config, training, program, start.step)
        evaluator = Evaluator(program, data)
        events.write("data", digest=data.digest, **announce.input_memory(status, config, training, feed.local_rows))
        wishes = Wishes(program.wishes_sharding)
        feed.stage()
        log.restart_clock()

        step, last, preempted = start.step, config.train.stop_after or config.train.steps, False
        last = min(last, config.train.steps)
        while step < last and not preempted:
            batch, digest = feed.take()
            wished = wishes.array(stop=stop.wanted, save=saves.wished())
            state, metrics = program.step(state, batch | {"wishes": wished})
            step, loss = step + 1, None
            if step < last:
                feed.stage()  # reads and copies the next batch while the devices are busy
            log.push(step, metrics, feed.wait_seconds, digest)  # reads the metrics of the step before
            preempted = log.stop_seen  # on all processes after the same step: wishes are part of the metrics
            if _due(step, config.train.eval_every) or step == config.train.steps:
                loss = _evaluate(evaluator, state, log, step)
            if saves.due(step, log.save_seen) or step == last or preempted:
                log.flush()
                log.pause(saves.save(step, state, log.tokens, loss))
            saves.poll()
            lock.check()

        log.close()
        saves.finish(step, state, log.tokens, loss)
        barrier("the last checkpoint is committed", identity)
        finished = step == config.train.steps
        if preempted:
            events.write("preempted", step=step)
        events.write("end", step=step, finished=finished, peak_host_bytes=peak_host_bytes())
        announce.end(status, config, start, log, saves, step, time.perf_counter() - started)
    return ExitCode.FINISHED if finished else ExitCode.STOPPED


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _evaluate(evaluator: Any, state: Any, log: Any, step: int) -> float | None:
    """The mean held-out loss, if anything is held out."""
    log.flush()
    started = time.perf_counter()
    results = evaluator(state["params"])
    seconds = time.perf_counter() - started
    log.pause(seconds)
    return log.write_eval(step, results, seconds) if results else None


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    from jaxmnt.config.describe import help_text

    parser = argparse.ArgumentParser(
        "python -m jaxmnt.train",
        description=__doc__,
        epilog=f"config keys (type, default):\n{help_text()}" if {"-h", "--help"} & set(arguments) else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML file with the config")
    parser.add_argument("--debug", action="store_true", help="show a traceback with an error")
    add_arguments(parser)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings over the file's")
    return parser.parse_intermixed_args(arguments)


if __name__ == "__main__":
    run_command(main)
