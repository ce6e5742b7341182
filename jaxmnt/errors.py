"""What a user sees when something is wrong, and the exit codes that tell a scheduler what to do.

A `UserError` is something that a person can cause and mend: it is shown as one message that says what is
wrong, where, and what to do, without a traceback. Anything else is a fault of ours and keeps its traceback.
"""

import errno
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Self

_LONGEST_SHOWN = 80
"""Characters of a text from outside that are shown."""


_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a disk that is full, wherever they are met."""


class ExitCode(IntEnum):
    """The codes that every command may end with. Later versions add to this list and do not change it."""

    FINISHED = 0
    FAILURE = 1
    CONFIG = 2  # the config or the arguments are wrong: do not retry
    PREFLIGHT = 3  # a check of the hosts and their network failed: retry without the host that it names
    PEER = 4  # another process failed or went missing
    STOPPED = 75  # stopped early with a checkpoint: run me again


class UserError(Exception):
    """Something that a user can mend. The text is the whole message."""

    exit_code = ExitCode.FAILURE
    hosts: Sequence[str] = ()
    processes: Sequence[int] = ()
    """Those at fault, if they are known."""

    def blaming(self, *, hosts: Sequence[str] = (), processes: Sequence[int] = ()) -> Self:
        self.hosts, self.processes = hosts, processes
        return self


class ConfigError(UserError):
    """The config, the arguments or the data that they name cannot work. Retrying will not help."""

    exit_code = ExitCode.CONFIG


class UnreadableError(ConfigError):
    """What the config names cannot be read. With a run that has read it before this may pass: `run/rundir.py`."""


class PreflightError(UserError):
    """A host, or the network between hosts, is not as a run needs it. Without the host that is named it may be."""

    exit_code = ExitCode.PREFLIGHT


class PeerError(UserError):
    """Another process of this run failed, is missing or does not answer."""

    exit_code = ExitCode.PEER


def closest(name: str, known: list[str]) -> str | None:
    """Returns the known name that is most like this one; None if none is like it."""
    import difflib

    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.6)), None)


def nearest(name: str, known: list[str]) -> str:
    """A phrase naming the closest known name, or the known names if none is close."""
    close = closest(name, known)
    return f"did you mean {close}?" if close else f"known: {', '.join(known)}"


def printable(text: str) -> str:
    r"""`text` with all that is not shown as itself written as escapes, such as \x1b and \n.

    For names that come from files, the environment or the network: a terminal would obey what they hold.
    """
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def counted(number: int, singular: str, plural: str) -> str:
    """Returns a number with the form of a noun that goes with it, such as 1 file and 2 files."""
    return f"{number:,} {singular if number == 1 else plural}"


def listed(items: Sequence[object], most: int = 8) -> str:
    """Returns the first items with commas between them, and how many more there are."""
    return ", ".join(map(str, items[:most])) + (f" and {len(items) - most} more" if len(items) > most else "")


def how_to_install(extra: str) -> str:
    """Returns what installs an extra of jaxmnt in a clone, as the README has it, for the end of an error message."""
    return f'install it with: pip install -c constraints.txt -e ".[{extra}]"'


def shortened(text: str) -> str:
    """A text from outside, fit to be shown."""
    shown = printable(text[:_LONGEST_SHOWN])
    return shown + "…" if len(text) > _LONGEST_SHOWN else shown


def printable_lines(text: str) -> str:
    """A text of several lines that another process has told, without what a terminal would obey."""
    return "\n".join(printable(line) for line in text.splitlines())


def remark(text: str) -> None:
    """A line for people, on stderr. Where nobody takes it any more, nothing is shown and nothing ends."""
    with suppress(OSError, ValueError):
        _say(text)


def _say(text: str) -> None:
    """Writes a line to stderr. On a terminal it takes the place of a status line that may stand there."""
    erase = "\r\x1b[K" if sys.stderr.isatty() else ""
    print(f"{erase}jaxmnt: {text}", file=sys.stderr, flush=True)


def error_of(code: int, text: str) -> UserError:
    """The error of this exit code that another process has told us of."""
    kinds = {kind.exit_code: kind for kind in (ConfigError, PreflightError, PeerError)}
    return kinds.get(ExitCode(code), UserError)(printable_lines(text))


def code_of(error: BaseException) -> ExitCode:
    """The exit code of a process that ends with `error`."""
    return error.exit_code if isinstance(error, UserError) else ExitCode.FAILURE


def summary(error: BaseException) -> str:
    """An error in one line: a user's in its own words, another with its type."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else ""
    if isinstance(error, UserError):
        return text
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def report(action: Callable[[], int], *, debug: bool = False, where: str = "") -> int:
    """Runs `action` and returns its exit code; an error is printed to stderr and becomes an exit code.

    `where` names the process and host when there are several.
    """
    code = ExitCode.FAILURE
    try:
        return int(action())
    except UserError as error:
        if debug:
            traceback.print_exc()
        text, code = f"error: {error}", error.exit_code
    except KeyboardInterrupt:
        text = "interrupted"
    except Exception as error:
        if not debug and isinstance(error, OSError) and error.errno in _FULL and error.filename:
            text = f"error: {printable(str(error.filename))} cannot be written: {error.strerror}; make room"
        else:
            traceback.print_exc()
            text = f"error: {summary(error)}"
    _say(f"{where}: {text}" if where else text)
    return int(code)
