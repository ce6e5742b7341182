"""Who may take part: the key of the run, and how the two ends of a connection show each other that they have it.

Process 0 greets with a number that it makes up; who has connected answers with a number of its own and the HMAC of
both; process 0 answers with another HMAC of both. So the key itself is never sent, an answer that was overheard fits no
other connection, and none can be sent back to where it came from. All of it has a fixed length, and nothing else is
read from a connection before.
"""

import hmac
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from jaxmnt.errors import ConfigError, remark
from jaxmnt.storage import write_new

RUN_KEY, KEY_FILE = "JAXMNT_RUN_KEY", "run.key"
RUN_KEY_BYTES = 32
_KEY = re.compile(r"[0-9a-fA-F]{64}")
_APPEARS_SECONDS = 5.0
"""A network file system may show what another host has written only after a while."""

_PLAINLY = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
"""Through no link, and without waiting for whoever may write into a pipe."""

_PREFIX = b"jaxmnt 1 "
_NONCE_BYTES = 32
GREETING_BYTES = len(_PREFIX) + 2 * _NONCE_BYTES + 1
PROOF_BYTES = 2 * 2 * _NONCE_BYTES + 1
_REPLY_BYTES = 2 * _NONCE_BYTES + 1
REFUSAL = b"another key".ljust(_REPLY_BYTES - 1) + b"\n"


class RefusedError(Exception):
    """Process 0 has another key."""


class StrangerError(ValueError):
    """What answers is no process 0 of this run."""


def run_key(run_dir: Path, environment: Mapping[str, str] = os.environ) -> bytes:
    """The key that the launcher has given, else that of the run directory, which whoever comes first makes.

    Raises `ConfigError` if there is none and none can be made. What it says never shows the key.
    """
    given = environment.get(RUN_KEY, "").strip()
    if given and not _KEY.fullmatch(given):
        raise ConfigError(
            f"{RUN_KEY}: is not 64 hexadecimal digits; give every process the same, such as from openssl rand -hex 32"
        )
    if given:
        return bytes.fromhex(given)
    path = run_dir / KEY_FILE
    try:
        if not path.is_symlink() and not path.exists():
            _make(path)
        return _read(path)
    except OSError as error:
        raise ConfigError(
            f"run.dir: the run's key {path} cannot be read or made: {error.strerror or error}; fix that for all "
            f"processes of the run, or set {RUN_KEY} to the same value in all of them"
        ) from error


def _make(path: Path) -> None:
    """Whole or not at all, and the first one counts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content, temporary = f"{secrets.token_hex(32)}\n".encode(), path.with_name(f".{KEY_FILE}.{secrets.token_hex(8)}")
    write_new(temporary, content, mode=0o600)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return
    except OSError:  # a file system without links
        with suppress(FileExistsError):
            write_new(path, content, mode=0o600)
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: Path) -> bytes:
    deadline = time.monotonic() + _APPEARS_SECONDS
    while True:
        with suppress(FileNotFoundError), os.fdopen(os.open(path, _PLAINLY), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(200).decode("ascii", "replace").strip() if stat.S_ISREG(mode) else ""
            if _KEY.fullmatch(text):
                _keep_to_the_owner(path, mode)
                return bytes.fromhex(text)
        if time.monotonic() > deadline:
            raise ConfigError(
                f"run.dir: {path} holds no key (64 hexadecimal digits); remove it while no process of the run is "
                "there, and start again"
            )
        time.sleep(0.1)


def _keep_to_the_owner(path: Path, mode: int) -> None:
    if mode & 0o077:
        with suppress(OSError):  # another's file, or a file system without modes
            path.chmod(0o600)
            mode = path.stat().st_mode
    if mode & 0o077:
        remark(f"note: others may read the run's key, {path}: chmod 600 it")


# Process 0's side.


def new_nonce() -> bytes:
    return secrets.token_bytes(_NONCE_BYTES)


def greeting(nonce: bytes) -> bytes:
    return _PREFIX + nonce.hex().encode() + b"\n"


def is_proof(said: bytes) -> bool:
    """Whether this has the form of one: if so, it comes from a process of a run, this one or another."""
    return re.fullmatch(rb"[0-9a-f]{128}\n", said) is not None


def may_become_a_proof(said: bytes) -> bool:
    """Whether it is the beginning of one."""
    return len(said) < PROOF_BYTES and re.fullmatch(rb"[0-9a-f]*", said) is not None


def answer_to(key: bytes, nonce: bytes, said: bytes) -> bytes | None:
    """What process 0 answers to the answer to its greeting; None if that proves nothing."""
    if not is_proof(said):
        return None
    theirs, proof = bytes.fromhex(said[:64].decode()), said[64:128]
    if not hmac.compare_digest(proof, _proof(key, b"one who connects", nonce, theirs)):
        return None
    return _proof(key, b"process 0", nonce, theirs) + b"\n"


# The side of those who connect.


def prove(connection: socket.socket, key: bytes, seconds: float) -> None:
    """Shows process 0 that this process has the key, and sees that it has it, too.

    Raises `RefusedError` if it says that it has another, `OSError` if it goes away, and `StrangerError` if it is
    somebody else or says nothing in time.
    """
    deadline = time.monotonic() + seconds
    try:
        said = _exactly(connection, GREETING_BYTES, deadline)
    except TimeoutError as error:
        raise StrangerError("something else answers on that port, and waits to be asked") from error
    if not re.fullmatch(re.escape(_PREFIX) + rb"[0-9a-f]{64}\n", said):
        raise StrangerError("something else answers on that port")
    nonce, own = bytes.fromhex(said[len(_PREFIX) : -1].decode()), new_nonce()
    connection.sendall(own.hex().encode() + _proof(key, b"one who connects", nonce, own) + b"\n")
    reply = _exactly(connection, _REPLY_BYTES, deadline)
    if reply == REFUSAL:
        raise RefusedError
    if not hmac.compare_digest(reply, _proof(key, b"process 0", nonce, own) + b"\n"):
        raise StrangerError("what answers on that port does not have the run's key")


def _proof(key: bytes, who: bytes, nonce: bytes, theirs: bytes) -> bytes:
    return hmac.new(key, who + nonce + theirs, "sha256").hexdigest().encode()


def _exactly(connection: socket.socket, count: int, deadline: float) -> bytes:
    received = b""
    while len(received) < count:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        chunk = connection.recv(count - len(received))
        if not chunk:
            raise ConnectionResetError("it closed the connection without an answer")
        received += chunk
        if time.monotonic() > deadline:
            raise TimeoutError("it is too slow")
    return received
