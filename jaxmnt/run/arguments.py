"""The arguments of `python -m jaxmnt.train`, which launchers and the drill read as well."""

import argparse
import re

from jaxmnt.commands import RUN, Parser, fitted, path_argument
from jaxmnt.errors import ConfigError, ExitCode
from jaxmnt.plan.dry_run import add_arguments, check_arguments

_DESCRIPTION = """python -m jaxmnt.train --config FILE [key=value …]

Trains a language model, from the start or from where it stopped. One such process runs on each host.
"""


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Raises `ConfigError` for arguments that make no sense, alone or together."""
    from jaxmnt.config.describe import help_text

    if (topic := _help_topic(arguments)) is not None:
        print(fitted(help_text(topic)))
        raise SystemExit(ExitCode.FINISHED)
    keys = ""
    if _asks_for_help(arguments):
        keys = f"config keys (--help TOPIC shows those of a section alone):\n{help_text()}"
    parser = Parser("python -m jaxmnt.train", description=_DESCRIPTION, codes=RUN, epilog=keys)
    parser.add_argument("--config", type=path_argument, required=True, metavar="FILE", help="YAML file with the config")
    parser.add_argument(
        "--replay",
        metavar="FROM:TO",
        type=replay_range,
        help="take these steps of the run again from its checkpoint FROM, and compare",
    )
    parser.add_argument(
        "--accept-changes", action="store_true", help="go on with a run although the config alters its maths"
    )
    parser.add_argument("--fresh", action="store_true", help="set the run in run.dir aside, and begin another there")
    add_arguments(parser)
    parser.add_settings()
    options: argparse.Namespace = parser.parse_intermixed_args(arguments)
    check_arguments(options)
    return options


def _asks_for_help(arguments: list[str]) -> bool:
    return not {"-h", "--help"}.isdisjoint(arguments)


def _help_topic(arguments: list[str]) -> str | None:
    """What stands behind --help; None if nothing does."""
    place = next((place for place, text in enumerate(arguments) if text in ("-h", "--help")), len(arguments))
    behind = arguments[place + 1 : place + 2]
    is_topic = behind and not behind[0].startswith("-") and "=" not in behind[0]
    return behind[0] if is_topic else None


def replay_range(text: str) -> tuple[int, int]:
    """The step of a checkpoint and a later step, from FROM:TO."""
    found = re.fullmatch(r"([0-9]{1,18}):([0-9]{1,18})", text)
    if not found or int(found[1]) >= int(found[2]):
        raise ConfigError(f"--replay: {text!r} is not FROM:TO, a checkpoint's step and a later one, such as 500:510")
    return int(found[1]), int(found[2])
