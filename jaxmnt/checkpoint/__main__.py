"""python -m jaxmnt.checkpoint list|verify|show|diff|export|average: inspects checkpoints, on any machine.

Name a checkpoint as RUN@STEP, RUN@best (the lowest held-out loss), RUN (its newest valid checkpoint) or by its own
directory. RUN is a run directory, or the folder or gs:// address of checkpoint.dir.
The command needs neither JAX nor the devices that wrote the checkpoint.
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
        subject = printable(str(error.filename or options.command))
        raise UserError(
            f"{subject}: {error.strerror or error}; check that it is mounted and readable and try again"
        ) from error


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("python -m jaxmnt.checkpoint", description=__doc__, codes=LOCAL_EXIT_CODES)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add_command(name: str, text: str, codes: Mapping[ExitCode, str] = LOCAL_EXIT_CODES) -> Parser:
        return commands.add_parser(name, help=text, description=text, codes=codes)

    list_command = add_command("list", "list a run's checkpoints, and whether the files of each are valid")
    list_command.add_argument("run", metavar="RUN")
    list_command.add_argument("--json", action="store_true", help="print one JSON object")
    verify_codes = LOCAL_EXIT_CODES | {ExitCode.FAILURE: "a checkpoint is not valid, or the command failed otherwise"}
    verify_command = add_command("verify", "read every array and compare it with its digest", verify_codes)
    verify_command.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a checkpoint, or a run to verify all of its checkpoints"
    )
    show_command = add_command("show", "show what a checkpoint contains and where it comes from")
    show_command.add_argument("checkpoint", metavar="CHECKPOINT")
    show_command.add_argument("--json", action="store_true", help="print one JSON object")
    diff_command = add_command("diff", "show how two checkpoints differ")
    diff_command.add_argument("first", metavar="CHECKPOINT")
    diff_command.add_argument("second", metavar="CHECKPOINT")
    diff_command.add_argument("--verbose", action="store_true", help="name every array whose content differs")
    export_command = add_command("export", "write the parameters as safetensors")
    export_command.add_argument("checkpoint", metavar="CHECKPOINT")
    export_command.add_argument("output", type=Path, metavar="FOLDER", help="a new folder")
    export_command.add_argument(
        "--file-gb", type=float, default=5.0, help="approximate size of each file in gigabytes (default: 5)"
    )
    average_command = add_command("average", "write the average of checkpoints as a run of its own")
    average_command.add_argument(
        "checkpoint",
        metavar="RUN@STEP,…",
        help="steps whose parameters are averaged; with one step, the average of the run itself (optimizer.average)",
    )
    average_command.add_argument("output", type=Path, metavar="FOLDER", help="a new folder")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_command(main)
