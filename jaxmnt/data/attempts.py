"""Writes the files of an attempt to prepare a part under temporary names, and publishes those that are first to be
complete.

Two processes may prepare the same part at the same time, for example if a job is restarted while its first process is
still alive. All attempts at a part write the same bytes, so the first to complete a file publishes it, and the others
remove theirs.
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

from jaxmnt.data.manifest import SPLITS, file_digest
from jaxmnt.errors import UserError

NAME_OF_ATTEMPT = r"[A-Za-z0-9_-]{1,64}\.[0-9]{1,10}\.[0-9a-f]{8}"
"""Pattern of an attempt's name: the host, the process id and a random number."""

_TEMPORARY_FILE = re.compile(r".+\.(?P<host>[A-Za-z0-9_-]{1,64})\.(?P<process>[0-9]{1,10})\.[0-9a-f]{8}\.tmp")
_NO_HARD_LINK_ERRORS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""Error numbers with which file systems refuse to create a hard link."""


class Attempt:
    """An attempt to prepare a part. A process may make several attempts at a time."""

    def __init__(self, work: Path):
        self._work = work
        self._name = f"{_host()}.{os.getpid()}.{secrets.token_hex(4)}"

    def temporary(self, path: Path) -> Path:
        """Returns the temporary path of a file that will be published as `path`."""
        prefix = f"{path.parent.name}-" if path.parent.name in SPLITS else ""
        return self._work / f"{prefix}{path.name}.{self._name}.tmp"

    @contextmanager
    def writing(self, path: Path, replace: bool = False) -> Iterator[BinaryIO]:
        """Opens a file for writing. On exit it is published as `path`, complete and durable. `replace` is that of
        `publish`."""
        with self.temporary(path).open("xb") as stream:
            yield stream
            self.publish(stream, path, replace)

    def publish(self, stream: BinaryIO, path: Path, replace: bool = False) -> None:
        """Publishes a complete file under its final name, durably.

        If a file of that name exists, `replace` replaces it. Without `replace` the existing file, which another attempt
        has published, is kept. Raises `UserError` if its contents differ.
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
        """Removes the files that this attempt has written but not published."""
        for path in self._work.glob(f"*.{self._name}.tmp"):
            path.unlink(missing_ok=True)


def remove_leftovers(work: Path) -> None:
    """Removes the temporary files of killed attempts on this host. Files of attempts on other hosts are left alone,
    because those attempts may still be running.

    The caller holds the lock of the output, so if a file has the id of this process, an earlier process with the same
    id wrote it.
    """
    for path in work.glob("*.tmp"):
        attempt = _TEMPORARY_FILE.fullmatch(path.name)
        if (
            attempt
            and attempt["host"] == _host()
            and not path.is_symlink()
            and not _is_running(int(attempt["process"]))
        ):
            path.unlink(missing_ok=True)


def _link(temporary: Path, path: Path) -> None:
    """Gives a file its final name. Raises `FileExistsError` if a file of that name exists."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_HARD_LINK_ERRORS:
            raise
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        temporary.rename(path)  # a race with another attempt is harmless, because the bytes are the same


def _is_running(process: int) -> bool:
    """Returns True if a process other than this one has this process id."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # the process belongs to another user
        return True
    return True


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:64] or "host"
