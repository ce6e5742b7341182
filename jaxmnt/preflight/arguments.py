"""The arguments of `python -m jaxmnt.preflight`, which the launcher reads as well."""

import argparse
from pathlib import Path

from jaxmnt.commands import CHECKS, Parser, path_argument

_DESCRIPTION = """python -m jaxmnt.preflight --config FILE [key=value …]

Checks the hosts of a run and the network between them, and prints a table: start it as the run would be started, one
process a host. --explain only says which process this one would be, and from which variables that came. --calibrate
also measures, for two minutes at most, what devices and links attain, for plans to count with.
"""

_WAIT_SECONDS = 45.0


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Raises `ConfigError` for arguments that make no sense."""
    parser = Parser("python -m jaxmnt.preflight", description=_DESCRIPTION, codes=CHECKS)
    parser.add_argument("--config", type=path_argument, metavar="FILE", help="the config of the run")
    parser.add_argument("--explain", action="store_true", help="say which process this is, and from which variables")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--wait", type=float, default=_WAIT_SECONDS, metavar="SECONDS", help="for all processes to come; default 45"
    )
    parser.add_argument(
        "--calibrate", type=Path, metavar="FILE", help="measure what devices and links attain, and write it there"
    )
    parser.add_argument("--nccl-debug", action="store_true", help="say which network NCCL chooses, and keep its logs")
    parser.add_settings()
    options: argparse.Namespace = parser.parse_intermixed_args(arguments)
    return options
