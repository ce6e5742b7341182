"""python -m jaxmnt.checkpoint list|verify|show|diff|export: inspects checkpoints, on any machine.

Name a checkpoint as RUN@STEP, RUN@best (the lowest held-out loss), RUN (its newest whole checkpoint) or by its own
directory; RUN is a run directory, or the folder or gs:// address of checkpoint.dir.
This needs neither JAX nor the devices that wrote the checkpoint.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

from jaxmnt.commands import LOCAL_EXIT_CODES, Parser, run_command
from jaxmnt.errors import ExitCode, UserError, printable


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    from jaxmnt.checkpoint.show import COMMANDS  # imported late, so that --help does not wait for its imports

    try:
        return COMMANDS[options.command](options)
    except UserError:
        raise
    except OSError as error:
        where = printable(str(error.filename or options.command))
        raise UserError(
            f"{where}: {error.strerror or error}; check that it is mounted and readable and try again"
        ) from error


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("python -m jaxmnt.checkpoint", description=__doc__, codes=LOCAL_EXIT_CODES)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str, codes: Mapping[ExitCode, str] = LOCAL_EXIT_CODES) -> Parser:
        return commands.add_parser(name, help=text, description=text, codes=codes)

    listing = add("list", "list a run's checkpoints, and whether each is whole, judging by its files")
    listing.add_argument("run", metavar="RUN")
    listing.add_argument("--json", action="store_true", help="as one JSON object")
    not_whole = LOCAL_EXIT_CODES | {ExitCode.FAILURE: "a checkpoint is not whole, or any other failure"}
    checking = add("verify", "read every array and compare it with its digest", not_whole)
    checking.add_argument("checkpoint", metavar="CHECKPOINT", help="a run means all of its checkpoints")
    showing = add("show", "show what a checkpoint contains and where it comes from")
    showing.add_argument("checkpoint", metavar="CHECKPOINT")
    showing.add_argument("--json", action="store_true", help="as one JSON object")
    differing = add("diff", "show how two checkpoints differ")
    differing.add_argument("first", metavar="CHECKPOINT")
    differing.add_argument("second", metavar="CHECKPOINT")
    differing.add_argument("--verbose", action="store_true", help="name every array whose content differs")
    exporting = add("export", "write the parameters as safetensors")
    exporting.add_argument("checkpoint", metavar="CHECKPOINT")
    exporting.add_argument("output", type=Path, metavar="FOLDER", help="a new folder")
    exporting.add_argument("--file-gb", type=float, default=5.0, help="gigabytes a file (5)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_command(main)
