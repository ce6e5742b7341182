"""Authenticates the processes of a run: both ends of a connection prove to each other that they have the run's key.

Process 0 greets with a random nonce; the client answers with a nonce of its own and the HMAC of both; process 0 answers
with another HMAC of both. Therefore the key itself is never sent, an overheard answer is not valid on another
connection, and no answer can be reflected to its sender. All three messages have a fixed length, and nothing else is
read from a connection until they have been exchanged.
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
_FILE_TIMEOUT_SECONDS = 5.0
"""Time for a network file system to show a file that another host has written."""

_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
"""Flags that follow no symbolic link, and do not wait for the writer of a named pipe."""

_PREFIX = b"jaxmnt 1 "
_NONCE_BYTES = 32
GREETING_BYTES = len(_PREFIX) + 2 * _NONCE_BYTES + 1
PROOF_BYTES = 2 * 2 * _NONCE_BYTES + 1
_REPLY_BYTES = 2 * _NONCE_BYTES + 1
REFUSAL = b"another key".ljust(_REPLY_BYTES - 1) + b"\n"
_CLIENT, _SERVER = b"one who connects", b"process 0"
"""Names of the senders, which each proof signs, so that a proof from one end is not valid as one from the other."""


class RefusedError(Exception):
    """Raised when process 0 has another key."""


class StrangerError(ValueError):
    """Raised when the peer that answers is not process 0 of this run."""


def run_key(run_dir: Path, environment: Mapping[str, str] = os.environ) -> bytes:
    """Returns the key from the environment, or else from the run directory, where the first process creates it.

    Raises `ConfigError` if there is no key and none can be created. The message never contains the key.
    """
    key_text = environment.get(RUN_KEY, "").strip()
    if key_text and not _KEY.fullmatch(key_text):
        raise ConfigError(
            f"{RUN_KEY}: must be 64 hexadecimal digits; set it to the same value in every process, such as the output "
            "of openssl rand -hex 32"
        )
    if key_text:
        return bytes.fromhex(key_text)
    path = run_dir / KEY_FILE
    try:
        if not path.is_symlink() and not path.exists():
            _create_key_file(path)
        return _read_key_file(path)
    except OSError as error:
        raise ConfigError(
            f"run.dir: cannot read or create the run's key {path}: {error.strerror or error}; fix that for all "
            f"processes of the run, or set {RUN_KEY} to the same value in all of them"
        ) from error


def _create_key_file(path: Path) -> None:
    """Creates the key file atomically. The first process to create it decides the key."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = f"{secrets.token_hex(32)}\n".encode()
    temporary = path.with_name(f".{KEY_FILE}.{secrets.token_hex(8)}")
    write_new(temporary, content, mode=0o600)
    # A hard link appears with its complete content, and cannot be created if another process was first.
    try:
        os.link(temporary, path)
    except FileExistsError:
        return
    except OSError:  # a file system without links
        with suppress(FileExistsError):
            write_new(path, content, mode=0o600)
    finally:
        temporary.unlink(missing_ok=True)


def _read_key_file(path: Path) -> bytes:
    deadline = time.monotonic() + _FILE_TIMEOUT_SECONDS
    while True:
        with suppress(FileNotFoundError), os.fdopen(os.open(path, _OPEN_FLAGS), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(200).decode("ascii", "replace").strip() if stat.S_ISREG(mode) else ""
            if _KEY.fullmatch(text):
                _restrict_to_owner(path, mode)
                return bytes.fromhex(text)
        if time.monotonic() > deadline:
            raise ConfigError(
                f"run.dir: {path} holds no key (64 hexadecimal digits); remove it while no process of the run is "
                "running, and start again"
            )
        time.sleep(0.1)


def _restrict_to_owner(path: Path, mode: int) -> None:
    """Removes the permissions of other users from the key file, or tells the user to do so."""
    if mode & 0o077:
        with suppress(OSError):  # another user's file, or a file system without modes
            path.chmod(0o600)
            mode = path.stat().st_mode
    if mode & 0o077:
        remark(f"note: other users can read the run's key: run chmod 600 {path}")


# Process 0's side.


def new_nonce() -> bytes:
    return secrets.token_bytes(_NONCE_BYTES)


def greeting(nonce: bytes) -> bytes:
    return _PREFIX + nonce.hex().encode() + b"\n"


def is_proof(message: bytes) -> bool:
    """Returns True if a message has the form of a proof, which means that it comes from a process of some run."""
    return re.fullmatch(rb"[0-9a-f]{128}\n", message) is not None


def is_proof_prefix(message: bytes) -> bool:
    """Returns True if a message is the incomplete beginning of a proof."""
    return len(message) < PROOF_BYTES and re.fullmatch(rb"[0-9a-f]*", message) is not None


def answer_to(key: bytes, nonce: bytes, message: bytes) -> bytes | None:
    """Returns process 0's answer to a client's proof; None if the message does not prove that the client has the key.

    `nonce` is the one that the greeting sent.
    """
    if not is_proof(message):
        return None
    client_nonce = bytes.fromhex(message[:64].decode())
    proof = message[64:128]
    if not hmac.compare_digest(proof, _proof(key, _CLIENT, nonce, client_nonce)):
        return None
    return _proof(key, _SERVER, nonce, client_nonce) + b"\n"


# The client's side.


def prove(connection: socket.socket, key: bytes, seconds: float) -> None:
    """Proves to process 0 that this process has the key, and verifies that process 0 has it, too.

    Raises `RefusedError` if process 0 replies that it has another key, `OSError` if it disconnects or does not reply in
    time, and `StrangerError` if another program answers or no greeting arrives in time.
    """
    deadline = time.monotonic() + seconds
    try:
        greeting_line = _receive_exactly(connection, GREETING_BYTES, deadline)
    except TimeoutError as error:
        raise StrangerError("something else answers on that port, and sends no greeting") from error
    if not re.fullmatch(re.escape(_PREFIX) + rb"[0-9a-f]{64}\n", greeting_line):
        raise StrangerError("something else answers on that port")
    server_nonce = bytes.fromhex(greeting_line[len(_PREFIX) : -1].decode())
    client_nonce = new_nonce()
    connection.sendall(client_nonce.hex().encode() + _proof(key, _CLIENT, server_nonce, client_nonce) + b"\n")
    reply = _receive_exactly(connection, _REPLY_BYTES, deadline)
    if reply == REFUSAL:
        raise RefusedError
    if not hmac.compare_digest(reply, _proof(key, _SERVER, server_nonce, client_nonce) + b"\n"):
        raise StrangerError("what answers on that port does not have the run's key")


def _proof(key: bytes, sender: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    return hmac.new(key, sender + server_nonce + client_nonce, "sha256").hexdigest().encode()


def _receive_exactly(connection: socket.socket, count: int, deadline: float) -> bytes:
    received = b""
    while len(received) < count:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        chunk = connection.recv(count - len(received))
        if not chunk:
            raise ConnectionResetError("it closed the connection without an answer")
        received += chunk
        # A peer that sends single bytes would otherwise never hit the timeout of the socket.
        if time.monotonic() > deadline:
            raise TimeoutError("it is too slow")
    return received
