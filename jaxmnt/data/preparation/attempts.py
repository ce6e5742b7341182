"""Files of one attempt at a part: written under temporary names, and published unless another attempt was faster.

A part may be prepared twice at once, for example if a job is restarted while its first process is still alive. All
attempts at a part write the same bytes, so the first to finish a file publishes it, and the others remove theirs.
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
"""Pattern of an attempt's name: the host, the process id and a random number."""

_TEMPORARY_FILE = re.compile(r".+\.(?P<host>[A-Za-z0-9_-]{1,64})\.(?P<process>[0-9]{1,10})\.[0-9a-f]{8}\.tmp")
_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""Error numbers of file systems without hard links."""


class Attempt:
    """One attempt at a part. A process may make several at a time."""

    def __init__(self, work: Path):
        self._work = work
        self._name = f"{_host()}.{os.getpid()}.{secrets.token_hex(4)}"

    def temporary(self, path: Path) -> Path:
        """Returns the temporary path of the file that will be published as `path`."""
        prefix = f"{path.parent.name}-" if path.parent.name in SPLITS else ""
        return self._work / f"{prefix}{path.name}.{self._name}.tmp"

    @contextmanager
    def writing(self, path: Path, replace: bool = False) -> Iterator[BinaryIO]:
        """Opens a file that is published completely and durably on exit; `replace` replaces an existing file."""
        with self.temporary(path).open("xb") as stream:
            yield stream
            self.publish(stream, path, replace)

    def publish(self, stream: BinaryIO, path: Path, replace: bool = False) -> None:
        """Publishes a complete file under its name, durably. `replace` replaces an existing file.

        Without it a file of another attempt is kept. Raises `UserError` if that has other contents.
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
    """Removes temporary files of killed attempts on this host. Attempts on other hosts may still be running.

    The caller holds the lock, so an attempt with the id of this process belongs to an earlier process.
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
    """Gives the file its final name without replacing. Raises `FileExistsError` if that name exists."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        temporary.rename(path)  # racing with another attempt is harmless: the bytes are the same


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
