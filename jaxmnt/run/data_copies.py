"""Determines which processes read the same files of the data as process 0, so that only process 0 checks them.

A run on a thousand hosts would otherwise look up every file of a shared file system a thousand times at its start.
"""

import json
import socket
from typing import NamedTuple

from jaxmnt.data.manifest import MANIFEST
from jaxmnt.data.sources import Sources, check_sources
from jaxmnt.data.store import PreparedData
from jaxmnt.distributed.coordination import broadcast
from jaxmnt.distributed.identity import Identity
from jaxmnt.errors import ConfigError, PreflightError, UnreadableError, UserError
from jaxmnt.storage import json_digest
from jaxmnt.strict_json import json_text


class FirstCopy(NamedTuple):
    """The answer of process 0 to the question whether other processes read its files."""

    is_own: bool
    """True if this process reads the same files."""
    has_indices: bool
    """True if the data has all indices that the run needs."""


def compare_copies(sources: Sources, has_indices: bool, identity: Identity) -> FirstCopy:
    """Returns what process 0 says about its files. All processes call this.

    `has_indices` is used in process 0 only.
    """
    files = _files_digest(sources)
    message = json_text([files, has_indices]) if identity.process_id == 0 else None
    first_files, first_has_indices = json.loads(broadcast("the files of the data", message, identity))
    return FirstCopy(files == first_files, first_has_indices)


def check_own_copy(sources: Sources, identity: Identity) -> None:
    """Checks the files of the data on a host that does not read those of process 0. Raises `PreflightError`, which
    blames this host."""
    try:
        check_sources(sources)
    except ConfigError as error:
        raise blaming_this_host(PreflightError(str(error)), identity) from error


def blaming_this_host(error: PreflightError, identity: Identity) -> UserError:
    """Returns the error, with this host and this process as those at fault."""
    return error.blaming(hosts=[socket.gethostname()], processes=[identity.process_id])


def _files_digest(sources: Sources) -> str:
    """Returns a digest that is the same in two processes only if they read the same manifest files.

    The hosts of a shared file system see the same inode, with the same times. The time of the last change of an inode
    cannot be copied with a file. Some file systems number inodes on each host; then the digests differ, and each
    process checks the files.
    """
    parts = [part for part in (*sources.parts.values(), *sources.eval_sets.values()) if isinstance(part, PreparedData)]
    facts = []
    for part in parts:
        path = part.path / MANIFEST
        try:
            status = path.stat()
        except OSError as error:
            raise UnreadableError(
                f"data.path: {path} cannot be read ({error.strerror}); check that it is mounted and readable"
            ) from error
        facts.append([status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns])
    return json_digest(facts)
