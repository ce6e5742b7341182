"""python -m jaxmnt.train --config FILE [key=value …]

Trains a language model, from the start or from where it stopped. One such process runs on each host.
"""

from jaxmnt import early_signals

if __name__ == "__main__":
    early_signals.remember()

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from jaxmnt.commands import run_command
from jaxmnt.config import Config, load_config
from jaxmnt.distributed.identity import Identity, identify
from jaxmnt.errors import ExitCode, report
from jaxmnt.output import outlive_output
from jaxmnt.plan.dry_run import dry_run
from jaxmnt.run.arguments import parse_arguments
from jaxmnt.telemetry.progress import StartClock

if TYPE_CHECKING:
    import jax

    from jaxmnt.distributed.heartbeat import Heartbeat
    from jaxmnt.run.preemption import StopRequest


def main(arguments: list[str]) -> int:
    clock = StartClock()
    options = parse_arguments(arguments)
    steps = options.replay
    config = load_config(options.config, options.overrides)
    if options.dry_run:
        early_signals.release()
        return report(lambda: dry_run(config, options), debug=options.debug)
    outlive_output()
    identity = identify(config.cluster)
    clock.lap("environment")

    from jaxmnt.distributed.heartbeat import end_on_exceptions_in_threads
    from jaxmnt.distributed.process_group import joined
    from jaxmnt.distributed.termination import EarlyExit, ExitHandler, ExitReason
    from jaxmnt.preflight.compare import check_hosts
    from jaxmnt.run.failed_start import noting_a_failed_start

    exit_handler = ExitHandler(identity.label)
    early_exit = EarlyExit(identity, exit_handler)
    heard: list[Heartbeat] = []

    def at_once(reason: str) -> None:
        if heard:
            heard[0].end(reason, ExitCode.FAILURE)
        exit_handler.exit_now(ExitReason("failed", reason, ExitCode.FAILURE, identity.process_id))

    def run() -> int:
        with ExitStack() as held:
            opened = lambda: steps is not None or "data" in clock.seconds
            held.enter_context(noting_a_failed_start(config, identity, exit_handler, opened))
            stop = held.enter_context(stop_request(config, identity, at_once, early_exit.now, beside=steps is not None))
            import_module("jaxmnt.run.loop")  # with all it needs, so that it is not part of meeting the others
            clock.lap("import")
            find_data = lambda: digest_of_data(config)
            heartbeat = held.enter_context(joined(identity, config, exit_handler, find_data, early_exit))
            heard.append(heartbeat)
            end_on_exceptions_in_threads(heartbeat)
            clock.lap("rendezvous")
            check_hosts(config, identity, heartbeat.clock)
            clock.lap("preflight")
            if steps is not None:
                return train_again(config, identity, *steps)
            said = {"accept_changes": options.accept_changes, "fresh": options.fresh}
            return train(config, identity, heartbeat=heartbeat, clock=clock, stop=stop, **said)

    return exit_handler.finish(report(run, debug=options.debug, where=identity.label), at_once=not identity.alone)


def train(
    config: Config,
    identity: Identity | None = None,
    devices: "Sequence[jax.Device] | None" = None,
    heartbeat: "Heartbeat | None" = None,
    clock: StartClock | None = None,
    stop: "StopRequest | None" = None,
    *,
    accept_changes: bool = False,
    fresh: bool = False,
) -> int:
    """Trains as `config` says on `devices` (default: all of all processes) and returns an exit code.

    A run goes on with another maths only if it shall `accept_changes`; with `fresh` it is set aside for a new one.
    """
    from jaxmnt.distributed.heartbeat import heartbeat_alone
    from jaxmnt.distributed.process_group import telling
    from jaxmnt.run.changes import nothing_wrong_with_the_config
    from jaxmnt.run.lock import RunLock
    from jaxmnt.run.loop import conclude, prepare, run_steps
    from jaxmnt.run.rundir import Say, places
    from jaxmnt.run.watchdog import Watchdog
    from jaxmnt.telemetry.progress import status_line

    started = time.perf_counter()
    assert config.run.dir is not None
    identity, run_dir = identity or Identity(), Path(config.run.dir)
    heartbeat = heartbeat or heartbeat_alone(identity)
    with (
        nullcontext(stop)
        if stop
        else stop_request(config, identity, lambda why: heartbeat.end(why, ExitCode.FAILURE)) as stop,
        Watchdog(config.watchdog, run_dir, identity.process_id, heartbeat) as watchdog,
        status_line(quiet=identity.process_id != 0) as status,
        ExitStack() as held,
        telling(heartbeat),
        nothing_wrong_with_the_config(config),
    ):
        locks = [held.enter_context(RunLock(where)) for where in places(config)]
        for lock in locks:
            held.enter_context(heartbeat.exit_handler.with_hook(lock.let_go))
        clock = clock or StartClock()
        clock.watch_compile_cache()
        say = Say(accept_changes, fresh)
        run = prepare(config, identity, devices, locks, status, watchdog, heartbeat.exit_handler, held, clock, say)
        if run is None:
            return ExitCode.FINISHED
        run_steps(run, stop, locks)
        return ExitCode.FINISHED if conclude(run, stop, started) else ExitCode.STOPPED


def digest_of_data(config: Config) -> str:
    """Of all that `data` names, opened."""
    from jaxmnt.data.sources import open_sources
    from jaxmnt.run.changes import nothing_wrong_with_the_config

    with nothing_wrong_with_the_config(config):
        return open_sources(config.data).digest


def stop_request(
    config: Config,
    identity: Identity,
    at_once: Callable[[str], object],
    early: Callable[[str], object] | None = None,
    *,
    beside: bool = False,
) -> "StopRequest":
    """What hears of requests to stop. In process 0 also by the end of the allocation, and by the file STOP, unless this
    works `beside` the run: the file is for the run, and removed when it is obeyed."""
    from jaxmnt.run.preemption import StopRequest, end_of_allocation

    if identity.process_id != 0:
        return StopRequest(None, at_once, None, early)
    assert config.run.dir is not None
    ends_at = end_of_allocation(config.run.max_minutes, config.run.stop_margin_seconds, os.environ)
    return StopRequest(None if beside else Path(config.run.dir), at_once, ends_at, early)


def train_again(config: Config, identity: Identity, first: int, last: int) -> int:
    """`--replay`: see `run/replay.py`."""
    from jaxmnt.run.replay import replay
    from jaxmnt.telemetry.progress import status_line

    with status_line(quiet=identity.process_id != 0) as status:
        return replay(config, identity, first, last, status)


def command(arguments: list[str]) -> int:
    try:
        return main(arguments)
    finally:
        early_signals.ignore()


if __name__ == "__main__":
    run_command(command)
