"""Parses the arguments of `python -m jaxmnt.preflight`, also for the launcher."""

import argparse
from pathlib import Path

from jaxmnt.commands import CHECK_EXIT_CODES, Parser, path_argument

_DESCRIPTION = """python -m jaxmnt.preflight --config FILE [key=value …]

Checks the hosts of a run and the network between them, and prints a table. Start it as the run would be started, with
one process per host. --explain only prints which process of the run this one would be, and the variables that determine
it. --calibrate also measures the rates of devices and links, in at most two minutes, so that plans can use them.
"""

_START_TIMEOUT_SECONDS = 45.0


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Parses the arguments of the command. Raises `ConfigError` if they are invalid."""
    parser = Parser("python -m jaxmnt.preflight", description=_DESCRIPTION, codes=CHECK_EXIT_CODES)
    parser.add_argument("--config", type=path_argument, metavar="FILE", help="the config of the run")
    parser.add_argument(
        "--explain", action="store_true", help="print which process this is, and the variables that determine it"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--wait",
        type=float,
        default=_START_TIMEOUT_SECONDS,
        metavar="SECONDS",
        help="time within which all processes must connect; default 45",
    )
    parser.add_argument(
        "--calibrate", type=Path, metavar="FILE", help="measure the rates of devices and links, and write them to FILE"
    )
    parser.add_argument("--nccl-debug", action="store_true", help="print which network NCCL uses, and keep its logs")
    parser.add_settings()
    options: argparse.Namespace = parser.parse_intermixed_args(arguments)
    return options
