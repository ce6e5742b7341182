"""Common parts of all commands: a parser with help that fits the terminal, exit codes, and error messages."""

import argparse
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jaxmnt.distributed import quiet_plugin
from jaxmnt.errors import ConfigError, ExitCode, printable, remark, report, shortened
from jaxmnt.output import final_exit_code, guard

LOCAL_EXIT_CODES: dict[ExitCode, str] = {
    ExitCode.FINISHED: "finished",
    ExitCode.FAILURE: "any other failure",
    ExitCode.CONFIG: "the config or the arguments are wrong: do not retry",
}
"""Exit codes of a command that runs in a single process."""

CHECK_EXIT_CODES: dict[ExitCode, str] = {
    **LOCAL_EXIT_CODES,
    ExitCode.PREFLIGHT: "a check of the hosts or their network failed",
    ExitCode.PEER: "another process of the run failed or went missing",
}
"""Exit codes of a command in which all processes of a run take part."""

RUN_EXIT_CODES: dict[ExitCode, str] = {
    **CHECK_EXIT_CODES,
    ExitCode.STOPPED: "stopped early, nothing is lost: run the same command again",
}
"""Exit codes of a command that runs a config in one or several processes."""

_MIN_COLUMNS = 40
"""Minimum number of columns that help is wrapped to."""

_SEPARATE_LINE_PREFIXES = (" ", "usage: ", "python -m ")
"""Beginnings of lines that are not part of a paragraph."""

_SETTING_WITH_DASHES = re.compile(r"--?([a-z]\w*(?:\.\w+)+)(?:=(.*))?", re.DOTALL)
"""A setting written with dashes, like an option."""


class Parser(argparse.ArgumentParser):
    """The argument parser of all commands and subcommands.

    The description and the epilog are wrapped, except for lines that begin with one of `_SEPARATE_LINE_PREFIXES`.
    The help text ends with the exit codes of the command, `codes`.
    """

    def __init__(
        self,
        prog: str | None = None,
        *,
        codes: Mapping[ExitCode, str] | None = None,
        description: str | None = None,
        epilog: str = "",
        **rest: Any,
    ):
        text_after_options = "\n\n".join(part for part in (epilog.strip("\n"), exit_codes(codes or {})) if part)
        super().__init__(
            prog,
            description=wrapped(description or ""),
            epilog=wrapped(text_after_options),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **rest,
        )
        for name in (None, "store"):
            self.register("action", name, _StoreOnce)
        self.options_seen: set[str] = set()
        """Destinations of the options with one value that have been parsed so far."""
        self.register("type", Path, lambda text: Path(path_argument(text)))
        self.add_argument("--debug", action="store_true", help="show a traceback with an error")
        self._takes_settings = False

    def add_settings(self) -> None:
        """Adds an argument for key=value settings, which are parsed into `overrides`."""
        self.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override those of the file")
        self._takes_settings = True

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.options_seen.clear()
        return super().parse_known_args(args, namespace)

    def parse_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._takes_settings:
            _refuse_dashes(list(args or ()))
        options = super().parse_intermixed_args(args, namespace)
        _note_replaced_settings(getattr(options, "overrides", ()))
        return options

    def format_help(self) -> str:
        return fitted(super().format_help())  # argparse does not wrap a custom usage

    def error(self, message: str) -> NoReturn:
        """Raises `ConfigError` for any error of argparse."""
        advice = f"{self.prog} --help shows what it takes"
        unknown = re.match(r"unrecognized arguments: (\S+)", message)
        if unknown:
            advice = (self._takes_settings and _as_setting(unknown[1])) or advice
        raise ConfigError(f"{message}; {advice}")


class _StoreOnce(argparse.Action):
    """Stores the value of an option, and refuses a second one, because argparse itself would silently keep the last."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if option is not None:
            assert isinstance(parser, Parser)
            if self.dest in parser.options_seen:
                raise ConfigError(f"argument {option}: given twice, and it takes one value; leave one of them out")
            parser.options_seen.add(self.dest)
        setattr(namespace, self.dest, values)


def _note_replaced_settings(settings: Sequence[str]) -> None:
    """Shows a note for each setting that a later one replaces, such as when a script appends a user's settings to its
    own."""
    values: dict[str, str] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        if values.get(key, value) != value:
            remark(f"{shortened(f'{key}={values[key]}')} is replaced by {shortened(setting)}, which comes later")
        values[key] = value


def expect_separator(arguments: Sequence[str], example: str) -> None:
    """Raises `ConfigError` if a launcher's own arguments, which come before the `--`, include some of
    jaxmnt.train's."""
    for argument in arguments:
        if argument == "--config" or argument.startswith("--config=") or re.match(r"[a-z]\w*(\.\w+)*=", argument):
            raise ConfigError(f"{argument}: the arguments of jaxmnt.train come after a lone --, such as: {example}")


