"""python -m jaxmnt.train --config FILE [key=value …]

Trains a language model, from the beginning or from the newest checkpoint. One such process runs on each host.
"""

from jaxmnt import early_signals

if __name__ == "__main__":
    early_signals.remember()

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

from jaxmnt.commands import run_command
from jaxmnt.config import Config, load_config
from jaxmnt.distributed.gpu_settings import check_flags, prepare
from jaxmnt.distributed.identity import Identity, identify
from jaxmnt.errors import report
from jaxmnt.output import limit_output_waits
from jaxmnt.plan.dry_run import dry_run
from jaxmnt.run.arguments import parse_arguments
from jaxmnt.telemetry.progress import StartClock, Work, working

if TYPE_CHECKING:
    import jax

    from jaxmnt.distributed.termination import ExitHandler


def main(arguments: list[str], *, owns_process: bool = False) -> int:
    """Runs the command. With `owns_process` nothing follows it in this process, so it ignores signals at its end."""
    clock = StartClock(of_process=True)
    options = parse_arguments(arguments)
    config = load_config(options.config, options.overrides)
    if options.dry_run:
        early_signals.release()
        check_flags(os.environ)
        return report(lambda: dry_run(config, options), debug=options.debug)
    limit_output_waits()
    identity = identify(config.cluster)
    with working("starting" if identity.process_id == 0 else "") as work:
        prepare(config)
        clock.lap("environment")

        from jaxmnt.distributed.termination import ExitHandler

        exit_handler = ExitHandler(identity.label)
        run = lambda: meet_and_train(config, options, identity, exit_handler, clock, work, owns_process)
        code = report(run, debug=options.debug, where=identity.label)
        return exit_handler.finish(code, at_once=not identity.alone)


def meet_and_train(
    config: Config,
    options: Namespace,
    identity: Identity,
    exit_handler: "ExitHandler",
    clock: StartClock,
    work: Work,
    owns_process: bool,
) -> int:
    """Joins the other processes of the run and trains with them, or repeats steps for `--replay`.

    The display of `work` ends when the run shows its own status line.
    """
    from jaxmnt.distributed.heartbeat import ending_on_exceptions_in_threads
    from jaxmnt.distributed.process_group import joined_process_group
    from jaxmnt.distributed.termination import EarlyExit
    from jaxmnt.preflight.compare import check_hosts
    from jaxmnt.run.changes import digest_of_data
    from jaxmnt.run.failed_start import FailedStartRecorder
    from jaxmnt.run.preemption import stop_request

    early_exit = EarlyExit(identity, exit_handler)
    with ExitStack() as stack:
        stack.callback(work.does, "")
        stack.enter_context(exit_handler.with_hook(lambda _: work.does("")))
        notes = stack.enter_context(FailedStartRecorder(config, identity, exit_handler))
        if options.replay is not None:
            notes.run_opened()  # the events belong to the run, and a replay must not add to them
        stop = stack.enter_context(
            stop_request(
                config,
                identity,
                lambda why: early_exit.fail(why),
                early_exit.exit_early,
                ignore_file=options.replay is not None,
            )
        )
        # Training is imported before the rendezvous, so that the import does not count as waiting for the others.
        from jaxmnt.run.replay import replay
        from jaxmnt.run.resume import ResumeFlags
        from jaxmnt.run.training_run import train_in
        from jaxmnt.run.values import run_process

        clock.lap("import")
        # Process 0 checks the files of the data for all; `run/input.py` checks copies of other hosts.
        data_digest = partial(digest_of_data, config, check_files=identity.process_id == 0)
        heartbeat = stack.enter_context(joined_process_group(identity, config, exit_handler, data_digest, early_exit))
        stack.enter_context(ending_on_exceptions_in_threads(heartbeat))
        clock.lap("rendezvous")
        check_hosts(config, identity, heartbeat.clock)
        clock.lap("preflight")
        work.does("")
        process = stack.enter_context(run_process(config, identity, heartbeat, clock, stop))
        if options.replay is not None:
            return replay(process, *options.replay)
        code = train_in(process, ResumeFlags(options.accept_changes, options.fresh), notes.run_opened)
        if owns_process:
            stop.ignore_afterwards()
        return code


def train(
    config: Config, devices: "Sequence[jax.Device] | None" = None, *, accept_changes: bool = False, fresh: bool = False
) -> int:
    """Trains with `config` in this process, on `devices` (default: all), and returns an exit code.

    `accept_changes` resumes a run even if its config has changed in a way that changes the numerics. `fresh` sets the
    existing run aside and begins a new one.
    """
    from jaxmnt.run.resume import ResumeFlags
    from jaxmnt.run.training_run import train_in
    from jaxmnt.run.values import run_process

    with run_process(config, devices=devices) as process:
        return train_in(process, ResumeFlags(accept_changes, fresh))


class _CallableModule(ModuleType):
    """Makes this module callable: `jaxmnt.train` is both the module and the function of the public API."""

    def __call__(self, config: Config, *, accept_changes: bool = False, fresh: bool = False) -> int:
        """Trains in this process, on all its devices, and returns an exit code: 0 finished, 75 stopped early.

        Resumes the run in `run.dir` if there is one. The arguments mean the same as the options of the command. Raises
        `ConfigError` for a config that cannot work, and other subclasses of `UserError` for other failures.
        """
        return train(config, accept_changes=accept_changes, fresh=fresh)


sys.modules[__name__].__class__ = _CallableModule


def command(arguments: list[str]) -> int:
    try:
        return main(arguments, owns_process=True)
    finally:
        early_signals.ignore()


if __name__ == "__main__":
    run_command(command)
