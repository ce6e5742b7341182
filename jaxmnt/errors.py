"""Error messages for users, and exit codes that tell a scheduler what to do.

A `UserError` is something that a user can cause and fix: it is shown as one message that says what is wrong, where, and
what to do, without a traceback. Any other exception is a bug of ours and keeps its traceback.
"""

import errno
import functools
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Self

_MAX_SHOWN_CHARACTERS = 80
"""Maximum number of characters of an external text that a message shows."""

_DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers that mean that a disk or a quota is full."""


class ExitCode(IntEnum):
    """Exit codes of all commands. Later versions may add codes, but never change them."""

    FINISHED = 0
    FAILURE = 1
    CONFIG = 2  # the config or the arguments are wrong: do not retry
    PREFLIGHT = 3  # a check of the hosts and their network failed: retry without the host that it names
    PEER = 4  # another process failed or went missing
    STOPPED = 75  # stopped early with a checkpoint: run the command again


class UserError(Exception):
    """An error that the user can fix. Its text is the complete message."""

    exit_code = ExitCode.FAILURE
    hosts: Sequence[str] = ()
    processes: Sequence[int] = ()
    """Hosts and processes at fault, if they are known."""

    def blaming(self, *, hosts: Sequence[str] = (), processes: Sequence[int] = ()) -> Self:
        """Sets the hosts and processes at fault, and returns this error."""
        self.hosts, self.processes = hosts, processes
        return self


class ConfigError(UserError):
    """The config, the arguments, or the data that they name are wrong. Retrying does not help."""

    exit_code = ExitCode.CONFIG


class UnreadableError(ConfigError):
    """Something that the config names cannot be read. If the run has read it before, the failure may be
    temporary (see `run/rundir.py`)."""


class PreflightError(UserError):
    """A host, or the network between hosts, does not meet the requirements of a run. The run may work without that
    host."""

    exit_code = ExitCode.PREFLIGHT


class PeerError(UserError):
    """Another process of this run failed, is missing or does not answer."""

    exit_code = ExitCode.PEER


def closest(name: str, candidates: list[str]) -> str | None:
    """Returns the candidate that is most similar to a name; None if none is similar."""
    import difflib

    return next(iter(difflib.get_close_matches(name, candidates, n=1, cutoff=0.6)), None)


def suggest(name: str, candidates: list[str]) -> str:
    """Returns a phrase for an error message about an unknown name. It suggests the most similar candidate, or lists all
    candidates if none is similar."""
    close = closest(name, candidates)
    return f"did you mean {close}?" if close else f"known: {', '.join(candidates)}"


def printable(text: str) -> str:
    r"""Returns `text` with unprintable characters as escapes, such as \x1b and \n.

    It is meant for names from files, the environment or the network, whose control characters a terminal would execute.
    """
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def counted(number: int, singular: str, plural: str) -> str:
    """Returns a number followed by the singular or plural of a noun, such as 1 file or 2 files."""
    return f"{number:,} {singular if number == 1 else plural}"


def listed(items: Sequence[object], limit: int = 8) -> str:
    """Joins the first `limit` items with commas, and says how many more there are."""
    rest = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(map(str, items[:limit])) + rest


def how_to_install(extra: str) -> str:
    """Returns the command that installs an extra of jaxmnt in a clone, phrased as the end of an error message."""
    return f'install it with: pip install -c constraints.txt -e ".[{extra}]"'


def shortened(text: str) -> str:
    """Returns the first 80 characters of an external text, with unprintable ones as escapes, and … if there are
    more."""
    start = printable(text[:_MAX_SHOWN_CHARACTERS])
    return start + "…" if len(text) > _MAX_SHOWN_CHARACTERS else start


def printable_lines(text: str) -> str:
    """Returns the lines of a text from another process, with every unprintable character except line ends escaped."""
    return "\n".join(printable(line) for line in text.splitlines())


def remark(text: str) -> None:
    """Shows a line to the user, on stderr. If stderr is closed or full, the line is dropped without an error."""
    with suppress(OSError, ValueError):
        _say(text)


@functools.cache
def remark_once(text: str) -> None:
    """Shows a line as `remark` does, but each text only once, because the same files are read repeatedly."""
    remark(text)


def _say(text: str) -> None:
    """Writes a line to stderr. On a terminal, it replaces the status line."""
    erase = "\r\x1b[K" if sys.stderr.isatty() else ""
    print(f"{erase}jaxmnt: {text}", file=sys.stderr, flush=True)


def error_of(code: int, text: str) -> UserError:
    """Returns an error that another process has reported, from its exit code and its text."""
    kinds = {kind.exit_code: kind for kind in (ConfigError, PreflightError, PeerError)}
    return kinds.get(ExitCode(code), UserError)(printable_lines(text))


def code_of(error: BaseException) -> ExitCode:
    """Returns the exit code of a process that ends with `error`."""
    return error.exit_code if isinstance(error, UserError) else ExitCode.FAILURE


def summary(error: BaseException) -> str:
    """Describes an error in one line: a `UserError` by its message alone, any other by its type and message."""
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
        if not debug and isinstance(error, OSError) and error.errno in _DISK_FULL_ERRORS and error.filename:
            text = f"error: {printable(str(error.filename))} cannot be written: {error.strerror}; make room"
        else:
            traceback.print_exc()
            text = f"error: {summary(error)}"
    _say(f"{where}: {text}" if where else text)
    return int(code)
