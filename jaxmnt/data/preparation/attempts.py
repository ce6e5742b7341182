"""Files of an attempt at a part of the work: written under names of the attempt, and published if nobody has yet.

A part may be prepared twice at once, as when a job is started again while its first process is still alive. All
attempts at a part write the same bytes, so the first to finish a file publishes it, and the others take theirs away.
"""

import errno
import os
import re
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from jaxmnt.data.manifest import SPLITS
from jaxmnt.data.store import file_digest
from jaxmnt.errors import UserError

NAME_OF_ATTEMPT = r"[A-Za-z0-9_-]{1,64}\.[0-9]{1,10}\.[0-9a-f]{8}"
"""The host, the process and a random number."""

_OF_ATTEMPT = re.compile(r".+\.(?P<host>[A-Za-z0-9_-]{1,64})\.(?P<process>[0-9]{1,10})\.[0-9a-f]{8}\.tmp")
_WITHOUT_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""What file systems answer that have no hard links."""


class Attempt:
    """One attempt, in a process of its own or beside others in one."""

    def __init__(self, work: Path):
        self._work = work
        self._name = f"{_host()}.{os.getpid()}.{secrets.token_hex(4)}"

    def temporary(self, path: Path) -> Path:
        """Returns where to write the file that is to be published as `path`."""
        prefix = f"{path.parent.name}-" if path.parent.name in SPLITS else ""
        return self._work / f"{prefix}{path.name}.{self._name}.tmp"

    @contextmanager
    def writing(self, path: Path, replace: bool = False) -> Iterator[BinaryIO]:
        """Publishes what is written inside, whole and durably; with `replace` in place of what is there."""
        with self.temporary(path).open("xb") as stream:
            yield stream
            self.publish(stream, path, replace)

    def publish(self, stream: BinaryIO, path: Path, replace: bool = False) -> None:
        """Gives a file that is written whole its name, durably; with `replace` in place of what is there.

        Else a file of another attempt stays. Raises `UserError` if it holds other bytes.
        """
        stream.flush()
        os.fsync(stream.fileno())
        temporary = self.temporary(path)
        if replace:
            temporary.replace(path)
            return
        try:
            _link(temporary, path)
        except FileExistsError:
            if file_digest(temporary) != file_digest(path):
                raise UserError(
                    f"--output: {path} was written by another attempt and holds other bytes; remove the output and "
                    "prepare the data again"
                ) from None
        temporary.unlink(missing_ok=True)

    def remove_unpublished(self) -> None:
        """Removes what this attempt has written and not published."""
        for path in self._work.glob(f"*.{self._name}.tmp"):
            path.unlink(missing_ok=True)


def remove_leftovers(work: Path) -> None:
    """Removes what killed attempts on this host have left. Those on other hosts may still be at work.

    Whoever calls this holds the lock, so an attempt with the number of this process is one of an earlier process.
    """
    for path in work.glob("*.tmp"):
        attempt = _OF_ATTEMPT.fullmatch(path.name)
        if (
            attempt
            and attempt["host"] == _host()
            and not path.is_symlink()
            and not _is_running(int(attempt["process"]))
        ):
            path.unlink(missing_ok=True)


def _link(temporary: Path, path: Path) -> None:
    """Raises `FileExistsError` if there is a file of this name."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _WITHOUT_LINKS:
            raise
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        temporary.rename(path)  # the bytes are the same, should another attempt be as fast


def _is_running(process: int) -> bool:
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it is another user's
        return True
    return True


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:64] or "host"