def path_argument(text: str) -> str:
    """Returns the path of an option, with `~` expanded, because bash does not expand it in `--output=~/a`."""
    from jaxmnt.config.load import expand_home

    if not text.startswith(("~", "hf:~")):
        return text
    try:
        return expand_home(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{shortened(repr(text))}: {error}") from error


def exit_codes(codes: Mapping[ExitCode, str]) -> str:
    """Returns the section of a help text that lists the exit codes."""
    lines = [f"  {int(code):<4}{text}" for code, text in sorted(codes.items())]
    return "\n".join(["exit codes:", *lines]) if lines else ""


def wrapped(text: str) -> str:
    """Wraps the paragraphs of a text to the terminal. Commands and lines that begin with a space stay separate
    lines."""
    lines: list[str] = []
    for line in text.split("\n"):
        if (
            lines
            and lines[-1]
            and line
            and not lines[-1].startswith(_SEPARATE_LINE_PREFIXES)
            and not line.startswith(_SEPARATE_LINE_PREFIXES)
        ):
            lines[-1] += f" {line}"
        else:
            lines.append(line)
    return "\n".join(part for line in lines for part in _fitted(line))


def fitted(text: str) -> str:
    """Wraps each line of a text to the terminal."""
    return "\n".join(part for line in text.split("\n") for part in _fitted(line))


def width() -> int:
    """Returns the number of columns of the terminal, which the variable COLUMNS overrides; at least 40."""
    return max(_MIN_COLUMNS, shutil.get_terminal_size().columns)


def _fitted(line: str) -> list[str]:
    """Wraps a line if it is too long. Continuation lines are indented to its second column, or like the line itself."""
    if len(line) <= width():
        return [line.rstrip()]
    if columns := re.match(r" *\S+ {2,}", line):
        indent = len(columns[0])
    else:
        indent = 4 if line.startswith(("usage: ", "python -m ")) else len(line) - len(line.lstrip())
    return textwrap.wrap(line, width(), subsequent_indent=" " * indent, break_on_hyphens=False)


def _before_separator(arguments: list[str]) -> list[str]:
    """Returns the arguments before a lone `--`."""
    return arguments[: arguments.index("--")] if "--" in arguments else arguments


def _refuse_dashes(arguments: list[str]) -> None:
    """Raises `ConfigError` for a setting that is written like an option."""
    options = _before_separator(arguments)
    for argument, following in zip(options, [*options, ""][1:], strict=True):
        if match := _SETTING_WITH_DASHES.fullmatch(argument):
            key, value = match[1], match[2] or "VALUE"
            if match[2] is None and following and "=" not in following:
                value = following
            raise ConfigError(f"argument {argument!r}: a setting has no dashes; write {key}={value}")


def _as_setting(argument: str) -> str:
    """Returns advice if an unknown option is the name of a setting, or a common synonym for one; otherwise an empty
    text."""
    from jaxmnt.config.explain import setting_for

    name, _, value = argument.lstrip("-").partition("=")
    setting = setting_for(name.replace("-", "_"))
    return f"settings have no dashes: write {setting.key}={value or 'VALUE'}" if setting else ""


def write_file(path: Path, text: str) -> None:
    """Writes an output file of a command, completely or not at all. Raises `ConfigError` if that is not possible."""
    from jaxmnt.storage import publish

    try:
        publish(path, text)
    except (OSError, ValueError) as error:  # ValueError for a path without a name
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{printable(str(path))} cannot be written: {reason}; give another path") from error


def run_command(main: Callable[[list[str]], int]) -> NoReturn:
    """Runs a command's `main` and ends the process with its exit code, turning errors into messages.

    With `--debug` anywhere in the arguments before a lone `--`, the traceback of a `UserError` is also shown, and so is
    the message of JAX's CUDA plugin about a missing driver.
    """
    guard()
    arguments = sys.argv[1:]
    debug = "--debug" in _before_separator(arguments)
    if not debug:
        quiet_plugin.install()
    sys.exit(final_exit_code(report(lambda: main(arguments), debug=debug)))
