"""python -m jaxmnt.launch local --processes N -- --config FILE [key=value …]

Starts the processes of a run on this machine and watches over them.
"""

import argparse

from jaxmnt.errors import ConfigError, run_command
from jaxmnt.launch.local import launch, local_run
from jaxmnt.launch.restarts import Restarts, fitting_counts


def main(arguments: list[str]) -> int:
    own, train_arguments = _split(arguments)
    options = _parse(own)
    if options.processes < 1 or (options.devices_per_process or 1) < 1 or options.max_restarts < 0:
        raise ConfigError("--processes and --devices-per-process take numbers from 1 up, --max-restarts from 0")
    local = local_run(train_arguments, options.devices_per_process)
    counts = fitting_counts(options.elastic, options.processes, options.devices_per_process, local.config)
    return launch(local, options.processes, Restarts(options.max_restarts, counts))


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m jaxmnt.launch", description=__doc__, allow_abbrev=False)
    where = parser.add_subparsers(dest="where", required=True)
    local = where.add_parser(
        "local",
        help="several processes on this machine",
        usage="%(prog)s --processes N [--devices-per-process K] [--max-restarts R] [--elastic MIN:MAX] "
        "-- --config FILE [key=value ...]",
        allow_abbrev=False,
    )
    local.add_argument("--processes", type=int, required=True, help="how many")
    local.add_argument("--devices-per-process", type=int, help="virtual CPU devices of each; default: what it has")
    local.add_argument("--max-restarts", type=int, default=0, help="start again so often after failures; default 0")
    local.add_argument(
        "--elastic", metavar="MIN:MAX", help="go on with fewer processes, down to MIN, when a restart gains no step"
    )
    local.add_argument("--debug", action="store_true", help="show a traceback with an error of the launcher")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_command(main)
