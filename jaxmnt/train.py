"""python -m jaxmnt.train --config FILE [key=value …]

Trains a language model, from the start or from where it stopped. One such process runs on each host.
"""

import argparse
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

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
    from jaxmnt.runtime.lock import RunLock
    from jaxmnt.runtime.rundir import places
    from jaxmnt.runtime.stop import stop_request
    from jaxmnt.runtime.training import conclude, prepare, run_steps
    from jaxmnt.telemetry.progress import status_line

    started = time.perf_counter()
    identity = identity or Identity()
    with (
        stop_request() as stop,
        status_line(quiet=identity.process_id != 0) as status,
        ExitStack() as held,
    ):
        locks = [held.enter_context(RunLock(where)) for where in places(config)]
        run = prepare(config, identity, devices, locks, status)
        if run is None:
            return ExitCode.FINISHED
        run_steps(run, stop, locks)
        return ExitCode.FINISHED if conclude(run, started) else ExitCode.STOPPED


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
