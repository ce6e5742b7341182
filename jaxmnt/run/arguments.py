"""The arguments of `python -m jaxmnt.train`, which launchers and the drill read as well."""

import argparse
import re

from jaxmnt.commands import RUN_EXIT_CODES, Parser, fitted, path_argument
from jaxmnt.errors import ConfigError, ExitCode
from jaxmnt.plan.dry_run import add_arguments, check_arguments

_DESCRIPTION = """python -m jaxmnt.train --config FILE [key=value …]

Trains a language model, from the start or from where the run stopped. Run one such process on each host.
"""


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Parses the arguments. Raises `ConfigError` if one of them, or a combination of them, is invalid."""
    from jaxmnt.config.describe import help_text

    if (topic := _help_topic(arguments)) is not None:
        print(fitted(help_text(topic)))
        raise SystemExit(ExitCode.FINISHED)
    keys = ""
    if _asks_for_help(arguments):
        keys = f"config keys (--help TOPIC shows only those of one section):\n{help_text()}"
    parser = Parser("python -m jaxmnt.train", description=_DESCRIPTION, codes=RUN_EXIT_CODES, epilog=keys)
    parser.add_argument("--config", type=path_argument, required=True, metavar="FILE", help="YAML file with the config")
    parser.add_argument(
        "--replay",
        metavar="FROM:TO",
        type=replay_range,
        help="repeat the steps after checkpoint FROM up to TO without changing the run, and compare the results",
    )
    parser.add_argument(
        "--accept-changes", action="store_true", help="continue a run although changes of the config alter its maths"
    )
    parser.add_argument("--fresh", action="store_true", help="set aside the run in run.dir, and begin a new one there")
    add_arguments(parser)
    parser.add_settings()
    options: argparse.Namespace = parser.parse_intermixed_args(arguments)
    check_arguments(options)
    return options


def _asks_for_help(arguments: list[str]) -> bool:
    return not {"-h", "--help"}.isdisjoint(arguments)


def _help_topic(arguments: list[str]) -> str | None:
    """Returns the topic that follows --help; None if there is none."""
    position = next((index for index, text in enumerate(arguments) if text in ("-h", "--help")), len(arguments))
    next_arguments = arguments[position + 1 : position + 2]
    is_topic = next_arguments and not next_arguments[0].startswith("-") and "=" not in next_arguments[0]
    return next_arguments[0] if is_topic else None


def replay_range(text: str) -> tuple[int, int]:
    """Parses FROM:TO into the step of a checkpoint and a later step. Raises `ConfigError` for any other text."""
    match = re.fullmatch(r"([0-9]{1,18}):([0-9]{1,18})", text)
    if not match or int(match[1]) >= int(match[2]):
        raise ConfigError(
            f"--replay: {text!r} is not FROM:TO; give the step of a checkpoint and a later step, such as 500:510"
        )
    return int(match[1]), int(match[2])
